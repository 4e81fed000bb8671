// The number of threads that a caller asks for.
#pragma once

#include <unistd.h>

#include "kvgen/ffi.hpp"

namespace kvgen {

// Raises for more threads than the machine has processors: they would only wait for each other, and a million cannot be started.
inline void check_threads(int64_t count) {
  const int64_t most = sysconf(_SC_NPROCESSORS_ONLN);
  if (count > most)
    ffi::fail("ValueError", "set_threads: %lld threads are more than the machine's %lld processors", (long long)count, (long long)most);
}

inline int64_t parse_threads(const TVMFFIAny* args, int32_t count) {
  if (count != 1 || args[0].type_index != kTVMFFIInt || args[0].v_int64 < 0)
    ffi::fail("TypeError", "set_threads takes one int, at least 0");
  check_threads(args[0].v_int64);
  return args[0].v_int64;
}

}  // namespace kvgen
