// Convolution of merged groups on GPUs with mma.sync: eight neighbouring channels are one block, whatever groups of 1, 2,
// 4 or 8 channels they are (channels in as channels out); the weights between two groups of a block are zero. An
// instruction multiplies two taps of a block at a time, so that 16 of its k, or of its rows, are in use. What is not
// finite in one channel makes the other channels of its block not finite.
//
// A workgroup copies the pixels that a tile of rows x run pixels meets to shared memory, each once, and reads them there
// for all taps. Each wave owns channel blocks of the tile. An instruction's 16 pixels are two rows of eight.
//
// Config: groups_merged > 1 (16 / channels of a group), kind depthwise or direct, fp16 or bf16, one or two axes;
// a multiple of 8 channels;
// channel_tile (a multiple of 8 * waves), pixel_tile (repeats, rows, run: rows even, run a multiple of 8; 0: 1, 8, 8),
// filter, stride, dilation (all fixed). Every stride of the image is a multiple of 8 elements and groups lie side by
// side. The table of a launch counts a task's workgroups as its tiles:
//     ceil(channels / channel_tile) * ceil(images * ceil(H / rows) * ceil(W / run) / repeats)
#pragma once
#include "tilewright/gpu/atom_mma.hpp"
#include "tilewright/gpu/conv_params.hpp"
#include "tilewright/gpu/epilogue.hpp"
#include "tilewright/gpu/image.hpp"

namespace tw::gpu {

constexpr int gcd_of(int a, int b) { return b == 0 ? a : gcd_of(b, a % b); }

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
  static constexpr int blocks = channel_tile / 8, own_blocks = blocks / waves;  // of the tile, and of a wave: neighbours
  static constexpr int each = 16 / Config::groups_merged;                        // channels of a group
  static_assert(each == 1 || each == 2 || each == 4 || each == 8, "a block holds whole groups");
  static constexpr int taps_h = down().taps, taps_w = across().taps, taps = taps_h * taps_w, pairs = (taps + 1) / 2;
  static_assert(rows % 2 == 0 && run % 8 == 0, "an instruction computes two rows of eight pixels");
  static_assert(channel_tile % (8 * waves) == 0 && taps > 0, "waves share the channels; the filter is compiled in");

  // Pixels lie 16 bytes further apart than they are long: eight neighbours stand in different banks.
  static constexpr int pixel_bytes = (blocks + 1) * 16;
  static constexpr int span_h = down().span(rows), span_w = across().span(run);
  static constexpr int image_bytes = span_h * span_w * pixel_bytes;

  struct Place {
    int n, h, w;
  };
  TW_DEVICE static int tiles_w(const tw_conv_problem& p) { return ceil_div((int)p.axes[2].rows, run); }
  TW_DEVICE static int tiles_h(const tw_conv_problem& p) { return ceil_div((int)p.axes[1].rows, rows); }
  TW_DEVICE static int tiles(const tw_conv_problem& p) { return (int)p.images * tiles_h(p) * tiles_w(p); }
  TW_DEVICE static int channels(const tw_conv_problem& p) { return (int)(p.groups * p.channels); }
  TW_DEVICE static int channel_blocks(const tw_conv_problem& p) { return ceil_div(channels(p), channel_tile); }
  TW_DEVICE static Place place(const tw_conv_problem& p, int tile) {
    const int line = tile / tiles_w(p), image = line / tiles_h(p);
    return {image, (line - image * tiles_h(p)) * rows, (tile - line * tiles_w(p)) * run};
  }
  // Coordinate of the first pixel that meets a tap; backward, taps run the other way.
  TW_DEVICE static int begin(const tw_conv_problem& p, int axis, int row) {
    const FixedAxis fixed = fixed_axis<Config>(axis);
    return (int)p.axes[axis].origin + row * fixed.row_step - (is_backward ? (fixed.taps - 1) * fixed.tap_step : 0);
  }

  // kHeight x kWidth pixels of a tensor, from (h, w) on; what does not exist is zero.
  template <int kHeight, int kWidth>
  TW_DEVICE static void copy(uint32_t to, const char* from, int n_stride, const int (&strides)[2], const int (&sizes)[2],
                             int n, int h, int w, int channel, int channels, int thread) {
    constexpr int kTotal = kHeight * kWidth * blocks, kPasses = ceil_div(kTotal, threads);
    const uint32_t base = (uint32_t)n * (uint32_t)n_stride + (uint32_t)h * (uint32_t)strides[0] +
                          (uint32_t)w * (uint32_t)strides[1] + (uint32_t)channel;
    TW_UNROLL_BY(4)  // of all of them, what a thread copies would stay in registers: slower
    for (int pass = 0; pass < kPasses; pass++) {
      const int id = thread + pass * threads;
      const int block = id % blocks, pixel = id / blocks, row = pixel / kWidth, column = pixel - row * kWidth;
      const bool in = (uint32_t)(h + row) < (uint32_t)sizes[0] && (uint32_t)(w + column) < (uint32_t)sizes[1] &&
                      channel + block * 8 < channels;
      const uint32_t own = (uint32_t)row * (uint32_t)strides[0] + (uint32_t)column * (uint32_t)strides[1] + block * 8;
      if (kTotal % threads == 0 || id < kTotal)
        copy_async(to + pixel * pixel_bytes + block * 16, from + (uint64_t)(base + own) * 2, in ? 16 : 0);
    }
  }
  TW_DEVICE static void copy_image(uint32_t to, const tw_conv_problem& p, const void* image, const Place& at, int channel,
                                   int thread) {
    copy<span_h, span_w>(to, (const char*)image, (int)p.image_n,
                         {(int)p.axes[1].image_stride, (int)p.axes[2].image_stride},
                         {(int)p.axes[1].size, (int)p.axes[2].size}, at.n, begin(p, 1, at.h), begin(p, 2, at.w), channel,
                         channels(p), thread);
  }

  // Bytes from a pixel to the one that tap `tap`, in the order of pixels, meets. An odd last tap is taken twice.
  static constexpr int tap_offset(int tap) {
    const int t = min_of(tap, taps - 1);
    return (t / taps_w * down().tap_step * span_w + t % taps_w * across().tap_step) * pixel_bytes;
  }
  // ---- fragments ----

  // Where the lower row of an instruction's pixels meets with one tap what the upper one meets with the next, rows of the
  // image are read once for both.
  static constexpr bool shares_rows = down().row_step == down().tap_step;
  static constexpr int window_rows = shares_rows ? taps_h + 1 : 1;
  static constexpr int row_step = down().row_step, run_step = across().row_step;
  struct Window {
    uint32_t m[window_rows][taps_w];  // one 8 x 8 matrix of (pixels, channels) each
  };

  // What a lane adds to the address of an instruction's first pixel (without sharing: for its matrix's pixels).
  TW_DEVICE static uint32_t lane_offset(int lane, bool lower) {
    return (uint32_t)(((!shares_rows && lower ? row_step * span_w : 0) + lane % 8 * run_step) * pixel_bytes);
  }
  template <bool kTransposed>
  TW_DEVICE static void load_window(Window& x, uint32_t from, int lane) {
    TW_UNROLL
    for (int first = 0; first < window_rows; first += 4) {
      const int row = min_of(first + lane / 8, window_rows - 1);
      const uint32_t own = from + (uint32_t)(row * down().tap_step * span_w * pixel_bytes);
      TW_UNROLL
      for (int tw = 0; tw < taps_w; tw++) {
        const Words<4> w = load_matrices<4, kTransposed>(own + tw * across().tap_step * pixel_bytes);
        TW_UNROLL
        for (int l = 0; l < 4; l++)
          if (first + l < window_rows) x.m[first + l][tw] = w.w[l];
      }
    }
  }
  // Of tap `tap` (an odd last one is taken twice) and the upper or lower row of pixels.
  TW_DEVICE static uint32_t matrix(const Window& x, int tap, int lower) {
    const int t = min_of(tap, taps - 1);
    return x.m[t / taps_w + lower][t % taps_w];
  }

  // Where the weights of the tap that stands there lie, and whether it exists.
  TW_DEVICE static int weight_offset(const tw_conv_problem& p, int at, bool& exists) {
    const int th = is_backward ? taps_h - 1 - at / taps_w : at / taps_w;
    const int tw = is_backward ? taps_w - 1 - at % taps_w : at % taps_w;
    exists = at < taps && th < (int)p.axes[1].taps && tw < (int)p.axes[2].taps;
    return th * (int)p.axes[1].tap_stride + tw * (int)p.axes[2].tap_stride;
  }
};

}  // namespace tw::gpu
