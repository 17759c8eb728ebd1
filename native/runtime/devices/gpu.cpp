// Plans for a GPU: modules by context, arguments, workspace and counters.
#include "devices/gpu.hpp"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "common/error.hpp"
#include "common/lock.hpp"
#include "devices/arenas.hpp"

namespace tw {

const GpuApi& api_of(const tw_plan* plan) { return plan->header->device_kind == TW_CUDA ? cuda_api() : hip_api(); }

tw_status driver_error(const GpuApi& api, int code, const char* what) {
  const char *name = "", *text = "";
  api.describe(code, &name, &text);
  const tw_status status = api.is_no_memory(code) ? TW_NO_MEMORY : TW_DRIVER;
  const char* const rule = status == TW_NO_MEMORY ? "device_memory" : "device_driver";
  const char* const fix = status == TW_NO_MEMORY ? "free memory of the device"
                                                 : "make the stream's own context current, and look at earlier launches";
  return concerning(fail(status, rule, fix, "%s failed: %s (%s)", what, name, text), -1, code);
}

tw_status encode_maps(const tw_plan* plan, const GpuApi& api, const uint64_t* places, unsigned char* image, Which which) {
  for (uint32_t i = 0; i < plan->header->maps; i++) {
    const MapRecord& map = plan->maps[i];
    if (which != Which::kAll && plan->is_late(map.place) != (which == Which::kLate)) continue;
    const uint64_t address = places[map.place] + (uint64_t)map.addend;
    if (address % 16)
      return concerning(fail(TW_MISALIGNED, "operand_alignment", "let the tensor begin at a multiple of 16 bytes",
                            "this kernel needs the tensor at a multiple of 16 bytes"),
          map.place < plan->header->operands ? (int32_t)map.place : -1, (int64_t)(address % 16));
    const int code = api.encode(map, address, image + map.offset);
    if (code) return driver_error(api, code, "encoding a tensor map");
  }
  return TW_OK;
}

namespace {

constexpr uint64_t kSpareArguments = 64;  // arguments come in multiples of so many bytes

// Modules

struct Module {
  Module* next;
  const Object* object;
  uint64_t context;
  void* module = nullptr;
};

Lock modules_lock;  // also guards lists of loaded functions
Module* modules;

tw_status load_module(const GpuApi& api, const Object* object, uint64_t context, void** result) {
  for (Module* module = modules; module; module = module->next)
    if (module->object == object && module->context == context) return *result = module->module, TW_OK;
  Module* const fresh = (Module*)calloc(1, sizeof(Module));
  if (!fresh) return fail(TW_NO_MEMORY, "host_memory", "free memory", "no memory for a module");
  const RelaxedCapture relaxed(api);
  const int code = api.load(&fresh->module, object->content);
  if (code) {
    free(fresh);
    driver_error(api, code, "loading a code object");
    return api.is_no_memory(code) ? TW_NO_MEMORY : concerning(TW_OBJECT_LOAD, -1, code);
  }
  fresh->object = object, fresh->context = context, fresh->next = modules, modules = fresh;
  *result = fresh->module;
  return TW_OK;
}

tw_status load_stage(const tw_plan* plan, const GpuApi& api, const StageRecord& stage, uint64_t context, void** function) {
  const Object* const object = find_object(plan->objects[stage.object].sha256);
  if (!object)
    return concerning(fail(TW_OBJECT_MISSING, "object_missing", "give it with tw_object_put before the first launch",
                          "code object %u of the plan was not given", stage.object),
        -1, stage.object);
  void* module = nullptr;
  const tw_status status = load_module(api, object, context, &module);
  if (status) return status;
  const char* const symbol = plan->text(stage.symbol);
  int code = api.function(function, module, symbol);
  if (code) {
    driver_error(api, code, symbol);
    return concerning(TW_OBJECT_LOAD, -1, code);
  }
  int64_t taken = -1;
  code = api.admit(*function, stage, &taken);
  if (code) return driver_error(api, code, "preparing a kernel for its launch");
  if (taken >= 0 && ((uint64_t)taken > stage.root_bytes || stage.root_bytes - (uint64_t)taken >= kSpareArguments))
    return concerning(fail(TW_OBJECT_LOAD, "kernel_parameters", "get plan and code object from one server",
                          "the plan brings %llu bytes of arguments, and %s takes %lld",
                          (unsigned long long)stage.root_bytes, symbol, (long long)taken),
        -1, taken);
  return TW_OK;
}

tw_status no_context(const GpuApi& api, int code) {
  driver_error(api, code, "finding the current context");
  return fail(TW_NO_CONTEXT, "device_context", "select the device in this thread first (cudaSetDevice, hipSetDevice)",
      "no context of %s is current in this thread", api.driver);
}

tw_status load(tw_plan* plan, Loaded** result) {
  const GpuApi& api = api_of(plan);
  tw_status status = api.open();
  if (status) return status;
  uint64_t context;
  const int code = api.context(&context);
  if (code) return no_context(api, code);
  for (Loaded* loaded = __atomic_load_n(&plan->loaded, __ATOMIC_ACQUIRE); loaded; loaded = loaded->next)
    if (loaded->context == context) return *result = loaded, TW_OK;
  char device[64] = "";
  if (!api.fits(plan->text(plan->header->arch), device))
    return fail(TW_WRONG_DEVICE, "device_arch", "make a plan for the device of the current context",
        "the plan is for %s, and the current device is %s", plan->text(plan->header->arch), device);
  if (!plan->header->objects)
    return fail(TW_OBJECT_MISSING, "functions", "give them with tw_plan_adopt in this context",
        "the plan has no code, and was given no functions");
  const uint32_t stages = plan->header->stages;
  const Guard guard(modules_lock);
  for (Loaded* loaded = plan->loaded; loaded; loaded = loaded->next)
    if (loaded->context == context) return *result = loaded, TW_OK;
  Loaded* const loaded = (Loaded*)calloc(1, sizeof(Loaded) + stages * sizeof(void*));
  if (!loaded) return fail(TW_NO_MEMORY, "host_memory", "free memory", "no memory for the functions of a plan");
  for (uint32_t i = 0; i < stages && !status; i++)
    status = load_stage(plan, api, plan->stages[i], context, &loaded->functions[i]);
  if (status) return free(loaded), status;
  loaded->context = context, loaded->next = plan->loaded;
  __atomic_store_n(&plan->loaded, loaded, __ATOMIC_RELEASE);
  *result = loaded;
  return TW_OK;
}

// Arguments

tw_status launch_stages(const tw_plan* plan, const GpuApi& api, const Loaded* loaded, unsigned char* image, tw_stream stream) {
  for (uint32_t i = 0; i < plan->header->stages; i++) {
    const StageRecord& stage = plan->stages[i];
    const int code = api.launch(loaded->functions[i], stage, image + stage.root, stream);
    if (code) return is_foreign(api, loaded->context, stream) ? foreign_stream() : driver_error(api, code, "a launch");
  }
  return TW_OK;
}

// A binding is launched in its own context: drivers do not look at functions of one that is gone.
tw_status check_context(const GpuApi& api, const Loaded* loaded) {
  uint64_t context = 0;
  if (!api.stream_context) return TW_OK;
  if (const int code = api.context(&context)) return no_context(api, code);
  if (context == loaded->context) return TW_OK;
  return fail(TW_NO_CONTEXT, "binding_context", "make that context current again, or bind the plan in this one",
      "the plan was bound in a context that is not current, or is gone");
}

// Launches with an image that is complete but for workspace and counters, which are the stream's.
tw_status launch_late(
    const tw_plan* plan, const Loaded* loaded, uint64_t* places, unsigned char* image, tw_stream stream) {
  const GpuApi& api = api_of(plan);
  const Guard guard(arenas_lock());
  Arena* arena = nullptr;
  tw_status status = arena_for(api, plan, loaded->context, stream, &arena);
  if (status) return status;
  if (!places[plan->workspace_place()]) places[plan->workspace_place()] = arena->workspace;
  places[plan->counters_place()] = arena->counters;
  relocate(plan, places, image, Which::kLate);
  status = encode_maps(plan, api, places, image, Which::kLate);
  return status ? status : launch_stages(plan, api, loaded, image, stream);
}

tw_status own_copy(const tw_plan* plan, const unsigned char* from, const uint64_t* operands, uint32_t count,
    unsigned char** image, uint64_t** places) {
  const uint64_t image_bytes = (plan->header->image_bytes + 63) / 64 * 64;
  unsigned char* const own = thread_memory(0, image_bytes + (plan->header->operands + 3) * sizeof(uint64_t));
  if (!own) return fail(TW_NO_MEMORY, "host_memory", "free memory", "no memory for the arguments of a plan");
  memcpy(own, from, plan->header->image_bytes);
  *image = own, *places = (uint64_t*)(own + image_bytes);
  memset(*places, 0, (plan->header->operands + 3) * sizeof(uint64_t));
  memcpy(*places, operands, count * sizeof(uint64_t));
  return TW_OK;
}

tw_status run(tw_plan* plan, const Loaded* loaded, const uint64_t* addresses, tw_stream stream) {
  const GpuApi& api = api_of(plan);
  if (plan->header->tables_at < plan->header->image_bytes)
    return fail(TW_UNSUPPORTED, "run_tables", "bind it (tw_bind), which puts its tables into device memory",
        "a plan with tables of arguments must be bound before it is launched");
  unsigned char* image;
  uint64_t* places;
  tw_status status = own_copy(plan, plan->image, addresses, plan->header->operands, &image, &places);
  if (status) return status;
  relocate(plan, places, image, Which::kEarly);
  status = encode_maps(plan, api, places, image, Which::kEarly);
  if (status) return status;
  return plan->late ? launch_late(plan, loaded, places, image, stream) : launch_stages(plan, api, loaded, image, stream);
}

tw_status take(const GpuApi& api, uint64_t* address, uint64_t bytes, const char* what) {
  const RelaxedCapture relaxed(api);
  const int code = api.allocate(address, bytes);
  return code ? driver_error(api, code, what) : TW_OK;
}

tw_status fill_tables(tw_binding* binding, const GpuApi& api) {
  const PlanHeader& header = *binding->plan->header;
  const RelaxedCapture relaxed(api);
  const int code = api.upload(binding->tables, binding->image + header.tables_at, header.image_bytes - header.tables_at);
  return code ? driver_error(api, code, "an upload of arguments") : TW_OK;
}

void unbind(tw_binding* binding) {
  const GpuApi& api = api_of(binding->plan);
  const uint64_t owned[] = {binding->tables, binding->workspace};
  uint64_t context = 0;
  const bool here = (owned[0] || owned[1]) && !api.context(&context) && context == binding->loaded->context;
  for (const uint64_t address : owned) {
    if (!address) continue;
    if (!here) {
      retire_memory(api, binding->loaded->context, address);
      continue;
    }
    const RelaxedCapture relaxed(api);
    api.release(address);  // waits for launches that use it
  }
}

tw_status take_own(tw_binding* binding, const GpuApi& api, uint64_t given) {
  // Tables that name the workspace are written once, so it cannot be the stream's.
  const PlanHeader& header = *binding->plan->header;
  const uint64_t workspace = given ? 0 : (header.workspace_bytes + 255) / 256 * 256;
  const tw_status status = take(api, &binding->workspace, workspace + header.counter_bytes, "workspace");
  if (status) return status;
  const int code = header.counter_bytes ? api.clear_async(binding->workspace + workspace, header.counter_bytes, nullptr) : 0;
  if (code) return driver_error(api, code, "clearing counters");
  if (!given) binding->addresses[binding->plan->workspace_place()] = binding->workspace;
  binding->addresses[binding->plan->counters_place()] = binding->workspace + workspace;
  return TW_OK;
}

tw_status fill(tw_binding* binding, const GpuApi& api, uint64_t given) {
  const tw_plan* const plan = binding->plan;
  const PlanHeader& header = *plan->header;
  tw_status status = TW_OK;
  if (header.tables_at < header.image_bytes) {
    status = take(api, &binding->tables, header.image_bytes - header.tables_at, "tables of arguments");
    binding->addresses[plan->tables_place()] = binding->tables;
  }
  if (!status && plan->late_tables) status = take_own(binding, api, given);
  if (status) return status;
  // With a workspace that was given only counters are left to the stream.
  binding->complete = !plan->late || plan->late_tables || (given && !header.counter_bytes);
  const Which which = binding->complete ? Which::kAll : Which::kEarly;
  relocate(plan, binding->addresses, binding->image, which);
  status = encode_maps(plan, api, binding->addresses, binding->image, which);
  return !status && binding->tables ? fill_tables(binding, api) : status;
}

tw_status bind(tw_binding* binding, const tw_bind_options* options) {
  const tw_plan* const plan = binding->plan;
  const GpuApi& api = api_of(plan);
  const uint64_t needed = plan->header->workspace_bytes;
  uint64_t given = 0;
  if (options && options->workspace) {
    given = (uint64_t)(uintptr_t)options->workspace;
    if (options->workspace_bytes < needed || given % 256)
      return concerning(fail(TW_WORKSPACE, "workspace", "give as much as tw_plan_describe says, at a multiple of 256",
                            "a workspace of %llu bytes where %llu are needed", (unsigned long long)options->workspace_bytes,
                            (unsigned long long)needed),
          -1, (int64_t)needed);
    binding->addresses[plan->workspace_place()] = given;
  }
  free_retired(api, binding->loaded->context);
  const tw_status status = fill(binding, api, given);
  if (status) unbind(binding);
  return status;
}

tw_status launch(const tw_binding* binding, tw_stream stream) {
  const tw_plan* const plan = binding->plan;
  const GpuApi& api = api_of(plan);
  tw_status status = check_context(api, binding->loaded);
  if (status) return status;
  if (binding->complete) return launch_stages(plan, api, binding->loaded, binding->image, stream);
  unsigned char* image;
  uint64_t* places;
  status = own_copy(plan, binding->image, binding->addresses, plan->header->operands + 3, &image, &places);
  return status ? status : launch_late(plan, binding->loaded, places, image, stream);
}

void unload(tw_plan*) {}

constexpr Device kDevice = {load, run, bind, launch, unbind, unload};

}  // namespace

const Device& gpu_device() { return kDevice; }

tw_status open_driver(const char* library, const char* const* names, void** functions, size_t count) {
  void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (!handle)
    return fail(TW_NO_DRIVER, "device_driver", "install the device's driver, or start the container with the GPU",
        "%s cannot be loaded", library);
  for (size_t i = 0; i < count; i++) {
    char name[96];
    const size_t size = strlen(names[i]);
    const bool optional = names[i][size - 1] == '?';
    if (size >= sizeof name) return TW_NO_DRIVER;
    memcpy(name, names[i], size + 1);
    if (optional) name[size - 1] = 0;
    functions[i] = dlsym(handle, name);
    if (!functions[i] && !optional)
      return fail(TW_NO_DRIVER, "device_driver", "install a newer driver", "%s has no function %s", library, name);
  }
  return TW_OK;
}

}  // namespace tw
