// Products of experts in Hopper's ws pipeline: the producer, main loop and epilogue of the GEMM (sm90/gemm/gemm.hpp),
// with tiles that are found in the counts of experts.
//
// Rows of x are loaded wherever they begin; those that follow an expert's own take part in a tile and are not stored.
// The map of the result shows its rows twice: dimension 1 has tile_m rows, dimension 2 says where they are, and rows
// beyond dimension 1 are not stored. A tile with r rows left of its expert is stored from row tile_m - r on, so that
// the copy engine leaves the next expert's rows alone. The map begins tile_m rows before the result.
//
// Launch: Gemm's threads; shared memory: Gemm's and 8 bytes for each expert and one more, a multiple of 16; results in
// fp8: twice 16 bytes for each consumer and row of a tile behind them. Workgroups stay: at most as many as there are multiprocessors. A cluster (1, 2) has two
// neighbouring tiles of the same rows of x, of which each workgroup loads half for both. Programmatic dependent launch is safe: counts are read only after
// the launch before has ended.
#pragma once
#include "tilewright/sm90/gemm/factors.hpp"
#include "tilewright/sm90/gemm/output.hpp"
#include "tilewright/sm90/moe/results.hpp"
#include "tilewright/sm90/moe/schedule.hpp"

namespace tw::sm90 {

// Defined in sm90/gemm/scaled.hpp, which units of kernels with block scales include.
template <class Plan>
struct StagePart;
template <class Plan>
struct BlockFactors;
template <class Plan>
struct ScaledConsumer;

// A tile's product, as the epilogue takes it.
struct MoeTask {
  const TensorMapBytes& c;
  tw_gemm_problem problem;
  TW_SM90 const tw_gemm_operand* operands() const { return nullptr; }
};

// Bytes of shared memory, twice, through which consumers find the largest magnitudes of rows.
template <class Plan, class Results>
struct MoeExchange {
  static constexpr int bytes = Results::quantised ? Plan::waves * 4 * Plan::tile_m * 4 : 0;
};
template <class Plan>
struct MoeExchange<Plan, void> {
  static constexpr int bytes = 0;
};

template <class C, class Results = void>
struct Moe {
  using Exchange = MoeExchange<GemmPlan<C>, Results>;
  static constexpr bool fused = !is_same<Results, void>, quantised = Exchange::bytes > 0;
  using Plan = GemmPlan<C>;
  using Cluster = typename Plan::Cluster;
  using Table = MoeTable<Plan::tile_m, Plan::tile_n * Cluster::n>;
  using Queue = MoeQueue<Plan::tile_m, Plan::tile_n * Cluster::n, Cluster::n>;  // of clusters
  static constexpr bool blocks = kMoeBlocks<C>, slots = kSharedFactors<Plan, blocks>;
  // Sums of a stage stand beside those of the tile.
  using Registers = Choose<slots, SlotRegisters<Plan>,
                           Choose<blocks, RegisterShares<Plan::consumers, Plan::accumulators + Plan::columns / 2>,
                                  typename Output<Plan>::Registers>>;
  using Multiplier = Choose<slots, SharedScaledConsumer<Plan>, Choose<blocks, ScaledConsumer<Plan>, Consumer<Plan>>>;
  using Barriers = RingBarriers<Plan::stages>;
  static constexpr int threads = Plan::threads;
  static constexpr int kConsumerBarrier = 1, kTurnBarrier = 8, kStartBarrier = 10;
  static constexpr int kTableWarp = 1, kStatusWarp = 2;  // of the producer's
  static_assert(!Plan::partial && Plan::cluster_k == 1, "whole products");
  static_assert(Cluster::size == 1 || (Cluster::m == 1 && Cluster::n == 2 && !Plan::pingpong), "pairs share rows of x");
  static_assert(!blocks || (!Plan::pingpong && Plan::tile_k == kScaleBlock), "as in sm90/gemm/scaled.hpp");
  static_assert(Plan::staged != fused && C::D::size == 0, "the copy engine stores results that are the sums");

  static TW_SM90 void run(const MoeParams& params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = shared_address(memory), table = table_at(shared);
    const Barriers barriers{shared + Plan::barriers_at};
    const int warpgroup = warpgroup_index(), warp = (int)threadIdx.x / kWarp;
    AccumulatorsOf<Plan>::declare();
    if constexpr (blocks) StagePart<Plan>::declare();

    if (warpgroup == 0) {
      if constexpr (Registers::moves) setmaxnreg_dec<Registers::producer>();
      if (threadIdx.x == 0) {
        if constexpr (slots) init_with_slots<Plan>(barriers, slots_at(shared));
        else barriers.init(Plan::waves * Cluster::peers);
        prefetch_map(&params.x);
        prefetch_map(&params.w);
        prefetch_map(&params.out);
      }
      if (warp == kTableWarp) {
        wait_for_previous_launch();
        Table{table}.make(params.args);
      }
      __syncwarp();
      started();
      if (threadIdx.x == 0) {
        launch_dependents();
        wait_for_previous_launch();
        produce(params, Queue(table, params.args), barriers, shared);
      }
      if constexpr (slots)
        if (warp > 0) {
          wait_for_previous_launch();
          produce_factors(params.args, Queue(table, params.args), {barriers, slots_at(shared)});
        }
      if (threadIdx.x == kStatusWarp * kWarp && blockIdx.x == 0) {
        wait_for_previous_launch();
        moe_tell(params.args);
      }
    } else {
      if constexpr (Registers::moves) setmaxnreg_inc<Registers::consumer>();
      started();
      wait_for_previous_launch();
      consume(params, Queue(table, params.args), barriers, shared, warpgroup - 1);
    }
  }

 private:
  // Behind what GEMM has: slots of factors, the table of experts, exchanges of ranges.
  static TW_SM90 uint32_t slots_at(uint32_t shared) { return shared + Plan::shared_bytes; }
  static TW_SM90 uint32_t table_at(uint32_t shared) {
    if constexpr (slots) return slots_at(shared) + FactorSlots<Plan>::bytes;
    else return slots_at(shared);
  }
  static TW_SM90 uint32_t exchange_at(uint32_t shared, const tw_moe_args& args) {
    return (uint32_t)(table_at(shared) + ((args.product.batch + 1) * 8 + 15) / 16 * 16);
  }
  // The barriers and the table are ready, those of the other workgroup of a cluster too.
  static TW_SM90 void started() {
    join_barrier(kStartBarrier, threads);
    if constexpr (Cluster::size > 1) cluster_sync();
  }
  static TW_SM90 int rank() { return Cluster::size == 1 ? 0 : (int)cluster_rank(); }
  // The next tile of this workgroup; of a cluster's last the second may have none of the columns.
  static TW_SM90 bool next(Queue& queue, MoeTile& tile) {
    if (!queue.next(tile)) return false;
    if constexpr (Cluster::size > 1) tile.column = tile.column * Cluster::n + rank();
    return true;
  }
  static TW_SM90 int steps_of(const tw_moe_args& args) {
    return ((int)args.product.k + Plan::tile_k - 1) / Plan::tile_k;
  }

  // One thread: fills the ring for all tiles of this workgroup.
  static TW_SM90 void produce(const MoeParams& params, Queue queue, Barriers barriers, uint32_t shared) {
    const int steps = steps_of(params.args);
    const bool masked = params.args.masked != 0;
    RingState<Plan::stages> ring;
    const int part = rank();
    const uint16_t both = Cluster::row_mask(part);
    MoeTile tile;
    while (next(queue, tile)) {
      const int row = tile.first + tile.row, column = tile.column * Plan::tile_n, item = masked ? tile.expert : 0;
      int k = 0;
#pragma unroll 1
      for (int step = 0; step < steps; step++, k += Plan::tile_k) {
        barriers.wait_empty(ring);
        const uint32_t full = barriers.full(ring.stage);
        arrive_expecting(full, Plan::stage_bytes);
        load_tile<Plan::a_mn, Plan::tile_m, Plan::tile_k, Plan::element, Cluster::n>(
            shared + Plan::a_at + ring.stage * Plan::a_bytes, &params.x, k, row, item, full, part, both);
        load_tile<Plan::b_mn, Plan::tile_n, Plan::tile_k, Plan::element, 1>(
            shared + Plan::b_at + ring.stage * Plan::b_bytes, &params.w, k, column, tile.expert, full, 0, 0);
        ring.next();
      }
    }
    if constexpr (Cluster::size > 1)  // the other workgroup still announces free stages here
#pragma unroll 1
      for (int i = 0; i < Plan::stages; i++, ring.next()) barriers.wait_empty(ring);
  }

  // A tile as a problem of GEMM, whose factors begin at its first row of x and at its expert's weights.
  static TW_SM90 tw_gemm_problem problem_of(const tw_moe_args& args, const MoeTile& tile) {
    tw_gemm_problem problem = args.product;
    moe_move_scales(problem, args, tile.expert, tile.first + tile.row);
    problem.m = tile.rows - tile.row;
    return problem;
  }
  static TW_SM90 Work work_of(const tw_moe_args& args, const MoeTile& tile) {
    Work work = {};
    work.tile_n = tile.column;
    work.steps = steps_of(args);
    return work;
  }
  // A warp.
  static TW_SM90 void produce_factors(const tw_moe_args& args, Queue queue, FactorProducer<Plan> factors) {
    MoeTile tile;
    while (next(queue, tile)) factors.fill(problem_of(args, tile), work_of(args, tile));
  }

  static TW_SM90 Multiplier multiplier(Barriers barriers, uint32_t shared, int wave) {
    if constexpr (slots) return Multiplier(barriers, shared, slots_at(shared), wave, rank());
    else return Multiplier(barriers, shared, wave, rank());
  }

  static TW_SM90 void consume(const MoeParams& params, Queue queue, Barriers barriers, uint32_t shared,
                              int consumer) {
    const tw_moe_args& args = params.args;
    const int wave = Plan::pingpong ? 0 : consumer, thread = threadIdx.x % kWarpgroup, steps = steps_of(args);
    const uint32_t staging = shared + Plan::staging_at + consumer * Plan::buffers * Plan::piece_bytes;
    const int apart = args.masked ? (int)(args.product.stride_c / args.product.ldc) : 0;  // rows from expert to expert
    Multiplier products = multiplier(barriers, shared, wave);
    MoeTile tile;
    // Two exchanges, of which one is at hand.
    const uint32_t behind = exchange_at(shared, args);
    [[maybe_unused]] uint32_t exchange = behind, second = behind ^ (behind + Exchange::bytes);
    bool mine = consumer == 0;
    if constexpr (Plan::pingpong)
      if (consumer == 1) signal_barrier(kTurnBarrier, 2 * kWarpgroup);
    while (next(queue, tile)) {
      if constexpr (Plan::pingpong) {
        if (!mine) {
          products.ring.skip(steps);
          mine = true;
          continue;
        }
        mine = false;
        join_barrier(kTurnBarrier + consumer, 2 * kWarpgroup);
      }
      const auto pass_turn = [&] {
        if constexpr (Plan::pingpong) signal_barrier(kTurnBarrier + 1 - consumer, 2 * kWarpgroup);
      };
      if constexpr (slots) products.multiply_scaled(steps);
      else if constexpr (blocks) products.multiply_scaled(steps, BlockFactors<Plan>(problem_of(args, tile), work_of(args, tile), wave));
      else if constexpr (Plan::promote != 0) products.multiply_promoting(steps, pass_turn);
      else products.multiply(steps, pass_turn);

      if constexpr (quantised) {
        const int first = tile.first + tile.row, left = tile.rows - tile.row;
        if constexpr (Plan::swap)
          MoeQuantised<Plan, Results>(args, tile.expert, first, left).store(tile.column, wave, exchange, kTurnBarrier);
        else MoeRows<Plan, Results>(args, tile.expert, first, left).store(tile.column, wave, exchange, kTurnBarrier);
        exchange ^= second;
      } else if constexpr (fused) {
        tw_gemm_problem problem = args.product;
        problem.alpha = moe_factor(args, tile.expert);
        MoeGate<Plan, Results>(problem, tile.first + tile.row, args.masked ? tile.expert : 0, tile.rows - tile.row)
            .store(tile.column * Plan::tile_n, wave);
      } else {
        store(params, tile, wave, staging, kConsumerBarrier + consumer, apart);
      }
    }
    if constexpr (!fused)
      if (thread == 0) wait_stores_read<0>();  // shared memory lives until then
  }

  // Results that are the sums, by the copy engine.
  static TW_SM90 void store(const MoeParams& params, const MoeTile& tile, int wave, uint32_t staging, int barrier,
                            int apart) {
    MoeTask task{params.out, params.args.product};
    task.problem.alpha = moe_factor(params.args, tile.expert);
    Work work = {};
    work.tile_n = tile.column;
    Output<Plan> output(task, work, wave, staging, barrier);
    const int left = tile.rows - tile.row, skipped = left < Plan::tile_m ? Plan::tile_m - left : 0;
    output.row += skipped;
    output.batch = tile.expert * apart + tile.first + tile.row + Plan::tile_m - skipped;
    typename Output<Plan>::Ahead ahead = {};
    output.begin(ahead);
    output.store(ahead);
  }
};

}  // namespace tw::sm90

#define TW_MOE_KERNEL(NAME, ...)                                                                                   \
  using NAME##_kernel = tw::sm90::Moe<__VA_ARGS__>;                                                                \
  extern "C" __global__ void __launch_bounds__(NAME##_kernel::threads, 1)                                          \
      NAME(const __grid_constant__ tw::sm90::MoeParams params) {                                                   \
    NAME##_kernel::run(params);                                                                                    \
  }
