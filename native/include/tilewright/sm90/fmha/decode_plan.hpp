// Layout of shared memory of a specialised kernel for few rows, and its producer's messages. See
// sm90/fmha/decode.hpp.
#pragma once
#include "tilewright/gpu/fmha/splitkv_reduce.hpp"
#include "tilewright/sm90/fmha/message.hpp"
#include "tilewright/sm90/blocks/mbarrier.hpp"

namespace tw::sm90 {

template <class C>
struct FmhaDecodePlan {
  using Q = typename C::Q;
  using K = typename C::K;
  static constexpr bool bytes = size_of<K> == 1;  // a cache of 8 bits, which becomes fp16 in registers
  using X = typename gpu::FmhaDecodeProduct<Q, bytes, false>::type;
  static constexpr int q = C::hdim_q, v = C::hdim_v, m0 = C::m0, n0 = C::n0, tiles = n0 / 64;
  static constexpr int consumers = 1, threads = kWarpgroup + kWarp;  // a warpgroup that consumes, a warp that produces
  // Contents of a slot: keys of a block, then its values.
  static constexpr int parts = 2;
  static constexpr bool shares = !C::token_sinks;  // workgroups may have equal shares of all keys: sm90/parts/shares.hpp
  static constexpr int map_of(int part) { return part + 1; }
  static constexpr int first_panel(int) { return 0; }
  static constexpr int panels_of(int part) { return panels(part == 0 ? q : v); }
  static constexpr int bytes_of(int part) { return part == 0 ? k_bytes : v_bytes; }

  static_assert(is_same<X, fp16> || is_same<X, bf16>, "products of 16-bit elements");
  static_assert(is_same<K, Q> || is_same<K, fp8>, "caches in the type of the queries, or in fp8");
  static_assert(m0 == 8 || m0 == 16 || m0 == 32, "columns of the instruction");
  static_assert(n0 % 64 == 0 && n0 <= 256 && q % 64 == 0 && v % 64 == 0, "the instruction has 64 rows");
  static_assert(!bytes || (q == v && q <= 128), "a panel of 64 or 128 bytes");

  // Rows of the cache are cut in panels of 128 bytes (an 8-bit row of 64 is one of 64). A slot of the ring has a
  // block's keys or its values.
  static constexpr int panel = bytes ? 128 : 64;  // elements
  static constexpr int line(int hdim) { return hdim < panel ? hdim * size_of<K> : 128; }
  static constexpr int panels(int hdim) { return hdim < panel ? 1 : hdim / panel; }
  static constexpr int k_bytes = n0 * q * size_of<K>, v_bytes = n0 * v * size_of<K>;
  static constexpr int slot_bytes = k_bytes > v_bytes ? k_bytes : v_bytes;

  // Behind the ring: queries and probabilities, whose place the sums take at the end of a piece; maxima of the warps;
  // barriers. (tilewright_fmha/config/decode.py has the same sums.)
  static constexpr int q_bytes = m0 * q * 2, p_bytes = tiles * m0 * 128;
  static constexpr int state_bytes = m0 * ((v + 8) * 4 + 8);
  static constexpr int rows_bytes = q_bytes + p_bytes > state_bytes ? q_bytes + p_bytes : (state_bytes + 15) / 16 * 16;
  static constexpr int warps_bytes = 2 * 4 * m0 * 4, barrier_bytes = 512;
  static constexpr int beside = rows_bytes + warps_bytes + barrier_bytes;
  // Two workgroups share a multiprocessor of 228 KiB, of which each takes one beside its own, if two slots fit.
  static constexpr int share = (228 << 10) / 2 - 1024, all = 232448;
  static constexpr int resident = share >= beside + 3 * slot_bytes ? 2 : 1;
  static constexpr int fitting = ((resident == 2 ? share : all) - beside) / slot_bytes;
  static constexpr int wanted = resident == 2 ? 3 : 6;  // more were slower
  static constexpr int stages = C::stages ? C::stages : fitting < wanted ? fitting : wanted;
  static constexpr int rows_at = stages * slot_bytes, p_at = rows_at + q_bytes, warps_at = rows_at + rows_bytes;
  static constexpr int barriers_at = warps_at + warps_bytes, shared_bytes = barriers_at + barrier_bytes;
  static_assert(stages >= 2 && stages <= 12 && shared_bytes <= all, "fits");
};

// A tile of rows and a part of its keys: what the producer tells the consumers.
struct FmhaPiece {
  int count;                      // blocks of keys: those of token sinks, then [from, ...); below 0: there is no more
  int from, sinks, k_rows;        // k_rows, off: as in FmhaItem
  int off, k_place, b, head;      // head: of keys where heads are packed
  int q_first, q_rows, first, rows;  // first: of the item's (packed) rows; `rows` of them are stored
  int part, ticket, skipped, parts;
  static constexpr int quads = 4, bytes = quads * 16;
};

// The barriers of the ring and of two slots for pieces.
template <class Plan>
struct FmhaDecodeBarriers {
  static constexpr int absent_at = RingBarriers<Plan::stages>::bytes + RingBarriers<2>::bytes;
  static constexpr int slots_at = Plan::barrier_bytes - 2 * FmhaPiece::bytes;
  static_assert(absent_at + Plan::stages * 4 <= slots_at && slots_at % 16 == 0);
  uint32_t base;

  TW_SM90 RingBarriers<Plan::stages> ring() const { return {base}; }
  TW_SM90 RingBarriers<2> next() const { return {base + RingBarriers<Plan::stages>::bytes}; }
  // Which of a block's pages are absent: a word for each slot of the ring.
  TW_SM90 uint32_t absent(int stage) const { return base + absent_at + stage * 4; }
  TW_SM90 uint32_t slot(int stage) const { return base + slots_at + stage * FmhaPiece::bytes; }

  // One thread. All four warps of a consumer give a slot back.
  TW_SM90 void init() const {
    ring().init(4 * Plan::consumers);
    next().init(4 * Plan::consumers);
  }
};

// Piece `id` of the work. Parts of one tile follow each other.
template <class C>
TW_SM90 FmhaPiece fmha_piece(const tw_fmha_args& args, int id, int& bad, int& culprit) {
  const uint32_t heads = (uint32_t)(C::pack_gqa ? args.heads_k : args.heads_q), tiles = (uint32_t)args.q_tiles;
  const uint32_t ticket = (uint32_t)id / (uint32_t)args.splits, line = tiles == 1 ? ticket : ticket / tiles;
  FmhaPiece piece;
  piece.part = id - (int)(ticket * (uint32_t)args.splits), piece.ticket = (int)ticket;
  piece.b = (int)(line / heads), piece.head = (int)(line - (uint32_t)piece.b * heads);
  int tile = (int)(ticket - line * tiles);
  if constexpr (C::mask != FmhaMask::no) tile = (int)tiles - 1 - tile;
  const FmhaItem item = fmha_item<C>(args, piece.b);
  bad = item.bad, culprit = item.culprit;
  const int g = C::pack_gqa ? (int)((uint32_t)args.heads_q / (uint32_t)args.heads_k) : 1;
  const int all = (int)(C::varlen ? item.q_rows : args.seq_q) * g;
  piece.k_rows = (int)item.k_rows, piece.off = (int)item.off, piece.k_place = (int)(C::varlen ? item.k_first : item.cache);
  piece.q_first = (int)item.q_first, piece.q_rows = (int)item.q_rows;
  piece.first = tile * C::m0, piece.rows = min(C::m0, all - piece.first);
  piece.skipped = C::skip_min && item.skip, piece.parts = (int)args.splits;
  const int rows = piece.skipped ? 0 : min(C::m0, (int)item.q_rows * g - piece.first);
  piece.count = piece.from = piece.sinks = 0;
  if (rows > 0) {
    const FmhaRange range =
        gpu::fmha_part<C>(args, item, piece.part, piece.first / g, (piece.first + rows - 1) / g + 1);
    piece.from = (int)range.first / C::n0;
    const int blocks = range.first < range.last ? ((int)range.last + C::n0 - 1) / C::n0 - piece.from : 0;
    if constexpr (C::token_sinks) {
      piece.sinks = ((int)range.sink_last + C::n0 - 1) / C::n0;
      if (blocks > 0) piece.sinks = min(piece.sinks, piece.from);
    }
    piece.count = blocks + piece.sinks;
  }
  return piece;
}

}  // namespace tw::sm90
