// From accumulators to results: C = convert(unary(binary(alpha * scale_a * scale_b * acc + bias, D...))).
#pragma once
#include "tilewright/core/elementwise.hpp"
#include "tilewright/core/args/gemm.h"
#include "tilewright/core/types.hpp"

TW_NAMESPACE_BEGIN

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

// One vector of an element-wise operand: elements (i, j) to (i, j + count - 1) of one batch item, `base` being its
// element (0, 0).
template <class E>
TW_INLINE f32v load_operand(const char* base, const tw_gemm_operand& operand, int64_t i, int64_t j, int64_t count) {
  const char* from = base + (i * operand.row_stride + j * operand.col_stride) * size_of<E>;
  if (operand.col_stride == 1) return load_f32_partial<E>(from, count);
  if (operand.col_stride == 0) return splat(to_float<E>(from));
  float lanes[kLanes] = {};
  for (int64_t l = 0; l < min_of(count, kLanes); l++)
    lanes[l] = to_float<E>(from + l * operand.col_stride * size_of<E>);
  return load_as<f32v>(lanes);
}

template <class E>
TW_INLINE const char* batch_base(const tw_gemm_operand& operand, int64_t item) {
  return (const char*)operand.ptr + item * operand.batch_stride * size_of<E>;
}

// The D operands of one batch item, by recursion over their element types.
template <Binary kOp, class List>
struct DOperands;
template <Binary kOp>
struct DOperands<kOp, types<>> {
  TW_INLINE DOperands(const tw_gemm_operand*, int64_t) {}
  TW_INLINE f32v apply(f32v x, int64_t, int64_t, int64_t) const { return x; }
};
template <Binary kOp, class E, class... Rest>
struct DOperands<kOp, types<E, Rest...>> {
  const tw_gemm_operand& operand;
  const char* base;
  DOperands<kOp, types<Rest...>> rest;
  TW_INLINE DOperands(const tw_gemm_operand* d, int64_t item)
      : operand(*d), base(batch_base<E>(*d, item)), rest(d + 1, item) {}
  TW_INLINE f32v apply(f32v x, int64_t i, int64_t j, int64_t count) const {
    return rest.apply(apply_binary<kOp>(x, load_operand<E>(base, operand, i, j, count)), i, j, count);
  }
};

// Many D operands of one element type: a loop, so that the time to compile a kernel does not grow with their number.
template <Binary kOp, class E, int kCount>
struct RepeatedD {
  const tw_gemm_operand* d;
  int64_t item;
  TW_INLINE RepeatedD(const tw_gemm_operand* operands, int64_t of_item) : d(operands), item(of_item) {}
  TW_INLINE f32v apply(f32v x, int64_t i, int64_t j, int64_t count) const {
    for (int n = 0; n < kCount; n++)
      x = apply_binary<kOp>(x, load_operand<E>(batch_base<E>(d[n], item), d[n], i, j, count));
    return x;
  }
};

constexpr int kUnrolledD = 8;
template <class List>
constexpr bool is_repeated = false;
template <class E, class... Rest>
constexpr bool is_repeated<types<E, Rest...>> = (sizeof...(Rest) >= kUnrolledD) && (is_same<E, Rest> && ...);

template <Binary kOp, class List, bool kRepeated = is_repeated<List>>
struct DFor {
  using type = DOperands<kOp, List>;
};
template <Binary kOp, class E, class... Rest>
struct DFor<kOp, types<E, Rest...>, true> {
  using type = RepeatedD<kOp, E, 1 + (int)sizeof...(Rest)>;
};

// Where the accumulators of one batch item go. `raw`: as they are (the partial sums of split-K), else through the
// epilogue to elements of C.
struct Output {
  const tw_gemm_problem* problem;
  int64_t item;
  char* data;  // element (0, 0)
  int64_t ld;  // in elements
  bool raw;
};

// Where the rows of a result lie, and what an operation other than a plain product adds to the epilogue. This one adds
// nothing: rows lie `ld` apart. (Convolutions: see cpu/conv/output.hpp.)
struct LinearRows {
  using Output = tw::Output;
  // accumulates: an earlier result is added. bias_along_rows: one value of the bias per row instead of per column.
  static constexpr bool linear = true, accumulates = false, bias_along_rows = false;
  // The item whose scales and bias are meant.
  static TW_INLINE int64_t operand_item(const Output& out) { return out.item; }
  // Elements from element (0, 0) to the beginning of row i0 + i.
  struct Offsets {
    const Output& out;
    int64_t i0;
    TW_INLINE Offsets(const Output& output, int64_t first, int64_t) : out(output), i0(first) {}
    TW_INLINE int64_t operator[](int64_t i) const { return (i0 + i) * out.ld; }
  };
};

// The first `count` lanes (1 to L) of accumulators.
template <class V>
TW_INLINE V load_lanes(const void* from, int64_t count) {
  if (count >= kLanes) return load_as<V>(from);
  V value = {};
  __builtin_memcpy(&value, from, (size_t)count * 4);
  return value;
}
template <class V>
TW_INLINE void store_lanes(void* to, V value, int64_t count) {
  if (count >= kLanes) store_as(to, value);
  else __builtin_memcpy(to, &value, (size_t)count * 4);
}

// Config states C, Bias, D, scale_a, scale_b, binary and unary; Dot the accumulators; Rows where they go.
template <class Config, class Dot, class Rows = LinearRows>
struct Epilogue {
  using Output = typename Rows::Output;
  using C = typename Config::C;
  using Bias = BiasType<typename Config::Bias>;
  using Ds = typename DFor<Config::binary, typename Config::D>::type;
  using Accumulator = typename Dot::scalar;
  using V = typename Dot::accumulator;
  static_assert(!is_same<C, int32> || !Dot::is_float, "an int32 result needs int8 operands");
  // Nothing but alpha and the conversion.
  static constexpr bool plain = !Bias::present && Config::D::size == 0 && Config::scale_a == Scale::none &&
                                Config::scale_b == Scale::none && Config::unary == Unary::PassThrough;
  // C holds accumulators as they are: sums may be built up in C itself.
  static constexpr bool accumulates_in_c = plain && Rows::linear && !Rows::accumulates &&
                                           (Dot::is_float ? is_same<C, fp32> : is_same<C, int32>);

  // True if accumulators are stored as they are (but for the correction): the microkernel may then write to C directly.
  TW_INLINE static bool verbatim(const Output& out) {
    return out.raw || (accumulates_in_c && out.problem->alpha == 1.0);
  }

  // tile: rows x cols accumulators for the result's element (i0, j0) and on, tile_ld apart, whole vectors readable.
  // correction: NULL, or one int32 per column to add first (see cpu/blocks/pack.hpp).
  static TW_NOINLINE void store(const Output& out, int64_t i0, int64_t j0, int64_t rows, int64_t cols,
                                const Accumulator* tile, int64_t tile_ld, const int32_t* correction) {
    if (verbatim(out)) store_verbatim(out, i0, j0, rows, cols, tile, tile_ld, correction);
    else store_converted(out, i0, j0, rows, cols, tile, tile_ld, correction);
  }

 private:
  TW_INLINE static V corrected(const Accumulator* from, i32v correction) {
    V value = load_as<V>(from);
    if constexpr (Dot::offset_a) value += correction;
    return value;
  }
  TW_INLINE static i32v correction_of(const int32_t* correction, int64_t j) {
    return Dot::offset_a && correction ? load_as<i32v>(correction + j) : i32v{};
  }

  static TW_INLINE void store_verbatim(const Output& out, int64_t i0, int64_t j0, int64_t rows, int64_t cols,
                                       const Accumulator* tile, int64_t tile_ld, const int32_t* correction) {
    for (int64_t j = 0; j < cols; j += kLanes) {
      const i32v add = correction_of(correction, j);
      char* to = out.data + (i0 * out.ld + j0 + j) * 4;
      for (int64_t i = 0; i < rows; i++, to += out.ld * 4)
        store_lanes(to, corrected(tile + i * tile_ld + j, add), cols - j);
    }
  }

  static TW_INLINE void store_converted(const Output& out, int64_t i0, int64_t j0, int64_t rows, int64_t cols,
                                        const Accumulator* tile, int64_t tile_ld, const int32_t* correction) {
    const tw_gemm_problem& problem = *out.problem;
    const int64_t of = Rows::operand_item(out);
    const char* const scale_a = batch_base<fp32>(problem.scale_a, of);
    const char* const scale_b = batch_base<fp32>(problem.scale_b, of);
    const char* const bias = batch_base<typename Bias::type>(problem.bias, of);
    const typename Rows::Offsets offsets(out, i0, rows);
    if constexpr (plain && !Dot::offset_a && !Rows::accumulates) {
      // Row by row: neighbours in memory are written one after the other.
      const f32v alpha = splat((float)problem.alpha);
      for (int64_t i = 0; i < rows; i++) {
        char* const to = out.data + (offsets[i] + j0) * size_of<C>;
        const Accumulator* const from = tile + i * tile_ld;
        for (int64_t j = 0; j < cols; j += kLanes) {
          const V sum = load_as<V>(from + j);
          f32v x;
          if constexpr (Dot::is_float) x = sum * alpha;
          else x = __builtin_convertvector(sum, f32v) * alpha;
          store_f32_partial<C>(to + j * size_of<C>, x, cols - j);
        }
      }
      return;
    }
    const Ds ds(problem.d, out.item);
    const float lo = (float)problem.clamp_lo, hi = (float)problem.clamp_hi;
    for (int64_t j = 0; j < cols; j += kLanes) {
      const int64_t count = cols - j;
      const i32v add = correction_of(correction, j);
      f32v scale = splat((float)problem.alpha), shift = {};
      if constexpr (Config::scale_b != Scale::none)
        scale *= load_operand<fp32>(scale_b, problem.scale_b, 0, j0 + j, count);
      if constexpr (Bias::present && !Rows::bias_along_rows)
        shift = load_operand<typename Bias::type>(bias, problem.bias, 0, j0 + j, count);
      for (int64_t i = 0; i < rows; i++) {
        const V sum = corrected(tile + i * tile_ld + j, add);
        f32v x;
        if constexpr (Dot::is_float) x = sum * scale;
        else x = __builtin_convertvector(sum, f32v) * scale;
        if constexpr (Config::scale_a != Scale::none)
          x *= to_float<fp32>(scale_a + (i0 + i) * problem.scale_a.row_stride * 4);
        if constexpr (Bias::present && !Rows::bias_along_rows) x += shift;
        if constexpr (Bias::present && Rows::bias_along_rows)
          x += to_float<typename Bias::type>(bias +
                                             (i0 + i) * problem.bias.row_stride * size_of<typename Bias::type>);
        if constexpr (Rows::accumulates)
          x += load_f32_partial<C>(Rows::earlier(out) + (offsets[i] + j0 + j) * size_of<C>, count);
        x = ds.apply(x, i0 + i, j0 + j, count);
        x = apply_unary<Config::unary>(x, lo, hi);
        store_f32_partial<C>(out.data + (offsets[i] + j0 + j) * size_of<C>, x, count);
      }
    }
  }
};

TW_NAMESPACE_END
