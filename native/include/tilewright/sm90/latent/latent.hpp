// Hopper's attention over a latent cache with queries as rows: for tiles of 64 query heads, of which one key head is
// shared. As sm90/fmha/latent.hpp, but the 64 rows of the instruction are queries, so that products are as wide as
// blocks of keys and halves of values are.
//
//   TW_FMHA_WS_LATENT_ROWS_KERNEL(symbol, Config)   its only parameter is tw_fmha_ws_params; 1-D grid
//
// Each of two consumer warpgroups has half of the elements of all results. They take turns at blocks of keys: whose
// turn it is makes the scores of a block and their exponentials, gives probabilities and maxima to the other through
// shared memory, and keeps them in registers for itself. Both multiply them by their half of the block's values.
//
// Valid configurations (LatentRowsPlan asserts all of it):
//   types     fp16 or bf16, the same of queries, cache and results
//   heads     of keys a multiple of 192 elements, of values one of 128 and at most 512, shorter
//   tiles     m0 = 64 rows, with pack_gqa all query heads; n0 = 64
//   features  those of sm90/fmha/latent.hpp
#pragma once
#include "tilewright/sm90/fmha/latent.hpp"
#include "tilewright/sm90/latent/plan.hpp"
#include "tilewright/sm90/latent/producer.hpp"

namespace tw::sm90 {

template <class C>
struct LatentRowsKernel {
  using Plan = LatentRowsPlan<C>;
  using X = typename Plan::X;
  using Producer = LatentRowsProducer<C, Plan>;
  using Rows = LatentRows<C>;
  using End = FmhaLatent<C>;  // what is done with results is the same
  using Scores = float[Rows::count];
  using Results = float[C::hdim_v / Plan::consumers / 2];
  static constexpr int threads = Plan::threads, m0 = Plan::m0, n0 = C::n0, parts = Plan::parts;

  // Named barriers; the first ones are FmhaColumns::meet of both consumers.
  static constexpr int kAll = 3, kTold = 4;

  const tw_fmha_ws_params& params;
  const tw_fmha_args& args;
  const uint32_t shared;
  const FmhaDecodeBarriers<Plan> barriers;

  static TW_SM90 void run(const tw_fmha_ws_params& params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const LatentRowsKernel self = {params, params.args, shared, {shared + Plan::barriers_at}};
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / kWarp, 0);
    if (threadIdx.x == Plan::consumers * kWarpgroup) {
      prefetch_map(params.maps[1]);
      self.barriers.ring().init(4);  // one consumer's warps are the last to read a panel
      self.barriers.next().init(4 * Plan::consumers);
    }
    __syncthreads();
    launch_dependents();
    wait_for_previous_launch();
    if (warp >= 4 * Plan::consumers) {
      setmaxnreg_dec<Plan::registers_producer>();
      if (warp == 4 * Plan::consumers) Producer{params, params.args, shared, self.barriers}.produce();
    } else {
      setmaxnreg_inc<Plan::registers_consumer>();
      self.consume();
    }
    gpu::fmha_publish(params.args, (int)threadIdx.x, [] {});
  }

  static TW_SM90 void meet_all() { join_barrier(kAll, Plan::consumers * kWarpgroup); }

  TW_SM90 void consume() const {
    const int consumer = warpgroup_index();
    const int group = (int)((uint32_t)args.heads_q / (uint32_t)args.heads_k);
    RingState<2> next;
    int begun = 0;  // blocks of keys of pieces before this one
    for (;;) {
      barriers.next().wait_full(next);
      Results o;
#pragma unroll
      for (int e = 0; e < sizeof(o) / 4; e++) o[e] = 0.0f;
      FmhaPiece piece = piece_of(next);
      if (piece.count < 0) return;
      Rows rows(args, piece, group);
      if (piece.count > 0) {
        meet_all();  // both are done with the piece before
        load_queries(piece, group);
        attend(piece, rows, o, consumer, begun);
        begun += piece.count;
      }
      piece = piece_of(next);  // again, rather than in registers all along
      const tw_fmha_args* seen = &args;
      asm volatile("" : "+l"(seen));  // nor what follows from the arguments alone
      store(piece, rows, o, consumer, group, *seen);
      __syncwarp();
      if (Rows::lane() == 0) arrive(barriers.next().empty(next.stage));
      next.next();
    }
  }

  TW_SM90 FmhaPiece piece_of(const RingState<2>& next) const {
    FmhaPiece piece = load_message<FmhaPiece>(barriers.slot(next.stage));
    piece.count = __shfl_sync(0xffffffffu, piece.count, 0);  // warps agree: descriptors stay in uniform registers
    return piece;
  }

  // Eight elements of a row at a time, by both consumers.
  TW_SM90 void load_queries(const FmhaPiece& piece, int group) const {
    constexpr int kChunks = C::hdim_q / 8, kThreads = Plan::consumers * kWarpgroup, kAtOnce = 6;
    static_assert(m0 * kChunks % (kThreads * kAtOnce) == 0);
    const int g = C::pack_gqa ? group : 1;
#pragma unroll 1
    for (int from = (int)threadIdx.x; from < m0 * kChunks; from += kThreads * kAtOnce) {
      gpu::Words<4> x[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; n++) {
        const int i = from + n * kThreads, row = i / kChunks, c = i % kChunks * 8, p = piece.first + row, query = p / g;
        const int head = C::pack_gqa ? piece.head * group + (p - query * g) : piece.head;
        x[n] = {};
        if (query < piece.q_rows && c < (int)args.hdim_q)
          x[n] = gpu::load_constant<gpu::Words<4>>(
              (const char*)args.q.ptr + ((C::varlen ? 0 : piece.b) * args.q.batch + head * args.q.head +
                                         (int64_t)(piece.q_first + query) * args.q.row + c) * 2);
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; n++) {
        const int i = from + n * kThreads, row = i / kChunks, c = i % kChunks;
        gpu::store_shared(swizzled(shared + Plan::q_at + c / 8 * (m0 * 128), row, c % 8), x[n]);
      }
    }
    fence_async_proxy();
    meet_all();
  }

  // ---- blocks of keys; `block` counts those of the workgroup ----

  static TW_SM90 int stage_of(int block, int part) { return (block & 1) * parts + part; }
  TW_SM90 uint32_t place_of(int block) const { return shared + (block & 1) * Plan::block_bytes; }
  TW_SM90 uint32_t maxima_of(int consumer) const { return shared + Plan::maxima_at + consumer * (m0 * 4); }

  TW_SM90 void attend(const FmhaPiece& piece, Rows& rows, Results& o, int consumer, int begun) const {
    const int64_t room = C::varlen && !C::paged ? args.total_k - piece.k_place : args.seq_k;
    const int ragged = C::paged || piece.k_rows < room ? piece.k_rows : 0x7fffffff;
    Scores s = {};
    float rescale[2];
    uint32_t p[Rows::count / 2];
    int i = consumer;
#pragma unroll 1
    for (; i < piece.count; i += 2) {
      const int block = begun + i, c0 = fmha_block_of<C>(piece, i) * n0;
      uint32_t absent = 0;
      multiply_told(rows, o, consumer, block - 1, i > 0);
      wgmma_wait<0>();  // before keys are waited for: they arrive where others have gone
      pin(o);
      if (i > 0) release_values(block - 1, consumer);
      multiply_keys(block, s, absent);
      wgmma_commit();
      wgmma_wait<0>();
      pin(s);
      if (i == 0)  // what was multiplied was nothing
#pragma unroll
        for (int e = 0; e < sizeof(o) / 4; e++) o[e] = 0.0f;
      release<0, Plan::first_value>(block);
      rows.run(s, c0, absent, rescale);
      if (c0 + n0 > ragged) clear_tail(block, max(ragged - c0, 0));
      tell(rows, s, p, consumer);
      scale(o, rescale);
      pin(o);
      wgmma_fence();
      const Descriptor v = values_of(block, consumer);
#pragma unroll
      for (int c = 0; c < n0 / 16; c++) wgmma_rs<X>(o, p + 4 * c, v.plus(c * 128), 1);
      wgmma_commit();
      wgmma_wait<0>();
      pin(o);
#pragma unroll
      for (int e = 0; e < Rows::count / 2; e++) asm volatile("" : "+r"(p[e]));
      release_values(block, consumer);
    }
    if (i == piece.count) {  // the last block was the other's
      multiply_told(rows, o, consumer, begun + i - 1, true);
      wgmma_wait<0>();
      pin(o);
      release_values(begun + i - 1, consumer);
    }
  }

  // S = Q K^T of a block, whose parts are taken as they arrive.
  TW_SM90 void multiply_keys(int block, Scores& s, uint32_t& absent) const {
    const Descriptor q = k_major(shared + Plan::q_at), k = k_major(place_of(block));
    const uint32_t parity = (uint32_t)block >> 1 & 1;
#pragma unroll
    for (int part = 0; part < parts; part++) {
      wait(barriers.ring().full(stage_of(block, part)), parity);
      if constexpr (C::paged)
        if (part == 0) absent = gpu::load_shared<1>(barriers.absent(stage_of(block, 0))).w[0];
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < 4; c++)
        wgmma<WgmmaText<X, X, false, false>>(s, q.plus(Plan::first_panel(part) * (m0 * 8) + c * 2),
                                             k.plus(part * (Plan::slot_bytes / 16) + c * 2), part > 0 || c > 0);
    }
  }

  TW_SM90 Descriptor values_of(int block, int consumer) const {
    const int part = Plan::first_value + consumer * Plan::half_panels;
    return mn_major(place_of(block) + part * Plan::slot_bytes, Plan::slot_bytes);
  }

  // O += P V of a block whose probabilities the other consumer tells, a group of products. If there is none, products
  // are of what happens to lie there: branches around products that are on their way would make the compiler wait.
  TW_SM90 void multiply_told(Rows& rows, Results& o, int consumer, int block, bool exists) const {
    if (exists) {
      join_barrier(kTold + (consumer ^ 1), Plan::consumers * kWarpgroup);
      const uint32_t from = maxima_of(consumer ^ 1);
      float most[2], rescale[2];
#pragma unroll
      for (int h = 0; h < 2; h++) most[h] = gpu::float_of(gpu::load_shared<1>(from + Rows::row_of(h) * 4).w[0]);
      rows.raise(most, rescale);
      scale(o, rescale);
    }
    pin(o);
    wgmma_fence();
    const Descriptor p = k_major(shared + Plan::p_at), v = values_of(block, consumer);
#pragma unroll
    for (int c = 0; c < n0 / 16; c++)
      wgmma<WgmmaText<X, X, false, true>>(o, p.plus(c * 2), v.plus(c * 128), 1);
    wgmma_commit();
  }

  static TW_SM90 void scale(Results& o, const float (&by)[2]) {
    if (__all_sync(0xffffffffu, by[0] == 1.0f && by[1] == 1.0f)) return;
#pragma unroll
    for (int e = 0; e < sizeof(o) / 4; e++) o[e] *= by[e / 2 % 2];
  }

  // Rounds P and gives it, and the maxima, to the other consumer.
  TW_SM90 void tell(const Rows& rows, const Scores& s, uint32_t (&p)[Rows::count / 2], int consumer) const {
#pragma unroll
    for (int e = 0; e < Rows::count / 2; e++)
      p[e] = is_same<X, fp16> ? gpu::pack_halves(s[2 * e], s[2 * e + 1]) : gpu::pack_bfloats(s[2 * e], s[2 * e + 1]);
    const int lane = Rows::lane(), line = Rows::warp() * 16 + lane % 16;
#pragma unroll
    for (int c = 0; c < n0 / 16; c++) {
      const uint32_t four[4] = {p[4 * c], p[4 * c + 1], p[4 * c + 2], p[4 * c + 3]};
      store_fragments(swizzled(shared + Plan::p_at, line, 2 * c + lane / 16), four);
    }
    if (lane % 4 == 0)
#pragma unroll
      for (int h = 0; h < 2; h++) store_word(maxima_of(consumer) + Rows::row_of(h) * 4, gpu::bits_of(rows.m[h]));
    fence_async_proxy();
    signal_barrier(kTold + consumer, Plan::consumers * kWarpgroup);
  }

  template <int kFrom, int kTo>
  TW_SM90 void release(int block) const {
    __syncwarp();
    if (Rows::lane() == 0)
#pragma unroll
      for (int part = kFrom; part < kTo; part++) arrive(barriers.ring().empty(stage_of(block, part)));
  }
  TW_SM90 void release_values(int block, int consumer) const {
    __syncwarp();
    if (Rows::lane() == 0)
#pragma unroll
      for (int x = 0; x < Plan::half_panels; x++)
        arrive(barriers.ring().empty(stage_of(block, Plan::first_value + consumer * Plan::half_panels + x)));
  }

  // Values beyond an item's keys are not to be multiplied, not even by zero: the copy engine knows only where the
  // tensor ends.
  TW_SM90 void clear_tail(int block, int rows) const {
    const uint32_t to = place_of(block) + Plan::first_value * Plan::slot_bytes;
#pragma unroll 1
    for (int i = (int)threadIdx.x % kWarpgroup; i < (n0 - rows) * 8 * Plan::value_panels; i += kWarpgroup) {
      const int x = i % Plan::value_panels, line = i / Plan::value_panels;
      gpu::store_shared(to + x * Plan::slot_bytes + rows * 128 + line * 16, gpu::Words<4>{});
    }
    fence_async_proxy();
    End::Columns::meet();
  }

  // Results of one consumer after the other through the place of the queries; rows go out by both.
  TW_SM90 void store(const FmhaPiece& piece, const Rows& rows, const Results& o, int consumer, int group,
                     const tw_fmha_args& seen) const {
    static_assert(End::half * Plan::consumers == C::hdim_v && m0 * End::row_bytes <= Plan::q_bytes);
    const End end = {params, seen, shared, {0}};
    const uint32_t place = shared + Plan::q_at, sums = shared + Plan::sums_at, other = shared + Plan::other_sums_at;
    const float total[2] = {rows.sum_of(0), rows.sum_of(1)};
    const bool first = Rows::lane() % 4 == 0;
    if (consumer == 1 && first)
#pragma unroll
      for (int h = 0; h < 2; h++) store_word(other + Rows::row_of(h) * 4, gpu::bits_of(total[h]));
    meet_all();
    if (consumer == 0 && first)
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float more = gpu::float_of(gpu::load_shared<1>(other + Rows::row_of(h) * 4).w[0]);
        store_words(sums + Rows::row_of(h) * 8, gpu::bits_of(rows.m[h]), gpu::bits_of(total[h] + more));
      }
    FmhaPiece own = piece;
    own.first += consumer * (m0 / 2), own.rows = min(max(piece.rows - consumer * (m0 / 2), 0), m0 / 2);
    const uint32_t own_place = place + consumer * (m0 / 2) * End::row_bytes, own_sums = sums + consumer * (m0 / 2) * 8;
#pragma unroll 1
    for (int half = 0; half < Plan::consumers; half++) {
      if (half > 0) meet_all();  // all have read what was there
      if (consumer == half)
#pragma unroll
        for (int e = 0; e < sizeof(o) / 4; e += 2)
          store_words(place + Rows::row_of(e / 2 % 2) * End::row_bytes + (e / 4 * 8 + Rows::lane() % 4 * 2) * 4,
                      gpu::bits_of(o[e]), gpu::bits_of(o[e + 1]));
      meet_all();
      end.store_rows(own, group, own_place, own_sums, half * End::half);
    }
    if (seen.splits > 1 && seen.splits <= End::Plan::joined_parts) {
      const int ticket = piece.ticket * Plan::consumers + consumer;
      end.add_parts(own, group, seen.counters + gpu::kFmhaTickets + ticket, shared + Plan::words_at + consumer * 4);
    }
  }
};

}  // namespace tw::sm90

#define TW_FMHA_WS_LATENT_ROWS_KERNEL(NAME, ...)                                                  \
  extern "C" __global__ void __launch_bounds__(tw::sm90::LatentRowsKernel<__VA_ARGS__>::threads, 1) \
      NAME(const __grid_constant__ tw_fmha_ws_params params) {                                    \
    tw::sm90::LatentRowsKernel<__VA_ARGS__>::run(params);                                         \
  }
