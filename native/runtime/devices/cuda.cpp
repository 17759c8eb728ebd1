// CUDA's driver, declared here as far as it is used: CUDA driver API 12.0, cuda.h.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "devices/gpu.hpp"

namespace tw {
namespace {

struct Attribute {  // CUlaunchAttribute
  int32_t id;
  int32_t pad;
  union {
    struct {
      uint32_t x, y, z;
    } cluster;
    int32_t dependent;
    char bytes[64];
  } value;
};

struct Config {  // CUlaunchConfig
  uint32_t grid[3], block[3];
  uint32_t shared_bytes;
  void* stream;
  Attribute* attributes;
  uint32_t attribute_count;
};

enum { kNoMemory = 2, kInvalidContext = 201, kNotSupported = 801 };
enum { kComputeMajor = 75, kComputeMinor = 76 };           // CUdevice_attribute
enum { kMaxSharedBytes = 8, kNonPortableCluster = 14 };    // CUfunction_attribute
enum { kClusterDimension = 4, kDependentLaunch = 6 };      // CUlaunchAttributeID
constexpr uintptr_t kLastDefaultStream = 2;                // CU_STREAM_PER_THREAD; 1 is the legacy one
constexpr uint32_t kPortableCluster = 8;                   // workgroups; CUDA programming guide, thread block clusters

#define TW_CUDA_FUNCTIONS(X)                                                                                        \
  X(cuInit, (unsigned))                                                                                             \
  X(cuCtxGetId, (void*, unsigned long long*))                                                                       \
  X(cuCtxGetCurrent, (void**))                                                                                      \
  X(cuCtxGetDevice, (int*))                                                                                         \
  X(cuDeviceGetAttribute, (int*, int, int))                                                                         \
  X(cuGetErrorName, (int, const char**))                                                                            \
  X(cuGetErrorString, (int, const char**))                                                                          \
  X(cuModuleLoadData, (void**, const void*))                                                                        \
  X(cuModuleGetFunction, (void**, void*, const char*))                                                              \
  X(cuFuncSetAttribute, (void*, int, int))                                                                          \
  X(cuMemAlloc_v2, (uint64_t*, size_t))                                                                             \
  X(cuMemFree_v2, (uint64_t))                                                                                       \
  X(cuMemAllocAsync, (uint64_t*, size_t, void*))                                                                    \
  X(cuMemFreeAsync, (uint64_t, void*))                                                                              \
  X(cuMemsetD8Async, (uint64_t, unsigned char, size_t, void*))                                                      \
  X(cuMemcpyHtoD_v2, (uint64_t, const void*, size_t))                                                               \
  X(cuMemcpyHtoDAsync_v2, (uint64_t, const void*, size_t, void*))                                                   \
  X(cuStreamWaitEvent, (void*, void*, unsigned))                                                                    \
  X(cuEventRecord, (void*, void*))                                                                                  \
  X(cuEventSynchronize, (void*))                                                                                    \
  X(cuStreamGetCaptureInfo_v2, (void*, int*, uint64_t*, void**, void*, size_t*))                                    \
  X(cuStreamGetCtx, (void*, void**))                                                                                \
  X(cuStreamGetId, (void*, unsigned long long*))                                                                    \
  X(cuUserObjectCreate, (void**, void*, void (*)(void*), unsigned, unsigned))                                       \
  X(cuGraphRetainUserObject, (void*, void*, unsigned, unsigned))                                                    \
  X(cuThreadExchangeStreamCaptureMode, (int*))                                                                      \
  X(cuTensorMapEncodeTiled, (void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*,        \
                                const uint32_t*, int, int, int, int))                                               \
  X(cuTensorMapEncodeIm2col, (void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const int*, const int*, \
                                 uint32_t, uint32_t, const uint32_t*, int, int, int, int))                          \
  X(cuLaunchKernelEx, (const Config*, void*, void**, void**))

struct Functions {
#define TW_FIELD(name, arguments) int(*name) arguments;
  TW_CUDA_FUNCTIONS(TW_FIELD)
#undef TW_FIELD
  int (*cuFuncLoad)(void*);
  int (*cuFuncGetParamInfo)(void*, size_t, size_t*, size_t*);
  int (*cuEventElapsedTime_v2)(float*, void*, void*);
  int (*cuEventElapsedTime)(float*, void*, void*);
};

Functions f;
tw_status opened = TW_NO_DRIVER;
pthread_once_t once = PTHREAD_ONCE_INIT;

void open_once() {
  static const char* const names[] = {
#define TW_NAME(name, arguments) #name,
      TW_CUDA_FUNCTIONS(TW_NAME)
#undef TW_NAME
      "cuFuncLoad?",  // from 12.4
      "cuFuncGetParamInfo?",
      "cuEventElapsedTime_v2?",  // from 12.8, where the other is not in every driver
      "cuEventElapsedTime?"};
  void* found[sizeof names / sizeof *names];
  opened = open_driver("libcuda.so.1", names, found, sizeof names / sizeof *names);
  static_assert(sizeof found == sizeof f, "one pointer each");
  memcpy(&f, found, sizeof f);
  if (!opened) f.cuInit(0);
}

tw_status open() {
  pthread_once(&once, open_once);
  // The error is the thread's own: who asks later is told as well.
  return opened ? open_driver("libcuda.so.1", nullptr, nullptr, 0) ? TW_NO_DRIVER : opened : TW_OK;
}

void describe(int code, const char** name, const char** text) {
  if (f.cuGetErrorName(code, name)) *name = "an error";
  if (f.cuGetErrorString(code, text)) *text = "unknown";
}

bool is_no_memory(int code) { return code == kNoMemory; }

int context(uint64_t* id) {
  unsigned long long number = 0;
  void* current = nullptr;
  int code = f.cuCtxGetId(nullptr, &number);
  if (!code) return *id = number, 0;
  code = f.cuCtxGetCurrent(&current);
  return code ? code : kInvalidContext;
}

int stream_context(tw_stream stream, uint64_t* id) {
  if ((uintptr_t)stream <= kLastDefaultStream) return context(id);
  void* owner = nullptr;
  unsigned long long number = 0;
  int code = f.cuStreamGetCtx(stream, &owner);
  if (!code) code = f.cuCtxGetId(owner, &number);
  *id = number;
  return code;
}

bool fits(const char* arch, char device[64]) {
  int ordinal = 0, major = 0, minor = 0;
  if (f.cuCtxGetDevice(&ordinal) || f.cuDeviceGetAttribute(&major, kComputeMajor, ordinal) ||
      f.cuDeviceGetAttribute(&minor, kComputeMinor, ordinal))
    return false;
  snprintf(device, 64, "sm_%d%d", major, minor);
  if (strncmp(arch, "sm_", 3) != 0) return false;
  char* end;
  const long number = strtol(arch + 3, &end, 10);
  // Code of a major version runs on later minor ones, unless it uses what only this one has.
  return number / 10 == major && (*end ? number % 10 == minor : number % 10 <= minor);
}

int load(void** module, const void* image) { return f.cuModuleLoadData(module, image); }
int function(void** function, void* module, const char* symbol) { return f.cuModuleGetFunction(function, module, symbol); }

int admit(void* function, const StageRecord& stage, int64_t* taken) {
  // Code that is loaded at its first launch would make that launch wait for everything else on the device.
  if (f.cuFuncLoad) {
    const int code = f.cuFuncLoad(function);
    if (code) return code;
  }
  if (f.cuFuncGetParamInfo) {
    size_t offset = 0, size = 0;
    *taken = f.cuFuncGetParamInfo(function, 0, &offset, &size) ? 0 : (int64_t)size;
  }
  if (stage.shared_bytes) {
    const int code = f.cuFuncSetAttribute(function, kMaxSharedBytes, (int)stage.shared_bytes);
    if (code) return code;
  }
  if (stage.cluster[0] * stage.cluster[1] * stage.cluster[2] > kPortableCluster)
    return f.cuFuncSetAttribute(function, kNonPortableCluster, 1);
  return 0;
}

int allocate(uint64_t* address, size_t bytes) { return f.cuMemAlloc_v2(address, bytes); }
int release(uint64_t address) { return f.cuMemFree_v2(address); }
int allocate_async(uint64_t* address, size_t bytes, tw_stream stream) { return f.cuMemAllocAsync(address, bytes, stream); }
int release_async(uint64_t address, tw_stream stream) { return f.cuMemFreeAsync(address, stream); }
int clear_async(uint64_t address, size_t bytes, tw_stream stream) { return f.cuMemsetD8Async(address, 0, bytes, stream); }
int upload(uint64_t address, const void* data, size_t bytes) { return f.cuMemcpyHtoD_v2(address, data, bytes); }
int upload_async(uint64_t address, const void* data, size_t bytes, tw_stream stream) {
  return f.cuMemcpyHtoDAsync_v2(address, data, bytes, stream);
}

int capture(tw_stream stream, bool* capturing, uint64_t* id, void** graph) {
  int status = 0;
  const int code = f.cuStreamGetCaptureInfo_v2(stream, &status, id, graph, nullptr, nullptr);
  *capturing = status == 1;
  return code;
}

int stream_id(tw_stream stream, uint64_t* id) {
  unsigned long long number = 0;
  const int code = f.cuStreamGetId(stream, &number);
  *id = number;
  return code;
}

int tie_to_graph(void* graph, void* object, void (*destroy)(void*)) {
  void* user = nullptr;
  const int code = f.cuUserObjectCreate(&user, object, destroy, 1, 1 /* NO_DESTRUCTOR_SYNC */);
  return code ? code : f.cuGraphRetainUserObject(graph, user, 1, 1 /* MOVE */);
}

int swap_capture_mode(int* mode) { return f.cuThreadExchangeStreamCaptureMode(mode); }

int encode(const MapRecord& map, uint64_t address, void* into) {
  void* const memory = (void*)(uintptr_t)address;
  const int type = (int)map.dtype, swizzle = (int)map.swizzle, fetch = (int)map.fetch;
  uint32_t step[5] = {1, 1, 1, 1, 1};
  if (!map.im2col)
    return f.cuTensorMapEncodeTiled(
        into, type, map.rank, memory, map.sizes, map.strides, map.box, step, 0, swizzle, fetch, 0);
  for (uint32_t i = 0; i + 2 < map.rank; i++) step[i + 1] = map.step[i];
  return f.cuTensorMapEncodeIm2col(into, type, map.rank, memory, map.sizes, map.strides, map.lower, map.upper, map.box[0],
      map.box[1], step, 0, swizzle, fetch, 0);
}

int launch(void* function, const StageRecord& stage, void* arguments, tw_stream stream) {
  Attribute attributes[2];
  Config config;
  memcpy(config.grid, stage.grid, sizeof config.grid);
  memcpy(config.block, stage.block, sizeof config.block);
  config.shared_bytes = stage.shared_bytes, config.stream = stream;
  config.attributes = attributes, config.attribute_count = 0;
  if (stage.cluster[0] * stage.cluster[1] * stage.cluster[2] > 1) {
    Attribute& cluster = attributes[config.attribute_count++];
    cluster.id = kClusterDimension;
    cluster.value.cluster.x = stage.cluster[0], cluster.value.cluster.y = stage.cluster[1];
    cluster.value.cluster.z = stage.cluster[2];
  }
  if (stage.flags & kDependent) {
    Attribute& dependent = attributes[config.attribute_count++];
    dependent.id = kDependentLaunch;
    dependent.value.dependent = 1;
  }
  void* parameters[] = {arguments};
  return f.cuLaunchKernelEx(&config, function, parameters, nullptr);
}

int wait_event(tw_stream stream, void* event) { return f.cuStreamWaitEvent(stream, event, 0); }
int record_event(void* event, tw_stream stream) { return f.cuEventRecord(event, stream); }
int finish_event(void* event) { return f.cuEventSynchronize(event); }
int elapsed(float* milliseconds, void* begin, void* end) {
  const auto function = f.cuEventElapsedTime_v2 ? f.cuEventElapsedTime_v2 : f.cuEventElapsedTime;
  return function ? function(milliseconds, begin, end) : kNotSupported;
}

constexpr GpuApi kApi = {"libcuda.so.1", open, describe, is_no_memory, context, stream_context, fits, load, function, admit, allocate,
    release, allocate_async, release_async, clear_async, upload, upload_async, capture, stream_id, tie_to_graph,
    swap_capture_mode, encode, launch, wait_event, record_event, nullptr, nullptr, finish_event, elapsed};

}  // namespace

const GpuApi& cuda_api() { return kApi; }

}  // namespace tw
