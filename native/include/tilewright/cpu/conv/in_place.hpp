// The image read where it lies: with channels last, the values that a tap meets are groups already, if an element of
// the image is a whole group or the channels fill groups. The microkernel then follows one pointer per row, tap by tap,
// and nothing of the image is packed. Rows that a tap leads outside the image point to zeros.
#pragma once
#include "tilewright/cpu/conv/gather.hpp"

TW_NAMESPACE_BEGIN

constexpr int64_t kMostTaps = 64;  // one bit each

// Rows of one register tile: where their first taps lie (which need not be inside), and which taps are.
template <int kMR>
struct LocatedRows {
  int64_t offset[kMR];
  uint64_t taps[kMR];
};

template <class Config>
struct LocatedSources : ImageSources<Config> {
  using Base = ImageSources<Config>;
  using Dot = typename Base::Dot;
  using Accumulator = typename Dot::scalar;
  static constexpr int mr = Base::Plan::mr, nr = Base::Plan::nr, depth = Dot::depth;
  static constexpr int bytes = size_of<typename Config::A>;
  static constexpr bool a_in_place = true;
  static constexpr int64_t located_panel = sizeof(LocatedRows<mr>), zero_bytes = 4096;
  // Values of the image are read as groups, packed weights as B, and the rows' places fit where a slab would be packed.
  static constexpr bool possible = !Base::image_is_b && bytes * depth == 4 && Base::Plan::shares_b;

  // With fewer groups in a tap, following pointers costs more than packing.
  static constexpr int64_t fewest_groups = 4;

  static bool suits(const ConvProduct& product) {
    const tw_conv_problem& p = *product.conv;
    const int64_t groups = (product.k1 - product.k0) / depth;
    return p.channels % depth == 0 && p.channels / depth >= fewest_groups && p.image_c == 1 &&
           product.tap_count() <= kMostTaps && min_of(groups, Base::Plan::block_groups) * 4 * mr >= located_panel;
  }

  static TW_NOINLINE void prepare(ConvProduct& product) {
    for (int64_t tap = 0; tap < product.tap_count(); tap++)
      product.tap_offsets[tap] = Tap::of(product, tap).image(product.conv->axes);
  }

  // Bit t: tap t of one axis meets the image from this coordinate on.
  static TW_INLINE uint64_t taps_inside(const tw_conv_axis& axis, int64_t coordinate) {
    uint64_t inside = 0;
    for (int64_t tap = 0; tap < axis.taps; tap++, coordinate += axis.tap_step)
      inside |= (uint64_t)(coordinate >= 0 && coordinate < axis.size) << tap;
    return inside;
  }

  // The rows [begin, end) as LocatedRows, the last of them filled up with rows that meet nothing.
  static TW_NOINLINE void locate(const ConvProduct& product, int64_t begin, int64_t end, char* to) {
    const tw_conv_problem& p = *product.conv;
    const tw_conv_axis* const axes = p.axes;
    const tw_conv_axis& w = axes[2];
    const uint64_t everywhere = w.taps >= 64 ? ~(uint64_t)0 : ((uint64_t)1 << w.taps) - 1;
    const int64_t reach = (w.taps - 1) * w.tap_step, low = reach < 0 ? reach : 0, high = reach > 0 ? reach : 0;
    LocatedRows<mr>* panel = (LocatedRows<mr>*)to;
    Pixel pixel = Pixel::of(axes, begin);
    int64_t r = 0;
    while (begin < end) {
      // One line of pixels.
      const int64_t d = axes[0].origin + pixel.at[0] * axes[0].row_step;
      const int64_t h = axes[1].origin + pixel.at[1] * axes[1].row_step;
      const uint64_t d_inside = taps_inside(axes[0], d), h_inside = taps_inside(axes[1], h);
      uint64_t lines = 0;  // bit of tap (td, th, 0)
      for (int64_t td = 0; td < axes[0].taps; td++)
        for (int64_t th = 0; th < axes[1].taps; th++)
          lines |= (d_inside >> td & h_inside >> th & 1) << ((td * axes[1].taps + th) * w.taps);
      int64_t x = w.origin + pixel.at[2] * w.row_step;
      int64_t offset = pixel.n * p.image_n + d * axes[0].image_stride + h * axes[1].image_stride + x * w.image_stride;
      const int64_t count = min_of(w.rows - pixel.at[2], end - begin);
      for (int64_t i = 0; i < count; i++) {
        const bool interior = x + low >= 0 && x + high < w.size;
        panel->offset[r] = offset;
        panel->taps[r] = lines * (interior ? everywhere : taps_inside(w, x));
        if (++r == mr) r = 0, panel++;
        x += w.row_step, offset += w.row_step * w.image_stride;
      }
      begin += count;
      pixel.at[2] = w.rows - 1;
      pixel.advance(axes);
    }
    for (; r > 0 && r < mr; r++) panel->offset[r] = 0, panel->taps[r] = 0;
  }

  // As microkernel, A being rows of the image. Of fp32, chains are added to one another at `out`
  // (cpu/blocks/blocked_summation.hpp).
  static TW_NOINLINE void multiply(const ConvProduct& product, int64_t group, int64_t groups, const uint32_t* a,
                                   const uint32_t* b, const Accumulator* start, int64_t start_ld, Accumulator* out,
                                   int64_t out_ld, const char* ahead, int64_t ahead_step) {
    using V = typename Dot::accumulator;
    constexpr int kNV = nr / kLanes;
    alignas(64) static char zeros[zero_bytes];
    const LocatedRows<mr>& rows = *(const LocatedRows<mr>*)a;
    const char* const image = product.image;
    const int64_t tap_groups = product.padded / depth, first = product.k0 / depth + group;
    int64_t tap = first / tap_groups, at = first % tap_groups;
    const Accumulator* const fetched = start_ld ? start : out;
    const int64_t fetched_ld = start_ld ? start_ld : out_ld;
    TW_UNROLL
    for (int i = 0; i < mr; i++)
      TW_UNROLL
      for (int v = 0; v < kNV; v++) __builtin_prefetch(fetched + i * fetched_ld + v * kLanes, 1, 3);
    do {
      V c[mr][kNV];
      TW_UNROLL
      for (int i = 0; i < mr; i++)
        TW_UNROLL
        for (int v = 0; v < kNV; v++) c[i][v] = V{};
      int64_t left = Base::blocked_summation ? min_of(groups, product.chain) : groups;
      groups -= left;
      while (left > 0) {
        const int64_t now = min_of(min_of(tap_groups - at, left), zero_bytes / 4);
        const int64_t shift = product.tap_offsets[tap] + at * depth;
        const char* row[mr];
        TW_UNROLL
        for (int i = 0; i < mr; i++)
          row[i] = rows.taps[i] >> tap & 1 ? image + (rows.offset[i] + shift) * bytes : zeros;
        TW_UNROLL_BY_2
        for (int64_t s = 0; s < now; s++) {
          u32v line[kNV];
          __builtin_prefetch(ahead, 0, 2);
          ahead += ahead_step;
          TW_UNROLL
          for (int v = 0; v < kNV; v++) line[v] = load_as<u32v>(b + v * kLanes);
          TW_UNROLL
          for (int i = 0; i < mr; i++) {
            u32v spread = splat_bits(load_as<uint32_t>(row[i] + s * 4));
            if constexpr (Dot::offset_a) spread ^= 0x80808080u;
            TW_UNROLL
            for (int v = 0; v < kNV; v++) c[i][v] = Dot::step(c[i][v], spread, line[v]);
          }
          b += nr;
        }
        left -= now, at += now;
        if (at == tap_groups) at = 0, tap++;
      }
      TW_UNROLL
      for (int i = 0; i < mr; i++)
        TW_UNROLL
        for (int v = 0; v < kNV; v++)
          store_as(out + i * out_ld + v * kLanes, c[i][v] + load_as<V>(start + i * start_ld + v * kLanes));
      start = out, start_ld = out_ld;
    } while (Base::blocked_summation && groups > 0);
  }
};

TW_NAMESPACE_END
