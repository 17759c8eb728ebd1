// How the gradients of attention are cut for the caches, and their five products on register tiles.
//
// A block is n0 keys of one head. While it stays, the rows of all queries that see it go by, m0 at a time:
//     S = Q K^T      dP = dO V^T      P, dS from both (in their place)
//     dV += P^T dO   dK += dS^T Q     dQ += dS K
// K and V are packed once for a block. A product that wants P or dS turned reads it with the other stride: a step of the
// register tile then goes from row to row, and its rows are neighbours.
#pragma once
#include "tilewright/core/meta.hpp"
#include "tilewright/cpu/fmha/softmax.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct GradBlocking {
  static constexpr bool pairs = Config::warp_k0 == 2;
  using Dot = Choose<pairs, DotBf16, DotF32>;
  static constexpr int depth = Dot::depth, mr = Config::warp_m0, nr = Config::warp_n0;
  static constexpr int m0 = (Config::m0 + mr * depth - 1) / (mr * depth) * (mr * depth), n0 = Config::n0;
  static constexpr int hdim_q = (Config::hdim_q + kLanes - 1) / kLanes * kLanes;
  static constexpr int hdim_v = (Config::hdim_v + kLanes - 1) / kLanes * kLanes;
  static constexpr int q_words = (Config::hdim_q + depth - 1) / depth, v_words = (Config::hdim_v + depth - 1) / depth;
  static constexpr int wide = Config::hdim_q > Config::hdim_v ? Config::hdim_q : Config::hdim_v;
  static constexpr int element = size_of<typename Config::Q> > size_of<typename Config::K> ? size_of<typename Config::Q>
                                                                                          : size_of<typename Config::K>;
  static constexpr int random_line = (n0 + 63) / 64 * 64 + 64;
  static_assert(nr % kLanes == 0 && n0 % nr == 0 && n0 % (depth * kLanes) == 0, "blocks are whole register tiles");

  // Scratch of one member, in bytes from its beginning. Of P and dS as pairs, word j of row 2t is (2t, j), (2t + 1, j);
  // ds has the other pairs, (t, 2j) and (t, 2j + 1).
  struct Layout {
    int64_t k_along, v_along, k_across, q_rows, do_rows, q_across, do_across, s, dp, ds, dk, dv, edge, lines, random,
        gathered, bytes;
  };
  static constexpr Layout layout() {
    constexpr int64_t scores = round_up((int64_t)m0 * n0 * 4, 64) + 256;  // register tiles read beyond the last column
    Layout at = {};
    at.v_along = at.k_along + round_up((int64_t)n0 * q_words * 4, 64);
    at.k_across = at.v_along + round_up((int64_t)n0 * v_words * 4, 64);
    at.q_rows = at.k_across + round_up((int64_t)n0 / depth * hdim_q * 4, 64);
    at.do_rows = at.q_rows + round_up((int64_t)m0 * q_words * 4, 64);
    at.q_across = at.do_rows + round_up((int64_t)m0 * v_words * 4, 64);
    at.do_across = at.q_across + round_up((int64_t)m0 / depth * hdim_q * 4, 64);
    at.s = at.do_across + round_up((int64_t)m0 / depth * hdim_v * 4, 64);
    at.dp = at.s + scores;
    at.ds = at.dp + scores;
    at.dk = at.ds + (pairs ? round_up((int64_t)m0 * n0 / 2 * 4, 64) : 0);
    at.dv = at.dk + round_up(round_up(n0, mr) * hdim_q * 4, 64);
    at.edge = at.dv + round_up(round_up(n0, mr) * hdim_v * 4, 64);
    at.lines = at.edge + round_up((int64_t)mr * hdim_q * 4, 64);
    at.random = at.lines + 2 * round_up(m0, 64) * 4;
    at.gathered = at.random + 2 * random_line;
    at.bytes = at.gathered + round_up((int64_t)(m0 > n0 ? m0 : n0) * wide * element, 64);
    return at;
  }
};

// One register tile: kMR rows of A (group s of row i at a + i*kARow + s*kAStep) times kNR columns of packed B, to out, or
// added to it.
template <class Dot, int kMR, int kNR, int kARow, int kAStep, int kOut, bool kAdd>
TW_NOINLINE void grad_tile(int64_t steps, const uint32_t* a, const uint32_t* b, float* out) {
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
    a += kAStep, b += kNR;
  }
  TW_UNROLL
  for (int i = 0; i < kMR; i++)
    TW_UNROLL
    for (int v = 0; v < kNV; v++) {
      float* const to = out + i * kOut + v * kLanes;
      if constexpr (kAdd) store_as(to, load_as<f32v>(to) + c[i][v]);
      else store_as(to, c[i][v]);
    }
}

// Rows of a tensor from `at` on; strides in elements.
struct GradRows {
  const char* at;
  int64_t row, col;
};

template <class Config>
struct GradProducts {
  using B = GradBlocking<Config>;
  using Dot = typename B::Dot;
  static constexpr int mr = B::mr, nr = B::nr;

  // out (rows x columns of kWidth, from row to row kWidth too) = or += A B; rows are rounded up to whole tiles.
  template <int kARow, int kAStep, int kWidth, bool kAdd>
  static TW_INLINE void product(int64_t rows, int64_t columns, int64_t steps, const uint32_t* a, const uint32_t* b,
                                float* out) {
    constexpr int kLast = kWidth % nr;
    int64_t j = 0;
    for (; j + nr <= kWidth && j < columns; j += nr, b += nr * steps)
      for (int64_t i = 0; i < rows; i += mr)
        grad_tile<Dot, mr, nr, kARow, kAStep, kWidth, kAdd>(steps, a + i * kARow, b, out + i * kWidth + j);
    if constexpr (kLast > 0)
      if (j < columns)
        for (int64_t i = 0; i < rows; i += mr)
          grad_tile<Dot, mr, kLast, kARow, kAStep, kWidth, kAdd>(steps, a + i * kARow, b, out + i * kWidth + j);
  }

  // The same where rows beyond the last are somebody else's: its tile goes by way of `edge`.
  template <int kARow, int kWidth>
  static TW_INLINE void add_rows(int64_t rows, int64_t columns, int64_t steps, const uint32_t* a, const uint32_t* b,
                                 float* out, float* edge) {
    const int64_t whole = rows / mr * mr;
    if (whole > 0) product<kARow, 1, kWidth, true>(whole, columns, steps, a, b, out);
    if (whole == rows) return;
    __builtin_memset(edge, 0, (size_t)mr * kWidth * 4);
    product<kARow, 1, kWidth, true>(rows - whole, columns, steps, a + whole * kARow, b, edge);
    out += whole * kWidth;
    for (int64_t i = 0; i < (rows - whole) * kWidth; i += kLanes)
      store_as(out + i, load_as<f32v>(out + i) + load_as<f32v>(edge + i));
  }

  // Columns next to each other: `from` itself, or a copy in `gathered`.
  template <class E>
  static TW_NOINLINE GradRows dense(GradRows from, int64_t count, int64_t hdim, char* gathered) {
    constexpr int size = size_of<E>;
    if (from.col == 1 || hdim <= 1) return {from.at, from.row, 1};
    char* to = gathered;
    for (int64_t r = 0; r < count; r++)
      for (int64_t c = 0; c < hdim; c++, to += size)
        __builtin_memcpy(to, from.at + (r * from.row + c * from.col) * size, size);
    return {gathered, hdim, 1};
  }

  // B of X Y^T: rows of Y become columns.
  template <class E>
  static TW_NOINLINE void along(GradRows from, int64_t count, int64_t hdim, uint32_t* to) {
    const int64_t words = ceil_div(hdim, Dot::depth);
    for (int64_t j = 0; j < count; j += nr, to += nr * words)
      pack_panels<E, Dot, nr, true, false>(Rows<E, true>{from.at + j * from.row * size_of<E>, from.row}, count - j, hdim,
                                           to, 0, nullptr);
  }

  // B of X Y: kWidth columns of Y in panels, the last of them narrower.
  template <class E, int kWidth>
  static TW_NOINLINE void across(GradRows from, int64_t count, int64_t hdim, uint32_t* to) {
    const int64_t words = ceil_div(count, Dot::depth);
    constexpr int kLast = kWidth % nr;
    int64_t c = 0;
    for (; c < hdim && c + nr <= kWidth; c += nr, to += nr * words)
      pack_panels<E, Dot, nr, false, false>(Rows<E, false>{from.at + c * size_of<E>, from.row}, hdim - c, count, to, 0,
                                            nullptr);
    if constexpr (kLast > 0)
      if (c < hdim)
        pack_panels<E, Dot, kLast, false, false>(Rows<E, false>{from.at + c * size_of<E>, from.row}, hdim - c, count, to,
                                                 0, nullptr);
  }

  // Rows of A as groups.
  template <class E, int kWords>
  static TW_NOINLINE void groups(GradRows from, int64_t count, int64_t hdim, uint32_t* to) {
    const int64_t words = ceil_div(hdim, Dot::depth);
    for (int64_t r = 0; r < count; r++, to += kWords)
      for (int64_t w = 0; w < words; w += kLanes) {
        const char* const at = from.at + (r * from.row + w * Dot::depth) * size_of<E>;
        const u32v x = load_groups_along_k<E, Dot>(at, hdim - w * Dot::depth);
        if (words - w >= kLanes) store_as(to + w, x);
        else __builtin_memcpy(to + w, &x, (size_t)(words - w) * 4);
      }
  }
};

// Pairs of bf16 from two vectors: word i is (low[i], high[i]).
template <int... kI>
TW_INLINE u16v mix_halves(u16v x, Sequence<kI...>) {
  return __builtin_shufflevector(x, x, (kI % 2 * kLanes + kI / 2)...);
}
TW_INLINE u32v bf16_words(f32v low, f32v high) {
#if defined(__AVX512BF16__)
  u16v both;
  store_bf16_pair(&both, low, high);
  return (u32v)mix_halves(both, MakeSequence<2 * kLanes>::type{});
#else
  uint16_t halves[2 * kLanes];
  store_bf16_pair(halves, low, high);
  return widen_u16(halves) | (widen_u16(halves + kLanes) << 16);
#endif
}

TW_NAMESPACE_END
