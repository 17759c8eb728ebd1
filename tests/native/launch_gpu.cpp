// Launches the plans of a bundle for a GPU in all the ways there are, over the simulated driver or a real one: launch_gpu
// BUNDLE THREADS LAUNCHES. What launches must refuse is tried as well: contexts that are gone, streams of another device
// (of another context, where there is one device).
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tilewright.h"

namespace {

#define DRIVER_FUNCTIONS(X)                             \
  X(cuInit, (unsigned))                                 \
  X(cuDeviceGetCount, (int*))                           \
  X(cuDevicePrimaryCtxRetain, (void**, int))            \
  X(cuCtxCreate_v2, (void**, unsigned, int))            \
  X(cuCtxDestroy_v2, (void*))                           \
  X(cuCtxSetCurrent, (void*))                           \
  X(cuStreamCreate, (void**, unsigned))                 \
  X(cuStreamSynchronize, (void*))                       \
  X(cuMemAlloc_v2, (uint64_t*, size_t))                 \
  X(cuMemFree_v2, (uint64_t))                           \
  X(cuStreamBeginCapture_v2, (void*, int))              \
  X(cuStreamEndCapture, (void*, void**))                \
  X(cuGraphInstantiateWithFlags, (void**, void*, unsigned long long)) \
  X(cuGraphLaunch, (void*, void*))                      \
  X(cuGraphExecDestroy, (void*))                        \
  X(cuGraphDestroy, (void*))

struct {
#define FIELD(name, arguments) int(*name) arguments;
  DRIVER_FUNCTIONS(FIELD)
#undef FIELD
} driver;

tw_bundle* bundle;
tw_plan* shared_plans[64];
tw_binding* shared_bindings[64];
uint32_t plan_count;
void *home, *elsewhere;  // contexts
int launches;
tw_launch_record record __attribute__((aligned(64)));

void must(int code, const char* what) {
  if (!code) return;
  fprintf(stderr, "%s: %d, %s\n", what, code, tw_last_error()->message);
  exit(2);
}

void refused(tw_status status, tw_status wanted, const char* rule) {
  const tw_error* const error = tw_last_error();
  if (status == wanted && !strcmp(error->rule, rule) && *error->message && *error->fix) return;
  fprintf(stderr, "status %d and rule %s where %d and %s were due: %s\n", status, error->rule, wanted, rule, error->message);
  exit(3);
}

void* stream_of_now() {
  void* made;
  must(driver.cuStreamCreate(&made, 1), "a stream");
  return made;
}

struct Operands {
  uint64_t addresses[16];
  uint32_t count;
  uint64_t workspace_bytes;

  explicit Operands(const tw_plan* plan) {
    tw_plan_info info = {};
    info.struct_bytes = sizeof info;
    must(tw_plan_describe(plan, &info), "describe");
    count = info.operands, workspace_bytes = info.workspace_bytes;
    for (uint32_t i = 0; i < count; i++) {
      tw_operand_info operand = {};
      operand.struct_bytes = sizeof operand;
      must(tw_plan_operand(plan, i, &operand), "operand");
      addresses[i] = 0;
      if (operand.span_bytes) must(driver.cuMemAlloc_v2(&addresses[i], operand.span_bytes), "memory");
    }
  }
  ~Operands() {
    for (uint32_t i = 0; i < count; i++)
      if (addresses[i]) must(driver.cuMemFree_v2(addresses[i]), "freeing");
  }
};

tw_binding* bound(tw_plan* plan, const Operands& on) {
  tw_binding* binding;
  must(tw_bind(plan, on.addresses, on.count, nullptr, &binding), "bind");
  return binding;
}

// True if the plan could be run without being bound.
bool runs(tw_plan* plan, const Operands& on, void* stream) {
  const tw_status status = tw_run(plan, on.addresses, on.count, stream);
  if (!status) return true;
  refused(status, TW_UNSUPPORTED, "run_tables");
  return false;
}

// A binding with a workspace of the caller's, and one in a graph that is launched and goes.
void launch_with_workspace(tw_plan* plan, const Operands& on, void* stream) {
  uint64_t own = 0;
  must(driver.cuMemAlloc_v2(&own, on.workspace_bytes + 256), "workspace");
  tw_bind_options options = {};
  options.struct_bytes = sizeof options, options.workspace_bytes = on.workspace_bytes;
  options.workspace = (void*)(uintptr_t)((own + 255) / 256 * 256);
  tw_binding* binding;
  must(tw_bind(plan, on.addresses, on.count, &options, &binding), "bind with a workspace");
  must(tw_launch(binding, stream), "launch with a workspace");
  must(driver.cuStreamSynchronize(stream), "settling");
  tw_binding_close(binding);
  must(driver.cuMemFree_v2(own), "freeing");
}

void launch_in_graph(const tw_binding* binding, void* stream) {
  void *graph, *exec;
  must(driver.cuStreamSynchronize(stream), "settling");
  must(driver.cuStreamBeginCapture_v2(stream, 2), "capture");
  const tw_binding* const twice[] = {binding, binding};
  uint32_t done;
  must(tw_launch_many(twice, 2, stream, &done), "captured launches");
  must(driver.cuStreamEndCapture(stream, &graph), "end of capture");
  must(driver.cuGraphInstantiateWithFlags(&exec, graph, 0), "graph");
  must(driver.cuGraphLaunch(exec, stream), "launch of a graph");
  must(driver.cuStreamSynchronize(stream), "settling");
  must(driver.cuGraphExecDestroy(exec), "end of a graph");
  must(driver.cuGraphDestroy(graph), "end of a graph");
}

void* work(void*) {
  tw_plan* early;
  must(tw_bundle_plan(bundle, 0, &early), "plan");
  refused(tw_plan_load(early), TW_NO_CONTEXT, "device_context");  // none is current in a new thread
  refused(tw_launch(shared_bindings[0], nullptr), TW_NO_CONTEXT, "device_context");
  tw_plan_close(early);
  must(driver.cuCtxSetCurrent(home), "context");
  void* const stream = stream_of_now();
  for (uint32_t i = 0; i < plan_count; i++) {
    tw_plan* plan;
    must(tw_bundle_plan(bundle, i, &plan), "plan");
    {
      const Operands on(plan);
      tw_binding* const binding = bound(plan, on);
      for (int turn = 0; turn < launches; turn++) {
        must(tw_launch(binding, stream), "launch");
        runs(plan, on, stream);
        must(tw_launch(shared_bindings[i], stream), "launch of what all launch");
      }
      launch_with_workspace(plan, on, stream);
      launch_in_graph(binding, stream);
      must(tw_launch(binding, stream), "launch behind a graph");
      must(driver.cuStreamSynchronize(stream), "settling");
      tw_binding_close(binding);
    }
    tw_plan_close(plan);
  }
  return nullptr;
}

void launch_elsewhere(tw_plan* plan, const Operands& on, tw_binding* binding) {
  void* const own = stream_of_now();
  must(driver.cuCtxSetCurrent(elsewhere), "the other context");
  void* const foreign = stream_of_now();
  refused(tw_launch(binding, own), TW_NO_CONTEXT, "binding_context");
  must(driver.cuCtxSetCurrent(home), "context");
  refused(tw_launch(binding, foreign), TW_WRONG_DEVICE, "stream_context");
  const tw_status status = tw_run(plan, on.addresses, on.count, foreign);
  if (status != TW_UNSUPPORTED) refused(status, TW_WRONG_DEVICE, "stream_context");
  must(tw_launch(binding, own), "launch after refusals");
  must(driver.cuStreamSynchronize(own), "settling");
}

void outlive_contexts(tw_plan* plan) {
  for (int turn = 0; turn < 3; turn++) {
    void* context;
    must(driver.cuCtxCreate_v2(&context, 0, 0), "a context of its own");
    Operands gone(plan);
    void* const stream = stream_of_now();
    tw_binding* const binding = bound(plan, gone);
    must(tw_launch(binding, stream), "launch in a context of its own");
    must(driver.cuStreamSynchronize(stream), "settling");
    must(driver.cuCtxDestroy_v2(context), "end of a context");
    gone.count = 0;  // its memory went as well
    refused(tw_launch(binding, stream), TW_NO_CONTEXT, "binding_context");  // the one before it is current again
    must(driver.cuCtxSetCurrent(nullptr), "no context");
    refused(tw_launch(binding, stream), TW_NO_CONTEXT, "device_context");
    must(driver.cuCtxSetCurrent(home), "context");
    refused(tw_launch(binding, nullptr), TW_NO_CONTEXT, "binding_context");
    refused(tw_launch_many(&binding, 1, nullptr, nullptr), TW_NO_CONTEXT, "binding_context");
    tw_binding_close(binding);  // what it had went with its context
    const Operands on(plan);
    void* const here = stream_of_now();
    tw_binding* const again = bound(plan, on);
    must(tw_launch(again, here), "launch of what was bound again");
    must(driver.cuStreamSynchronize(here), "settling");
    tw_binding_close(again);
  }
}

}  // namespace

int main(int count, char** words) {
  if (count != 4) return 1;
  void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) return 1;
#define FIND(name, arguments) \
  if (!(driver.name = (int(*) arguments)dlsym(library, #name))) return 1;
  DRIVER_FUNCTIONS(FIND)
#undef FIND
  must(driver.cuInit(0), "init");
  int devices = 0;
  must(driver.cuDeviceGetCount(&devices), "devices");
  must(driver.cuDevicePrimaryCtxRetain(&home, 0), "device");
  must(devices > 1 ? driver.cuDevicePrimaryCtxRetain(&elsewhere, 1) : driver.cuCtxCreate_v2(&elsewhere, 0, 0), "context");
  must(driver.cuCtxSetCurrent(home), "context");
  launches = atoi(words[3]);
  must(tw_bundle_open(words[1], &bundle), "bundle");
  plan_count = tw_bundle_count(bundle);
  Operands* operands[64];
  for (uint32_t i = 0; i < plan_count; i++) {
    must(tw_bundle_plan(bundle, i, &shared_plans[i]), "plan");
    operands[i] = new Operands(shared_plans[i]);
    shared_bindings[i] = bound(shared_plans[i], *operands[i]);
  }
  must(tw_plan_record_into(shared_plans[0], &record), "record");
  const int threads = atoi(words[2]);
  pthread_t started[64];
  for (int i = 0; i < threads; i++) pthread_create(&started[i], nullptr, work, nullptr);
  for (int i = 0; i < threads; i++) pthread_join(started[i], nullptr);
  if (record.launches != (uint64_t)(launches * threads)) return 4;
  for (uint32_t i = 0; i < plan_count; i++) {
    launch_elsewhere(shared_plans[i], *operands[i], shared_bindings[i]);
    outlive_contexts(shared_plans[i]);
    tw_binding_close(shared_bindings[i]);
    tw_plan_close(shared_plans[i]);
    delete operands[i];
  }
  tw_bundle_close(bundle);
  printf("%u plans, counted %llu, timed %llu\n", plan_count, (unsigned long long)record.launches,
      (unsigned long long)record.samples);
  return 0;
}
