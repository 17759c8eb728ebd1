// Launch plans as they are in memory, and the devices that run them.
#pragma once
#include "plan/format.hpp"
#include "plan/objects.hpp"
#include "tilewright.h"

namespace tw {

// Functions of a kind of device for plans. One for each kind, without state of plans.
struct Device {
  // Loads what `plan` needs for the current context: fills in `loaded`.
  tw_status (*load)(tw_plan* plan, struct Loaded** loaded);
  tw_status (*run)(tw_plan* plan, const struct Loaded* loaded, const uint64_t* addresses, tw_stream stream);
  // `binding` has its plan, functions and addresses.
  tw_status (*bind)(tw_binding* binding, const tw_bind_options* options);
  tw_status (*launch)(const tw_binding* binding, tw_stream stream);
  void (*unbind)(tw_binding* binding);
  void (*unload)(tw_plan* plan);
};

const Device& cpu_device();
const Device& gpu_device();

// The functions of a plan's stages in one context.
struct Loaded {
  Loaded* next;
  uint64_t context;
  void* functions[1];  // one for each stage
};

// True if this CPU has all of the features, which are words of /proc/cpuinfo, separated by commas; else `missing`
// begins at the first that it lacks and is `length` long.
bool cpu_has(const char* features, const char** missing, int* length);

}  // namespace tw

struct tw_plan {
  int32_t references;  // the caller's, and one for each binding
  const tw::PlanHeader* header;
  const tw::OperandRecord* operands;
  const tw::StageRecord* stages;
  const tw::ObjectRecord* objects;
  const tw::RelocationRecord* relocations;
  const tw::MapRecord* maps;
  const tw::PairRecord* pairs;
  const int64_t* dims;
  const char* strings;
  const unsigned char* image;
  const tw::Device* device;
  tw_launch_record* record;  // where launches are counted; NULL: nowhere
  tw::Loaded* loaded;  // list; entries are added at its head and stay until the end
  uint32_t late;       // relocations and maps that depend on workspace or counters
  bool late_tables;    // some of them lie in the tables
  unsigned char* bytes;

  uint32_t workspace_place() const { return header->operands; }
  uint32_t counters_place() const { return header->operands + 1; }
  uint32_t tables_place() const { return header->operands + 2; }
  bool is_late(uint32_t place) const { return place == workspace_place() || place == counters_place(); }
  const char* text(uint32_t offset) const { return strings + offset; }
};

struct tw_binding {
  tw_plan* plan;
  const tw::Loaded* loaded;
  uint64_t* addresses;   // of all places
  unsigned char* image;  // at a multiple of 64; complete unless the workspace is the library's
  bool complete;
  uint64_t tables;     // address in device memory
  uint64_t workspace;  // that was allocated for this binding alone
  void* memory;        // one piece for image and addresses
};

namespace tw {

// A binding of a plan whose functions are loaded, with its addresses, its image and nothing in it.
tw_status new_binding(tw_plan* plan, const uint64_t* addresses, uint32_t count, tw_binding** result);
// Takes a binding that `new_binding` made back.
void drop_binding(tw_binding* binding);
tw_status null_argument(const char* function);

// Errors in addresses: null, alignment, overlap.
tw_status check_addresses(const tw_plan* plan, const uint64_t* addresses, uint32_t count);

// Writes addresses of `places` into relocations of an image; only late ones, or only others.
enum class Which { kAll, kLate, kEarly };
inline void relocate(const tw_plan* plan, const uint64_t* places, unsigned char* image, Which which) {
  const RelocationRecord* at = plan->relocations;
  for (const RelocationRecord* end = at + plan->header->relocations; at < end; at++) {
    if (which != Which::kAll && plan->is_late(at->place) != (which == Which::kLate)) continue;
    *(uint64_t*)(image + at->offset) = places[at->place] + (uint64_t)at->addend;
  }
}

// Memory of the calling thread at a multiple of 64, which the next call in the same thread may move; NULL if there is
// none left. `slot` is 0 or 1.
unsigned char* thread_memory(int slot, uint64_t bytes);

}  // namespace tw
