// Few rows of queries and many keys (decoding): pipeline qr_nwarp_sshuffle. All waves of a workgroup have the same
// rows. Each has keys of its own, n0 / waves of every block, in a ring of shared memory that asynchronous copies fill
// some blocks ahead, and maxima, sums and results of its own: no wave waits for another before the end
// (gpu/fmha/splitkv_reduce.hpp). So the bytes on their way are those of whole rings, and memory is what limits the
// kernel. What little comes before the first copies counts in full: instructions too come from memory where caches are
// cold.
#pragma once
#include "tilewright/core/meta.hpp"
#include "tilewright/gpu/fmha/splitkv_reduce.hpp"

namespace tw::gpu {

// The shared memory of one wave: slots for a block's keys and values as they are in global memory, a tile for 8-bit
// values whose lines run along keys, to be widened, and what was looked up for the columns of each slot.
template <class Config, class X, bool kAlongRows, int kColumnWords>
struct FmhaRing {
  using K = typename Config::K;
  using V = typename Config::V;
  static constexpr bool few_rows = Config::pipeline == FmhaPipeline::qr_nwarp_sshuffle;
  static constexpr int waves = few_rows ? Config::wave_n0 : Config::wave_m0;
  static constexpr int columns = few_rows ? Config::n0 / waves : Config::n0;
  static constexpr bool widens = !is_same<K, X>;
  static constexpr bool pairs = few_rows && widens && !kAlongRows;  // 8-bit values are multiplied as they lie
  using TileK = OperandTile<K, true, columns, Config::hdim_q>;
  using TileV = Choose<pairs, OperandTile<V, true, columns, Config::hdim_v>,  // a line is a key
                       OperandTile<V, kAlongRows, Config::hdim_v, columns>>;
  static constexpr int slot_bytes = TileK::bytes + TileV::bytes;
  // 96 KB on their way let two workgroups share a multiprocessor of 227 KB. (The same sum:
  // tilewright_fmha/footprint/gpu.py.)
  static constexpr int fitting = (96 << 10) / (waves * slot_bytes);
  static constexpr int stages = fitting < 2 ? 2 : fitting > 4 ? 4 : fitting;
  static constexpr int wide_bytes = widens && kAlongRows ? columns * Config::hdim_v * size_of<X> : 0;
  static constexpr int word_bytes = kColumnWords * columns * 4;
  static constexpr int words_at = stages * slot_bytes + wide_bytes;
  static constexpr int bytes = words_at + stages * word_bytes;  // of one wave
};

// 16 bytes that exist.
TW_DEVICE void fmha_copy_whole_chunk(uint32_t to, const char* from) {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#else
  copy_async(to, from, 16);
#endif
}

// Elements of 8 bits in shared memory become those of a tile of the same lines.
template <class E, class X, class From, class To>
TW_DEVICE void fmha_widen_tile(uint32_t to, uint32_t from, int lane) {
  constexpr int kPieces = From::line_bytes / 8, kTotal = From::lines * kPieces;
  static_assert(From::lines == To::lines && To::line_bytes == 2 * From::line_bytes, "tiles of the same elements");
  TW_UNROLL_BY(2)
  for (int id = lane; id < kTotal; id += kWave) {
    const int line = id / kPieces, piece = id % kPieces;
    const Words<2> x = load_shared<2>(from + From::offset(line, piece / 2) + piece % 2 * 8);
    const Words<2> low = fmha_widen<X>(x.w[0]), high = fmha_widen<X>(x.w[1]);
    store_shared(to + To::offset(line, piece), Words<4>{low.w[0], low.w[1], high.w[0], high.w[1]});
  }
}

// Forward: the FmhaForward of the same Config.
template <class Forward>
struct FmhaDecode {
  using Config = typename Forward::Config;
  using Ring = typename Forward::Ring;
  using X = typename Forward::X;
  using K = typename Ring::K;
  using V = typename Ring::V;
  using Keys = FmhaSource<Config, K, K, false>;
  using Values = FmhaSource<Config, V, V, true>;
  using TileQ = typename Forward::TileQ;
  using ScoreAtom = typename Forward::ScoreAtom;
  using ValueAtom = typename Forward::ValueAtom;
  using Softmax = typename Forward::Softmax;
  static constexpr int columns = Ring::columns, stages = Ring::stages, n0 = Config::n0;
  static_assert(columns <= kWave, "a lane looks up a column");
  using Reduce = FmhaSplitKvReduce<Forward>;
  static_assert(Reduce::state_bytes <= Ring::bytes, "what a wave has fits into its ring");

  const Forward& forward;
  const FmhaItem& item;
  const int b, key_head;
  const uint32_t ring;  // of this wave
  Keys keys;
  Values values;
  const int32_t* table;  // of the item
  int page_bits;         // log2 of the rows of a page
  bool whole;            // rows fill the lines of their tiles, by whole chunks
  const char *own_key, *own_value;  // see copy_whole

  // A tile of rows and a part of the keys, to the end: number `id` of them.
  TW_DEVICE static void compute(const Forward& forward, uint32_t id) {
    const tw_fmha_args& args = forward.args;
    // As Forward::work_of has it, by divisions that take half as many instructions.
    const uint32_t heads = (uint32_t)(Config::pack_gqa ? args.heads_k : args.heads_q), tiles = (uint32_t)args.q_tiles;
    const uint32_t ticket = id / (uint32_t)args.splits, line = tiles == 1 ? ticket : ticket / tiles;
    typename Forward::Work work;
    work.part = (int)(id - ticket * (uint32_t)args.splits), work.tile = (int)(ticket - line * tiles);
    if constexpr (Config::mask != FmhaMask::no) work.tile = (int)tiles - 1 - work.tile;  // long ones first
    work.b = (int)(line / heads), work.head = (int)(line - (uint32_t)work.b * heads);
    const FmhaItem item = fmha_item<Config>(args, work.b);
    if (item.bad && forward.thread == 0) fmha_tell(args, item.bad, work.b, item.culprit);
    const int group = (int)((uint32_t)args.heads_q / (uint32_t)args.heads_k), g = Config::pack_gqa ? group : 1;
    const int head = Config::pack_gqa ? work.head * group : work.head;
    const int key_head = Config::pack_gqa ? work.head : work.head / group;
    const int first = work.tile * Config::m0, all = (int)(Config::varlen ? item.q_rows : args.seq_q) * g;
    if constexpr (Config::randval) forward.store_random(item, work, first, min_of(first + Config::m0, all), group);
    if (first >= all) return;
    const bool skipped = Config::skip_min && item.skip;
    const int rows = skipped ? 0 : min_of(Config::m0, (int)item.q_rows * g - first);
    FmhaDecode self(forward, item, work.b, key_head);
    Softmax softmax(args, item, work.b, head, group, forward.lane, first);
    ValueAtom o;
    if (rows > 0) {
      const FmhaRange range = fmha_part<Config>(args, item, work.part, first / g, (first + rows - 1) / g + 1);
      self.run(softmax, o, range, [&] {
        o.clear();
        if (!args.counters) fmha_release_next();  // a second stage adds the parts, if there are several
        forward.load_queries(item, work.b, head, group, first);
        barrier();
        if constexpr (Ring::widens) {
          const float back = fmha_prepare_queries<typename Config::Q, TileQ, Forward::threads>(
              forward.shared, forward.thread, forward.lane);
          TW_UNROLL
          for (int i = 0; i < (Softmax::by_row ? Softmax::slots : 1); i++) softmax.factor[i] *= back;
          barrier();
        }
      });
    } else {
      o.clear();
    }
    const FmhaRows stored = {work.part, work.b,  head, key_head, group, first, min_of(Config::m0, all - first),
                             (int)ticket, skipped};
    const uint32_t states = ring_of(forward, 0);
    Reduce{args, item, stored, forward.thread / kWave, forward.lane, forward.shared, states, Ring::bytes}
        .run(softmax, o);
  }

  TW_DEVICE FmhaDecode(const Forward& forward, const FmhaItem& item, int b, int key_head)
      : forward(forward),
        item(item),
        b(b),
        key_head(key_head),
        ring((uint32_t)compute_again((int)ring_of(forward, forward.thread / kWave))),
        keys(forward.args.k, item, key_head, forward.args.hdim_q, 0),
        values(forward.args.v, item, key_head, forward.args.hdim_v, 0) {
    const tw_fmha_args& args = forward.args;
    using K = typename Ring::TileK;
    using V = typename Ring::TileV;
    whole = copies_whole<K> && copies_whole<V> && keys.aligned && values.aligned && keys.hdim == Config::hdim_q &&
            values.hdim == Config::hdim_v;
    own_key = own_chunk<K>(keys), own_value = own_chunk<V>(values);
    table = nullptr, page_bits = 0;
    if constexpr (Config::paged) {
      constexpr bool kStarts = Config::kv_lookup == KvLookup::sglang;
      table = args.block_table + (kStarts ? fmha_max(args.page_starts[b], 0) : b * args.table_stride);
      while ((1 << page_bits) < (int)Keys::page_size(args)) page_bits++;
    }
  }

  TW_DEVICE static uint32_t ring_of(const Forward& forward, int wave) {
    return forward.shared + TileQ::bytes + wave * Ring::bytes;
  }
  TW_DEVICE uint32_t words(int slot) const { return ring + Ring::words_at + slot * Ring::word_bytes; }

  // The number in the table for the wave's column of this lane's number, not yet looked at: it is on its way while
  // another block is multiplied.
  TW_DEVICE int look_up(int c0, int last) const {
    const int j = c0 + forward.lane;
    if constexpr (Config::paged)
      if (forward.lane < columns && c0 < last && j < keys.rows) return load_constant<int32_t>(table + (j >> page_bits));
    return Config::paged ? -1 : 0;
  }

  // Copies the wave's keys and values from row c0 on, if there are any. `page`: what look_up gave.
  TW_DEVICE void fill(int page, int c0, int last, int slot) {
    const tw_fmha_args& args = forward.args;
    const int lane = forward.lane;
    if (c0 < last) {
      if constexpr (Forward::has_columns) {
        const int j = c0 + lane;
        if (Config::paged && (page < 0 || page >= args.num_pages)) {
          if (lane < columns && j < keys.rows) fmha_tell(args, kFmhaBadPage, b, j);
          page = -1;
        }
        if (lane < columns) {
          float k = 0.0f, v = 0.0f;
          forward.factors(item, b, key_head, j, page, k, v);
          Forward::store_column(words(slot) + lane * 4, columns, page, k, v);
        }
        keys.pages = values.pages = words(slot);
        wave_barrier();
      }
      const uint32_t to = ring + slot * Ring::slot_bytes, v = to + Ring::TileK::bytes;
      if (lies_whole(page, c0)) {
        copy_whole<typename Ring::TileK>(keys, own_key, to, page, c0);
        copy_whole<typename Ring::TileV>(values, own_value, v, page, c0);
        commit_async();
        return;
      }
      if (keys.aligned)
        copy<typename Ring::TileK>(keys, to, page, c0);
      else
        fmha_load_lines<K, K, typename Ring::TileK, kWave, true, 1>(
            to, lane, [&](int r, int c) { return keys.row(args, c0, r, c); });
      if constexpr (Values::along_rows) {
        fmha_load_lines<V, V, typename Ring::TileV, kWave, true, 1>(
            v, lane, [&](int c, int r) { return values.column(args, c0, c, r); });
      } else {
        if (values.aligned)
          copy<typename Ring::TileV>(values, v, page, c0);
        else
          fmha_load_lines<V, V, typename Ring::TileV, kWave, true, 1>(
              v, lane, [&](int r, int c) { return values.row(args, c0, r, c); });
      }
    }
    commit_async();
  }
  // All rows of the block exist, and each is as far from the one before: no chunk of them need be looked at.
  TW_DEVICE bool lies_whole(int page, int c0) const {
    if (!whole || c0 + columns > keys.rows) return false;
    if constexpr (Config::paged) return (1 << page_bits) >= columns && shuffle(page, 0) >= 0;
    return true;
  }
  // `own`: where the lane's chunk of the head's first row would be.
  template <class Tile, class Source>
  TW_DEVICE void copy_whole(const Source& source, const char* own, uint32_t to, int page, int c0) const {
    if constexpr (copies_whole<Tile>) {
      constexpr int kRows = kWave / Tile::chunks;  // of a round: keys of their lines and of the round's first one add up
      const uint32_t place = Tile::offset(forward.lane / Tile::chunks, forward.lane % Tile::chunks);
      const char* from = own + (source.line(forward.args, c0, Config::paged ? shuffle(page, 0) : 0) - source.base);
      TW_UNROLL
      for (int line = 0; line < Tile::lines; line += kRows, from += kRows * source.row_bytes)
        fmha_copy_whole_chunk(to + (place ^ (uint32_t)Tile::key(line) * 16) + line * Tile::line_bytes, from);
    }
  }
  template <class Tile>
  static constexpr bool copies_whole = kWave % Tile::chunks == 0;
  template <class Tile, class Source>
  TW_DEVICE const char* own_chunk(const Source& source) const {
    return source.base + forward.lane / Tile::chunks * source.row_bytes + forward.lane % Tile::chunks * source.chunk_bytes();
  }

  // A lane knows the page of the row of its number: it finds the row's place for all.
  template <class Tile, class Source>
  TW_DEVICE void copy(const Source& source, uint32_t to, int page, int c0) const {
    const tw_fmha_args& args = forward.args;
    if constexpr (Config::paged && Tile::lines * Tile::chunks % kWave == 0) {
      const int j = c0 + forward.lane;
      const int64_t own = (int64_t)(uintptr_t)(j < source.rows ? source.line(args, j, page) : nullptr);
      const int chunks = source.hdim * size_of<K> / 16;
      fmha_copy_rows<Tile, kWave, true>(to, forward.lane, columns, chunks, source.chunk_bytes(), [&](int r) {
        const uint32_t low = (uint32_t)shuffle((int)own, r), high = (uint32_t)shuffle((int)(own >> 32), r);
        return (const char*)(uintptr_t)((uint64_t)high << 32 | low);
      });
    } else {
      source.template copy<Tile, kWave>(args, to, forward.lane, c0);
    }
  }

  // `ready` is called once, when the first copies are on their way, and ends with a barrier of the workgroup.
  template <class Ready>
  TW_DEVICE void run(Softmax& softmax, ValueAtom& o, const FmhaRange& range, Ready ready) {
    const int last = (int)(range.first < range.last ? range.last : range.sink_last);
    const int own = forward.thread / kWave * columns;  // of every block
    int c0 = range.sink_last > 0 ? 0 : (int)range.first / n0 * n0, ahead = c0, slot = 0, free = 0;
    int page = look_up(ahead + own, last), idle = stages - 1;  // turns before the first block is multiplied
    TW_NO_UNROLL
    while (idle > 0 || c0 < last) {
      if (idle == 0) {
        wait_async<stages - 2>();
        wave_barrier();  // the block has come for all lanes, and all are done with the one before
      }
      fill(page, ahead + own, last, free);
      ahead = Forward::after(ahead, range);
      page = look_up(ahead + own, last);
      free = free + 1 == stages ? 0 : free + 1;
      if (idle > 0) {
        if (--idle == 0) ready();
        continue;
      }
      if (c0 + own < last) add(softmax, o, c0 + own, slot);
      c0 = Forward::after(c0, range);
      slot = slot + 1 == stages ? 0 : slot + 1;
    }
    wait_async<0>();
  }

  // Adds a block's part to the sums.
  TW_DEVICE void add(Softmax& softmax, ValueAtom& o, int c0, int slot) const {
    const int lane = forward.lane;
    const uint32_t k = ring + slot * Ring::slot_bytes, v = k + Ring::TileK::bytes, own = words(slot);
    ScoreAtom s;
    s.clear();
    if constexpr (Ring::widens) fmha_multiply_bytes<ScoreAtom, TileQ, typename Ring::TileK>(s, forward.shared, k, lane);
    else fmha_multiply<ScoreAtom, TileQ>(s, forward.shared, k, 0, 0, lane);
    float rescale[Softmax::slots];
    softmax.run(s, c0, !softmax.whole(c0, Config::m0), own, own + (Config::paged ? columns * 4 : 0), rescale);
    Softmax::apply(o, rescale);
    if constexpr (Ring::pairs) {
      fmha_add_bytes<X, typename Ring::TileV>(o, s, v, lane);
    } else if constexpr (Ring::widens) {
      const uint32_t wide = ring + stages * Ring::slot_bytes;
      fmha_widen_tile<V, X, typename Ring::TileV, typename Forward::TileV>(wide, v, lane);
      wave_barrier();
      forward.multiply_values(s, o, wide);
    } else {
      forward.multiply_values(s, o, v);
    }
  }
};

}  // namespace tw::gpu
