// The matrix atom of AMD GPUs: MFMA and WMMA. C's tile is computed as the transpose: B is an instruction's first operand,
// A its second, so that a lane holds neighbouring columns of one row of C (see fragments_amd.hpp).
//
// A lane reads `lane_bytes` (16 where the tile is deep enough) of neighbouring k at a time and gives them to consecutive
// instructions. The instructions' k is then not the tile's k, in the same way for A and B.
#pragma once
#include "tilewright/core/options.hpp"
#include "tilewright/gpu/convert_amd.hpp"
#include "tilewright/gpu/instructions_amd.hpp"
#include "tilewright/gpu/layout.hpp"

namespace tw::gpu {

// One operand's side. kLines: rows of A (columns of B) of one instruction; kLaneBytes: what a lane reads of each.
template <class Tile, int kLines, int kGroups, int kLaneBytes>
struct MatrixSide {
  using Element = typename Tile::Element;
  static constexpr int words = kLaneBytes / 4, size = Tile::element_bytes;

  // Step kk of line `line` (of the lane) of the part that begins at line `first`.
  TW_DEVICE static Words<words> load(uint32_t tile, int first, int line, int group, int kk) {
    Words<words> x;
    if constexpr (Tile::k_major) {
      const int byte = (kk * kGroups + group) * kLaneBytes;
      constexpr int kPart = min_of(words, 4);
      TW_UNROLL
      for (int w = 0; w < words; w += kPart) {
        const Words<kPart> part = load_shared<kPart>(address(tile, first, line, byte / 16 + w / 4) + byte % 16);
        TW_UNROLL
        for (int l = 0; l < kPart; l++) x.w[w + l] = part.w[l];
      }
    } else {
      gather(x, tile, first + line, (kk * kGroups + group) * (kLaneBytes / size));
    }
    if constexpr (kIsFnuz<Element>) {
      TW_UNROLL
      for (int w = 0; w < words; w++) x.w[w] = fnuz_bytes<Element>(x.w[w]);
    }
    return x;
  }

 private:
  // Keys repeat after 8 lines: what `first` and the number of the instruction move by is a constant.
  TW_DEVICE static uint32_t address(uint32_t tile, int first, int line, int chunk) {
    if constexpr (kLines % 8 == 0) return tile + Tile::offset(first + line, chunk, line);
    else return tile + Tile::offset(first + line, chunk);
  }
  // k across the lines: element by element.
  TW_DEVICE static void gather(Words<words>& x, uint32_t tile, int line, int k) {
    TW_UNROLL
    for (int w = 0; w < words; w++) {
      x.w[w] = 0;
      TW_UNROLL
      for (int e = 0; e < 4 / size; e++) {
        const int byte = line * size;
        const uint32_t from = tile + Tile::offset(k + w * (4 / size) + e, byte / 16) + byte % 16 / 4 * 4;
        const uint32_t bits = load_shared<1>(from).w[0] >> (byte % 4 * 8);
        x.w[w] |= (size == 4 ? bits : bits & ((1u << (size * 8 % 32)) - 1)) << (e * size * 8);
      }
    }
  }
};

// kTileM x kTileN x kTileK: results of one instruction and the depth that its steps divide. kM, kN: the wave's part.
template <class TileA, class TileB, int kM, int kN, int kTileM, int kTileN, int kTileK>
struct MatrixAtom {
  using A = typename TileA::Element;
  using B = typename TileB::Element;
  using X = typename MultipliedAs<B>::type;
  using Y = typename MultipliedAs<A>::type;
  static constexpr bool is_float = A::is_float;
  // A function: an object would be read from memory.
  static constexpr FragmentLayout layout() { return fragment_layout(kMatrixUnit, kTileN); }
  // Bytes of a lane that one instruction takes, and as they lie in the tile.
  static constexpr int taken = lane_bytes_of<Y, kTileM, kTileN>(kTileK);
  static_assert(taken > 0, "this GPU has no matrix instruction for these types and this warp tile");
  static constexpr int widening = size_of<Y> / size_of<A>, instruction_bytes = max_of(taken, 1) / widening;
  static_assert(size_of<A> == size_of<B> && size_of<X> == size_of<Y>, "A and B are of one size");
  static_assert(kM % kTileM == 0 && kN % kTileN == 0, "a wave's part is a multiple of the warp tile");
  static_assert(kTileK <= TileA::depth && TileA::depth % kTileK == 0, "the tile is a multiple of the warp tile's depth");

  static constexpr int depth_of(int lane_bytes) { return layout().groups * lane_bytes / size_of<A>; }
  static constexpr bool fits(int lane_bytes) {
    return lane_bytes >= instruction_bytes && TileA::depth % depth_of(lane_bytes) == 0;
  }
  static constexpr int lane_bytes = fits(16) ? 16 : fits(8) ? 8 : fits(4) ? 4 : instruction_bytes;
  static constexpr int depth = depth_of(lane_bytes);
  static constexpr int rows = kM / kTileM, columns = kN / kTileN, products = lane_bytes / instruction_bytes;
  using SideA = MatrixSide<TileA, kTileM, layout().groups, lane_bytes>;
  using SideB = MatrixSide<TileB, kTileN, layout().groups, lane_bytes>;

  template <bool kFloat, class = void>
  struct Sum {
    using type = float;
  };
  template <class Void>
  struct Sum<false, Void> {
    using type = int32_t;
  };
  using Accumulator = typename Sum<is_float>::type;
  static constexpr int results = layout().results();
  Vector<Accumulator, results> acc[rows][columns];
  struct Fragments {
    Words<SideA::words> a[rows];
    Words<SideB::words> b[columns];
  };

  TW_DEVICE void clear() {
    TW_UNROLL
    for (int i = 0; i < rows; i++)
      TW_UNROLL
      for (int j = 0; j < columns; j++) acc[i][j] = Accumulator(0);
  }

  // Step kk of the tile in shared memory, for the wave's part that begins at row m0 and column n0.
  TW_DEVICE static void load(Fragments& f, uint32_t tile_a, uint32_t tile_b, int m0, int n0, int lane, int kk) {
    const int group = layout().group(lane);
    TW_UNROLL
    for (int i = 0; i < rows; i++) f.a[i] = SideA::load(tile_a, m0 + i * kTileM, layout().column(lane), group, kk);
    TW_UNROLL
    for (int j = 0; j < columns; j++)
      f.b[j] = SideB::load(tile_b, n0 + j * kTileN, layout().line_of(layout().row(lane)), group, kk);
  }

  TW_DEVICE void multiply(const Fragments& f) {
    TW_UNROLL
    for (int p = 0; p < products; p++)
      TW_UNROLL
      for (int i = 0; i < rows; i++)
        TW_UNROLL
        for (int j = 0; j < columns; j++)
          multiply_matrix<X, Y, kTileN>(acc[i][j], part<B>(f.b[j], p), part<A>(f.a[i], p));
  }

  // ---- where the results belong: runs of neighbouring columns of one row, strip by strip (as in MmaAtom) ----

  static constexpr bool is_scaled = kOperandScale<A> * kOperandScale<B> != 1.0f;
  static constexpr int run = layout().result_run();
  static constexpr int strips = rows, strip_rows = kTileM;
  static constexpr int runs_per_tile = results / run, runs_per_row = columns * runs_per_tile, strip_runs = runs_per_row;

  static constexpr int run_row(int lane, int) { return layout().column(lane); }  // within the strip
  static constexpr int run_column(int lane, int index) {                       // within the wave's part
    return index / runs_per_tile * kTileN + layout().result_line(lane, index % runs_per_tile * run);
  }
  TW_DEVICE void get(Accumulator (&x)[run], int strip, int index) const {
    TW_UNROLL
    for (int e = 0; e < run; e++) {
      x[e] = acc[strip][index / runs_per_tile][index % runs_per_tile * run + e];
      if constexpr (is_scaled) x[e] *= kOperandScale<A> * kOperandScale<B>;
    }
  }

  // The accumulators as a flat list, for partial sums.
  static constexpr int count = rows * columns * results;
  struct Place {
    Vector<Accumulator, results>& vector;
    int i;
    TW_DEVICE operator Accumulator() const { return vector[i]; }
    TW_DEVICE void operator+=(Accumulator x) { vector[i] += x; }
  };
  TW_DEVICE Place at(int i) { return {acc[i / (columns * results)][i / results % columns], i % results}; }

 private:
  // What instruction p takes of a fragment.
  static constexpr int part_words = instruction_bytes / 4;
  template <class E, int kWords>
  TW_DEVICE static Words<taken / 4> part(const Words<kWords>& x, int p) {
    Words<taken / 4> y;
    TW_UNROLL
    for (int w = 0; w < part_words; w++) {
      const uint32_t word = x.w[p * part_words + w];
      if constexpr (widening == 2) {
        const Words<2> wide = widen_bytes<E>(word);
        y.w[2 * w] = wide.w[0], y.w[2 * w + 1] = wide.w[1];
      } else {
        y.w[w] = word;
      }
    }
    return y;
  }
};

}  // namespace tw::gpu
