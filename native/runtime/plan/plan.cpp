#include "plan/plan.hpp"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/error.hpp"
#include "common/lock.hpp"
#include "plan/sampling.hpp"
#include "common/sha256.hpp"

namespace tw {

tw_status null_argument(const char* function) {
  return fail(TW_INVALID_ARGUMENT, "argument", "give all arguments", "%s was called with a null pointer", function);
}

namespace {

constexpr uint32_t kMaxCount = 65536;  // operands, and stages, of a plan

tw_status damaged(const char* what) {
  return fail(TW_DAMAGED, "launch_plan_format", "get the launch plan again from the server or bundle",
      "not a launch plan: %s", what);
}

// Reads sections in order.
struct Reader {
  const unsigned char* data;
  uint64_t bytes, at;
  bool good = true;

  template <class T>
  const T* section(uint64_t count) {
    at = (at + 7) / 8 * 8;
    const uint64_t room = at <= bytes ? bytes - at : 0;
    if (!good || count > room / sizeof(T)) {
      good = false;
      return nullptr;
    }
    const T* const found = (const T*)(data + at);
    at += count * sizeof(T);
    return found;
  }
};

bool within(uint64_t offset, uint64_t size, uint64_t total) { return offset <= total && size <= total - offset; }

const char* check_operands(const tw_plan& plan) {
  const PlanHeader& header = *plan.header;
  for (uint32_t i = 0; i < header.operands; i++) {
    const OperandRecord& operand = plan.operands[i];
    if (operand.name >= header.string_bytes || operand.dtype >= header.string_bytes) return "a name of an operand";
    if (operand.role > TW_OUTPUT || operand.rank > kMaxRank) return "an operand";
    if (!within(operand.dims, 2 * (uint64_t)operand.rank, header.dims)) return "the sizes of an operand";
    if (operand.alignment == 0 || operand.alignment & (operand.alignment - 1)) return "an alignment";
    if (operand.span_bytes > (uint64_t)1 << 56) return "the span of an operand";
  }
  for (uint32_t i = 0; i < header.pairs; i++)
    if (plan.pairs[i].output >= header.operands || plan.pairs[i].other >= header.operands) return "a pair of operands";
  return nullptr;
}

const char* check_stages(const tw_plan& plan) {
  const PlanHeader& header = *plan.header;
  for (uint32_t i = 0; i < header.stages; i++) {
    const StageRecord& stage = plan.stages[i];
    // A plan without code objects launches functions that it is given (tw_plan_adopt).
    if (header.objects ? stage.object >= header.objects : stage.object || header.device_kind == TW_CPU) return "a stage";
    if (stage.symbol >= header.string_bytes) return "a stage";
    if (stage.root % kImageAlignment || !within(stage.root, stage.root_bytes, header.tables_at)) return "arguments";
    if (header.device_kind == TW_CPU && (stage.team < 1 || stage.team > header.team)) return "the team of a stage";
  }
  for (uint32_t i = 0; i < header.objects; i++)
    if (!plan.objects[i].bytes) return "a code object";
  return nullptr;
}

const char* check_image(const tw_plan& plan) {
  const PlanHeader& header = *plan.header;
  for (uint32_t i = 0; i < header.relocations; i++) {
    const RelocationRecord& item = plan.relocations[i];
    if (item.offset % 8 || !within(item.offset, 8, header.image_bytes) || item.place > plan.tables_place())
      return "a relocation";
  }
  for (uint32_t i = 0; i < header.maps; i++) {
    const MapRecord& map = plan.maps[i];
    if (map.offset % kImageAlignment || !within(map.offset, 128, header.image_bytes) || map.place > plan.counters_place())
      return "a tensor map";
    if (map.rank < 1 || map.rank > 5 || map.swizzle > 3 || map.fetch > 3 || map.dtype > 15) return "a tensor map";
    if (map.im2col > 1 || (map.im2col && map.rank < 3)) return "a tensor map";
  }
  return nullptr;
}

// NULL if the plan is whole; else what is wrong.
const char* read_plan(tw_plan& plan, uint64_t bytes) {
  const PlanHeader& header = *plan.header;
  Reader reader{plan.bytes, bytes, sizeof(PlanHeader)};
  plan.operands = reader.section<OperandRecord>(header.operands);
  plan.stages = reader.section<StageRecord>(header.stages);
  plan.objects = reader.section<ObjectRecord>(header.objects);
  plan.relocations = reader.section<RelocationRecord>(header.relocations);
  plan.maps = reader.section<MapRecord>(header.maps);
  plan.pairs = reader.section<PairRecord>(header.pairs);
  plan.dims = reader.section<int64_t>(header.dims);
  plan.strings = reader.section<char>(header.string_bytes);
  reader.at = (reader.at + kImageAlignment - 1) / kImageAlignment * kImageAlignment;
  plan.image = reader.section<unsigned char>(header.image_bytes);
  if (!reader.good || reader.at != bytes) return "its sections do not fill it";
  if (!header.string_bytes || plan.strings[header.string_bytes - 1]) return "its strings do not end";
  const uint32_t texts[] = {header.operation, header.arch, header.name, header.features};
  for (const uint32_t text : texts)
    if (text >= header.string_bytes) return "a text";
  if (header.device_kind < TW_CPU || header.device_kind > TW_HIP) return "the kind of device";
  if (header.image_bytes % 8 || header.tables_at > header.image_bytes || header.tables_at % 8) return "its arguments";
  if (header.operands > kMaxCount || header.stages > kMaxCount) return "it has more than 65536 operands or stages";
  if (header.workspace_bytes > (uint64_t)1 << 48 || header.counter_bytes > (uint64_t)1 << 40) return "its workspace";
  if (header.device_kind != TW_CUDA && header.maps) return "tensor maps on another device than CUDA's";
  const char* wrong = check_operands(plan);
  if (!wrong) wrong = check_stages(plan);
  return wrong ? wrong : check_image(plan);
}

void find_late(tw_plan& plan) {
  for (uint32_t i = 0; i < plan.header->relocations; i++) {
    const RelocationRecord& item = plan.relocations[i];
    if (!plan.is_late(item.place)) continue;
    plan.late++;
    plan.late_tables |= item.offset >= plan.header->tables_at;
  }
  for (uint32_t i = 0; i < plan.header->maps; i++) {
    if (!plan.is_late(plan.maps[i].place)) continue;
    plan.late++;
    plan.late_tables |= plan.maps[i].offset >= plan.header->tables_at;
  }
}

void release(tw_plan* plan) {
  if (__atomic_sub_fetch(&plan->references, 1, __ATOMIC_ACQ_REL)) return;
  plan->device->unload(plan);
  if (plan->record) forget_samples(plan->record);
  for (Loaded* loaded = plan->loaded; loaded;) {
    Loaded* const next = loaded->next;
    free(loaded);
    loaded = next;
  }
  free(plan->bytes);
  free(plan);
}

pthread_key_t memory_key;
pthread_once_t memory_once = PTHREAD_ONCE_INIT;
struct ThreadMemory {
  unsigned char* memory[2];
  uint64_t bytes[2];
};
__thread ThreadMemory* own_memory;

void free_memory(void* own) {
  ThreadMemory* const found = (ThreadMemory*)own;
  free(found->memory[0]), free(found->memory[1]);
  free(found);
}
void make_key() { pthread_key_create(&memory_key, free_memory); }

}  // namespace

unsigned char* thread_memory(int slot, uint64_t bytes) {
  ThreadMemory* own = own_memory;
  if (own && own->bytes[slot] >= bytes && bytes) return own->memory[slot];
  if (!own) {
    pthread_once(&memory_once, make_key);
    own = (ThreadMemory*)calloc(1, sizeof(ThreadMemory));
    if (!own || pthread_setspecific(memory_key, own)) return free(own), nullptr;
    own_memory = own;
  }
  const uint64_t size = (bytes < 4096 ? 4096 : bytes + bytes / 4 + 63) / 64 * 64;
  unsigned char* const memory = (unsigned char*)aligned_alloc(64, size);
  if (!memory) return nullptr;
  free(own->memory[slot]);
  own->memory[slot] = memory, own->bytes[slot] = size;
  return memory;
}

tw_status check_addresses(const tw_plan* plan, const uint64_t* addresses, uint32_t count) {
  const PlanHeader& header = *plan->header;
  if (count != header.operands)
    return concerning(fail(TW_INVALID_ARGUMENT, "operand_count", "give one address for each operand, in the plan's order",
                          "the plan has %u operands, not %u", header.operands, count),
        -1, count);
  const OperandRecord* const operands = plan->operands;
  for (uint32_t i = 0; i < count; i++) {
    if (!operands[i].span_bytes) continue;
    if (!addresses[i])
      return concerning(fail(TW_NULL_OPERAND, "operand_address", "say where its data lies", "%s has no memory",
                            plan->text(operands[i].name)),
          (int32_t)i, 0);
    const uint64_t off = addresses[i] & (operands[i].alignment - 1);
    if (off)
      return concerning(fail(TW_MISALIGNED, "operand_alignment", "align the tensor, or make a plan for this alignment",
                            "%s lies %llu bytes behind a multiple of %u, for which the plan was made",
                            plan->text(operands[i].name), (unsigned long long)off, operands[i].alignment),
          (int32_t)i, (int64_t)(off & -off));
  }
  for (uint32_t i = 0; i < header.pairs; i++) {
    const PairRecord& pair = plan->pairs[i];
    const uint64_t output = addresses[pair.output], other = addresses[pair.other];
    if (output < other + operands[pair.other].span_bytes && other < output + operands[pair.output].span_bytes &&
        !(pair.same && output == other))
      return concerning(fail(TW_OVERLAP, "operand_overlap", "give each output memory of its own", "output %s overlaps %s",
                            plan->text(operands[pair.output].name), plan->text(operands[pair.other].name)),
          (int32_t)pair.output, pair.other);
  }
  return TW_OK;
}

bool cpu_has(const char* features, const char** missing, int* length) {
  static char known[16384];
  static Lock lock;
  const Guard guard(lock);
  if (!known[0]) {
    // Words of the first line that lists them, with a blank before and behind each.
    const int fd = open("/proc/cpuinfo", O_RDONLY | O_CLOEXEC);
    static char text[65536];
    size_t have = 0;
    for (ssize_t got; fd >= 0 && have + 1 < sizeof text && (got = read(fd, text + have, sizeof text - 1 - have)) > 0;)
      have += (size_t)got;
    if (fd >= 0) close(fd);
    text[have] = 0;
    char* line = strstr(text, "\nflags");
    if (!line) line = strstr(text, "\nFeatures");
    char* const words = line ? strchr(line, ':') : nullptr;
    char* const end = words ? strchr(words, '\n') : nullptr;
    size_t used = 0;
    known[used++] = ' ';
    for (char* at = words ? words + 1 : nullptr; at && end && at < end && used + 2 < sizeof known; at++) known[used++] = *at;
    known[used] = ' ';
  }
  for (const char* at = features; *at;) {
    const size_t size = strcspn(at, ",");
    char word[64];
    if (size + 3 > sizeof word) return *missing = at, *length = (int)size, false;
    word[0] = ' ';
    memcpy(word + 1, at, size);
    word[size + 1] = ' ', word[size + 2] = 0;
    if (size && !strstr(known, word)) return *missing = at, *length = (int)size, false;
    at += size + (at[size] == ',');
  }
  return true;
}

}  // namespace tw

using namespace tw;

uint32_t tw_abi_version(void) { return TW_ABI_VERSION; }
uint32_t tw_format_version(void) { return kFormatVersion; }

tw_status tw_plan_open(const void* data, size_t bytes, tw_plan** result) {
  if (!data || !result) return null_argument("tw_plan_open");
  *result = nullptr;
  PlanHeader header;
  if (bytes < sizeof header) return damaged("it is cut short");
  memcpy(&header, data, sizeof header);
  if (memcmp(header.magic, kPlanMagic, sizeof kPlanMagic) != 0) return damaged("it does not begin as one");
  if (header.version != kFormatVersion)
    return concerning(fail(TW_VERSION, "launch_plan_version", "use a server and a library of one release",
                          "a launch plan of format %u, and this library reads %u", header.version, kFormatVersion),
        -1, header.version);
  if (header.header_bytes != sizeof header || header.bytes != bytes) return damaged("its size is wrong");
  const size_t covered = offsetof(PlanHeader, digest) + sizeof header.digest;
  if (!has_digest((const char*)data + covered, bytes - covered, header.digest)) return damaged("its digest is wrong");
  tw_plan* const plan = (tw_plan*)calloc(1, sizeof(tw_plan));
  unsigned char* const copy = (unsigned char*)aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!plan || !copy) {
    free(plan), free(copy);
    return fail(TW_NO_MEMORY, "host_memory", "free memory", "no memory for a launch plan of %zu bytes", bytes);
  }
  memcpy(copy, data, bytes);
  plan->references = 1, plan->bytes = copy, plan->header = (const PlanHeader*)copy;
  if (const char* const wrong = read_plan(*plan, bytes)) {
    free(copy), free(plan);
    return damaged(wrong);
  }
  plan->device = header.device_kind == TW_CPU ? &cpu_device() : &gpu_device();
  find_late(*plan);
  *result = plan;
  return TW_OK;
}

void tw_plan_close(tw_plan* plan) {
  if (plan) release(plan);
}

tw_status tw_plan_describe(const tw_plan* plan, tw_plan_info* info) {
  if (!plan || !info || info->struct_bytes < sizeof(tw_plan_info)) return null_argument("tw_plan_describe");
  const PlanHeader& header = *plan->header;
  info->device_kind = (int32_t)header.device_kind, info->operands = header.operands, info->stages = header.stages;
  info->objects = header.objects, info->team = header.team, info->workspace_bytes = header.workspace_bytes;
  info->flops = header.flops, info->operation = plan->text(header.operation), info->arch = plan->text(header.arch);
  info->name = plan->text(header.name);
  return TW_OK;
}

tw_status tw_plan_operand(const tw_plan* plan, uint32_t index, tw_operand_info* info) {
  if (!plan || !info || info->struct_bytes < sizeof(tw_operand_info)) return null_argument("tw_plan_operand");
  if (index >= plan->header->operands)
    return fail(TW_INVALID_ARGUMENT, "operand_index", "count from 0", "the plan has no operand %u", index);
  const OperandRecord& operand = plan->operands[index];
  info->role = (int32_t)operand.role, info->rank = operand.rank, info->alignment = operand.alignment;
  info->span_bytes = operand.span_bytes, info->name = plan->text(operand.name), info->dtype = plan->text(operand.dtype);
  info->shape = plan->dims + operand.dims, info->strides = info->shape + operand.rank;
  return TW_OK;
}

tw_status tw_plan_object(const tw_plan* plan, uint32_t index, tw_object_info* info) {
  if (!plan || !info || info->struct_bytes < sizeof(tw_object_info)) return null_argument("tw_plan_object");
  if (index >= plan->header->objects)
    return fail(TW_INVALID_ARGUMENT, "object_index", "count from 0", "the plan has no code object %u", index);
  const ObjectRecord& object = plan->objects[index];
  info->bytes = object.bytes, info->sha256 = object.sha256, info->known = (uint32_t)tw_object_known(object.sha256);
  return TW_OK;
}

static tw_status loaded_plan(tw_plan* plan, Loaded** loaded) {
  *loaded = nullptr;
  if (!plan->header->stages) return TW_OK;
  return plan->device->load(plan, loaded);
}

tw_status tw_plan_load(tw_plan* plan) {
  if (!plan) return null_argument("tw_plan_load");
  Loaded* loaded;
  return loaded_plan(plan, &loaded);
}

tw_status tw_plan_record_into(tw_plan* plan, tw_launch_record* record) {
  if (!plan) return null_argument("tw_plan_record_into");
  if ((uintptr_t)record % 64)
    return fail(TW_INVALID_ARGUMENT, "record_alignment", "put it at a multiple of 64 bytes", "a record at an odd address");
  tw_launch_record* const before = __atomic_exchange_n(&plan->record, record, __ATOMIC_RELAXED);
  if (before) forget_samples(before);
  return TW_OK;
}

tw_status tw_run(tw_plan* plan, const uint64_t* addresses, uint32_t count, tw_stream stream) {
  if (!plan || (!addresses && count)) return null_argument("tw_run");
  tw_status status = check_addresses(plan, addresses, count);
  Loaded* loaded;
  if (!status) status = loaded_plan(plan, &loaded);
  if (status) return status;
  Sampled sampled(plan, stream);
  if (loaded) status = plan->device->run(plan, loaded, addresses, stream);
  if (!status) sampled.done();
  return status;
}

namespace tw {

tw_status new_binding(tw_plan* plan, const uint64_t* addresses, uint32_t count, tw_binding** result) {
  tw_status status = check_addresses(plan, addresses, count);
  Loaded* loaded;
  if (!status) status = loaded_plan(plan, &loaded);
  if (status) return status;
  const uint64_t image = (plan->header->image_bytes + 63) / 64 * 64, places = (count + 3) * sizeof(uint64_t);
  tw_binding* const binding = (tw_binding*)calloc(1, sizeof(tw_binding));
  unsigned char* const memory = (unsigned char*)aligned_alloc(64, (image + places + 63) / 64 * 64);
  if (!binding || !memory) {
    free(binding), free(memory);
    return fail(TW_NO_MEMORY, "host_memory", "free memory", "no memory for a binding");
  }
  binding->plan = plan, binding->loaded = loaded, binding->memory = memory, binding->image = memory;
  binding->addresses = (uint64_t*)(memory + image);
  if (count) memcpy(binding->addresses, addresses, count * sizeof(uint64_t));
  memset(binding->addresses + count, 0, 3 * sizeof(uint64_t));
  if (image) memcpy(memory, plan->image, plan->header->image_bytes);
  __atomic_add_fetch(&plan->references, 1, __ATOMIC_RELAXED);
  *result = binding;
  return TW_OK;
}

void drop_binding(tw_binding* binding) {
  tw_plan* const plan = binding->plan;
  free(binding->memory);
  free(binding);
  release(plan);
}

}  // namespace tw

tw_status tw_bind(
    tw_plan* plan, const uint64_t* addresses, uint32_t count, const tw_bind_options* options, tw_binding** result) {
  if (!plan || !result || (!addresses && count)) return null_argument("tw_bind");
  *result = nullptr;
  if (options && options->struct_bytes < sizeof(tw_bind_options)) return null_argument("tw_bind");
  tw_binding* binding;
  tw_status status = new_binding(plan, addresses, count, &binding);
  if (!status && binding->loaded) {
    status = plan->device->bind(binding, options);
    if (status) drop_binding(binding);
  }
  if (!status) *result = binding;
  return status;
}

tw_status tw_launch(const tw_binding* binding, tw_stream stream) {
  if (!binding) return null_argument("tw_launch");
  Sampled sampled(binding->plan, stream);
  if (binding->loaded) {
    const tw_status status = binding->plan->device->launch(binding, stream);
    if (status) return status;
  }
  sampled.done();
  return TW_OK;
}

tw_status tw_launch_many(const tw_binding* const* bindings, uint32_t count, tw_stream stream, uint32_t* launched) {
  if (launched) *launched = 0;
  if (!bindings && count) return null_argument("tw_launch_many");
  for (uint32_t i = 0; i < count; i++) {
    const tw_status status = tw_launch(bindings[i], stream);
    if (status) return status;
    if (launched) *launched = i + 1;
  }
  return TW_OK;
}

void tw_binding_close(tw_binding* binding) {
  if (!binding) return;
  if (binding->loaded) binding->plan->device->unbind(binding);
  drop_binding(binding);
}
