// How attention is cut for the caches, and its two products on register tiles.
//
// An item is some rows of one key head, at most FmhaBlocking::most_rows: the queries of all heads that share it, packed
// as row p = query p / group of head p % group, so that the columns that a few neighbours see stay near each other. The
// item's columns go by in blocks of n0, counted from column 0 (so that sums never depend on how rows were shared out):
// keys and values of a block are packed once, then the rows use them, m0 at a time:
//     S = Q K^T   (m0 x n0)     P = softmax so far (in the place of S)     O = O * rescale + P V   (m0 x hdim_v)
// Everything stays in the second-level cache; nothing grows with the lengths.
#pragma once
#include "tilewright/core/fmha_item.hpp"
#include "tilewright/core/meta.hpp"
#include "tilewright/cpu/blocks/pack.hpp"
#include "tilewright/cpu/team.hpp"

TW_NAMESPACE_BEGIN

// Products of these types can be made of pairs of bf16 (all 8-bit floats are exact in it), else they are of fp32.
template <class E>
constexpr bool fmha_pairs = is_same<E, bf16> || is_same<E, fp8> || is_same<E, bf8>;

template <class Config>
struct FmhaBlocking {
  static constexpr bool pairs = Config::warp_k0 == 2;
  static_assert(Config::warp_k0 == 1 || (pairs && fmha_pairs<typename Config::Q> && fmha_pairs<typename Config::K> &&
                                         fmha_pairs<typename Config::V>),
                "warp_k0: 1 for all types, 2 for bf16 and 8-bit floats");
  using Dot = Choose<pairs, DotBf16, DotF32>;
  static constexpr int depth = Dot::depth, mr = Config::warp_m0, nr = Config::warp_n0;
  static constexpr int m0 = (Config::m0 + mr - 1) / mr * mr, n0 = Config::n0;
  static constexpr int hdim_v = (Config::hdim_v + kLanes - 1) / kLanes * kLanes;
  static constexpr int q_words = (Config::hdim_q + depth - 1) / depth;  // groups of a row of Q
  static constexpr int s_words = n0;                                    // from row to row of S, and of P in its place
  static constexpr int last_nr = hdim_v % nr ? hdim_v % nr : nr;        // width of the last panel of V
  static constexpr int v_words = n0 / depth;                            // groups of a column of V
  static constexpr int most_rows = (384 + m0 - 1) / m0 * m0;            // of an item
  static_assert(nr % kLanes == 0 && n0 % nr == 0 && n0 % (depth * kLanes) == 0, "blocks are whole register tiles");

  // Rows of an item: so many that keys are packed seldom, but few enough that there are some items for every member.
  static int64_t item_rows(const tw_fmha_args& args, int64_t members) {
    const int64_t rows = args.seq_q * (args.heads_q / args.heads_k);
    const int64_t heads = max_of(args.batch * args.heads_k * max_of(args.splits, 1), 1);
    const int64_t wanted = ceil_div(rows * heads, 4 * members);
    const int64_t most = min_of(max_of(round_up(wanted, m0), m0), most_rows);
    return max_of(round_up(ceil_div(rows, max_of(ceil_div(rows, most), 1)), mr), mr);
  }

  // Scratch of one member, in bytes from its beginning. Every part is a multiple of 64.
  struct Layout {
    int64_t q, o, s, k, v, gathered, m, l, scale, rescale, k_scale, v_scale, random, absent, bytes;
  };
  static Layout layout(const tw_fmha_args& args) {
    const int64_t rows =
        min_of(round_up(max_of(args.seq_q * (args.heads_q / args.heads_k), 1), m0), (int64_t)most_rows);
    constexpr int64_t wide = max_of(Config::hdim_q, Config::hdim_v);
    constexpr int64_t size = max_of(size_of<typename Config::K>, size_of<typename Config::V>);
    constexpr int64_t lines = 4 * (int64_t)round_up(m0, 64);
    Layout at = {};
    at.o = at.q + round_up(rows * q_words * 4, 64);
    at.s = at.o + round_up(rows * hdim_v * 4, 64);
    at.k = at.s + round_up((int64_t)m0, kLanes) * s_words * 4;
    at.v = at.k + round_up((int64_t)n0 * q_words * 4, 64);
    at.gathered = at.v + round_up((int64_t)v_words * hdim_v * 4, 64);
    at.m = at.gathered + round_up(n0 * wide * size, 64);
    at.l = at.m + round_up(rows, 64) * 4;
    at.scale = at.l + round_up(rows, 64) * 4;
    at.rescale = at.scale + round_up(rows, 64) * 4;
    at.k_scale = at.rescale + lines;
    at.v_scale = at.k_scale + round_up((int64_t)n0, 64) * 4;
    at.random = at.v_scale + round_up((int64_t)n0, 64) * 4;
    at.absent = at.random + round_up((int64_t)n0, 64) + 64;
    at.bytes = at.absent + round_up((int64_t)n0, 64);
    return at;
  }
};

// One register tile: kMR rows of A (row i at a + i*kARow groups; its groups one after the other) times kNR columns of
// packed B, to out. kAdd: out * rescale[i] is added.
template <class Dot, int kMR, int kNR, int kARow, int kOut, bool kAdd>
TW_NOINLINE void fmha_tile(int64_t steps, const uint32_t* a, const uint32_t* b, float* out, const float* rescale) {
  constexpr int kNV = kNR / kLanes;
  f32v c[kMR][kNV];
  TW_UNROLL
  for (int i = 0; i < kMR; i++)
    TW_UNROLL
    for (int v = 0; v < kNV; v++) {
      c[i][v] = f32v{};
      if constexpr (kAdd) __builtin_prefetch(out + i * kOut + v * kLanes, 1, 3);
    }
  TW_UNROLL_BY_2
  for (int64_t s = 0; s < steps; s++) {
    u32v row[kNV];
    TW_UNROLL
    for (int v = 0; v < kNV; v++) row[v] = load_as<u32v>(b + v * kLanes);
    TW_UNROLL
    for (int i = 0; i < kMR; i++) {
      const u32v spread = splat_bits(load_as<uint32_t>(a + i * kARow));
      TW_UNROLL
      for (int v = 0; v < kNV; v++) c[i][v] = Dot::step(c[i][v], spread, row[v]);
    }
    a++, b += kNR;
  }
  TW_UNROLL
  for (int i = 0; i < kMR; i++)
    TW_UNROLL
    for (int v = 0; v < kNV; v++) {
      float* const to = out + i * kOut + v * kLanes;
      if constexpr (kAdd) store_as(to, load_as<f32v>(to) * rescale[i] + c[i][v]);
      else store_as(to, c[i][v]);
    }
}

template <class Config>
struct FmhaProducts {
  using B = FmhaBlocking<Config>;
  using Dot = typename B::Dot;
  static constexpr int mr = B::mr, few = mr >= 4 ? mr / 2 : mr;  // the last rows of a block: half a tile if they fit

  // Sums of fp32 are made of chains of so many terms at most: longer ones lose what the operands have of precision.
  static constexpr int64_t chain = 128;
  static constexpr bool chains = B::depth == 1 && Config::hdim_q > chain;

  // S = Q K^T for `rows` rows and `columns` columns; steps: groups along the head dimension.
  static TW_INLINE void scores(int64_t rows, int64_t columns, int64_t steps, const uint32_t* q, const uint32_t* k,
                               float* s) {
    for (int64_t j = 0; j < columns; j += B::nr, k += B::nr * steps) {
      score_panel<false>(rows, chains ? min_of(steps, chain) : steps, q, k, s + j);
      if constexpr (chains)
        if (steps > chain) score_panel<true>(rows, steps - chain, q + chain, k + chain * B::nr, s + j);
    }
  }

  template <bool kAdd>
  static TW_INLINE void score_panel(int64_t rows, int64_t steps, const uint32_t* q, const uint32_t* k, float* s) {
    float ones[mr];
    for (int i = 0; i < mr; i++) ones[i] = 1.0f;
    int64_t i = 0;
    for (; rows - i > few; i += mr)
      fmha_tile<Dot, mr, B::nr, B::q_words, B::s_words, kAdd>(steps, q + i * B::q_words, k, s + i * B::s_words, ones);
    if (i < rows)
      fmha_tile<Dot, few, B::nr, B::q_words, B::s_words, kAdd>(steps, q + i * B::q_words, k, s + i * B::s_words, ones);
  }

  // O = O * rescale + P V; steps: groups of columns, of `packed` that a panel has.
  static TW_INLINE void values(int64_t rows, int64_t steps, int64_t packed, int64_t hdim, const uint32_t* p,
                               const uint32_t* v, float* o, const float* rescale) {
    int64_t j = 0;
    for (; j + B::nr <= B::hdim_v && j < hdim; j += B::nr, v += B::nr * packed)
      panel<B::nr>(rows, steps, p, v, o + j, rescale);
    if constexpr (B::last_nr != B::nr)
      if (j < hdim) panel<B::last_nr>(rows, steps, p, v, o + j, rescale);
  }

  template <int kNR>
  static TW_INLINE void panel(int64_t rows, int64_t steps, const uint32_t* p, const uint32_t* v, float* o,
                              const float* rescale) {
    int64_t i = 0;
    for (; rows - i > few; i += mr)
      fmha_tile<Dot, mr, kNR, B::s_words, B::hdim_v, true>(steps, p + i * B::s_words, v, o + i * B::hdim_v, rescale + i);
    if (i < rows)
      fmha_tile<Dot, few, kNR, B::s_words, B::hdim_v, true>(steps, p + i * B::s_words, v, o + i * B::hdim_v, rescale + i);
  }
};

TW_NAMESPACE_END
