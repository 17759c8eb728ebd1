// B as the pipeline preshufflev2 reads it: packed ahead of time, so that every lane gets its 16 bytes of a fragment
// from where the wave's other lanes get theirs, and B needs no LDS.
//
// Packed B is panels of `columns` columns of B, where `columns` is the warp tile's n. A panel is groups of 16 / size of
// element values of k (`values`), a group being `columns` times 16 bytes, column by column:
//     element (k, j) of B  ->  packed_index(k, j, columns, size, packed_stride(K, columns, size))
// K is filled up with zeros to a multiple of 128 bytes, N to whole panels (with anything). The operand's leading
// dimension is the number of elements from panel to panel, packed_stride; its address is a multiple of 16 bytes, as is
// the stride from item to item of a batch, and the panels that one tile reads span less than 2 GiB.
// A tile's depth in bytes is a multiple of what the lanes of a wave read of a line at a time, 16 * groups (see
// gpu/amd/fragments.hpp): 32 for a warp tile of 32 columns, 64 for 16 columns (of the deepest instructions of gfx950
// 128).
#pragma once
#include "tilewright/gpu/amd/layout.hpp"
#include "tilewright/gpu/amd/loader.hpp"

namespace tw::gpu {

constexpr int kPackedVector = 16, kPackedDepth = 128;  // bytes: along k of a group, and what K is filled up to

// Elements from panel to panel.
constexpr int64_t packed_stride(int64_t k, int columns, int size) {
  return (k * size + kPackedDepth - 1) / kPackedDepth * (kPackedDepth / size) * columns;
}
constexpr int64_t packed_index(int64_t k, int64_t j, int columns, int size, int64_t stride) {
  const int values = kPackedVector / size;
  return j / columns * stride + k / values * (columns * values) + j % columns * values + k % values;
}

// One operand of one output tile (compare Operand of gpu/blocks/loader.hpp).
template <class E, int kColumns, int kDepth>
struct PackedOperand {
  const char* base;  // of the tile's first panel, at the begin of the reduction
  uint32_t panel;    // bytes from panel to panel
  int panels;        // that exist
  uint32_t left;     // bytes of a panel from `base` on
  int steps;         // whole ones

  TW_DEVICE PackedOperand(const void* matrix, int64_t ld_elements, int first, int total, int k0, int length)
      : base(uniform((const char*)matrix + packed_index(k0, first, kColumns, size_of<E>, ld_elements) * size_of<E>)),
        panel(uniform((uint32_t)(ld_elements * size_of<E>))),
        panels(ceil_div(total - first, kColumns)),
        left(panel - (uint32_t)k0 * size_of<E> * kColumns),
        steps(length / kDepth) {}

  // The buffer that begins at a step; its end is the end of the last panel.
  TW_DEVICE __amdgpu_buffer_rsrc_t at(int step) const {
    constexpr int kAdvance = kDepth * size_of<E> * kColumns;
    const int records = (int)((uint32_t)(panels - 1) * panel + left) - step * kAdvance;
    return __builtin_amdgcn_make_buffer_rsrc((char*)base + (int64_t)step * kAdvance, 0, max_of(records, 0),
                                             kBufferFlags);
  }
};

// A wave's fragments of a slice of k. Atom: see gpu/amd/atom.hpp.
template <class Atom, int kColumns>
struct PackedFragments {
  using Side = typename Atom::SideB;
  static_assert(Side::part_bytes == kPackedVector, "the tile is deep enough for 16 bytes of k per lane");
  static constexpr int loads = Atom::columns * Side::parts;
  typename Side::Fragment b[Atom::columns];

  // panel: of the wave, within the tile.
  TW_DEVICE void fetch(__amdgpu_buffer_rsrc_t buffer, uint32_t panel_bytes, int panel, int lane, int kk) {
    constexpr int kGroups = Atom::layout().groups, kGroup = kColumns * kPackedVector;
    const uint32_t own = (uint32_t)(Atom::layout().group(lane) * kGroup + Atom::layout().row(lane) * kPackedVector);
    TW_UNROLL
    for (int j = 0; j < Atom::columns; j++)
      TW_UNROLL
      for (int p = 0; p < Side::parts; p++)
        b[j].part[p] = bits_as<typename Side::Part>(
            load_buffer<kPackedVector>(buffer, (uint32_t)(panel + j) * panel_bytes + own +
                                                   (uint32_t)((kk * Side::parts + p) * (kGroups * kGroup))));
  }
  // As the matrix unit reads them.
  TW_DEVICE typename Side::Fragment get(int j) const {
    typename Side::Fragment x = b[j];
    if constexpr (kIsFnuz<typename Side::Element>) {
      TW_UNROLL
      for (int p = 0; p < Side::parts; p++) mend_bytes<typename Side::Element, Side::part_bytes / 4>(x.part[p]);
    }
    return x;
  }
};

}  // namespace tw::gpu
