// Opens mutated bundles and launch plans: fuzz_bundles FILE COUNT SEED. Built with sanitizers, from the library's own
// sources. Digests are made right again in most turns, so that what is behind them is reached. With a driver of GPUs,
// which must be a simulated one, plans for these are bound and launched as well; no plan of a CPU is.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "plan/format.hpp"
#include "common/sha256.hpp"
#include "tilewright.h"

namespace {

uint64_t state;
uint64_t draw(uint64_t below) {
  state = state * 6364136223846793005u + 1442695040888963407u;
  return (state >> 33) % below;
}

void mutate(unsigned char* data, size_t begin, size_t end) {
  for (uint64_t turns = 1 + draw(4); turns; turns--) {
    unsigned char* const at = data + begin + draw(end - begin);
    static const unsigned char kEdges[] = {0, 1, 127, 128, 255};
    *at = draw(2) ? kEdges[draw(sizeof kEdges)] : (unsigned char)draw(256);
  }
}

void* gpu_stream;  // NULL without a driver
long launched;

// Binds and launches a plan of a GPU on addresses that nothing reads.
void launch(tw_plan* plan, uint32_t operands) {
  uint64_t addresses[256];
  for (uint32_t i = 0; i < operands && i < 256; i++) addresses[i] = ((uint64_t)1 << 40) * (i + 1);
  tw_binding* binding;
  if (operands > 256) return;
  launched += !tw_run(plan, addresses, operands, gpu_stream);
  if (tw_bind(plan, addresses, operands, nullptr, &binding)) return;
  launched += !tw_launch(binding, gpu_stream);
  tw_binding_close(binding);
}

bool open_driver() {
  void *const library = dlopen("libcuda.so.1", RTLD_NOW), *context;
  if (!library) return true;
  const auto begin = (int (*)(unsigned))dlsym(library, "cuInit");
  const auto retain = (int (*)(void**, int))dlsym(library, "cuDevicePrimaryCtxRetain");
  const auto select = (int (*)(void*))dlsym(library, "cuCtxSetCurrent");
  const auto stream = (int (*)(void**, unsigned))dlsym(library, "cuStreamCreate");
  if (!dlsym(library, "simHold")) return fprintf(stderr, "fuzzing is for a simulated driver\n"), false;
  return !begin(0) && !retain(&context, 0) && !select(context) && !stream(&gpu_stream, 1);
}

void look(tw_plan* plan) {
  tw_plan_info info = {};
  info.struct_bytes = sizeof info;
  if (tw_plan_describe(plan, &info)) abort();
  size_t seen = strlen(info.name) + strlen(info.arch) + strlen(info.operation);
  for (uint32_t i = 0; i < info.operands; i++) {
    tw_operand_info operand = {};
    operand.struct_bytes = sizeof operand;
    if (tw_plan_operand(plan, i, &operand)) abort();
    seen += strlen(operand.name) + strlen(operand.dtype);
    for (uint32_t d = 0; d < operand.rank; d++) seen += (size_t)(operand.shape[d] ^ operand.strides[d]);
  }
  for (uint32_t i = 0; i < info.objects; i++) {
    tw_object_info object = {};
    object.struct_bytes = sizeof object;
    if (tw_plan_object(plan, i, &object)) abort();
    seen += object.sha256[31];
  }
  volatile size_t kept = seen;
  (void)kept;
  if (gpu_stream && info.device_kind == TW_CUDA) launch(plan, info.operands);
  tw_plan_close(plan);
}

void seal_plan(unsigned char* plan, size_t bytes) {
  const size_t covered = offsetof(tw::PlanHeader, digest) + 32;
  tw::sha256(plan + covered, bytes - covered, plan + covered - 32);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4 || !open_driver()) return 2;
  FILE* const file = fopen(arguments[1], "rb");
  if (!file) return 2;
  static unsigned char whole[1 << 22], data[1 << 22];
  const size_t bytes = fread(whole, 1, sizeof whole, file);
  fclose(file);
  state = strtoull(arguments[3], nullptr, 10);
  tw::BundleHeader header;
  memcpy(&header, whole, sizeof header);
  const size_t index = sizeof header + header.entries * sizeof(tw::BundleEntry) +
                       header.objects * sizeof(tw::BundleObject) + header.string_bytes;
  const size_t covered = offsetof(tw::BundleHeader, digest) + sizeof header.digest;
  const int place = memfd_create("bundle", 0);
  char path[64];
  snprintf(path, sizeof path, "/proc/self/fd/%d", place);
  long opened = 0, refused = 0;
  for (long turn = 0; turn < atol(arguments[2]); turn++) {
    memcpy(data, whole, bytes);
    size_t size = bytes;
    tw::BundleEntry entry;
    memcpy(&entry, data + sizeof header + draw(header.entries) * sizeof entry, sizeof entry);
    if (turn % 2) {  // a launch plan
      unsigned char* const plan = data + entry.offset;
      mutate(plan, turn % 3 ? sizeof(tw::PlanHeader) - 96 : 0, entry.bytes);
      if (turn % 16 != 1) seal_plan(plan, entry.bytes);
      unsigned char* const exact = (unsigned char*)malloc(entry.bytes);  // so that a read behind its end is seen
      memcpy(exact, plan, entry.bytes);
      tw_plan* found;
      tw_plan_open(exact, turn % 64 == 3 ? draw(entry.bytes) : entry.bytes, &found) ? refused++ : (look(found), opened++);
      free(exact);
      continue;
    }
    mutate(data, turn % 4 ? 0 : covered, turn % 8 ? index : bytes);
    if (turn % 32 == 2) size = draw(bytes);
    if (turn % 6 && size >= index) tw::sha256(data + covered, index - covered, data + covered - 32);
    if (ftruncate(place, 0) || pwrite(place, data, size, 0) != (ssize_t)size) return 2;
    tw_bundle* bundle;
    if (tw_bundle_open(path, &bundle)) {
      refused++;
      continue;
    }
    opened++;
    for (uint32_t i = 0; i < tw_bundle_count(bundle); i++) {
      const char *name, *arch;
      tw_plan* found;
      if (tw_bundle_entry(bundle, i, &name, &arch)) abort();
      if (!tw_bundle_plan(bundle, i, &found)) look(found);
      if (!tw_bundle_find(bundle, name, &found)) look(found);
    }
    tw_bundle_verify(bundle);
    tw_bundle_close(bundle);
  }
  printf("%ld opened, %ld refused\n", opened, refused);
  if (gpu_stream) printf("%ld launched\n", launched);
  return opened && refused ? 0 : 1;
}
