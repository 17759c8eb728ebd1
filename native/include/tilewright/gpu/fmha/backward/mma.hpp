// The gradients of q, k and v with mma.sync, in 16 bits; what is computed is stated in gpu/fmha/backward/backward.hpp.
//
// A workgroup has a slice of one key head: blocks of n0 keys, `splits` apart (not deterministic: one block), with all
// queries of all heads of its group, m0 at a time, which come in asynchronously while the block before is multiplied.
// Scores are made transposed, keys as rows. Waves are wave_n0 groups of keys by wave_m0 parts: of the queries of
// scores, and of the columns of dK and dV. Where a wave has all queries of its keys, P^T and dS^T go from its registers
// to the products; else through shared memory. dS goes there in any case, for dQ, of which waves have wave_m2 x wave_n2
// parts.
//
// Every sum has one order: a slice is one workgroup's, and a place of it one thread's.
#pragma once
#include "tilewright/gpu/fmha/cuda.hpp"
#include "tilewright/gpu/fmha/fragments.hpp"
#include "tilewright/gpu/fmha/backward/gradient.hpp"

namespace tw::gpu {

template <class Config>
struct FmhaBackwardMma {
  using X = typename Config::Q;
  static_assert(is_same<X, typename Config::K> && is_same<X, typename Config::O>, "all operands are of one type");
  static constexpr int key_waves = Config::wave_n0, parts = Config::wave_m0, waves = key_waves * parts;
  static constexpr int threads = waves * kWave, min_blocks = 1;
  static constexpr int m0 = Config::m0, n0 = Config::n0, hq = Config::hdim_q, hv = Config::hdim_v;
  static constexpr int wave_keys = n0 / key_waves, wave_queries = m0 / parts, wave_q = hq / parts, wave_v = hv / parts;
  static constexpr int dq_rows = m0 / Config::wave_m2, dq_columns = hq / Config::wave_n2;
  static_assert(Config::wave_m1 == key_waves && Config::wave_n1 == parts && Config::wave_m2 * Config::wave_n2 == waves,
                "all products are shared out over the same waves");
  static_assert(wave_keys % 16 == 0 && wave_queries % 16 == 0 && wave_q % 16 == 0 && wave_v % 16 == 0 &&
                    dq_rows % 16 == 0 && dq_columns % 16 == 0, "a wave has whole sixteens of everything");
  static constexpr bool passes = parts > 1;  // P and dS, from wave to wave

  using TileK = OperandTile<X, true, n0, hq>;
  using TileV = OperandTile<X, true, n0, hv>;
  using TileQ = OperandTile<X, true, m0, hq>;
  using TileO = OperandTile<X, true, m0, hv>;
  using TileT = OperandTile<X, true, n0, m0>;  // P^T, dS^T
  // The same memory, as operands of products over lines.
  using TileKx = OperandTile<X, false, hq, n0>;
  using TileQx = OperandTile<X, false, hq, m0>;
  using TileOx = OperandTile<X, false, hv, m0>;
  using TileS = OperandTile<X, false, m0, n0>;
  using Drops = FmhaDrops<Config>;

  static constexpr int turn = passes && hq <= 128 && hv <= 128 ? 4 : 2;
  static constexpr int rows = wave_keys / 16;
  // Queries whose scores are in registers at a time.
  static constexpr bool plain = !(Config::dropout || Config::softcap || Config::bias == FmhaBias::elementwise);
  static constexpr int held = plain && wave_queries % 32 == 0 && (passes || rows == 1) ? 32 : 16, tiles = held / 8;
  using Scores = FmhaSum<rows, tiles>;
  using SumK = FmhaSum<rows, wave_q / 8>;
  using SumV = FmhaSum<rows, wave_v / 8>;
  using SumQ = FmhaSum<dq_rows / 16, dq_columns / 8>;

  static constexpr int v_at = TileK::bytes, stage_at = v_at + TileV::bytes, lines_bytes = 2 * m0 * 4;
  static constexpr int o_in = TileQ::bytes, lines_in = o_in + TileO::bytes, stage_bytes = lines_in + lines_bytes;
  static constexpr int ds_at = stage_at + 2 * stage_bytes, p_at = ds_at + 2 * TileT::bytes;
  static constexpr int random_at = p_at + (passes ? TileT::bytes : 0);
  static constexpr int shared_bytes = random_at + Drops::bytes;
  static constexpr int own_lines = ceil_div(m0, threads);

  const tw_fmha_args& args;
  const FmhaItem& item;
  const int b, hk, thread, lane, wave, key0, part;  // key0: the wave's first key of a block
  const uint32_t shared;

  TW_DEVICE static void run(const tw_fmha_args& args) {
    const int pieces = Config::deterministic ? (int)args.splits : (int)args.k_tiles, id = block_index();
    const int piece = id % pieces, hk = id / pieces % (int)args.heads_k, b = id / pieces / (int)args.heads_k;
    FmhaItem item = fmha_item<Config>(args, b);
    const int rows = (int)(Config::varlen ? item.q_rows : args.seq_q);
    if (Config::skip_min && item.skip) item.q_rows = 0;
    const int room = (int)(Config::varlen ? item.k_rows : args.seq_k), thread = thread_index(), wave = thread / kWave;
    const FmhaBackwardMma self = {args, item, b, hk, thread, lane_index(), wave, wave % key_waves * wave_keys,
                                  wave / key_waves, shared_base()};
    if constexpr (Config::randval) Drops::store(args, item, rows, b, hk, piece, pieces, thread, threads);
    TW_NO_UNROLL
    for (int block = piece; block * n0 < room; block += pieces)
      self.keys(block * n0, room, Config::deterministic ? piece : 0);
  }

  TW_DEVICE const char* rows_of(const tw_fmha_tensor& tensor, int h, int64_t row) const {
    return (const char*)tensor.ptr +
           ((Config::varlen ? 0 : b * tensor.batch) + h * tensor.head + row * tensor.row) * size_of<X>;
  }

  // ---- what comes in ----

  template <class Tile>
  TW_DEVICE void load(uint32_t to, const char* base, const tw_fmha_tensor& tensor, int count, int hdim) const {
    constexpr int kChunks = Tile::lines * Tile::chunks, kLines = threads / Tile::chunks;
    const int64_t row = tensor.row * size_of<X>, column = tensor.col * size_of<X>;
    if (tensor.col == 1 && (((uintptr_t)base | (uintptr_t)row) & 15) == 0) {
      if constexpr (threads % Tile::chunks == 0 && kLines % 8 == 0 && Tile::lines % kLines == 0) {
        // Lines that a thread copies are far enough apart to have one permutation.
        const int line = thread / Tile::chunks, chunk = thread % Tile::chunks;
        const int bytes = min_of(max_of(hdim * size_of<X> - chunk * 16, 0), 16);
        const char* from = base + line * row + chunk * 16;
        const uint32_t place = to + Tile::offset(line, chunk);
        TW_UNROLL
        for (int l = 0; l < Tile::lines; l += kLines) {
          const int have = line + l < count ? bytes : 0;
          copy_async(place + l * Tile::line_bytes, have ? from : base, have);
          from += kLines * row;
        }
      } else {
        TW_NO_UNROLL
        for (int id = thread; id < kChunks; id += threads) {
          const int line = id / Tile::chunks, chunk = id % Tile::chunks;
          const int bytes = line < count ? min_of(max_of(hdim * size_of<X> - chunk * 16, 0), 16) : 0;
          copy_async(to + Tile::offset(line, chunk), bytes ? base + line * row + chunk * 16 : base, bytes);
        }
      }
      return;
    }
    TW_NO_UNROLL  // small code matters more than these reads
    for (int id = thread; id < kChunks * 8; id += threads) {
      const int line = id / (Tile::chunks * 8), c = id % (Tile::chunks * 8);
      uint16_t x = 0;
      if (line < count && c < hdim) x = load_constant<uint16_t>(base + line * row + c * column);
      store_shared_short(to + Tile::offset(line, c / 8) + c % 8 * 2, x);
    }
  }
  // A block of queries of one head.
  struct Place {
    int h, i0;
    TW_DEVICE void advance(int first, int end) {
      i0 += m0;
      if (i0 >= end) i0 = first, h++;
    }
  };
  // Rows of q and dO to shared memory, lse and delta to registers.
  TW_DEVICE void load_queries(uint32_t stage, Place at, FmhaLine (&lines)[own_lines]) const {
    const int count = (int)item.q_rows - at.i0;
    load<TileQ>(stage, rows_of(args.q, at.h, item.q_first + at.i0), args.q, count, (int)args.hdim_q);
    load<TileO>(stage + o_in, rows_of(args.d_o, at.h, item.q_first + at.i0), args.d_o, count, (int)args.hdim_v);
    TW_UNROLL
    for (int l = 0; l < own_lines; l++)
      if (thread + l * threads < m0) lines[l] = fmha_line<Config>(args, item, b, at.h, at.i0 + thread + l * threads);
  }
  TW_DEVICE void keep(uint32_t stage, const FmhaLine (&lines)[own_lines]) const {
    TW_UNROLL
    for (int l = 0; l < own_lines; l++) {
      const int r = thread + l * threads;
      if (r >= m0) break;
      store_shared(stage + lines_in + r * 4, Words<1>{bits_of(lines[l].lse)});
      store_shared(stage + lines_in + (m0 + r) * 4, Words<1>{bits_of(lines[l].delta)});
    }
  }

  // ---- a block of keys ----

  TW_DEVICE void keys(int j0, int room, int slice) const {
    const int group = (int)(args.heads_q / args.heads_k), last_h = hk * group + group;
    const int count = max_of(min_of((int)item.k_rows - j0, n0), 0);
    SumK dk;
    SumV dv;
    dk.clear(), dv.clear();
    barrier();  // the tiles are free
    int first = 0, end = 0;  // of the queries that see any of the keys, whole blocks
    if (count > 0) {
      using Gradient = FmhaGradient<Config>;
      first = (int)fmha_min(Gradient::first_seer(args, item, j0), item.q_rows) / m0 * m0;
      end = (int)Gradient::last_seer(args, item, j0 < args.sink_size ? j0 : j0 + count - 1) + 1;
    }
    if (first < end) {
      const int64_t row = item.k_first + j0;
      load<TileK>(shared, rows_of(args.k, hk, row), args.k, count, (int)args.hdim_q);
      load<TileV>(shared + v_at, rows_of(args.v, hk, row), args.v, count, (int)args.hdim_v);
      // Queries of a turn: those multiplied now, those already loaded for the next turn, and those requested. The first
      // two turns only ask.
      Place now = {-1, 0}, next = now, later = {hk * group, first};
      FmhaLine lines[own_lines] = {};
      int at = 0;
      TW_NO_UNROLL
      for (;;) {
        const uint32_t stage = shared + stage_at + at * stage_bytes, ds = shared + ds_at + at * TileT::bytes;
        if (now.h >= 0) products(dk, dv, stage, ds, now, j0, slice);
        at ^= 1;
        keep(shared + stage_at + at * stage_bytes, lines);
        wait_async<0>();
        barrier();  // the next block is there, and this one's dS; its stage is free
        if (later.h < last_h) load_queries(stage, later, lines);
        commit_async();
        if (now.h >= 0) add_queries(ds, now, slice);
        if (next.h >= last_h) break;
        now = next, next = later;
        later.advance(first, end);
      }
    }
    barrier();  // K and V are not needed any more
    const float factor = Config::dropout ? (float)args.keep_scale : 1.0f;
    stage_out<TileK>(dk, shared, part * wave_q, (float)args.scale);
    stage_out<TileV>(dv, shared + v_at, part * wave_v, factor);
    barrier();
    store<TileK>(shared, args.dk, j0, room, (int)args.hdim_q);
    store<TileV>(shared + v_at, args.dv, j0, room, (int)args.hdim_v);
  }

  // ---- a block of queries ----

  // Adds to dK and dV, and leaves dS^T.
  TW_DEVICE void products(SumK& dk, SumV& dv, uint32_t stage, uint32_t ds_to, Place at, int j0, int slice) const {
    if constexpr (Config::dropout) {
      Drops::draw(args, shared + random_at, b, at.h, at.i0, j0, thread, threads);
      barrier();
    }
    TW_NO_UNROLL
    for (int column = part * wave_queries; column < (part + 1) * wave_queries; column += held) {
      Scores s, dp;
      s.clear(), dp.clear();
      fmha_add_product<TileK, TileQ, turn>(s, shared, stage, key0, column, lane);
      fmha_add_product<TileV, TileO, turn>(dp, shared + v_at, stage + o_in, key0, column, lane);
      scores(s, dp, stage, at, j0, column, slice);
      Words<4> p[held / 16][rows], ds[held / 16][rows];
      TW_UNROLL
      for (int kk = 0; kk < held / 16; kk++)
        TW_UNROLL
        for (int r = 0; r < rows; r++) {
          hand_on(p[kk][r], s, r, kk), hand_on(ds[kk][r], dp, r, kk);
          if constexpr (passes) put(shared + p_at, p[kk][r], r, column + kk * 16);
          put(ds_to, ds[kk][r], r, column + kk * 16);
        }
      if constexpr (!passes) {
        fmha_add_held<TileOx>(dv, p, stage + o_in, 0, column / 16, lane);
        fmha_add_held<TileQx>(dk, ds, stage, 0, column / 16, lane);
      }
    }
    if constexpr (passes) {
      barrier_of(wave % key_waves, parts * kWave);  // those that have the same keys
      fmha_add_product<TileT, TileOx, turn>(dv, shared + p_at, stage + o_in, key0, part * wave_v, lane);
      fmha_add_product<TileT, TileQx, turn>(dk, ds_to, stage, key0, part * wave_q, lane);
    }
  }

  TW_DEVICE void add_queries(uint32_t ds, Place at, int slice) const {
    SumQ dq;
    dq.clear();
    const int row0 = wave / Config::wave_n2 * dq_rows, column0 = wave % Config::wave_n2 * dq_columns;
    fmha_add_product<TileS, TileKx, turn>(dq, ds, shared, row0, column0, lane);
    const int count = (int)item.q_rows - at.i0;
    const int64_t line = slice * fmha_lines<Config>(args) + fmha_line_of<Config>(args, item, b, at.h, at.i0);
    float* const to = args.dq_acc + line * hq + column0 + lane % 4 * 4;
    TW_UNROLL
    for (int r = 0; r < SumQ::rows * 2; r++) {
      const int row = row0 + r * 8 + lane / 4;
      if (row >= count) break;
      TW_UNROLL
      for (int pair = 0; pair < SumQ::tiles / 2; pair++) {
        const float(&low)[4] = dq.x[r / 2][pair * 2], (&high)[4] = dq.x[r / 2][pair * 2 + 1];
        const float four[4] = {low[r % 2 * 2], low[r % 2 * 2 + 1], high[r % 2 * 2], high[r % 2 * 2 + 1]};
        add_global_four(to + row * hq + pair * 16, four);  // as FmhaQueryPlace says
      }
    }
  }

  // P and dS of scores and of dO . V.
  TW_DEVICE void scores(Scores& s, Scores& dp, uint32_t stage, Place at, int j0, int column,
                        int slice) const {
    const FmhaGradient<Config> gradient(args, item, b, at.h);
    FmhaSeers seers[rows * 2];
    TW_UNROLL
    for (int r = 0; r < rows * 2; r++)
      seers[r] = FmhaGradient<Config>::seers(args, item, j0 + key0 + r * 8 + lane / 4);
    TW_UNROLL
    for (int t = 0; t < tiles; t++) {
      const int c = column + t * 8 + lane % 4 * 2;
      const Words<2> lse = load_shared<2>(stage + lines_in + c * 4);
      const Words<2> delta = load_shared<2>(stage + lines_in + (m0 + c) * 4);
      TW_UNROLL
      for (int r = 0; r < rows * 2; r++)
        TW_UNROLL
        for (int e = 0; e < 2; e++) {
          const int i = at.i0 + c + e, j = j0 + key0 + r * 8 + lane / 4;
          bool drops = false;
          if constexpr (Config::dropout) drops = Drops::dropped(args, shared + random_at, c + e, j, j0);
          gradient.run(s.x[r / 2][t][r % 2 * 2 + e], dp.x[r / 2][t][r % 2 * 2 + e], i, j, seers[r].have(i), drops,
                       float_of(lse.w[e]), float_of(delta.w[e]), slice);
        }
    }
  }

  // Results of rows and columns as the first operand of a product over the columns.
  TW_DEVICE static void hand_on(Words<4>& to, const Scores& s, int r, int kk) {
    TW_UNROLL
    for (int i = 0; i < 4; i++)
      to.w[i] = fmha_pack<X>(s.x[r][kk * 2 + i / 2][i % 2 * 2], s.x[r][kk * 2 + i / 2][i % 2 * 2 + 1]);
  }
  TW_DEVICE void put(uint32_t tile, const Words<4>& x, int r, int column) const {
    TW_UNROLL
    for (int i = 0; i < 4; i++)
      store_shared(tile + TileT::offset(key0 + r * 16 + i % 2 * 8 + lane / 4, column / 8 + i / 2) +
                       lane % 4 * 4,
                   Words<1>{x.w[i]});
  }

  // ---- what goes out ----

  template <class Tile, class Sum>
  TW_DEVICE void stage_out(const Sum& sum, uint32_t to, int column0, float factor) const {
    TW_UNROLL
    for (int r = 0; r < Sum::rows * 2; r++)
      TW_UNROLL
      for (int t = 0; t < Sum::tiles; t++) {
        const float* const x = sum.x[r / 2][t] + r % 2 * 2;
        store_shared(to + Tile::offset(key0 + r * 8 + lane / 4, column0 / 8 + t) + lane % 4 * 4,
                     Words<1>{fmha_pack<X>(x[0] * factor, x[1] * factor)});
      }
  }
  template <class Tile>
  TW_DEVICE void store(uint32_t from, const tw_fmha_tensor& tensor, int j0, int room, int hdim) const {
    char* const base = (char*)rows_of(tensor, hk, item.k_first + j0);
    const int64_t row = tensor.row * size_of<X>, column = tensor.col * size_of<X>;
    const bool whole = tensor.col == 1 && (((uintptr_t)base | (uintptr_t)row) & 15) == 0;
    TW_NO_UNROLL
    for (int id = thread; id < Tile::lines * Tile::chunks; id += threads) {
      const int line = id / Tile::chunks, chunk = id % Tile::chunks, left = min_of(hdim - chunk * 8, 8);
      if (j0 + line >= room || left <= 0) continue;
      const Words<4> x = load_shared<4>(from + Tile::offset(line, chunk));
      char* const to = base + line * row + chunk * 8 * column;
      if (whole && left == 8) {
        store_global(to, x);
        continue;
      }
      TW_UNROLL
      for (int e = 0; e < 8; e++)
        if (e < left) store_global(to + e * column, (uint16_t)(x.w[e / 2] >> (e % 2 * 16)));
    }
  }
};

}  // namespace tw::gpu
