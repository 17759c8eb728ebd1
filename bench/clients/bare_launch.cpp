// The host's time of a bound launch from C, beside that of the driver's own launch of the same kernels with the same
// arguments. launching.py compiles it against libtilewright's headers and calls it on a binding.
#include <dlfcn.h>
#include <string.h>
#include <time.h>

#include "plan/plan.hpp"

namespace {

struct Attribute {  // CUlaunchAttribute
  int32_t id, pad;
  union {
    uint32_t cluster[3];
    int32_t dependent;
    char bytes[64];
  } value;
};

struct Config {  // CUlaunchConfig
  uint32_t grid[3], block[3], shared_bytes;
  void* stream;
  Attribute* attributes;
  uint32_t attribute_count;
};

struct Prepared {
  Config config;
  Attribute attributes[2];
  void* function;
  void* parameters[1];
};

constexpr uint32_t kMostStages = 8;
constexpr int kCluster = 4, kDependent = 6;  // CUlaunchAttributeID

double now_us() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

void prepare(const tw_binding* binding, uint32_t stage, void* stream, Prepared* into) {
  const tw::StageRecord& record = binding->plan->stages[stage];
  memset(into, 0, sizeof *into);
  memcpy(into->config.grid, record.grid, sizeof record.grid);
  memcpy(into->config.block, record.block, sizeof record.block);
  into->config.shared_bytes = record.shared_bytes, into->config.stream = stream;
  into->config.attributes = into->attributes;
  if (record.cluster[0] * record.cluster[1] * record.cluster[2] > 1) {
    Attribute& cluster = into->attributes[into->config.attribute_count++];
    cluster.id = kCluster;
    memcpy(cluster.value.cluster, record.cluster, sizeof cluster.value.cluster);
  }
  if (record.flags & tw::kDependent) {
    Attribute& dependent = into->attributes[into->config.attribute_count++];
    dependent.id = kDependent, dependent.value.dependent = 1;
  }
  into->function = binding->loaded->functions[stage];
  into->parameters[0] = binding->image + record.root;
}

}  // namespace

// Microseconds of a launch, the best of `turns` rounds of `count` that begin on an idle stream: `found[0]` by `launch`,
// which is tw_launch, `found[1]` by the driver, less than 0 for a binding whose workspace is the stream's. Returns the
// first error of either.
extern "C" __attribute__((visibility("default"))) int launch_times(const tw_binding* binding, void* stream,
    tw_status (*launch)(const tw_binding*, tw_stream), uint32_t turns, uint32_t count, double found[2]) {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!driver) return -1;
  const auto bare = (int (*)(const Config*, void*, void**, void**))dlsym(driver, "cuLaunchKernelEx");
  const auto settle = (int (*)(void*))dlsym(driver, "cuStreamSynchronize");
  const uint32_t stages = binding->plan->header->stages;
  if (!bare || !settle || stages > kMostStages) return -1;
  Prepared prepared[kMostStages];
  for (uint32_t i = 0; i < stages; i++) prepare(binding, i, stream, &prepared[i]);
  found[0] = found[1] = -1;
  for (uint32_t turn = 0; turn < 2 * turns; turn++) {
    const bool ours = turn % 2 == 0;
    if (!ours && !binding->complete) continue;
    if (const int code = settle(stream)) return code;
    const double begun = now_us();
    for (uint32_t i = 0; i < count; i++) {
      if (ours) {
        if (const int status = launch(binding, stream)) return status;
        continue;
      }
      for (uint32_t stage = 0; stage < stages; stage++) {
        const Prepared& one = prepared[stage];
        if (const int code = bare(&one.config, one.function, (void**)one.parameters, nullptr)) return code;
      }
    }
    const double took = (now_us() - begun) / count;
    double& best = found[ours ? 0 : 1];
    if (best < 0 || took < best) best = took;
  }
  return settle(stream);
}
