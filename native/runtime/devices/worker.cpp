// Bindings whose functions and memory are the caller's.
#include "worker.h"

#include <stdlib.h>
#include <string.h>

#include "common/error.hpp"
#include "devices/gpu.hpp"

namespace tw {
namespace {

constexpr uint64_t kUploadPiece = 32768;  // both drivers take copies of up to 64 KiB over at once, without waiting

bool is_gpu(const tw_plan* plan) { return plan->header->device_kind != TW_CPU; }

tw_status only_gpu(const char* function) {
  return fail(TW_UNSUPPORTED, "device_kind", "use tw_bind and tw_launch", "%s is for plans of a GPU", function);
}

tw_status adopt(tw_plan* plan, void* const* functions) {
  const GpuApi& api = api_of(plan);
  const tw_status status = api.open();
  if (status) return status;
  uint64_t context = 0;
  const int code = api.context(&context);
  if (code) return driver_error(api, code, "finding the current context");
  const uint32_t stages = plan->header->stages;
  Loaded* const loaded = (Loaded*)calloc(1, sizeof(Loaded) + stages * sizeof(void*));
  if (!loaded) return fail(TW_NO_MEMORY, "host_memory", "free memory", "no memory for the functions of a plan");
  memcpy(loaded->functions, functions, stages * sizeof(void*));
  loaded->context = context, loaded->next = __atomic_load_n(&plan->loaded, __ATOMIC_ACQUIRE);
  while (!__atomic_compare_exchange_n(
      &plan->loaded, &loaded->next, loaded, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
  }
  return TW_OK;
}

tw_status fill(tw_binding* binding, const tw_memory* memory) {
  const tw_plan* const plan = binding->plan;
  const GpuApi& api = api_of(plan);
  const PlanHeader& header = *plan->header;
  binding->addresses[plan->workspace_place()] = memory->workspace;
  binding->addresses[plan->counters_place()] = memory->counters;
  binding->addresses[plan->tables_place()] = memory->tables;
  binding->complete = true;
  relocate(plan, binding->addresses, binding->image, Which::kAll);
  const tw_status status = encode_maps(plan, api, binding->addresses, binding->image, Which::kAll);
  if (status) return status;
  for (uint64_t at = header.tables_at; at < header.image_bytes; at += kUploadPiece) {
    const uint64_t left = header.image_bytes - at;
    const int code = api.upload_async(memory->tables + (at - header.tables_at), binding->image + at,
        left < kUploadPiece ? left : kUploadPiece, memory->stream);
    if (code) return driver_error(api, code, "an upload of arguments");
  }
  return TW_OK;
}

}  // namespace
}  // namespace tw

tw_status tw_plan_adopt(tw_plan* plan, void* const* functions, uint32_t count) {
  if (!plan || (!functions && count)) return tw::null_argument("tw_plan_adopt");
  if (!tw::is_gpu(plan)) return tw::only_gpu("tw_plan_adopt");
  if (count != plan->header->stages)
    return tw::concerning(tw::fail(TW_INVALID_ARGUMENT, "stage_count", "give one function for each stage",
                              "the plan has %u stages, not %u", plan->header->stages, count),
        -1, count);
  return count ? tw::adopt(plan, functions) : TW_OK;
}

tw_status tw_plan_memory(const tw_plan* plan, uint64_t* counter_bytes, uint64_t* table_bytes) {
  if (!plan || !counter_bytes || !table_bytes) return tw::null_argument("tw_plan_memory");
  *counter_bytes = plan->header->counter_bytes;
  *table_bytes = plan->header->image_bytes - plan->header->tables_at;
  return TW_OK;
}

tw_status tw_bind_in(
    tw_plan* plan, const uint64_t* addresses, uint32_t count, const tw_memory* memory, tw_binding** result) {
  if (!plan || !memory || !result || (!addresses && count) || memory->struct_bytes < sizeof(tw_memory))
    return tw::null_argument("tw_bind_in");
  *result = nullptr;
  if (!tw::is_gpu(plan)) return tw::only_gpu("tw_bind_in");
  tw_binding* binding;
  tw_status status = tw::new_binding(plan, addresses, count, &binding);
  if (status) return status;
  if (binding->loaded) status = tw::fill(binding, memory);
  if (status) {
    tw::drop_binding(binding);
    return status;
  }
  *result = binding;
  return TW_OK;
}

tw_status tw_launch_stage(const tw_binding* binding, uint32_t stage, tw_stream stream) {
  if (!binding) return tw::null_argument("tw_launch_stage");
  const tw_plan* const plan = binding->plan;
  if (!tw::is_gpu(plan)) return tw::only_gpu("tw_launch_stage");
  if (stage >= plan->header->stages)
    return tw::fail(TW_INVALID_ARGUMENT, "stage_index", "count from 0", "the plan has no stage %u", stage);
  const tw::GpuApi& api = tw::api_of(plan);
  const tw::StageRecord& record = plan->stages[stage];
  const int code = api.launch(binding->loaded->functions[stage], record, binding->image + record.root, stream);
  return code ? tw::driver_error(api, code, "a launch") : TW_OK;
}
