// Convolution of small groups on GPUs, forward and backward data, without a product: see gpu/conv/depthwise/tile.hpp. A
// thread computes some channels of one group. A generated source unit states a Config and writes TW_CONV_KERNEL(symbol,
// Config).
#pragma once
#include "tilewright/gpu/conv/depthwise/tile.hpp"
#include "tilewright/gpu/blocks/scheduler.hpp"
#if !defined(__HIP__)
#include "tilewright/gpu/conv/merged/lanes.hpp"
#endif

namespace tw::gpu {

template <class Config>
struct GroupConv : DepthwiseTile<Config> {
  using Tile = DepthwiseTile<Config>;
  using Place = typename Tile::Place;
  using Weight = typename Tile::Other;
  static constexpr int vector = Tile::vector, outputs = Tile::outputs, rows = Tile::rows, run = Tile::run;
  static constexpr int threads = Tile::threads, channel_tile = Tile::channel_tile;
  static constexpr int line_bytes = channel_tile * 4;  // the weights of one tap and one gathered channel

  // To shared memory, in fp32: [tap][gathered channel][thread of a unit][output].
  TW_DEVICE static void load_weights(const tw_conv_problem& p, int taps, int block, int thread, uint32_t shared) {
    const int channels = (int)p.channels, each = ceil_div((int)p.gemm.n, outputs);
    TW_NO_UNROLL
    for (int id = thread; id < taps * channels * channel_tile; id += threads) {
      const int line = id / channel_tile, within = id % channel_tile, tap = divide(line, p.by_channels);
      const int unit = block * Tile::lanes_c + within / outputs, group = unit / each;
      const int output = (unit - group * each) * outputs + within % outputs;
      const Spot s = spot_of_tap<Config::ndim>(p.axes, tap);
      float x = 0.0f;
      if (group < (int)p.groups && output < (int)p.gemm.n) {
        int64_t offset = group * p.weight_g + output * p.weight_n + (line - tap * channels) * p.weight_c;
        TW_UNROLL
        for (int i = 3 - Config::ndim; i < 3; i++) offset += s.axis(i) * p.axes[i].tap_stride;
        x = to_float<Weight>(load_constant<typename Weight::storage>((const char*)p.gemm.b + offset * size_of<Weight>));
      }
      store_shared<1>(shared + id * 4, {bits_of(x)});
    }
    barrier();
  }

  using Accumulators = float[rows][run][outputs];

  // Channels at.offset and on of a plane of fixed taps.
  TW_DEVICE static void add_fixed(Accumulators& sum, const tw_conv_problem& p, const Place& at, uint32_t weights) {
    constexpr int kPlane = Tile::taps_h * Tile::taps_w;
    const int planes = (int)p.axes[0].taps, tap_bytes = (int)p.channels * line_bytes;
    TW_NO_UNROLL
    for (int td = 0; td < planes; td++) {
      const int d = Tile::begin(p, 0, at.d) + td * (Tile::is_backward ? -(int)p.axes[0].tap_step : (int)p.axes[0].tap_step);
      const uint32_t plane = weights + (Tile::is_backward ? planes - 1 - td : td) * (kPlane * tap_bytes);
      const int h = Tile::begin(p, 1, at.h), w = Tile::begin(p, 2, at.w);
      TW_UNROLL
      for (int row = 0; row < Tile::span_h; row++) {
        keep_order();
        const auto from = Tile::line(p, (const char*)p.gemm.a, at, d, h + row);
        float x[Tile::span_w > 0 ? Tile::span_w : 1][vector];
        TW_UNROLL
        for (int i = 0; i < Tile::span_w; i++) Tile::load(x[i], p, from, w + i);
        TW_UNROLL
        for (int th = 0; th < Tile::taps_h; th++)
          TW_UNROLL
          for (int tw = 0; tw < Tile::taps_w; tw++) {
            const int tap = th * Tile::taps_w + tw;
            keep_order();
            const uint32_t own = plane + (Tile::is_backward ? kPlane - 1 - tap : tap) * tap_bytes;
            TW_UNROLL
            for (int v = 0; v < vector; v++) {
              float y[outputs];
              if (meets(row - th * Tile::tap_h)) load_weight(y, own + v * line_bytes);
              TW_UNROLL
              for (int r = 0; r < rows; r++)
                if (r * Tile::row_h + th * Tile::tap_h == row) {
                  TW_UNROLL
                  for (int s = 0; s < run; s++)
                    TW_UNROLL
                    for (int o = 0; o < outputs; o++)
                      sum[r][s][o] = fma(x[s * Tile::row_w + tw * Tile::tap_w][v], y[o], sum[r][s][o]);
                }
            }
          }
      }
    }
  }
  // True if a row of the tile begins so many pixels down.
  static constexpr bool meets(int down) {
    return down >= 0 && down % Tile::row_h == 0 && down / Tile::row_h < rows;
  }

  TW_DEVICE static void add_any(Accumulators& sum, const tw_conv_problem& p, const Place& at, uint32_t weights,
                                int taps) {
    TW_NO_UNROLL
    for (int tap = 0; tap < taps; tap++) {
      const Spot t = spot_of_tap<Config::ndim>(p.axes, tap);
      const uint32_t own = weights + tap * (int)p.channels * line_bytes;
      const int d = Tile::begin(p, 0, at.d) + t.d * (int)p.axes[0].tap_step;
      TW_UNROLL
      for (int r = 0; r < rows; r++) {
        const int h = Tile::begin(p, 1, at.h + r) + t.h * (int)p.axes[1].tap_step;
        keep_order();
        const auto from = Tile::line(p, (const char*)p.gemm.a, at, d, h);
        float x[run][vector];
        TW_UNROLL
        for (int s = 0; s < run; s++)
          Tile::load(x[s], p, from, Tile::begin(p, 2, at.w + s) + t.w * (int)p.axes[2].tap_step);
        TW_UNROLL
        for (int v = 0; v < vector; v++) {
          float y[outputs];
          load_weight(y, own + v * line_bytes);
          TW_UNROLL
          for (int s = 0; s < run; s++)
            TW_UNROLL
            for (int o = 0; o < outputs; o++) sum[r][s][o] = fma(x[s][v], y[o], sum[r][s][o]);
        }
      }
    }
  }

  TW_DEVICE static void store(const Accumulators& sum, const tw_conv_problem& p, const tw_gemm_operand* d,
                              const Place& at) {
    const ConvRows<Config> where(p, at.group, size_of<typename Config::C>);
    const Epilogue<Config, float, ConvRows<Config>> finish(p.gemm, d, at.group, where);
    const int count = min_of((int)p.gemm.n - at.channel, outputs);
    if (!at.exists) return;
    const auto columns = finish.template columns<outputs>(at.channel, count);
    const int line = (at.n * (int)p.axes[0].rows + at.d) * (int)p.axes[1].rows + at.h;
    TW_UNROLL
    for (int r = 0; r < rows; r++)
      TW_UNROLL
      for (int s = 0; s < run; s++)
        if (at.h + r < (int)p.axes[1].rows && at.w + s < (int)p.axes[2].rows)
          finish.store(sum[r][s], columns, (line + r) * (int)p.axes[2].rows + at.w + s, at.channel, count);
  }

  TW_DEVICE static void run_block(const ConvParams<Config>& params) {
    const int index = block_index(), thread = thread_index();
    const auto* const task = task_of<Config>(params, index);
    const tw_conv_problem& p = task->conv;
    const int within = Config::grouped ? index - (int)task->first_tile : index;
    const int blocks = ceil_div(Tile::units(p), Tile::lanes_c), block = within % blocks;
    const int taps = (int)(p.axes[0].taps * p.axes[1].taps * p.axes[2].taps);
    const uint32_t shared = shared_base();
    load_weights(p, taps, block, thread, shared);
    const uint32_t weights = shared + thread % Tile::lanes_c * (outputs * 4);
    TW_NO_UNROLL
    for (int i = 0; i < Tile::repeats; i++) {
      const int tile = (within / blocks * Tile::repeats + i) * Tile::lanes_p + thread / Tile::lanes_c;
      Place at = Tile::place(p, tile, block, thread);
      Accumulators sum;
      clear(sum);
      const tw_conv_problem& again = task_again<Config>(params, task).conv;
      TW_NO_UNROLL
      for (int channel = 0; channel < (int)again.channels; channel += vector) {
        if constexpr (Tile::fixed) add_fixed(sum, again, at, weights + channel * line_bytes);
        else add_any(sum, again, at, weights + channel * line_bytes, taps);
        at.offset += vector == 1 ? (uint32_t)again.image_c : (uint32_t)vector;
      }
      const auto& end = task_again<Config>(params, task);
      store(sum, end.conv, end.operands(), at);
    }
  }
};

template <class Config, bool kMerged = (Config::groups_merged > 1)>
struct GroupConvFor {
  static_assert(!kMerged, "merged groups take NVIDIA's matrix instructions");
  using type = GroupConv<Config>;
  static constexpr int min_blocks = 1;
};
#if !defined(__HIP__)
template <class Config>
struct GroupConvFor<Config, true> {
  using type = typename MergedFor<Config>::type;
  static constexpr int min_blocks = type::min_blocks;
};
#endif

}  // namespace tw::gpu

#define TW_CONV_KERNEL(NAME, ...) \
  TW_KERNEL(tw::gpu::GroupConvFor<__VA_ARGS__>::type::threads, tw::gpu::GroupConvFor<__VA_ARGS__>::min_blocks, NAME, \
            tw::ConvParams<__VA_ARGS__>, \
            tw::gpu::GroupConvFor<__VA_ARGS__>::type::run_block(params);)
