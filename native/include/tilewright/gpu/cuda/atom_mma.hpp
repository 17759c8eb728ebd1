// The matrix atom of NVIDIA GPUs: mma.sync, 16 x 8 results of one wave, 32 bytes along k (16 elements of 16 bits, 32 of
// 8). Operand layouts, with g = lane / 4 and q = lane % 4, a register holding 4 bytes along k:
//   a[0]: row g,     bytes 4q..      b[0]: column g, bytes 4q..      c[0], c[1]: row g,     columns 2q, 2q+1
//   a[1]: row g + 8, bytes 4q..      b[1]: column g, bytes 16+4q..   c[2], c[3]: row g + 8, columns 2q, 2q+1
//   a[2]: row g,     bytes 16+4q..
//   a[3]: row g + 8, bytes 16+4q..
//
// 8-bit operands whose k runs across lines: a transposing matrix load takes pairs of bytes, so a register holds two
// neighbouring rows (columns) of two neighbouring k; a byte permutation of two such registers gives one register for
// each of the two. Row g of the atom is then the tile's row 2g, and row g + 8 is 2g + 1 (columns: column g of an even
// atom is 2g, of the odd atom after it 2g + 1): the results know where they belong.
#pragma once
#include "tilewright/core/meta.hpp"
#include "tilewright/core/options.hpp"
#include "tilewright/gpu/blocks/layout.hpp"
#if defined(TW_PLATFORM_HOST)
#include "tilewright/gpu/host/instructions.hpp"
#else
#include "tilewright/gpu/cuda/instructions.hpp"
#endif

namespace tw::gpu {

constexpr uint32_t kEvenBytes = 0x6420, kOddBytes = 0x7531;

// The line (relative) and chunk that a lane addresses in a matrix load of four 8 x 8 matrices. A and B differ in which
// of them holds the upper half of k and which the next eight rows or columns.
struct MatrixPlace {
  int line, chunk;
};
template <class Tile, bool kIsA>
constexpr MatrixPlace matrix_place(int lane) {
  const int r = lane % 8, low = lane / 8 % 2, high = lane / 16;  // row, matrix
  const int next_rows = kIsA ? low : high, upper_k = kIsA ? high : low;
  if constexpr (Tile::k_major) return {r + next_rows * 8, upper_k};
  else if constexpr (Tile::byte_lines) return {high * 16 + r / 2 * 4 + low * 2 + r % 2, 0};
  else return {r + upper_k * 8, next_rows};
}

// kM, kN: the wave's part of the tile. TileA, TileB: layouts in shared memory.
template <class TileA, class TileB, int kM, int kN>
struct MmaAtom {
  using A = typename TileA::Element;
  using B = typename TileB::Element;
  static constexpr bool is_float = A::is_float;
  using Accumulator = Choose<is_float, float, int32_t>;
  static constexpr int depth = 32 / TileA::element_bytes;  // elements along k
  static constexpr int rows = kM / 16, columns = kN / 8, pairs = columns / 2;
  static constexpr bool swaps_rows = TileA::byte_lines, swaps_columns = TileB::byte_lines;
  static_assert(TileA::element_bytes == TileB::element_bytes, "A and B are of one size");
  static_assert(kM % 16 == 0 && kN % 8 == 0 && TileA::depth % depth == 0,
                "a wave's part is a multiple of 16 x 8 x 32 B");
  static_assert(!swaps_columns || columns % 2 == 0,
                "8-bit B with n contiguous: a wave's part of n is a multiple of 16");

  Accumulator acc[rows][columns][4];
  struct Fragments {
    Words<4> a[rows];
    Words<2> b[columns];
  };

  TW_DEVICE void clear() {
    TW_UNROLL
    for (int i = 0; i < rows; i++)
      TW_UNROLL
      for (int j = 0; j < columns; j++)
        TW_UNROLL
        for (int l = 0; l < 4; l++) acc[i][j][l] = 0;
  }

  // Step kk of the tile in shared memory, for the wave's part that begins at row m0 and column n0.
  TW_DEVICE static void load(Fragments& f, uint32_t tile_a, uint32_t tile_b, int m0, int n0, int lane, int kk) {
    const MatrixPlace pa = matrix_place<TileA, true>(lane);
    TW_UNROLL
    for (int i = 0; i < rows; i++)
      f.a[i] = load_a(address<TileA>(tile_a, pa, m0, i, kk));
    load_b(f, tile_b, n0, lane, kk);
  }
  TW_DEVICE static void load_b(Fragments& f, uint32_t tile_b, int n0, int lane, int kk) {
    const MatrixPlace pb = matrix_place<TileB, false>(lane);
    TW_UNROLL
    for (int p = 0; p < pairs; p++) {
      const Words<4> w = load_matrices<4, !TileB::k_major>(address<TileB>(tile_b, pb, n0, p, kk));
      if constexpr (swaps_columns) {
        f.b[2 * p] = {permute_bytes(w.w[0], w.w[1], kEvenBytes), permute_bytes(w.w[2], w.w[3], kEvenBytes)};
        f.b[2 * p + 1] = {permute_bytes(w.w[0], w.w[1], kOddBytes), permute_bytes(w.w[2], w.w[3], kOddBytes)};
      } else {
        f.b[2 * p] = {w.w[0], w.w[1]};
        f.b[2 * p + 1] = {w.w[2], w.w[3]};
      }
    }
    if constexpr (columns % 2 != 0)  // the last eight columns; lanes 16 and on address nothing
      f.b[columns - 1] = load_matrices<2, !TileB::k_major>(
          address<TileB>(tile_b, matrix_place<TileB, false>(lane % 16), n0, pairs, kk));
  }

  TW_DEVICE void multiply(const Fragments& f) {
    TW_UNROLL
    for (int i = 0; i < rows; i++)
      TW_UNROLL
      for (int j = 0; j < columns; j++) mma_16x8<A, B>(acc[i][j], f.a[i], f.b[j]);
  }

  // ---- where the results belong: runs of neighbouring columns of one row, strip by strip ----

  static constexpr int run = swaps_columns ? 4 : 2;
  static constexpr int strips = rows, strip_rows = 16, strip_runs = 2 * columns * 2 / run;
  static constexpr int runs_per_row = columns * 2 / run;

  static constexpr int run_row(int lane, int index) {  // within the strip
    const int g = lane / 4, half = index / runs_per_row;
    return swaps_rows ? 2 * g + half : g + 8 * half;
  }
  static constexpr int run_column(int lane, int index) {  // within the wave's part
    return index % runs_per_row * (swaps_columns ? 16 : 8) + lane % 4 * run;
  }
  TW_DEVICE void get(Accumulator (&x)[run], int strip, int index) const {
    const int half = index / runs_per_row, at = index % runs_per_row;
    TW_UNROLL
    for (int e = 0; e < run; e++)
      x[e] = swaps_columns ? acc[strip][2 * at + (e & 1)][half * 2 + (e >> 1)] : acc[strip][at][half * 2 + e];
  }

  // The accumulators as a flat list, for partial sums.
  static constexpr int count = rows * columns * 4;
  TW_DEVICE Accumulator& at(int i) { return acc[i / (columns * 4)][i / 4 % columns][i % 4]; }

  // The rows that a lane has results of; lanes whose numbers differ in these bits have the same ones.
  static constexpr int slots = rows * 2, row_bits = 3;
  static constexpr int row_at(int lane, int slot) { return slot / 2 * strip_rows + run_row(lane, slot % 2 * runs_per_row); }
  static constexpr bool repeats = true;  // runs of a lane begin at one column modulo 8
  TW_DEVICE void set(const Accumulator (&x)[run], int strip, int index) {
    static_assert(!swaps_columns, "of elements of 16 bits");
    TW_UNROLL
    for (int e = 0; e < run; e++) acc[strip][index % runs_per_row][index / runs_per_row * 2 + e] = x[e];
  }

 private:
  // Step kk of the i-th 16 rows or columns from `first` on. Keys repeat after as many lines: what i or kk moves by
  // whole lines is a constant that the instruction adds.
  template <class Tile>
  TW_DEVICE static uint32_t address(uint32_t tile, MatrixPlace at, int first, int i, int kk) {
    if constexpr (Tile::k_major)
      return tile + Tile::offset(first + at.line, kk * 2 + at.chunk, at.line) + i * 16 * Tile::line_bytes;
    constexpr int kBytes = Tile::element_bytes;
    return tile + Tile::offset(at.line, first * kBytes / 16 + i * kBytes + at.chunk, at.line) +
           kk * depth * Tile::line_bytes;
  }

  TW_DEVICE static Words<4> load_a(uint32_t from) {
    const Words<4> w = load_matrices<4, !TileA::k_major>(from);
    if constexpr (swaps_rows)
      return {permute_bytes(w.w[0], w.w[1], kEvenBytes), permute_bytes(w.w[0], w.w[1], kOddBytes),
              permute_bytes(w.w[2], w.w[3], kEvenBytes), permute_bytes(w.w[2], w.w[3], kOddBytes)};
    else return w;
  }
};

}  // namespace tw::gpu
