// Lines of the image that a depthwise convolution keeps, and the scratch memory that they take
// (cpu/conv/depthwise/depthwise.hpp). The Python mirror of the formula is tilewright_grouped_conv/footprint/cpu.py.
//
// Workspace, in bytes, every part a multiple of 64, maxima over problems:
//     weights                  4 * sum over problems of taps * round_up(batch, 16)
//     then for each member:    channels-last 48 * lines;
//                              channels-first 4 * kept * (step * (ceil(reach / step) + 64) + 2)
// with lines = taps along D and H, kept = taps along D times the lines that H's taps span, step = the row step of W,
// reach = (pixels - 1) * step + (taps - 1) * |tap_step| + 1 along W, pixels = min(rows, kLinePixels).
#pragma once
#include "tilewright/cpu/conv/direct/lines.hpp"

TW_NAMESPACE_BEGIN

constexpr int kTilePixels = 7;            // divides the widths that networks have
constexpr int64_t kLinePixels = 1024;     // channels-first: pixels of a line at a time
constexpr int64_t kTileChannels = 1024;   // channels-last: channels of a tile at a time
constexpr int64_t kLineTableBytes = 48;   // channels-last: of one line of taps, for all lines of a tile

// One problem as the loops see it: along W coordinates rise from tap to tap, be it that taps are counted backwards.
template <class Config>
struct DepthwiseView {
  static constexpr bool first = Config::channels_first;

  const tw_conv_problem& p;
  const tw_conv_axis *d, *h, *w;
  int64_t step, tap_step, origin;  // along W
  const char* weights;             // [tap][round_up(groups, 16)] of PackedWeight
  int64_t channels;                // from tap to tap

  TW_INLINE DepthwiseView(const tw_conv_problem& problem, const char* packed)
      : p(problem), d(problem.axes), h(problem.axes + 1), w(problem.axes + 2), weights(packed) {
    const int64_t last = w->taps > 0 ? w->taps - 1 : 0;
    step = w->row_step, tap_step = w->tap_step < 0 ? -w->tap_step : w->tap_step;
    origin = w->origin + (w->tap_step < 0 ? last * w->tap_step : 0);
    channels = round_up(p.groups, 16);
  }
  TW_INLINE int64_t taps() const { return d->taps * h->taps * w->taps; }
  TW_INLINE int64_t lines() const { return d->taps * h->taps; }
  TW_INLINE int64_t span() const {  // lines of H from the first tap's to the last's
    return h->taps > 0 ? (h->taps - 1) * (h->tap_step < 0 ? -h->tap_step : h->tap_step) + 1 : 0;
  }
  TW_INLINE int64_t kept() const { return d->taps * span(); }
  TW_INLINE int64_t reach(int64_t pixels) const {
    return (pixels - 1) * step + (w->taps > 0 ? w->taps - 1 : 0) * tap_step + 1;
  }
  TW_INLINE int64_t segment() const { return max_of(min_of(w->rows, kLinePixels), 1); }
  TW_INLINE int64_t line_part() const { return ceil_div(reach(segment()), step) + 64; }
  TW_INLINE int64_t member_bytes() const {
    return round_up(first ? 4 * kept() * (step * line_part() + 2) : kLineTableBytes * lines(), 64);
  }
  TW_INLINE int64_t weight_bytes() const { return 4 * taps() * round_up(max_of(p.gemm.batch, 0), 16); }
  // The line of the image that a line of taps meets for a pixel at (d, h); false if it lies outside of the image.
  TW_INLINE bool line_at(int64_t line, int64_t at_d, int64_t at_h, int64_t& plane, int64_t& row) const {
    plane = d->origin + at_d * d->row_step + line / h->taps * d->tap_step;
    row = h->origin + at_h * h->row_step + line % h->taps * h->tap_step;
    return plane >= 0 && plane < d->size && row >= 0 && row < h->size;
  }
};

TW_NAMESPACE_END
