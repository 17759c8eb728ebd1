// silu(gate) * up of experts in Hopper's ws pipeline. Rows of weights come in turns of eight, of the gate and of the other
// projection, so that a thread holds the sums of both: in tiles as they are in blocks of columns next to each other, in
// transposed ones in both halves of a block. Threads store results themselves, as far as an expert's rows go.
#pragma once
#include "tilewright/core/moe_rows.hpp"
#include "tilewright/gpu/blocks/epilogue.hpp"
#include "tilewright/sm90/gemm/accumulators.hpp"
#include "tilewright/sm90/gemm/plan.hpp"

namespace tw::sm90 {

template <class Plan, class Results>
struct MoeGate {
  using Result = typename Results::Result;
  using Sums = AccumulatorsOf<Plan>;
  static constexpr int kRepeats = Plan::repeats, kChunks = Sums::chunks, kBlocks = Plan::columns / 8;
  static_assert(Results::gated && !Results::quantised, "results are rounded as they are");
  static_assert(Plan::swap || Plan::columns % 16 == 0, "a consumer has whole turns");

  char* const c;      // the tile's first row of the result
  const int64_t ld;   // elements
  const float alpha;
  const int rows;     // of the expert, from the tile's first on
  const int columns;  // of the result
  const bool pairs;   // two neighbours are an aligned word

  TW_SM90 MoeGate(const tw_gemm_problem& problem, int64_t first, int64_t item, int left)
      : c((char*)problem.c + (first * problem.ldc + item * problem.stride_c) * size_of<Result>),
        ld(problem.ldc),
        alpha((float)problem.alpha),
        rows(left),
        columns((int)problem.n / 2),
        pairs(problem.ldc % 2 == 0 && gpu::is_aligned(c, 2 * size_of<Result>)) {}

  // tile: the column of the product in which the tile begins. wave: this consumer's place.
  TW_SM90 void store(int tile, int wave) const {
    const int thread = threadIdx.x % kWarpgroup, warp = thread / kWarp, lane = thread % kWarp, quad = thread % 4;
    const int x = wave % Plan::x_waves * kRepeats * 64, y = wave / Plan::x_waves * Plan::columns;
#pragma unroll 1
    for (int q = 0; q < kRepeats * kChunks; q++) {
      const int r = q / kChunks, chunk = q % kChunks, line = x + r * 64 + warp * 16;
      uint32_t sums[kChunk];
      Sums::template read<kRepeats * kChunks>(sums, q);
      if constexpr (Plan::swap) {
        const int j = (tile + line) / 2;
#pragma unroll
        for (int b = 0; b < 4; b++) {
          if (chunk * 4 + b >= kBlocks) break;
          const float two[2] = {gated(sums[b * 4], sums[b * 4 + 2]), gated(sums[b * 4 + 1], sums[b * 4 + 3])};
          const int i = y + (chunk * 4 + b) * 8;
          if constexpr (size_of<Result> == 2) {  // rows i + quad * 2 and the next; then columns
            gpu::Packed<Result, 2> turned;
            turned.data.w[0] = transpose_fragment(gpu::pack<Result>(two).data.w[0]);
            put(turned, i + lane / 4, j + quad * 2);
          } else {
#pragma unroll
            for (int e = 0; e < 2; e++) put_one(two[e], i + quad * 2 + e, j + lane / 4);
          }
        }
      } else {
#pragma unroll
        for (int b = 0; b < 4; b += 2) {
          if (chunk * 4 + b >= kBlocks) break;
          const int j = (tile + y + (chunk * 4 + b) * 8) / 2 + quad * 2;
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const int at = b * 4 + h * 2;
            const float two[2] = {gated(sums[at], sums[at + 4]), gated(sums[at + 1], sums[at + 5])};
            put(gpu::pack<Result>(two), line + lane / 4 + h * 8, j);
          }
        }
      }
    }
  }

 private:
  TW_SM90 float gated(uint32_t gate, uint32_t up) const {
    return gpu::apply_unary<Unary::Silu>(gpu::float_of(gate) * alpha, 0.0f, 0.0f) * (gpu::float_of(up) * alpha);
  }
  TW_SM90 void put(const gpu::Packed<Result, 2>& value, int i, int j) const {
    if (i >= rows || j >= columns) return;
    char* const to = c + (i * ld + j) * size_of<Result>;
    if (pairs) {
      gpu::store_global(to, value);
    } else {
      gpu::store_global(to, value.get(0));
      gpu::store_global(to + size_of<Result>, value.get(1));
    }
  }
  TW_SM90 void put_one(float value, int i, int j) const {
    if (i < rows && j < columns) gpu::store_global(c + (i * ld + j) * size_of<Result>, value);
  }
};

}  // namespace tw::sm90
