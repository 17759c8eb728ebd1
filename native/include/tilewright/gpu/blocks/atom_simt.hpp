// The fp32 atom of every GPU: fused multiply-adds, no matrix unit. The lanes of a wave stand 8 (rows) x kWave/8
// (columns); each computes kM/8 x kN/(kWave/8) results of the wave's part. Lanes i and i^1 stand in one row, i and i^2
// in one column: where such neighbours read the same, NVIDIA's shared memory serves a 16-byte read of a wave in two
// passes instead of four (measured: 15 to 20 % of the whole product). Which results are a lane's follows from how an
// operand lies in shared memory, so that every read is a vector without bank conflicts:
//   k contiguous (a line per row): every 8th row, some steps of k at a time
//   rows contiguous (a line per k): up to four neighbouring rows, then the next 8 * that
#pragma once
#include "tilewright/core/options.hpp"
#include "tilewright/gpu/blocks/layout.hpp"

namespace tw::gpu {

// One operand's side of the atom: kCount values of `kLanes` lanes each, kSteps steps of k at a time.
template <class Tile, int kLanes, int kCount, int kSteps>
struct SimtSide {
  // Neighbours that one read gives.
  static constexpr int vector = kCount % 4 == 0 ? 4 : kCount % 2 == 0 ? 2 : 1;
  static constexpr int run = Tile::k_major ? 1 : vector;

  static constexpr int place(int lane, int i) {
    if constexpr (Tile::k_major) return lane + i * kLanes;
    else return i / vector * (kLanes * vector) + lane * vector + i % vector;
  }

  // Steps kSteps * group and on; `first`: the wave's first row or column, a multiple of 8.
  TW_DEVICE static void load(float (&x)[kSteps][kCount], uint32_t tile, int first, int lane, int group) {
    if constexpr (Tile::k_major) {
      constexpr int kPerChunk = 4 / kSteps;
      TW_UNROLL
      for (int i = 0; i < kCount; i++) {
        // Lines of the same key share an address, up to a constant that the instruction adds.
        const int begin = i * kLanes % 8, beyond = i * kLanes - begin;
        const uint32_t from = tile + Tile::offset(first + lane + begin, group / kPerChunk, lane + begin);
        const Words<kSteps> w =
            load_shared<kSteps>(from + (beyond * Tile::line_bytes + group % kPerChunk * (kSteps * 4)));
        TW_UNROLL
        for (int l = 0; l < kSteps; l++) x[l][i] = float_of(w.w[l]);
      }
    } else {
      const uint32_t from = tile + (first + lane * vector) * 4;  // these tiles are not swizzled
      TW_UNROLL
      for (int l = 0; l < kSteps; l++)
        TW_UNROLL
        for (int i = 0; i < kCount; i += vector) {
          const Words<vector> w =
              load_shared<vector>(from + ((group * kSteps + l) * Tile::line_bytes + i * kLanes * 4));
          TW_UNROLL
          for (int e = 0; e < vector; e++) x[l][i + e] = float_of(w.w[e]);
        }
    }
  }
};

template <class TileA, class TileB, int kM, int kN>
struct SimtAtom {
  using Accumulator = float;
  static constexpr bool is_float = true;
  static constexpr int lanes_m = 8, lanes_n = kWave / 8;
  static constexpr int lane_row(int lane) { return lane / 2 % 8; }
  static constexpr int lane_column(int lane) { return lane % 2 + lane / 16 * 2; }
  static constexpr int rows = kM / lanes_m, columns = kN / lanes_n;
  // Steps of k at a time: as many as a read along k gives, unless that takes too many registers.
  static constexpr int depth = !TileA::k_major && !TileB::k_major ? 1 : rows + columns > 16 ? 2 : 4;
  using SideA = SimtSide<TileA, lanes_m, rows, depth>;
  using SideB = SimtSide<TileB, lanes_n, columns, depth>;
  static_assert(TileA::element_bytes == 4 && TileB::element_bytes == 4, "the SIMT atom multiplies fp32");
  static_assert(kM % 16 == 0 && kN % 8 == 0 && TileA::depth % 4 == 0, "a wave's part is a multiple of 16 x 8 x 4");

  float acc[rows][columns];
  // Where registers allow it, sums are put aside every 128 products: the error of a long sum grows with the root of its
  // length, and libraries cut K for problems that are as small as these tiles suit.
  static constexpr bool folds = rows * columns <= 32;
  static constexpr int fold_after = 128;
  float folded[folds ? rows : 1][folds ? columns : 1];
  struct Fragments {
    float a[depth][rows], b[depth][columns];
  };

  TW_DEVICE void clear() {
    TW_UNROLL
    for (int i = 0; i < rows; i++)
      TW_UNROLL
      for (int j = 0; j < columns; j++) {
        acc[i][j] = 0.0f;
        if constexpr (folds) folded[i][j] = 0.0f;
      }
  }
  TW_DEVICE void fold() {
    if constexpr (folds) {
      TW_UNROLL
      for (int i = 0; i < rows; i++)
        TW_UNROLL
        for (int j = 0; j < columns; j++) {
          folded[i][j] += acc[i][j];
          acc[i][j] = 0.0f;
        }
    }
  }
  // The whole sums, after the last product.
  TW_DEVICE void unfold() {
    if constexpr (folds) {
      TW_UNROLL
      for (int i = 0; i < rows; i++)
        TW_UNROLL
        for (int j = 0; j < columns; j++) acc[i][j] += folded[i][j];
    }
  }

  TW_DEVICE static void load(Fragments& f, uint32_t tile_a, uint32_t tile_b, int m0, int n0, int lane, int kk) {
    SideA::load(f.a, tile_a, m0, lane_row(lane), kk);
    SideB::load(f.b, tile_b, n0, lane_column(lane), kk);
  }

  TW_DEVICE void multiply(const Fragments& f) {
    TW_UNROLL
    for (int l = 0; l < depth; l++)
      TW_UNROLL
      for (int i = 0; i < rows; i++)
        TW_UNROLL
        for (int j = 0; j < columns; j++) acc[i][j] = fma(f.a[l][i], f.b[l][j], acc[i][j]);
  }

  // ---- where the results belong (as in MmaAtom) ----

  static constexpr int run = SideB::run;
  static constexpr int strips = rows / SideA::vector, strip_rows = lanes_m * SideA::vector;
  static constexpr int runs_per_row = columns / run, strip_runs = SideA::vector * runs_per_row;

  static constexpr int run_row(int lane, int index) { return SideA::place(lane_row(lane), index / runs_per_row); }
  static constexpr int run_column(int lane, int index) {
    return SideB::place(lane_column(lane), index % runs_per_row * run);
  }
  TW_DEVICE void get(float (&x)[run], int strip, int index) const {
    TW_UNROLL
    for (int e = 0; e < run; e++)
      x[e] = acc[strip * SideA::vector + index / runs_per_row][index % runs_per_row * run + e];
  }

  static constexpr int count = rows * columns;
  TW_DEVICE float& at(int i) { return acc[i / columns][i % columns]; }

  // As in MmaAtom.
  static constexpr int slots = rows, row_bits = 1 | (kWave - 16);
  static constexpr int row_at(int lane, int slot) {
    return slot / SideA::vector * strip_rows + run_row(lane, slot % SideA::vector * runs_per_row);
  }
  static constexpr bool repeats = run == 1 && lanes_n % 8 == 0;
  TW_DEVICE void set(const float (&x)[run], int strip, int index) {
    TW_UNROLL
    for (int e = 0; e < run; e++)
      acc[strip * SideA::vector + index / runs_per_row][index % runs_per_row * run + e] = x[e];
  }
};

}  // namespace tw::gpu
