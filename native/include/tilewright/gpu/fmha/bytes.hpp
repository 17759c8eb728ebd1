// Products of 8-bit caches for few rows (gpu/fmha/decode.hpp): keys and values lie in shared memory as they came, and
// become elements of 16 bits between the matrix load and the instruction, in registers, exactly. What a lane then has
// of them is not what mma.sync takes as 16 steps of k (or 8 columns): it has four neighbours. So queries change places
// instead, once (pair 2q of sixteen columns becomes pair q, pair 2q + 1 becomes 4 + q), and results of values: see
// paired_column.
//
// Queries of bf16 become fp16, which takes one instruction for two bytes of the cache, not four: scaled by a power of
// two, so that none overflows; what is lost is 2^-39 of the tile's largest.
#pragma once
#include "tilewright/gpu/fmha/loader.hpp"

namespace tw::gpu {

// The 16-bit type in which kernels for few rows multiply: kBytes, the cache has 8 bits; kFactors, probabilities
// are multiplied by a factor of their key, for which fp16 may be too narrow.
template <class X, bool kBytes, bool kFactors>
struct FmhaDecodeProduct {
  using type = X;
};
template <>
struct FmhaDecodeProduct<bf16, true, false> {
  using type = fp16;
};

#if defined(__HIP__)  // on AMD GPUs there are no such kernels, only their names
template <class Atom, class TileQ, class TileK>
TW_DEVICE void fmha_multiply_bytes(Atom& s, uint32_t q, uint32_t k, int lane);
template <class X, class TileV, class Scores, class Atom>
TW_DEVICE void fmha_add_bytes(Atom& o, const Scores& p, uint32_t v, int lane);
#else
// Sixteen rows of scores: queries times keys. Tiles of lines along k.
template <class Atom, class TileQ, class TileK>
TW_DEVICE void fmha_multiply_bytes(Atom& s, uint32_t q, uint32_t k, int lane) {
  using X = typename TileQ::Element;
  static_assert(Atom::rows == 1, "sixteen rows");
  constexpr int kSteps = TileK::depth / 16;  // a load has two of them
  constexpr bool kEven = kSteps % 2 == 0;
  const MatrixPlace place = matrix_place<TileQ, true>(lane);
  const int line = lane / 16 * 8 + lane % 8, chunk = lane / 8 % 2;
  TW_UNROLL_BY(2)
  for (int step = 0; step < kSteps; step += 2) {
    const bool both = kEven || step + 1 < kSteps;
    Words<4> a[2];
    TW_UNROLL
    for (int i = 0; i < 2; i++)
      a[i] = load_matrices<4, false>(q + TileQ::offset(place.line, (both ? step + i : step) * 2 + place.chunk));
    TW_UNROLL
    for (int n = 0; n < TileK::extent / 16; n++) {
      const Words<4> w = load_matrices<4, false>(k + TileK::offset(n * 16 + line, both ? step + chunk : step));
      TW_UNROLL
      for (int i = 0; i < 4; i++)
        if (i % 2 == 0 || both) mma_16x8<X, X>(s.acc[0][n * 2 + i / 2], a[i % 2], fmha_widen<X>(w.w[i]));
    }
  }
}

// Adds sixteen rows of probabilities times values. A line of the tile is a key.
template <class X, class TileV, class Scores, class Atom>
TW_DEVICE void fmha_add_bytes(Atom& o, const Scores& p, uint32_t v, int lane) {
  static_assert(TileV::k_major, "a line is a key");
  const int line = lane % 16, chunk = lane / 16;
  TW_UNROLL
  for (int kk = 0; kk < TileV::lines / 16; kk++) {
    Words<4> a;
    TW_UNROLL
    for (int w = 0; w < 4; w++) {
      const float low = p.acc[0][2 * kk + w / 2][w % 2 * 2], high = p.acc[0][2 * kk + w / 2][w % 2 * 2 + 1];
      a.w[w] = is_same<X, fp16> ? pack_halves(low, high) : pack_bfloats(low, high);
    }
    TW_UNROLL
    for (int c = 0; c < TileV::chunks; c += 2) {
      const Words<4> w = load_matrices<4, true>(v + TileV::offset(kk * 16 + line, min_of(c + chunk, TileV::chunks - 1)));
      TW_UNROLL
      for (int n = 0; n < min_of(TileV::chunks - c, 2); n++) {  // a load has two chunks of a key
        // From each: a key's two neighbours, then those of the key after it.
        const Words<2> near = fmha_widen<X>(w.w[2 * n]), far = fmha_widen<X>(w.w[2 * n + 1]);
        const Words<2> even = {permute_bytes(near.w[0], near.w[1], 0x5410), permute_bytes(far.w[0], far.w[1], 0x5410)};
        const Words<2> odd = {permute_bytes(near.w[0], near.w[1], 0x7632), permute_bytes(far.w[0], far.w[1], 0x7632)};
        mma_16x8<X, X>(o.acc[0][2 * (c + n)], a, even);
        mma_16x8<X, X>(o.acc[0][2 * (c + n) + 1], a, odd);
      }
    }
  }
}
#endif

// Where the first of a run of two results belongs, after fmha_add_bytes; the other one is two columns further.
template <class Atom>
TW_DEVICE int fmha_paired_column(int lane, int index) {
  const int tile = index % Atom::runs_per_row;
  return tile / 2 * 16 + lane % 4 * 4 + tile % 2;
}

// The queries of a tile in shared memory, of type Q, as fmha_multiply_bytes takes them. Returns what scores are to be
// multiplied by. All threads call this; barriers are theirs.
template <class Q, class TileQ, int kThreads>
TW_DEVICE float fmha_prepare_queries(uint32_t tile, int thread, int lane) {
  constexpr bool kScales = !is_same<Q, typename TileQ::Element> && is_same<Q, bf16>;
  constexpr int kChunks = TileQ::lines * TileQ::chunks;
  uint32_t exponent = 0;  // of the largest one that is finite
  if constexpr (kScales) {
    TW_NO_UNROLL
    for (int i = lane; i < kChunks; i += kWave) {
      const Words<4> x = load_shared<4>(tile + i * 16);
      TW_UNROLL
      for (int w = 0; w < 8; w++) {
        const uint32_t own = x.w[w / 2] >> (w % 2 * 16 + 7) & 255u;
        exponent = own != 255 && own > exponent ? own : exponent;
      }
    }
    TW_UNROLL
    for (int mask = kWave / 2; mask > 0; mask /= 2) {
      const uint32_t other = (uint32_t)shuffle((int)exponent, lane ^ mask);
      exponent = max_of(exponent, other);
    }
    barrier();  // all waves have seen all of them
  }
  // The largest becomes 2^14 to 2^15. Both powers of two are normal numbers.
  const uint32_t down = max_of(exponent, 41u) + 113 - 127, up = 254 - down;
  TW_NO_UNROLL
  for (int i = thread; i < kChunks / 2; i += kThreads) {
    const int line = i / (TileQ::chunks / 2), chunk = i % (TileQ::chunks / 2) * 2;
    const uint32_t first = tile + TileQ::offset(line, chunk), second = tile + TileQ::offset(line, chunk + 1);
    const Words<4> x = load_shared<4>(first), y = load_shared<4>(second);
    uint32_t w[8] = {x.w[0], x.w[1], x.w[2], x.w[3], y.w[0], y.w[1], y.w[2], y.w[3]};
    if constexpr (kScales) {
      TW_UNROLL
      for (int e = 0; e < 8; e++)
        w[e] = pack_halves(float_of(w[e] << 16) * float_of(up << 23), float_of(w[e] & 0xffff0000u) * float_of(up << 23));
    }
    store_shared(first, Words<4>{w[0], w[2], w[4], w[6]});
    store_shared(second, Words<4>{w[1], w[3], w[5], w[7]});
  }
  return kScales ? float_of(down << 23) : 1.0f;
}

}  // namespace tw::gpu
