// Finds data races and misaligned accesses in emulated kernels: a vector clock per thread, and for each word of memory the accesses that a
// later one may race with. g++ calls __tsan_read4 and the like at every access (-fsanitize=thread), and __ubsan_handle_type_mismatch_v1 at
// misaligned ones (-fsanitize=alignment). They are defined here. No sanitizer's library is linked, since ThreadSanitizer's holds 256 threads
// at a time, and knows no shared memory that CTAs use one after the other. This file itself is compiled without sanitizers.
//
// Two accesses race unless CUDA orders them: by __syncwarp and __syncthreads among their threads, by atomics that release and acquire, by
// mbarriers, and by the wait for a copy. Shuffles, votes and MMAs order nothing, and neither does the order in which CTAs are emulated.
#include <pthread.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checker.hpp"

extern "C" __attribute__((visibility("hidden"))) const char __ehdr_start[], _end[];  // of this library in memory

namespace checker {

namespace {

const char* const kNames[] = {"read", "write", "atomic read", "atomic update"};

// An agent of a CTA is one of its threads, or the asynchronous copies of one: thread i's are agent threads + i.
using Times = std::vector<uint32_t>;  // by agent: up to which of its accesses are known to have happened
using Known = std::map<int, Times>;   // by CTA
using Range = std::pair<uintptr_t, uintptr_t>;

struct Access {
  int cta;
  uint32_t time, at;  // at: of the instruction, from the library's begin
  uint16_t agent;
  uint8_t bytes;  // of the word, a bit for each
  Kind kind;
};
struct Shadow {
  using Page = std::array<std::vector<Access>, 256>;
  std::unordered_map<uintptr_t, std::unique_ptr<Page>> pages;

  std::vector<Access>& operator[](uintptr_t address) {
    auto& page = pages[address >> 10];
    if (!page) page = std::make_unique<Page>();
    return (*page)[address >> 2 & 255];
  }
};
struct Thread {
  Times known;                       // of its CTA
  std::shared_ptr<const Known> far;  // of other CTAs
  Known fenced;                      // stores that a relaxed arrival after fence.mbarrier_init releases
  uint32_t copies = 0;
  bool waited = true;  // earlier launches have ended
};
struct Cta {
  int id = 0, size = 0;
  std::vector<Thread> threads;
  Shadow shared;
};

bool quiet = true;
std::map<int, Cta> ctas;  // those of the cluster, by rank
Cta* cta;                 // the one that runs, and its thread
int current;
Shadow global;                                  // of the launch: the next one begins after its end
std::map<std::pair<int, const void*>, Known> released;  // at atomics and barriers: by CTA (-1: global memory) and address
std::set<std::string> reports;
std::string joined_reports;
int launched;  // CTAs
bool overlaps;
Range host_stack, fibre_stack, constants;

Thread& self() { return cta->threads[current]; }
int copier() { return cta->size + current; }
uintptr_t number(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }
bool within(uintptr_t address, const Range& range) { return address >= range.first && address < range.second; }
uint32_t place(const void* return_address) { return static_cast<uint32_t>(number(return_address) - number(__ehdr_start) - 1); }

// A report names an instruction by its place behind an @.
std::string named(Kind kind, uint32_t at) {
  char buffer[40];
  std::snprintf(buffer, sizeof buffer, "%s @%x", kNames[kind], at);
  return buffer;
}
void report(const std::string& found) {
  if (reports.size() < 64) reports.insert(found);
}

// --- knowledge of threads -----------------------------------------------------------------------------------------------

void join(Times& to, const Times& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}
void join(Known& to, const Known& from) {
  for (const auto& [id, times] : from) join(to[id], times);
}
void release(Known& to) {
  Thread& thread = self();
  join(to[cta->id], thread.known);
  if (thread.far) join(to, *thread.far);
  ++thread.known[current];
}
void acquire(const Known& from) {
  Thread& thread = self();
  Known far = thread.far ? *thread.far : Known();
  join(far, from);
  if (const auto mine = far.find(cta->id); mine != far.end()) join(thread.known, mine->second), far.erase(mine);
  thread.far = std::make_shared<const Known>(std::move(far));
}
bool knows(const Thread& thread, const Access& access) {
  if (access.cta == cta->id) return thread.known[access.agent] >= access.time;
  if (!thread.far) return false;
  const auto there = thread.far->find(access.cta);
  return there != thread.far->end() && there->second.size() > access.agent && there->second[access.agent] >= access.time;
}

// --- accesses -----------------------------------------------------------------------------------------------------------

// An agent of the running CTA accesses memory that `shadow` describes.
void record(Shadow& shadow, uintptr_t address, int bytes, Kind kind, int agent, uint32_t time, uint32_t at) {
  const Thread& thread = self();
  for (uintptr_t word = address & ~uintptr_t{3}; word < address + bytes; word += 4) {
    uint8_t mask = 0;
    for (int i = 0; i < 4; ++i) mask |= (word + i >= address && word + i < address + bytes) << i;
    auto& cell = shadow[word];
    size_t kept = 0;
    for (const Access& old : cell) {
      const bool known = knows(thread, old), both_update = (kind & old.kind) == kAtomicUpdate, both_atomic = kind & old.kind & kAtomicRead;
      if (!known && (old.bytes & mask) && ((kind | old.kind) & kWrite) && !both_atomic)
        report(std::string("race in ") + (&shadow == &global ? "global" : "shared") + " memory, " +
               (old.cta == cta->id ? "of one CTA: " : "of two CTAs: ") + named(old.kind, old.at) + " and " + named(kind, at));
      // This access stands for an old one that it comes after, if it conflicts with whatever the old one does. Atomic updates of the same
      // memory come one after the other, because memory is coherent.
      const bool stronger = ((kind & kWrite) || !(old.kind & kWrite)) && (!(kind & kAtomicRead) || (old.kind & kAtomicRead));
      if ((known || both_update) && stronger && !(old.bytes & ~mask)) continue;
      cell[kept++] = old;
    }
    cell.resize(kept), cell.push_back({cta->id, time, at, static_cast<uint16_t>(agent), mask, kind});
  }
}
// Shared memory lies in this library, also where it is static. All memory that is neither there nor on a stack is global.
void touch(const void* pointer, int bytes, Kind kind, uint32_t at, int agent, uint32_t time) {
  const uintptr_t address = number(pointer);
  if (within(address, host_stack) || within(address, fibre_stack)) return;
  const bool shared = within(address, {number(__ehdr_start), number(_end)});
  if (!shared && !self().waited && kind != kAtomicRead && !within(address, constants)) report("global memory before griddepcontrol.wait: " + named(kind, at));
  record(shared ? cta->shared : global, address, bytes, kind, agent, time, at);
}
void touch(const void* pointer, int bytes, Kind kind, uint32_t at) { touch(pointer, bytes, kind, at, current, self().known[current]); }
void aligned(const void* pointer, int bytes, Kind kind, uint32_t at) {
  if (number(pointer) % bytes) report("misaligned " + named(kind, at) + " of " + std::to_string(bytes) + " bytes");
}

}  // namespace

// --- events of the emulator -----------------------------------------------------------------------------------------

bool set_quiet(bool now) { return std::exchange(quiet, now); }
void begin_launch(bool overlaps_) {
  global.pages.clear(), released.clear(), ctas.clear(), launched = 0, overlaps = overlaps_;
  pthread_attr_t attributes;
  void* stack = nullptr;
  size_t size = 0;
  if (pthread_getattr_np(pthread_self(), &attributes)) return;
  pthread_attr_getstack(&attributes, &stack, &size), pthread_attr_destroy(&attributes);
  host_stack = {number(stack), number(stack) + size};
}
void declare_constant(const void* begin, long bytes) { constants = {number(begin), number(begin) + bytes}; }
void begin_cta(int rank, int threads) {
  Cta& made = ctas[rank];
  made = {launched++, threads, std::vector<Thread>(threads), {}};
  for (int i = 0; i < threads; ++i) {
    made.threads[i].known.resize(2 * threads), made.threads[i].known[i] = 1;
    made.threads[i].waited = !overlaps;
  }
}
void resume(int rank, int thread, const char* stack, long stack_bytes) {
  cta = &ctas[rank], current = thread, fibre_stack = {number(stack), number(stack) + stack_bytes};
}
void end_grid_wait() { self().waited = true; }
void synchronize(int first, int count) {
  auto& threads = cta->threads;
  Times all;
  std::shared_ptr<const Known> far;
  for (int i = first; i < first + count; ++i) {
    join(all, threads[i].known);
    if (!threads[i].far || threads[i].far == far) continue;
    Known both = far ? *far : Known();
    join(both, *threads[i].far), far = std::make_shared<const Known>(std::move(both));
  }
  for (int i = first; i < first + count; ++i) threads[i].known = all, threads[i].far = far, ++threads[i].known[i];
}
void access(const void* pointer, int bytes, Kind kind) {
  const uint32_t at = place(__builtin_return_address(0));
  aligned(pointer, bytes, kind, at), touch(pointer, bytes, kind, at);
}
uint32_t copy(const void* to, const void* from, int bytes) {
  const uint32_t at = place(__builtin_return_address(0)), time = ++self().copies;
  aligned(from, bytes, kRead, at), aligned(to, bytes, kWrite, at);
  touch(from, bytes, kRead, at, copier(), time), touch(to, bytes, kWrite, at, copier(), time);
  return time;
}
uint32_t read_later(const void* from, int bytes) {
  const uint32_t at = place(__builtin_return_address(0)), time = ++self().copies;
  aligned(from, bytes, kRead, at), touch(from, bytes, kRead, at, copier(), time);
  return time;
}
void arrived(uint32_t time) {
  uint32_t& known = self().known[copier()];
  known = std::max(known, time);
}
void exchange(const void* counter) {
  Known& there = released[{-1, counter}];
  acquire(there), release(there);
}
void fence_barrier_init() { release(self().fenced); }
void arrive_cluster(const void* phase, bool releases) {
  Known& there = released[{-1, phase}];
  releases ? release(there) : join(there, self().fenced);
}
void wait_cluster(const void* phase) { acquire(released[{-1, phase}]); }
void arrive_barrier(const void* barrier) { release(released[{cta->id, barrier}]); }
void wait_barrier(const void* barrier) { acquire(released[{cta->id, barrier}]); }
void send(int rank, const void* pointer, int bytes, const void* barrier) {
  const uint32_t at = place(__builtin_return_address(0)), time = ++self().copies;
  Cta& other = ctas[rank];
  aligned(pointer, bytes, kWrite, at);
  record(other.shared, number(pointer), bytes, kWrite, copier(), time, at);
  record(other.shared, number(barrier), 8, kAtomicUpdate, current, self().known[current], at);
  // It counts its bytes on the mbarrier with release semantics (PTX ISA, st.async), so the sender's earlier stores have happened, too.
  Known& there = released[{other.id, barrier}];
  release(there), there[cta->id][copier()] = time;
}
void copy_bulk(int rank, const void* to, const void* from, int bytes, const void* barrier) {
  const uint32_t at = place(__builtin_return_address(0)), time = ++self().copies;
  Cta& other = ctas[rank];
  touch(from, bytes, kRead, at, copier(), time);
  record(other.shared, number(barrier), 8, kAtomicUpdate, current, self().known[current], at);
  record(other.shared, number(to), bytes, kWrite, copier(), time, at);
  Times& there = released[{other.id, barrier}][cta->id];
  if (there.size() <= static_cast<size_t>(copier())) there.resize(2 * cta->size);
  there[copier()] = time, there[current] = std::max(there[current], self().known[current]);
}
void read_far(int rank, const void* pointer, int bytes) {
  const uint32_t at = place(__builtin_return_address(0));
  aligned(pointer, bytes, kRead, at);
  record(ctas[rank].shared, number(pointer), bytes, kRead, current, self().known[current], at);
}

}  // namespace checker

// --- functions that g++ calls under -fsanitize=thread,alignment, and the reports, one in each line ----------------------------------

extern "C" {

#define KVGEN_HOOK(name, bytes, kind)                                                                             \
  void __tsan_##name(void* pointer) {                                                                             \
    if (!checker::quiet) checker::touch(pointer, bytes, checker::kind, checker::place(__builtin_return_address(0))); \
  }
#define KVGEN_HOOKS(bytes)               \
  KVGEN_HOOK(read##bytes, bytes, kRead)  \
  KVGEN_HOOK(write##bytes, bytes, kWrite) \
  KVGEN_HOOK(unaligned_read##bytes, bytes, kRead) \
  KVGEN_HOOK(unaligned_write##bytes, bytes, kWrite)
KVGEN_HOOKS(1)
KVGEN_HOOKS(2)
KVGEN_HOOKS(4)
KVGEN_HOOKS(8)
KVGEN_HOOKS(16)
#undef KVGEN_HOOKS
#undef KVGEN_HOOK

void __tsan_read_range(void* pointer, long bytes) {
  if (!checker::quiet) checker::touch(pointer, static_cast<int>(bytes), checker::kRead, checker::place(__builtin_return_address(0)));
}
void __tsan_write_range(void* pointer, long bytes) {
  if (!checker::quiet) checker::touch(pointer, static_cast<int>(bytes), checker::kWrite, checker::place(__builtin_return_address(0)));
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
// The host's code alone uses std::atomic.
int __tsan_atomic32_load(const int* from, int) { return *from; }
void __tsan_atomic32_store(int* to, int value, int) { *to = value; }

// The begin of the record that g++ passes: where the access is, its type, the log2 of the alignment that it needs.
struct Mismatch {
  const char* file;
  uint32_t line, column;
  const void* type;
  uint8_t log_alignment, kind;
};
void __ubsan_handle_type_mismatch_v1(const Mismatch* where, const void* pointer) {
  if (checker::within(checker::number(pointer), checker::fibre_stack)) return;  // a thread's own arrays are registers on a GPU
  checker::report(std::string("misaligned access at ") + where->file + ":" + std::to_string(where->line) + ", which needs " +
                  std::to_string(1 << where->log_alignment) + " bytes");
}

// Those since the last call.
const char* reports() {
  checker::joined_reports.clear();
  for (const std::string& report : checker::reports) checker::joined_reports += report + "\n";
  checker::reports.clear();
  return checker::joined_reports.c_str();
}

}  // extern "C"
