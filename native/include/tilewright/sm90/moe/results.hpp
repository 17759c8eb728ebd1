// silu(gate) * up of experts in Hopper's ws pipeline, and results in fp8 with factors of blocks. Rows of weights come in turns of eight, of the gate and of the other
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

// Results in fp8. All consumers walk their sums twice: for the largest magnitudes of rows, which warps leave in shared
// memory, and to store. Two exchanges take turns, so that one barrier a tile is enough.
template <class Plan, class Results>
struct MoeEights {
  using Sums = AccumulatorsOf<Plan>;
  static constexpr int kRepeats = Plan::repeats, kChunks = Sums::chunks, kBlocks = Plan::columns / 8;
  static constexpr int per_result = Results::gated ? 2 : 1;
  static_assert(Results::quantised && !Plan::pingpong, "consumers at work together");

  char* const c;       // the tile's first row of the result
  float* const scales;  // and of factors
  const int64_t ld, row_stride, block_stride;
  const float alpha;
  const int rows, columns;

  TW_SM90 MoeEights(const tw_moe_args& args, int expert, int first, int left)
      : c((char*)args.product.c + first * args.product.ldc + (args.masked ? expert * args.product.stride_c : 0)),
        scales((float*)args.result_scales.ptr + first * args.result_scales.row_stride +
               (args.masked ? expert * args.result_scales.batch_stride : 0)),
        ld(args.product.ldc),
        row_stride(args.result_scales.row_stride),
        block_stride(args.result_scales.col_stride),
        alpha((float)moe_factor(args, expert)),
        rows(left),
        columns((int)args.product.n / per_result) {}

 protected:
  TW_SM90 float gated(uint32_t gate, uint32_t up) const {
    return gpu::apply_unary<Unary::Silu>(gpu::float_of(gate) * alpha, 0.0f, 0.0f) * (gpu::float_of(up) * alpha);
  }
  TW_SM90 void tell(int row, int block, float most) const {
    gpu::store_global((char*)(scales + row * row_stride + block * block_stride), most / kMoeLargest);
  }
  // Two bytes, of two neighbours in a row.
  TW_SM90 void put(uint16_t bytes, int i, int j) const {
    if (i >= rows || j >= columns) return;
    char* const to = c + i * ld + j;
    if (((uintptr_t)to & 1) == 0 && j + 1 < columns) {
      gpu::store_global(to, bytes);
    } else {
      gpu::store_global(to, (uint8_t)bytes);
      if (j + 1 < columns) gpu::store_global(to + 1, (uint8_t)(bytes >> 8));
    }
  }
  static TW_SM90 float larger(float x, float y) { return x < y ? y : x; }
  static TW_SM90 uint16_t fp8_pair(float low, float high) {
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
  }
};

// Those of tiles as they are, with all columns of a block. A quarter of a warp has a row's sums of a consumer.
template <class Plan, class Results>
struct MoeRows : MoeEights<Plan, Results> {
  using Base = MoeEights<Plan, Results>;
  using typename Base::Sums;
  using Base::Base, Base::kRepeats, Base::kChunks, Base::kBlocks, Base::per_result, Base::rows, Base::columns, Base::larger;
  static_assert(!Plan::swap && Plan::tile_n == kMoeBlock * per_result, "a tile has the columns of a block");
  static_assert(Plan::columns % (8 * per_result) == 0, "a consumer has whole turns");

  // column: of the tile, in tiles. exchange: shared memory. Threads of all consumers take part.
  TW_SM90 void store(int column, int wave, uint32_t exchange, int barrier) const {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp, quad = thread % 4;
    const int part = wave / Plan::x_waves, j = (column * Plan::tile_n + part * Plan::columns) / per_result + quad * 2;
    const int line = wave % Plan::x_waves * kRepeats * 64 + thread / kWarp * 16 + lane / 4;
#pragma unroll 1
    for (int r = 0; r < kRepeats; r++) {
      float most[2] = {0.0f, 0.0f};
#pragma unroll 1
      for (int chunk = 0; chunk < kChunks; chunk++) {
        uint32_t sums[kChunk];
        Sums::template read<kRepeats * kChunks>(sums, r * kChunks + chunk);
#pragma unroll
        for (int b = 0; b < 4; b += per_result)
          if (chunk * 4 + b < kBlocks)
#pragma unroll
            for (int i = 0; i < 4; i++)
              most[i / 2] = larger(most[i / 2], gpu::magnitude_of(value(sums, b * 4 + i)));
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int step = 1; step < 4; step *= 2) most[h] = larger(most[h], __shfl_xor_sync(0xffffffffu, most[h], step));
        if (quad == 0)
          gpu::store_shared<1>(exchange + (part * Plan::tile_m + line + r * 64 + h * 8) * 4, {gpu::bits_of(most[h])});
      }
    }
    join_barrier(barrier, Plan::waves * kWarpgroup);
#pragma unroll 1
    for (int r = 0; r < kRepeats; r++) {
      float most[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const int row = line + r * 64 + h * 8;
        most[h] = kMoeLeastRange;
#pragma unroll
        for (int other = 0; other < Plan::y_waves; other++)
          most[h] = larger(most[h],
                           gpu::float_of(gpu::load_shared<1>(exchange + (other * Plan::tile_m + row) * 4).w[0]));
        if (part == 0 && quad == 0 && row < rows && column * kMoeBlock < columns) this->tell(row, column, most[h]);
        most[h] = kMoeLargest / most[h];
      }
#pragma unroll 1
      for (int chunk = 0; chunk < kChunks; chunk++) {
        uint32_t sums[kChunk];
        Sums::template read<kRepeats * kChunks>(sums, r * kChunks + chunk);
#pragma unroll
        for (int b = 0; b < 4; b += per_result)
          if (chunk * 4 + b < kBlocks)
#pragma unroll
            for (int h = 0; h < 2; h++)
              this->put(Base::fp8_pair(value(sums, b * 4 + h * 2) * most[h], value(sums, b * 4 + h * 2 + 1) * most[h]),
                        line + r * 64 + h * 8, j + (chunk * 4 + b) * 8 / per_result);
      }
    }
  }

 private:
  // The value that sum i of a chunk is, or the gate of.
  TW_SM90 float value(const uint32_t (&sums)[kChunk], int i) const {
    if constexpr (Results::gated) return this->gated(sums[i], sums[i + 4]);
    else return gpu::float_of(sums[i]) * this->alpha;
  }
};

// Those of transposed tiles, with all columns of a block: each consumer has a part of them.
template <class Plan, class Results>
struct MoeQuantised : MoeEights<Plan, Results> {
  using Base = MoeEights<Plan, Results>;
  using typename Base::Sums;
  using Base::Base, Base::kRepeats, Base::kChunks, Base::kBlocks, Base::per_result, Base::rows, Base::columns;
  static constexpr int kParts = Plan::waves * 4;  // warps
  static_assert(Plan::tile_n == kMoeBlock * per_result, "a tile has the columns of a block");
  static_assert(Plan::swap && Plan::y_waves == 1, "consumers have columns of the result");

  // column: of the tile, in tiles. exchange: shared memory. Threads of all consumers take part.
  TW_SM90 void store(int column, int wave, uint32_t exchange, int barrier) const {
    const int thread = threadIdx.x % kWarpgroup, warp = thread / kWarp, lane = thread % kWarp, quad = thread % 4;
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; chunk++) {
      float most[8];
#pragma unroll
      for (int i = 0; i < 8; i++) most[i] = 0.0f;
#pragma unroll
      for (int r = 0; r < kRepeats; r++) {
        uint32_t sums[kChunk];
        Sums::template read<kRepeats * kChunks>(sums, r * kChunks + chunk);
#pragma unroll
        for (int i = 0; i < 8; i++)
          if (chunk * 4 + i / 2 < kBlocks)
#pragma unroll
            for (int h = 0; h < 2 / per_result; h++) {
              const float magnitude = gpu::magnitude_of(value(sums, i, h));
              most[i] = most[i] < magnitude ? magnitude : most[i];
            }
      }
#pragma unroll
      for (int i = 0; i < 8; i++) {
#pragma unroll
        for (int step = 4; step < kWarp; step *= 2) {
          const float other = __shfl_xor_sync(0xffffffffu, most[i], step);
          most[i] = most[i] < other ? other : most[i];
        }
        const int row = chunk * 32 + i / 2 * 8 + quad * 2 + i % 2;
        if (lane / 4 == 0 && chunk * 4 + i / 2 < kBlocks)
          gpu::store_shared<1>(exchange + ((wave * 4 + warp) * Plan::tile_m + row) * 4, {gpu::bits_of(most[i])});
      }
    }
    join_barrier(barrier, Plan::waves * kWarpgroup);
    // The second tile of a pair may lie outside.
    const bool tells = wave == 0 && warp == 0 && lane / 4 == 0 && column * kMoeBlock < columns;
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; chunk++) {
      float most[8];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        most[i] = kMoeLeastRange;
        const int row = chunk * 32 + i / 2 * 8 + quad * 2 + i % 2;
        if (chunk * 4 + i / 2 >= kBlocks) continue;
#pragma unroll
        for (int part = 0; part < kParts; part++) {
          const float other = gpu::float_of(gpu::load_shared<1>(exchange + (part * Plan::tile_m + row) * 4).w[0]);
          most[i] = most[i] < other ? other : most[i];
        }
        if (tells && row < rows)
          this->tell(row, column, most[i]);
      }
#pragma unroll
      for (int r = 0; r < kRepeats; r++) {
        uint32_t sums[kChunk];
        Sums::template read<kRepeats * kChunks>(sums, r * kChunks + chunk);
        const int line = column * Plan::tile_n + wave * kRepeats * 64 + r * 64 + warp * 16;
#pragma unroll
        for (int b = 0; b < 4; b++) {
          if (chunk * 4 + b >= kBlocks) break;
#pragma unroll
          for (int h = 0; h < 2 / per_result; h++) {
            uint32_t two = 0;  // of a column: rows quad * 2 and the next
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const float scaled = value(sums, b * 2 + e, h) * (kMoeLargest / most[b * 2 + e]);
              two |= (uint32_t)(uint8_t)Base::fp8_pair(scaled, 0.0f) << (e * 16);
            }
            const uint32_t turned = transpose_fragment(two);  // of row lane / 4: columns quad * 2 and the next
            this->put((uint16_t)((turned & 0xff) | (turned >> 8 & 0xff00)), chunk * 32 + b * 8 + lane / 4,
                      line / per_result + h * 8 + quad * 2);
          }
        }
      }
    }
  }

 private:
  // Row i of a chunk's eight of this thread; plain: half h.
  TW_SM90 float value(const uint32_t (&sums)[kChunk], int i, int h) const {
    const int at = i / 2 * 4 + i % 2;
    if constexpr (Results::gated) return this->gated(sums[at], sums[at + 2]);
    else return gpu::float_of(sums[at + h * 2]) * this->alpha;
  }
};

}  // namespace tw::sm90
