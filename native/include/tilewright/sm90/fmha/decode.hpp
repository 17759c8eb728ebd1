// Hopper's attention for few rows of queries and many keys (decoding): family split of pipeline ws. Memory is what
// limits it, so workgroups stay, and a producer warp keeps the ring of shared memory full through the copy engine,
// across pieces of work: while the consumers end one piece, keys of the next arrive. Which pieces a workgroup has says
// sm90/parts/pieces.hpp.
//
// The 64 rows of the instruction are keys (elements of values), its columns the few queries: S^T = K Q^T, O^T = V^T
// P^T. So nothing is wasted on rows that do not exist, and accumulators are small. Keys and values are multiplied where
// they lie; those of 8 bits become fp16 on their way through registers, as the first operand. Maxima of a block are
// those of four warps, who meet twice for each block: for maxima, and for P, which is the second operand and lies in
// shared memory.
//
//   TW_FMHA_WS_DECODE_KERNEL(symbol, Config)   its only parameter is tw_fmha_ws_params; 1-D grid
//
// Valid configurations (FmhaDecodePlan asserts all of it):
//   types     queries and results in fp16 or bf16; caches in the same type, or in fp8
//   heads     multiples of 64 elements; shorter ones are padded by the copy engine
//   tiles     m0 = 8, 16 or 32 rows, with pack_gqa all query heads of a key head; n0 a multiple of 64
//   features  masks (token sinks too), soft cap, learned sinks, lse, lengths as data, sequences end to end,
//             cache_index, skip_min, status, pages of at least 8 rows, one factor for each tensor or head. Not: bias,
//             ALiBi, dropout
//   tensors   rows of q, k and v begin at multiples of 16 bytes, elements of a head are neighbours
//
// Maps: of k and v as sm90/fmha/forward.hpp has them, boxes of a panel's elements and n0 (or a page's) rows. Counters:
// word 4 counts pieces that are drawn, then come the tickets of gpu/fmha/splitkv_reduce.hpp.
#pragma once
#include "tilewright/sm90/fmha/decode_producer.hpp"
#include "tilewright/sm90/fmha/transposed.hpp"

namespace tw::sm90 {

template <class C>
struct FmhaDecode {
  using Plan = FmhaDecodePlan<C>;
  using X = typename Plan::X;
  using K = typename Plan::K;
  using Ring = RingState<Plan::stages>;
  using Columns = FmhaColumns<C>;
  using Products = FmhaTransposed<C>;
  using Scores = typename Products::Scores;
  using Results = typename Products::Results;
  static constexpr int threads = Plan::threads, resident = Plan::resident, m0 = C::m0, n0 = C::n0, tiles = Plan::tiles;
  static constexpr int value_tiles = Products::value_tiles;

  // The interface of a kernel that gpu/fmha/splitkv_reduce.hpp requires.
  struct Forward {
    using Config = C;
    struct ScoreAtom {};
    struct ValueAtom {};
    using Softmax = Columns;
    static constexpr int waves = 4;
  };
  struct Team {
    static TW_SM90 void meet() { Columns::meet(); }
  };
  using Reduce = gpu::FmhaSplitKvReduce<Forward, 1, Team, FmhaPieceParts<C>>;
  static_assert(Reduce::state_bytes == Plan::state_bytes);

  const tw_fmha_ws_params& params;
  const tw_fmha_args& args;
  const uint32_t shared;
  const FmhaDecodeBarriers<Plan> barriers;

  static TW_SM90 void run(const tw_fmha_ws_params& params) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const FmhaDecode self = {params, params.args, shared, {shared + Plan::barriers_at}};
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / kWarp, 0);
    if (threadIdx.x == kWarpgroup) {
      prefetch_map(params.maps[1]), prefetch_map(params.maps[2]);
      self.barriers.init();
    }
    __syncthreads();
    launch_dependents();
    wait_for_previous_launch();
    if (warp == 4) FmhaDecodeProducer<C, Plan>{params, params.args, shared, self.barriers}.produce();
    else self.consume();
    gpu::fmha_publish(params.args, (int)threadIdx.x, [] {});
  }

  // ---- consumers ----

  TW_SM90 void consume() const {
    const int warp = Columns::warp(), lane = Columns::lane();
    Ring ring;
    RingState<2> next;
    const int group = (int)((uint32_t)args.heads_q / (uint32_t)args.heads_k);
    uint32_t turn = 0;  // which of the places for maxima
    for (;;) {
      barriers.next().wait_full(next);
      const FmhaPiece piece = load_message<FmhaPiece>(barriers.slot(next.stage));
      __syncwarp();
      if (lane == 0) arrive(barriers.next().empty(next.stage));
      next.next();
      if (piece.count < 0) return;
      Columns columns(args, piece, group);
      Results o;
#pragma unroll
      for (int i = 0; i < value_tiles; i++)
#pragma unroll
        for (int e = 0; e < m0 / 2; e++) o[i][e] = 0.0f;
      if (piece.count > 0) {
        Columns::meet();  // all are done with the piece before
        columns_factor(columns, Products::load_queries(args, shared, piece, group, turn));
        attend(piece, columns, o, ring, turn);
      } else {
        Columns::meet();
      }
      put(columns, o, piece, turn);
      const int key_head = C::pack_gqa ? piece.head : piece.head / group;
      FmhaItem item = {};
      item.q_first = piece.q_first, item.q_rows = piece.q_rows;
      const int head = C::pack_gqa ? piece.head * group : piece.head;
      const FmhaPieceRows rows = {{piece.part, piece.b, head, key_head, group, piece.first, piece.rows, piece.ticket,
                                   (bool)piece.skipped}, piece.parts};
      const uint32_t state = shared + Plan::rows_at;
      Reduce{args, item, rows, warp, lane, shared + Plan::warps_at, state, 0}.add();
    }
  }

  static TW_SM90 void columns_factor(Columns& columns, float back) {
    if constexpr (Plan::bytes)
#pragma unroll
      for (int i = 0; i < (Columns::scaled ? Columns::columns : 1); i++) columns.factor[i] *= back;
  }

  TW_SM90 void release(int stage) const {
    __syncwarp();
    if (Columns::lane() == 0) arrive(barriers.ring().empty(stage));
  }

  TW_SM90 void attend(const FmhaPiece& piece, Columns& columns, Results& o, Ring& ring, uint32_t& turn) const {
    const int64_t room = C::varlen && !C::paged ? args.total_k - piece.k_place : args.seq_k;
    const int ragged = C::paged || piece.k_rows < room ? piece.k_rows : 0x7fffffff;
    int values = 0;  // the slot of the values that are being multiplied
    Scores s;
    float rescale[Columns::columns];
#pragma unroll 1
    for (int i = 0; i < piece.count; i++) {
      const int c0 = fmha_block_of<C>(piece, i) * n0;
      barriers.ring().wait_full(ring);
      uint32_t absent = 0;
      if constexpr (C::paged) absent = gpu::load_shared<1>(barriers.absent(ring.stage)).w[0];
      Products::multiply_keys(shared, shared + ring.stage * Plan::slot_bytes, s);
      wgmma_wait<0>();
#pragma unroll
      for (int t = 0; t < tiles; t++) pin(s[t]);
#pragma unroll
      for (int t = 0; t < value_tiles; t++) pin(o[t]);
      if (i > 0) release(values);
      release(ring.stage);
      ring.next();
      columns.run(s, c0, absent, Products::place_of_maxima(shared, turn), rescale);
      Products::store_probabilities(shared, s);
#pragma unroll
      for (int t = 0; t < value_tiles; t++)
#pragma unroll
        for (int e = 0; e < m0 / 2; e++) o[t][e] *= rescale[e / 4 * 2 + e % 2];
      barriers.ring().wait_full(ring);
      values = ring.stage;
      Columns::meet();  // P is there
      if (c0 + n0 > ragged) Products::clear_tail(shared + values * Plan::slot_bytes, max(ragged - c0, 0));
      Products::multiply_values(shared, shared + values * Plan::slot_bytes, o);
      if constexpr (Plan::bytes) wgmma_wait<0>();  // first operands are made while nothing else multiplies
      ring.next();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int t = 0; t < value_tiles; t++) pin(o[t]);
    release(values);
  }

  // Maxima, sums and results into the place of queries and probabilities.
  TW_SM90 void put(Columns& columns, const Results& o, const FmhaPiece& piece, uint32_t& turn) const {
    const uint32_t state = shared + Plan::rows_at;
    const int lane = Columns::lane(), warp = Columns::warp();
    columns.finish(Products::place_of_maxima(shared, turn));  // where all meet: nobody multiplies any more
    if (warp == 0 && lane < 4)
#pragma unroll
      for (int c = 0; c < Columns::columns; c++)
        gpu::store_shared(state + Reduce::stats_at + Columns::row_of(c) * 8,
                          gpu::Words<2>{gpu::bits_of(columns.m[c]), gpu::bits_of(columns.l[c])});
#pragma unroll
    for (int c = 0; c < Columns::columns; c++) {
      if (Columns::row_of(c) >= piece.rows) continue;
      const uint32_t to = state + Columns::row_of(c) * Reduce::row_bytes + warp * 64;
      const int at = c / 2 * 4 + c % 2;
#pragma unroll
      for (int t = 0; t < value_tiles; t++) {
        const uint32_t low = gpu::bits_of(o[t][at]), high = gpu::bits_of(o[t][at + 2]);
        if constexpr (Plan::bytes) {
          store_words(to + t * 256 + lane / 4 * 8, low, high);
        } else {
          store_word(to + t * 256 + lane / 4 * 4, low);
          store_word(to + t * 256 + lane / 4 * 4 + 32, high);
        }
      }
    }
  }
};

}  // namespace tw::sm90

#define TW_FMHA_WS_DECODE_KERNEL(NAME, ...)                                                                       \
  extern "C" __global__ void __launch_bounds__(tw::sm90::FmhaDecode<__VA_ARGS__>::threads,                       \
                                               tw::sm90::FmhaDecode<__VA_ARGS__>::resident)                      \
      NAME(const __grid_constant__ tw_fmha_ws_params params) {                                                    \
    tw::sm90::FmhaDecode<__VA_ARGS__>::run(params);                                                              \
  }
