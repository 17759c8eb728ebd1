// The GEMM of CPUs with packed 4-bit weights: they are widened to fp32 when they are packed, and shifted and scaled
// there, once for each element; A is widened too. What follows is the blocked GEMM of fp32 as it is.
#pragma once
#include "tilewright/core/args/gemm.h"
#include "tilewright/core/int4.hpp"
#include "tilewright/cpu/gemm/gemm.hpp"

TW_NAMESPACE_BEGIN

// A kernel of values that are widened one by one, whatever dot product its type has.
template <class Config>
struct Widening : Config {
  static constexpr int warp_tile_k = 1;
};

// Sums are fp32, whatever A is.
template <class Config, class Scale, bool kZeros, class Rows>
struct Blocking<Int4<Config, Scale, kZeros>, Rows> : Blocking<Widening<Config>, Rows> {
  using Base = Blocking<Widening<Config>, Rows>;
  using Dot = DotF32;
  using Out = Epilogue<Int4<Config, Scale, kZeros>, Dot, Rows>;
  using typename Base::Sizes;
  static_assert(Base::depth == 1, "unpacked values are multiplied in fp32");
  static_assert(!Config::preshuffle && Config::pipeline == Pipeline::compv3, "A and B are packed");

  static constexpr Sizes sizes(int64_t m, int64_t n, int64_t k) {
    const int64_t shared = Base::shared_length(Base::shares_b ? n : m, k);
    const int64_t slab = Base::slab_length(Base::shares_b ? m : n);
    Sizes s;
    s.shared = packed_bytes(shared, k, Base::shared_r, 1, false);
    s.slab = round_up(slab * min_of(k, Base::block_groups) * 4, 64);
    if (!Out::accumulates_in_c && k > Base::block_groups) s.partial_tiles = round_up(slab * shared * 4, 64);
    return s;
  }
};

// One group of a column, or a part of it: values, factor, zero point.
struct Int4Line {
  alignas(16) unsigned char values[kInt4Group + 2 + kLanes];  // a byte may hold one before, and vectors read beyond
  float scale, zero;

  // `count` values from k on; from: the column.
  TW_INLINE void read(const char* from, int64_t k, int64_t count) {
    const unsigned char* const bytes = (const unsigned char*)from + k / 2;
    const int64_t pairs = (k % 2 + count + 1) / 2;
    for (int64_t i = 0; i < pairs; i++) values[2 * i] = bytes[i] & 15, values[2 * i + 1] = bytes[i] >> 4;
  }
  // L of them from i on.
  TW_INLINE u32v at(int64_t i) const {
    const f32v x = __builtin_convertvector((i32v)widen_u8((const char*)values + i), f32v);
    return (u32v)((x - zero) * scale);
  }
};

template <class Config, class Scale, bool kZeros>
struct MatrixSources<Int4<Config, Scale, kZeros>> : MatrixSources<Widening<Config>> {
  using Base = MatrixSources<Widening<Config>>;
  using Plan = Blocking<Int4<Config, Scale, kZeros>>;
  using Dot = DotF32;
  using typename Base::Product;

  template <bool kIsB>
  static TW_INLINE void pack(const Product& product, int64_t first, int64_t end, int64_t k_begin, int64_t k_count,
                             uint32_t* to, int64_t panel, int32_t* sums) {
    if constexpr (kIsB) pack_b(product, first, end, product.k0 + k_begin, k_count, to);
    else if constexpr (Base::Dot::is_float) Base::template pack<false>(product, first, end, k_begin, k_count, to, panel, sums);
    else pack_integers(product, first, end, product.k0 + k_begin, k_count, to, panel);
  }

  static TW_INLINE void pack_b(const Product& product, int64_t first, int64_t end, int64_t k0, int64_t count,
                               uint32_t* to) {
    static_assert(Base::together_b == 1, "columns are contiguous");
    const tw_gemm_problem& problem = *product.out.problem;
    const int64_t item = product.out.item, columns = min_of(end - first, Plan::nr);
    const char* const b = (const char*)problem.b + item * problem.stride_b;
    const tw_gemm_operand& scale = problem.scale_b;
    const char* const scales = (const char*)scale.ptr + item * scale.batch_stride * size_of<Scale>;
    const char* zeros = nullptr;
    int64_t zero_column = 0, zero_step = 0;
    if constexpr (kZeros) {
      const tw_gemm_operand& zero = problem.d[Config::D::size];
      zeros = (const char*)zero.ptr + item * zero.batch_stride;
      zero_column = zero.row_stride, zero_step = zero.col_stride;
    }
    for (int64_t k = k0; k < k0 + count;) {
      const int64_t group = k / kInt4Group, now = min_of((group + 1) * kInt4Group, k0 + count) - k;
      for (int64_t h = 0; h < Plan::nr; h += kLanes, to += kLanes) {
        Int4Line lines[kLanes];
        const int64_t some = max_of(min_of(columns - h, kLanes), 0);
        for (int64_t j = 0; j < some; j++) {
          const int64_t column = first + h + j;
          lines[j].read(b + column * product.ldb, k, now);
          lines[j].scale = to_float<Scale>(scales + (column * scale.row_stride + group * scale.col_stride) *
                                                        size_of<Scale>);
          lines[j].zero = kZeros ? (float)(zeros[column * zero_column + group * zero_step] & 15) : (float)kInt4Middle;
        }
        for (int64_t i = 0; i < now; i += kLanes) {
          u32v block[kLanes];
          for (int64_t j = 0; j < kLanes; j++) block[j] = j < some ? lines[j].at(k % 2 + i) : u32v{};
          transpose(block);
          for (int64_t g = 0; g < min_of(now - i, kLanes); g++) store_as(to + (i + g) * Plan::nr, block[g]);
        }
      }
      to += (now - 1) * Plan::nr;
      k += now;
    }
  }

  static TW_INLINE void pack_integers(const Product& product, int64_t first, int64_t end, int64_t k0, int64_t count,
                                      uint32_t* to, int64_t panel) {
    using View = Rows<typename Config::A, !Config::a_col>;
    const View a = {product.a, product.lda};
    for (int64_t p = 0; p < Base::together_a && first + p * Plan::mr < end; p++)
      for (int64_t k = 0; k < count; k++)
        for (int64_t r = 0; r < Plan::mr; r++) {
          const int64_t i = first + p * Plan::mr + r;
          const float x = i < end ? (float)*(const int8_t*)a.at(i, k0 + k) : 0.0f;
          __builtin_memcpy(to + p * panel + k * Plan::mr + r, &x, 4);
        }
  }
};

TW_NAMESPACE_END
