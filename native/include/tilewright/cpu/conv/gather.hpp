// Operands of the implicit product: the image, of which every row of the product gathers what its taps meet, and the
// weights. They are packed into the panels of cpu/blocks/pack.hpp, tap by tap, and no image is ever unrolled in memory.
//
// k runs over taps and, within a tap, over channels; the channels of one tap are filled up to whole groups (see
// cpu/blocks/dot.hpp) with zeros, in both operands. A tap may also be a whole line of the filter ("folded"): with few
// channels its taps are neighbours in memory, and make one longer run.
#pragma once
#include "tilewright/cpu/blocks/blocked.hpp"
#include "tilewright/cpu/conv/output.hpp"
#include "tilewright/cpu/blocks/blocked_summation.hpp"

TW_NAMESPACE_BEGIN

constexpr int64_t kFoldedChannels = 16;  // folding pays up to here

// The product of one item.
struct ConvProduct : ProductOf<ConvOutput> {
  const tw_conv_problem* conv;
  const char* image;
  const char* weights;
  int64_t taps[3], run, padded;  // of a folded filter taps[2] is 1; values of k per tap, and with zeros
  bool folded, flat_weights;     // flat: the weights of a column lie one after the other for all k
  int64_t chain;                 // groups of k that are summed at a time (cpu/blocks/blocked_summation.hpp)
  int64_t tap_offsets[64];       // in place: elements from what the first tap meets to what each meets

  TW_INLINE int64_t tap_count() const { return taps[0] * taps[1] * taps[2]; }
};

// One position of the filter.
struct Tap {
  int64_t at[3];
  static TW_INLINE Tap of(const ConvProduct& product, int64_t index) {
    Tap tap;
    for (int axis = 2; axis >= 0; axis--) tap.at[axis] = index % product.taps[axis], index /= product.taps[axis];
    return tap;
  }
  // Elements from the first tap's weights to this tap's, and from what the first tap meets to what this tap meets.
  TW_INLINE int64_t weight(const tw_conv_axis* axes) const {
    return at[0] * axes[0].tap_stride + at[1] * axes[1].tap_stride + at[2] * axes[2].tap_stride;
  }
  TW_INLINE int64_t image(const tw_conv_axis* axes) const {
    return at[0] * axes[0].tap_step * axes[0].image_stride + at[1] * axes[1].tap_step * axes[1].image_stride +
           at[2] * axes[2].tap_step * axes[2].image_stride;
  }
};

// k with the zeros of every tap, not folded.
TW_INLINE int64_t padded_k(const tw_conv_problem& problem, int depth) {
  return problem.axes[0].taps * problem.axes[1].taps * problem.axes[2].taps * round_up(problem.channels, depth);
}

// `others`: channels of the result.
TW_INLINE void describe_taps(ConvProduct& product, int64_t others, int depth, bool may_fold) {
  const tw_conv_problem& p = *product.conv;
  const tw_conv_axis& w = p.axes[2];
  product.folded = may_fold && w.taps > 1 && w.tap_step == 1 && p.channels <= kFoldedChannels && p.image_c == 1 &&
                   w.image_stride == p.channels && w.tap_stride == p.channels * p.weight_c;
  for (int axis = 0; axis < 3; axis++) product.taps[axis] = p.axes[axis].taps;
  product.run = product.folded ? w.taps * p.channels : p.channels;
  if (product.folded) product.taps[2] = 1;
  product.padded = round_up(product.run, depth);
  product.k = product.tap_count() * product.padded;
  bool flat = p.weight_c == 1 && product.padded == product.run;
  int64_t step = p.channels;
  for (int axis = 2; axis >= 0; axis--) {
    flat = flat && (p.axes[axis].taps <= 1 || p.axes[axis].tap_stride == step);
    step *= p.axes[axis].taps;
  }
  product.flat_weights = flat;
  const int64_t groups = product.k / depth;
  product.chain = chain_of(p, others, groups, kUsualChain);
}

// Origin of one row of the product: the coordinates of its first tap, and the offset of that element (which need not
// exist).
struct Gathered {
  int64_t offset, at[3];

  TW_INLINE bool inside(const tw_conv_axis* axes, int axis, int64_t tap) const {
    const int64_t coordinate = at[axis] + tap * axes[axis].tap_step;
    return coordinate >= 0 && coordinate < axes[axis].size;
  }
  // True if all taps meet the image: coordinates run from the first tap to the last without turning.
  TW_INLINE bool interior(const tw_conv_axis* axes) const {
    bool all = true;
    for (int axis = 0; axis < 3; axis++)
      all = all && inside(axes, axis, 0) && inside(axes, axis, axes[axis].taps - 1);
    return all;
  }
};

// The rows [first, first + count) of a product; `distance` elements from one to the next if `uniform`.
template <int kMost>
struct GatheredRows {
  Gathered rows[kMost];
  int64_t count, distance;
  bool interior, uniform;

  TW_INLINE GatheredRows(const ConvProduct& product, int64_t first, int64_t wanted) {
    const tw_conv_axis* const axes = product.conv->axes;
    Pixel pixel = Pixel::of(axes, first);
    count = min_of(wanted, kMost), distance = 0, interior = true, uniform = true;
    for (int64_t i = 0; i < count; i++, pixel.advance(axes)) {
      Gathered& row = rows[i];
      row.offset = pixel.n * product.conv->image_n;
      for (int axis = 0; axis < 3; axis++) {
        row.at[axis] = axes[axis].origin + pixel.at[axis] * axes[axis].row_step;
        row.offset += row.at[axis] * axes[axis].image_stride;
      }
      interior = interior && row.interior(axes);
      if (i == 1) distance = row.offset - rows[0].offset;
      if (i > 1) uniform = uniform && row.offset - rows[i - 1].offset == distance;
    }
  }
};

// Calls f(tap, first value, values with zeros, values that exist) for every stretch of k within one tap.
template <class F>
TW_INLINE void each_stretch(const ConvProduct& product, int64_t k, int64_t count, F f) {
  int64_t index = k / product.padded, begin = k % product.padded;
  while (count > 0) {
    const int64_t size = min_of(product.padded - begin, count);
    f(Tap::of(product, index), begin, size, max_of(min_of(product.run - begin, size), 0));
    index++, begin = 0, count -= size;
  }
}

// One panel from elements that lie anywhere: element (r, k) at from[r*row + k*step].
template <class E, class Dot, int kR, bool kOffset>
TW_NOINLINE void pack_scattered(const char* from, int64_t row, int64_t step, int64_t count, int64_t k, uint32_t* to,
                                int32_t* sums) {
  constexpr int kStretch = kLanes * Dot::depth;
  for (int64_t r = 0; r < kR; r++)
    for (int64_t k0 = 0; k0 < k; k0 += kStretch) {
      alignas(64) char line[kStretch * size_of<E>] = {};
      const int64_t here = min_of(k - k0, kStretch);
      for (int64_t i = 0; r < count && i < here; i++)
        __builtin_memcpy(line + i * size_of<E>, from + (r * row + (k0 + i) * step) * size_of<E>, size_of<E>);
      u32v groups = load_groups_along_k<E, Dot>(line);
      if constexpr (kOffset) groups ^= 0x80808080u;
      if constexpr (Dot::offset_a && !kOffset)
        sums[r] -= sum_lanes(Dot::step(i32v{}, splat_bits(0x01010101u), groups)) << 7;
      uint32_t lanes[kLanes];
      store_as(lanes, groups);
      for (int64_t g = 0; g * Dot::depth < here; g++) to[(k0 / Dot::depth + g) * kR + r] = lanes[g];
    }
}

// The sources of forward and backward data. The image is A, its pixels rows, and lies along k; or, channels-first, it
// is B, its pixels columns, and k lies across them.
template <class Config>
struct ImageSources {
  using Product = ConvProduct;
  using RowMap = ConvRows<Config>;
  using Plan = Blocking<Config, RowMap>;
  using Dot = typename Plan::Dot;
  using A = typename Config::A;
  using B = typename Config::B;
  static constexpr bool image_is_b = Config::channels_first, a_in_place = false;
  static constexpr bool blocked_summation = is_same<A, fp32>;
  static constexpr int depth = Dot::depth;
  static constexpr int together_a = image_is_b ? panels_together<A, Plan::mr, !Config::a_col> : 1;
  static constexpr int together_b = image_is_b ? 1 : panels_together<B, Plan::nr, Config::b_col>;

  template <bool kIsB>
  static TW_INLINE void pack(const ConvProduct& product, int64_t first, int64_t end, int64_t k_begin, int64_t k_count,
                             uint32_t* to, int64_t panel, int32_t* sums) {
    const int64_t k = product.k0 + k_begin, count = end - first;
    if constexpr (kIsB && image_is_b) pack_image_lines(product, first, count, k, k_count, to, sums);
    else if constexpr (kIsB)
      pack_weights<B, Plan::nr, Config::b_col, false, together_b>(product, first, count, k, k_count, to, panel, sums);
    else if constexpr (image_is_b)
      pack_weights<A, Plan::mr, !Config::a_col, Dot::offset_a, together_a>(product, first, count, k, k_count, to, panel,
                                                                           nullptr);
    else pack_image_rows(product, first, count, k, k_count, to);
  }

  template <class E, int kR, bool kAlongK, bool kOffset, int kPanels>
  static TW_NOINLINE void pack_weights(const ConvProduct& product, int64_t first, int64_t count, int64_t k,
                                       int64_t k_count, uint32_t* to, int64_t panel, int32_t* sums) {
    const tw_conv_problem& p = *product.conv;
    const char* const weights = product.weights + first * p.weight_n * size_of<E>;
    const int64_t ld = kAlongK ? p.weight_n : p.weight_c;
    const bool fast = (kAlongK ? p.weight_c : p.weight_n) == 1;
    if (kAlongK && product.flat_weights)
      return pack_panels<E, Dot, kR, kAlongK, kOffset, kPanels>({weights + k * size_of<E>, ld}, count, k_count, to,
                                                                panel, sums);
    each_stretch(product, k, k_count, [&](const Tap& tap, int64_t begin, int64_t size, int64_t exist) {
      const char* const from = weights + (tap.weight(p.axes) + begin * p.weight_c) * size_of<E>;
      if (fast) pack_panels<E, Dot, kR, kAlongK, kOffset, kPanels>({from, ld}, count, exist, to, panel, sums);
      else
        for (int64_t i = 0; i < kPanels && i * kR < count; i++)
          pack_scattered<E, Dot, kR, kOffset>(from + i * kR * p.weight_n * size_of<E>, p.weight_n, p.weight_c,
                                              count - i * kR, exist, to + i * panel, sums + i * kR);
      to += size / depth * kR;
    });
  }

  // Pixels as rows of A, channels contiguous.
  static TW_NOINLINE void pack_image_rows(const ConvProduct& product, int64_t first, int64_t count, int64_t k,
                                          int64_t k_count, uint32_t* to) {
    constexpr int kR = Plan::mr, kChunk = kLanes * depth * 2;
    const tw_conv_axis* const axes = product.conv->axes;
    const GatheredRows<kR> gathered(product, first, count);
    each_stretch(product, k, k_count, [&](const Tap& tap, int64_t begin, int64_t size, int64_t exist) {
      const int64_t offset = tap.image(axes) + begin;
      if (gathered.uniform && gathered.interior) {
        pack_panels<A, Dot, kR, true, Dot::offset_a>(
            {product.image + (gathered.rows[0].offset + offset) * size_of<A>, gathered.distance}, gathered.count, exist,
            to, 0, nullptr);
      } else {
        for (int64_t at = 0; at < exist; at += kChunk) {
          const int64_t here = min_of(exist - at, kChunk);
          alignas(64) char copy[kR * kChunk * size_of<A>];
          for (int i = 0; i < kR; i++)
            copy_row(product, gathered, i, tap, begin + at, here, copy + i * kChunk * size_of<A>,
                     kChunk * size_of<A>);
          pack_panels<A, Dot, kR, true, Dot::offset_a>({copy, kChunk}, kR, here, to + at / depth * kR, 0, nullptr);
        }
      }
      to += size / depth * kR;
    });
  }

  // Values [begin, begin + count) of what one tap of row i meets, zeros where that is nothing.
  static TW_INLINE void copy_row(const ConvProduct& product, const GatheredRows<Plan::mr>& gathered, int64_t i,
                                 const Tap& tap, int64_t begin, int64_t count, char* to, int64_t line_bytes) {
    const tw_conv_axis* const axes = product.conv->axes;
    __builtin_memset(to, 0, (size_t)line_bytes);
    if (i >= gathered.count) return;
    const Gathered& row = gathered.rows[i];
    if (!row.inside(axes, 0, tap.at[0]) || !row.inside(axes, 1, tap.at[1])) return;
    int64_t low = begin, high = begin + count;
    if (product.folded) {
      const int64_t channels = product.conv->channels;
      low = max_of(low, -row.at[2] * channels), high = min_of(high, (axes[2].size - row.at[2]) * channels);
    } else if (!row.inside(axes, 2, tap.at[2])) {
      return;
    }
    if (low < high)
      __builtin_memcpy(to + (low - begin) * size_of<A>,
                       product.image + (row.offset + tap.image(axes) + low) * size_of<A>,
                       (size_t)(high - low) * size_of<A>);
  }

  // Pixels as columns of B, in lines of which k counts the channels.
  static TW_NOINLINE void pack_image_lines(const ConvProduct& product, int64_t first, int64_t count, int64_t k,
                                           int64_t k_count, uint32_t* to, int32_t* sums) {
    constexpr int kR = Plan::nr, kLines = 8 * depth;
    const tw_conv_axis* const axes = product.conv->axes;
    const int64_t channel = product.conv->image_c;
    const GatheredRows<kR> gathered(product, first, count);
    each_stretch(product, k, k_count, [&](const Tap& tap, int64_t begin, int64_t size, int64_t exist) {
      const char* const from = product.image + (tap.image(axes) + begin * channel) * size_of<B>;
      if (gathered.uniform && gathered.interior && (gathered.distance == 1 || gathered.count == 1)) {
        pack_panels<B, Dot, kR, false, false>({from + gathered.rows[0].offset * size_of<B>, channel}, gathered.count,
                                              exist, to, 0, sums);
      } else {
        for (int64_t at = 0; at < exist; at += kLines) {
          const int64_t lines = min_of(exist - at, kLines);
          alignas(64) char copy[kLines * kR * size_of<B>] = {};
          copy_lines(gathered, axes, tap, from + at * channel * size_of<B>, channel, lines, copy);
          pack_panels<B, Dot, kR, false, false>({copy, kR}, kR, lines, to + at / depth * kR, 0, sums);
        }
      }
      to += size / depth * kR;
    });
  }

  // Pixels that lie side by side are copied together.
  static TW_INLINE void copy_lines(const GatheredRows<Plan::nr>& gathered, const tw_conv_axis* axes, const Tap& tap,
                                   const char* from, int64_t channel, int64_t lines, char* to) {
    for (int64_t i = 0, end; i < gathered.count; i = end) {
      end = i + 1;
      const auto inside = [&](int64_t row) {
        const Gathered& at = gathered.rows[row];
        return at.inside(axes, 0, tap.at[0]) && at.inside(axes, 1, tap.at[1]) && at.inside(axes, 2, tap.at[2]);
      };
      if (!inside(i)) continue;
      while (end < gathered.count && gathered.rows[end].offset == gathered.rows[end - 1].offset + 1 && inside(end))
        end++;
      for (int64_t line = 0; line < lines; line++)
        __builtin_memcpy(to + (line * Plan::nr + i) * size_of<B>,
                         from + (gathered.rows[i].offset + line * channel) * size_of<B>,
                         (size_t)(end - i) * size_of<B>);
    }
  }
};

TW_NAMESPACE_END
