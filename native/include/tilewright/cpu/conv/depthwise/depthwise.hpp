// Depthwise convolution and the gradient of its image: one channel per group, and so no product. What a unit exports:
// cpu/conv/entries.hpp.
//
// Channels-last, lanes run over channels (cpu/conv/depthwise/channels_last.hpp). Channels-first, lanes run over the
// pixels of a line; the lines that the filter covers are widened to fp32 with zeros around them, one line for each
// remainder of a coordinate by the stride.
#pragma once
#include "tilewright/core/meta.hpp"
#include "tilewright/cpu/conv/depthwise/channels_last.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct DepthwiseConv {
  using C = typename Config::C;
  using Dot = FloatSums<is_same<C, int32>>;
  using Rows = LineRows<Config>;
  using Out = Epilogue<Config, Dot, Rows>;
  using View = DepthwiseView<Config>;
  static constexpr int team = Config::wave_m * Config::wave_n, L = kLanes;
  static constexpr bool first = Config::channels_first;
  static constexpr bool plain = Out::plain && !Config::accumulate;

  // The elements of the image and of the weights.
  using E = Choose<first, typename Config::B, typename Config::A>;
  using W = Choose<first, typename Config::A, typename Config::B>;

  template <bool kFirst, class Unused = void>
  struct Packed {
    using type = typename DepthwiseLast<Config>::PackedWeight;
  };
  template <class Unused>
  struct Packed<true, Unused> {
    using type = fp32;
  };
  using PackedWeight = typename Packed<first>::type;

  static int64_t weight_bytes(const tw_conv_args& args) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < args.count; i++) bytes += View(args.problems[i], nullptr).weight_bytes();
    return bytes;
  }
  static int64_t member_bytes(const tw_conv_args& args) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < args.count; i++) bytes = max_of(bytes, View(args.problems[i], nullptr).member_bytes());
    return bytes;
  }
  static int64_t workspace(const tw_conv_args& args) { return weight_bytes(args) + team * member_bytes(args); }

  // Weights as [tap][channel]; a tap's number along W is counted as View counts it.
  static TW_NOINLINE void pack_weights(const View& v, char* to, Crew& crew) {
    const char* const from = (const char*)(first ? v.p.gemm.a : v.p.gemm.b);
    const int64_t pieces = v.taps();
    for (int64_t tap; (tap = crew.claim(pieces)) >= 0;) {
      const int64_t line = tap / v.w->taps, at = tap % v.w->taps, w = v.w->tap_step < 0 ? v.w->taps - 1 - at : at;
      const int64_t offset =
          line / v.h->taps * v.d->tap_stride + line % v.h->taps * v.h->tap_stride + w * v.w->tap_stride;
      char* const line_to = to + tap * v.channels * size_of<PackedWeight>;
      if constexpr (is_same<W, PackedWeight>) {
        const char* at = from + offset * size_of<W>;
        const int64_t step = v.p.weight_g * size_of<W>;
        for (int64_t c = 0; c < v.p.groups; c++, at += step) __builtin_memcpy(line_to + c * size_of<W>, at, size_of<W>);
        __builtin_memset(line_to + v.p.groups * size_of<W>, 0, (size_t)(v.channels - v.p.groups) * size_of<W>);
      } else {
        for (int64_t c = 0; c < v.channels; c += L) {
          alignas(64) char weights[L * size_of<W>] = {};
          for (int64_t i = 0; i < L && c + i < v.p.groups; i++)
            __builtin_memcpy(weights + i * size_of<W>, from + (offset + (c + i) * v.p.weight_g) * size_of<W>,
                             size_of<W>);
          store_f32<PackedWeight>(line_to + c * size_of<PackedWeight>, load_f32<W>(weights));
        }
      }
    }
    crew.end_stage(pieces);
  }

  static void run(const tw_conv_args& args, const tw_team* members, bool) {
    Crew crew = crew_of(members, team);
    if (crew.rank >= crew.size) return;
    char* const weights = (char*)args.workspace;
    char* const own = (char*)args.workspace + weight_bytes(args) + crew.rank * member_bytes(args);
    char* packed = weights;
    for (int64_t i = 0; i < args.count; i++) {
      const View v(args.problems[i], packed);
      if (v.p.gemm.batch > 0) pack_weights(v, packed, crew);
      packed += v.weight_bytes();
    }
    crew.barrier();
    if constexpr (first) {
      packed = weights;
      for (int64_t i = 0; i < args.count; i++) {
        const View v(args.problems[i], packed);
        if (v.p.gemm.batch > 0) FirstLoop{v, own}.run(crew);
        packed += v.weight_bytes();
      }
    } else {
      DepthwiseLast<Config>::run(args, weights, own, crew);
    }
  }
  static void reduce(const tw_conv_args&, const tw_team*) {}

  // ---- channels-first ----

  struct FirstLoop {
    const View& v;
    char* own;  // tags of the kept lines, then the lines

    static constexpr int kVectors = 4;  // no more than 64 lanes

    TW_INLINE int64_t* tags() const { return (int64_t*)own; }
    TW_INLINE float* line_of(int64_t slot) const {
      return (float*)(own + 8 * v.kept()) + slot * v.step * v.line_part();
    }

    void run(Crew& crew) const {
      const Strips strips(v.h->rows, v.p.gemm.batch * v.d->rows, crew.size);
      const int64_t pieces = strips.pieces();
      for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
        const int64_t plane = piece / strips.per_plane(), begin = piece % strips.per_plane() * strips.length;
        for (int64_t x = 0; x < v.w->rows; x += v.segment()) {
          for (int64_t slot = 0; slot < v.kept(); slot++) tags()[slot] = -1;
          for (int64_t y = begin; y < min_of(begin + strips.length, strips.lines); y++)
            line(plane / v.d->rows, plane % v.d->rows, y, x);
        }
      }
      crew.end_stage(pieces);
    }

    void line(int64_t item, int64_t z, int64_t y, int64_t x) const {
      const int64_t group = item % v.p.groups, n = item / v.p.groups, span = max_of(v.span(), 1);
      const char* const image = (const char*)v.p.gemm.b + (n * v.p.image_n + group * v.p.image_g) * size_of<E>;
      for (int64_t l = 0; l < v.lines(); l++) {
        int64_t plane, row;
        if (!v.line_at(l, z, y, plane, row)) continue;
        const int64_t slot = l / v.h->taps * span + row % span;
        if (tags()[slot] != row)
          widen(image + (plane * v.d->image_stride + row * v.h->image_stride) * size_of<E>, x, line_of(slot));
        tags()[slot] = row;
      }
      const int64_t pixels = min_of(v.w->rows - x, v.segment());
      for (int64_t at = 0; at < pixels; at += kVectors * L)
        multiply(item, z, y, x, at, min_of(pixels - at, kVectors * L));
    }

    // One line of the image from pixel x's first tap on, as fp32.
    TW_NOINLINE void widen(const char* from, int64_t x, float* to) const {
      const int64_t reach = v.reach(v.segment()), begin = v.origin + x * v.step, part = v.line_part();
      for (int64_t i = 0; i < v.step * part; i++) to[i] = 0.0f;
      const int64_t low = max_of(-begin, 0), high = min_of(v.w->size - begin, reach);
      if (v.step == 1 && v.w->image_stride == 1) {
        for (int64_t i = low; i < high; i += L) {
          const f32v x16 = load_f32_partial<E>(from + (begin + i) * size_of<E>, high - i);
          if (high - i >= L) store_as(to + i, x16);
          else __builtin_memcpy(to + i, &x16, (size_t)(high - i) * 4);
        }
      } else {
        for (int64_t i = low; i < high; i++)
          to[i % v.step * part + i / v.step] = to_float<E>(from + (begin + i) * v.w->image_stride * size_of<E>);
      }
    }

    TW_NOINLINE void multiply(int64_t item, int64_t z, int64_t y, int64_t x, int64_t at, int64_t count) const {
      const int64_t group = item % v.p.groups, span = max_of(v.span(), 1), part = v.line_part();
      f32v sums[kVectors] = {};
      for (int64_t l = 0; l < v.lines(); l++) {
        int64_t plane, row;
        if (!v.line_at(l, z, y, plane, row)) continue;
        const float* const from = line_of(l / v.h->taps * span + row % span) + at;
        const float* const weights = (const float*)v.weights + l * v.w->taps * v.channels + group;
        for (int64_t t = 0; t < v.w->taps; t++) {
          const int64_t shift = t * v.tap_step;
          const float* const pixels = from + shift % v.step * part + shift / v.step;
          const f32v w = splat(weights[t * v.channels]);
          TW_UNROLL
          for (int i = 0; i < kVectors; i++) sums[i] += load_as<f32v>(pixels + i * L) * w;
        }
      }
      alignas(64) float kept[kVectors * L];
      TW_UNROLL
      for (int i = 0; i < kVectors; i++) store_as(kept + i * L, sums[i]);
      finish(item, ((z * v.h->rows) + y) * v.w->rows + x + at,
             z * v.d->row_stride + y * v.h->row_stride + (x + at) * v.w->row_stride, count, kept);
    }

    // Pixel `number` of an item and those after it, the first of which lies `offset` elements into the item's result.
    // Pixels that do not lie side by side go by way of a copy.
    TW_NOINLINE void finish(int64_t item, int64_t number, int64_t offset, int64_t count, const float* sums) const {
      alignas(64) char line[kVectors * L * size_of<C>], before[kVectors * L * size_of<C>];
      char* const to = result_of<Config>(v.p, item) + offset * size_of<C>;
      const int64_t distance = v.w->row_stride * size_of<C>;
      const char* const old = (const char*)v.p.acc + (to - (char*)v.p.gemm.c);
      const bool apart = v.w->row_stride != 1;
      if (Config::accumulate && apart)
        for (int64_t i = 0; i < count; i++)
          __builtin_memcpy(before + i * size_of<C>, old + i * distance, size_of<C>);
      LineOutput out;
      out.problem = &v.p.gemm, out.item = item, out.raw = false, out.ld = 0, out.operands_of = item % v.p.groups;
      out.data = (apart ? line : to) - number * size_of<C>;
      out.old = (apart ? before : old) - number * size_of<C>;
      Out::store(out, 0, number, 1, count, sums, 0, nullptr);
      if (apart)
        for (int64_t i = 0; i < count; i++) __builtin_memcpy(to + i * distance, line + i * size_of<C>, size_of<C>);
    }
  };
};

template <class Config>
using ConvKernel = DepthwiseConv<Config>;

TW_NAMESPACE_END
