// Files of launch plans with their code objects.
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/error.hpp"
#include "devices/gpu.hpp"
#include "plan/objects.hpp"
#include "plan/plan.hpp"
#include "common/sha256.hpp"

struct tw_bundle {
  int fd;
  uint64_t bytes;
  const tw::BundleHeader* header;
  const tw::BundleEntry* entries;
  const tw::BundleObject* objects;
  const char* strings;
  unsigned char* index;
};

namespace tw {
namespace {

constexpr uint64_t kMaxIndex = (uint64_t)1 << 30;

tw_status damaged(const char* what) {
  return fail(TW_DAMAGED, "bundle_format", "build the bundle again, or copy it again", "not a bundle: %s", what);
}

bool read_at(int fd, void* into, uint64_t bytes, uint64_t offset) {
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t got = pread(fd, (char*)into + done, bytes - done, (off_t)(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    done += (uint64_t)got;
  }
  return true;
}

bool within(uint64_t offset, uint64_t size, uint64_t total) { return offset <= total && size <= total - offset; }

// NULL if the index is whole; else what is wrong. `index` begins with the header.
const char* read_index(tw_bundle& bundle, uint64_t index_bytes) {
  const BundleHeader& header = *bundle.header;
  const size_t covered = offsetof(BundleHeader, digest) + sizeof header.digest;
  if (!has_digest(bundle.index + covered, index_bytes - covered, header.digest)) return "the digest of its index is wrong";
  bundle.entries = (const BundleEntry*)(bundle.index + sizeof header);
  bundle.objects = (const BundleObject*)(bundle.entries + header.entries);
  bundle.strings = (const char*)(bundle.objects + header.objects);
  if (!header.string_bytes || bundle.strings[header.string_bytes - 1]) return "its strings do not end";
  for (uint32_t i = 0; i < header.entries; i++) {
    const BundleEntry& entry = bundle.entries[i];
    if (entry.name >= header.string_bytes || entry.arch >= header.string_bytes || entry.details >= header.string_bytes)
      return "a name";
    if (!within(entry.offset, entry.bytes, bundle.bytes) || entry.bytes > kMaxIndex) return "an entry";
    if (i && strcmp(bundle.strings + bundle.entries[i - 1].name, bundle.strings + entry.name) > 0)
      return "the order of its entries";
  }
  for (uint32_t i = 0; i < header.objects; i++) {
    const BundleObject& object = bundle.objects[i];
    if (!within(object.offset, object.bytes, bundle.bytes) || !object.bytes || object.bytes > kMaxIndex)
      return "a code object";
    if (i && memcmp(bundle.objects[i - 1].sha256, object.sha256, sizeof object.sha256) >= 0)
      return "the order of its code objects";
  }
  return nullptr;
}

tw_status read_bundle(tw_bundle& bundle) {
  BundleHeader header;
  if (bundle.bytes < sizeof header || !read_at(bundle.fd, &header, sizeof header, 0)) return damaged("it is cut short");
  if (memcmp(header.magic, kBundleMagic, sizeof kBundleMagic) != 0) return damaged("it does not begin as one");
  if (header.version != kFormatVersion)
    return concerning(fail(TW_VERSION, "bundle_version", "build the bundle with the release of this library",
                          "a bundle of format %u, and this library reads %u", header.version, kFormatVersion),
        -1, header.version);
  if (header.header_bytes != sizeof header || header.bytes != bundle.bytes) return damaged("its size is wrong");
  const uint64_t tables = sizeof header + header.entries * (uint64_t)sizeof(BundleEntry) +
                          header.objects * (uint64_t)sizeof(BundleObject);
  if (header.string_bytes > kMaxIndex || tables > kMaxIndex || tables + header.string_bytes > bundle.bytes)
    return damaged("its index does not fit into it");
  const uint64_t index_bytes = tables + header.string_bytes;
  bundle.index = (unsigned char*)malloc(index_bytes);
  if (!bundle.index) return fail(TW_NO_MEMORY, "host_memory", "free memory", "no memory for the index of a bundle");
  if (!read_at(bundle.fd, bundle.index, index_bytes, 0)) return damaged("it is cut short");
  if (memcmp(bundle.index, &header, sizeof header) != 0) return damaged("it changes while it is read");
  bundle.header = (const BundleHeader*)bundle.index;
  const char* const wrong = read_index(bundle, index_bytes);
  return wrong ? damaged(wrong) : TW_OK;
}

const BundleObject* object_of(const tw_bundle* bundle, const uint8_t sha256[32]) {
  uint32_t low = 0, high = bundle->header->objects;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    const int order = memcmp(bundle->objects[middle].sha256, sha256, 32);
    if (!order) return &bundle->objects[middle];
    order < 0 ? low = middle + 1 : high = middle;
  }
  return nullptr;
}

tw_status give_object(const tw_bundle* bundle, const uint8_t sha256[32]) {
  if (tw_object_known(sha256)) return TW_OK;
  const BundleObject* const object = object_of(bundle, sha256);
  if (!object) return damaged("a code object of a plan is missing");
  void* const data = malloc(object->bytes);
  if (!data) return fail(TW_NO_MEMORY, "host_memory", "free memory", "no memory for a code object");
  const bool whole = read_at(bundle->fd, data, object->bytes, object->offset);
  const tw_status status = whole ? tw_object_put(sha256, data, object->bytes) : damaged("it is cut short");
  free(data);
  return status;
}

// Opens a plan without its code objects.
tw_status read_plan(const tw_bundle* bundle, const BundleEntry& entry, tw_plan** plan) {
  void* const data = malloc(entry.bytes ? entry.bytes : 1);
  if (!data) return fail(TW_NO_MEMORY, "host_memory", "free memory", "no memory for a plan");
  const tw_status status = read_at(bundle->fd, data, entry.bytes, entry.offset) ? tw_plan_open(data, entry.bytes, plan)
                                                                               : damaged("it is cut short");
  free(data);
  return status;
}

tw_status give_objects(const tw_bundle* bundle, tw_plan** plan) {
  tw_status status = TW_OK;
  for (uint32_t i = 0; !status && i < (*plan)->header->objects; i++) status = give_object(bundle, (*plan)->objects[i].sha256);
  if (status) tw_plan_close(*plan), *plan = nullptr;
  return status;
}

tw_status open_plan(const tw_bundle* bundle, const BundleEntry& entry, tw_plan** plan) {
  const tw_status status = read_plan(bundle, entry, plan);
  return status ? status : give_objects(bundle, plan);
}

// True if the plan's device is there: this CPU, or the GPU of the current context.
bool runs_here(const tw_plan* plan) {
  const char* missing;
  int length;
  if (plan->header->device_kind == TW_CPU) return cpu_has(plan->text(plan->header->features), &missing, &length);
  const GpuApi& api = plan->header->device_kind == TW_CUDA ? cuda_api() : hip_api();
  uint64_t context;
  char device[64];
  return !api.open() && !api.context(&context) && api.fits(plan->text(plan->header->arch), device);
}

}  // namespace
}  // namespace tw

using namespace tw;

tw_status tw_bundle_open(const char* path, tw_bundle** result) {
  if (!path || !result) return null_argument("tw_bundle_open");
  *result = nullptr;
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  struct stat file;
  if (fd < 0 || fstat(fd, &file) || !S_ISREG(file.st_mode)) {
    const int error = fd < 0 ? errno : EINVAL;
    if (fd >= 0) close(fd);
    return concerning(fail(TW_NOT_FOUND, "bundle_file", "give the path of a bundle that this user may read",
                          "%.180s cannot be opened: %s", path, strerror(error)),
        -1, error);
  }
  tw_bundle* const bundle = (tw_bundle*)calloc(1, sizeof(tw_bundle));
  if (!bundle) {
    close(fd);
    return fail(TW_NO_MEMORY, "host_memory", "free memory", "no memory for a bundle");
  }
  bundle->fd = fd, bundle->bytes = (uint64_t)file.st_size;
  const tw_status status = read_bundle(*bundle);
  if (status) return tw_bundle_close(bundle), status;
  *result = bundle;
  return TW_OK;
}

void tw_bundle_close(tw_bundle* bundle) {
  if (!bundle) return;
  close(bundle->fd);
  free(bundle->index);
  free(bundle);
}

uint32_t tw_bundle_count(const tw_bundle* bundle) { return bundle ? bundle->header->entries : 0; }

tw_status tw_bundle_entry(const tw_bundle* bundle, uint32_t index, const char** name, const char** arch) {
  if (!bundle || !name || !arch) return null_argument("tw_bundle_entry");
  if (index >= bundle->header->entries)
    return fail(TW_INVALID_ARGUMENT, "bundle_index", "count from 0", "the bundle has no plan %u", index);
  *name = bundle->strings + bundle->entries[index].name;
  *arch = bundle->strings + bundle->entries[index].arch;
  return TW_OK;
}

tw_status tw_bundle_plan(tw_bundle* bundle, uint32_t index, tw_plan** plan) {
  if (!bundle || !plan) return null_argument("tw_bundle_plan");
  *plan = nullptr;
  if (index >= bundle->header->entries)
    return fail(TW_INVALID_ARGUMENT, "bundle_index", "count from 0", "the bundle has no plan %u", index);
  return open_plan(bundle, bundle->entries[index], plan);
}

tw_status tw_bundle_find(tw_bundle* bundle, const char* name, tw_plan** plan) {
  if (!bundle || !name || !plan) return null_argument("tw_bundle_find");
  *plan = nullptr;
  uint32_t low = 0, high = bundle->header->entries;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    strcmp(bundle->strings + bundle->entries[middle].name, name) < 0 ? low = middle + 1 : high = middle;
  }
  uint32_t end = low;
  while (end < bundle->header->entries && !strcmp(bundle->strings + bundle->entries[end].name, name)) end++;
  const bool seen = end > low;
  while (end-- > low) {
    tw_plan* found;
    tw_status status = read_plan(bundle, bundle->entries[end], &found);
    if (status) return status;
    if (runs_here(found)) {  // code for other devices stays in the file
      status = give_objects(bundle, &found);
      return *plan = found, status;
    }
    tw_plan_close(found);
  }
  return seen ? fail(TW_WRONG_DEVICE, "bundle_arch", "build the bundle for this machine's architecture too",
                    "the bundle has %.150s for other devices only", name)
              : fail(TW_NOT_FOUND, "bundle_name", "use a name that tw_bundle_entry lists", "the bundle has no %.180s", name);
}

tw_status tw_bundle_verify(tw_bundle* bundle) {
  if (!bundle) return null_argument("tw_bundle_verify");
  for (uint32_t i = 0; i < bundle->header->entries; i++) {
    tw_plan* plan;
    const tw_status status = open_plan(bundle, bundle->entries[i], &plan);
    if (status) return status;
    tw_plan_close(plan);
  }
  for (uint32_t i = 0; i < bundle->header->objects; i++) {
    const BundleObject& object = bundle->objects[i];
    unsigned char* const data = (unsigned char*)malloc(object.bytes);
    if (!data) return fail(TW_NO_MEMORY, "host_memory", "free memory", "no memory for a code object");
    const bool good = read_at(bundle->fd, data, object.bytes, object.offset) && has_digest(data, object.bytes, object.sha256);
    free(data);
    if (!good) return damaged("the digest of a code object is wrong");
  }
  return TW_OK;
}
