// Plans for a CPU: shared objects, run on the pool of threads of native/include/tilewright/cpu/runtime.h.
#include "tilewright/cpu/runtime.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "common/error.hpp"
#include "common/lock.hpp"
#include "plan/plan.hpp"

namespace tw {
namespace {

constexpr uint32_t kMaxThreads = 1024;

Lock lock;  // guards what follows, and the libraries of objects
tw_pool* pool;
int32_t chosen[kMaxThreads];
uint32_t chosen_count;
pthread_once_t fork_once = PTHREAD_ONCE_INIT;

// The child of a fork has none of the threads: it starts a pool of its own when it needs one.
void before_fork() { pthread_mutex_lock(&lock.mutex); }
void after_fork() { pthread_mutex_unlock(&lock.mutex); }
void after_fork_in_child() {
  pool = nullptr;
  pthread_mutex_unlock(&lock.mutex);
}
void watch_forks() { pthread_atfork(before_fork, after_fork, after_fork_in_child); }

uint32_t allowed_cpus(int32_t* cpus) {
  cpu_set_t set;
  uint32_t count = 0;
  if (sched_getaffinity(0, sizeof set, &set)) return 0;
  for (int32_t cpu = 0; cpu < CPU_SETSIZE && count < kMaxThreads; cpu++)
    if (CPU_ISSET(cpu, &set)) cpus[count++] = cpu;
  return count;
}

tw_status open_pool(tw_pool** result) {
  tw_pool* found = __atomic_load_n(&pool, __ATOMIC_ACQUIRE);
  if (!found) {
    pthread_once(&fork_once, watch_forks);
    const Guard guard(lock);
    if (!pool) {
      if (!chosen_count) chosen_count = allowed_cpus(chosen);
      tw_pool* const fresh = chosen_count ? tw_pool_open((int32_t)chosen_count, chosen) : nullptr;
      if (!fresh)
        return concerning(fail(TW_NO_MEMORY, "cpu_threads", "raise the limit of processes (ulimit -u), or configure fewer",
                              "the %u threads of the CPU pool cannot be started: %s", chosen_count, strerror(errno)),
            -1, chosen_count);
      __atomic_store_n(&pool, fresh, __ATOMIC_RELEASE);
    }
    found = pool;
  }
  *result = found;
  return TW_OK;
}

// The loader wants a file; a sealed one in memory cannot change while its code is mapped.
void* open_library(const Object& object) {
  const int fd = memfd_create("tw-kernel", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) return nullptr;
  size_t done = 0;
  while (done < object.bytes) {
    const ssize_t put = write(fd, object.content + done, object.bytes - done);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) break;
    done += (size_t)put;
  }
  void* library = nullptr;
  if (done == object.bytes) {
    fcntl(fd, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW);
    // Numbers of descriptors come again, and the loader takes two files of one name for the same: a serial number is
    // spelled in parts of the path that mean nothing.
    static uint32_t serial;
    char path[256] = "/proc/self/fd/";
    size_t end = strlen(path);
    for (uint32_t rest = ++serial; rest && end + 32 < sizeof path; rest /= 2)
      end += (size_t)snprintf(path + end, sizeof path - end, rest % 2 ? ".//" : "./");
    snprintf(path + end, sizeof path - end, "%d", fd);
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  }
  close(fd);
  return library;
}

tw_status load(tw_plan* plan, Loaded** result) {
  Loaded* found = __atomic_load_n(&plan->loaded, __ATOMIC_ACQUIRE);
  if (found) return *result = found, TW_OK;
  const char* missing;
  int length;
  if (!cpu_has(plan->text(plan->header->features), &missing, &length))
    return fail(TW_WRONG_DEVICE, "cpu_features", "make a plan for this machine's architecture",
        "the plan is for %s, and this CPU has no %.*s", plan->text(plan->header->arch), length, missing);
  const uint32_t stages = plan->header->stages;
  const Guard guard(lock);
  if (plan->loaded) return *result = plan->loaded, TW_OK;
  Loaded* const loaded = (Loaded*)calloc(1, sizeof(Loaded) + stages * sizeof(void*));
  if (!loaded) return fail(TW_NO_MEMORY, "host_memory", "free memory", "no memory for the functions of a plan");
  for (uint32_t i = 0; i < stages; i++) {
    const StageRecord& stage = plan->stages[i];
    Object* const object = find_object(plan->objects[stage.object].sha256);
    if (!object) {
      free(loaded);
      return concerning(fail(TW_OBJECT_MISSING, "object_missing", "give it with tw_object_put before the first launch",
                            "code object %u of the plan was not given", stage.object),
          -1, stage.object);
    }
    if (!object->library) object->library = open_library(*object);
    loaded->functions[i] = object->library ? dlsym(object->library, plan->text(stage.symbol)) : nullptr;
    if (!loaded->functions[i]) {
      free(loaded);
      const char* const why = dlerror();
      return concerning(fail(TW_OBJECT_LOAD, "object_load", "make the plan again on this machine",
                            "the entry %s cannot be loaded: %s", plan->text(stage.symbol), why ? why : "no memory file"),
          -1, stage.object);
    }
  }
  __atomic_store_n(&plan->loaded, loaded, __ATOMIC_RELEASE);
  *result = loaded;
  return TW_OK;
}

// Workspace of the calling thread, on huge pages. Grows, and goes with the thread.
struct Scratch {
  void* memory;
  uint64_t bytes;
};
__thread Scratch* own_scratch;
pthread_key_t scratch_key;
pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
void free_scratch(void* own) {
  Scratch* const scratch = (Scratch*)own;
  tw_memory_release(scratch->memory, (int64_t)scratch->bytes);
  free(scratch);
}
void make_scratch_key() { pthread_key_create(&scratch_key, free_scratch); }

void* scratch(uint64_t bytes) {
  if (own_scratch && own_scratch->bytes >= bytes) return own_scratch->memory;
  if (!own_scratch) {
    pthread_once(&scratch_once, make_scratch_key);
    Scratch* const fresh = (Scratch*)calloc(1, sizeof(Scratch));
    if (!fresh || pthread_setspecific(scratch_key, fresh)) return free(fresh), nullptr;
    own_scratch = fresh;
  }
  tw_memory_release(own_scratch->memory, (int64_t)own_scratch->bytes);
  own_scratch->bytes = 0;
  own_scratch->memory = tw_memory_reserve((int64_t)bytes);
  if (own_scratch->memory) own_scratch->bytes = bytes;
  return own_scratch->memory;
}

tw_status execute(const tw_plan* plan, const Loaded* loaded, const unsigned char* image) {
  tw_pool* workers = nullptr;
  const tw_status status = open_pool(&workers);
  if (status) return status;
  for (uint32_t i = 0; i < plan->header->stages; i++) {
    const StageRecord& stage = plan->stages[i];
    const int32_t error =
        tw_pool_launch(workers, (tw_cpu_kernel)loaded->functions[i], image + stage.root, (int32_t)stage.team);
    if (error == EINVAL)
      return concerning(fail(TW_TEAM, "cpu_team", "make a plan for this process's processors, or configure more",
                            "a team of %u threads, and the pool has %u", stage.team, tw_cpu_threads()),
          -1, stage.team);
    if (error) return fail(TW_UNSUPPORTED, "cpu_pool", "launch it in another thread", "the pool refused: %s", strerror(error));
  }
  return TW_OK;
}

// `places` are the operands' addresses; the image becomes complete in memory of this thread.
tw_status complete(const tw_plan* plan, const uint64_t* operands, void* workspace, unsigned char** image) {
  const PlanHeader& header = *plan->header;
  const uint64_t counters = (header.image_bytes + 63) / 64 * 64;
  const uint64_t places = counters + (header.counter_bytes + 63) / 64 * 64;
  unsigned char* const own = thread_memory(0, places + (header.operands + 3) * sizeof(uint64_t));
  if (!own) return fail(TW_NO_MEMORY, "host_memory", "free memory", "no memory for the arguments of a plan");
  if (header.workspace_bytes && !workspace) {
    workspace = scratch(header.workspace_bytes);
    if (!workspace)
      return concerning(fail(TW_NO_MEMORY, "host_memory", "free memory", "no memory for %llu bytes of workspace",
                            (unsigned long long)header.workspace_bytes),
          -1, (int64_t)header.workspace_bytes);
  }
  memcpy(own, plan->image, header.image_bytes);
  if (header.counter_bytes) memset(own + counters, 0, header.counter_bytes);
  uint64_t* const all = (uint64_t*)(own + places);
  memcpy(all, operands, header.operands * sizeof(uint64_t));
  all[plan->workspace_place()] = (uint64_t)(uintptr_t)workspace;
  all[plan->counters_place()] = (uint64_t)(uintptr_t)(own + counters);
  all[plan->tables_place()] = (uint64_t)(uintptr_t)own;
  relocate(plan, all, own, Which::kAll);
  *image = own;
  return TW_OK;
}

tw_status run(tw_plan* plan, const Loaded* loaded, const uint64_t* addresses, tw_stream) {
  unsigned char* image;
  const tw_status status = complete(plan, addresses, nullptr, &image);
  return status ? status : execute(plan, loaded, image);
}

tw_status bind(tw_binding* binding, const tw_bind_options* options) {
  const tw_plan* const plan = binding->plan;
  const uint64_t needed = plan->header->workspace_bytes;
  if (options && options->workspace) {
    if (options->workspace_bytes < needed || (uintptr_t)options->workspace % 64)
      return concerning(fail(TW_WORKSPACE, "workspace", "give as much as tw_plan_describe says, at a multiple of 256",
                            "a workspace of %llu bytes where %llu are needed", (unsigned long long)options->workspace_bytes,
                            (unsigned long long)needed),
          -1, (int64_t)needed);
    binding->addresses[plan->workspace_place()] = (uint64_t)(uintptr_t)options->workspace;
  }
  // Workspace and counters that are the thread's own make the arguments anew at each launch.
  binding->complete = !plan->late;
  binding->addresses[plan->tables_place()] = (uint64_t)(uintptr_t)binding->image;
  if (binding->complete) relocate(plan, binding->addresses, binding->image, Which::kAll);
  return TW_OK;
}

tw_status launch(const tw_binding* binding, tw_stream) {
  unsigned char* image = binding->image;
  if (!binding->complete) {
    void* const workspace = (void*)(uintptr_t)binding->addresses[binding->plan->workspace_place()];
    const tw_status status = complete(binding->plan, binding->addresses, workspace, &image);
    if (status) return status;
  }
  return execute(binding->plan, binding->loaded, image);
}

void unbind(tw_binding*) {}
void unload(tw_plan*) {}

constexpr Device kDevice = {load, run, bind, launch, unbind, unload};

}  // namespace

const Device& cpu_device() { return kDevice; }

}  // namespace tw

tw_status tw_cpu_configure(const int32_t* cpus, uint32_t count) {
  using namespace tw;
  if (!cpus || !count || count > kMaxThreads)
    return fail(TW_INVALID_ARGUMENT, "cpu_threads", "give 1 to 1024 processors", "a pool of %u threads", count);
  const Guard guard(lock);
  if (pool) return fail(TW_UNSUPPORTED, "cpu_threads", "configure it before the first launch", "the CPU pool has started");
  memcpy(chosen, cpus, count * sizeof *cpus);
  chosen_count = count;
  return TW_OK;
}

uint32_t tw_cpu_threads(void) {
  const tw::Guard guard(tw::lock);
  int32_t cpus[tw::kMaxThreads];
  return tw::chosen_count ? tw::chosen_count : tw::allowed_cpus(cpus);
}
