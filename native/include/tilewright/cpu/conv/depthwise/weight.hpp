// The gradient of depthwise weights of 3 x 3 taps (or planes of such taps), channels-last: the sums of all nine taps of
// two vectors of channels stay in registers while some lines of the gradient pass. Nothing is copied: both operands are
// read where they lie. bf16 is multiplied in pairs where the processor does so, and then two lines pass at a time.
//
// At stride 1 every pixel of the image is read once a line for all taps along W: the gradients that meet it are kept
// instead. What lies beyond the image above or below counts as zeros that are multiplied, so that a gradient that is
// not a number spreads to the taps that it meets there; beyond its sides nothing is multiplied.
#pragma once
#include "tilewright/cpu/conv/direct/plan.hpp"
#include "tilewright/cpu/blocks/dot.hpp"
#include "tilewright/cpu/conv/line_pairs.hpp"
#include "tilewright/cpu/blocks/blocked_summation.hpp"
#include "tilewright/cpu/blocks/stream_store.hpp"

TW_NAMESPACE_BEGIN

template <class X, class Dy>
struct DepthwiseWeight {
  static constexpr int L = kLanes;
  static constexpr bool pairs = TW_PAIRS_OF_BF16 && is_same<X, bf16> && is_same<Dy, bf16>;
  static constexpr int kLines = pairs ? 2 : 1;  // of the gradient, at a time
  static constexpr int64_t kChain = 448;        // pixels, at most, that are summed before sums are put aside

  // Problems that this kernel computes, if all channels of two vectors exist.
  static bool suits(const tw_conv_problem& p) {
    return TW_VECTOR_BYTES == 64 && p.axes[1].taps == 3 && p.axes[2].taps == 3 && p.groups >= 2 * L;
  }

  // Two vectors of channels: values as they are, or of two lines interleaved, four channels of every eight each.
  struct Both {
    u32v low, high;
  };
  struct Reader {
    const char* at[kLines];
    int64_t step[kLines];  // 0: zeros
    TW_INLINE void to(int line, const char* from, int64_t distance) { at[line] = from, step[line] = distance; }
  };

  template <class E>
  static TW_INLINE Both load(const Reader& from, int64_t pixel) {
    if constexpr (pairs) {
      constexpr auto all = typename MakeSequence<2 * L>::type{};
      const u16v a = load_as<u16v>(from.at[0] + pixel * from.step[0]);
      const u16v b = load_as<u16v>(from.at[kLines - 1] + pixel * from.step[kLines - 1]);
      return {interleave<0>(a, b, all), interleave<4>(a, b, all)};
    } else {
      const char* const at = from.at[0] + pixel * from.step[0];
      return {(u32v)load_f32<E>(at), (u32v)load_f32<E>(at + L * size_of<E>)};
    }
  }
  static TW_INLINE f32v step(f32v sum, u32v x, u32v dy) {
    if constexpr (pairs) return DotBf16::step(sum, x, dy);
    else return DotF32::step(sum, x, dy);
  }

  struct Accumulators {
    f32v low[9], high[9];
  };

  static TW_INLINE void add(Accumulators& sums, int tap, const Both& x, const Both& dy) {
    sums.low[tap] = step(sums.low[tap], x.low, dy.low);
    sums.high[tap] = step(sums.high[tap], x.high, dy.high);
  }

  // One line of the gradient (or two): `count` pixels, of which number i meets pixels origin + i * stride + t * tap of
  // the image. Pixels of every reader are numbered from its line's first.
  template <bool kNext>
  static TW_INLINE void add_line(Accumulators& sums, const Reader* x, const Reader& dy, int64_t count,
                                 const tw_conv_axis& axis) {
    const int64_t size = axis.size, origin = axis.origin;
    if constexpr (kNext) {
      // The image's pixel number i meets the gradients i - origin - t.
      const int64_t begin = max_of(origin, 0), end = min_of(size, count + origin + 2);
      const int64_t inner = max_of(begin, min_of(origin + 2, end)), outer = max_of(inner, min_of(size, count + origin));
      int64_t i = begin;
      for (; i < inner; i++) some_taps(sums, x, dy, count, i, origin);
      if (i < outer) {
        Both before = load<Dy>(dy, i - origin - 2), last = load<Dy>(dy, i - origin - 1);
        for (; i < outer; i++) {
          const Both now = load<Dy>(dy, i - origin);
          TW_UNROLL
          for (int r = 0; r < 3; r++) {
            const Both pixel = load<X>(x[r], i);
            add(sums, r * 3, pixel, now), add(sums, r * 3 + 1, pixel, last), add(sums, r * 3 + 2, pixel, before);
          }
          before = last, last = now;
        }
      }
      for (; i < end; i++) some_taps(sums, x, dy, count, i, origin);
    } else {
      for (int64_t i = 0; i < count; i++) {
        const Both of = load<Dy>(dy, i);
        const int64_t at = origin + i * axis.row_step;
        TW_UNROLL
        for (int t = 0; t < 3; t++) {
          const int64_t column = at + t * axis.tap_step;
          if (column < 0 || column >= size) continue;
          TW_UNROLL
          for (int r = 0; r < 3; r++) add(sums, r * 3 + t, load<X>(x[r], column), of);
        }
      }
    }
  }
  static TW_INLINE void some_taps(Accumulators& sums, const Reader* x, const Reader& dy, int64_t count, int64_t i,
                                  int64_t origin) {
    TW_UNROLL
    for (int t = 0; t < 3; t++) {
      if (i - origin - t < 0 || i - origin - t >= count) continue;
      const Both of = load<Dy>(dy, i - origin - t);
      TW_UNROLL
      for (int r = 0; r < 3; r++) add(sums, r * 3 + t, load<X>(x[r], i), of);
    }
  }

  // Lines [row, end) of one plane of the gradient, and a plane of the image (both beginning at the first of two vectors
  // of channels). Adds to first[tap * L ...] and second[...], where there are any.
  template <bool kNext>
  static TW_NOINLINE void add_lines(const tw_conv_axis* axes, const char* x, const char* dy, int64_t row, int64_t end,
                                    float* first, float* second) {
    alignas(64) static constexpr char zeros[2 * kVectorBytes] = {};
    Accumulators sums;
    TW_UNROLL
    for (int t = 0; t < 9; t++) sums.low[t] = sums.high[t] = f32v{};
    const int64_t x_pixel = axes[2].image_stride * size_of<X>, dy_pixel = axes[2].row_stride * size_of<Dy>;
    for (int64_t y = row; y < end; y += kLines) {
      Reader of, from[3];
      TW_UNROLL
      for (int line = 0; line < kLines; line++) {
        const bool exists = y + line < end;
        of.to(line, exists ? dy + (y + line) * axes[1].row_stride * size_of<Dy> : zeros, exists ? dy_pixel : 0);
        TW_UNROLL
        for (int r = 0; r < 3; r++) {
          const int64_t at = axes[1].origin + (y + line) * axes[1].row_step + r * axes[1].tap_step;
          const bool inside = exists && at >= 0 && at < axes[1].size;
          from[r].to(line, inside ? x + at * axes[1].image_stride * size_of<X> : zeros, inside ? x_pixel : 0);
        }
      }
      add_line<kNext>(sums, from, of, axes[2].rows, axes[2]);
    }
    constexpr auto one = typename MakeSequence<L>::type{};
    TW_UNROLL
    for (int t = 0; t < 9; t++) {
      const f32v low = pairs ? in_order<0>(sums.low[t], sums.high[t], one) : sums.low[t];
      const f32v high = pairs ? in_order<1>(sums.low[t], sums.high[t], one) : sums.high[t];
      if (first) store_as(first + t * L, load_as<f32v>(first + t * L) + low);
      if (second) store_as(second + t * L, load_as<f32v>(second + t * L) + high);
    }
  }

  // The sums of `count` whole vectors of channels from `channel` on, over lines [begin, end) of all planes; `each`
  // floats from one vector's sums to the next one's.
  static void add_blocks(const tw_conv_problem& p, int64_t channel, int64_t count, int64_t begin, int64_t end,
                         float* sums, int64_t each) {
    const tw_conv_axis* const axes = p.axes;
    const bool next = axes[2].row_step == 1 && axes[2].tap_step == 1;
    const int64_t pixels = p.images * axes[0].rows * axes[1].rows * axes[2].rows;
    const int64_t chain = pairs ? kChain : short_chain(pixels / 2, kChain);
    const int64_t most = max_of(chain / max_of(axes[2].rows, 1) / kLines, 1) * kLines;
    for (int64_t line = begin; line < end;) {
      const int64_t plane = line / axes[1].rows, row = line % axes[1].rows;
      const int64_t n = plane / axes[0].rows, z = plane % axes[0].rows;
      const int64_t lines = min_of(min_of(axes[1].rows - row, end - line), most);
      const char* const dy =
          (const char*)p.gemm.a + (n * p.row_n + z * axes[0].row_stride + channel * p.row_g) * size_of<Dy>;
      for (int64_t td = 0; td < axes[0].taps; td++) {
        const int64_t d = axes[0].origin + z * axes[0].row_step + td * axes[0].tap_step;
        if (d < 0 || d >= axes[0].size) continue;
        const char* const x =
            (const char*)p.gemm.b + (n * p.image_n + d * axes[0].image_stride + channel * p.image_g) * size_of<X>;
        for (int64_t b = 0; b < count; b += 2) {
          // The last of an odd number of vectors comes after the one before it.
          const bool odd = b + 1 == count;
          const int64_t at = odd ? b - 1 : b;
          float* const to = sums + b * each + td * 9 * L;
          const char* const x_at = x + at * L * size_of<X>;
          const char* const dy_at = dy + at * L * size_of<Dy>;
          if (next) add_lines<true>(axes, x_at, dy_at, row, row + lines, odd ? nullptr : to, odd ? to : to + each);
          else add_lines<false>(axes, x_at, dy_at, row, row + lines, odd ? nullptr : to, odd ? to : to + each);
        }
      }
      line += lines;
    }
  }
};

TW_NAMESPACE_END
