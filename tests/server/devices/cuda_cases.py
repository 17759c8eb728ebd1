"""Kernels for tests of the CUDA device. The simulated driver has each of them in C, by name."""

from __future__ import annotations

import os

from tilewright_kit.contract.source import SourceUnit
from tilewright_server.devices.cuda import discovery

SIMULATED = os.environ.get("TW_SIMULATED_CUDA", "")
"""Path of a driver library that stands for a GPU: see ``test_cuda_simulated.py``."""
if SIMULATED:
    discovery._LIBRARIES = (SIMULATED,)

UNIT = SourceUnit(
    "cuda_cases",
    "cuda",
    r"""
typedef long long i64;
struct Vectors { const float* x; const float* y; float* out; i64 n; };
struct Out { i64* out; };
struct Row { const float* x; i64 n; };
struct Rows { const Row* rows; i64 count; float* out; };
struct Counted { int* counter; i64* out; };
struct alignas(64) Map { unsigned char bytes[128]; };
struct Mapped { Map map; float* out; };

void sum(const Vectors& v) {
  const i64 step = (i64)gridDim.x * blockDim.x;
  for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < v.n; i += step) v.out[i] = v.x[i] + v.y[i];
}
extern "C" __global__ void add(const __grid_constant__ Vectors v) { sum(v); }
extern "C" __global__ void then_add(const __grid_constant__ Vectors v) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  sum(v);
}
extern "C" __global__ void cluster(const __grid_constant__ Out o) {
  unsigned n;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(n));
  if (threadIdx.x == 0) o.out[blockIdx.x] = n;
}
extern "C" __global__ void shared_bytes(const __grid_constant__ Out o) {
  extern __shared__ int words[];
  unsigned bytes;
  asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  for (unsigned i = threadIdx.x; i < bytes / 4; i += blockDim.x) words[i] = 1;
  __syncthreads();
  i64 total = 0;
  if (threadIdx.x == 0) {
    for (unsigned i = 0; i < bytes / 4; i++) total += words[i];
    *o.out = total;
  }
}
extern "C" __global__ void table(const __grid_constant__ Rows r) {
  for (i64 i = threadIdx.x; i < r.count; i += blockDim.x) {
    float total = 0;
    for (i64 j = 0; j < r.rows[i].n; j++) total += r.rows[i].x[j];
    r.out[i] = total;
  }
}
extern "C" __global__ void last(const __grid_constant__ Counted c) {
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(c.counter, 1) != gridDim.x - 1) return;
  *c.out += gridDim.x;
  *c.counter = 0;
}
extern "C" __global__ void gate(const __grid_constant__ Out o) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  while (*(volatile i64*)o.out == 0 && now - begin < 20000000000ull);
}
extern "C" __global__ void fault(const __grid_constant__ Out o) { *(volatile i64*)16 = (i64)o.out; }
extern "C" __global__ void tile(const __grid_constant__ Mapped m) {
  __shared__ alignas(128) float box[64];
  __shared__ alignas(8) unsigned long long barrier;
  const unsigned bar = (unsigned)__cvta_generic_to_shared(&barrier), to = (unsigned)__cvta_generic_to_shared(box);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n fence.mbarrier_init.release.cluster;" ::"r"(bar) : "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 256;" ::"r"(bar) : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%2, %2}], [%3];" ::"r"(to), "l"(&m.map), "r"(0), "r"(bar) : "memory");
  }
  __syncthreads();
  asm volatile("{\n .reg .pred done;\n again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n"
               " @!done bra again;\n}" ::"r"(bar) : "memory");
  m.out[threadIdx.x] = box[threadIdx.x];
}
""",
    {name: name for name in ("add", "then_add", "cluster", "shared_bytes", "table", "last", "gate", "fault", "tile")},
)
