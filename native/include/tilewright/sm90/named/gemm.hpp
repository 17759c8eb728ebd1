// The GEMM of sm90/gemm.hpp, whose roles, valid configurations, memory and launch it shares, with its sums in registers
// that the kernel names itself, and fused steps in a loop. Fused kernels compile in about half the time.
//
// Not what kernels are generated from yet: bench/sm90_compare.py says what it takes to be that.
#pragma once
#include "tilewright/sm90/named/mainloop.hpp"
#include "tilewright/sm90/named/output.hpp"
#include "tilewright/sm90/named/partials.hpp"

namespace tw::sm90::named {

template <class C>
struct Gemm {
  using Plan = GemmPlan<C>;
  using Params = GemmParams<C>;
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
    SumsOf<Plan>::declare();

    if (warpgroup == 0) {
      if constexpr (Registers::moves) give_registers_up<Registers::producer>();
      if (threadIdx.x == 0) make_barriers(barriers);
      if (threadIdx.x == kWarp) prefetch_maps(params);
      started(threadIdx.x < kWarp);
      if (threadIdx.x == 0) {
        release_next_launch();  // its workgroups begin as soon as these leave room
        wait_for_previous_launch();
        const Queue queue(tasks, (int)params.launch.split_k, rank);
        produce<Plan>(queue, tasks, barriers, shared, rank);
      }
      if constexpr (Plan::cluster_k > 1) cluster_wait();
    } else {
      if constexpr (Registers::moves) take_registers<Registers::consumer>();
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

}  // namespace tw::sm90::named

#define TW_GEMM_KERNEL(NAME, CONFIG)                                                      \
  extern "C" __global__ void __launch_bounds__(tw::sm90::named::Gemm<CONFIG>::threads, 1) \
      NAME(const __grid_constant__ tw::GemmParams<CONFIG> params) {                       \
    tw::sm90::named::Gemm<CONFIG>::run(params);                                           \
  }
