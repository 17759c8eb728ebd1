// Matrix instructions of gfx950 that take factors of blocks themselves: one of E8M0 for each row of either operand and
// 32 of k, in a byte of a register. Lane l has the factor of row l % rows and of block l / rows of the instruction's k.
//
// The instruction's k is the tile's k here: a lane's two runs of 16 bytes lie 16 * groups apart, as they are read from a
// tile. What a lane gives to be multiplied is therefore not the block whose factor it has. (Of 4 and 6 bits it gives a
// block: gpu/amd/narrow.hpp.)
//
// Source: "AMD Instinct CDNA4 Instruction Set Architecture", V_MFMA_SCALE_F32_16X16X128_F8F6F4 and 32X32X64.
#pragma once
#include "tilewright/core/block_scales.hpp"
#include "tilewright/core/narrow.hpp"
#include "tilewright/gpu/blocks/atoms.hpp"

namespace tw::gpu {

// How instructions are told the format of an operand.
template <class E>
constexpr int format_code() {
  if constexpr (width_of<E> < 8) return E::code;
  else return is_same<E, bf8> ? 1 : 0;
}

#if defined(__gfx950__)
// Every call of `multiply` (or of `multiply_row` for all rows, in their order) goes on by the instruction's depth; the
// factors for the next one are on their way meanwhile.
template <class Plain>
struct ExponentAtom : Plain {
  using typename Plain::Fragments, typename Plain::A, typename Plain::B;
  using Plain::rows, Plain::columns, Plain::acc, Plain::layout;
  static constexpr int groups = layout().groups, lines = layout().rows;
  static_assert(Plain::products == 1 && Plain::depth == groups * 4 * width_of<A>, "a lane has one factor of an instruction");

  const uint8_t* of_a[rows];  // the lane's rows of A and columns of B
  const uint8_t* of_b[columns];
  int64_t step_a, step_b;  // from one block of k to the next
  int block, last;         // the block of the next factors; beyond the last one its factor counts nothing
  int next_a[rows], next_b[columns], factors_a[rows], factors_b[columns];

  // k: where the sums begin, a multiple of 32. i0, j0: the wave's part in C.
  TW_DEVICE void begin(const tw_gemm_problem& problem, int64_t item, int i0, int j0, int k, int lane) {
    const tw_gemm_operand &a = problem.scale_a, &b = problem.scale_b;
    const uint8_t* const from_a = (const uint8_t*)a.ptr + item * a.batch_stride;
    const uint8_t* const from_b = (const uint8_t*)b.ptr + item * b.batch_stride;
    const int line_a = layout().column(lane), line_b = layout().line_of(layout().row(lane));
    TW_UNROLL
    for (int i = 0; i < rows; i++)
      of_a[i] = from_a + min_of(i0 + i * lines + line_a, (int)problem.m - 1) * a.row_stride;
    TW_UNROLL
    for (int j = 0; j < columns; j++)
      of_b[j] = from_b + min_of(j0 + j * lines + line_b, (int)problem.n - 1) * b.row_stride;
    step_a = a.col_stride;
    step_b = b.col_stride;
    block = k / 32 + layout().group(lane);
    last = ((int)problem.k - 1) / 32;
    fetch();
  }

  TW_DEVICE void multiply(const Fragments& f) {
    TW_UNROLL
    for (int i = 0; i < rows; i++) multiply_row(f, 0, i);
  }
  TW_DEVICE void multiply_row(const Fragments& f, int, int i) {
    if (i == 0) advance();
    TW_UNROLL
    for (int j = 0; j < columns; j++)
      multiply_byte<0>(acc[i][j], f.a[i], f.b[j], (uint32_t)factors_a[i], (uint32_t)factors_b[j]);
  }

  // The product of row i and column j, whose exponents are in byte `byte` of a register.
  template <class FragmentA, class FragmentB>
  TW_DEVICE void multiply_one(int i, int j, const FragmentA& a, const FragmentB& b, uint32_t of_row, uint32_t of_column,
                              int byte) {
    if (byte == 0) multiply_byte<0>(acc[i][j], a, b, of_row, of_column);
    else if (byte == 1) multiply_byte<1>(acc[i][j], a, b, of_row, of_column);
    else if (byte == 2) multiply_byte<2>(acc[i][j], a, b, of_row, of_column);
    else multiply_byte<3>(acc[i][j], a, b, of_row, of_column);
  }

 private:
  template <int kByte, class Sums, class FragmentA, class FragmentB>
  TW_DEVICE static void multiply_byte(Sums& sums, const FragmentA& a, const FragmentB& b, uint32_t of_row,
                                      uint32_t of_column) {
    constexpr int kX = format_code<B>(), kY = format_code<A>();
    const auto x = operand(b), y = operand(a);
    if constexpr (lines == 32)
      sums = __builtin_amdgcn_mfma_scale_f32_32x32x64_f8f6f4(x, y, sums, kX, kY, kByte, (int)of_column, kByte,
                                                             (int)of_row);
    else
      sums = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(x, y, sums, kX, kY, kByte, (int)of_column, kByte,
                                                              (int)of_row);
  }
  TW_DEVICE void advance() {
    TW_UNROLL
    for (int i = 0; i < rows; i++) factors_a[i] = next_a[i];
    TW_UNROLL
    for (int j = 0; j < columns; j++) factors_b[j] = next_b[j];
    block += groups;
    fetch();
  }
  TW_DEVICE void fetch() {
    const int64_t here = min_of(block, last);
    TW_UNROLL
    for (int i = 0; i < rows; i++) next_a[i] = load_constant<uint8_t>(of_a[i] + here * step_a);
    TW_UNROLL
    for (int j = 0; j < columns; j++) next_b[j] = load_constant<uint8_t>(of_b[j] + here * step_b);
  }

  // Narrow formats leave the last registers alone.
  template <class Fragment>
  TW_DEVICE static Vector<int, 8> operand(const Fragment& x) {
    constexpr int kParts = sizeof(x.part) / sizeof(x.part[0]);
    if constexpr (kParts == 1) {
      return bits_as<Vector<int, 8>>(__builtin_shufflevector(x.part[0], x.part[0], 0, 1, 2, 3, -1, -1, -1, -1));
    } else if constexpr (kParts == 3) {
      const auto low = __builtin_shufflevector(x.part[0], x.part[1], 0, 1, 2, 3);
      const auto high = __builtin_shufflevector(x.part[2], x.part[2], 0, 1, -1, -1);
      return bits_as<Vector<int, 8>>(__builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, -1, -1));
    } else {
      return bits_as<Vector<int, 8>>(__builtin_shufflevector(x.part[0], x.part[1], 0, 1, 2, 3, 4, 5, 6, 7));
    }
  }
};

template <class C, class TileA, class TileB, int kM, int kN>
struct AtomFor<Scaled1x32<C>, TileA, TileB, kM, kN, false> {
  using Plain = MatrixAtom<TileA, TileB, kM, kN, C::warp_tile_m, C::warp_tile_n, C::warp_tile_k>;
  using type = Choose<Plain::instruction_bytes == 32, ExponentAtom<Plain>, Plain>;
};
#endif

template <class Atom>
constexpr bool kTakesExponents = false;
#if defined(__gfx950__)
template <class Plain>
constexpr bool kTakesExponents<ExponentAtom<Plain>> = true;
#endif

}  // namespace tw::gpu
