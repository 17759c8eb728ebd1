// See runtime.h. Linux only: futexes, thread affinity. No standard library containers, so that it builds in a moment.
#include "tilewright/cpu/runtime.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define TW_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int64_t kSpinNanoseconds =
    50000;  // how long an idle worker stays awake: bridges the gap between the stages of a plan
constexpr int kMaxSlots = 1024;

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

void futex_wait(const int32_t* word, int32_t expected) {
  syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, nullptr, nullptr, 0);
}
void futex_wake(const int32_t* word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0); }

// Spins until ready() for up to the spin time. Reads the clock seldom: that costs more than a pause.
template <class Ready>
bool spin(Ready ready) {
  const int64_t deadline = now() + kSpinNanoseconds;
  do {
    for (int i = 0; i < 64; i++) {
      if (ready()) return true;
      pause();
    }
  } while (now() < deadline);
  return ready();
}

// Raised in the child after a fork: its copy of the pool has no threads.
int32_t fork_count = 0;
pthread_once_t fork_once = PTHREAD_ONCE_INIT;
void count_fork() { fork_count++; }
void watch_forks() { pthread_atfork(nullptr, nullptr, count_fork); }

// One launch, on its caller's stack. `unfinished` counts the members that still run, and has kAsleep added while the
// caller sleeps on it.
struct Launch {
  tw_team_state state;
  tw_cpu_kernel fn;
  const void* args;
  int32_t team;
  alignas(64) int32_t unfinished;
  static constexpr int32_t kAsleep = 1 << 30;
};

struct alignas(64) Worker {
  Launch* job = nullptr;  // what to do next; taken (set to NULL) by the worker
  int32_t rank = 0;
  int32_t asleep = 0;  // futex
  bool quit = false;
  int32_t cpu = 0;
  pthread_t thread;
};

bool bind_to(int32_t cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  return sched_setaffinity(0, sizeof set, &set) == 0;
}

void finish_member(Launch* launch) {
  int32_t* const word =
      &launch->unfinished;  // once it is zero the launch may be gone; waking an address is harmless all the same
  if (__atomic_sub_fetch(word, 1, __ATOMIC_ACQ_REL) == Launch::kAsleep) futex_wake(word);
}

void* work(void* self) {
  Worker* const worker = (Worker*)self;
  bind_to(worker->cpu);  // may fail where the processor is not ours: then the thread runs unbound
  const auto called = [worker] {
    return __atomic_load_n(&worker->job, __ATOMIC_ACQUIRE) || __atomic_load_n(&worker->quit, __ATOMIC_ACQUIRE);
  };
  for (bool awake = false;; awake = true) {
    if (!awake || !spin(called)) {
      for (;;) {  // set anew each time: a late waker may have cleared it
        __atomic_store_n(&worker->asleep, 1, __ATOMIC_SEQ_CST);
        if (called()) break;
        futex_wait(&worker->asleep, 1);
      }
      __atomic_store_n(&worker->asleep, 0, __ATOMIC_RELAXED);
    }
    Launch* const launch = __atomic_exchange_n(&worker->job, nullptr, __ATOMIC_ACQUIRE);
    if (!launch) return nullptr;
    tw_team team = {worker->rank, launch->team, &launch->state};
    launch->fn(launch->args, &team);
    finish_member(launch);
  }
}

void call(Worker* worker, Launch* launch, int32_t rank) {
  worker->rank = rank;
  __atomic_store_n(&worker->job, launch, __ATOMIC_SEQ_CST);
  // Either we see that it sleeps, or it sees the job before it does.
  if (__atomic_load_n(&worker->asleep, __ATOMIC_SEQ_CST)) {
    __atomic_store_n(&worker->asleep, 0, __ATOMIC_SEQ_CST);
    futex_wake(&worker->asleep);
  }
}

// A caller that waits for slots, on its own stack.
struct Waiter {
  Waiter* next = nullptr;
  int32_t team = 0;
  int32_t granted = 0;  // futex
  int32_t* slots = nullptr;
};

}  // namespace

struct tw_pool {
  int32_t threads = 0;
  int32_t forks = 0;
  Worker* workers = nullptr;
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;  // guards what follows
  bool* busy = nullptr;
  int32_t free_slots = 0;
  Waiter *first = nullptr, *last = nullptr;
};

namespace {

// Takes `team` free slots; the one on `cpu`, if it is free, comes first: the caller need not move then. Lock held.
void take_slots(tw_pool* pool, int32_t team, int32_t cpu, int32_t* slots) {
  int32_t taken = 0;
  for (int32_t s = 0; s < pool->threads && !taken; s++)
    if (!pool->busy[s] && pool->workers[s].cpu == cpu) slots[taken++] = s, pool->busy[s] = true;
  for (int32_t s = 0; s < pool->threads && taken < team; s++)
    if (!pool->busy[s]) slots[taken++] = s, pool->busy[s] = true;
  pool->free_slots -= team;
}

void acquire(tw_pool* pool, int32_t team, int32_t* slots) {
  pthread_mutex_lock(&pool->lock);
  if (!pool->first && pool->free_slots >= team) {
    take_slots(pool, team, sched_getcpu(), slots);
    pthread_mutex_unlock(&pool->lock);
    return;
  }
  Waiter waiter;
  waiter.team = team, waiter.slots = slots;
  (pool->first ? pool->last->next : pool->first) = &waiter;
  pool->last = &waiter;
  pthread_mutex_unlock(&pool->lock);
  while (!__atomic_load_n(&waiter.granted, __ATOMIC_ACQUIRE)) futex_wait(&waiter.granted, 0);
}

void release(tw_pool* pool, int32_t team, const int32_t* slots) {
  pthread_mutex_lock(&pool->lock);
  for (int32_t i = 0; i < team; i++) pool->busy[slots[i]] = false;
  pool->free_slots += team;
  while (pool->first && pool->first->team <= pool->free_slots) {
    Waiter* const waiter = pool->first;
    pool->first = waiter->next;
    take_slots(pool, waiter->team, -1, waiter->slots);
    int32_t* const word = &waiter->granted;  // the waiter is gone as soon as this is set
    __atomic_store_n(word, 1, __ATOMIC_RELEASE);
    futex_wake(word);
  }
  pthread_mutex_unlock(&pool->lock);
}

void run_team(tw_pool* pool, Launch* launch, const int32_t* slots) {
  // Binding and restoring takes several microseconds: not done for a caller that is on its slot's processor already.
  // Nothing would move it from there, since the workers are bound to the others.
  cpu_set_t before;
  const int32_t cpu = pool->workers[slots[0]].cpu;
  const bool bound = sched_getcpu() != cpu && sched_getaffinity(0, sizeof before, &before) == 0 && bind_to(cpu);
  __atomic_store_n(&launch->unfinished, launch->team, __ATOMIC_RELAXED);
  for (int32_t rank = 1; rank < launch->team; rank++) call(&pool->workers[slots[rank]], launch, rank);
  tw_team team = {0, launch->team, &launch->state};
  launch->fn(launch->args, &team);
  int32_t* const word = &launch->unfinished;
  __atomic_sub_fetch(word, 1, __ATOMIC_ACQ_REL);
  const auto done = [word] { return __atomic_load_n(word, __ATOMIC_ACQUIRE) == 0; };
  if (!spin(done)) {
    int32_t value = __atomic_add_fetch(word, Launch::kAsleep, __ATOMIC_ACQ_REL);
    while (value != Launch::kAsleep) {
      futex_wait(word, value);
      value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    }
  }
  if (bound) sched_setaffinity(0, sizeof before, &before);
}

void end_workers(tw_pool* pool, int32_t count) {
  for (int32_t s = 0; s < count; s++) {
    Worker& worker = pool->workers[s];
    __atomic_store_n(&worker.quit, true, __ATOMIC_SEQ_CST);
    __atomic_store_n(&worker.asleep, 0, __ATOMIC_SEQ_CST);
    futex_wake(&worker.asleep);
  }
  for (int32_t s = 0; s < count; s++) pthread_join(pool->workers[s].thread, nullptr);
}

void free_pool(tw_pool* pool) {
  if (pool) free(pool->workers), free(pool->busy);
  free(pool);
}

}  // namespace

TW_API tw_pool* tw_pool_open(int32_t threads, const int32_t* cpus) {
  if (threads < 1 || threads > kMaxSlots || !cpus) return errno = EINVAL, nullptr;
  pthread_once(&fork_once, watch_forks);
  tw_pool* const pool = (tw_pool*)calloc(1, sizeof(tw_pool));
  if (!pool) return nullptr;
  pthread_mutex_init(&pool->lock, nullptr);
  pool->threads = pool->free_slots = threads, pool->forks = fork_count;
  pool->busy = (bool*)calloc((size_t)threads, sizeof(bool));
  pool->workers = (Worker*)aligned_alloc(64, sizeof(Worker) * (size_t)threads);
  if (!pool->busy || !pool->workers) return free_pool(pool), errno = ENOMEM, nullptr;
  memset((void*)pool->workers, 0, sizeof(Worker) * (size_t)threads);
  for (int32_t s = 0; s < threads; s++) {
    pool->workers[s].cpu = cpus[s];
    const int error = pthread_create(&pool->workers[s].thread, nullptr, work, &pool->workers[s]);
    if (error) {
      end_workers(pool, s);
      return free_pool(pool), errno = error, nullptr;
    }
  }
  return pool;
}

TW_API void tw_pool_close(tw_pool* pool) {
  if (!pool || pool->forks != fork_count) return;
  int32_t* const slots = (int32_t*)alloca(sizeof(int32_t) * (size_t)pool->threads);
  acquire(pool, pool->threads, slots);
  end_workers(pool, pool->threads);
  free_pool(pool);
}

TW_API int32_t tw_pool_launch(tw_pool* pool, tw_cpu_kernel fn, const void* args, int32_t team) {
  if (!pool || team < 1 || team > pool->threads) return EINVAL;
  if (pool->forks != fork_count) return ECHILD;
  int32_t* const slots = (int32_t*)alloca(sizeof(int32_t) * (size_t)team);
  acquire(pool, team, slots);
  Launch launch;
  memset((void*)&launch.state, 0, sizeof launch.state);
  launch.fn = fn, launch.args = args, launch.team = team;
  if (team > 1) {
    run_team(pool, &launch, slots);
  } else {
    tw_team alone = {0, 1, &launch.state};
    fn(args, &alone);
  }
  release(pool, team, slots);
  return 0;
}

TW_API int32_t tw_pool_run(tw_pool* pool, tw_stage* stages, int32_t count) {
  for (int32_t i = 0; i < count; i++) {
    const int64_t begin = now();
    const int32_t error = tw_pool_launch(pool, stages[i].fn, stages[i].args, stages[i].team);
    stages[i].nanoseconds = now() - begin;
    if (error) return error;
  }
  return 0;
}

namespace {
constexpr int64_t kHugePage = 2 << 20;
int64_t mapped_size(int64_t bytes) {
  return bytes >= kHugePage / 2 ? (bytes + kHugePage - 1) / kHugePage * kHugePage : (bytes + 4095) / 4096 * 4096;
}
}  // namespace

TW_API void* tw_memory_reserve(int64_t bytes) {
  if (bytes <= 0) return errno = EINVAL, nullptr;
  const int64_t size = mapped_size(bytes), slack = size >= kHugePage ? kHugePage : 0;
  char* const map =
      (char*)mmap(nullptr, (size_t)(size + slack), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return nullptr;
  char* const memory = slack ? (char*)(((uintptr_t)map + kHugePage - 1) / kHugePage * kHugePage) : map;
  if (memory > map) munmap(map, (size_t)(memory - map));
  if (slack > memory - map) munmap(memory + size, (size_t)(slack - (memory - map)));
  madvise(memory, (size_t)size, MADV_HUGEPAGE);
#ifdef MADV_POPULATE_WRITE
  if (madvise(memory, (size_t)size, MADV_POPULATE_WRITE) == 0) return memory;
  if (errno != EINVAL) {  // EINVAL: a kernel that does not know it
    const int error = errno;
    munmap(memory, (size_t)size);
    return errno = error, nullptr;
  }
#endif
  for (int64_t at = 0; at < size; at += 4096) ((volatile char*)memory)[at] = 0;
  return memory;
}

TW_API void tw_memory_release(void* memory, int64_t bytes) {
  if (memory && bytes > 0) munmap(memory, (size_t)mapped_size(bytes));
}
