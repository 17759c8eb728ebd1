// From accumulators to elements of C: C = convert(unary(binary(alpha * scale_a * scale_b * acc + bias, D...))), some
// neighbouring columns of one row at a time. Serves every GEMM kernel on GPUs; the same steps in the same order as
// tilewright/cpu/blocks/epilogue.hpp.
//
//   const Epilogue<Config, float> epilogue(task.problem, task.operands(), item, {task.problem.ldc});   // or int32_t
//   const auto columns = epilogue.template columns<4>(j, count);                     // once for many rows
//   epilogue.store(accumulators, columns, i, j, count);                            // elements (i, j) to (i, j+count-1)
// or, to store through shared memory, `epilogue.finish(...)`, which returns the elements of C packed in registers.
#pragma once
#include "tilewright/core/args/gemm.h"
#include "tilewright/core/meta.hpp"
#include "tilewright/gpu/blocks/convert.hpp"
#include "tilewright/gpu/blocks/elementwise.hpp"

namespace tw::gpu {

template <class T>
struct BiasType {
  using type = T;
  static constexpr bool present = true;
};
template <>
struct BiasType<void> {
  using type = fp32;  // a stand-in, never read
  static constexpr bool present = false;
};

// True if a vector access of `bytes` (a power of two) is aligned.
TW_DEVICE bool is_aligned(const void* p, int bytes) { return ((uintptr_t)p & (uintptr_t)(bytes - 1)) == 0; }

// kCount elements from an address that is aligned for a vector of them (at most 16 bytes at a time).
template <class E, int kCount, bool kConstant>
TW_DEVICE Packed<E, kCount> load_vector(const char* from) {
  constexpr int kBytes = kCount * size_of<E>;
  using Vector = Packed<E, kCount>;
  if constexpr (kBytes <= 16) {
    return kConstant ? load_constant<Vector>(from) : load_global<Vector>(from);
  } else {
    Vector v;
    TW_UNROLL
    for (int i = 0; i < kBytes / 16; i++) {
      const Words<4> part = kConstant ? load_constant<Words<4>>(from + i * 16) : load_global<Words<4>>(from + i * 16);
      TW_UNROLL
      for (int l = 0; l < 4; l++) v.data.w[i * 4 + l] = part.w[l];
    }
    return v;
  }
}

// Elements (i, j) to (i, j + count - 1), 1 <= count; values beyond them are unspecified. kConstant: no thread writes
// the operand (a D operand may be C itself).
template <class E, int kCount, bool kConstant>
TW_DEVICE void load_operand(float (&x)[kCount], const tw_gemm_operand& operand, int64_t item, int64_t i, int64_t j,
                            int count) {
  using Storage = typename E::storage;
  const char* const from =
      (const char*)operand.ptr +
      (item * operand.batch_stride + i * operand.row_stride + j * operand.col_stride) * size_of<E>;
  const auto one = [](const char* p) {
    return to_float<E>(kConstant ? load_constant<Storage>(p) : load_global<Storage>(p));
  };
  constexpr int kVector = min_of(16, kCount * size_of<E>);
  if (operand.col_stride == 1 && count >= kCount && is_aligned(from, kVector)) {
    const auto v = load_vector<E, kCount, kConstant>(from);
    TW_UNROLL
    for (int l = 0; l < kCount; l++) x[l] = to_float<E>(v.get(l));
  } else if (operand.col_stride == 0) {
    const float value = one(from);
    TW_UNROLL
    for (int l = 0; l < kCount; l++) x[l] = value;
  } else {
    TW_UNROLL
    for (int l = 0; l < kCount; l++) x[l] = l < count ? one(from + l * operand.col_stride * size_of<E>) : 0.0f;
  }
}

// The D operands, by recursion over their element types.
template <Binary kOp, class List>
struct DOperands;
template <Binary kOp>
struct DOperands<kOp, types<>> {
  template <int kCount>
  TW_DEVICE static void apply(float (&)[kCount], const tw_gemm_operand*, int64_t, int64_t, int64_t, int) {}
};
template <Binary kOp, class E, class... Rest>
struct DOperands<kOp, types<E, Rest...>> {
  template <int kCount>
  TW_DEVICE static void apply(float (&x)[kCount], const tw_gemm_operand* d, int64_t item, int64_t i, int64_t j,
                              int count) {
    step<E>(x, *d, item, i, j, count);
    DOperands<kOp, types<Rest...>>::apply(x, d + 1, item, i, j, count);
  }
  template <class Element, int kCount>
  TW_DEVICE static void step(float (&x)[kCount], const tw_gemm_operand& d, int64_t item, int64_t i, int64_t j,
                             int count) {
    float y[kCount];
    load_operand<Element, kCount, false>(y, d, item, i, j, count);
    TW_UNROLL
    for (int l = 0; l < kCount; l++) x[l] = apply_binary<kOp>(x[l], y[l]);
  }
};

// Many D operands of one element type: a loop, so that the kernel does not grow with their number.
template <Binary kOp, class E, int kOperands>
struct RepeatedD {
  template <int kCount>
  TW_DEVICE static void apply(float (&x)[kCount], const tw_gemm_operand* d, int64_t item, int64_t i, int64_t j,
                              int count) {
    TW_NO_UNROLL
    for (int n = 0; n < kOperands; n++)
      DOperands<kOp, types<E>>::template step<E>(x, d[n], item, i, j, count);
  }
};

constexpr int kUnrolledD = 4;
template <Binary kOp, class List>
struct DFor {
  using type = DOperands<kOp, List>;
};
template <Binary kOp, class E, class... Rest>
struct DFor<kOp, types<E, Rest...>> {
  using type = Choose<(sizeof...(Rest) >= kUnrolledD) && (is_same<E, Rest> && ...),
                      RepeatedD<kOp, E, 1 + (int)sizeof...(Rest)>, DOperands<kOp, types<E, Rest...>>>;
};

// Scale and shift of the columns of a few neighbouring elements.
template <int kCount>
struct Columns {
  float scale[kCount], shift[kCount];
};

// Where the rows of C lie.
struct LinearRows {
  static constexpr bool accumulates = false;
  int64_t ld;
  TW_DEVICE int64_t operator()(int64_t i) const { return i * ld; }  // elements from the first row
  TW_DEVICE bool divisible(int elements) const { return ld % elements == 0; }
};

// Rows: LinearRows, or what convolutions have in its place (gpu/conv/image.hpp). Where `accumulates`, the elements at
// `rows.before`, which lie as those of C do, are added ahead of the conversion.
template <class Config, class Accumulator, class Rows = LinearRows>
struct Epilogue {
  using C = typename Config::C;
  using Bias = BiasType<typename Config::Bias>;
  using Ds = typename DFor<Config::binary, typename Config::D>::type;
  static constexpr bool is_float = is_same<Accumulator, float>;
  static_assert(!is_same<C, int32> || !is_float, "an int32 result needs int8 operands");
  // Nothing but alpha and the conversion.
  static constexpr bool plain = !Bias::present && Config::D::size == 0 && Config::scale_a == Scale::none &&
                                Config::scale_b == Scale::none && Config::unary == Unary::PassThrough &&
                                !Rows::accumulates;

  const tw_gemm_problem& problem;
  const tw_gemm_operand* const d;
  const int64_t item;  // of the batch
  char* const c;       // its element (0, 0)
  const Rows rows;
  const float alpha, lo, hi;

  TW_DEVICE Epilogue(const tw_gemm_problem& of, const tw_gemm_operand* operands, int64_t batch_item, const Rows& where)
      : problem(of),
        d(operands),
        item(batch_item),
        c((char*)of.c + batch_item * of.stride_c * size_of<C>),
        rows(where),
        alpha((float)of.alpha),
        lo((float)of.clamp_lo),
        hi((float)of.clamp_hi) {}

  template <int kCount>
  TW_DEVICE Columns<kCount> columns(int64_t j, int count) const {
    Columns<kCount> y;
    float x[kCount];
    TW_UNROLL
    for (int l = 0; l < kCount; l++) y.scale[l] = alpha, y.shift[l] = 0.0f;
    if constexpr (Config::scale_b != Scale::none) {
      load_operand<fp32, kCount, true>(x, problem.scale_b, item, 0, j, count);
      TW_UNROLL
      for (int l = 0; l < kCount; l++) y.scale[l] *= x[l];
    }
    if constexpr (Bias::present)
      load_operand<typename Bias::type, kCount, true>(y.shift, problem.bias, item, 0, j, count);
    return y;
  }

  // Elements (i, j) to (i, j + count - 1) of C; what lies beyond count is unspecified.
  template <int kCount>
  TW_DEVICE Packed<C, kCount> finish(const Accumulator (&acc)[kCount], const Columns<kCount>& column, int64_t i,
                                     int64_t j, int count) const {
    if constexpr (plain && is_same<C, int32>)
      if (alpha == 1.0f) {  // sums beyond 2^24 stay exact
        Packed<C, kCount> raw;
        TW_UNROLL
        for (int l = 0; l < kCount; l++) raw.data.w[l] = (uint32_t)acc[l];
        return raw;
      }
    float row_scale = 1.0f;
    if constexpr (Config::scale_a != Scale::none) {
      const tw_gemm_operand& s = problem.scale_a;
      row_scale = load_constant<float>((const float*)s.ptr + item * s.batch_stride + i * s.row_stride);
    }
    float x[kCount];
    TW_UNROLL
    for (int l = 0; l < kCount; l++) {
      x[l] = (float)acc[l] * column.scale[l];
      if constexpr (Config::scale_a != Scale::none) x[l] *= row_scale;
      if constexpr (Bias::present) x[l] += column.shift[l];
    }
    Ds::apply(x, d, item, i, j, count);
    if constexpr (Rows::accumulates) {
      const tw_gemm_operand before = {rows.before, 0, 1, 0};
      float y[kCount];
      load_operand<C, kCount, false>(y, before, 0, 0, rows(i) + j, count);
      TW_UNROLL
      for (int l = 0; l < kCount; l++) x[l] += y[l];
    }
    TW_UNROLL
    for (int l = 0; l < kCount; l++) x[l] = apply_unary<Config::unary>(x[l], lo, hi);
    return pack<C>(x);
  }

  template <int kCount>
  TW_DEVICE void store(const Accumulator (&acc)[kCount], const Columns<kCount>& column, int64_t i, int64_t j,
                       int count) const {
    put(finish(acc, column, i, j, count), i, j, count);
  }

  // Writes finished elements: as vectors where they are whole and aligned.
  template <int kCount>
  TW_DEVICE void put(const Packed<C, kCount>& value, int64_t i, int64_t j, int count) const {
    constexpr int kBytes = kCount * size_of<C>;
    char* const to = c + (rows(i) + j) * size_of<C>;
    if (count >= kCount && is_aligned(to, min_of(16, kBytes))) {
      if constexpr (kBytes <= 16) {
        store_global(to, value);
      } else {
        TW_UNROLL
        for (int p = 0; p < kBytes / 16; p++) {
          const Words<4> part = {value.data.w[p * 4], value.data.w[p * 4 + 1], value.data.w[p * 4 + 2],
                                 value.data.w[p * 4 + 3]};
          store_global(to + p * 16, part);
        }
      }
    } else {
      // Without branches, over which compilers take long where there are hundreds: what lies beyond the end goes to the
      // last element's place, ahead of the last element itself.
      TW_UNROLL
      for (int l = kCount - 1; l >= 0; l--) store_global(to + min_of(l, count - 1) * size_of<C>, value.get(l));
    }
  }
};

}  // namespace tw::gpu
