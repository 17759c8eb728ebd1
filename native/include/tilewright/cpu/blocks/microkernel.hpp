// The register tile: MR x NR accumulators that stay in registers while k runs.
#pragma once
#include "tilewright/cpu/blocks/dot.hpp"

TW_NAMESPACE_BEGIN

// out = start + A x B for one register tile. Group (i, s) of A at a[i*a_row + s*a_step]; the NR groups of step s of B
// at b + s*b_step. start and out are MR x NR accumulators with their own leading dimensions: 0 for start repeats one
// row (zeros, for example). start is added at the end: what it takes to fetch it, often from the last-level cache, is
// hidden behind the loop. Every step asks for one more line at `ahead` to come to the second-level cache, ahead_step
// bytes on: what the caller will want next.
template <class Dot, int kMR, int kNR>
TW_INLINE void register_tile(int64_t steps, const uint32_t* a, int64_t a_row, int64_t a_step, const uint32_t* b,
                             int64_t b_step, const typename Dot::scalar* start, int64_t start_ld,
                             typename Dot::scalar* out, int64_t out_ld, const char* ahead, int64_t ahead_step) {
  using V = typename Dot::accumulator;
  static_assert(kNR % kLanes == 0, "warp_tile_n is a multiple of the vector's 32-bit lanes");
  constexpr int kNV = kNR / kLanes;
  V c[kMR][kNV];
  const typename Dot::scalar* const fetched = start_ld ? start : out;
  const int64_t fetched_ld = start_ld ? start_ld : out_ld;
  TW_UNROLL
  for (int i = 0; i < kMR; i++)
    TW_UNROLL
    for (int v = 0; v < kNV; v++) {
      c[i][v] = V{};
      __builtin_prefetch(fetched + i * fetched_ld + v * kLanes, 1, 3);
    }
  TW_UNROLL_BY_2
  for (int64_t s = 0; s < steps; s++) {
    u32v row[kNV];
    __builtin_prefetch(ahead, 0, 2);
    ahead += ahead_step;
    TW_UNROLL
    for (int v = 0; v < kNV; v++) row[v] = load_as<u32v>(b + v * kLanes);
    TW_UNROLL
    for (int i = 0; i < kMR; i++) {
      const u32v spread = splat_bits(load_as<uint32_t>(a + i * a_row));
      TW_UNROLL
      for (int v = 0; v < kNV; v++) c[i][v] = Dot::step(c[i][v], spread, row[v]);
    }
    a += a_step, b += b_step;
  }
  TW_UNROLL
  for (int i = 0; i < kMR; i++)
    TW_UNROLL
    for (int v = 0; v < kNV; v++)
      store_as(out + i * out_ld + v * kLanes, c[i][v] + load_as<V>(start + i * start_ld + v * kLanes));
}

// Both operands packed (see cpu/blocks/pack.hpp): every address is a constant away from two pointers.
template <class Dot, int kMR, int kNR>
TW_NOINLINE void microkernel(int64_t steps, const uint32_t* a, const uint32_t* b, const typename Dot::scalar* start,
                             int64_t start_ld, typename Dot::scalar* out, int64_t out_ld, const char* ahead,
                             int64_t ahead_step) {
  register_tile<Dot, kMR, kNR>(steps, a, 1, kMR, b, kNR, start, start_ld, out, out_ld, ahead, ahead_step);
}

// Operands wherever they lie, for problems so small that packing costs more than it saves.
template <class Dot, int kMR, int kNR>
TW_NOINLINE void microkernel_in_place(int64_t steps, const uint32_t* a, int64_t a_row, int64_t a_step,
                                      const uint32_t* b, int64_t b_step, const typename Dot::scalar* start,
                                      int64_t start_ld, typename Dot::scalar* out, int64_t out_ld) {
  register_tile<Dot, kMR, kNR>(steps, a, a_row, a_step, b, b_step, start, start_ld, out, out_ld, (const char*)b, 0);
}

TW_NAMESPACE_END
