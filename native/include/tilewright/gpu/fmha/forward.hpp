// Forward attention on the portable building blocks: whole sequences, several that follow each other (varlen), paged
// caches, and parts of the keys (split). A unit states a Config (see docs of the attention plugin) and exports
//   TW_FMHA_KERNEL(symbol, Config)   its only parameter is tw_fmha_args; 1-D grid, a workgroup for each tile of m0 rows
// A workgroup keeps its rows of Q in shared memory; blocks of n0 keys and values come one after the other. A wave has
// whole rows of the scores, so that maxima and sums never leave it. P goes to the second product straight from
// registers where the atom's results lie as its operand does (mma.sync), else through the wave's own part of shared
// memory.
//
// Pipelines: qr has one buffer for keys and values in turn. qr_async has one for each, which asynchronous copies fill
// while the other is multiplied. qr_nwarp_sshuffle is for few rows, which all waves have: see gpu/fmha/decode.hpp.
#pragma once
#include "tilewright/core/meta.hpp"
#include "tilewright/gpu/fmha/decode.hpp"
#include "tilewright/gpu/fmha/softmax.hpp"

namespace tw::gpu {

template <class Configuration>
struct FmhaForward {
  using Config = Configuration;
  using Q = typename Config::Q;
  using K = typename Config::K;
  using V = typename Config::V;
  static constexpr bool varying = Config::qscale == FmhaScale::blockscale || Config::qscale == FmhaScale::kv_blockscale;
  static constexpr bool few_rows = Config::pipeline == FmhaPipeline::qr_nwarp_sshuffle;
  using X = typename FmhaDecodeProduct<typename FmhaProduct<Q>::type, few_rows && size_of<K> == 1, varying>::type;
  using Atoms = FmhaAtoms<X, Config::warp_m0, Config::warp_n0, Config::warp_k0>;
  using ValueAtoms = FmhaAtoms<X, Config::warp_m1, Config::warp_n1, Config::warp_k1>;
  using Keys = FmhaSource<Config, K, X, false>;
  using Values = FmhaSource<Config, V, X, true>;
  static constexpr bool split = Config::family == FmhaFamily::split;
  static constexpr bool is_async = Config::pipeline == FmhaPipeline::qr_async;
#if defined(__HIP__)
  static constexpr bool copies = false;
#else
  static constexpr bool copies = is_async && is_same<K, X>;  // whole rows, as they are
#endif
  static constexpr int most_copies = Config::paged ? 4 : 8;  // in a row: of pages, addresses are much code
  static constexpr bool has_columns = Config::paged || varying;  // what is looked up for each column
  // The first turn of the loop only asks for keys: once in the code is enough, for most of it is addresses. (clang 22.1
  // crashes on some such kernels.)
#if defined(__HIP__)
  static constexpr bool asks_first = false;
#else
  static constexpr bool asks_first = is_async && Config::m0 >= 64;
#endif
  static constexpr int column_words = (Config::paged ? 1 : 0) + (varying ? 2 : 0);
  using Ring = FmhaRing<Config, X, Values::along_rows, column_words>;
  static constexpr int waves = Ring::waves, threads = waves * kWave, m0 = Config::m0, n0 = Config::n0;
  static constexpr int wave_rows = few_rows ? m0 : m0 / waves, columns = Ring::columns, min_blocks = 1;
  static_assert(few_rows ? Config::wave_m0 == 1 && Config::wave_k1 == waves
                         : Config::wave_n0 == 1 && Config::wave_m1 == waves,
                "waves share out rows, or keys");
  static_assert(Config::wave_k0 == 1 && Config::wave_n1 == 1, "a wave has whole rows of its part");
  using TileQ = typename Atoms::template Tile<true, m0, Config::hdim_q>;
  using TileK = typename Atoms::template Tile<true, columns, Config::hdim_q>;
  using TileP = typename ValueAtoms::template Tile<true, m0, columns>;
  using TileV =
      typename ValueAtoms::template Tile<Values::along_rows || ValueAtoms::k_major_only, Config::hdim_v, columns>;
  using ScoreAtom = typename Atoms::template Atom<TileQ, TileK, wave_rows, columns>;
  using ValueAtom = typename ValueAtoms::template Atom<TileP, TileV, wave_rows, Config::hdim_v>;
  using Softmax = FmhaSoftmax<Config, ScoreAtom, columns>;
  static_assert(ScoreAtom::slots == ValueAtom::slots && ScoreAtom::row_bits == ValueAtom::row_bits,
                "both products have rows in the same places");
#if defined(__HIP__)
  static constexpr bool through_registers = false;
#else
  static constexpr bool through_registers = !Atoms::simt;
#endif

  // ---- shared memory ----

  static constexpr int v_at = TileQ::bytes + (is_async ? TileK::bytes : 0);
  static constexpr int p_at = is_async ? v_at + TileV::bytes : v_at + max_of(TileK::bytes, TileV::bytes);
  static constexpr int pages_at = p_at + (through_registers ? 0 : TileP::bytes);
  static constexpr int column_bytes = column_words * n0 * 4;
  static constexpr int shared_bytes = few_rows ? TileQ::bytes + waves * Ring::bytes
                                               : pages_at + (is_async ? 2 : 1) * column_bytes;
  static_assert(!few_rows || through_registers, "a wave multiplies its own probabilities");

  const tw_fmha_args& args;
  const int thread, lane;
  const uint32_t shared;

  struct Work {
    int part, tile, head, b;
  };
  TW_DEVICE static Work work_of(const tw_fmha_args& args, int id) {
    const int splits = split ? (int)args.splits : 1, tiles = (int)args.q_tiles;
    const int heads = (int)(Config::pack_gqa ? args.heads_k : args.heads_q);
    Work work;
    work.part = id % splits, id /= splits;
    work.tile = id % tiles, id /= tiles;
    if constexpr (Config::mask != FmhaMask::no) work.tile = tiles - 1 - work.tile;  // long ones first
    work.head = id % heads, work.b = id / heads;
    return work;
  }

  TW_DEVICE static void run(const tw_fmha_args& args) {
    const int thread = thread_index();
    FmhaForward self = {args, thread, lane_index(), shared_base()};
    if constexpr (few_rows) {
      FmhaDecode<FmhaForward>::compute(self, block_index());
    } else {
      if constexpr (split) fmha_release_next();
      self.compute(work_of(args, block_index()));
    }
    fmha_publish(args, thread, [] {});
  }

  TW_DEVICE void compute(const Work& work) const {
    const FmhaItem item = fmha_item<Config>(args, work.b);
    if (item.bad && thread == 0) fmha_tell(args, item.bad, work.b, item.culprit);
    const int group = (int)args.heads_q / (int)args.heads_k, g = Config::pack_gqa ? group : 1;
    const int head = Config::pack_gqa ? work.head * group : work.head, key_head = head / group;
    const int first = work.tile * m0, all = (int)(Config::varlen ? item.q_rows : args.seq_q) * g;
    if constexpr (Config::randval) store_random(item, work, first, min_of(first + m0, all), group);
    if (first >= all) return;
    const bool skipped = Config::skip_min && item.skip;
    const int rows = skipped ? 0 : min_of(m0, (int)item.q_rows * g - first);
    const int wave_first = thread / kWave * wave_rows;
    Softmax softmax(args, item, work.b, head, group, lane, first + wave_first);
    ValueAtom o;
    o.clear();
    if (rows > 0) {
      FmhaRange range = fmha_range(args, item, first / g, (first + rows - 1) / g + 1);
      if constexpr (!Config::token_sinks) range.sink_last = 0;  // kernels without this feature look at no sinks
      if constexpr (split) range = fmha_split(args, range, work.part, n0);
      load_queries(item, work.b, head, group, first);
      loop(softmax, o, item, range, work.b, key_head, wave_first);
    }
    const FmhaForward again = {read_again(args), thread, lane, shared};  // fewer scalar registers in the loop
    again.store(softmax, o, item, work, all, skipped);
  }

  TW_DEVICE void load_queries(const FmhaItem& item, int b, int head, int group, int first) const {
    const char* const base = (const char*)args.q.ptr + ((Config::varlen ? 0 : b * args.q.batch) + head * args.q.head +
                                                        item.q_first * args.q.row) * size_of<Q>;
    const int g = Config::pack_gqa ? group : 1, rows = (int)item.q_rows * g, hdim = (int)args.hdim_q;
    using To = Choose<few_rows && is_same<Q, bf16>, Q, X>;  // fmha_prepare_queries has the rest to do
    fmha_load_lines<Q, To, TileQ, threads, false, few_rows ? 1 : 2>(shared, thread, [&](int line, int c) {
      const int p = first + line;
      FmhaChunk chunk = {nullptr, args.q.col * size_of<Q>, min_of(hdim - c, 16 / size_of<X>)};
      if (p >= rows || c >= hdim) return chunk;
      int64_t at = p * args.q.row;
      if constexpr (Config::pack_gqa) at = p / g * args.q.row + p % g * args.q.head;
      chunk.from = base + (at + c * args.q.col) * size_of<Q>;
      return chunk;
    });
  }

  // The page and the factors of column j, which may not exist.
  TW_DEVICE void look_up_column(const FmhaItem& item, int b, int key_head, int j, int& page, float& k, float& v) const {
    const bool exists = j < (int)item.k_rows;
    page = 0, k = 0.0f, v = 0.0f;
    if constexpr (Config::paged) {
      page = exists ? (int)fmha_page<Config>(args, b, j) : -1;
      if (exists && page < 0) fmha_tell(args, kFmhaBadPage, b, j);
    }
    factors(item, b, key_head, j, page, k, v);
  }
  // Those of an existing column of an existing page.
  TW_DEVICE void factors(const FmhaItem& item, int b, int key_head, int j, int page, float& k, float& v) const {
    if (!varying || page < 0 || j >= (int)item.k_rows) return;
    constexpr bool kPages = Config::qscale == FmhaScale::kv_blockscale;
    k = fmha_scale_at(args.k_scale, kPages ? page : b, key_head, kPages ? 0 : j);
    v = fmha_scale_at(args.v_scale, kPages ? page : b, key_head, kPages ? 0 : j);
  }
  // To its words among those of `count` columns.
  TW_DEVICE static void store_column(uint32_t to, int count, int page, float k, float v) {
    if constexpr (Config::paged) store_shared(to, Words<1>{(uint32_t)page});
    const uint32_t at = to + (Config::paged ? count * 4 : 0);
    if constexpr (varying) store_shared(at, Words<1>{bits_of(k)}), store_shared(at + count * 4, Words<1>{bits_of(v)});
  }
  TW_DEVICE void look_up(const FmhaItem& item, int b, int key_head, int c0, uint32_t to) const {
    for (int j = thread; j < n0; j += threads) {
      int page;
      float k, v;
      look_up_column(item, b, key_head, c0 + j, page, k, v);
      store_column(to + j * 4, n0, page, k, v);
    }
  }

  TW_DEVICE void load_keys(const Keys& keys, int c0) const {
    const uint32_t to = shared + TileQ::bytes;
    if constexpr (copies) {
      if (keys.aligned) return keys.template copy<TileK, threads, most_copies>(args, to, thread, c0);
    }
    fmha_load_lines<K, X, TileK, threads, is_async, copies ? 1 : 2>(
        to, thread, [&](int r, int c) { return keys.row(args, c0, r, c); });
  }
  TW_DEVICE void load_values(const Values& values, int c0) const {
    const uint32_t to = shared + v_at;
    if constexpr (copies && !Values::along_rows) {
      if (values.aligned) return values.template copy<TileV, threads, most_copies>(args, to, thread, c0);
    }
    if constexpr (Values::along_rows)
      fmha_load_lines<V, X, TileV, threads, is_async>(to, thread,
                                                      [&](int c, int r) { return values.column(args, c0, c, r); });
    else
      fmha_load_across<V, X, TileV, threads, is_async, copies ? 1 : 2>(
          to, thread, [&](int r, int c) { return values.row(args, c0, r, c); });
  }

  TW_DEVICE static int after(int c0, const FmhaRange& range) {
    c0 += n0;
    return c0 >= (int)range.sink_last && c0 + n0 <= (int)range.first ? (int)range.first / n0 * n0 : c0;
  }

  TW_DEVICE void loop(Softmax& softmax, ValueAtom& o, const FmhaItem& item, const FmhaRange& range, int b, int key_head,
                      int wave_first) const {
    const int last = (int)(range.first < range.last ? range.last : range.sink_last);
    uint32_t columns = shared + pages_at;
    Keys keys(args.k, item, key_head, args.hdim_q, columns);
    Values values(args.v, item, key_head, args.hdim_v, columns);
    const int begin = range.sink_last > 0 ? 0 : (int)range.first / n0 * n0;
    if (begin >= last) return;
    int c0 = asks_first ? -1 : begin;
    if constexpr (is_async && !asks_first) {
      if constexpr (has_columns) {
        look_up(item, b, key_head, c0, columns);
        barrier();
      }
      load_keys(keys, c0);
      commit_async();
    }
    TW_NO_UNROLL
    while (c0 < last) {
      const bool asks = asks_first && c0 < 0;
      const int next = asks ? begin : after(c0, range);
      const uint32_t own = columns;
      ScoreAtom s;
      if (!asks) {
        if constexpr (is_async) {
          load_values(values, c0);
          commit_async();
          wait_async<1>();
        } else {
          if constexpr (has_columns) {
            look_up(item, b, key_head, c0, columns);
            barrier();
          }
          load_keys(keys, c0);
        }
        barrier();
        s.clear();
        fmha_multiply<ScoreAtom, TileQ>(s, shared, shared + TileQ::bytes, wave_first, 0, lane);
      }
      if constexpr (is_async && has_columns) {
        columns = columns == shared + pages_at ? columns + column_bytes : columns - column_bytes;
        keys.pages = values.pages = columns;
        if (next < last) look_up(item, b, key_head, next, columns);
      }
      barrier();
      if constexpr (is_async) {
        if (next < last) load_keys(keys, next);
        commit_async();
        if (asks) {
          c0 = next;
          continue;
        }
      } else {
        load_values(values, c0);
      }
      float rescale[Softmax::slots];
      softmax.run(s, c0, !softmax.whole(c0, wave_rows), own, own + (Config::paged ? n0 * 4 : 0), rescale);
      Softmax::apply(o, rescale);
      if constexpr (!through_registers) stage(s, wave_first);
      if constexpr (is_async) wait_async<1>();
      barrier();
      if constexpr (through_registers) multiply_values(s, o, shared + v_at);
      else fmha_multiply<ValueAtom, TileP>(o, shared + p_at, shared + v_at, wave_first, 0, lane);
      barrier();
      c0 = next;
    }
    if constexpr (is_async) wait_async<0>();
  }

  // P to the wave's rows of its tile.
  TW_DEVICE void stage(ScoreAtom& s, int wave_first) const {
    fmha_each_run(s, [&](float (&x)[ScoreAtom::run], int slot, int, int index) {
      const int byte = ScoreAtom::run_column(lane, index) * size_of<X>;
      store_shared(shared + p_at + TileP::offset(wave_first + ScoreAtom::row_at(lane, slot), byte / 16) + byte % 16,
                   pack<X, ScoreAtom::run>(x).data);
    });
    wave_barrier();
  }

  // Two neighbouring results of 8 columns are what the second product takes as 16 of k.
  TW_DEVICE void multiply_values(const ScoreAtom& s, ValueAtom& o, uint32_t v) const {
    if constexpr (through_registers) {
      constexpr bool kHalf = is_same<X, fp16>;
      TW_UNROLL
      for (int kk = 0; kk < columns / 16; kk++) {
        typename ValueAtom::Fragments f;
        TW_UNROLL
        for (int i = 0; i < ValueAtom::rows; i++)
          TW_UNROLL
          for (int w = 0; w < 4; w++) {
            const float low = s.acc[i][2 * kk + w / 2][w % 2 * 2], high = s.acc[i][2 * kk + w / 2][w % 2 * 2 + 1];
            f.a[i].w[w] = kHalf ? pack_halves(low, high) : pack_bfloats(low, high);
          }
        ValueAtom::load_b(f, v, 0, lane, kk);
        o.multiply(f);
      }
    }
  }

  using Result = Choose<split, fp32, typename Config::O>;
  // Results pass through shared memory where they have room: so few instructions store them.
#if defined(__HIP__)
  static constexpr bool stages_results = false;
#else
  static constexpr bool stages_results = m0 * FmhaStagedRows<Result, Config::hdim_v>::bytes <= shared_bytes;
#endif

  // Row i of head h, of the results or of the work's part of them.
  TW_DEVICE int64_t part_line(const FmhaItem& item, const Work& work, int64_t h, int64_t i) const {
    return Config::varlen ? (work.part * args.heads_q + h) * args.total_q + item.q_first + i
                          : ((work.part * args.batch + work.b) * args.heads_q + h) * args.seq_q + i;
  }
  TW_DEVICE char* row_of(const FmhaItem& item, const Work& work, int64_t h, int64_t i) const {
    if constexpr (split) return (char*)(args.o_acc + part_line(item, work, h, i) * Config::hdim_v);
    return (char*)args.o.ptr + ((Config::varlen ? 0 : work.b * args.o.batch) + h * args.o.head +
                                (item.q_first + i) * args.o.row) * size_of<Result>;
  }

  TW_DEVICE void store(Softmax& softmax, ValueAtom& o, const FmhaItem& item, const Work& work, int all,
                       bool skipped) const {
    float scale[Softmax::slots], lse[Softmax::slots];
    softmax.finish(scale, lse);
    const int64_t items = Config::varlen ? 0 : work.b, col = split ? 1 : args.o.col;
    char* to[Softmax::slots];  // null: no such row
    TW_UNROLL
    for (int slot = 0; slot < Softmax::slots; slot++) {
      to[slot] = nullptr;
      if (softmax.place(slot) >= all) continue;
      const int64_t h = softmax.head_of(slot), i = softmax.query(slot);
      if (skipped || i >= (int)item.q_rows) scale[slot] = 0.0f, lse[slot] = minus_infinity();
      to[slot] = row_of(item, work, h, i);
      const bool writes = (lane & ScoreAtom::row_bits) == 0;
      if constexpr (split) {
        if (writes) store_global(args.lse_acc + part_line(item, work, h, i), lse[slot]);
      } else {
        if (Config::lse && writes)
          store_global((float*)args.lse.ptr + items * args.lse.batch + h * args.lse.head +
                           (item.q_first + i) * args.lse.row, lse[slot]);
      }
    }
    const int hdim = split ? Config::hdim_v : (int)args.hdim_v;
    fmha_each_run(o, [&](float (&x)[ValueAtom::run], int slot, int strip, int index) {
      TW_UNROLL
      for (int e = 0; e < ValueAtom::run; e++) x[e] = scale[slot] == 0.0f ? 0.0f : x[e] * scale[slot];
      o.set(x, strip, index);
    });
    if constexpr (stages_results) {
      using Rows = FmhaStagedRows<Result, Config::hdim_v>;
      barrier();  // nobody reads or writes operands any more
      const uint32_t rows = shared + thread / kWave * wave_rows * Rows::bytes;
      Rows::stage(o, rows, lane);
      Rows::store(rows, lane, min_of(wave_rows, all - softmax.row0), hdim, col, [&](int r) {
        const int p = softmax.row0 + r;
        return Config::pack_gqa ? row_of(item, work, softmax.head + p % softmax.group, p / softmax.group)
                                : row_of(item, work, softmax.head, p);
      });
    } else {
      fmha_store_results<Result>(o, to, lane, hdim, col);
    }
  }

  // The bytes of rows [p0, p1), seen or not; zeros beyond the item's rows and columns. Of split plans each part stores
  // its share of the columns.
  TW_DEVICE void store_random(const FmhaItem& item, const Work& work, int p0, int p1, int group) const {
    const FmhaSeed seed = fmha_seed(args);
    const int splits = split ? (int)args.splits : 1, share = ceil_div(ceil_div((int)args.seq_k, splits), 64) * 64;
    const int first = work.part * share, last = min_of(first + share, (int)args.seq_k);
    const int groups = ceil_div(max_of(last - first, 0), 64) * 4;
    TW_NO_UNROLL
    for (int id = thread; id < max_of(p1 - p0, 0) * groups; id += threads) {
      const int p = p0 + id / groups, at = id % groups, g = Config::pack_gqa ? group : 1;
      const int i = p / g, h = Config::pack_gqa ? work.head * group + p % g : work.head;
      const int drawn = (Config::skip_min && item.skip) || i >= (int)item.q_rows ? 0 : (int)item.k_rows;
      const PhiloxWords words = fmha_random(seed, (int64_t)work.b * args.heads_q + h, i, first / 64 * 4 + at);
      char* const to = (char*)args.randval.ptr + (Config::varlen ? 0 : work.b * args.randval.batch) +
                       h * args.randval.head + (item.q_first + i) * args.randval.row;
      TW_NO_UNROLL
      for (int n = 0; n < 16; n++) {
        const int j = first + at / 4 * 64 + n / 2 * 8 + at % 4 * 2 + n % 2;
        if (j < last) store_global<uint8_t>(to + j * args.randval.col, j < drawn ? (uint8_t)Softmax::fmha_byte(words, j) : 0);
      }
    }
  }
};

}  // namespace tw::gpu

#define TW_FMHA_KERNEL(NAME, ...)                                                                                      \
  TW_KERNEL(tw::gpu::FmhaForward<__VA_ARGS__>::threads, tw::gpu::FmhaForward<__VA_ARGS__>::min_blocks, NAME, tw_fmha_args, \
            tw::gpu::FmhaForward<__VA_ARGS__>::run(params);)
