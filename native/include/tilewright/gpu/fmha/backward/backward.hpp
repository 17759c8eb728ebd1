// The gradients of q, k and v on the portable building blocks, with the scores made again:
//     P = 2^(t - lse log2(e))   dP = dO V^T   dS = P * (dP - delta)   dV = P^T dO   dK = scale dS^T Q   dQ = scale dS K
//   TW_FMHA_BACKWARD_KERNEL(symbol, Config)   its only parameter is tw_fmha_args: dk and dv, and what convert_dq makes
//                                             dq and dbias of
// In 16 bits on NVIDIA GPUs: gpu/fmha/backward/mma.hpp. Here is the template for the other atoms, which want k side by
// side and so have a second copy of Q, dO and K.
//
// A workgroup has a slice of one key head: blocks of n0 keys, `splits` apart (not deterministic: one block), with all
// queries of all heads of its group, m0 at a time. It owns its rows of dk and dv, and its slice of dq_acc, and goes
// through all in order: sums do not depend on who came first. Scores are made transposed, keys as rows, which groups of
// waves share out. Where dK and dV of a head are too many for one wave, wave_k0 waves of a group share their columns,
// and make the same scores. Of dQ, all waves share out columns.
#pragma once
#if !defined(__HIP__)
#include "tilewright/gpu/fmha/backward/mma.hpp"
#endif
#include "tilewright/gpu/fmha/backward/gradient.hpp"
#include "tilewright/gpu/fmha/loader.hpp"

namespace tw::gpu {

template <class Config>
struct FmhaBackwardAtoms {
  using X = typename Config::Q;
  static_assert(is_same<X, typename Config::K> && is_same<X, typename Config::O>, "all operands are of one type");
  using Atoms = FmhaAtoms<X, Config::warp_m0, Config::warp_n0, Config::warp_k0>;
  static constexpr int key_waves = Config::wave_n0, parts = Config::wave_k0, waves = key_waves * parts;
  static constexpr int threads = waves * kWave, min_blocks = 1;
  static constexpr int m0 = Config::m0, n0 = Config::n0, hq = Config::hdim_q, hv = Config::hdim_v;
  static constexpr int wave_keys = n0 / key_waves, wave_q = hq / parts, wave_v = hv / parts, wave_columns = hq / waves;
  static_assert(Config::wave_m0 == 1 && Config::wave_m1 == key_waves && Config::wave_n1 == parts &&
                    Config::wave_n2 == waves && Config::wave_m2 == 1,
                "groups of waves share out keys, the waves of a group columns of dK and dV, and all those of dQ");
  static constexpr bool across = Atoms::k_major_only;
  using TileK = typename Atoms::template Tile<true, n0, hq>;
  using TileV = typename Atoms::template Tile<true, n0, hv>;
  using TileQ = typename Atoms::template Tile<true, m0, hq>;
  using TileO = typename Atoms::template Tile<true, m0, hv>;
  using TileKx = typename Atoms::template Tile<across, hq, n0>;
  using TileQx = typename Atoms::template Tile<across, hq, m0>;
  using TileOx = typename Atoms::template Tile<across, hv, m0>;
  using TileT = typename Atoms::template Tile<true, n0, m0>;     // P^T, dS^T
  using TileS = typename Atoms::template Tile<true, m0, n0>;  // dS
  using Drops = FmhaDrops<Config>;
  using ScoreAtom = typename Atoms::template Atom<TileK, TileQ, wave_keys, m0>;
  using StepAtom = typename Atoms::template Atom<TileV, TileO, wave_keys, m0>;
  using KeyAtom = typename Atoms::template Atom<TileT, TileQx, wave_keys, wave_q>;
  using ValueAtom = typename Atoms::template Atom<TileT, TileOx, wave_keys, wave_v>;
  using QueryAtom = typename Atoms::template Atom<TileS, TileKx, m0, wave_columns>;

  static constexpr int k_at = 0, v_at = k_at + TileK::bytes, q_at = v_at + TileV::bytes, o_at = q_at + TileQ::bytes;
  static constexpr int p_at = o_at + TileO::bytes, ds_at = p_at + TileT::bytes, lines_at = ds_at + TileT::bytes;
  static constexpr int random_at = lines_at + 2 * m0 * 4;
  static constexpr int kx_at = random_at + Drops::bytes, qx_at = kx_at + TileKx::bytes;
  static constexpr int ox_at = qx_at + TileQx::bytes, s_at = ox_at + TileOx::bytes, shared_bytes = s_at + TileS::bytes;

  const tw_fmha_args& args;
  const int thread, lane, wave;
  const uint32_t shared;
  TW_DEVICE int key0() const { return wave % key_waves * wave_keys; }  // the wave's first key of a block
  TW_DEVICE int part() const { return parts > 1 ? wave / key_waves : 0; }

  TW_DEVICE static void run(const tw_fmha_args& args) {
    const int thread = thread_index();
    const FmhaBackwardAtoms self = {args, thread, lane_index(), thread / kWave, shared_base()};
    const int pieces = Config::deterministic ? (int)args.splits : (int)args.k_tiles, id = block_index();
    const int piece = id % pieces, hk = id / pieces % (int)args.heads_k, b = id / pieces / (int)args.heads_k;
    FmhaItem item = fmha_item<Config>(args, b);
    const int rows = (int)(Config::varlen ? item.q_rows : args.seq_q);
    if (Config::skip_min && item.skip) item.q_rows = 0;
    const int room = (int)(Config::varlen ? item.k_rows : args.seq_k);
    if constexpr (Config::randval) Drops::store(args, item, rows, b, hk, piece, pieces, thread, threads);
    TW_NO_UNROLL
    for (int block = piece; block * n0 < room; block += pieces)
      self.keys(item, b, hk, block * n0, room, Config::deterministic ? piece : 0);
  }

  // Row r, from column c on, of `count` rows of a tensor.
  template <class E>
  TW_DEVICE static FmhaChunk chunk(const char* base, const tw_fmha_tensor& tensor, int r, int count, int c, int hdim) {
    FmhaChunk chunk = {nullptr, tensor.col * size_of<E>, min_of(hdim - c, 16 / size_of<E>)};
    if (r < count && c < hdim) chunk.from = base + (r * tensor.row + c * tensor.col) * size_of<E>;
    return chunk;
  }
  TW_DEVICE static const char* rows_of(const tw_fmha_tensor& tensor, int64_t b, int64_t h, int64_t row) {
    return (const char*)tensor.ptr +
           ((Config::varlen ? 0 : b * tensor.batch) + h * tensor.head + row * tensor.row) * size_of<X>;
  }
  template <class Tile, class Across>
  TW_DEVICE void load(int to, int copy, const char* base, const tw_fmha_tensor& tensor, int count, int hdim) const {
    const auto at = [&](int r, int c) { return chunk<X>(base, tensor, r, count, c, hdim); };
    if constexpr (Atoms::simt) {
      // Both copies have the same lines; only chunks may change places.
      TW_NO_UNROLL
      for (int id = thread; id < Tile::lines * Tile::chunks; id += threads) {
        const int line = id / Tile::chunks, chunk = id % Tile::chunks;
        const Words<4> x = fmha_load_chunk<X, X>(at(line, chunk * (16 / size_of<X>)));
        store_shared(shared + to + Tile::offset(line, chunk), x);
        if constexpr (!is_same<Across, void>) store_shared(shared + copy + Across::offset(line, chunk), x);
      }
    } else {
      fmha_load_lines<X, X, Tile, threads, false>(shared + to, thread, at);
      if constexpr (!is_same<Across, void>) fmha_load_across<X, X, Across, threads, false>(shared + copy, thread, at);
    }
  }

  TW_DEVICE void keys(const FmhaItem& item, int b, int hk, int j0, int room, int slice) const {
    const int group = (int)(args.heads_q / args.heads_k), count = max_of((int)item.k_rows - j0, 0);
    const int64_t row = item.k_first + j0;
    barrier();  // the tiles are free
    load<TileK, TileKx>(k_at, kx_at, rows_of(args.k, b, hk, row), args.k, count, (int)args.hdim_q);
    load<TileV, void>(v_at, 0, rows_of(args.v, b, hk, row), args.v, count, (int)args.hdim_v);
    KeyAtom dk;
    ValueAtom dv;
    dk.clear(), dv.clear();
    if (count > 0) {
      TW_NO_UNROLL
      for (int h = hk * group; h < hk * group + group; h++)
        TW_NO_UNROLL
        for (int i0 = 0; i0 < (int)item.q_rows; i0 += m0) {
          if constexpr (Config::mask != FmhaMask::no) {
            const FmhaRange range = fmha_range(args, item, i0, fmha_min(i0 + m0, item.q_rows));
            if (j0 >= range.last || (j0 >= range.sink_last && j0 + n0 <= range.first)) continue;
          }
          // Addresses are made again, which takes less time than so many registers.
          const int own = compute_again(thread);
          const FmhaBackwardAtoms self = {read_again(args), own, own % kWave, own / kWave, shared};
          self.queries(dk, dv, item, b, h, i0, j0, slice);
        }
    }
    const tw_fmha_args& again = read_again(args);
    const float keep = Config::dropout ? (float)again.keep_scale : 1.0f;
    store<wave_q>(dk, again.dk, item, b, hk, j0, room, (int)again.hdim_q, part() * wave_q, (float)again.scale);
    store<wave_v>(dv, again.dv, item, b, hk, j0, room, (int)again.hdim_v, part() * wave_v, keep);
  }

  template <int kColumns, class Atom>
  TW_DEVICE void store(Atom& atom, const tw_fmha_tensor& to, const FmhaItem& item, int b, int hk, int j0, int room,
                       int hdim, int column0, float factor) const {
    char* const base = (char*)rows_of(to, b, hk, item.k_first + j0);
#if defined(__HIP__)
    fmha_each_run(atom, [&](float (&x)[Atom::run], int slot, int, int index) {
      const int r = key0() + Atom::row_at(lane, slot), c = column0 + Atom::run_column(lane, index);
      if (j0 + r >= room) return;
      TW_UNROLL
      for (int e = 0; e < Atom::run; e++) x[e] *= factor;
      fmha_store_run<X>(base + (r * to.row + c * to.col) * size_of<X>, x, hdim - c, to.col);
    });
#else
    // Through the wave's own part of shared memory: so few instructions store them.
    using Rows = FmhaStagedRows<X, kColumns>;
    constexpr int kBytes = wave_keys * FmhaStagedRows<X, max_of(wave_q, wave_v)>::bytes;
    static_assert(waves * kBytes <= shared_bytes, "there is room for results");
    const uint32_t rows = shared + wave * kBytes;
    fmha_each_run(atom, [&](float (&x)[Atom::run], int, int strip, int index) {
      TW_UNROLL
      for (int e = 0; e < Atom::run; e++) x[e] *= factor;
      atom.set(x, strip, index);
    });
    barrier();  // nobody reads operands any more
    Rows::stage(atom, rows, lane);
    Rows::store(rows, lane, min_of(wave_keys, room - j0 - key0()), hdim - column0, to.col,
                [&](int r) { return base + ((key0() + r) * to.row + column0 * to.col) * size_of<X>; });
#endif
  }

  TW_DEVICE void queries(KeyAtom& dk, ValueAtom& dv, const FmhaItem& item, int b, int h, int i0, int j0,
                         int slice) const {
    const int count = (int)item.q_rows - i0;
    const int64_t row = item.q_first + i0;
    barrier();  // the tiles are free
    load<TileQ, TileQx>(q_at, qx_at, rows_of(args.q, b, h, row), args.q, count, (int)args.hdim_q);
    load<TileO, TileOx>(o_at, ox_at, rows_of(args.d_o, b, h, row), args.d_o, count, (int)args.hdim_v);
    for (int r = thread; r < m0; r += threads) {
      const FmhaLine line = fmha_line<Config>(args, item, b, h, i0 + r);
      store_shared(shared + lines_at + r * 4, Words<1>{bits_of(line.lse)});
      store_shared(shared + lines_at + (m0 + r) * 4, Words<1>{bits_of(line.delta)});
    }
    if constexpr (Config::dropout) Drops::draw(args, shared + random_at, b, h, i0, j0, thread, threads);
    barrier();
    {
      ScoreAtom s;
      StepAtom dp;
      s.clear(), dp.clear();
      fmha_multiply<ScoreAtom, TileK>(s, shared + k_at, shared + q_at, key0(), 0, lane);
      fmha_multiply<StepAtom, TileV>(dp, shared + v_at, shared + o_at, key0(), 0, lane);
      scores(s, dp, item, b, h, i0, j0, slice);
    }
    barrier();
    fmha_multiply<ValueAtom, TileT>(dv, shared + p_at, shared + ox_at, key0(), part() * wave_v, lane);
    fmha_multiply<KeyAtom, TileT>(dk, shared + ds_at, shared + qx_at, key0(), part() * wave_q, lane);
    QueryAtom dq;
    dq.clear();
    fmha_multiply<QueryAtom, TileS>(dq, shared + s_at, shared + kx_at, 0, wave * wave_columns, lane);
    float* const to = args.dq_acc + (slice * fmha_lines<Config>(args) + fmha_line_of<Config>(args, item, b, h, i0)) * hq;
    fmha_each_run(dq, [&](float (&x)[QueryAtom::run], int slot, int, int index) {
      const int r = QueryAtom::row_at(lane, slot), c = wave * wave_columns + QueryAtom::run_column(lane, index);
      if (r >= count) return;
      TW_UNROLL
      for (int e = 0; e < QueryAtom::run; e++) {
        float* const at = to + r * hq + c + e;
        if constexpr (Config::deterministic) store_global(at, load_global<float>(at) + x[e]);
        else add_global(at, x[e]);
      }
    });
  }

  // P^T and dS^T from S^T and dP^T, to shared memory.
  TW_DEVICE void scores(ScoreAtom& s, StepAtom& dp, const FmhaItem& item, int b, int h, int i0, int j0,
                        int slice) const {
    const FmhaGradient<Config> gradient(args, item, b, h);
    fmha_each_run(s, [&](float (&x)[ScoreAtom::run], int slot, int strip, int index) {
      const int r = key0() + ScoreAtom::row_at(lane, slot), j = j0 + r;
      const int column = ScoreAtom::run_column(lane, index);
      const FmhaSeers seers = FmhaGradient<Config>::seers(args, item, j);
      float y[ScoreAtom::run];
      dp.get(y, strip, index);
      TW_UNROLL
      for (int e = 0; e < ScoreAtom::run; e++) {
        const int c = column + e;
        const float lse = float_of(load_shared<1>(shared + lines_at + c * 4).w[0]);
        const float delta = float_of(load_shared<1>(shared + lines_at + (m0 + c) * 4).w[0]);
        bool drops = false;
        if constexpr (Config::dropout) drops = Drops::dropped(args, shared + random_at, c, j, j0);
        gradient.run(x[e], y[e], i0 + c, j, seers.have(i0 + c), drops, lse, delta, part() == 0 ? slice : -1);
      }
      if (part() != 0) return;  // the waves of a group have the same scores
      const int byte = column * size_of<X>;
      const uint32_t at = shared + TileT::offset(r, byte / 16) + byte % 16;
      store_shared(at + p_at, pack<X, ScoreAtom::run>(x).data);
      store_shared(at + ds_at, pack<X, ScoreAtom::run>(y).data);
      TW_UNROLL
      for (int e = 0; e < ScoreAtom::run; e++) {
        const uint32_t to = shared + s_at + TileS::offset(column + e, r * size_of<X> / 16) + r * size_of<X> % 16;
        if constexpr (size_of<X> == 4) store_shared(to, Words<1>{bits_of(y[e])});
        else store_shared_short(to, from_float<X>(y[e]));
      }
    });
  }
};

template <class Config, bool kMma>
struct FmhaBackwardOf {
  using type = FmhaBackwardAtoms<Config>;
};
#if !defined(__HIP__)
template <class Config>
struct FmhaBackwardOf<Config, true> {
  using type = FmhaBackwardMma<Config>;
};
#endif
template <class Config>
using FmhaBackward = typename FmhaBackwardOf<Config, FmhaQueryPlace<Config>::mixes>::type;

}  // namespace tw::gpu

#define TW_FMHA_BACKWARD_KERNEL(NAME, ...)                                                                     \
  TW_KERNEL(tw::gpu::FmhaBackward<__VA_ARGS__>::threads, tw::gpu::FmhaBackward<__VA_ARGS__>::min_blocks, NAME, \
            tw_fmha_args, tw::gpu::FmhaBackward<__VA_ARGS__>::run(params);)
