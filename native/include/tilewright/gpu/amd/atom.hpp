// The matrix atom of AMD GPUs: MFMA and WMMA. C's tile is computed as the transpose: B is an instruction's first
// operand, A its second, so that a lane holds neighbouring columns of one row of C (see gpu/amd/fragments.hpp).
//
// A lane reads `lane_bytes` (16 where the tile is deep enough) of neighbouring k at a time and gives them to
// consecutive instructions. The instructions' k is then not the tile's k, in the same way for A and B.
#pragma once
#include "tilewright/core/meta.hpp"
#include "tilewright/core/options.hpp"
#include "tilewright/gpu/amd/convert.hpp"
#include "tilewright/gpu/amd/instructions.hpp"
#include "tilewright/gpu/blocks/layout.hpp"

namespace tw::gpu {

// One operand's side. kLines: rows of A (columns of B) of one instruction; kLaneBytes: what a lane reads of each.
template <class Tile, int kLines, int kGroups, int kLaneBytes>
struct MatrixSide {
  using Element = typename Tile::Element;
  static constexpr int parts = ceil_div(kLaneBytes, 16), part_bytes = kLaneBytes / parts;
  // Vectors that are never taken apart: else the compiler takes the reads apart, too.
  using Part = Vector<uint32_t, part_bytes / 4>;
  struct Fragment {
    Part part[parts];
  };

  // Step kk of line `line` (of the lane), `beyond` lines further on in the part that begins at line `first`.
  TW_DEVICE static Fragment load(uint32_t tile, int first, int line, int beyond, int group, int kk) {
    Fragment x;
    TW_UNROLL
    for (int p = 0; p < parts; p++) {
      // Groups of lanes read neighbouring places.
      const int own = group * part_bytes, step = (kk * parts + p) * kGroups * part_bytes;
      x.part[p] = load_shared_vector<part_bytes / 4>(address(tile, first, line, beyond, own, step));
      if constexpr (kIsFnuz<Element> && Tile::raw) mend_bytes<Element, part_bytes / 4>(x.part[p]);
    }
    return x;
  }

 private:
  // own, step: bytes along k, of which the compiler knows the second. Both together never carry into one another.
  TW_DEVICE static uint32_t address(uint32_t tile, int first, int line, int beyond, int own, int step) {
    constexpr int kTogether = kGroups * part_bytes;  // bytes that the groups read
    const int within = kTogether >= 16 ? own % 16 : step % 16;
    if constexpr (kLines % 16 == 0 && kTogether >= 16)
      return tile + Tile::template place<kTogether / 16>(first, line, beyond, own / 16, step / 16) + within;
    return tile + Tile::offset(first + beyond + line, (own + step) / 16) + within;
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
  static_assert(kTileK <= TileA::depth && TileA::depth % kTileK == 0,
                "the tile is a multiple of the warp tile's depth");

  static constexpr int depth_of(int lane_bytes) { return layout().groups * lane_bytes / size_of<A>; }
  static constexpr bool fits(int lane_bytes) {
    return lane_bytes >= instruction_bytes && TileA::depth % depth_of(lane_bytes) == 0;
  }
  static constexpr int lane_bytes = fits(16) ? 16 : fits(8) ? 8 : fits(4) ? 4 : instruction_bytes;
  static constexpr int depth = depth_of(lane_bytes);
  static constexpr int rows = kM / kTileM, columns = kN / kTileN, products = lane_bytes / instruction_bytes;
  using SideA = MatrixSide<TileA, kTileM, layout().groups, lane_bytes>;
  using SideB = MatrixSide<TileB, kTileN, layout().groups, lane_bytes>;

  using Accumulator = Choose<is_float, float, int32_t>;
  static constexpr int results = layout().results();
  Vector<Accumulator, results> acc[rows][columns];
  struct Fragments {
    typename SideA::Fragment a[rows];
    typename SideB::Fragment b[columns];
  };

  TW_DEVICE void clear() {
    TW_UNROLL
    for (int i = 0; i < rows; i++)
      TW_UNROLL
      for (int j = 0; j < columns; j++) acc[i][j] = Accumulator(0);
  }

  // Step kk of the tile in shared memory, for the wave's part that begins at row m0 and column n0.
  TW_DEVICE static void load(Fragments& f, uint32_t tile_a, uint32_t tile_b, int m0, int n0, int lane, int kk) {
    load_a(f, tile_a, m0, lane, kk);
    const int group = layout().group(lane), line = layout().line_of(layout().row(lane));
    TW_UNROLL
    for (int j = 0; j < columns; j++) f.b[j] = SideB::load(tile_b, n0, line, j * kTileN, group, kk);
  }
  TW_DEVICE static void load_a(Fragments& f, uint32_t tile_a, int m0, int lane, int kk) {
    const int group = layout().group(lane), line = layout().column(lane);
    TW_UNROLL
    for (int i = 0; i < rows; i++) f.a[i] = SideA::load(tile_a, m0, line, i * kTileM, group, kk);
  }

  TW_DEVICE void multiply(const Fragments& f) {
    TW_UNROLL
    for (int p = 0; p < products; p++)
      TW_UNROLL
      for (int i = 0; i < rows; i++) multiply_row(f, p, i);
  }
  // Product p of row i of instructions.
  TW_DEVICE void multiply_row(const Fragments& f, int p, int i) {
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

  // As in MmaAtom.
  static constexpr int slots = rows, row_bits = kWave - kTileM;
  static constexpr int row_at(int lane, int slot) { return slot * strip_rows + run_row(lane, 0); }
  static constexpr bool repeats = true;
  TW_DEVICE void set(const Accumulator (&x)[run], int strip, int index) {
    TW_UNROLL
    for (int e = 0; e < run; e++)
      acc[strip][index / runs_per_tile][index % runs_per_tile * run + e] = x[e];
  }

 private:
  // The operand of instruction p within a fragment.
  template <class E, class Fragment>
  TW_DEVICE static auto part(const Fragment& x, int p) {
    constexpr int kWords = instruction_bytes / 4, kPart = sizeof(x.part[0]) / 4;
    if constexpr (kWords > kPart) {
      return __builtin_shufflevector(x.part[0], x.part[1], 0, 1, 2, 3, 4, 5, 6, 7);
    } else {
      const auto y = x.part[0];
      if constexpr (widening == 2) return widen_bytes<E>(y[p]);
      else if constexpr (kWords == kPart) return y;
      else if constexpr (kWords == 1) return Vector<uint32_t, 1>(y[p]);
      else return p == 0 ? __builtin_shufflevector(y, y, 0, 1) : __builtin_shufflevector(y, y, 2, 3);
    }
  }
};

}  // namespace tw::gpu
