// How a convolution without a product is cut into blocks of lanes, what of the image is kept, and the scratch memory
// that this takes (cpu/conv/direct/conv.hpp). The Python mirror of the formula is
// tilewright_grouped_conv/footprint/direct.py.
//
// Workspace, in bytes, every part a multiple of 64, maxima over problems:
//     weights                 4 * sum over problems of taps * words * groups * round_up(n, lanes)
//     then for each member:   8 * kept rounded up to 64, and kept * round_up(reach * pixel, 64)
// with words = ceil(channels / depth), depth 2 for bf16 and 8 bits, else 1; lanes = 4 * L, 2 * L or L for n from 4 * L,
// from 2 * L, and below; kept = taps along D times the lines that H's taps span; reach = (pixels - 1) * row step of W +
// (taps - 1) * |tap_step| + 1, pixels = min(rows, kDirectPixels) + 14; pixel = 4 * L where two groups fit into a
// vector, that is max(n, words) <= L / 2, else channels * 4 / depth.
#pragma once
#include "tilewright/cpu/conv/direct/lines.hpp"
#include "tilewright/cpu/blocks/pack.hpp"

TW_NAMESPACE_BEGIN

constexpr int64_t kDirectPixels = 252;  // pixels of a line at a time: a multiple of every tile

// Lane i becomes x[index[i]].
TW_INLINE u32v pick_lanes(u32v x, i32v index) {
#if !defined(__clang__)
  return __builtin_shuffle(x, (u32v)index);
#elif TW_VECTOR_BYTES == 64
  return (u32v)__builtin_ia32_permvarsi512((i32v)x, index);
#elif TW_VECTOR_BYTES == 32 && defined(__x86_64__)
  return (u32v)__builtin_ia32_permvarsi256((i32v)x, index);
#else
  u32v y = {};
  for (int i = 0; i < kLanes; i++) y[i] = x[index[i]];
  return y;
#endif
}

// Type in which elements are kept: fp32, or 16 bits of which two make a group.
template <class A, class B>
struct KeptFor {
  static constexpr bool integers = is_same<A, int8>;
  static constexpr bool narrow_a = is_same<A, bf16> || size_of<A> == 1, narrow_b = is_same<B, bf16> || size_of<B> == 1;
  static constexpr bool pairs = integers || (narrow_a && narrow_b);
  static constexpr int depth = pairs ? 2 : 1, bytes = 4 / depth;
  using Dot = typename DotFor<A, B, depth>::type;

  // L elements as kept ones.
  template <class E>
  static TW_INLINE void store(void* to, f32v x) {
    if constexpr (integers) store_low_u16(to, (u32v)round_to_i32(x));
    else if constexpr (pairs) store_low_u16(to, (u32v)x >> 16);  // exact: they are bf16 or less
    else store_as(to, x);
  }
  // `count` elements from E to kept ones, side by side.
  template <class E>
  static TW_INLINE void copy(const char* from, char* to, int64_t count) {
    if constexpr (size_of<E> == bytes && (is_same<E, bf16> || is_same<E, fp32>)) {
      __builtin_memcpy(to, from, (size_t)count * bytes);
    } else {
      for (int64_t i = 0; i < count; i += kLanes) {
        alignas(64) char kept[kVectorBytes];
        store<E>(kept, load_f32_partial<E>(from + i * size_of<E>, count - i));
        __builtin_memcpy(to + i * bytes, kept, (size_t)min_of(count - i, kLanes) * bytes);
      }
    }
  }
};

// One problem as the loops see it: along W coordinates rise from tap to tap, be it that taps are counted backwards.
template <class Config>
struct DirectView {
  static constexpr int L = kLanes, depth = KeptFor<typename Config::A, typename Config::B>::depth,
                       bytes = KeptFor<typename Config::A, typename Config::B>::bytes;

  const tw_conv_problem& p;
  const tw_conv_axis *d, *h, *w;
  int64_t n, words;                // channels of the result, and groups of gathered ones, of one group
  int64_t together, vectors;       // groups of a block (1: parts of one), vectors of a block
  int64_t blocks, lanes, pixel;    // bytes of a pixel that are kept
  int64_t most_pixel;              // and what they may be for other operands
  int64_t step, tap_step, origin;  // along W
  int64_t runs, run_words, rest;   // of a line of taps; values that its last group has too few
  uint32_t* weights;               // [block][line of taps][run][word][lane]

  TW_NOINLINE DirectView(const tw_conv_problem& problem, uint32_t* packed)
      : p(problem), d(problem.axes), h(problem.axes + 1), w(problem.axes + 2), weights(packed) {
    n = p.gemm.n, words = ceil_div(p.channels, depth);
    together = L / max_of(max_of(n, words), 1);
    most_pixel = together > 1 ? L * 4 : p.channels * bytes;
    if (together < 2 || !ChannelOperands<Config>::suits(p, n)) together = 1;
    vectors = together > 1 || n < 2 * L ? 1 : n < 4 * L ? 2 : 4;
    lanes = vectors * L;
    blocks = together > 1 ? ceil_div(p.groups, together) : p.groups * ceil_div(n, lanes);
    pixel = together > 1 ? L * 4 : p.channels * bytes;
    const int64_t last = max_of(w->taps - 1, 0);
    step = w->row_step, tap_step = w->tap_step < 0 ? -w->tap_step : w->tap_step;
    origin = w->origin + (w->tap_step < 0 ? last * w->tap_step : 0);
    const bool one_run = together == 1 && tap_step == 1;
    const int64_t run = (one_run ? w->taps : 1) * p.channels;
    runs = one_run ? 1 : w->taps, run_words = ceil_div(run, depth), rest = run_words * depth - run;
  }
  TW_INLINE int64_t taps() const { return d->taps * h->taps * w->taps; }
  TW_INLINE int64_t lines() const { return w->taps > 0 ? d->taps * h->taps : 0; }
  TW_INLINE int64_t span() const {  // lines of H from the first tap's to the last's
    return h->taps > 0 ? (h->taps - 1) * (h->tap_step < 0 ? -h->tap_step : h->tap_step) + 1 : 0;
  }
  TW_INLINE int64_t kept() const { return lines() > 0 ? d->taps * span() : 0; }
  TW_INLINE int64_t segment() const { return max_of(min_of(w->rows, kDirectPixels), 1); }
  TW_INLINE int64_t reach(int64_t pixels) const {
    return (pixels - 1) * step + max_of(w->taps - 1, 0) * tap_step + 1;
  }
  TW_INLINE int64_t line_bytes() const { return round_up(reach(segment() + 14) * most_pixel, 64); }
  TW_INLINE int64_t member_bytes() const { return round_up(8 * kept(), 64) + kept() * line_bytes(); }
  TW_INLINE int64_t line_words() const { return runs * run_words; }
  TW_INLINE int64_t block_words() const { return lines() * line_words() * lanes; }
  // The line of the image that a line of taps meets for a pixel at (d, h); false if it lies outside of the image.
  TW_INLINE bool line_at(int64_t line, int64_t at_d, int64_t at_h, int64_t& plane, int64_t& row) const {
    plane = d->origin + at_d * d->row_step + line / h->taps * d->tap_step;
    row = h->origin + at_h * h->row_step + line % h->taps * h->tap_step;
    return plane >= 0 && plane < d->size && row >= 0 && row < h->size;
  }
  // First group, and first channel within it, of a block; and the channels that exist.
  TW_INLINE int64_t group_of(int64_t block) const {
    return together > 1 ? block * together : block / ceil_div(n, lanes);
  }
  TW_INLINE int64_t channel_of(int64_t block) const {
    return together > 1 ? 0 : block % ceil_div(n, lanes) * lanes;
  }
  TW_INLINE int64_t count_of(int64_t block) const {
    return together > 1 ? min_of(p.groups - block * together, together) * n : min_of(n - channel_of(block), lanes);
  }
};

TW_NAMESPACE_END
