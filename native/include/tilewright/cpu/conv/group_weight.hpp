// The gradient of the weights of small groups, of three taps along W, channels-last: lanes run over channels of the
// image, 16 to a block, and the group's channels of the gradient are spread one by one (or picked, where a block holds
// some groups); the sums of three taps and up to eight of these channels stay in registers along a line. The lines that
// meet are copied first, with zeros where the filter looks outside the image; where bf16 is multiplied in pairs, two
// lines of the gradient and what they meet at a time.
#pragma once
#include "tilewright/cpu/conv/direct/plan.hpp"
#include "tilewright/cpu/blocks/dot.hpp"
#include "tilewright/cpu/blocks/stream_store.hpp"

TW_NAMESPACE_BEGIN

template <class X, class Dy>
struct GroupWeight {
  static constexpr int L = kLanes, kTaps = 3;
  static constexpr bool pairs = TW_PAIRS_OF_BF16 && is_same<X, bf16> && is_same<Dy, bf16>;
  static constexpr int kLines = pairs ? 2 : 1;  // of the gradient, at a time

  template <class Plan>
  static bool suits(const tw_conv_problem& p, const Plan& plan) {
    if (TW_VECTOR_BYTES < 64 || !plan.x_is_wide || p.axes[2].taps != kTaps) return false;
    if (plan.wide >= L) return plan.wide % L == 0 && plan.narrow % 8 == 0;
    return plan.wide == plan.narrow && (plan.wide == 4 || plan.wide == 8) && plan.groups % plan.block_groups == 0 &&
           p.image_g == plan.wide && p.row_g == plan.narrow;
  }

  static TW_INLINE f32v step(f32v sum, u32v x, u32v dy) {
    if constexpr (pairs) return DotBf16::step(sum, x, dy);
    else return DotF32::step(sum, x, dy);
  }

  // L values of one line; or of two, each pair a word. NULL stands for zeros.
  template <class E>
  static TW_INLINE u32v words(const char* first, const char* second) {
    if constexpr (pairs) {
      const u32v low = first ? widen_u16(first) : u32v{}, high = second ? widen_u16(second) : u32v{};
      return low | (high << 16);
    } else {
      return first ? (u32v)load_f32<E>(first) : u32v{};
    }
  }

  // `count` pixels, `to_step` words apart in the copy, of one line or two.
  template <class E>
  static TW_INLINE void copy(const char* const* lines, int64_t step, int64_t count, uint32_t* to, int64_t to_step,
                             int64_t channels) {
    const char *first = lines[0], *second = lines[kLines - 1];
    for (int64_t i = 0; i < count; i++, to += to_step) {
      for (int64_t c = 0; c < channels; c += L)
        if (c + L <= channels) {
          store_as(to + c, words<E>(first ? first + c * size_of<E> : first, second ? second + c * size_of<E> : second));
        } else {
          alignas(64) char some[2][L * size_of<E>] = {};
          if (first) __builtin_memcpy(some[0], first + c * size_of<E>, (size_t)(channels - c) * size_of<E>);
          if (second) __builtin_memcpy(some[1], second + c * size_of<E>, (size_t)(channels - c) * size_of<E>);
          const u32v x = words<E>(some[0], some[1]);
          __builtin_memcpy(to + c, &x, (size_t)(channels - c) * 4);
        }
      if (first) first += step;
      if (second) second += step;
    }
  }

  // Adds the products of one line of the gradient with one line of taps. kPick: the channels that lanes are multiplied
  // with are those of their group, of which `lanes` says where it begins.
  template <int kSpread, bool kPick>
  static TW_NOINLINE void add(const uint32_t* x, int64_t x_step, int64_t tap_step, const uint32_t* dy, int64_t dy_step,
                              int64_t count, float* sums, int64_t sums_step, i32v lanes) {
    f32v sum[kTaps][kSpread];
    TW_UNROLL
    for (int t = 0; t < kTaps; t++)
      TW_UNROLL
      for (int c = 0; c < kSpread; c++) sum[t][c] = f32v{};
    for (int64_t i = 0; i < count; i++, x += x_step, dy += dy_step) {
      u32v pixel[kTaps];
      TW_UNROLL
      for (int t = 0; t < kTaps; t++) pixel[t] = load_as<u32v>(x + t * tap_step);
      u32v all = {};
      if constexpr (kPick) all = load_as<u32v>(dy);
      TW_UNROLL
      for (int c = 0; c < kSpread; c++) {
        u32v of;
        if constexpr (kPick) of = (u32v)pick((f32v)all, lanes + c);
        else of = splat_bits(dy[c]);
        TW_UNROLL
        for (int t = 0; t < kTaps; t++) sum[t][c] = step(sum[t][c], pixel[t], of);
      }
    }
    TW_UNROLL
    for (int t = 0; t < kTaps; t++)
      TW_UNROLL
      for (int c = 0; c < kSpread; c++) {
        float* const to = sums + t * sums_step + c * L;
        store_as(to, load_as<f32v>(to) + sum[t][c]);
      }
  }

  // The sums of one block over lines [begin, end) of the gradient: 16 channels of the image, which begin `x_first`
  // elements into a pixel, with all `narrow` of their group, `dy_first` into theirs, or of their `together` groups. Of
  // both there is room for a copy.
  static void add_block(const tw_conv_problem& p, int64_t x_first, int64_t dy_first, int64_t narrow, int64_t together,
                        int64_t run, int64_t begin, int64_t end, float* sums, uint32_t* x_copy, uint32_t* dy_copy) {
    const int64_t beside = together > 1 ? L : narrow;  // words of a pixel of the gradient
    i32v lanes;
    for (int i = 0; i < L; i++) lanes[i] = together > 1 ? (int32_t)(i / narrow * narrow) : 0;
    const tw_conv_axis* const axes = p.axes;
    const int64_t x_pixel = axes[2].image_stride * size_of<X>, dy_pixel = axes[2].row_stride * size_of<Dy>;
    const int64_t each = kTaps * narrow * L, step = axes[2].row_step * L;
    for (int64_t line = begin; line < end;) {
      const int64_t row = line % axes[1].rows, plane = line / axes[1].rows;
      const int64_t n = plane / axes[0].rows, z = plane % axes[0].rows;
      const int64_t lines = min_of(min_of(axes[1].rows - row, end - line), kLines);
      const char* const dy = (const char*)p.gemm.a + (n * p.row_n + z * axes[0].row_stride + dy_first) * size_of<Dy>;
      for (int64_t w = 0; w < axes[2].rows; w += run) {
        const int64_t count = min_of(axes[2].rows - w, run), first = axes[2].origin + w * axes[2].row_step;
        const int64_t reach = (count - 1) * axes[2].row_step + (kTaps - 1) * axes[2].tap_step + 1;
        const int64_t low = min_of(max_of(-first, 0), reach), high = max_of(min_of(axes[2].size - first, reach), low);
        const char* from[2] = {};
        for (int64_t i = 0; i < lines; i++)
          from[i] = dy + ((row + i) * axes[1].row_stride + w * axes[2].row_stride) * size_of<Dy>;
        copy<Dy>(from, dy_pixel, count, dy_copy, beside, beside);
        for (int64_t td = 0; td < axes[0].taps; td++) {
          const int64_t d = axes[0].origin + z * axes[0].row_step + td * axes[0].tap_step;
          if (d < 0 || d >= axes[0].size) continue;
          const char* const x =
              (const char*)p.gemm.b + (n * p.image_n + d * axes[0].image_stride + x_first) * size_of<X>;
          for (int64_t th = 0; th < axes[1].taps; th++) {
            const char* of[2] = {};
            for (int64_t i = 0; i < lines; i++) {
              const int64_t h = axes[1].origin + (row + i) * axes[1].row_step + th * axes[1].tap_step;
              if (h >= 0 && h < axes[1].size)
                of[i] = x + (h * axes[1].image_stride + (first + low) * axes[2].image_stride) * size_of<X>;
            }
            if (!of[0] && !of[1]) continue;
            for (int64_t i = 0; i < low; i++) store_as(x_copy + i * L, u32v{});
            copy<X>(of, x_pixel, high - low, x_copy + low * L, L, L);
            for (int64_t i = high; i < reach; i++) store_as(x_copy + i * L, u32v{});
            float* const to = sums + (td * axes[1].taps + th) * each;
            const int64_t tap = axes[2].tap_step * L;
            if (together == 2) add<8, true>(x_copy, step, tap, dy_copy, L, count, to, narrow * L, lanes);
            else if (together > 2) add<4, true>(x_copy, step, tap, dy_copy, L, count, to, narrow * L, lanes);
            else
              for (int64_t c = 0; c < narrow; c += 8)
                add<8, false>(x_copy, step, tap, dy_copy + c, narrow, count, to + c * L, narrow * L, lanes);
          }
        }
      }
      line += lines;
    }
  }
};

TW_NAMESPACE_END
