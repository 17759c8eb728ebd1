// The platform of the emulation: kernels run on the CPU, every thread of a workgroup as a fiber, so that whole kernels
// are tested without a GPU. Fibers switch at barriers and where the lanes of a wave work together. What a GPU leaves to
// chance, this platform makes as bad as it can: shared memory begins as NaNs, asynchronous copies arrive only when they
// are waited for, workgroups run in an order drawn from a seed, and a misaligned access, or one beyond shared memory,
// ends the launch with a message.
#pragma once
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <vector>

#define TW_DEVICE inline
#define TW_UNROLL
#define TW_UNROLL_BY(COUNT)
#define TW_NO_UNROLL
// On the host a kernel is a function that runs the whole grid. 0: done; 1: it failed, or its threads wait for each
// other for ever.
#define TW_KERNEL(THREADS, MIN_BLOCKS, NAME, PARAMS, ...)                                             \
  extern "C" __attribute__((visibility("default"))) int NAME(const void* block, int grid, int shared_bytes,         \
                                                             unsigned seed) {                        \
    alignas(64) unsigned char copy[sizeof(PARAMS)];                                                   \
    memcpy(copy, block, sizeof copy);                                                                 \
    const PARAMS& params = *(const PARAMS*)copy;                                                      \
    return tw::gpu::host::launch(THREADS, grid, shared_bytes, seed, [&params] { __VA_ARGS__; });      \
  }

namespace tw::gpu {

#if !defined(TW_HOST_WAVE)
#define TW_HOST_WAVE 32
#endif
constexpr int kWave = TW_HOST_WAVE;

namespace host {

struct Copy {
  uint32_t to;
  const void* from;
  int size, bytes, group;  // `size` bytes are written, of which `bytes` are read
};

struct Fiber {
  ucontext_t start;
  jmp_buf resume;
  bool started, done;
  int thread;
  std::vector<Copy> copies;
  int groups_committed;
};

// Values that the lanes of a wave exchange.
struct alignas(16) Slot {
  uint32_t words[32];
};

struct Meeting {
  int arrived = 0;
  std::vector<Fiber*> waiting;
};

struct Workgroup {
  int index = 0, count = 0, threads = 0;
  std::vector<unsigned char> shared;
  std::vector<Fiber*> ready;  // a queue
  size_t next = 0;
  Meeting all;
  std::vector<Meeting> waves;
  std::vector<Slot> slots;
  const std::function<void()>* body = nullptr;
  Fiber* current = nullptr;
  bool failed = false;
  jmp_buf scheduler;
  ucontext_t scheduler_context;
};
inline Workgroup group;

[[noreturn]] inline void fail(const char* what) {
  fprintf(stderr, "kernel: %s (workgroup %d, thread %d)\n", what, group.index, group.current->thread);
  group.failed = true;
  _longjmp(group.scheduler, 1);
}

inline void suspend() {
  if (_setjmp(group.current->resume) == 0) _longjmp(group.scheduler, 1);
}

// Waits until `count` fibers are here.
inline void meet(Meeting& meeting, int count) {
  if (++meeting.arrived < count) {
    meeting.waiting.push_back(group.current);
    suspend();
    return;
  }
  meeting.arrived = 0;
  for (Fiber* fiber : meeting.waiting) group.ready.push_back(fiber);
  meeting.waiting.clear();
}
inline void meet_wave() { meet(group.waves[group.current->thread / kWave], kWave); }

inline void fiber_main() {
  (*group.body)();
  group.current->done = true;
  _longjmp(group.scheduler, 1);
}

inline unsigned char* shared_at(uint32_t address, size_t bytes) {
  if (address % (bytes < 16 ? bytes : 16) != 0) fail("misaligned shared memory access");
  if (address + bytes > group.shared.size()) fail("access beyond shared memory");
  return group.shared.data() + address;
}

inline bool run_workgroup(std::vector<Fiber>& fibers, std::vector<std::vector<char>>& stacks) {
  group.ready.clear(), group.next = 0;
  group.all = {};
  group.waves.assign(fibers.size() / kWave, {});
  group.slots.resize(fibers.size());
  memset(group.shared.data(), 0xff, group.shared.size());
  for (size_t t = 0; t < fibers.size(); t++) {
    Fiber& fiber = fibers[t];
    fiber.started = fiber.done = false, fiber.thread = (int)t;
    fiber.copies.clear(), fiber.groups_committed = 0;
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = stacks[t].data(), fiber.start.uc_stack.ss_size = stacks[t].size();
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, fiber_main, 0);
    group.ready.push_back(&fiber);
  }
  while (group.next < group.ready.size() && !group.failed) {
    if (group.next > 65536) {
      group.ready.erase(group.ready.begin(), group.ready.begin() + (long)group.next);
      group.next = 0;
    }
    group.current = group.ready[group.next++];
    if (_setjmp(group.scheduler) == 0) {
      if (group.current->started) _longjmp(group.current->resume, 1);
      group.current->started = true;
      setcontext(&group.current->start);
    }
  }
  for (const Fiber& fiber : fibers) {
    if (!fiber.done) return false;
    if (!fiber.copies.empty()) return fprintf(stderr, "kernel: copies are under way at its end\n"), false;
  }
  return true;
}

inline int launch(int threads, int grid, int shared_bytes, unsigned seed, const std::function<void()>& body) {
  std::vector<Fiber> fibers((size_t)threads);
  std::vector<std::vector<char>> stacks((size_t)threads, std::vector<char>(128 * 1024));
  std::vector<int> order((size_t)grid);
  for (int i = 0; i < grid; i++) order[(size_t)i] = i;
  for (int i = grid - 1; i > 0 && seed != 0; i--) {
    seed = seed * 1664525u + 1013904223u;
    std::swap(order[(size_t)i], order[(size_t)((seed >> 8) % (unsigned)(i + 1))]);
  }
  group.count = grid, group.threads = threads, group.body = &body, group.failed = false;
  group.shared.assign((size_t)shared_bytes, 0xff);
  for (int index : order) {
    group.index = index;
    if (!run_workgroup(fibers, stacks)) return 1;
  }
  return 0;
}

inline Slot& slot(int lane) { return group.slots[(size_t)(group.current->thread / kWave * kWave + lane)]; }

}  // namespace host

inline int thread_index() { return host::group.current->thread; }
inline int block_index() { return host::group.index; }
inline int block_count() { return host::group.count; }
template <class Params>
const Params& read_again(const Params& params) {
  return params;
}
inline int compute_again(int x) { return x; }
inline int lane_index() { return thread_index() % kWave; }

inline void barrier() { host::meet(host::group.all, host::group.threads); }
inline void wave_barrier() { host::meet_wave(); }
inline int shuffle(int x, int lane) {
  host::slot(lane_index()).words[0] = (uint32_t)x;
  host::meet_wave();
  const int y = (int)host::slot(lane).words[0];
  host::meet_wave();
  return y;
}
inline float shuffle_xor(float x, int mask) {
  int bits;
  memcpy(&bits, &x, sizeof bits);
  bits = shuffle(bits, lane_index() ^ mask);
  memcpy(&x, &bits, sizeof bits);
  return x;
}
inline int count_lanes(bool condition) {
  host::slot(lane_index()).words[0] = condition;
  host::meet_wave();
  int count = 0;
  for (int i = 0; i < kWave; i++) count += (int)host::slot(i).words[0];
  host::meet_wave();
  return count;
}

template <class To, class From>
To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
inline uint32_t bits_of(float x) { return bits_as<uint32_t>(x); }
inline float float_of(uint32_t bits) { return bits_as<float>(bits); }
inline float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline float reciprocal(float x) { return 1.0f / x; }
inline float exp2(float x) { return __builtin_exp2f(x); }
inline float log2(float x) { return __builtin_log2f(x); }
inline uint32_t funnel_right(uint32_t low, uint32_t high, uint32_t bits) {
  return (uint32_t)(((uint64_t)high << 32 | low) >> (bits % 32));
}
inline uint32_t permute_bytes(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = (uint64_t)y << 32 | x;
  uint32_t z = 0;
  for (int i = 0; i < 4; i++) z |= (uint32_t)(both >> ((selector >> (4 * i) & 7) * 8) & 0xff) << (8 * i);
  return z;
}

inline float half_to_float(uint16_t bits) { return (float)bits_as<_Float16>(bits); }
inline uint32_t pack_halves(float low, float high) {
  return (uint32_t)bits_as<uint16_t>((_Float16)low) | (uint32_t)bits_as<uint16_t>((_Float16)high) << 16;
}
inline uint32_t bfloat_bits(float x) {
  const uint32_t bits = bits_of(x);
  return x != x ? bits >> 16 | 0x40u : (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
inline uint32_t pack_bfloats(float low, float high) { return bfloat_bits(low) | bfloat_bits(high) << 16; }
inline int32_t nearest_integer(float x) {
  if (x != x) return 0;
  return x >= 2147483648.0f ? 2147483647 : x < -2147483648.0f ? -2147483647 - 1 : (int32_t)__builtin_rintf(x);
}

inline uint32_t shared_base() { return 0; }
template <int kCount>
Words<kCount> load_shared(uint32_t address) {
  Words<kCount> x;
  memcpy(&x, host::shared_at(address, sizeof x), sizeof x);
  return x;
}
template <int kCount>
void store_shared(uint32_t address, Words<kCount> x) {
  memcpy(host::shared_at(address, sizeof x), &x, sizeof x);
}

inline void store_shared_short(uint32_t address, uint16_t x) { memcpy(host::shared_at(address, 2), &x, 2); }

template <class T>
T load_global(const void* from) {
  if ((uintptr_t)from % sizeof(T) != 0) host::fail("misaligned read");
  T x;
  memcpy(&x, from, sizeof x);
  return x;
}
template <class T>
T load_constant(const void* from) {
  return load_global<T>(from);
}
template <class T>
void store_global(void* to, const T& value) {
  if ((uintptr_t)to % sizeof(T) != 0) host::fail("misaligned write");
  memcpy(to, &value, sizeof value);
}
template <int kCount>
Words<kCount> load_coherent(const void* from) {
  return load_global<Words<kCount>>(from);
}
template <int kCount>
void store_coherent(void* to, Words<kCount> x) {
  store_global(to, x);
}
inline uint32_t arrive(uint32_t* counter) { return (*counter)++; }
inline void or_global(uint32_t* to, uint32_t bits) { *to |= bits; }
inline void max_global(uint64_t* to, uint64_t x) { *to = x > *to ? x : *to; }
inline void add_global(float* to, float x) { *to += x; }

inline void copy_async(uint32_t address, const void* from, int bytes) {
  if ((uintptr_t)from % 16 != 0) host::fail("misaligned asynchronous copy");
  if (bytes < 0 || bytes > 16) host::fail("an asynchronous copy takes 0 to 16 bytes");
  host::Fiber& fiber = *host::group.current;
  fiber.copies.push_back({address, from, 16, bytes, fiber.groups_committed});
}
inline void copy_word_async(uint32_t address, const void* from, bool exists) {
  if ((uintptr_t)from % 4 != 0) host::fail("misaligned asynchronous copy");
  host::Fiber& fiber = *host::group.current;
  fiber.copies.push_back({address, from, 4, exists ? 4 : 0, fiber.groups_committed});
}
inline void commit_async() { host::group.current->groups_committed++; }
template <int kPending>
void wait_async() {
  host::Fiber& fiber = *host::group.current;
  std::vector<host::Copy> later;
  for (const host::Copy& copy : fiber.copies) {
    if (copy.group >= fiber.groups_committed - kPending) {
      later.push_back(copy);
      continue;
    }
    unsigned char* to = host::shared_at(copy.to, (size_t)copy.size);
    memset(to, 0, (size_t)copy.size);
    memcpy(to, copy.from, (size_t)copy.bytes);
  }
  fiber.copies.swap(later);
}

}  // namespace tw::gpu
