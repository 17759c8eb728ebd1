// Convolution without a product, for channels by themselves (depthwise) and small groups (direct): what a thread computes.
// Channels of a pixel lie side by side (or, depthwise and channels-first, a thread has one): a thread computes `outputs`
// of them, of `rows` x `run` neighbouring pixels of one image, and reads the `vector` channels at a time of the pixels
// that these meet, each pixel once. A unit is what the threads of different channels do: `lanes_c` neighbouring threads
// take neighbouring units, the next ones the next pixels, and all of them `repeats` such tiles one after the other.
//
// Config: vector_a (elements of an access; 1: any strides), direct: vector_c (outputs), channel_tile (channels of the
// result that a workgroup computes; 0: 8 threads' worth), pixel_tile (repeats, rows, run; 0: 1, 2, 4, or 1 row of weights, of groups and of a filter
// that is known at run time), filter, stride, dilation (all fixed, or 0: known at run time), wave_m and wave_n (waves of a
// workgroup). The table of a launch counts a task's workgroups as its tiles:
//     ceil(units / lanes_c) * ceil(images * D * ceil(H / rows) * ceil(W / run) / (lanes_p * repeats))
// where units are groups / vector, or groups * ceil(n / outputs). Weights, in fp32, take taps * channel_tile * 4 bytes of
// shared memory (direct: for every channel that is gathered).
#pragma once
#include "tilewright/core/meta.hpp"
#include "tilewright/gpu/conv/params.hpp"
#include "tilewright/gpu/blocks/epilogue.hpp"
#include "tilewright/gpu/conv/image.hpp"
#if defined(__HIP__)
#include "tilewright/gpu/amd/loader.hpp"
#endif

namespace tw::gpu {

// Where a compiler shall not read ahead: LLVM would keep all weights, and the pixels of all rows, in registers at once.
TW_DEVICE void keep_order() {
#if defined(__HIP__)
  asm volatile("" ::: "memory");
  __builtin_amdgcn_sched_barrier(0);
#endif
}

// A vector of 1 to 16 bytes at `offset` (times kUnit bytes) from an address that all threads share; zero if it does not exist. AMD: a
// buffer load without a branch, of which a compiler keeps many under way in few registers.
template <class Vector, int kUnit>
TW_DEVICE Vector load_checked(const char* base, uint32_t offset, bool exists) {
#if defined(__HIP__)
  const auto buffer = __builtin_amdgcn_make_buffer_rsrc((char*)uniform(base), 0, (int)0x80000000u, kBufferFlags);
  const int at = (int)(exists ? offset * kUnit : 0xfffffff0u);
  if constexpr (sizeof(Vector) >= 4) return bits_as<Vector>(load_buffer<sizeof(Vector)>(buffer, (uint32_t)at));
  else if constexpr (sizeof(Vector) == 2)
    return bits_as<Vector>((uint16_t)__builtin_amdgcn_raw_buffer_load_b16(buffer, at, 0, 0));
  else return bits_as<Vector>((uint8_t)__builtin_amdgcn_raw_buffer_load_b8(buffer, at, 0, 0));
#else
  Vector x = {};
  if (exists) x = load_constant<Vector>(base + (uint64_t)offset * kUnit);
  return x;
#endif
}

// kCount floats that lie side by side in shared memory.
template <int kCount>
TW_DEVICE void load_weight(float (&x)[kCount], uint32_t from) {
  constexpr int kWords = min_of(kCount, 4);
  TW_UNROLL
  for (int v = 0; v < kCount; v += kWords) {
    const Words<kWords> w = load_shared<kWords>(from + v * 4);
    TW_UNROLL
    for (int l = 0; l < kWords; l++) x[v + l] = float_of(w.w[l]);
  }
}

template <int kRows, int kRun, int kCount>
TW_DEVICE void clear(float (&sum)[kRows][kRun][kCount]) {
  TW_UNROLL
  for (int r = 0; r < kRows; r++)
    TW_UNROLL
    for (int s = 0; s < kRun; s++)
      TW_UNROLL
      for (int v = 0; v < kCount; v++) sum[r][s][v] = 0.0f;
}

template <class Config>
struct DepthwiseTile {
  static constexpr bool direct = Config::kind == ConvKind::direct;
  static_assert(!direct || !Config::channels_first, "small groups: channels last");
  static constexpr bool is_backward = Config::direction == Direction::backward_data;
  static constexpr bool is_weight = Config::direction == Direction::backward_weight;
  using Image = Choose<is_weight, typename Config::B, typename Config::A>;
  using Other = Choose<is_weight, typename Config::A, typename Config::B>;

  static constexpr int axis_of(const int (&sizes)[3], int axis) { return axis < 3 - Config::ndim ? 1 : sizes[axis]; }
  static constexpr bool is_fixed(int axis) {
    return axis < 3 - Config::ndim ||
           (Config::filter[axis] > 0 && Config::stride[axis] > 0 && Config::dilation[axis] > 0);
  }
  // Phases of a stride see different taps.
  static constexpr bool fixed = is_fixed(1) && is_fixed(2) && !Config::grouped;
  static constexpr int taps_h = fixed ? axis_of(Config::filter, 1) : 0, taps_w = fixed ? axis_of(Config::filter, 2) : 0;
  static constexpr int row_h = is_backward || !fixed ? 1 : axis_of(Config::stride, 1);
  static constexpr int row_w = is_backward || !fixed ? 1 : axis_of(Config::stride, 2);
  static constexpr int tap_h = fixed ? axis_of(Config::dilation, 1) : 1, tap_w = fixed ? axis_of(Config::dilation, 2) : 1;

  static constexpr int image_bytes = size_of<Image>;
  static constexpr int vector = Config::channels_first ? 1 : min_of(Config::vector_a, 16 / image_bytes);
  static constexpr int outputs = direct && !is_weight ? Config::vector_c : vector;
  static constexpr int channel_tile =
      Config::channels_first ? 1 : Config::channel_tile > 0 ? Config::channel_tile : 8 * outputs;
  static constexpr int rows =
      Config::pixel_tile[1] > 0 ? Config::pixel_tile[1] : fixed && !is_weight && !direct && row_h == 1 ? 2 : 1;
  static constexpr int run = Config::pixel_tile[2] > 0 ? Config::pixel_tile[2] : 4;
  static constexpr int threads = Config::wave_m * Config::wave_n * kWave;
  static constexpr int lanes_c = channel_tile / outputs, lanes_p = threads / lanes_c;
  static constexpr int repeats = max_of(Config::pixel_tile[0], 1);
  static_assert(channel_tile % outputs == 0 && threads % lanes_c == 0, "threads share the channels of a tile");

  // Pixels of the image that the tile meets.
  static constexpr int span_h = (rows - 1) * row_h + (taps_h - 1) * tap_h + 1;
  static constexpr int span_w = (run - 1) * row_w + (taps_w - 1) * tap_w + 1;

  // ---- where ----

  struct Place {
    int n, d, h, w;      // the first pixel of the tile
    int group, channel;  // direct: channel of the group; else the channel is the group
    uint32_t offset;     // of the channel in the image
    bool exists;
  };
  TW_DEVICE static int across(const tw_conv_problem& p) { return ceil_div((int)p.axes[2].rows, run); }
  TW_DEVICE static int down(const tw_conv_problem& p) { return ceil_div((int)p.axes[1].rows, rows); }
  TW_DEVICE static int tiles(const tw_conv_problem& p) {
    return (int)p.images * (int)p.axes[0].rows * down(p) * across(p);
  }
  TW_DEVICE static int units(const tw_conv_problem& p) {
    return direct ? (int)p.groups * ceil_div((int)p.gemm.n, outputs) : ceil_div((int)p.groups, vector);
  }
  TW_DEVICE static Place place(const tw_conv_problem& p, int tile, int block, int thread) {
    const int lines = tile / across(p), planes = lines / down(p), images = planes / (int)p.axes[0].rows;
    const int unit = block * lanes_c + thread % lanes_c;
    int group = unit * vector, channel = 0;
    if constexpr (direct) {
      const int each = ceil_div((int)p.gemm.n, outputs);
      group = unit / each, channel = (unit - group * each) * outputs;
    }
    return {images,
            planes - images * (int)p.axes[0].rows,
            (lines - planes * down(p)) * rows,
            (tile - lines * across(p)) * run,
            group,
            channel,
            (uint32_t)group * (uint32_t)p.image_g,
            tile < tiles(p) && group < (int)p.groups};
  }

  // ---- the image ----

  using Pixel = Packed<Image, vector>;
  // A line of the image at these coordinates of D and H: where it begins, and whether it exists.
  struct Line {
    const char* image;
    uint32_t offset;
    bool exists;
  };
  TW_DEVICE static Line line(const tw_conv_problem& p, const char* image, const Place& at, int d, int h) {
    const uint32_t offset = (uint32_t)at.n * (uint32_t)p.image_n + (uint32_t)d * (uint32_t)p.axes[0].image_stride +
                            (uint32_t)h * (uint32_t)p.axes[1].image_stride +
                            at.offset;
    return {image, offset,
            at.exists && (uint32_t)d < (uint32_t)p.axes[0].size && (uint32_t)h < (uint32_t)p.axes[1].size};
  }
  TW_DEVICE static Pixel load_raw(const tw_conv_problem& p, const Line& line, int w) {
    const uint32_t offset = line.offset + (uint32_t)w * (uint32_t)p.axes[2].image_stride;
    return load_checked<Pixel, image_bytes>(line.image, offset, line.exists && (uint32_t)w < (uint32_t)p.axes[2].size);
  }
  TW_DEVICE static void load(float (&x)[vector], const tw_conv_problem& p, const Line& line, int w) {
    const Pixel raw = load_raw(p, line, w);
    TW_UNROLL
    for (int v = 0; v < vector; v++) x[v] = to_float<Image>(raw.get(v));
  }
  // A line of pixels: as floats, or where these would fill the registers as they are in memory, to be converted for
  // every use.
  static constexpr bool keeps_raw = span_w * vector > 48 && image_bytes < 4;
  template <bool kRaw, class Void = void>
  struct Span {
    float x[span_w > 0 ? span_w : 1][vector];
    TW_DEVICE void load_at(int i, const tw_conv_problem& p, const Line& line, int w) { load(x[i], p, line, w); }
    TW_DEVICE void get(float (&y)[vector], int i) const {
      TW_UNROLL
      for (int v = 0; v < vector; v++) y[v] = x[i][v];
    }
  };
  template <class Void>
  struct Span<true, Void> {
    Pixel x[span_w > 0 ? span_w : 1];
    TW_DEVICE void load_at(int i, const tw_conv_problem& p, const Line& line, int w) { x[i] = load_raw(p, line, w); }
    TW_DEVICE void get(float (&y)[vector], int i) const {
      TW_UNROLL
      for (int v = 0; v < vector; v++) y[v] = to_float<Image>(x[i].get(v));
    }
  };

  // Coordinate of the first pixel that meets tap 0 (backward, whose taps run the other way: the last one).
  TW_DEVICE static int begin(const tw_conv_problem& p, int axis, int row) {
    const tw_conv_axis& a = p.axes[axis];
    return (int)a.origin + row * (int)a.row_step + (is_backward && fixed ? ((int)a.taps - 1) * (int)a.tap_step : 0);
  }

  // Calls use(r, s, q, t, x) for every fixed tap (t of H and W) of every pixel (row r, place s) with its element.
  template <class Use>
  TW_DEVICE static void for_fixed(const tw_conv_problem& p, const char* image, const Place& at, int d, const Use& use) {
    const int h = begin(p, 1, at.h), w = begin(p, 2, at.w);
    if constexpr (rows == 1 && keeps_raw && !is_weight) {  // one line of pixels at a time: all at once would fill them too
      TW_NO_UNROLL
      for (int th = 0; th < taps_h; th++) {
        const Line from = line(p, image, at, d, h + th * tap_h);
        Span<true> x;
        TW_UNROLL
        for (int i = 0; i < span_w; i++) x.load_at(i, p, from, w + i);
        TW_UNROLL
        for (int tw = 0; tw < taps_w; tw++)
          TW_UNROLL
          for (int s = 0; s < run; s++) {
            float y[vector];
            x.get(y, s * row_w + tw * tap_w);
            use(0, s, th, tw, y);
          }
      }
      return;
    }
    TW_UNROLL
    for (int row = 0; row < span_h; row++) {
      keep_order();
      const Line from = line(p, image, at, d, h + row);
      Span<keeps_raw> x;
      TW_UNROLL
      for (int i = 0; i < span_w; i++) x.load_at(i, p, from, w + i);
      TW_UNROLL
      for (int r = 0; r < rows; r++)
        TW_UNROLL
        for (int th = 0; th < taps_h; th++)
          if (r * row_h + th * tap_h == row) {
            TW_UNROLL
            for (int tw = 0; tw < taps_w; tw++)
              TW_UNROLL
              for (int s = 0; s < run; s++) {
                float y[vector];
                x.get(y, s * row_w + tw * tap_w);
                use(r, s, th, tw, y);
              }
          }
    }
  }
};

// Rows of the result whose offsets are known already.
template <class Config>
struct OffsetRows {
  static constexpr bool accumulates = Config::accumulate;
  const char* before;
  TW_DEVICE int64_t operator()(int64_t i) const { return i; }
  TW_DEVICE bool divisible(int) const { return false; }
};

}  // namespace tw::gpu
