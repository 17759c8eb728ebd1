// Opens the plans of a bundle in several threads at once, launches them bound and unbound, and counts launches:
//   launch_threads BUNDLE THREADS LAUNCHES
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tilewright.h"

static tw_bundle* bundle;
static tw_plan* shared_plan;
static tw_launch_record record __attribute__((aligned(64)));
static int launches;

static void check(tw_status status, const char* what) {
  if (!status) return;
  fprintf(stderr, "%s: %s\n", what, tw_last_error()->message);
  exit(2);
}

static void* memory_of(const tw_plan* plan, uint32_t index) {
  tw_operand_info operand = {};
  operand.struct_bytes = sizeof operand;
  check(tw_plan_operand(plan, index, &operand), "operand");
  const size_t bytes = (operand.span_bytes + 63) / 64 * 64;
  void* const memory = aligned_alloc(64, bytes ? bytes : 64);
  memset(memory, 0, bytes ? bytes : 64);
  return memory;
}

static void launch(tw_plan* plan) {
  tw_plan_info info = {};
  info.struct_bytes = sizeof info;
  check(tw_plan_describe(plan, &info), "describe");
  uint64_t addresses[16];
  for (uint32_t i = 0; i < info.operands; i++) addresses[i] = (uint64_t)memory_of(plan, i);
  tw_binding* binding;
  check(tw_bind(plan, addresses, info.operands, nullptr, &binding), "bind");
  for (int i = 0; i < launches; i++) {
    check(tw_launch(binding, nullptr), "launch");
    check(tw_run(plan, addresses, info.operands, nullptr), "run");
  }
  tw_binding_close(binding);
  for (uint32_t i = 0; i < info.operands; i++) free((void*)addresses[i]);
}

static void* work(void*) {
  for (uint32_t i = 0; i < tw_bundle_count(bundle); i++) {
    tw_plan* plan;
    check(tw_bundle_plan(bundle, i, &plan), "plan");
    launch(plan);
    tw_plan_close(plan);
  }
  launch(shared_plan);
  return nullptr;
}

int main(int count, char** words) {
  if (count != 4) return 1;
  const int threads = atoi(words[2]);
  launches = atoi(words[3]);
  check(tw_bundle_open(words[1], &bundle), "bundle");
  check(tw_bundle_plan(bundle, 0, &shared_plan), "plan");
  check(tw_plan_record_into(shared_plan, &record), "record");
  pthread_t started[64];
  for (int i = 0; i < threads; i++) pthread_create(&started[i], nullptr, work, nullptr);
  for (int i = 0; i < threads; i++) pthread_join(started[i], nullptr);
  if (record.launches != (uint64_t)(2 * launches * threads) || record.samples > 1 + record.launches / 1024) return 3;
  printf("counted %llu, timed %llu\n", (unsigned long long)record.launches, (unsigned long long)record.samples);
  tw_plan_close(shared_plan);
  tw_bundle_close(bundle);
  return 0;
}
