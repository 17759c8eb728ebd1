// The functions of a GPU's driver that launches need. Each returns the driver's code, 0 for success.
#pragma once
#include <stddef.h>

#include "plan/plan.hpp"

namespace tw {

struct GpuApi {
  const char* driver;  // name of the library
  // Finds the driver's functions; once for each process.
  tw_status (*open)();
  void (*describe)(int code, const char** name, const char** text);
  bool (*is_no_memory)(int code);
  // A number of the current context that no other context ever had; an error if none is current.
  int (*context)(uint64_t* id);
  // The same of the context that a stream was made in; an error where the driver does not say. Null: contexts are
  // devices and never end, and launches on foreign streams are the driver's to refuse.
  int (*stream_context)(tw_stream stream, uint64_t* id);
  // True if code for the architecture runs on the current device, which is named in `device`.
  bool (*fits)(const char* arch, char device[64]);
  int (*load)(void** module, const void* image);
  int (*function)(void** function, void* module, const char* symbol);
  // Makes launches of that geometry legal. `taken` is the size of the parameters, -1 where it is not known.
  int (*admit)(void* function, const StageRecord& stage, int64_t* taken);
  int (*allocate)(uint64_t* address, size_t bytes);
  int (*release)(uint64_t address);
  int (*allocate_async)(uint64_t* address, size_t bytes, tw_stream stream);
  int (*release_async)(uint64_t address, tw_stream stream);
  int (*clear_async)(uint64_t address, size_t bytes, tw_stream stream);
  int (*upload)(uint64_t address, const void* data, size_t bytes);
  int (*upload_async)(uint64_t address, const void* data, size_t bytes, tw_stream stream);
  // Finds out if the stream is being captured; then a number of the capture, and its graph.
  int (*capture)(tw_stream stream, bool* capturing, uint64_t* id, void** graph);
  // A number that no other stream of the process ever had, where the driver has one; else its handle.
  int (*stream_id)(tw_stream stream, uint64_t* id);
  // `destroy` is called with `object` when the graph and all that was made from it is gone; it calls no driver.
  int (*tie_to_graph)(void* graph, void* object, void (*destroy)(void*));
  // While a stream is captured: lets this thread allocate beside it. Called again, it restores what was.
  int (*swap_capture_mode)(int* mode);
  int (*encode)(const MapRecord& map, uint64_t address, void* into);
  int (*launch)(void* function, const StageRecord& stage, void* arguments, tw_stream stream);
  int (*wait_event)(tw_stream stream, void* event);  // the stream waits, not the caller
  int (*record_event)(void* event, tw_stream stream);
  // The stream waits until the number at an address is at least `value`, or writes it there behind its work. Null
  // where the driver is not used so.
  int (*wait_value)(tw_stream stream, uint64_t address, uint64_t value);
  int (*write_value)(tw_stream stream, uint64_t address, uint64_t value);
  int (*finish_event)(void* event);  // the caller waits
  int (*elapsed)(float* milliseconds, void* begin, void* end);
};

// While it lives, this thread may allocate, free and load although some stream is being captured.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const GpuApi& api) : api_(api) { api.swap_capture_mode(&mode_); }
  ~RelaxedCapture() { api_.swap_capture_mode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  const GpuApi& api_;
  int mode_ = 2;  // of both drivers
};

// Error for a result of the driver; `what` names the call.
tw_status driver_error(const GpuApi& api, int code, const char* what);
// The driver's functions for a plan of a GPU.
const GpuApi& api_of(const tw_plan* plan);
// Encodes tensor maps of an image; only those that depend on workspace or counters, or only others.
tw_status encode_maps(
    const tw_plan* plan, const GpuApi& api, const uint64_t* places, unsigned char* image, Which which);

const GpuApi& cuda_api();
const GpuApi& hip_api();

// A driver's library: entries of `names` into `functions`. Missing ones are an error, unless their name ends with '?'.
tw_status open_driver(const char* library, const char* const* names, void** functions, size_t count);

}  // namespace tw
