// Factors of blocks in shared memory (sm90/gemm/scaled.hpp says what they are), where each column of the instruction has
// one of its own: every thread needs a quarter of them, and none holds them all. Three warps of the producer fetch them,
// a stage each in turn (one alone would wait for memory longer than a stage takes), and leave them in a slot that belongs
// to a stage. Rows of the instruction that share a factor have it multiplied in;
// otherwise those of rows lie behind those of columns.
#pragma once
#include "tilewright/core/block_scales.hpp"
#include "tilewright/gpu/platform.hpp"
#include "tilewright/sm90/gemm/mainloop.hpp"

namespace tw::sm90 {

template <class Plan>
struct StagePart;

// Kernels whose factors are in shared memory: blocks of 128 rows of the instruction begin where a tile begins or hold it,
// and consumers have whole pieces of 32 columns.
template <class Plan, bool kBlockScaled>
constexpr bool kSharedFactors = false;
template <class Plan>
constexpr bool kSharedFactors<Plan, true> =
    (Plan::Config::scale_columns == 1 || (Plan::swap && (Plan::tile_n % kScaleBlock == 0 || Plan::tile_n == 64))) &&
    (Plan::y_waves == 1 || Plan::columns % 32 == 0);

// Where they lie, as GemmConfig.bytes_beside_stage counts them. The factors of 32 columns lie in the order in which
// threads hold them: the eight of the first quarter of a warp, those of the second, ... A barrier ends a slot: all warps
// of consumers have read it. (That a stage is free again one thread tells for its warpgroup.)
template <class Plan>
struct FactorSlots {
  static constexpr bool each = !Plan::swap || Plan::Config::scale_columns == 1;  // rows have factors of their own
  static constexpr int kBlocks = each ? 1 : (Plan::x_tile + kScaleBlock - 1) / kScaleBlock;
  static constexpr int kPieces = (Plan::y_tile + 31) / 32;
  static constexpr int kBlockBytes = kPieces * 128, kRowsAt = kBlocks * kBlockBytes;
  static constexpr int kFreeAt = kRowsAt + (each ? Plan::x_tile * 4 : 0);
  static constexpr int slot_bytes = kFreeAt + 16, bytes = Plan::stages * slot_bytes;

  static TW_SM90 uint32_t free(uint32_t slots, int stage) { return slots + stage * slot_bytes + kFreeAt; }
  // One thread, before the fence of the ring's barriers.
  static TW_SM90 void init(uint32_t slots) {
    for (int stage = 0; stage < Plan::stages; stage++) init_barrier(free(slots, stage), Plan::waves * 4);
  }
  static TW_SM90 int place(int column) {
    const int within = column % 32;
    return (column / 32 * 32 + within % 8 / 2 * 8 + within / 8 * 2 + within % 2) * 4;
  }
};

// The ring's barriers. A stage is full when its slot is full too.
template <class Plan>
TW_SM90 void init_with_slots(RingBarriers<Plan::stages> barriers, uint32_t slots) {
  FactorSlots<Plan>::init(slots);
  for (int stage = 0; stage < Plan::stages; stage++) {
    init_barrier(barriers.full(stage), 2);
    init_barrier(barriers.empty(stage), Plan::waves * Plan::Cluster::peers);
  }
  fence_barrier_init();
}

// Registers of a producer that holds factors for a while, where consumers have many.
template <class Plan>
struct SlotRegisters : RegisterShares<Plan::consumers, Plan::accumulators + Plan::columns * 3 / 4 + Plan::joining> {
  using Base = RegisterShares<Plan::consumers, Plan::accumulators + Plan::columns * 3 / 4 + Plan::joining>;
  static constexpr bool shifts = Base::moves && Plan::consumers == 2;
  static constexpr int producer = shifts ? 72 : Base::producer, consumer = shifts ? 216 : Base::consumer;
};

// A warp that fills the slots of every third stage.
template <class Plan>
struct FactorProducer {
  using Slots = FactorSlots<Plan>;
  static constexpr int kWarps = 3;  // of the producer, all but the first
  static constexpr int kColumns = Slots::kPieces, kRows = Slots::each ? Plan::x_tile / kWarp : Slots::kBlocks;
  static constexpr int kRowBlock = Slots::each ? 1 : kScaleBlock;

  RingBarriers<Plan::stages> barriers;
  uint32_t slots;
  RingState<Plan::stages> ring;
  int turn;  // stages until this warp's next

  TW_SM90 FactorProducer(RingBarriers<Plan::stages> ring_barriers, uint32_t first)
      : barriers(ring_barriers), slots(first), turn((int)threadIdx.x / kWarp - 1) {}

  // Those of a tile, as BlockFactors finds them.
  TW_SM90 void fill(const tw_gemm_problem& problem, const Work& work) {
    const int lane = threadIdx.x % kWarp, last = ((int)problem.k - 1) / kScaleBlock;
    const tw_gemm_operand &of_rows = Plan::swap ? problem.scale_b : problem.scale_a,
                          &of_columns = Plan::swap ? problem.scale_a : problem.scale_b;
    const float* const rows = start(of_rows, work.batch);
    const float* const columns = start(of_columns, work.batch);
    const int row = (Plan::swap ? work.tile_n : work.tile_m) * Plan::x_tile / kRowBlock + (Slots::each ? lane : 0);
    const int row_end = ((int)(Plan::swap ? problem.n : problem.m) - 1) / kRowBlock;
    const int column = (Plan::swap ? work.tile_m : work.tile_n) * Plan::y_tile + lane;
    const int column_end = (int)(Plan::swap ? problem.m : problem.n) - 1;
    int step = turn;
    if (step >= work.steps) {
      turn -= work.steps;
      ring.skip(work.steps);
      return;
    }
    ring.skip(step);
#pragma unroll 1
    for (;;) {
      const int64_t block = least(work.first_step + step, last);  // beyond the last all elements are zeros
      float of_column[kColumns], of_row[kRows];
#pragma unroll
      for (int i = 0; i < kColumns; i++)
        of_column[i] = at(columns + block * of_columns.col_stride, of_columns, least(column + i * kWarp, column_end));
#pragma unroll
      for (int i = 0; i < kRows; i++)
        of_row[i] = at(rows + block * of_rows.col_stride, of_rows, least(row + i * (Slots::each ? kWarp : 1), row_end));
      wait(Slots::free(slots, ring.stage), ring.parity ^ 1);
      const uint32_t slot = slots + ring.stage * Slots::slot_bytes, to = slot + Slots::place(lane);
#pragma unroll
      for (int i = 0; i < kColumns; i++)
#pragma unroll
        for (int b = 0; b < Slots::kBlocks; b++)
          put(to + b * Slots::kBlockBytes + i * 128, Slots::each ? of_column[i] : of_column[i] * of_row[b]);
      if constexpr (Slots::each)
#pragma unroll
        for (int i = 0; i < kRows; i++) put(slot + Slots::kRowsAt + (lane + i * kWarp) * 4, of_row[i]);
      __syncwarp();
      if (lane == 0) arrive(barriers.full(ring.stage));
      if (step + kWarps >= work.steps) {
        turn = step + kWarps - work.steps;
        ring.skip(work.steps - step);
        return;
      }
      step += kWarps;
      ring.skip(kWarps);
    }
  }

 private:
  static TW_SM90 const float* start(const tw_gemm_operand& of, int batch) {
    return (const float*)of.ptr + batch * of.batch_stride;
  }
  static TW_SM90 float at(const float* first, const tw_gemm_operand& of, int64_t line) {
    return gpu::load_constant<float>((const char*)(first + line * of.row_stride));
  }
  static TW_SM90 int least(int i, int end) { return i < end ? i : end; }
  static TW_SM90 void put(uint32_t to, float value) { gpu::store_shared<1>(to, {gpu::bits_of(value)}); }
};

// One consumer warpgroup, whose factors are there when its stage is.
template <class Plan>
struct SharedScaledConsumer : Consumer<Plan> {
  using Base = Consumer<Plan>;
  using Slots = FactorSlots<Plan>;
  using Base::barriers, Base::release, Base::ring, Base::x, Base::y;
  static constexpr int kChunks = AccumulatorsOf<Plan>::chunks;

  uint32_t slots, columns, rows;  // and this thread's, of the first slot

  TW_SM90 SharedScaledConsumer(RingBarriers<Plan::stages> ring_barriers, uint32_t shared, uint32_t first, int wave,
                               int rank)
      : Base(ring_barriers, shared, wave, rank), slots(first) {
    const int thread = threadIdx.x % kWarpgroup, line = wave % Plan::x_waves * Plan::repeats * 64;
    const int column = wave / Plan::x_waves * Plan::columns, block = Slots::each ? 0 : line / kScaleBlock;
    columns = slots + block * Slots::kBlockBytes + column * 4 + thread % 4 * 32;
    rows = slots + Slots::kRowsAt + (line + thread / kWarp * 16 + thread % kWarp / 4) * 4;
  }

  // The sums of `steps` stages, at least one.
  TW_SM90 void multiply_scaled(int steps) {
    using Sums = AccumulatorsOf<Plan>;
    Sums::template clear<0, Plan::repeats * Sums::chunks>();
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      barriers.wait_full(ring);
      const Descriptor xs = x.moved(ring.stage * (Plan::x_bytes / 16)), ys = y.moved(ring.stage * (Plan::y_bytes / 16));
      const uint32_t slot = ring.stage * Slots::slot_bytes;
      float factors[kChunks][8];
      for_each_index<0, Plan::repeats>([&](auto r) {
        constexpr int kRepeat = decltype(r)::value;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < Plan::k_steps; k++)
          multiply_into<typename Plan::Text, StagePart<Plan>::set>(
              Index<Plan::columns>{}, xs.plus(Base::x_offset(k) + kRepeat * Base::kXRepeat), ys.plus(Base::y_offset(k)),
              k);
        wgmma_commit();
        [[maybe_unused]] float low = 0.0f, high = 0.0f;
        if constexpr (kRepeat == 0)
#pragma unroll
          for (int q = 0; q < kChunks; q++) load(factors[q], columns + slot + q * 128);
        if constexpr (Slots::each) {
          low = gpu::float_of(gpu::load_shared<1>(rows + slot + kRepeat * 256).w[0]);
          high = gpu::float_of(gpu::load_shared<1>(rows + slot + kRepeat * 256 + 32).w[0]);
        }
        wgmma_wait<0>();
        if constexpr (kRepeat == Plan::repeats - 1) {
          release(ring.stage);
          __syncwarp();
          if (threadIdx.x % kWarp == 0) arrive(Slots::free(slots, ring.stage));
        }
        for_each_index<0, kChunks>([&](auto q) {
          constexpr int kAt = decltype(q)::value;
          if constexpr (Slots::each) StagePart<Plan>::template add<kRepeat, kAt>(low, high, factors[kAt]);
          else StagePart<Plan>::template add<kRepeat, kAt>(factors[kAt]);
        });
      });
      ring.next();
    }
  }

 private:
  static TW_SM90 void load(float (&to)[8], uint32_t from) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const gpu::Words<4> four = gpu::load_shared<4>(from + i * 16);
#pragma unroll
      for (int e = 0; e < 4; e++) to[i * 4 + e] = gpu::float_of(four.w[e]);
    }
  }
};

}  // namespace tw::sm90
