// Operands of fewer than 8 bits as matrix instructions of gfx950 take them: a lane gives 32 neighbouring values of a
// line, which are one block, and its exponent. Tiles in LDS, and all that carries them, count bytes.
//
// Source: "AMD Instinct CDNA4 Instruction Set Architecture", V_MFMA_SCALE_F32_16X16X128_F8F6F4 and 32X32X64, whose
// operands take 4 registers of 4-bit and 6 of 6-bit values.
#pragma once
#include "tilewright/core/narrow.hpp"
#include "tilewright/gpu/amd/mainloop.hpp"
#include "tilewright/gpu/gemm/exponents.hpp"

namespace tw::gpu {

// A kernel's loop over bytes.
template <class C, class FormA, class FormB>
struct NarrowBytes : Narrow<C, FormA, FormB> {
  using A = fp8;
  using B = fp8;
  static constexpr int tile_k = C::tile_k * width_of<FormA> / 8, warp_tile_k = C::warp_tile_k * width_of<FormA> / 8;
};

// One operand's side: a lane's 32 values of each line.
template <class Form, class Tile, int kGroups>
struct NarrowSide {
  static constexpr int lane_bytes = Form::bits * 4, parts = Form::bits == 4 ? 1 : 3, part_bytes = lane_bytes / parts;
  using Part = Vector<uint32_t, part_bytes / 4>;
  struct Fragment {
    Part part[parts];
  };

  TW_DEVICE static Fragment load(uint32_t tile, int first, int line, int beyond, int group, int kk) {
    Fragment x;
    TW_UNROLL
    for (int p = 0; p < parts; p++) {
      if constexpr (parts == 1) {
        x.part[p] = load_shared_vector<part_bytes / 4>(
            tile + Tile::template place<kGroups>(first, line, beyond, group, kk * kGroups));
      } else {
        const int byte = (kk * kGroups + group) * lane_bytes + p * part_bytes;
        x.part[p] = load_shared_vector<part_bytes / 4>(
            tile + Tile::template place<1>(first, line, beyond, byte / 16, 0) + byte % 16);
      }
    }
    return x;
  }
};

template <class FormA, class FormB, class Plain, class TileA, class TileB>
struct NarrowAtom : Plain {
  using A = FormA;
  using B = FormB;
  using Plain::rows, Plain::columns, Plain::layout;
  static constexpr int groups = layout().groups, products = 1;
  using SideA = NarrowSide<FormA, TileA, groups>;
  using SideB = NarrowSide<FormB, TileB, groups>;
  static constexpr int depth = groups * SideA::lane_bytes;  // bytes
  static_assert(TileA::depth % depth == 0, "the tile is whole instructions deep");
  struct Fragments {
    typename SideA::Fragment a[rows];
    typename SideB::Fragment b[columns];
  };

  TW_DEVICE static void load(Fragments& f, uint32_t tile_a, uint32_t tile_b, int m0, int n0, int lane, int kk) {
    const int group = layout().group(lane);
    TW_UNROLL
    for (int i = 0; i < rows; i++)
      f.a[i] = SideA::load(tile_a, m0, layout().column(lane), i * layout().columns, group, kk);
    TW_UNROLL
    for (int j = 0; j < columns; j++)
      f.b[j] = SideB::load(tile_b, n0, layout().line_of(layout().row(lane)), j * layout().rows, group, kk);
  }
};

template <class C, class FormA, class FormB, class TileA, class TileB, int kM, int kN>
struct AtomFor<NarrowBytes<C, FormA, FormB>, TileA, TileB, kM, kN, false> {
  // Place of the sums: that of an instruction whose depth divides any tile.
  using Plain = MatrixAtom<TileA, TileB, kM, kN, C::warp_tile_m, C::warp_tile_n, C::warp_tile_m == 32 ? 16 : 32>;
#if defined(__gfx950__)
  using type = ExponentAtom<NarrowAtom<FormA, FormB, Plain, TileA, TileB>>;
#else
  using type = Plain;
#endif
};

template <class C, class FormA, class FormB, class TileA, class TileB, int kM, int kN>
struct AtomFor<Narrow<C, FormA, FormB>, TileA, TileB, kM, kN, false>
    : AtomFor<Scaled1x32<C>, TileA, TileB, kM, kN, false> {};

// True if an instruction takes both operands as they lie in memory.
#if defined(__gfx950__)
template <class C, class FormA, class FormB>
constexpr bool kTakesNarrow = width_of<FormA> < 8 && width_of<FormA> == width_of<FormB> &&
                              C::warp_tile_k == (C::warp_tile_m == 32 ? 64 : 128);
#else
template <class C, class FormA, class FormB>
constexpr bool kTakesNarrow = false;
#endif

}  // namespace tw::gpu
