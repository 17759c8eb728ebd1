// Convolution of grouped channels on GPUs with mma.sync. Eight neighbouring channels are one block, whatever groups of
// 1, 2, 4 or 8 channels they are (channels in as channels out); the weights between two groups of a block are zero.
// Groups of 16 or 32 channels are whole blocks. What is not finite in one channel makes the other channels of its block
// not finite.
//
// A workgroup copies the pixels that a tile of rows x run pixels meets to shared memory, each once, and reads them
// there for all taps. Waves share the channels of the tile, and then its pixels.
//
// Config: groups_merged > 1 (64 / channels of a group), kind depthwise or direct, fp16 or bf16, one or two axes;
// a multiple of 8 channels;
// channel_tile (a multiple of 8 * waves), pixel_tile (repeats, rows, run: rows even, run a multiple of 8; 0: 1, 8, 8),
// filter, stride, dilation (all fixed). Every stride of the image and of a result of 16 bits is a multiple of 8
// elements, as is the address, and groups lie side by side; forward, the weights of a tap too, every stride of which is
// a multiple of two. The table of a launch counts a task's workgroups as its tiles:
//     ceil(channels / channel_tile) * ceil(images * ceil(H / rows) * ceil(W / run) / repeats)
#pragma once
#include "tilewright/gpu/cuda/atom_mma.hpp"
#include "tilewright/gpu/conv/params.hpp"
#include "tilewright/gpu/blocks/epilogue.hpp"
#include "tilewright/gpu/conv/image.hpp"

namespace tw::gpu {

constexpr int gcd_of(int a, int b) { return b == 0 ? a : gcd_of(b, a % b); }

// Quotient of numbers that are not negative, which takes half the instructions.
TW_DEVICE int quotient(int n, int d) { return (int)((uint32_t)n / (uint32_t)d); }

// One axis as it is compiled in: pixels are row_step apart in the image, taps tap_step.
struct FixedAxis {
  int taps, row_step, tap_step;
  constexpr int span(int rows) const { return (rows - 1) * row_step + (taps - 1) * tap_step + 1; }
};
template <class Config>
constexpr FixedAxis fixed_axis(int axis) {
  const bool absent = axis < 3 - Config::ndim;
  const int taps = absent ? 1 : Config::filter[axis], stride = absent ? 1 : Config::stride[axis];
  const int dilation = absent ? 1 : Config::dilation[axis];
  if (Config::direction != Direction::backward_data) return {taps, stride, dilation};
  // The most taps that a phase has.
  const int common = gcd_of(stride, dilation), every = stride / common;
  return {(taps + every - 1) / every, 1, dilation / common};
}

template <class Config>
struct MergedTile {
  using E = typename Config::A;
  static_assert(size_of<E> == 2 && is_same<E, typename Config::B>, "merged groups: fp16 or bf16");
  static_assert(Config::ndim <= 2 && !Config::channels_first, "merged groups: one or two axes, channels last");
  static constexpr bool is_backward = Config::direction == Direction::backward_data;
  // Functions: objects would be read from memory.
  static constexpr FixedAxis down() { return fixed_axis<Config>(1); }
  static constexpr FixedAxis across() { return fixed_axis<Config>(2); }
  static constexpr int rows = Config::pixel_tile[1] > 0 ? Config::pixel_tile[1] : 8;
  static constexpr int run = Config::pixel_tile[2] > 0 ? Config::pixel_tile[2] : 8;
  static constexpr int repeats = max_of(Config::pixel_tile[0], 1);
  static constexpr int waves = Config::wave_m * Config::wave_n, threads = waves * kWave;
  static constexpr int channel_tile = Config::channel_tile > 0 ? Config::channel_tile : 8 * waves;
  static constexpr int blocks = channel_tile / 8;
  static constexpr int each = 64 / Config::groups_merged;  // of a group
  static_assert(each == 1 || each == 2 || each == 4 || each == 8 || each == 16 || each == 32,
                "a block holds whole groups, or a group whole blocks");
  static_assert(channel_tile % each == 0, "a tile holds whole groups");
  static constexpr int taps_h = down().taps, taps_w = across().taps, taps = taps_h * taps_w;
  static_assert(rows % 2 == 0 && run % 8 == 0, "an instruction computes two rows of eight pixels");
  static constexpr bool is_bulk = Config::pipeline == Pipeline::bulk;  // whose waves share the pixels as well
  static_assert((is_bulk || channel_tile % (8 * waves) == 0) && taps > 0, "waves share the channels; the filter is compiled in");
  static constexpr int row_step = down().row_step, run_step = across().row_step;

  // Which of the two forms of forward and backward data it is: see gpu/conv/merged/lanes.hpp.
  static constexpr bool in_lanes =
      Config::epilogue == EpilogueKind::cshuffle && Config::direction != Direction::backward_weight;

  // Pixels lie 16 bytes further apart than they are long, and columns that neighbouring results meet with one tap side
  // by side: so eight of them stand in different banks.
  static constexpr int pixel_bytes = (blocks + 1) * 16;
  static constexpr int span_h = down().span(rows), span_w = across().span(run);
  static constexpr int phase_pixels = (span_w + run_step - 1) / run_step;
  static constexpr int row_bytes = run_step * phase_pixels * pixel_bytes;
  static constexpr int image_bytes = span_h * row_bytes;
  // Bytes from the first pixel of a row to this column.
  static constexpr int column_bytes(int column) {
    return (column % run_step * phase_pixels + column / run_step) * pixel_bytes;
  }
  // Sixteen pixels of an instruction, a unit, lie beside one another or are two rows of eight. Rows of the image come
  // one after the other, each is read once for all taps that it meets. A tile is computed in steps of `depth` rows.
  static constexpr bool wide = run % 16 == 0;
  static constexpr int unit_rows = wide ? 1 : 2, unit_run = wide ? 16 : 8, strips = run / unit_run;
  static constexpr int deepest(int most) {
    return rows % most == 0 && most % unit_rows == 0 ? most : deepest(most - 1);
  }
  // Fewer for the gradient of weights, whose sums stay in registers, and so few that waves of the same channels (two
  // blocks each) share a tile.
  static constexpr bool is_weight = Config::direction == Direction::backward_weight;
  static constexpr int sharing = max_of(waves / max_of(blocks / 2, 1), 1);
  static constexpr int shared_units = max_of(rows / unit_rows / ceil_div(sharing, strips), 1);
  static constexpr int lane_units = each == 32 ? 4 : 7;  // of the second form, which reads more ahead
  static constexpr int most_units = is_weight ? min_of(7, shared_units) : in_lanes ? lane_units : 8;
  static constexpr int depth = deepest(min_of(rows, most_units * unit_rows)), units = depth / unit_rows, steps = rows / depth;
  static constexpr int step_span = down().span(depth), step_rows = depth * row_step;
  // Rows of the image from a unit to the next, and from a tap to the next.
  static constexpr int unit_step = row_step * unit_rows, tap_step = down().tap_step;
  static constexpr int last_row = (units - 1) * unit_step + (taps_h - 1) * tap_step;
  static constexpr bool is_met(int row) {
    for (int th = 0; th < taps_h; th++) {
      const int first = row - th * tap_step;
      if (first >= 0 && first % unit_step == 0 && first / unit_step < units) return true;
    }
    return false;
  }
  static constexpr bool whole = each >= 16;             // groups of whole pairs of blocks
  static constexpr int depths = whole ? each / 16 : 1;  // pairs of blocks of the image that a pair of the result meets
  // Bytes from a pixel's first channel of the tile to the first pair of blocks that block `inside` of the result meets.
  TW_DEVICE static int met_bytes(int inside) { return whole ? inside * 8 / each * each * 2 : inside * 16; }

  struct Place {
    int n, h, w;
  };
  TW_DEVICE static int tiles_w(const tw_conv_problem& p) { return ceil_div((int)p.axes[2].rows, run); }
  TW_DEVICE static int tiles_h(const tw_conv_problem& p) { return ceil_div((int)p.axes[1].rows, rows); }
  TW_DEVICE static int tiles(const tw_conv_problem& p) { return (int)p.images * tiles_h(p) * tiles_w(p); }
  TW_DEVICE static int channels(const tw_conv_problem& p) { return (int)(p.groups * p.channels); }
  TW_DEVICE static int channel_blocks(const tw_conv_problem& p) { return ceil_div(channels(p), channel_tile); }
  TW_DEVICE static Place place(const tw_conv_problem& p, int tile) {
    const int line = quotient(tile, tiles_w(p)), image = quotient(line, tiles_h(p));
    return {image, (line - image * tiles_h(p)) * rows, (tile - line * tiles_w(p)) * run};
  }
  // The tile that follows.
  TW_DEVICE static void advance(const tw_conv_problem& p, Place& at) {
    at.w += run;
    if (at.w < (int)p.axes[2].rows) return;
    at.w = 0, at.h += rows;
    if (at.h < (int)p.axes[1].rows) return;
    at.h = 0, at.n++;
  }
  // Coordinate of the first pixel that meets a tap; backward, taps run the other way.
  TW_DEVICE static int begin(const tw_conv_problem& p, int axis, int row) {
    const FixedAxis fixed = fixed_axis<Config>(axis);
    return (int)p.axes[axis].origin + row * fixed.row_step - (is_backward ? (fixed.taps - 1) * fixed.tap_step : 0);
  }

  // Pixels of a tensor: distances in elements, and how many there are.
  struct Pixels {
    const char* first;
    int n, h, w, height, width, channels;
  };
  TW_DEVICE static Pixels image_of(const tw_conv_problem& p, const void* first) {
    return {(const char*)first,
            (int)p.image_n,
            (int)p.axes[1].image_stride,
            (int)p.axes[2].image_stride,
            (int)p.axes[1].size,
            (int)p.axes[2].size,
            channels(p)};
  }

  // kRows x kWidth pixels of a tensor, from (h, w) on; what does not exist is zero. Every kStep-th column lies beside
  // the next in shared memory. A thread copies one column, or a few of them, of many rows.
  template <int kRows, int kWidth, int kStep>
  TW_DEVICE static void copy(uint32_t to, const Pixels& from, int n, int h, int w, int channel, int thread) {
    constexpr int kLine = kWidth * blocks, kLines = max_of(threads / kLine, 1), kPasses = ceil_div(kRows, kLines);
    constexpr int kPhase = (kWidth + kStep - 1) / kStep, kLineBytes = kStep * kPhase * pixel_bytes;
    const char* const first =
        from.first + ((int64_t)n * from.n + ((int64_t)h * from.h + (w * from.w + channel))) * size_of<E>;
    const int64_t step = (int64_t)from.h * (kLines * size_of<E>);
    const int row = kLines > 1 ? quotient(thread, kLine) : 0;
    TW_UNROLL
    for (int part = 0; part < ceil_div(kLine, threads); part++) {
      const int id = thread + part * threads - row * kLine, column = quotient(id, blocks), block = id - column * blocks;
      if (kLines > 1 ? row >= kLines : kLine % threads != 0 && id >= kLine) continue;
      const bool in = (uint32_t)(w + column) < (uint32_t)from.width && channel + block * 8 < from.channels;
      const uint32_t own = to + (kStep == 1 ? column : column % kStep * kPhase + column / kStep) * pixel_bytes + block * 16 +
                           row * kLineBytes;
      const char* at = first + ((int64_t)row * from.h + (column * from.w + block * 8)) * size_of<E>;
      const uint32_t height = in ? (uint32_t)from.height : 0u;
      TW_UNROLL_BY(8)
      for (int pass = 0; pass < kPasses; pass++, at += step)
        if (kRows % kLines == 0 || row + pass * kLines < kRows)
          copy_async(own + pass * (kLines * kLineBytes), at, (uint32_t)(h + row + pass * kLines) < height ? 16 : 0);
    }
  }
  // Rows `first` and on of the pixels that a tile meets.
  template <int kRows>
  TW_DEVICE static void copy_image(uint32_t to, const tw_conv_problem& p, const void* image, const Place& at, int first,
                                   int channel, int thread) {
    copy<kRows, span_w, run_step>(to + first * row_bytes, image_of(p, image), at.n, begin(p, 1, at.h) + first,
                                  begin(p, 2, at.w), channel, thread);
  }

  // Where the weights of the tap that stands there lie, and whether it exists.
  TW_DEVICE static int weight_offset(const tw_conv_problem& p, int at, bool& exists) {
    const int th = is_backward ? taps_h - 1 - at / taps_w : at / taps_w;
    const int tw = is_backward ? taps_w - 1 - at % taps_w : at % taps_w;
    exists = th < (int)p.axes[1].taps && tw < (int)p.axes[2].taps;
    return th * (int)p.axes[1].tap_stride + tw * (int)p.axes[2].tap_stride;
  }
};

}  // namespace tw::gpu
