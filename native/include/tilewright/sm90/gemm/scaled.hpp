// The GEMM of Hopper's ws pipeline with block scales. A stage is one block of k (128 elements): its products go into
// sums of their own (the part, 64 x N), which are multiplied with the factors of their rows and columns and added to the
// tile's sums, in fp32. Consumers do so one after the other, so that one multiplies while another scales.
//
// Factors come straight from memory, a few stages ahead, each stage's into registers of its own, as far as there are any
// left: loads take longer than a stage where all multiprocessors are at work. Rows (of the wgmma) take a factor each,
// two for a thread and 64 rows, or one for all 64; columns one for a block of them, or each its own: those come through
// shared memory (sm90/gemm/factors.hpp), or, of tiles with parts of blocks, a lane loads the factor of one column of 32
// and hands it to those who need it.
#pragma once
#include "tilewright/core/block_scales.hpp"
#include "tilewright/gpu/platform.hpp"
#include "tilewright/sm90/gemm/factors.hpp"
#include "tilewright/sm90/gemm/gemm.hpp"

namespace tw::sm90 {

// The set of registers (`Accumulators`) in which the sums of a stage are: beyond those of the tile and of parts of it.
template <class Plan>
struct StagePart {
  using Sums = AccumulatorsOf<Plan>;
  static constexpr int set = Plan::repeats + 1, chunks = Sums::chunks;

  static TW_SM90 void declare() {
    for_each_index<0, chunks>([](auto q) {
      asm volatile(".reg .b32 tw%0_%1_<%2>;" ::"n"(set), "n"(q.value), "n"(Sums::size(q.value)));
    });
  }
  // Adds chunk kChunkAt of the part to the sums of repeat kRepeat: times a factor for each half of the rows,
  template <int kRepeat, int kChunkAt>
  static TW_SM90 void add(float low, float high) {
    add_chunk<kRepeat, kChunkAt>(Index<Sums::size(kChunkAt)>{}, low, high);
  }
  // and one for each of the columns of a thread, two of every eight.
  template <int kRepeat, int kChunkAt>
  static TW_SM90 void add(float low, float high, const float (&columns)[8]) {
    add_chunk<kRepeat, kChunkAt>(Index<Sums::size(kChunkAt)>{}, low, high, columns);
  }
  // and those alone, where all rows share a factor that columns have taken in.
  template <int kRepeat, int kChunkAt>
  static TW_SM90 void add(const float (&columns)[8]) {
    add_chunk<kRepeat, kChunkAt>(Index<Sums::size(kChunkAt)>{}, columns);
  }

 private:
#define TW_SCALED_4(X) X(0, 4, 6) X(1, 4, 7) X(2, 5, 6) X(3, 5, 7)
#define TW_SCALED_8(X) TW_SCALED_4(X) X(4, 4, 8) X(5, 4, 9) X(6, 5, 8) X(7, 5, 9)
#define TW_SCALED_12(X) TW_SCALED_8(X) X(8, 4, 10) X(9, 4, 11) X(10, 5, 10) X(11, 5, 11)
#define TW_SCALED_16(X) TW_SCALED_12(X) X(12, 4, 12) X(13, 4, 13) X(14, 5, 12) X(15, 5, 13)
#define TW_ADD_ROWS(I, R, C) "fma.rn.f32 tw%0_%1_" #I ", tw%2_%3_" #I ", %" #R ", tw%0_%1_" #I ";\n"
#define TW_ADD_BOTH(I, R, C)                                 \
  "mul.f32 tw%2_%3_" #I ", tw%2_%3_" #I ", %" #R ";\n"       \
  "fma.rn.f32 tw%0_%1_" #I ", tw%2_%3_" #I ", %" #C ", tw%0_%1_" #I ";\n"
#define TW_ADD_COLUMNS(I, R, C) "fma.rn.f32 tw%0_%1_" #I ", tw%2_%3_" #I ", %" #C ", tw%0_%1_" #I ";\n"
#define TW_ADD_CHUNK(N)                                                                                           \
  template <int kRepeat, int kAt>                                                                                 \
  static TW_SM90 void add_chunk(Index<N>, float low, float high) {                                                \
    asm volatile(TW_SCALED_##N(TW_ADD_ROWS)::"n"(kRepeat), "n"(kAt), "n"(set), "n"(kAt), "f"(low), "f"(high));    \
  }                                                                                                               \
  template <int kRepeat, int kAt>                                                                                 \
  static TW_SM90 void add_chunk(Index<N>, float low, float high, const float (&f)[8]) {                           \
    asm volatile(TW_SCALED_##N(TW_ADD_BOTH)::"n"(kRepeat), "n"(kAt), "n"(set), "n"(kAt), "f"(low), "f"(high),     \
                 "f"(f[0]), "f"(f[1]), "f"(f[2]), "f"(f[3]), "f"(f[4]), "f"(f[5]), "f"(f[6]), "f"(f[7]));         \
  }                                                                                                               \
  template <int kRepeat, int kAt>                                                                                 \
  static TW_SM90 void add_chunk(Index<N>, const float (&f)[8]) {                                                  \
    asm volatile(TW_SCALED_##N(TW_ADD_COLUMNS)::"n"(kRepeat), "n"(kAt), "n"(set), "n"(kAt), "f"(0.0f), "f"(0.0f), \
                 "f"(f[0]), "f"(f[1]), "f"(f[2]), "f"(f[3]), "f"(f[4]), "f"(f[5]), "f"(f[6]), "f"(f[7]));         \
  }
  TW_ADD_CHUNK(4) TW_ADD_CHUNK(8) TW_ADD_CHUNK(12) TW_ADD_CHUNK(16)
#undef TW_ADD_CHUNK
#undef TW_ADD_COLUMNS
#undef TW_ADD_BOTH
#undef TW_ADD_ROWS
#undef TW_SCALED_16
#undef TW_SCALED_12
#undef TW_SCALED_8
#undef TW_SCALED_4
};

// The factors of a consumer's part of a tile, stage after stage.
template <class Plan>
struct BlockFactors {
  using Config = typename Plan::Config;
  static constexpr int kRepeats = Plan::repeats, kChunks = AccumulatorsOf<Plan>::chunks;
  // Rows of the wgmma that share a factor, and columns.
  static constexpr int kRowBlock = Plan::swap ? Config::scale_columns : 1;
  static constexpr int kColumnBlock = Plan::swap ? 1 : Config::scale_columns;
  static constexpr int kRows = kRowBlock == 1 ? 2 : 1;
  // Columns of a chunk lie in one block. A consumer's columns begin at a multiple of their number.
  static constexpr bool kByChunk = kColumnBlock % 32 == 0 && Plan::columns % 32 == 0;
  static constexpr int kAligned = Plan::columns % 128 == 0 ? 128 : Plan::columns % 64 == 0 ? 64 : 32;
  static constexpr int kBlocks = (Plan::columns + 128 - kAligned + 127) / 128;
  static constexpr int kColumns = kByChunk ? kBlocks : kChunks;
  // Scaling takes long where instructions have many sums, or columns a factor each: loads are then on their way before
  // it begins. Elsewhere they follow it, for several stages.
  static constexpr bool kEarly = Plan::columns * (kByChunk ? 1 : 2) > 128;
  // Stages whose factors are loaded or under way.
  using Registers = RegisterShares<Plan::consumers, Plan::accumulators + Plan::columns / 2 + Plan::joining>;
  static constexpr int kRoom = Registers::consumer - 32 - Plan::accumulators - Plan::columns / 2;
  static constexpr int kFit = kRoom / (kRepeats * kRows + kColumns), kDepth = kEarly || kFit < 1 ? 1 : kFit < 4 ? kFit : 4;

  struct Values {
    float row[kRepeats][kRows];
    float column[kColumns];
  };

  const char* rows[kRepeats][kRows];
  const char* columns;            // of the first column
  int64_t row_step, column_step;  // bytes from one block of k to the next
  int64_t column_stride;          // and from one column, or block of columns, to the next
  int column, column_end;         // this thread's first column, and the last there is
  int left;                       // blocks of k after the one that is loaded next
  int quad;

  TW_SM90 BlockFactors(const tw_gemm_problem& problem, const Work& work, int wave) {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % kWarp;
    const tw_gemm_operand &of_rows = Plan::swap ? problem.scale_b : problem.scale_a,
                          &of_columns = Plan::swap ? problem.scale_a : problem.scale_b;
    const int row_end = (int)(Plan::swap ? problem.n : problem.m) - 1;
    const int row = (Plan::swap ? work.tile_n : work.tile_m) * Plan::x_tile + wave % Plan::x_waves * kRepeats * 64 +
                    thread / kWarp * 16 + lane / 4;
    column = (Plan::swap ? work.tile_m : work.tile_n) * Plan::y_tile + wave / Plan::x_waves * Plan::columns +
             (kByChunk ? 0 : lane);
    column_end = (int)(Plan::swap ? problem.m : problem.n) - 1;
    quad = thread % 4;
    const int last = ((int)problem.k - 1) / kScaleBlock, first = inside(work.first_step, last);
    left = last - first;
    row_step = of_rows.col_stride * 4;
    column_step = of_columns.col_stride * 4;
    column_stride = of_columns.row_stride * 4;
    const char* const row_base = start(of_rows, work.batch) + first * row_step;
    columns = start(of_columns, work.batch) + first * column_step;
#pragma unroll
    for (int r = 0; r < kRepeats; r++)
#pragma unroll
      for (int h = 0; h < kRows; h++)
        rows[r][h] = row_base + inside(row + r * 64 + h * 8, row_end) / kRowBlock * of_rows.row_stride * 4;
  }

  // Those of the next stage; beyond the last, where all elements are zeros, once more those of the last.
  TW_SM90 void load(Values& values) {
#pragma unroll
    for (int r = 0; r < kRepeats; r++)
#pragma unroll
      for (int h = 0; h < kRows; h++) values.row[r][h] = gpu::load_constant<float>(rows[r][h]);
#pragma unroll
    for (int q = 0; q < kColumns; q++) {
      const int at = inside(column + q * (kByChunk ? kColumnBlock : 32), column_end);
      values.column[q] = gpu::load_constant<float>(columns + at / kColumnBlock * column_stride);
    }
    if (left-- <= 0) return;
#pragma unroll
    for (int r = 0; r < kRepeats; r++)
#pragma unroll
      for (int h = 0; h < kRows; h++) rows[r][h] += row_step;
    columns += column_step;
  }

  // Adds the part to the sums of repeat kRepeat.
  template <int kRepeat>
  TW_SM90 void add_part(const Values& values) const {
    for_each_index<0, kChunks>([&](auto q) {
      const float low = values.row[kRepeat][0], high = values.row[kRepeat][kRows - 1];
      if constexpr (kByChunk) {
        float factor = values.column[0];
#pragma unroll
        for (int c = 1; c < kColumns; c++)
          if (column % kColumnBlock + q.value * 32 >= c * kColumnBlock) factor = values.column[c];
        StagePart<Plan>::template add<kRepeat, q.value>(low * factor, high * factor);
      } else {
        const float mine = kRows == 1 ? values.column[q.value] * low : values.column[q.value];
        float each[8];
#pragma unroll
        for (int i = 0; i < 8; i++) each[i] = __shfl_sync(0xffffffffu, mine, i / 2 * 8 + quad * 2 + i % 2);
        if constexpr (kRows == 1) StagePart<Plan>::template add<kRepeat, q.value>(each);
        else StagePart<Plan>::template add<kRepeat, q.value>(low, high, each);
      }
    });
  }

 private:
  static TW_SM90 const char* start(const tw_gemm_operand& of, int batch) {
    return (const char*)of.ptr + batch * of.batch_stride * 4;
  }
  static TW_SM90 int inside(int i, int end) { return i < end ? i : end; }
};

// One consumer warpgroup.
template <class Plan>
struct ScaledConsumer : Consumer<Plan> {
  using Base = Consumer<Plan>;
  using Factors = BlockFactors<Plan>;
  using Base::Base, Base::barriers, Base::release, Base::ring, Base::x, Base::y;

  // The sums of `steps` stages, at least one.
  TW_SM90 void multiply_scaled(int steps, Factors factors) {
    using Sums = AccumulatorsOf<Plan>;
    typename Factors::Values values[Factors::kDepth];
#pragma unroll
    for (int i = 0; i < Factors::kDepth; i++) factors.load(values[i]);
    Sums::template clear<0, Plan::repeats * Sums::chunks>();
#pragma unroll 1
    for (int step = 0; step < steps; step += Factors::kDepth) {
#pragma unroll
      for (int i = 0; i < Factors::kDepth; i++)
        if (i == 0 || step + i < steps) multiply_stage(factors, values[i]);
    }
  }

 private:
  // The next stage, whose factors are there; then those that take their place are loaded.
  TW_SM90 void multiply_stage(Factors& factors, typename Factors::Values& values) {
    barriers.wait_full(ring);
    const Descriptor xs = x.moved(ring.stage * (Plan::x_bytes / 16)), ys = y.moved(ring.stage * (Plan::y_bytes / 16));
    typename Factors::Values early;
    for_each_index<0, Plan::repeats>([&](auto r) {
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < Plan::k_steps; k++)
        multiply_into<typename Plan::Text, StagePart<Plan>::set>(
            Index<Plan::columns>{}, xs.plus(Base::x_offset(k) + r.value * Base::kXRepeat), ys.plus(Base::y_offset(k)),
            k);
      wgmma_commit();
      wgmma_wait<0>();
      if constexpr (r.value == Plan::repeats - 1) release(ring.stage);
      if constexpr (Factors::kEarly && r.value == 0) {
        early = values;
        factors.load(values);
      }
      factors.template add_part<r.value>(Factors::kEarly ? early : values);
    });
    if constexpr (!Factors::kEarly) factors.load(values);
    ring.next();
  }
};

template <class C, int kScaleColumns>
struct Gemm<BlockScaled<C, kScaleColumns>, MatrixProducer<GemmPlan<BlockScaled<C, kScaleColumns>>>> {
  using Config = BlockScaled<C, kScaleColumns>;
  using Plan = GemmPlan<Config>;
  using Producer = MatrixProducer<Plan>;
  using Params = typename Producer::Params;
  using Queue = typename GemmQueue<Plan>::type;
  using Cluster = typename Plan::Cluster;
  static constexpr bool slots = kSharedFactors<Plan, true>;
  using Multiplier = Choose<slots, SharedScaledConsumer<Plan>, ScaledConsumer<Plan>>;
  using Registers = Choose<slots, SlotRegisters<Plan>,
                           RegisterShares<Plan::consumers, Plan::accumulators + Plan::columns / 2 + Plan::joining>>;
  static constexpr int threads = Plan::threads;
  static constexpr int kConsumerBarrier = 1, kStartBarrier = 10;  // named barriers: one per consumer, the start
  static_assert(Plan::k_steps == 4 && Plan::tile_k == kScaleBlock, "a stage is a block of k");
  static_assert(Plan::accumulators + Plan::columns / 2 <= Registers::consumer - 28, "too many accumulators");
  static_assert(!Plan::pingpong && Plan::promote == 0, "consumers work at the same time");

  // As in sm90/gemm/gemm.hpp, but for who multiplies.
  static TW_SM90 void run(const Params& params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const RingBarriers<Plan::stages> barriers{shared + Plan::barriers_at};
    const int warpgroup = warpgroup_index(), rank = Cluster::size == 1 ? 0 : (int)cluster_rank();
    const GemmTasks<Config> tasks{params};
    AccumulatorsOf<Plan>::declare();
    StagePart<Plan>::declare();

    if (warpgroup == 0) {
      if constexpr (Registers::moves) setmaxnreg_dec<Registers::producer>();
      if (threadIdx.x == 0) make_barriers(barriers, shared);
      if (threadIdx.x == kWarp) prefetch_maps(params);
      started(threadIdx.x < kWarp);
      if (threadIdx.x == 0) {
        launch_dependents();
        wait_for_previous_launch();
        const Queue queue(tasks, (int)params.launch.split_k, rank);
        Producer::run(queue, tasks, barriers, shared, rank);
      }
      if constexpr (slots)
        if (threadIdx.x >= kWarp) {
          wait_for_previous_launch();
          produce_factors(Queue(tasks, (int)params.launch.split_k, rank), tasks,
                          {barriers, shared + Plan::shared_bytes});
        }
      if constexpr (Plan::cluster_k > 1) cluster_wait();
    } else {
      if constexpr (Registers::moves) setmaxnreg_inc<Registers::consumer>();
      started(false);
      wait_for_previous_launch();
      const Queue queue(tasks, (int)params.launch.split_k, rank);
      consume(params, queue, tasks, barriers, shared, rank, warpgroup - 1);
    }
  }

 private:
  static TW_SM90 void prefetch_maps(const Params& params) {
    if constexpr (!Config::grouped) {
      prefetch_map(&params.task.a);
      prefetch_map(&params.task.b);
      if constexpr (Plan::staged) prefetch_map(&params.task.c);
    }
  }

  static TW_SM90 void make_barriers(RingBarriers<Plan::stages> barriers, uint32_t shared) {
    if constexpr (Plan::cluster_k > 1)
      for (int consumer = 0; consumer < Plan::consumers; consumer++) {
        const uint32_t gathered = barriers.base + Plan::flags_at - Plan::barriers_at + consumer * 8;
        init_barrier(gathered, 1);
        arrive_expecting(gathered, (Plan::cluster_k - 1) * Plan::sums_bytes);
      }
    if constexpr (slots) init_with_slots<Plan>(barriers, shared + Plan::shared_bytes);
    else barriers.init(Plan::waves * Cluster::peers);
  }

  // A warp.
  static TW_SM90 void produce_factors(Queue queue, const GemmTasks<Config>& tasks, FactorProducer<Plan> factors) {
    Work work;
    while (queue.next(work)) factors.fill(tasks.at(work.task).problem, work);
  }
  static TW_SM90 Multiplier multiplier(RingBarriers<Plan::stages> barriers, uint32_t shared, int consumer, int rank) {
    if constexpr (slots) return Multiplier(barriers, shared, shared + Plan::shared_bytes, consumer, rank);
    else return Multiplier(barriers, shared, consumer, rank);
  }

  static TW_SM90 void started(bool maker) {
    if constexpr (Cluster::size > 1) {
      cluster_sync();
    } else {
      __syncwarp();
      if (maker) signal_barrier(kStartBarrier, threads);
      else join_barrier(kStartBarrier, threads);
      if constexpr (Plan::cluster_k > 1) cluster_arrive();
    }
  }

  static TW_SM90 void consume(const Params& params, Queue queue, const GemmTasks<Config>& tasks,
                              RingBarriers<Plan::stages> barriers, uint32_t shared, int rank, int consumer) {
    const int thread = threadIdx.x % kWarpgroup, barrier = kConsumerBarrier + consumer;
    const uint32_t staging = shared + Plan::staging_at + consumer * Plan::buffers * Plan::piece_bytes;
    Multiplier products = multiplier(barriers, shared, consumer, rank);
    Work work;
    while (queue.next(work)) {
      if constexpr (slots) products.multiply_scaled(work.steps);
      else products.multiply_scaled(work.steps, BlockFactors<Plan>(tasks.at(work.task).problem, work, consumer));
      bool complete = true;
      if constexpr (Plan::cluster_k > 1) complete = gather(consumer, shared, thread);
      else if constexpr (Plan::partial)
        if (work.parts > 1) complete = combine(params, work, consumer, shared, barrier, thread);
      if (!complete) continue;
      const Output<Plan> output(tasks.at(work.task), work, consumer, staging, barrier);
      typename Output<Plan>::Ahead ahead = {};
      output.begin(ahead);
      output.store(ahead);
    }
    if constexpr (Plan::staged)
      if (thread == 0) wait_stores_read<0>();
  }

  static TW_SM90 bool gather(int consumer, uint32_t shared, int thread) {
    const uint32_t barrier = shared + Plan::flags_at + consumer * 8, rank = cluster_rank();
    const uint32_t slots = shared + Plan::gather_at + consumer * Plan::sums_bytes;
    constexpr int kSlot = Plan::waves * Plan::sums_bytes;
    cluster_wait();
    if (rank != 0) send_sums<Plan>(slots + (rank - 1) * kSlot, barrier, thread);
    else gather_sums<Plan>(slots, kSlot, Plan::cluster_k - 1, barrier, thread);
    return rank == 0;
  }

  static TW_SM90 bool combine(const Params& params, const Work& work, int consumer, uint32_t shared, int barrier,
                              int thread) {
    char* const base = (char*)params.launch.workspace + consumer * Plan::sums_bytes;
    const auto slot_of = [&](int part) { return base + (int64_t)work.slot(part) * (Plan::tile_m * Plan::tile_n * 4); };
    write_partial<Plan>(slot_of(work.part), thread);
    const uint32_t flag = shared + Plan::flags_at + consumer * 8;
    if (!arrive_last<Plan::waves>(params.launch.counters + work.tile, work.parts, consumer, flag, barrier, thread))
      return false;
    add_partials<Plan>(slot_of, work.parts, thread);
    return true;
  }
};

}  // namespace tw::sm90
