// Loaders of the stages of a convolution's implicit product: pixels of an image through an im2col map, and boxes of the
// other operand.
#pragma once
#include "tilewright/sm90/conv/im2col.hpp"
#include "tilewright/sm90/conv/params.hpp"
#include "tilewright/sm90/gemm/mainloop.hpp"

namespace tw::sm90 {

// a = quotient * b + rest: returns the rest, leaves the quotient in a.
TW_SM90 int divide(int& a, int b) {
  const int q = quotient(a, b), rest = a - q * b;
  a = q;
  return rest;
}

// The rows of a pixel, or the taps of a filter, by axis: kAxes axes of mixed radix, the width fastest.
struct Place {
  int image, d, h, w;
};
template <int kAxes>
TW_SM90 Place place_of(int index, int depth, int height, int width) {
  Place at = {index, 0, 0, 0};
  at.w = divide(at.image, width);
  if constexpr (kAxes > 1) at.h = divide(at.image, height);
  if constexpr (kAxes > 2) at.d = divide(at.image, depth);
  return at;
}
TW_SM90 TapOffsets offsets_of(const ConvWalk& walk, Place tap) {
  const auto along = [&](int axis, int t) {
    return (uint16_t)((int)walk.axes[axis].offset + t * (int)walk.axes[axis].offset_step);
  };
  return {along(0, tap.d), along(1, tap.h), along(2, tap.w)};
}
TW_SM90 Pixel pixel_of(const ConvWalk& walk, Place at) {
  const auto along = [&](int axis, int row) {
    return (int)walk.axes[axis].origin + row * (int)walk.axes[axis].step;
  };
  return {at.image, along(0, at.d), along(1, at.h), along(2, at.w)};
}

// Which parts of A's and B's tiles this workgroup loads, and the workgroups of its cluster that get them too.
template <class Cluster>
struct Shares {
  int m_part, n_part;
  uint16_t rows, columns;
  TW_SM90 explicit Shares(int rank)
      : m_part(Cluster::n_of(rank)),
        n_part(Cluster::m_of(rank)),
        rows(Cluster::row_mask(rank)),
        columns(Cluster::column_mask(rank)) {}
};

// Boxes of 64 rows or columns that a tile needs of the kTile ones from `first` on, of which there are `count`: what
// lies beyond is not loaded, for the copy engine fills in zeros more slowly than it copies. Results of it are not
// stored.
template <int kTile>
TW_SM90 int boxes_of(int first, int count) {
  const int left = (count - first + 63) / 64;
  return left < 1 ? 1 : left < kTile / 64 ? left : kTile / 64;
}

// Forward and backward data: rows are pixels, k runs over taps and, within each, channels in steps of 128 bytes.
template <class Plan>
struct PixelRowLoader {
  using Config = typename Plan::Config;
  using Cluster = typename Plan::Cluster;
  using Params = Sm90ConvParams<Config>;
  static constexpr int kAxes = Config::ndim, kShare = Plan::tile_m / Cluster::n, kStep = Plan::tile_k;
  // Alone, a workgroup loads B in boxes of 64 columns, as many as there are.
  static constexpr bool kBoxed = Cluster::size == 1 && Plan::tile_n % 64 == 0;
  static_assert(Plan::chunks == 1, "a step is 128 bytes of one tap's channels");
  static_assert(!Plan::a_mn && !Plan::swap, "A is gathered");

  const Params& params;
  Pixel pixel;
  Place tap;  // its number among all is in `image`
  TapOffsets offsets;
  int channel, first_channel, column, boxes;

  template <class Tasks>
  TW_SM90 PixelRowLoader(const Tasks& tasks, const Work& work, const Shares<Cluster>& shares)
      : params(static_cast<const Params&>(tasks.params)) {
    const ConvWalk& walk = params.walk;
    const int row = work.tile_m * Plan::tile_m + shares.m_part * kShare;
    pixel = pixel_of(walk, place_of<kAxes>(row, (int)walk.axes[0].rows, (int)walk.axes[1].rows, (int)walk.axes[2].rows));
    int number = work.first_step;
    channel = divide(number, (int)walk.channel_steps) * kStep;
    tap = place_of<kAxes>(number, (int)walk.axes[0].taps, (int)walk.axes[1].taps, (int)walk.axes[2].taps);
    if (tap.image > 0) {  // a slice beyond the last tap: zeros
      tap = {0, 0, 0, 0};
      channel = (int)walk.channel_steps * kStep;
    }
    tap.image = number;
    offsets = offsets_of(walk, tap);
    first_channel = work.batch * (int)walk.channels;
    // Groups' weights follow each other along channels of y: forward the columns, backward k.
    column = work.tile_n * Plan::tile_n + (Plan::b_mn ? 0 : work.batch * (int)params.task.problem.n);
    boxes = boxes_of<Plan::tile_n>(work.tile_n * Plan::tile_n, (int)params.task.problem.n);
  }

  TW_SM90 int bytes() const { return kBoxed ? Plan::a_bytes + boxes * 64 * 128 : Plan::stage_bytes; }

  TW_SM90 void load(uint32_t a, uint32_t b, uint32_t full, const Shares<Cluster>& shares) const {
    load_pixels<kAxes, (Cluster::n > 1)>(a + shares.m_part * kShare * 128, &params.task.a, first_channel + channel,
                                         pixel, offsets, full, shares.rows);
    const int k = channel + (Plan::b_mn ? first_channel : 0);
    if constexpr (kBoxed) {
#pragma unroll
      for (int i = 0; i < Plan::tile_n / 64; i++)
        if (i < boxes)
          load_tile<Plan::b_mn, 64, Plan::tile_k, Plan::element, 1>(b + i * 64 * 128, &params.task.b, k,
                                                                   column + i * 64, tap.image, full, 0, 0);
    } else {
      load_tile<Plan::b_mn, Plan::tile_n, Plan::tile_k, Plan::element, Cluster::m>(
          b, &params.task.b, k, column, tap.image, full, shares.n_part, shares.columns);
    }
  }

  TW_SM90 void advance() {
    channel += kStep;
    if (channel < (int)params.walk.channels) return;
    channel = 0;
    tap.image++;
    if (++tap.w == (int)params.walk.axes[2].taps) {
      tap.w = 0;
      if (kAxes > 1 && ++tap.h == (int)params.walk.axes[1].taps) {
        tap.h = 0;
        if (kAxes > 2) tap.d++;
      }
    }
    offsets = offsets_of(params.walk, tap);
  }
};

// Backward weight: k runs over pixels, columns over taps and channels in panels of 64, each within one tap.
template <class Plan>
struct PixelColumnLoader {
  using Config = typename Plan::Config;
  using Cluster = typename Plan::Cluster;
  using Params = Sm90ConvParams<Config>;
  static constexpr int kAxes = Config::ndim, kPanels = Plan::tile_n / 64 / Cluster::m;
  static constexpr bool kAlone = Cluster::size == 1;  // then panels beyond the result are not loaded
  static_assert(Plan::a_mn && Plan::b_mn && Plan::element == 2 && !Plan::swap, "both operands lie along their pixels");

  const Params& params;
  Place at, step;  // the stage's first pixel, and what tile_k pixels are
  int k, row, a_boxes, b_boxes;
  int channels[kPanels];
  TapOffsets offsets[kPanels];

  template <class Tasks>
  TW_SM90 PixelColumnLoader(const Tasks& tasks, const Work& work, const Shares<Cluster>& shares)
      : params(static_cast<const Params&>(tasks.params)) {
    const ConvWalk& walk = params.walk;
    const auto place = [&](int pixel) {
      return place_of<kAxes>(pixel, (int)walk.axes[0].rows, (int)walk.axes[1].rows, (int)walk.axes[2].rows);
    };
    k = work.first_step * Plan::tile_k;
    at = place(k);
    step = place(Plan::tile_k);
    const bool tap_items = walk.tap_items != 0;
    row = work.tile_m * Plan::tile_m + (tap_items ? 0 : work.batch * (int)params.task.problem.m);
    a_boxes = boxes_of<Plan::tile_m>(work.tile_m * Plan::tile_m, (int)params.task.problem.m);
    b_boxes = boxes_of<Plan::tile_n>(work.tile_n * Plan::tile_n, (int)params.task.problem.n);
    const int group_channel = tap_items ? 0 : work.batch * (int)walk.channels;
#pragma unroll
    for (int i = 0; i < kPanels; i++) {
      const int column = work.tile_n * Plan::tile_n + (shares.n_part * kPanels + i) * 64;
      int number = tap_items ? work.batch : column, channel = column;
      if (!tap_items) channel = divide(number, (int)walk.channels);
      Place tap =
          place_of<kAxes>(number, (int)walk.axes[0].taps, (int)walk.axes[1].taps, (int)walk.axes[2].taps);
      if (tap.image > 0) tap = {0, 0, 0, 0};  // columns beyond the last, which nobody stores
      offsets[i] = offsets_of(walk, tap);
      channels[i] = group_channel + channel;
    }
  }

  TW_SM90 int bytes() const {
    return kAlone ? (a_boxes + b_boxes) * Plan::panel_bytes : Plan::stage_bytes;
  }

  TW_SM90 void load(uint32_t a, uint32_t b, uint32_t full, const Shares<Cluster>& shares) const {
    if constexpr (kAlone) {
#pragma unroll
      for (int i = 0; i < Plan::tile_m / 64; i++)
        if (i < a_boxes)
          load_tile<true, 64, Plan::tile_k, Plan::element, 1>(a + i * Plan::panel_bytes, &params.task.a, k,
                                                              row + i * 64, 0, full, 0, 0);
    } else {
      load_tile<true, Plan::tile_m, Plan::tile_k, Plan::element, Cluster::n>(a, &params.task.a, k, row, 0, full,
                                                                            shares.m_part, shares.rows);
    }
    const Pixel pixel = pixel_of(params.walk, at);
#pragma unroll
    for (int i = 0; i < kPanels; i++)
      if (!kAlone || i < b_boxes) load_pixels<kAxes, (Cluster::m > 1)>(b + (shares.n_part * kPanels + i) * Plan::panel_bytes, &params.task.b,
                                           channels[i], pixel, offsets[i], full, shares.columns);
  }

  TW_SM90 void advance() {
    k += Plan::tile_k;
    at.w += step.w, at.h += step.h, at.d += step.d, at.image += step.image;
    carry(at.w, kAxes > 1 ? at.h : at.image, 2);
    if constexpr (kAxes > 1) carry(at.h, kAxes > 2 ? at.d : at.image, 1);
    if constexpr (kAxes > 2) carry(at.d, at.image, 0);
  }

 private:
  TW_SM90 void carry(int& from, int& to, int axis) const {
    const int rows = (int)params.walk.axes[axis].rows;
    if (from < rows) return;
    from -= rows;
    to++;
  }
};

// One thread: fills the ring for all the work of this workgroup.
template <class Plan, class Loader>
struct ConvProducer {
  using Params = typename Loader::Params;
  template <class Queue, class Tasks>
  static TW_SM90 void run(Queue queue, const Tasks& tasks, RingBarriers<Plan::stages> barriers, uint32_t shared,
                          int rank) {
    const Shares<typename Plan::Cluster> shares(rank);
    RingState<Plan::stages> ring;
    Work work;
    while (queue.next(work)) {
      Loader loader(tasks, work, shares);
#pragma unroll 1
      for (int step = 0; step < work.steps; step++, loader.advance()) {
        barriers.wait_empty(ring);
        const uint32_t full = barriers.full(ring.stage);
        arrive_expecting(full, loader.bytes());
        loader.load(shared + Plan::a_at + ring.stage * Plan::a_bytes, shared + Plan::b_at + ring.stage * Plan::b_bytes,
                    full, shares);
        ring.next();
      }
    }
    if constexpr (Plan::Cluster::size > 1)  // peers still announce free stages here, as in `produce`
#pragma unroll 1
      for (int i = 0; i < Plan::stages; i++, ring.next()) barriers.wait_empty(ring);
  }
};

}  // namespace tw::sm90
