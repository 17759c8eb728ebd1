// Hopper's attention for few rows of queries and many keys (decoding): family split of pipeline ws. Memory is what
// limits it, so workgroups stay, and a producer warp keeps the ring of shared memory full through the copy engine,
// across pieces of work: while the consumers end one piece, keys of the next arrive. Which piece is next is drawn from
// a counter, for they differ in length.
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
// word 4 counts pieces, then come the tickets of gpu/fmha/splitkv_reduce.hpp.
#pragma once
#include "tilewright/sm90/fmha/copy.hpp"
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
  static constexpr int value_tiles = Products::value_tiles, kPiecesWord = 4;

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
  using Reduce = gpu::FmhaSplitKvReduce<Forward, 1, Team>;
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
    if (warp == 4) self.produce();
    else self.consume();
    gpu::fmha_publish(params.args, (int)threadIdx.x, [] {});
  }

  // ---- the producer: a warp ----

  TW_SM90 void produce() const {
    const int lane = threadIdx.x % kWarp;
    Ring ring;
    RingState<2> next;
    for (int id = (int)blockIdx.x;;) {
      const bool more = id < (int)args.tiles;
      FmhaPiece piece;
      piece.count = -1;
      if (more) {
        int bad, culprit;
        piece = fmha_piece<C>(args, id, bad, culprit);
        if (bad && lane == 0) gpu::fmha_tell(args, bad, piece.b, culprit);
      }
      if (!more || piece.rows > 0) {
        barriers.next().wait_empty(next);
        if (lane == 0) {
          store_message(barriers.slot(next.stage), piece);
          arrive(barriers.next().full(next.stage));
        }
        next.next();
        __syncwarp();
      }
      if (!more) return;
      if (piece.rows > 0) load(piece, ring);
      if (lane == 0) id = draw();
      id = __shfl_sync(0xffffffffu, id, 0);
    }
  }

  // When all loads of a piece are on their way: as late as that, for who draws early holds what others could have
  // begun.
  TW_SM90 int draw() const {
    uint32_t drawn;
    asm volatile("atom.global.relaxed.gpu.add.u32 %0, [%1], 1;"
                 : "=r"(drawn)
                 : "l"(args.counters + kPiecesWord)
                 : "memory");
    // Every piece draws once; the last one to draw leaves the counter as it was.
    if ((int)drawn == (int)args.tiles - 1) gpu::store_coherent(args.counters + kPiecesWord, gpu::Words<1>{0});
    return (int)(drawn + gridDim.x);
  }

  static TW_SM90 int block_of(const FmhaPiece& piece, int i) {
    return !C::token_sinks || i < piece.sinks ? i + (C::token_sinks ? 0 : piece.from) : piece.from + i - piece.sinks;
  }

  TW_SM90 void load(const FmhaPiece& piece, Ring& ring) const {
    const int group = (int)((uint32_t)args.heads_q / (uint32_t)args.heads_k);
    const int key_head = C::pack_gqa ? piece.head : piece.head / group, lane = threadIdx.x % kWarp;
    const int first = C::varlen && !C::paged ? piece.k_place : 0, item = C::varlen ? 0 : piece.k_place;
    int page = 0, ahead = 0;
#pragma unroll 1
    for (int i = C::paged ? -1 : 0; i < piece.count; i++, page = ahead) {
      if constexpr (C::paged) {
        if (i + 1 < piece.count) ahead = look_up(piece, i + 1);  // on its way while this block waits for room
        if (i < 0) continue;
      }
      const int c0 = block_of(piece, i) * n0;
      const uint32_t absent = C::paged ? __ballot_sync(0xffffffffu, page == -1) : 0;
#pragma unroll 1
      for (int map = 1; map < 3; map++) {
        const uint32_t full = barriers.ring().full(ring.stage), to = shared + ring.stage * Plan::slot_bytes;
        const int panels = Plan::panels(map == 1 ? C::hdim_q : C::hdim_v);
        const int line = Plan::line(C::hdim_q);  // values have the same, or both fill it
        barriers.ring().wait_empty(ring);
        if (lane == 0) {
          if (C::paged && map == 1) store_word(barriers.absent(ring.stage), absent);
          arrive_expecting(full, map == 1 ? Plan::k_bytes : Plan::v_bytes);
        }
        __syncwarp();
        if constexpr (C::paged) {
          const int size = (int)args.page_size, rows = min(size, n0), row = lane * rows;
          if (row < n0)
#pragma unroll 1
            for (int x = 0; x < panels; x++)
              load_rows(to + x * (n0 * line) + row * line, params.maps[map], x * Plan::panel,
                        {(c0 + row) & (size - 1), key_head, page < 0 ? (int)args.num_pages : page}, full);
        } else if (lane < panels) {
          load_rows(to + lane * (n0 * line), params.maps[map], lane * Plan::panel, {first + c0, key_head, item}, full);
        }
        ring.next();
      }
    }
  }

  // The page of this lane's part of block i: -1 if the cache has none there, -2 if there are no keys.
  TW_SM90 int look_up(const FmhaPiece& piece, int i) const {
    const int rows = min((int)args.page_size, n0), row = threadIdx.x % kWarp * rows;
    const int column = block_of(piece, i) * n0 + row;
    if (row >= n0 || column >= piece.k_rows) return -2;
    const int page = (int)fmha_page<C>(args, piece.b, column);
    if (page < 0) gpu::fmha_tell(args, kFmhaBadPage, piece.b, column);
    return page;
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
        columns_factor(columns, load_queries(piece, group, turn));
        attend(piece, columns, o, ring, turn);
      } else {
        Columns::meet();
      }
      put(columns, o, piece, turn);
      const int key_head = C::pack_gqa ? piece.head : piece.head / group;
      FmhaItem item = {};
      item.q_first = piece.q_first, item.q_rows = piece.q_rows;
      const int head = C::pack_gqa ? piece.head * group : piece.head;
      const gpu::FmhaRows rows = {piece.part,  piece.b,    head,         key_head,           group,
                                  piece.first, piece.rows, piece.ticket, (bool)piece.skipped};
      const uint32_t state = shared + Plan::rows_at;
      Reduce{args, item, rows, warp, lane, shared + Plan::warps_at, state, 0}.add();
    }
  }

  static TW_SM90 void columns_factor(Columns& columns, float back) {
    if constexpr (Plan::bytes)
#pragma unroll
      for (int i = 0; i < (Columns::scaled ? Columns::columns : 1); i++) columns.factor[i] *= back;
  }

  TW_SM90 uint32_t place_of_maxima(uint32_t& turn) const {
    turn ^= 1;
    return shared + Plan::warps_at + turn * (4 * m0 * 4);
  }

  // Sixteen elements of a row at a time. For 8-bit caches they become fp16, scaled by a power of two so that none
  // overflows, and change places as gpu/fmha/bytes.hpp says. Returns what scores are to be multiplied by.
  TW_SM90 float load_queries(const FmhaPiece& piece, int group, uint32_t& turn) const {
    using Q = typename C::Q;
    constexpr bool kScales = Plan::bytes && is_same<Q, bf16>;
    constexpr int kParts = C::hdim_q / 16, kAll = m0 * kParts, kOwn = (kAll + kWarpgroup - 1) / kWarpgroup;
    const int g = C::pack_gqa ? group : 1, thread = threadIdx.x;
    uint32_t w[kOwn][8], exponent = 0;
#pragma unroll
    for (int n = 0; n < kOwn; n++) {
      const int i = n * kWarpgroup + thread, row = i / kParts, c = i % kParts * 16, p = piece.first + row, query = p / g;
      const bool exists = i < kAll && query < piece.q_rows;
      const int head = C::pack_gqa ? piece.head * group + (p - query * g) : piece.head;
      const char* from = (const char*)args.q.ptr + ((C::varlen ? 0 : piece.b) * args.q.batch + head * args.q.head +
                                                    (int64_t)(piece.q_first + query) * args.q.row + c) * 2;
#pragma unroll
      for (int h = 0; h < 2; h++) {
        gpu::Words<4> x = {};
        if (exists && c + h * 8 < (int)args.hdim_q) x = gpu::load_constant<gpu::Words<4>>(from + h * 16);
#pragma unroll
        for (int e = 0; e < 4; e++) w[n][4 * h + e] = x.w[e];
      }
      if constexpr (kScales)
#pragma unroll
        for (int e = 0; e < 16; e++) {
          const uint32_t own = w[n][e / 2] >> (e % 2 * 16 + 7) & 255u;
          exponent = own != 255 && own > exponent ? own : exponent;
        }
    }
    uint32_t down = 127;
    if constexpr (kScales) {
      exponent = __reduce_max_sync(0xffffffffu, exponent);
      const uint32_t at = place_of_maxima(turn);
      if (thread % kWarp == 0) store_word(at + thread / kWarp * 4, exponent);
      Columns::meet();
      const gpu::Words<4> all = gpu::load_shared<4>(at);
      exponent = max(max(all.w[0], all.w[1]), max(all.w[2], all.w[3]));
      // The largest becomes 2^14 to 2^15. Both powers of two are normal numbers.
      down = max(exponent, 41u) + 113 - 127;
      const float up = gpu::float_of((254 - down) << 23);
#pragma unroll
      for (int n = 0; n < kOwn; n++)
#pragma unroll
        for (int e = 0; e < 8; e++)
          w[n][e] = gpu::pack_halves(gpu::float_of(w[n][e] << 16) * up, gpu::float_of(w[n][e] & 0xffff0000u) * up);
    }
#pragma unroll
    for (int n = 0; n < kOwn; n++) {
      const int i = n * kWarpgroup + thread, row = i / kParts, part = i % kParts;
      const uint32_t to = shared + Plan::rows_at + part / 4 * (m0 * 128);
      const uint32_t (&x)[8] = w[n];
      constexpr int kStep = Plan::bytes ? 2 : 1, kHigh = Plan::bytes ? 1 : 4;
      const gpu::Words<4> low = {x[0], x[kStep], x[2 * kStep], x[3 * kStep]};
      const gpu::Words<4> high = {x[kHigh], x[kHigh + kStep], x[kHigh + 2 * kStep], x[kHigh + 3 * kStep]};
      if (kAll % kWarpgroup == 0 || i < kAll) {
        gpu::store_shared(swizzled(to, row, part % 4 * 2), low);
        gpu::store_shared(swizzled(to, row, part % 4 * 2 + 1), high);
      }
    }
    fence_async_proxy();
    Columns::meet();
    return kScales ? gpu::float_of(down << 23) : 1.0f;
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
      const int c0 = block_of(piece, i) * n0;
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
      columns.run(s, c0, absent, place_of_maxima(turn), rescale);
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
    columns.finish(place_of_maxima(turn));  // where all meet: nobody multiplies any more
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
