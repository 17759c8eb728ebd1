// One D operand of 16-bit elements as the sums are arranged, read 16 bytes a thread where it can be: a quarter of the
// loads that pairs of elements take, on their way while rows before are finished.
#pragma once
#include "tilewright/gpu/blocks/epilogue.hpp"
#include "tilewright/sm90/blocks/store.hpp"

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
struct DOperand {
  static_assert(size_of<E> == 2, "elements of 16 bits");
  const char* base;  // element (0, 0) of the batch item
  int64_t row_stride, col_stride;
  int n;
  bool wide;  // rows are contiguous and aligned to 16 bytes

  TW_SM90 DOperand(const tw_gemm_operand& d, int item, int columns)
      : base((const char*)d.ptr + item * d.batch_stride * 2),
        row_stride(d.row_stride),
        col_stride(d.col_stride),
        n(columns),
        wide(d.col_stride == 1 && d.row_stride % 8 == 0 && gpu::is_aligned(base, 16)) {}

  // Row i of four blocks of 8 columns from column j on: for the calling lane x[b] is to hold columns 2*quad and the
  // next of block b. Where all of them can be read 16 bytes at a time (`whole`), `load` begins it and transpose_quad
  // ends it, else `gather` does all of it. What lies beyond n is unspecified.
  TW_SM90 bool whole(int j) const { return wide && j + 32 <= n; }
  TW_SM90 void load(uint32_t (&x)[4], int i, int j, int quad) const {
    const auto words = gpu::load_global<gpu::Words<4>>(base + ((int64_t)i * row_stride + j + quad * 8) * 2);
#pragma unroll
    for (int b = 0; b < 4; b++) x[b] = words.w[b];
  }
  TW_SM90 void gather(uint32_t (&x)[4], int i, int j, int quad) const {
    const char* const from = base + (int64_t)i * row_stride * 2;
#pragma unroll
    for (int b = 0; b < 4; b++) {
      const int at = j + b * 8 + quad * 2;
      x[b] = element(from, at) | element(from, at + 1) << 16;
    }
  }

 private:
  TW_SM90 uint32_t element(const char* from, int j) const {  // without a branch
    return gpu::load_global<uint16_t>(from + (j < n ? j : n - 1) * col_stride * 2);
  }
};

}  // namespace tw::sm90
