// Layout of shared memory of a specialised attention kernel, the order of tiles, and the keys that a tile reads. See
// sm90/fmha/forward.hpp.
#pragma once
#include "tilewright/gpu/fmha/params.hpp"
#include "tilewright/sm90/fmha/message.hpp"
#include "tilewright/sm90/blocks/mbarrier.hpp"

namespace tw::sm90 {

template <class C>
struct FmhaPlan {
  using X = typename C::Q;
  static constexpr int q = C::hdim_q, v = C::hdim_v, m0 = C::m0, n0 = C::n0;
  static constexpr int consumers = C::wave_m0, threads = kWarpgroup * (1 + consumers);
  static constexpr int stages = C::stages ? C::stages : 2;
  static constexpr bool pingpong = C::scheduler == Scheduler::pingpong && consumers > 1;
  static constexpr bool longest_first = C::mask != FmhaMask::no;
  static constexpr bool split = C::family == FmhaFamily::split;  // into parts of the keys: sm90/parts/parts.hpp
  // Tiles differ in length, so workgroups that stay take the next one from a counter.
  static constexpr bool dynamic = C::persistent && (C::varlen || C::mask != FmhaMask::no);
  // A wait for the next keys, which is a branch, keeps the assembler from moving the wait for the products of values
  // before the exponentials. With three consumers, pages and soft caps that does not pay; for more columns there are no
  // registers.
  static constexpr bool exponentials_first = consumers < 3 && !C::paged && !C::softcap && n0 <= 128;
  static constexpr int registers_producer = consumers == 3 ? 32 : 40;
  static constexpr int registers_consumer = consumers == 3 ? 160 : 232;

  static_assert(is_same<X, fp16> || is_same<X, bf16>, "the tensor cores' P comes from registers in 16 bits");
  static_assert(is_same<X, typename C::K> && is_same<X, typename C::O>, "one type for all");
  static_assert(m0 == 64 * consumers && consumers <= 3, "64 rows for each consumer");
  static_assert(!C::paged || consumers < 3, "three consumers leave too few registers to who looks pages up");
  static_assert(!C::paged || ((n0 & (n0 - 1)) == 0 && n0 / 8 <= kWarp && C::kv_layout == KvLayout::linear),
                "pages divide blocks, or the reverse");
  static_assert(n0 % 16 == 0 && n0 <= 256 && q % 64 == 0 && v % 64 == 0, "panels of 64 elements, steps of 16 keys");

  static_assert(split ? C::mask == FmhaMask::no && !C::learned_sinks : !C::pack_gqa, "parts have neither");

  // Shared memory: Q, rings of K and V, O. Rows are cut in panels of 128 bytes, one after the other. Where there is no
  // room for O, a consumer leaves its results where its rows of Q were. Parts of the keys leave registers for memory.
  static constexpr int q_bytes = m0 * q * 2, k_bytes = n0 * q * 2, v_bytes = n0 * v * 2, o_bytes = m0 * v * 2;
  static constexpr int k_at = q_bytes, v_at = k_at + stages * k_bytes, loaded = v_at + stages * v_bytes;
  static constexpr int barrier_bytes = 320, most_bytes = 232448;
  static constexpr bool own_output = split || loaded + o_bytes + barrier_bytes <= most_bytes;
  static constexpr int o_at = own_output ? loaded : 0, barriers_at = loaded + (own_output && !split ? o_bytes : 0);
  static constexpr int shared_bytes = barriers_at + barrier_bytes;
  static_assert(shared_bytes <= most_bytes && (own_output || v <= q), "fits");
};

// Rows and keys of a tile. Rows of tensors count through all items where these follow each other. The first words are
// what the thread of keys tells the others. Of parts of the keys, `off` is which, and heads may be those of keys, whose
// rows are those of all their query heads.
struct FmhaSpan {
  int count;                     // blocks of keys: [last - blocks, last), then [0, count - blocks); below 0: no tile
  int last, blocks, k_rows;      // k_rows, off: as in FmhaItem
  int k_place, head, b, off;     // where keys and values begin: a row if items follow each other, else an item
  int q_first, first, end, all;  // the item's first row of q and o; in it: the tile's, behind those computed and written
  int bad, culprit;
  static constexpr int quads = 3, bytes = quads * 16;
};

// Barriers of a workgroup, and the slots through which the thread of keys tells which tile is next.
template <class Plan>
struct FmhaBarriers {
  static constexpr int rings = 2 * RingBarriers<Plan::stages>::bytes;
  uint32_t base;

  TW_SM90 RingBarriers<Plan::stages> keys() const { return {base}; }
  TW_SM90 RingBarriers<Plan::stages> values() const { return {base + RingBarriers<Plan::stages>::bytes}; }
  TW_SM90 RingBarriers<1> queries() const { return {base + rings}; }
  TW_SM90 RingBarriers<2> next() const { return {base + rings + RingBarriers<1>::bytes}; }
  // Which of a block's pages are absent: one for each stage of keys.
  TW_SM90 uint32_t absent(int stage) const {
    return base + rings + RingBarriers<1>::bytes + RingBarriers<2>::bytes + stage * 8;
  }
  TW_SM90 uint32_t slot(int stage) const { return base + slots_at + stage * FmhaSpan::bytes; }
  static constexpr int slots_at = Plan::barrier_bytes - 2 * FmhaSpan::bytes;
  static_assert(rings + 16 + 32 + 8 * Plan::stages <= slots_at && slots_at % 16 == 0);

  // One thread.
  TW_SM90 void init() const {
    keys().init(Plan::consumers);
    values().init(Plan::consumers);
    queries().init(Plan::consumers);
    next().init(4 * Plan::consumers + 2);
  }
};

// ---- tiles ----

struct FmhaTile {
  int block, head, b;
};

template <class Plan>
struct FmhaTiles {
  static constexpr int kCachedKib = 24 << 10;  // of the second-level cache, for keys and values
  const tw_fmha_args& args;

  // Equal tiles: those of one head follow each other, which read the same keys. Under a mask the long ones come first,
  // of as many heads as the second-level cache has room for, and then those of the next ones.
  TW_SM90 FmhaTile at(int id) const {
    const int tiles = (int)args.q_tiles, heads = (int)args.heads_q;
    int block, line;
    if constexpr (Plan::longest_first) {
      const int all = heads * (int)args.batch, group = heads / (int)args.heads_k;
      const int kib = (int)args.seq_k / 8 * ((int)args.hdim_q + (int)args.hdim_v) / 64 + 1;  // of keys and values
      int section = min(max(kCachedKib / kib, 1) * group, all);
      const int first = id / (section * tiles) * section;
      const int rest = id - first * tiles;
      section = min(section, all - first);
      block = tiles - 1 - rest / section, line = first + rest % section;
    } else {
      block = id % tiles, line = id / tiles;
    }
    return {block, line % heads, line / heads};
  }
};

template <class C>
TW_SM90 FmhaSpan fmha_span(const tw_fmha_args& args, FmhaTile tile) {
  const FmhaItem item = fmha_item<C>(args, tile.b);
  FmhaSpan span;
  span.q_first = (int)item.q_first, span.k_place = (int)(C::varlen ? item.k_first : item.cache);
  span.k_rows = (int)item.k_rows, span.off = (int)item.off, span.head = tile.head, span.b = tile.b;
  span.bad = item.bad, span.culprit = item.culprit;
  span.first = tile.block * C::m0;
  span.all = (int)(C::varlen ? item.q_rows : args.seq_q);
  const bool skipped = C::skip_min && item.skip;
  span.end = skipped ? span.first : max(min(span.first + C::m0, (int)item.q_rows), span.first);
  span.last = span.blocks = span.count = 0;
  if (span.end > span.first) {
    const FmhaRange range = fmha_range(args, item, span.first, span.end);
    const int from = (int)range.first / C::n0, to = ((int)range.last + C::n0 - 1) / C::n0;
    span.last = to;
    span.blocks = range.first < range.last ? to - from : 0;
    int sinks = 0;
    if constexpr (C::token_sinks) sinks = ((int)range.sink_last + C::n0 - 1) / C::n0;
    if (span.blocks > 0) sinks = min(sinks, from);
    span.count = span.blocks + sinks;
  }
  return span;
}

}  // namespace tw::sm90
