// The number of threads of a module.
#pragma once

#include <omp.h>
#include <unistd.h>

#include "kvgen/ffi.hpp"

namespace kvgen {

class Threads {
 public:
  int count() const { return chosen_ > 0 ? chosen_ : omp_get_max_threads(); }

  // set_threads(n). Raises for more threads than the machine has processors: they would only wait for each other, and a million cannot be
  // started.
  int set(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
    return ffi::guard(result, [&](TVMFFIAny&) {
      const ffi::Args a("set_threads", args, count, 1, {kDLCPU, -1}, 1);
      const int64_t n = a.integer(0, "n", 0), most = sysconf(_SC_NPROCESSORS_ONLN);
      if (n > most)
        ffi::fail("ValueError", "set_threads: %lld threads are more than the machine's %lld processors", (long long)n, (long long)most);
      chosen_ = static_cast<int>(n);
      return false;
    });
  }

 private:
  int chosen_ = 0;  // 0: as many as OpenMP says, which torch.set_num_threads governs
};

}  // namespace kvgen
