// One D operand of 16-bit elements as the accumulators are arranged, read 16 bytes a thread where it can be: a quarter
// of the loads that pairs of elements take, and early enough for their latency to pass.
#pragma once
#include "tilewright/gpu/epilogue.hpp"
#include "tilewright/sm90/store.hpp"

namespace tw::sm90 {

// The first type of a list, fp32 if it is empty.
template <class List>
struct FirstOf {
  using type = fp32;
};
template <class E, class... Rest>
struct FirstOf<types<E, Rest...>> {
  using type = E;
};

template <class E>
struct Residual {
  static_assert(size_of<E> == 2, "elements of 16 bits");
  const char* base;  // element (0, 0) of the batch item
  int64_t row_stride, col_stride;
  int n;
  bool wide;  // rows are contiguous and aligned to 16 bytes

  TW_SM90 Residual(const tw_gemm_operand& d, int item, int columns)
      : base((const char*)d.ptr + item * d.batch_stride * 2),
        row_stride(d.row_stride),
        col_stride(d.col_stride),
        n(columns),
        wide(d.col_stride == 1 && d.row_stride % 8 == 0 && gpu::is_aligned(base, 16)) {}

  // Row i of four blocks of 8 columns from column j on: for the calling lane x[b] is to hold columns 2*quad and the
  // next of block b. `load` begins it, `arrange` ends it; all lanes of the warp call both with the same j.
  TW_SM90 void load(uint32_t (&x)[4], int i, int j, int quad) const {
    const char* const from = base + (int64_t)i * row_stride * 2;
    if (whole(j)) {
      const auto words = gpu::load_global<gpu::Words<4>>(from + (j + quad * 8) * 2);
#pragma unroll
      for (int b = 0; b < 4; b++) x[b] = words.w[b];
    } else {
#pragma unroll
      for (int b = 0; b < 4; b++) {
        const int at = j + b * 8 + quad * 2;
        x[b] = element(from, at) | element(from, at + 1) << 16;
      }
    }
  }
  TW_SM90 void arrange(uint32_t (&x)[4], int j) const {
    if (whole(j)) transpose_quad(x);
  }

 private:
  TW_SM90 bool whole(int j) const { return wide && j + 32 <= n; }
  TW_SM90 uint32_t element(const char* from, int j) const {
    return j < n ? (uint32_t)gpu::load_global<uint16_t>(from + j * col_stride * 2) : 0;
  }
};

}  // namespace tw::sm90
