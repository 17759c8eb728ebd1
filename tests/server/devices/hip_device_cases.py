"""Kernels for tests of the HIP device. A simulated runtime has an emulator that runs them."""

from __future__ import annotations

import os

from tilewright_kit.contract.source import SourceUnit
from tilewright_server.devices.hip import discovery

SIMULATED = os.environ.get("TW_SIMULATED_HIP", "")
"""Path of a runtime that stands for AMD GPUs: see ``test_hip_simulated.py``."""
if SIMULATED:
    discovery._LIBRARIES = (SIMULATED,)

PLACE = r"""
#define TW_ENTRY extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, 256))) void
#define TW_ANY __attribute__((device)) inline
TW_ANY unsigned thread() { return __builtin_amdgcn_workitem_id_x(); }
TW_ANY unsigned group() { return __builtin_amdgcn_workgroup_id_x(); }
TW_ANY unsigned group_size() { return __builtin_amdgcn_workgroup_size_x(); }
TW_ANY unsigned groups() { return __builtin_amdgcn_grid_size_x() / group_size(); }
typedef long long i64;
struct Vectors { const float* x; const float* y; float* out; i64 n; };
TW_ANY void sum(const Vectors& v) {
  const i64 step = (i64)groups() * group_size();
  for (i64 i = (i64)group() * group_size() + thread(); i < v.n; i += step) v.out[i] = v.x[i] + v.y[i];
}
"""
"""What all of them begin with: no headers, so that every compiler takes it."""

CONFORMANCE = SourceUnit(
    "conformance",
    "hip",
    PLACE
    + r"""
struct Counted { i64* out; };
TW_ENTRY add(const Vectors v) { sum(v); }
TW_ENTRY count(const Counted c) {
  c.out[0] += 1;
  c.out[1] = c.out[2] = 1;
}
""",
    {"add": "add", "count": "count"},
)

UNIT = SourceUnit(
    "hip_device_cases",
    "hip",
    PLACE
    + r"""
struct Out { i64* out; };
struct Row { const float* x; i64 n; };
struct Rows { const Row* rows; i64 count; float* out; };
struct Counted { int* counter; i64* out; };
TW_ENTRY add(const Vectors v) { sum(v); }
TW_ENTRY then_add(const Vectors v) { sum(v); }
TW_ENTRY two(float* x, const float* y) { *x = *y; }
TW_ENTRY table(const Rows r) {
  for (i64 i = thread(); i < r.count; i += group_size()) {
    float total = 0;
    for (i64 k = 0; k < r.rows[i].n; k++) total += r.rows[i].x[k];
    r.out[i] = total;
  }
}
TW_ENTRY last(const Counted c) {
  if (thread() != 0) return;
  if (__hip_atomic_fetch_add(c.counter, 1, __ATOMIC_ACQ_REL, __HIP_MEMORY_SCOPE_AGENT) != (int)groups() - 1) return;
  *c.out += groups();
  *c.counter = 0;
}
TW_ENTRY shared_bytes(const Out o) {
  extern __attribute__((shared)) int words[];
  __attribute__((shared)) static int fixed[16];
  const unsigned n = (unsigned)o.out[1] / 4;
  if (thread() < 16) fixed[thread()] = 1;
  for (unsigned i = thread(); i < n; i += group_size()) words[i] = 1;
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  if (thread() != 0) return;
  i64 total = 0;
  for (unsigned i = 0; i < n; i++) total += words[i];
  for (unsigned i = 0; i < 16; i++) total += fixed[i];
  *o.out = total;
}
TW_ENTRY gate(const Out o) {
  while (__hip_atomic_load(o.out, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM) == 0) __builtin_amdgcn_s_sleep(1);
}
TW_ENTRY fault(const Out o) { *(volatile i64*)16 = (i64)o.out; }
""",
    {name: name for name in ("add", "then_add", "two", "table", "last", "shared_bytes", "gate", "fault")},
)
