// The GEMM of Hopper's ws pipeline: one producer warpgroup feeds a ring of shared-memory stages through the copy
// engine, consumer warpgroups multiply (wgmma) and write the results.
//
// Roles. threads = 128 * (1 + consumers); consumers = 2 with pingpong, else wave_m * wave_n. X is the operand whose
// rows are the wgmma's M (A; with transpose_c B), Y the other one: x_tile = tile_m (tile_n), y_tile = tile_n (tile_m).
// N = y_tile / y waves.
//
// Valid configurations (sm90/gemm/plan.hpp asserts all of it):
//   types      A, B both fp16, both bf16, both int8, or any pair of fp8 and bf8; C fp32, fp16 or bf16, after int8 also
//              int32
//   layouts    16-bit: all four; 8-bit: K contiguous in A and B. The tile of an MN-major operand is a multiple of 64
//              (times the extent of the cluster that shares it)
//   tiles      x_tile: multiples of 64 * x waves; y_tile: of 8 * y waves; N <= 256, with int8 8, 24 or multiples of 16;
//              tile_k: lines of 128 bytes (64 or 128 elements and multiples), at most 256
//   registers  accumulators = x_tile / x waves / 64 * N / 2 per thread, twice that with promote: at most 227 with 1
//              consumer, 204 with 2, 132 with 3, 84 with 4. Without spills in practice: 192 with 1 and 2 consumers
//              (128x192 pingpong, 256x192 cooperative), 128 if C is int32 or steps are fused
//   pingpong   wave (1, 1, 1), persistent; each of the two consumers has its own tile of tile_m x tile_n
//   cluster    cluster_m * cluster_n <= 8; A's tile is cut in cluster_n parts, B's in cluster_m, of whole 8 rows
//   cluster_k  an optional constant, 1 if absent. n > 1: cluster_m = cluster_n = 1, split_k = n <= 8, not persistent:
//              the slices of a tile are one cluster and meet in its shared memory, without workspace and counters
//   split_k    cooperative or pingpong, persistent or not, grouped or not; at most 65535 slices with 2 consumers of a
//              tile, 1023 with 3, 255 with 4
//   stream     reduction = linear: cooperative, persistent, one task, split_k = 1
//   promote    fp8, bf8: products (of 32 along k) between promotions, a multiple of tile_k / 32
//   cshuffle   N * sizeof(C) a multiple of 128 (transpose_c: any N, one y wave); rows of C aligned to 16 bytes (base,
//              ldc, batch stride); any n
//   default_   any N, any alignment of C
//   k          at least 1: the copy engine fills in zeros beyond it, but has to have something to copy
//   A and B: aligned to 16 bytes, row and batch strides too.
//
// Shared memory: stages * (tile_m + tile_n) * tile_k * sizeof(A) + staging + gather + 512 bytes, at most 232448.
//   staging    cshuffle: consumers * min(2, pieces) * bytes of a piece. A consumer has x_tile / x waves / 64 * N *
//              sizeof(C) / 128 pieces of 8192 bytes, with transpose_c x_tile / x waves / 64 of N * 64 * sizeof(C)
//   gather     (cluster_k - 1) * tile_m * tile_n * 4
//   stages     as many as fit, at most 24
//
// Launch. Tiles are counted in whole clusters, in launch.tiles and first_tile too: tiles = batch * (ceil(m / tile_m)
// rounded up to cluster_m) * (ceil(n / tile_n) rounded up to cluster_n). grid.x = tiles * split_k; persistent: at most
// the multiprocessors, rounded down to the cluster; Stream-K: all of those. Cluster: (cluster_m * cluster_n *
// cluster_k, 1, 1). Programmatic dependent launch is safe, and pays: memory is touched only after the launch before.
// Workspace: tiles * split_k * tile_m * tile_n * 4 bytes; Stream-K: grid.x * 2 * tile_m * tile_n * 4. Counters: 4 bytes
// per tile.
//
// What was fastest on an H200 (132 multiprocessors; K contiguous in A and B; k = 64 elements of 16 bits or 128 of 8):
//   m, n, k            configuration                                          beside cuBLAS: bf16  fp8   int8
//   1024 cubed         64x128xk, wave (1, 2), not persistent                                 0.96  0.96  1.13
//   2048 cubed         pingpong 128x128xk                                                    1.02  1.02  1.80
//   4096 cubed         pingpong 128x128xk, alone or cluster (1, 2)                           1.05  1.08  1.91
//   8192 cubed         pingpong 128x192xk (int8: 128x128xk)                                  1.06  1.08  1.90
//   4096, 14336, 4096  pingpong 128x128xk, 64x256xk                                          1.03  1.09  2.05
//   8192, 8192, 28672  pingpong 128x192xk, cluster (2, 1) (int8: 128x128xk)                  1.06  1.06  1.89
//   16, 4096, 4096     transpose_c 16x64x2k, split_k = cluster_k = 2, not persistent         1.15  0.99  -
//   64, 8192, 8192     transpose_c 64x64xk or x2k, not persistent                            1.04  1.05  1.12
//   128, 28672, 4096   cooperative 128x256xk, not persistent; fp8, int8: pingpong 128x128xk  1.10  1.05  1.50
// Overlapping launches (dependent): 1024 cubed 1.04, 1.17, 1.28; 16, 4096, 4096 1.22, 1.14, -; the rest up to 1.08.
// Bias and GELU: pingpong 64x256xk; D operands: pingpong 128x128xk. Clusters of more than 2 do not fill the chip.
#pragma once
#include "tilewright/sm90/gemm/mainloop.hpp"
#include "tilewright/sm90/gemm/output.hpp"
#include "tilewright/sm90/gemm/partials.hpp"

namespace tw::sm90 {

template <class C, class Producer = MatrixProducer<GemmPlan<C>>>
struct Gemm {
  using Plan = GemmPlan<C>;
  using Params = typename Producer::Params;
  using Queue = typename GemmQueue<Plan>::type;
  using Cluster = typename Plan::Cluster;
  using Registers = typename Output<Plan>::Registers;
  using Ring = RingState<Plan::stages>;
  static constexpr int threads = Plan::threads;
  // Named barriers: one per consumer, the two by which pingpong's consumers take turns, the start.
  static constexpr int kConsumerBarrier = 1, kTurnBarrier = 8, kStartBarrier = 10;

  static TW_SM90 void run(const Params& params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const RingBarriers<Plan::stages> barriers{shared + Plan::barriers_at};
    const int warpgroup = warpgroup_index(), rank = Cluster::size == 1 ? 0 : (int)cluster_rank();
    const GemmTasks<C> tasks{params};
    AccumulatorsOf<Plan>::declare();

    if (warpgroup == 0) {
      if constexpr (Registers::moves) setmaxnreg_dec<Registers::producer>();
      if (threadIdx.x == 0) make_barriers(barriers);
      if (threadIdx.x == kWarp) prefetch_maps(params);
      started(threadIdx.x < kWarp);
      if (threadIdx.x == 0) {
        launch_dependents();  // its workgroups begin as soon as these leave room
        wait_for_previous_launch();
        const Queue queue(tasks, (int)params.launch.split_k, rank);
        Producer::run(queue, tasks, barriers, shared, rank);
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
    if constexpr (!C::grouped) {
      prefetch_map(&params.task.a);
      prefetch_map(&params.task.b);
      if constexpr (Plan::staged) prefetch_map(&params.task.c);
    }
  }

  static TW_SM90 void make_barriers(RingBarriers<Plan::stages> barriers) {
    if constexpr (Plan::cluster_k > 1)
      for (int consumer = 0; consumer < Plan::consumers; consumer++) {
        const uint32_t gathered = barriers.base + Plan::flags_at - Plan::barriers_at + consumer * 8;
        init_barrier(gathered, 1);
        arrive_expecting(gathered, (Plan::cluster_k - 1) * Plan::sums_bytes);
      }
    barriers.init(Plan::waves * Cluster::peers);
  }

  // The ring's barriers are ready. The warp that made them goes on at once, unless other workgroups use them too.
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

  static TW_SM90 void consume(const Params& params, Queue queue, const GemmTasks<C>& tasks,
                              RingBarriers<Plan::stages> barriers, uint32_t shared, int rank, int consumer) {
    const int wave = Plan::pingpong ? 0 : consumer, thread = threadIdx.x % kWarpgroup;
    const int barrier = kConsumerBarrier + consumer;
    const uint32_t staging = shared + Plan::staging_at + consumer * Plan::buffers * Plan::piece_bytes;
    Consumer<Plan> products(barriers, shared, wave, rank);
    Work work;
    bool mine = consumer == 0;
    if constexpr (Plan::pingpong)
      if (consumer == 1) signal_barrier(kTurnBarrier, 2 * kWarpgroup);
    while (queue.next(work)) {
      if constexpr (Plan::pingpong) {
        if (!mine) {
          products.ring.skip(work.steps);
          mine = true;
          continue;
        }
        mine = false;
      }
      const auto output = [&] { return Output<Plan>(tasks.at(work.task), work, wave, staging, barrier); };
      typename Output<Plan>::Ahead ahead = {};
      if constexpr (!Plan::partial) output().begin(ahead);
      output().fetch_d();
      if constexpr (Plan::pingpong) join_barrier(kTurnBarrier + consumer, 2 * kWarpgroup);
      const auto pass_turn = [&] {
        if constexpr (Plan::pingpong) signal_barrier(kTurnBarrier + 1 - consumer, 2 * kWarpgroup);
      };
      if constexpr (Plan::promote != 0) products.multiply_promoting(work.steps, pass_turn);
      else products.multiply(work.steps, pass_turn);
      bool complete = true;
      if constexpr (Plan::cluster_k > 1) complete = gather(consumer, shared, thread);
      else if constexpr (Plan::partial)
        if (work.parts > 1) complete = combine(params, work, consumer, wave, shared, barrier, thread);
      if (!complete) continue;
      if constexpr (Plan::partial) output().begin(ahead);
      output().store(ahead);
    }
    if constexpr (Plan::staged)
      if (thread == 0) wait_stores_read<0>();  // shared memory lives until then; the launch ends with the writes
  }

  // Sends this part's sums to the cluster's first workgroup, which adds them to its own and returns true.
  static TW_SM90 bool gather(int consumer, uint32_t shared, int thread) {
    const uint32_t barrier = shared + Plan::flags_at + consumer * 8, rank = cluster_rank();
    const uint32_t slots = shared + Plan::gather_at + consumer * Plan::sums_bytes;
    constexpr int kSlot = Plan::waves * Plan::sums_bytes;
    cluster_wait();  // the first has made its barriers
    if (rank != 0) send_sums<Plan>(slots + (rank - 1) * kSlot, barrier, thread);
    else gather_sums<Plan>(slots, kSlot, Plan::cluster_k - 1, barrier, thread);
    return rank == 0;
  }

  // Leaves this part's sums in the workspace; the last part of the tile gets them all and returns true.
  static TW_SM90 bool combine(const Params& params, const Work& work, int consumer, int wave, uint32_t shared,
                              int barrier, int thread) {
    char* const base = (char*)params.launch.workspace + wave * Plan::sums_bytes;
    const auto slot_of = [&](int part) { return base + (int64_t)work.slot(part) * (Plan::tile_m * Plan::tile_n * 4); };
    write_partial<Plan>(slot_of(work.part), thread);
    const uint32_t flag = shared + Plan::flags_at + consumer * 8;
    if (!arrive_last<Plan::waves>(params.launch.counters + work.tile, work.parts, wave, flag, barrier, thread))
      return false;
    add_partials<Plan>(slot_of, work.parts, thread);
    return true;
  }
};

}  // namespace tw::sm90

#define TW_GEMM_KERNEL(NAME, CONFIG)                                               \
  extern "C" __global__ void __launch_bounds__(tw::sm90::Gemm<CONFIG>::threads, 1) \
      NAME(const __grid_constant__ tw::GemmParams<CONFIG> params) {                \
    tw::sm90::Gemm<CONFIG>::run(params);                                           \
  }
