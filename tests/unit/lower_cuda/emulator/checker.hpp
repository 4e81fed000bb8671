// The events that the emulator reports to the checker of races and misaligned accesses (checker.cpp). Nothing is checked unless
// KVGEN_EMULATOR_CHECKS is defined.
#pragma once
#include <cstdint>

namespace checker {

enum Kind : uint8_t { kRead = 0, kWrite = 1, kAtomicRead = 2, kAtomicUpdate = 3 };  // bit 0: it writes, bit 1: it is atomic

#ifdef KVGEN_EMULATOR_CHECKS

bool set_quiet(bool);  // whether the running code is not the kernel's own; returns the value before
struct Quiet {
  bool kept = set_quiet(true);
  Quiet() = default;
  Quiet(const Quiet&) = delete;
  ~Quiet() { set_quiet(kept); }
};
void begin_launch(bool overlaps);
void declare_constant(const void* begin, long bytes);  // memory that earlier launches do not write
void begin_cta(int rank, int threads);
void resume(int rank, int thread, const char* stack, long stack_bytes);
void end_grid_wait();                    // earlier launches have ended
void synchronize(int first, int count);  // a barrier of some threads of the CTA
void access(const void* pointer, int bytes, Kind kind);  // one instruction, which the hardware demands to be aligned
// An asynchronous copy, which reads and writes at any time before it is waited for. Returns its time, for `arrived`.
uint32_t copy(const void* to, const void* from, int bytes);
void arrived(uint32_t time);
void exchange(const void* counter);  // atom.acq_rel
void fence_barrier_init();
void arrive_cluster(const void* phase, bool releases);  // a relaxed one releases the stores that fence.mbarrier_init has ordered
void wait_cluster(const void* phase);
void arrive_barrier(const void* barrier);
void wait_barrier(const void* barrier);
// A store to another CTA of the cluster, whose mbarrier tells that it has happened.
void send(int rank, const void* pointer, int bytes, const void* barrier);
// The same by a bulk copy from global memory, which releases nothing else.
void copy_bulk(int rank, const void* to, const void* from, int bytes, const void* barrier);
void read_far(int rank, const void* pointer, int bytes);  // of another CTA of the cluster
uint32_t read_later(const void* from, int bytes);         // as `copy`, of a matrix instruction that is waited for

#else

struct Quiet {};
inline bool set_quiet(bool) { return true; }
inline void begin_launch(bool) {}
inline void declare_constant(const void*, long) {}
inline void begin_cta(int, int) {}
inline void resume(int, int, const char*, long) {}
inline void end_grid_wait() {}
inline void synchronize(int, int) {}
inline void access(const void*, int, Kind) {}
inline uint32_t copy(const void*, const void*, int) { return 0; }
inline void arrived(uint32_t) {}
inline void exchange(const void*) {}
inline void fence_barrier_init() {}
inline void arrive_cluster(const void*, bool) {}
inline void wait_cluster(const void*) {}
inline void arrive_barrier(const void*) {}
inline void wait_barrier(const void*) {}
inline void send(int, const void*, int, const void*) {}
inline void copy_bulk(int, const void*, const void*, int, const void*) {}
inline void read_far(int, const void*, int) {}
inline uint32_t read_later(const void*, int) { return 0; }

#endif

}  // namespace checker
