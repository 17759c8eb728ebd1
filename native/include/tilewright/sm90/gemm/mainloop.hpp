// The two sides of the GEMM's ring of stages: the producer, which copies tiles of A and B in, and the consumers, which
// multiply them.
#pragma once
#include "tilewright/sm90/gemm/plan.hpp"
#include "tilewright/sm90/gemm/accumulators.hpp"
#include "tilewright/sm90/blocks/tma.hpp"

namespace tw::sm90 {

// The copies of one operand's tile. kMn: MN-major. kRows: rows of the whole tile (along m or n), of which this
// workgroup loads the part-th of kParts equal parts, for all kParts workgroups in `ranks`.
template <bool kMn, int kRows, int kTileK, int kElement, int kParts>
TW_SM90 void load_tile(uint32_t to, const void* map, int k, int row, int batch, uint32_t barrier, int part,
                       uint16_t ranks) {
  constexpr int kCopies = kMn ? kRows / 64 / kParts : kTileK * kElement / 128, kShare = kRows / kParts;
#pragma unroll
  for (int i = 0; i < kCopies; i++) {
    const int panel = part * kCopies + i;  // MN-major
    const uint32_t address = kMn ? to + panel * kTileK * 128 : to + i * kRows * 128 + part * kShare * 128;
    const Coordinates at = kMn ? Coordinates{row + panel * 64, k, batch}
                               : Coordinates{k + i * (128 / kElement), row + part * kShare, batch};
    if constexpr (kParts == 1) tma_load(address, map, at, barrier);
    else tma_load_multicast(address, map, at, barrier, ranks);
  }
}

// One thread: fills the ring for all the work of this workgroup.
template <class Plan, class Queue, class Tasks>
TW_SM90 void produce(Queue queue, const Tasks& tasks, RingBarriers<Plan::stages> barriers, uint32_t shared, int rank) {
  using Config = typename Plan::Config;
  using Cluster = typename Plan::Cluster;
  const int m_part = Cluster::n_of(rank), n_part = Cluster::m_of(rank);
  const uint16_t rows = Cluster::row_mask(rank), columns = Cluster::column_mask(rank);
  RingState<Plan::stages> ring;
  Work work;
  while (queue.next(work)) {
    const auto& task = tasks.at(work.task);
    const int a_batch = task.problem.stride_a == 0 ? 0 : work.batch;
    const int b_batch = task.problem.stride_b == 0 ? 0 : work.batch;
    const int row = work.tile_m * Plan::tile_m, column = work.tile_n * Plan::tile_n;
    int k = work.first_step * Plan::tile_k;
#pragma unroll 1
    for (int step = 0; step < work.steps; step++, k += Plan::tile_k) {
      barriers.wait_empty(ring);
      const uint32_t full = barriers.full(ring.stage);
      arrive_expecting(full, Plan::stage_bytes);
      load_tile<Plan::a_mn, Plan::tile_m, Plan::tile_k, Plan::element, Cluster::n>(
          shared + Plan::a_at + ring.stage * Plan::a_bytes, &task.a, k, row, a_batch, full, m_part, rows);
      load_tile<Plan::b_mn, Plan::tile_n, Plan::tile_k, Plan::element, Cluster::m>(
          shared + Plan::b_at + ring.stage * Plan::b_bytes, &task.b, k, column, b_batch, full, n_part, columns);
      ring.next();
    }
  }
  if constexpr (Cluster::size > 1)  // peers still announce free stages here: this workgroup must live until they have
#pragma unroll 1
    for (int i = 0; i < Plan::stages; i++, ring.next()) barriers.wait_empty(ring);
}

// The producer of a plain product. Other operations have others (sm90/conv/): Params is the kernel's only parameter.
template <class Plan>
struct MatrixProducer {
  using Params = GemmParams<typename Plan::Config>;
  template <class Queue, class Tasks>
  static TW_SM90 void run(const Queue& queue, const Tasks& tasks, RingBarriers<Plan::stages> barriers, uint32_t shared,
                          int rank) {
    produce<Plan>(queue, tasks, barriers, shared, rank);
  }
};

// One consumer warpgroup's view of the ring.
template <class Plan>
struct Consumer {
  using Accumulators = AccumulatorsOf<Plan>;
  using Ring = RingState<Plan::stages>;
  static constexpr int kRepeats = Plan::repeats;
  // Compilers take long over products that hold many sums: so steps along k are a loop, each a group of its own. Not
  // where it would hold up the tensor cores: small products take less than a turn of the loop, and with promotion
  // nothing else is under way.
  static constexpr bool kLoop = kRepeats * Plan::columns >= 192 && Plan::k_steps == 4 && Plan::promote == 0;
  static constexpr int kUnroll = kLoop ? 1 : Plan::k_steps;
  // Units of 16 bytes from one step of 32 bytes along k to the next within a line of 128 bytes, and from line to line.
  static constexpr int kXRepeat = Plan::x_mn ? Plan::panel_bytes / 16 : 64 * 128 / 16;

  RingBarriers<Plan::stages> barriers;
  Descriptor x, y;
  Ring ring;
  uint32_t released;  // the address at which this thread announces that a stage may be filled again
  bool releases;

  TW_SM90 Consumer(RingBarriers<Plan::stages> ring_barriers, uint32_t shared, int wave, int rank)
      : barriers(ring_barriers) {
    using Cluster = typename Plan::Cluster;
    const int x_wave = wave % Plan::x_waves, y_wave = wave / Plan::x_waves;
    const uint32_t x_at = shared + (Plan::swap ? Plan::b_at : Plan::a_at) +
                          x_wave * kRepeats * (Plan::x_mn ? Plan::panel_bytes : 64 * 128);
    const uint32_t y_at = shared + (Plan::swap ? Plan::a_at : Plan::b_at) +
                          y_wave * (Plan::y_mn ? Plan::columns / 64 * Plan::panel_bytes : Plan::columns * 128);
    x = Plan::x_mn ? mn_major(x_at, Plan::panel_bytes) : k_major(x_at);
    y = Plan::y_mn ? mn_major(y_at, Plan::panel_bytes) : k_major(y_at);
    const int thread = threadIdx.x % kWarpgroup;
    releases = thread < Cluster::peers;
    released = barriers.empty(0);
    if constexpr (Cluster::size > 1)
      released = shared_address_in(released, releases ? Cluster::peer(rank, thread) : rank);
  }

  TW_SM90 void release(int stage) const {
    if (!releases) return;
    if constexpr (Plan::Cluster::size == 1) arrive(released + stage * 8);
    else arrive_mapped(released + stage * 8);
  }

  static TW_SM90 constexpr int x_offset(int step) {
    return Plan::x_mn ? step * 128 : k_major_offset(step, Plan::x_tile);
  }
  static TW_SM90 constexpr int y_offset(int step) {
    return Plan::y_mn ? step * 128 : k_major_offset(step, Plan::y_tile);
  }
  static TW_SM90 constexpr int k_major_offset(int step, int rows) {
    return Plan::k_steps == 4 ? step * 2 : step / 4 * (rows * 128 / 16) + step % 4 * 2;
  }

  // Issues the products of the next stage into sets kInto, ...; `keep` is 0 if they are to be overwritten.
  template <int kInto>
  TW_SM90 void issue(int keep) {
    barriers.wait_full(ring);
    const Descriptor xs = x.moved(ring.stage * (Plan::x_bytes / 16)), ys = y.moved(ring.stage * (Plan::y_bytes / 16));
#pragma unroll kUnroll
    for (int step = 0; step < Plan::k_steps; step++) {
      if (kLoop || step == 0) wgmma_fence();
      for_each_index<0, kRepeats>([&](auto r) {
        multiply_into<typename Plan::Text, kInto + r.value>(Index<Plan::columns>{},
                                                            xs.plus(x_offset(step) + r.value * kXRepeat),
                                                            ys.plus(y_offset(step)), step | keep);
      });
      if (kLoop || step == Plan::k_steps - 1) wgmma_commit();
    }
  }

  // The sums of the products of `steps` stages, at least one; one stage's are issued while those before run. `issued`
  // is called when all are issued, before they are complete.
  template <int kInto = 0, class Issued>
  TW_SM90 void multiply(int steps, const Issued& issued) {
    int previous = 0;
#pragma unroll 1
    for (int step = 0; step < steps; step++) {
      issue<kInto>(step);
      wgmma_wait<kLoop ? Plan::k_steps : 1>();
      if (step) release(previous);
      previous = ring.stage;
      ring.next();
    }
    issued();
    wgmma_wait<0>();
    release(previous);
  }

  // The same with the sums of every `promote` products added to others in fp32: the tensor cores keep fewer bits.
  template <class Issued>
  TW_SM90 void multiply_promoting(int steps, const Issued& issued) {
    constexpr int kStages = Plan::promote / Plan::k_steps;
    Accumulators::template clear<0, kRepeats * Accumulators::chunks>();
#pragma unroll 1
    while (steps > kStages) {
      multiply<kRepeats>(kStages, [] {});
      add_parts();
      steps -= kStages;
    }
    multiply<kRepeats>(steps, issued);
    add_parts();
  }

 private:
  static TW_SM90 void add_parts() {
    constexpr int kCount = kRepeats * Accumulators::chunks;
    for_each_index<0, kCount>([](auto q) { Accumulators::template add<q.value, kCount + q.value>(); });
  }
};

}  // namespace tw::sm90
