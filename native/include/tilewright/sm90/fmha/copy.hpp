// Tensors of four dimensions through the copy engine: elements of a head, rows, heads, batch items. Boxes are 64 elements
// (128 bytes, swizzled) of a number of rows.
#pragma once
#include "tilewright/sm90/blocks/tma.hpp"

namespace tw::sm90 {

struct FmhaPlace {
  int row, head, b;
};

TW_SM90 void load_rows(uint32_t to, const void* map, int column, FmhaPlace at, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(at.row), "r"(at.head), "r"(at.b)
      : "memory");
}

TW_SM90 void store_rows(const void* map, uint32_t from, int column, FmhaPlace at) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(from), "r"(column), "r"(at.row), "r"(at.head), "r"(at.b)
               : "memory");
}

// All panels of a tile whose rows have kElements elements, `panel_bytes` apart; counted by `barrier`.
template <int kElements>
TW_SM90 void load_panels(uint32_t to, const void* map, int panel_bytes, FmhaPlace at, uint32_t barrier) {
#pragma unroll
  for (int x = 0; x < kElements / 64; x++) load_rows(to + x * panel_bytes, map, x * 64, at, barrier);
}

}  // namespace tw::sm90
