// Depthwise convolution on GPUs, forward and backward data: every channel by itself, without a product. See
// gpu/conv/depthwise/tile.hpp. A generated source unit states a Config and writes TW_CONV_KERNEL(symbol, Config).
#pragma once
#include "tilewright/gpu/conv/depthwise/tile.hpp"
#include "tilewright/gpu/blocks/scheduler.hpp"
#if !defined(__HIP__)
#include "tilewright/gpu/conv/merged/lanes.hpp"
#endif

namespace tw::gpu {

template <class Config>
struct Depthwise : DepthwiseTile<Config> {
  using Tile = DepthwiseTile<Config>;
  using Place = typename Tile::Place;
  using Weight = typename Tile::Other;
  static constexpr int vector = Tile::vector, rows = Tile::rows, run = Tile::run, threads = Tile::threads;
  static constexpr int channel_tile = Tile::channel_tile;

  // To shared memory, in fp32, tap by tap.
  TW_DEVICE static void load_weights(const tw_conv_problem& p, int taps, int block, int thread, uint32_t shared) {
    TW_NO_UNROLL
    for (int id = thread; id < taps * channel_tile; id += threads) {
      const int tap = id / channel_tile, channel = block * channel_tile + id % channel_tile;
      const Spot s = spot_of_tap<Config::ndim>(p.axes, tap);
      float x = 0.0f;
      if (channel < (int)p.groups) {
        int64_t offset = channel * p.weight_g;
        TW_UNROLL
        for (int i = 3 - Config::ndim; i < 3; i++) offset += s.axis(i) * p.axes[i].tap_stride;
        x = to_float<Weight>(load_constant<typename Weight::storage>((const char*)p.gemm.b + offset * size_of<Weight>));
      }
      store_shared<1>(shared + id * 4, {bits_of(x)});
    }
    barrier();
  }

  using Accumulators = float[rows][run][vector];

  TW_DEVICE static void add_fixed(Accumulators& sum, const tw_conv_problem& p, const Place& at, uint32_t weights) {
    constexpr int kPlane = Tile::taps_h * Tile::taps_w;
    const int planes = (int)p.axes[0].taps;
    TW_NO_UNROLL
    for (int td = 0; td < planes; td++) {
      const int d = Tile::begin(p, 0, at.d) + td * (Tile::is_backward ? -(int)p.axes[0].tap_step : (int)p.axes[0].tap_step);
      // Backward: the taps in the order of the pixels that they meet.
      const uint32_t plane = weights + (Tile::is_backward ? planes - 1 - td : td) * (kPlane * channel_tile * 4);
      Tile::for_fixed(p, (const char*)p.gemm.a, at, d, [&](int r, int s, int th, int tw, const float (&x)[vector]) {
        const int tap = th * Tile::taps_w + tw;
        float w[vector];
        load_weight(w, plane + (Tile::is_backward ? kPlane - 1 - tap : tap) * (channel_tile * 4));
        TW_UNROLL
        for (int v = 0; v < vector; v++) sum[r][s][v] = fma(x[v], w[v], sum[r][s][v]);
      });
    }
  }

  TW_DEVICE static void add_any(Accumulators& sum, const tw_conv_problem& p, const Place& at, uint32_t weights,
                                int taps) {
    TW_NO_UNROLL
    for (int tap = 0; tap < taps; tap++) {
      const Spot t = spot_of_tap<Config::ndim>(p.axes, tap);
      float w[vector];
      load_weight(w, weights + tap * (channel_tile * 4));
      const int d = Tile::begin(p, 0, at.d) + t.d * (int)p.axes[0].tap_step;
      TW_UNROLL
      for (int r = 0; r < rows; r++) {
        const int h = Tile::begin(p, 1, at.h + r) + t.h * (int)p.axes[1].tap_step;
        const auto from = Tile::line(p, (const char*)p.gemm.a, at, d, h);
        TW_UNROLL
        for (int s = 0; s < run; s++) {
          float x[vector];
          Tile::load(x, p, from, Tile::begin(p, 2, at.w + s) + t.w * (int)p.axes[2].tap_step);
          TW_UNROLL
          for (int v = 0; v < vector; v++) sum[r][s][v] = fma(x[v], w[v], sum[r][s][v]);
        }
      }
    }
  }

  // ---- the result ----

  // The product's operands, with channels as its columns.
  struct Operands {
    tw_gemm_problem problem;
    tw_gemm_operand d[Config::D::size > 0 ? Config::D::size : 1];
  };
  TW_DEVICE static Operands by_channel(const tw_conv_problem& p, const tw_gemm_operand* d) {
    Operands x;
    x.problem = p.gemm;
    x.problem.n = p.groups;
    x.problem.bias.col_stride = p.gemm.bias.batch_stride;
    if constexpr (Config::scale_b == Scale::column) x.problem.scale_b.col_stride = p.gemm.scale_b.batch_stride;
    TW_UNROLL
    for (int i = 0; i < Config::D::size; i++) x.d[i] = d[i], x.d[i].col_stride = d[i].batch_stride;
    return x;
  }

  template <class Use>
  TW_DEVICE static void for_each_pixel(const tw_conv_problem& p, const Place& at, const Use& use) {
    TW_UNROLL
    for (int r = 0; r < rows; r++)
      TW_UNROLL
      for (int s = 0; s < run; s++)
        if (at.exists && at.h + r < (int)p.axes[1].rows && at.w + s < (int)p.axes[2].rows) use(r, s);
  }

  TW_DEVICE static void store(const Accumulators& sum, const tw_conv_problem& p, const tw_gemm_operand* d,
                              const Place& at) {
    if constexpr (Config::channels_first) {
      static_assert(Config::D::size == 0, "depthwise, channels-first: no D operands");
      using Rows = OffsetRows<Config>;
      const int64_t base = at.n * p.row_n + at.group * p.row_g;
      tw_gemm_problem g = p.gemm;
      g.c = (char*)g.c + base * size_of<typename Config::C>;
      g.stride_c = 0;
      const Epilogue<Config, float, Rows> finish(g, nullptr, at.group,
                                                 {(const char*)p.acc + base * size_of<typename Config::C>});
      const auto columns = finish.template columns<1>(0, 1);
      for_each_pixel(p, at, [&](int r, int s) {
        finish.store(sum[r][s], columns,
                     at.d * p.axes[0].row_stride + (at.h + r) * p.axes[1].row_stride + (at.w + s) * p.axes[2].row_stride,
                     0, 1);
      });
    } else {
      const Operands own = by_channel(p, d);
      const ConvRows<Config> where(p, 0, size_of<typename Config::C>);
      const Epilogue<Config, float, ConvRows<Config>> finish(own.problem, own.d, 0, where);
      const int count = min_of((int)p.groups - at.group, vector);
      if (count <= 0) return;
      const auto columns = finish.template columns<vector>(at.group, count);
      const int line = (at.n * (int)p.axes[0].rows + at.d) * (int)p.axes[1].rows + at.h;
      for_each_pixel(p, at, [&](int r, int s) {
        finish.store(sum[r][s], columns, (line + r) * (int)p.axes[2].rows + at.w + s, at.group, count);
      });
    }
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
    const uint32_t weights = shared + thread % Tile::lanes_c * (vector * 4);
    TW_NO_UNROLL
    for (int i = 0; i < Tile::repeats; i++) {
      const int tile = (within / blocks * Tile::repeats + i) * Tile::lanes_p + thread / Tile::lanes_c;
      const Place at = Tile::place(p, tile, block, thread);
      Accumulators sum;
      clear(sum);
      if constexpr (Tile::fixed) add_fixed(sum, p, at, weights);
      else add_any(sum, p, at, weights, taps);
      store(sum, p, task->operands(), at);
    }
  }
};

template <class Config, bool kMerged = (Config::groups_merged > 1)>
struct DepthwiseFor {
  static_assert(!kMerged, "merged groups take NVIDIA's matrix instructions");
  using type = Depthwise<Config>;
  static constexpr int min_blocks = 1;
};
#if !defined(__HIP__)
template <class Config>
struct DepthwiseFor<Config, true> {
  using type = typename MergedFor<Config>::type;
  static constexpr int min_blocks = type::min_blocks;
};
#endif

}  // namespace tw::gpu

#define TW_CONV_KERNEL(NAME, ...) \
  TW_KERNEL(tw::gpu::DepthwiseFor<__VA_ARGS__>::type::threads, tw::gpu::DepthwiseFor<__VA_ARGS__>::min_blocks, NAME, \
            tw::ConvParams<__VA_ARGS__>, \
            tw::gpu::DepthwiseFor<__VA_ARGS__>::type::run_block(params);)
