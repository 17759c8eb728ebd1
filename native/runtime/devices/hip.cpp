// AMD's HIP runtime, declared here as far as it is used: HIP 6, hip_runtime_api.h.
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "devices/gpu.hpp"

namespace tw {
namespace {

enum { kNoMemory = 2, kInvalidContext = 201, kNotSupported = 801 };

#define TW_HIP_FUNCTIONS(X)                                                                                        \
  X(hipInit, (unsigned))                                                                                           \
  X(hipGetDevice, (int*))                                                                                          \
  X(hipModuleLoadData, (void**, const void*))                                                                      \
  X(hipModuleGetFunction, (void**, void*, const char*))                                                            \
  X(hipMalloc, (void**, size_t))                                                                                   \
  X(hipFree, (void*))                                                                                              \
  X(hipMallocAsync, (void**, size_t, void*))                                                                       \
  X(hipFreeAsync, (void*, void*))                                                                                  \
  X(hipMemsetAsync, (void*, int, size_t, void*))                                                                   \
  X(hipMemcpyHtoD, (void*, void*, size_t))                                                                         \
  X(hipMemcpyHtoDAsync, (void*, const void*, size_t, void*))                                                       \
  X(hipStreamWaitEvent, (void*, void*, unsigned))                                                                  \
  X(hipEventRecord, (void*, void*))                                                                                \
  X(hipEventSynchronize, (void*))                                                                                  \
  X(hipEventElapsedTime, (float*, void*, void*))                                                                   \
  X(hipStreamGetCaptureInfo_v2, (void*, int*, unsigned long long*, void**, void*, size_t*))                        \
  X(hipUserObjectCreate, (void**, void*, void (*)(void*), unsigned, unsigned))                                     \
  X(hipGraphRetainUserObject, (void*, void*, unsigned, unsigned))                                                  \
  X(hipThreadExchangeStreamCaptureMode, (int*))                                                                    \
  X(hipModuleLaunchKernel, (void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, \
                               void**))

struct Functions {
#define TW_FIELD(name, arguments) int(*name) arguments;
  TW_HIP_FUNCTIONS(TW_FIELD)
#undef TW_FIELD
  const char* (*hipGetErrorName)(int);
  const char* (*hipGetErrorString)(int);
  int (*hipGetDevicePropertiesR0600)(void*, int);
  // Null where the runtime has none.
  int (*hipStreamWaitValue64)(void*, void*, uint64_t, unsigned, uint64_t);
  int (*hipStreamWriteValue64)(void*, void*, uint64_t, unsigned);
};

Functions f;
tw_status opened = TW_NO_DRIVER;
pthread_once_t once = PTHREAD_ONCE_INIT;

void open_once() {
  static const char* const names[] = {
#define TW_NAME(name, arguments) #name,
      TW_HIP_FUNCTIONS(TW_NAME)
#undef TW_NAME
      "hipGetErrorName", "hipGetErrorString", "hipGetDevicePropertiesR0600", "hipStreamWaitValue64?",
      "hipStreamWriteValue64?"};
  void* found[sizeof names / sizeof *names];
  opened = open_driver("libamdhip64.so", names, found, sizeof names / sizeof *names);
  static_assert(sizeof found == sizeof f, "one pointer each");
  memcpy(&f, found, sizeof f);
  if (!opened) f.hipInit(0);
}

tw_status open() {
  pthread_once(&once, open_once);
  return opened ? open_driver("libamdhip64.so", nullptr, nullptr, 0) ? TW_NO_DRIVER : opened : TW_OK;
}

void describe(int code, const char** name, const char** text) {
  *name = f.hipGetErrorName(code);
  *text = f.hipGetErrorString(code);
}

bool is_no_memory(int code) { return code == kNoMemory; }

// HIP's contexts are its devices.
int context(uint64_t* id) {
  int device = 0;
  const int code = f.hipGetDevice(&device);
  *id = (uint64_t)device;
  return code;
}

bool fits(const char* arch, char device[64]) {
  int ordinal = 0;
  // Larger than hipDeviceProp_t of any release; the place of gcnArchName in it differs between releases.
  static thread_local char properties[8192];
  memset(properties, 0, sizeof properties);
  if (f.hipGetDevice(&ordinal) || f.hipGetDevicePropertiesR0600(properties, ordinal)) return false;
  const char* const name = (const char*)memmem(properties, sizeof properties - 64, "gfx", 3);
  if (!name) return false;
  snprintf(device, 64, "%s", name);
  const size_t size = strlen(arch);
  return strncmp(device, arch, size) == 0 && (device[size] == 0 || device[size] == ':');
}

int load(void** module, const void* image) { return f.hipModuleLoadData(module, image); }
int function(void** function, void* module, const char* symbol) { return f.hipModuleGetFunction(function, module, symbol); }
int admit(void*, const StageRecord& stage, int64_t*) {
  const bool plain = stage.cluster[0] * stage.cluster[1] * stage.cluster[2] == 1 && !(stage.flags & kDependent);
  return plain ? 0 : 1;  // hipErrorInvalidValue
}

int allocate(uint64_t* address, size_t bytes) {
  void* memory = nullptr;
  const int code = f.hipMalloc(&memory, bytes);
  *address = (uint64_t)(uintptr_t)memory;
  return code;
}
int release(uint64_t address) { return f.hipFree((void*)(uintptr_t)address); }
int allocate_async(uint64_t* address, size_t bytes, tw_stream stream) {
  void* memory = nullptr;
  const int code = f.hipMallocAsync(&memory, bytes, stream);
  *address = (uint64_t)(uintptr_t)memory;
  return code;
}
int release_async(uint64_t address, tw_stream stream) { return f.hipFreeAsync((void*)(uintptr_t)address, stream); }
int clear_async(uint64_t address, size_t bytes, tw_stream stream) {
  return f.hipMemsetAsync((void*)(uintptr_t)address, 0, bytes, stream);
}
int upload(uint64_t address, const void* data, size_t bytes) {
  return f.hipMemcpyHtoD((void*)(uintptr_t)address, (void*)data, bytes);
}
int upload_async(uint64_t address, const void* data, size_t bytes, tw_stream stream) {
  return f.hipMemcpyHtoDAsync((void*)(uintptr_t)address, data, bytes, stream);
}

int capture(tw_stream stream, bool* capturing, uint64_t* id, void** graph) {
  int status = 0;
  unsigned long long number = 0;
  const int code = f.hipStreamGetCaptureInfo_v2(stream, &status, &number, graph, nullptr, nullptr);
  *capturing = status == 1, *id = number;
  return code;
}

int stream_id(tw_stream stream, uint64_t* id) { return *id = (uint64_t)(uintptr_t)stream, 0; }

int tie_to_graph(void* graph, void* object, void (*destroy)(void*)) {
  void* user = nullptr;
  const int code = f.hipUserObjectCreate(&user, object, destroy, 1, 1 /* no synchronisation of the destructor */);
  return code ? code : f.hipGraphRetainUserObject(graph, user, 1, 1 /* move */);
}

int swap_capture_mode(int* mode) { return f.hipThreadExchangeStreamCaptureMode(mode); }

int encode(const MapRecord&, uint64_t, void*) { return 1; }  // plans for HIP have none

int launch(void* function, const StageRecord& stage, void* arguments, tw_stream stream) {
  size_t bytes = stage.root_bytes;
  void* extra[] = {(void*)1 /* buffer pointer */, arguments, (void*)2 /* buffer size */, &bytes, (void*)3 /* end */};
  return f.hipModuleLaunchKernel(function, stage.grid[0], stage.grid[1], stage.grid[2], stage.block[0], stage.block[1],
      stage.block[2], stage.shared_bytes, stream, nullptr, extra);
}

int wait_event(tw_stream stream, void* event) { return f.hipStreamWaitEvent(stream, event, 0); }
int record_event(void* event, tw_stream stream) { return f.hipEventRecord(event, stream); }
int wait_value(tw_stream stream, uint64_t address, uint64_t value) {
  constexpr unsigned kAtLeast = 0;
  void* const at = (void*)(uintptr_t)address;
  return f.hipStreamWaitValue64 ? f.hipStreamWaitValue64(stream, at, value, kAtLeast, ~0ull) : kNotSupported;
}
int write_value(tw_stream stream, uint64_t address, uint64_t value) {
  void* const at = (void*)(uintptr_t)address;
  return f.hipStreamWriteValue64 ? f.hipStreamWriteValue64(stream, at, value, 0) : kNotSupported;
}
int finish_event(void* event) { return f.hipEventSynchronize(event); }
int elapsed(float* milliseconds, void* begin, void* end) { return f.hipEventElapsedTime(milliseconds, begin, end); }

constexpr GpuApi kApi = {"libamdhip64.so", open, describe, is_no_memory, context, nullptr, fits, load, function, admit, allocate,
    release, allocate_async, release_async, clear_async, upload, upload_async, capture, stream_id, tie_to_graph,
    swap_capture_mode, encode, launch, wait_event, record_event, wait_value, write_value, finish_event, elapsed};

}  // namespace

const GpuApi& hip_api() { return kApi; }

}  // namespace tw
