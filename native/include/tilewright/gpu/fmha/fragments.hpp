// Products of mma.sync for attention, sixteen rows or columns at a time: operands from shared memory, or from the
// registers that an earlier product left its results in. Layouts: gpu/cuda/atom_mma.hpp.
#pragma once
#include "tilewright/gpu/blocks/convert.hpp"
#include "tilewright/gpu/cuda/atom_mma.hpp"

namespace tw::gpu {

// Results of kRows x 16 rows and kTiles x 8 columns.
template <int kRows, int kTiles>
struct FmhaSum {
  static_assert(kRows > 0 && kTiles > 0 && kTiles % 2 == 0, "columns come in sixteens");
  static constexpr int rows = kRows, tiles = kTiles;
  float x[kRows][kTiles][4];
  TW_DEVICE void clear() {
    TW_UNROLL
    for (int i = 0; i < kRows; i++)
      TW_UNROLL
      for (int t = 0; t < kTiles; t++)
        TW_UNROLL
        for (int e = 0; e < 4; e++) x[i][t][e] = 0.0f;
  }
};

// A lane's reads of a tile, sixteen lines by sixteen columns at a time, the first from line (k_major) or column
// `first` on. Chunks of a line are permuted in groups: a step within a group turns bits of the address, and every other
// is a constant that the instruction adds. kCount: sixteens of columns that follow each other across the lines.
template <class Tile, bool kIsA, int kCount>
struct FmhaOperand {
  static constexpr int group = Tile::group / 2 > 0 ? Tile::group / 2 : 1;  // sixteens
  // Sixteens that begin anywhere are in one group, or fill whole ones: no step carries.
  static constexpr bool turns = Tile::k_major || kCount % group == 0 || (kCount & (kCount - 1)) == 0;
  uint32_t at;
  int line, chunk;

  TW_DEVICE FmhaOperand(uint32_t tile, int lane, int first) {
    const MatrixPlace place = matrix_place<Tile, kIsA>(lane);
    line = place.line, chunk = place.chunk + (Tile::k_major ? 0 : first / 8);
    at = tile + Tile::offset(Tile::k_major ? first + line : line, turns ? chunk : 0, line);
    if constexpr (!turns) at = tile;
    again();
  }
  // Addresses of steps are made again, which takes less time than so many registers.
  TW_DEVICE void again() { at = (uint32_t)compute_again((int)at); }
  // Step kk along k of sixteen i.
  TW_DEVICE Words<4> load(int i, int kk) const {
    const int along = Tile::k_major ? kk : i, lines = (Tile::k_major ? i : kk) * 16;
    if constexpr (!turns) return load_matrices<4, !Tile::k_major>(at + Tile::offset(line + lines, chunk + 2 * i, line));
    return load_matrices<4, !Tile::k_major>((at ^ (uint32_t)(along % group * 32)) + along / group * group * 32 +
                                            lines * Tile::line_bytes);
  }
};

template <class X, int kRows, int kTiles>
TW_DEVICE void fmha_step(FmhaSum<kRows, kTiles>& sum, const Words<4> (&a)[kRows], const Words<4>& b, int pair) {
  TW_UNROLL
  for (int i = 0; i < kRows; i++) {
    mma_16x8<X, X>(sum.x[i][pair * 2], a[i], Words<2>{b.w[0], b.w[1]});
    mma_16x8<X, X>(sum.x[i][pair * 2 + 1], a[i], Words<2>{b.w[2], b.w[3]});
  }
}

// Steps of a loop's turn, `most` or 2 where that divides them. More would be read ahead than there are registers for.
constexpr int fmha_turn(int steps, int most) {
  return steps % most == 0 ? most : steps % 2 == 0 ? 2 : steps <= 6 ? steps : 1;
}

// Both operands from shared memory: rows from m on, columns from n on.
template <class A, class B, int kMost, int kRows, int kTiles>
TW_DEVICE void fmha_add_product(FmhaSum<kRows, kTiles>& sum, uint32_t tile_a, uint32_t tile_b, int m, int n, int lane) {
  constexpr int kSteps = A::depth / 16, kTurn = fmha_turn(kSteps, kMost), kPairs = kTiles / 2;
  FmhaOperand<A, true, kRows> a(tile_a, lane, m);
  FmhaOperand<B, false, kPairs> b(tile_b, lane, n);
  TW_NO_UNROLL
  for (int first = 0; first < kSteps; first += kTurn) {
    if (kTurn < kSteps) a.again(), b.again();
    TW_UNROLL
    for (int step = 0; step < kTurn; step++) {
      Words<4> x[kRows];
      TW_UNROLL
      for (int i = 0; i < kRows; i++) x[i] = a.load(i, first + step);
      TW_UNROLL
      for (int p = 0; p < kPairs; p++) fmha_step<typename A::Element>(sum, x, b.load(p, first + step), p);
    }
  }
}

// The first operand is what kSteps x 16 columns of results became; step0: where they begin along k.
template <class B, int kRows, int kSteps, int kTiles>
TW_DEVICE void fmha_add_held(FmhaSum<kRows, kTiles>& sum, const Words<4> (&a)[kSteps][kRows], uint32_t tile, int n,
                             int step0, int lane) {
  const FmhaOperand<B, false, kTiles / 2> b(tile + step0 * 16 * B::line_bytes, lane, n);
  TW_UNROLL
  for (int kk = 0; kk < kSteps; kk++)
    TW_UNROLL
    for (int p = 0; p < kTiles / 2; p++) fmha_step<typename B::Element>(sum, a[kk], b.load(p, kk), p);
}

template <class X>
TW_DEVICE uint32_t fmha_pack(float low, float high) {
  return is_same<X, fp16> ? pack_halves(low, high) : pack_bfloats(low, high);
}

}  // namespace tw::gpu
