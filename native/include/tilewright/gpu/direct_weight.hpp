// The gradient of depthwise weights on GPUs: every channel by itself. See depthwise_tile.hpp. A workgroup adds up the
// products of one slice of the pixels for the channels of one tile; the sums of every slice go to the workspace in fp32,
// [slice][channel][tap], and the kernel of conv_convert.hpp adds them. Workgroups: ceil(channels / channel_tile) *
// launch.split_k. A filter that is known at run time is read once per tap.
#pragma once
#include "tilewright/gpu/conv_convert.hpp"
#include "tilewright/gpu/depthwise_tile.hpp"

namespace tw::gpu {

template <class Config>
struct DepthwiseWeight : DepthwiseTile<Config> {
  using Tile = DepthwiseTile<Config>;
  using Place = typename Tile::Place;
  using Gradient = typename Tile::Other;
  static constexpr int vector = Tile::vector, rows = Tile::rows, run = Tile::run, threads = Tile::threads;
  static constexpr int channel_tile = Tile::channel_tile, taps_hw = max_of(Tile::taps_h * Tile::taps_w, 1);
  static constexpr int shared_bytes = threads * vector * 4;
  static_assert(Config::kind == ConvKind::depthwise, "groups of several channels have kernels of their own");

  using Sums = float[taps_hw][vector];
  using Gradients = float[rows][run][vector];

  TW_DEVICE static void load_gradients(Gradients& dy, const tw_conv_problem& p, const Place& at) {
    using Vector = Packed<Gradient, vector>;
    const int64_t line = at.n * p.row_n + at.d * p.axes[0].row_stride + at.channel * p.row_g;
    TW_UNROLL
    for (int r = 0; r < rows; r++)
      TW_UNROLL
      for (int s = 0; s < run; s++) {
        Vector raw = {};
        if (at.exists && at.h + r < (int)p.axes[1].rows && at.w + s < (int)p.axes[2].rows)
          raw = load_constant<Vector>((const char*)p.gemm.a +
                                      (line + (at.h + r) * p.axes[1].row_stride + (at.w + s) * p.axes[2].row_stride) *
                                          size_of<Gradient>);
        TW_UNROLL
        for (int v = 0; v < vector; v++) dy[r][s][v] = to_float<Gradient>(raw.get(v));
      }
  }

  // Depth tap td; of a filter that is known at run time one tap (th, tw) alone.
  TW_DEVICE static void add(Sums& sum, const tw_conv_problem& p, const Place& at, const Spot& tap) {
    Gradients dy;
    load_gradients(dy, p, at);
    const int d = Tile::begin(p, 0, at.d) + tap.d * (int)p.axes[0].tap_step;
    if constexpr (Tile::fixed) {
      Tile::for_fixed(p, (const char*)p.gemm.b, at, d, [&](int r, int s, int th, int tw, const float (&x)[vector]) {
        TW_UNROLL
        for (int v = 0; v < vector; v++) {
          float& to = sum[th * Tile::taps_w + tw][v];
          to = fma(dy[r][s][v], x[v], to);
        }
      });
    } else {
      TW_UNROLL
      for (int r = 0; r < rows; r++) {
        const int h = Tile::begin(p, 1, at.h + r) + tap.h * (int)p.axes[1].tap_step;
        const auto from = Tile::line(p, (const char*)p.gemm.b, at, d, h);
        TW_UNROLL
        for (int s = 0; s < run; s++) {
          float x[vector];
          Tile::load(x, p, from, Tile::begin(p, 2, at.w + s) + tap.w * (int)p.axes[2].tap_step);
          TW_UNROLL
          for (int v = 0; v < vector; v++) sum[0][v] = fma(dy[r][s][v], x[v], sum[0][v]);
        }
      }
    }
  }

  // Adds the sums of all threads that have the same channels, in their order; `to`: of the tap, in the workspace.
  TW_DEVICE static void reduce(const float (&sum)[vector], char* to, int64_t taps, int channels, int thread,
                               uint32_t shared) {
    TW_UNROLL
    for (int v = 0; v < vector; v++) store_shared<1>(shared + (thread * vector + v) * 4, {bits_of(sum[v])});
    barrier();
    for (int c = thread; c < channel_tile; c += threads) {
      float total = 0.0f;
      TW_UNROLL_BY(4)
      for (int lane = 0; lane < Tile::lanes_p; lane++)
        total += float_of(load_shared<1>(shared + (lane * channel_tile + c) * 4).w[0]);
      if (c < channels) store_global(to + c * taps * 4, total);
    }
    barrier();
  }

  TW_DEVICE static void run_block(const ConvParams<Config>& params) {
    const int thread = thread_index(), slices = (int)params.launch.split_k;
    const tw_conv_problem& p = params.task.conv;
    const int block = block_index() / slices, slice = block_index() % slices;
    const int total = Tile::tiles(p), each = ceil_div(ceil_div(total, slices), Tile::lanes_p) * Tile::lanes_p;
    const int begin = min_of(slice * each, total), end = min_of(begin + each, total);
    const int taps = (int)p.gemm.n, passes = Tile::fixed ? (int)p.axes[0].taps : taps;
    char* const partial =
        (char*)params.launch.workspace + ((int64_t)slice * p.groups + block * channel_tile) * taps * 4;
    TW_NO_UNROLL
    for (int pass = 0; pass < passes; pass++) {
      const Spot tap = Tile::fixed ? Spot{0, pass, 0, 0} : spot_of_tap<Config::ndim>(p.axes, pass);
      Sums sum;
      TW_UNROLL
      for (int t = 0; t < taps_hw; t++)
        TW_UNROLL
        for (int v = 0; v < vector; v++) sum[t][v] = 0.0f;
      TW_NO_UNROLL
      for (int tile = begin + thread / Tile::lanes_c; tile < end; tile += Tile::lanes_p)
        add(sum, p, Tile::place(p, tile, block, thread), tap);
      TW_UNROLL
      for (int t = 0; t < taps_hw; t++)
        reduce(sum[t], partial + (pass * taps_hw + t) * 4, taps, (int)p.groups - block * channel_tile, thread,
               shared_base());
    }
  }
};

}  // namespace tw::gpu

#define TW_CONV_KERNEL(NAME, ...) \
  TW_KERNEL(tw::gpu::DepthwiseWeight<__VA_ARGS__>::threads, 1, NAME, tw::ConvParams<__VA_ARGS__>, \
            tw::gpu::DepthwiseWeight<__VA_ARGS__>::run_block(params);)
