// Small problems: one member computes a rectangle alone; operands whose layout the microkernel can read are not packed
// at all.
#pragma once
#include "tilewright/cpu/blocks/blocked.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct InPlaceGemm {
  using Plan = Blocking<Config>;
  using Dot = typename Plan::Dot;
  using Out = typename Plan::Out;
  using Accumulator = typename Dot::scalar;
  static constexpr int mr = Plan::mr, nr = Plan::nr, depth = Dot::depth;
  // A value of A is broadcast group by group: its memory must look like groups along k.
  static constexpr bool a_in_place = !Config::a_col && size_of<typename Config::A> * depth == 4 && !Dot::offset_a;
  static constexpr bool b_in_place = !Config::b_col && size_of<typename Config::B> == 4;

  const Product& product;
  char* scratch;

  void run(Range rows, Range columns) const {
    const int64_t k = product.k1 - product.k0, groups = ceil_div(k, depth);
    using AView = Rows<typename Config::A, !Config::a_col>;
    using BView = Rows<typename Config::B, Config::b_col>;
    const AView a = {product.a, product.lda};
    const BView b = {product.b, product.ldb};
    uint32_t* const packed_a = (uint32_t*)scratch;
    uint32_t* const packed_b = packed_a + packed_bytes(product.m, k, mr, depth, false) / 4;
    int32_t* const sums = (int32_t*)(packed_b + groups * nr);
    const bool a_ready = a_in_place && k % depth == 0 && product.lda % depth == 0;
    for (int64_t i = rows.begin; i < rows.end; i += mr)
      if (!a_ready || rows.end - i < mr)
        pack_panels<typename Config::A, Dot, mr, !Config::a_col, Dot::offset_a>(
            {a.at(i, product.k0), a.ld}, rows.end - i, k, packed_a + (i - rows.begin) * groups, 0, nullptr);
    for (int64_t j = columns.begin; j < columns.end; j += nr) {
      const int64_t cols = min_of(columns.end - j, nr);
      const bool b_ready = b_in_place && cols == nr;
      if (!b_ready) {
        if constexpr (Dot::offset_a) clear_sums(sums, nr);
        pack_panels<typename Config::B, Dot, nr, Config::b_col, false>({b.at(j, product.k0), b.ld}, columns.end - j, k,
                                                                       packed_b, 0, sums);
      }
      const uint32_t* const b_from = b_ready ? (const uint32_t*)b.at(j, product.k0) : packed_b;
      for (int64_t i = rows.begin; i < rows.end; i += mr) {
        const bool in_place = a_ready && rows.end - i >= mr;
        const uint32_t* const a_from =
            in_place ? (const uint32_t*)a.at(i, product.k0) : packed_a + (i - rows.begin) * groups;
        multiply_tile(i, j, min_of(rows.end - i, mr), cols, groups, a_from, in_place ? product.lda / depth : 1,
                      in_place ? 1 : mr, b_from, b_ready ? product.ldb : nr, sums);
      }
    }
  }

  TW_INLINE void multiply_tile(int64_t i, int64_t j, int64_t rows, int64_t cols, int64_t groups, const uint32_t* a,
                               int64_t a_row, int64_t a_step, const uint32_t* b, int64_t b_step,
                               const int32_t* sums) const {
    alignas(64) static const Accumulator zeros[nr] = {};
    alignas(64) Accumulator buffer[mr * nr];
    const Accumulator* start = zeros;
    if constexpr (Dot::offset_a) start = sums;
    const Output& out = product.out;
    if constexpr (Out::accumulates_in_c) {
      if (rows == mr && cols == nr && Out::verbatim(out)) {
        microkernel_in_place<Dot, mr, nr>(groups, a, a_row, a_step, b, b_step, start, 0,
                                          (Accumulator*)out.data + i * out.ld + j, out.ld);
        return;
      }
    }
    microkernel_in_place<Dot, mr, nr>(groups, a, a_row, a_step, b, b_step, start, 0, buffer, nr);
    Out::store(out, i, j, rows, cols, buffer, nr, nullptr);
  }
};

TW_NAMESPACE_END
