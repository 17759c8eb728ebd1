// The C entry points of Composable Kernel's dispatcher for products, on top of tilewright.h: a page, since a bundle has
// the kernels. Products are fp32 with B column by column (rcr); `tilewright bundle build --gemm M x N x K --dtype fp32`
// makes them. Returns are the original's: 0 done, -1 an error, -2 no kernel. For one thread.
#pragma once
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "tilewright.h"

inline tw_bundle* dispatcher_bundle = nullptr;

// The bundle is the one that the environment names as TILEWRIGHT_BUNDLE.
inline int dispatcher_initialize() {
  const char* const path = std::getenv("TILEWRIGHT_BUNDLE");
  return path && tw_bundle_open(path, &dispatcher_bundle) == TW_OK ? 0 : -1;
}

inline void dispatcher_cleanup() {
  tw_bundle_close(dispatcher_bundle);
  dispatcher_bundle = nullptr;
}

inline int dispatcher_get_kernel_count() { return (int)tw_bundle_count(dispatcher_bundle); }

inline tw_status dispatcher_find(int64_t m, int64_t n, int64_t k, tw_plan** plan) {
  char name[256];
  std::snprintf(name, sizeof name, "gemm(a: fp32[%lld, %lld], b: fp32[%lld, %lld]:[1, %lld], out: fp32[%lld, %lld])",
      (long long)m, (long long)k, (long long)k, (long long)n, (long long)k, (long long)m, (long long)n);
  return tw_bundle_find(dispatcher_bundle, name, plan);
}

inline int dispatcher_is_supported(int64_t m, int64_t n, int64_t k) {
  tw_plan* plan = nullptr;
  const bool found = dispatcher_find(m, n, k, &plan) == TW_OK;
  tw_plan_close(plan);
  return found;
}

inline int dispatcher_run_gemm(
    const void* a, const void* b, void* c, int64_t m, int64_t n, int64_t k, float* time_ms) {
  if (time_ms) *time_ms = -1;
  if (!dispatcher_bundle || !a || !b || !c) return -1;
  tw_plan* plan = nullptr;
  if (dispatcher_find(m, n, k, &plan)) return -2;
  const uint64_t operands[] = {(uint64_t)a, (uint64_t)b, (uint64_t)c};
  const auto begin = std::chrono::steady_clock::now();
  const tw_status status = tw_run(plan, operands, 3, nullptr);
  const std::chrono::duration<float, std::milli> took = std::chrono::steady_clock::now() - begin;
  tw_plan_close(plan);
  if (status) return -1;
  if (time_ms) *time_ms = took.count();
  return 0;
}
