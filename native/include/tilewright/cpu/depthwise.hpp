// Depthwise convolution and the gradient of its image: one channel per group, and so no product. What a unit exports:
// conv_entries.hpp.
//
// Channels-last, lanes run over channels. A tile is a few pixels of a line; a table of addresses says where each of the
// pixels that its taps meet lies (those outside the image: a line of zeros), and serves all channels. Channels-first,
// lanes run over the pixels of a line; the lines that the filter covers are widened to fp32 with zeros around them, one
// line for each remainder of a coordinate by the stride.
#pragma once
#include "tilewright/cpu/depthwise_view.hpp"
#include "tilewright/cpu/dot.hpp"

TW_NAMESPACE_BEGIN

#if defined(__AVX512BF16__) && TW_VECTOR_BYTES == 64
#define TW_PAIRS_OF_BF16 1
#else
#define TW_PAIRS_OF_BF16 0
#endif

template <class Config>
struct DepthwiseConv {
  using C = typename Config::C;
  using Dot = FloatSums<is_same<C, int32>>;
  using Rows = LineRows<Config>;
  using Out = Epilogue<Config, Dot, Rows>;
  using View = DepthwiseView<Config>;
  static constexpr int team = Config::wave_m * Config::wave_n, P = kTilePixels, L = kLanes;
  static constexpr bool first = Config::channels_first;
  static constexpr bool plain = Out::plain && !Config::accumulate;

  // The elements of the image and of the weights.
  template <bool kFirst, class Unused = void>
  struct Types {
    using image = typename Config::A;
    using weight = typename Config::B;
  };
  template <class Unused>
  struct Types<true, Unused> {
    using image = typename Config::B;
    using weight = typename Config::A;
  };
  using E = typename Types<first>::image;
  using W = typename Types<first>::weight;

  // Two lines of bf16 are multiplied at a time where the processor adds products of pairs.
  static constexpr bool pairs = !first && TW_PAIRS_OF_BF16 && is_same<E, bf16> && is_same<W, bf16>;
  template <bool kPairs, class Unused = void>
  struct Packed {
    using type = fp32;
  };
  template <class Unused>
  struct Packed<true, Unused> {
    using type = bf16;
  };
  using PackedWeight = typename Packed<pairs>::type;

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
      for (int64_t c = 0; c < v.channels; c += L) {
        alignas(64) char weights[L * size_of<W>] = {};
        for (int64_t i = 0; i < L && c + i < v.p.groups; i++)
          __builtin_memcpy(weights + i * size_of<W>, from + (offset + (c + i) * v.p.weight_g) * size_of<W>, size_of<W>);
        store_f32<PackedWeight>(to + (tap * v.channels + c) * size_of<PackedWeight>, load_f32<W>(weights));
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
    packed = weights;
    for (int64_t i = 0; i < args.count; i++) {
      const View v(args.problems[i], packed);
      if (v.p.gemm.batch > 0) {
        if constexpr (first) FirstLoop{v, own}.run(crew);
        else LastLoop{v, (const char**)own}.run(crew);
      }
      packed += v.weight_bytes();
    }
  }
  static void reduce(const tw_conv_args&, const tw_team*) {}

  // ---- channels-last ----

  struct LastLoop {
    const View& v;
    const char** table;  // for each line of taps: its weights, then the addresses of `reach` pixels

    void run(Crew& crew) const {
      const Strips strips(v.h->rows, v.p.images * v.d->rows, crew.size);
      const ChannelOperands<Config> operands(v.p, 1);
      const int64_t pieces = strips.pieces();
      for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
        const int64_t plane = piece / strips.per_plane(), begin = piece % strips.per_plane() * strips.length;
        for (int64_t y = begin; y < min_of(begin + strips.length, strips.lines); y++)
          line(operands.problem, plane / v.d->rows, plane % v.d->rows, y);
      }
      crew.end_stage(pieces);
    }

    void line(const tw_gemm_problem& operands, int64_t n, int64_t z, int64_t y) const {
      const int64_t number = ((n * v.d->rows + z) * v.h->rows + y) * v.w->rows;
      const int64_t offset = n * v.p.row_n + z * v.d->row_stride + y * v.h->row_stride;
      const bool three = v.w->taps == 3 && v.tap_step == 1;
      LineOutput out;
      out.problem = &operands, out.item = 0, out.raw = false, out.ld = v.w->row_stride, out.operands_of = 0;
      for (int64_t x = 0; x < v.w->rows; x += P) {
        out.data = (char*)v.p.gemm.c + (offset + x * v.w->row_stride) * size_of<C>;
        out.old = (const char*)v.p.acc + (out.data - (char*)v.p.gemm.c);
        for (int64_t c = 0; c < v.p.groups; c += kZeroChannels) {
          const Tile tile = {locate(n, z, y, x, c), v.reach(P), number + x, min_of(v.w->rows - x, P), c,
                             min_of(v.p.groups - c, kZeroChannels),
                             v.h->row_step * v.h->image_stride * size_of<E>};
          if (three && v.step == 1) multiply<3, 1>(tile, out);
          else if (three && v.step == 2) multiply<3, 2>(tile, out);
          else multiply<0, 0>(tile, out);
        }
      }
    }

    struct Tile {
      int64_t lines, reach;  // of the table
      int64_t number;        // of the first pixel
      int64_t pixels;        // that exist
      int64_t first, count;  // channels
      int64_t ahead;
    };

    // Fills the table with the lines of taps that meet the image.
    TW_NOINLINE int64_t locate(int64_t n, int64_t z, int64_t y, int64_t x, int64_t c) const {
      alignas(64) static char zeros[kZeroChannels * 4 + 64];
      const char* const image = (const char*)v.p.gemm.a + (n * v.p.image_n + c * v.p.image_g) * size_of<E>;
      const int64_t reach = v.reach(P), begin = v.origin + x * v.step;
      const char** to = table;
      for (int64_t line = 0; line < v.lines(); line++) {
        int64_t plane, row;
        if (!v.line_at(line, z, y, plane, row)) continue;
        *to++ = v.weights + (line * v.w->taps * v.channels + c) * size_of<PackedWeight>;
        const int64_t offset = plane * v.d->image_stride + row * v.h->image_stride + begin * v.w->image_stride;
        const char* pixel = image + offset * size_of<E>;
        const int64_t distance = v.w->image_stride * size_of<E>;
        if (begin >= 0 && begin + reach <= v.w->size) {
          for (int64_t i = 0; i < reach; i++, pixel += distance) *to++ = pixel;
        } else {
          for (int64_t at = begin; at < begin + reach; at++, pixel += distance)
            *to++ = at >= 0 && at < v.w->size ? pixel : zeros;
        }
      }
      return (to - table) / (reach + 1);
    }

    // kT taps that are neighbours and pixels kS apart, so that each pixel of the image is read once for all of its
    // taps; or any.
    template <int kT, int kS>
    TW_NOINLINE void multiply(const Tile& tile, const LineOutput& out) const {
      int64_t c = 0;
#if TW_PAIRS_OF_BF16
      if constexpr (pairs && kT > 0)
        for (; c + 2 * L <= tile.count; c += 2 * L) multiply_pairs<kT, kS>(tile, out, c);
#endif
      for (; c + L <= tile.count; c += L) multiply_lanes<kT, kS, true>(tile, out, c);
      if (c < tile.count) multiply_lanes<0, 0, false>(tile, out, c);
    }

    template <bool kWhole>
    static TW_INLINE f32v load(const char* pixel, int64_t c, int64_t count) {
      if constexpr (kWhole) return load_f32<E>(pixel + c * size_of<E>);
      else return load_f32_partial<E>(pixel + c * size_of<E>, count);
    }

    template <int kT, int kS, bool kWhole>
    TW_INLINE void multiply_lanes(const Tile& tile, const LineOutput& out, int64_t c) const {
      const int64_t count = tile.count - c;
      f32v sums[P];
      TW_UNROLL
      for (int p = 0; p < P; p++) sums[p] = f32v{};
      const char* const* line = table;
      for (int64_t l = 0; l < tile.lines; l++, line += tile.reach + 1) {
        const char* const weights = line[0] + c * size_of<PackedWeight>;
        const char* const* const pixels = line + 1;
        if constexpr (kT > 0) {
          f32v w[kT];
          TW_UNROLL
          for (int t = 0; t < kT; t++) w[t] = load_f32<PackedWeight>(weights + t * v.channels * size_of<PackedWeight>);
          TW_UNROLL
          for (int q = 0; q < (P - 1) * kS + kT; q++) {
            const f32v x = load<kWhole>(pixels[q], c, count);
            if (q < P * kS && l + 1 == tile.lines) __builtin_prefetch(pixels[q] + c * size_of<E> + tile.ahead, 0, 2);
            TW_UNROLL
            for (int t = 0; t < kT; t++)
              if (q >= t && (q - t) % kS == 0 && (q - t) / kS < P) sums[(q - t) / kS] += x * w[t];
          }
        } else {
          for (int64_t t = 0; t < v.w->taps; t++) {
            const f32v w = load_f32<PackedWeight>(weights + t * v.channels * size_of<PackedWeight>);
            TW_UNROLL
            for (int p = 0; p < P; p++) sums[p] += load<kWhole>(pixels[p * v.step + t * v.tap_step], c, count) * w;
          }
        }
      }
      finish<kWhole>(tile, out, c, sums);
    }

    template <bool kWhole>
    TW_INLINE void finish(const Tile& tile, const LineOutput& out, int64_t c, const f32v* sums) const {
      const int64_t j = tile.first + c;
      if constexpr (plain && kWhole) {
        const f32v alpha = splat((float)out.problem->alpha);
        TW_UNROLL
        for (int p = 0; p < P; p++)
          if (p < tile.pixels) store_f32<C>(out.data + (p * out.ld + j) * size_of<C>, sums[p] * alpha);
      } else {
        alignas(64) float kept[P * L];
        TW_UNROLL
        for (int p = 0; p < P; p++) store_as(kept + p * L, sums[p]);
        Out::store(out, tile.number, j, tile.pixels, min_of(tile.count - c, L), kept, L, nullptr);
      }
    }

#if TW_PAIRS_OF_BF16
    // Pairs of values of two lines, of every other four channels: kHigh of each eight the last four.
    template <bool kHigh, int... kI>
    static TW_INLINE u32v interleave(u16v a, u16v b, Sequence<kI...>) {
      return (u32v)__builtin_shufflevector(a, b, (kI / 8 * 8 + kHigh * 4 + kI % 8 / 2 + kI % 2 * 2 * L)...);
    }
    // Channels in their order again: kHalf * L and those after it.
    template <int kHalf, int... kI>
    static TW_INLINE f32v in_order(f32v low, f32v high, Sequence<kI...>) {
      return __builtin_shufflevector(low, high, (kHalf * L / 2 + kI / 8 * 4 + kI % 4 + kI / 4 % 2 * L)...);
    }

    // 2 L channels; lines of taps two by two, the last of an odd number with zeros.
    template <int kT, int kS>
    TW_INLINE void multiply_pairs(const Tile& tile, const LineOutput& out, int64_t c) const {
      constexpr auto both = typename MakeSequence<2 * L>::type{};
      constexpr auto one = typename MakeSequence<L>::type{};
      f32v low[P], high[P];
      TW_UNROLL
      for (int p = 0; p < P; p++) low[p] = high[p] = f32v{};
      const char* const* line = table;
      const int64_t next_tap = v.channels * 2, next_line = tile.reach + 1;
      for (int64_t l = 0; l < tile.lines; l += 2, line += 2 * next_line) {
        const bool two = l + 1 < tile.lines;
        u32v w[2 * kT];
        TW_UNROLL
        for (int t = 0; t < kT; t++) {
          const u16v a = load_as<u16v>(line[0] + c * 2 + t * next_tap);
          const u16v b = two ? load_as<u16v>(line[next_line] + c * 2 + t * next_tap) : u16v{};
          w[2 * t] = interleave<false>(a, b, both), w[2 * t + 1] = interleave<true>(a, b, both);
        }
        const char* const* const above = line + 1;
        const char* const* const below = above + next_line;
        TW_UNROLL
        for (int q = 0; q < (P - 1) * kS + kT; q++) {
          const u16v a = load_as<u16v>(above[q] + c * 2), b = two ? load_as<u16v>(below[q] + c * 2) : u16v{};
          if (q < P * kS && !two) __builtin_prefetch(above[q] + c * 2 + tile.ahead, 0, 2);
          const u32v x_low = interleave<false>(a, b, both), x_high = interleave<true>(a, b, both);
          TW_UNROLL
          for (int t = 0; t < kT; t++)
            if (q >= t && (q - t) % kS == 0 && (q - t) / kS < P) {
              low[(q - t) / kS] = DotBf16::step(low[(q - t) / kS], x_low, w[2 * t]);
              high[(q - t) / kS] = DotBf16::step(high[(q - t) / kS], x_high, w[2 * t + 1]);
            }
        }
      }
      f32v sums[P];
      TW_UNROLL
      for (int p = 0; p < P; p++) sums[p] = in_order<0>(low[p], high[p], one);
      finish<true>(tile, out, c, sums);
      TW_UNROLL
      for (int p = 0; p < P; p++) sums[p] = in_order<1>(low[p], high[p], one);
      finish<true>(tile, out, c + L, sums);
    }
#endif
  };

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
