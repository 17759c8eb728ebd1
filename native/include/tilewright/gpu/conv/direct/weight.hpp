// The gradient of the weights of depthwise convolutions and of small groups on GPUs, without a product. See
// gpu/conv/depthwise/tile.hpp. A workgroup adds up the products of one slice of the pixels for some units; the sums of
// every slice go to the workspace in fp32, [slice][group][m][n], and the kernel of gpu/conv/convert.hpp adds them.
// Workgroups: ceil(units / lanes_c) * launch.split_k. A filter that is known at run time is read once per tap.
//
//   DepthwiseWeight  a unit is `vector` channels and all taps of a plane
//   GroupWeight      a unit is vector_a channels of dy and vector_b of x, of one group, and one row of taps (of a
//                    filter that is known at run time one tap); units with neighbouring channels of x come first.
//                    channel_tile is lanes_c * vector_b
#pragma once
#include "tilewright/gpu/conv/convert.hpp"
#include "tilewright/gpu/conv/depthwise/tile.hpp"
#if !defined(__HIP__)
#include "tilewright/gpu/conv/merged/weight.hpp"
#endif

namespace tw::gpu {

// Adds kVector sums of all threads of a unit, in their order, and hands each total to use(lane, v, total).
template <int kThreads, int kLanes, int kVector, class Use>
TW_DEVICE void add_over_threads(const float (&sum)[kVector], int thread, uint32_t shared, const Use& use) {
  TW_UNROLL
  for (int v = 0; v < kVector; v++) store_shared<1>(shared + (thread * kVector + v) * 4, {bits_of(sum[v])});
  barrier();
  for (int id = thread; id < kLanes * kVector; id += kThreads) {
    float total = 0.0f;
    TW_UNROLL_BY(4)
    for (int i = 0; i < kThreads / kLanes; i++)
      total += float_of(load_shared<1>(shared + (i * kLanes * kVector + id) * 4).w[0]);
    use(id / kVector, id % kVector, total);
  }
  barrier();
}

template <class Config>
struct DepthwiseWeight : DepthwiseTile<Config> {
  using Tile = DepthwiseTile<Config>;
  using Place = typename Tile::Place;
  using Gradient = typename Tile::Other;
  static constexpr int vector = Tile::vector, rows = Tile::rows, run = Tile::run, threads = Tile::threads;
  static constexpr int channel_tile = Tile::channel_tile, taps_hw = max_of(Tile::taps_h * Tile::taps_w, 1);
  static constexpr int shared_bytes = threads * vector * 4;

  using Accumulators = float[taps_hw][vector];
  using Gradients = float[rows][run][vector];

  TW_DEVICE static void load_gradients(Gradients& dy, const tw_conv_problem& p, const Place& at) {
    using Vector = Packed<Gradient, vector>;
    const int64_t line = at.n * p.row_n + at.d * p.axes[0].row_stride + at.group * p.row_g;
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
  TW_DEVICE static void add(Accumulators& sum, const tw_conv_problem& p, const Place& at, const Spot& tap) {
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
      Accumulators sum;
      TW_UNROLL
      for (int t = 0; t < taps_hw; t++)
        TW_UNROLL
        for (int v = 0; v < vector; v++) sum[t][v] = 0.0f;
      TW_NO_UNROLL
      for (int tile = begin + thread / Tile::lanes_c; tile < end; tile += Tile::lanes_p)
        add(sum, p, Tile::place(p, tile, block, thread), tap);
      const int channels = (int)p.groups - block * channel_tile;
      TW_UNROLL
      for (int t = 0; t < taps_hw; t++)
        add_over_threads<threads, Tile::lanes_c>(sum[t], thread, shared_base(), [&](int lane, int v, float total) {
          const int channel = lane * vector + v;
          if (channel < channels) store_global(partial + ((int64_t)channel * taps + pass * taps_hw + t) * 4, total);
        });
    }
  }
};

template <class Config>
struct GroupWeight : DepthwiseTile<Config> {
  using Tile = DepthwiseTile<Config>;
  using Gradient = typename Tile::Other;
  using Image = typename Tile::Image;
  static constexpr int wide = Config::vector_b, tall = Config::vector_a;  // channels of x and of dy
  static constexpr int taps_w = max_of(Tile::taps_w, 1), rows = Tile::rows, run = Tile::run, threads = Tile::threads;
  static constexpr int lanes_c = Config::channel_tile > 0 ? Config::channel_tile / wide : 32;
  static constexpr int lanes_p = threads / lanes_c;
  static_assert(threads % lanes_c == 0 && wide == Tile::vector, "threads share the units of a tile");

  struct Unit {
    int group, x, dy;  // first channels, of the group
    Spot tap;          // of fixed filters w runs
    bool exists;
  };
  TW_DEVICE static int units(const tw_conv_problem& p) {
    const int rows_of_taps = Tile::fixed ? (int)(p.axes[0].taps * p.axes[1].taps)
                                         : (int)(p.axes[0].taps * p.axes[1].taps * p.axes[2].taps);
    return rows_of_taps * ceil_div((int)p.gemm.m, tall) * ((int)p.channels / wide) * (int)p.groups;
  }
  TW_DEVICE static Unit unit(const tw_conv_problem& p, int index) {
    const int x_vectors = (int)p.channels / wide, across = x_vectors * (int)p.groups;
    const int dy_vectors = ceil_div((int)p.gemm.m, tall), down = index / across, place = index - down * across;
    const int row = down / dy_vectors, group = place / x_vectors;
    Unit u = {group, (place - group * x_vectors) * wide, (down - row * dy_vectors) * tall, {}, index < units(p)};
    if constexpr (Tile::fixed) u.tap = {0, row / Tile::taps_h, row % Tile::taps_h, 0};
    else u.tap = spot_of_tap<Config::ndim>(p.axes, row);
    return u;
  }

  using Accumulators = float[taps_w][tall][wide];

  TW_DEVICE static void load_gradient(float (&dy)[tall], const tw_conv_problem& p, const char* from, int count,
                                      bool exists) {
    TW_UNROLL
    for (int o = 0; o < tall; o++) dy[o] = 0.0f;
    if (!exists) return;
    if (count >= tall && is_aligned(from, min_of(tall * size_of<Gradient>, 16))) {
      const auto raw = load_vector<Gradient, tall, true>(from);
      TW_UNROLL
      for (int o = 0; o < tall; o++) dy[o] = to_float<Gradient>(raw.get(o));
    } else {
      TW_UNROLL
      for (int o = 0; o < tall; o++)
        if (o < count)
          dy[o] = to_float<Gradient>(load_constant<typename Gradient::storage>(from + o * p.row_c * size_of<Gradient>));
    }
  }

  TW_DEVICE static void add(Accumulators& sum, const tw_conv_problem& p, typename Tile::Place at, const Unit& u) {
    at.offset = (uint32_t)u.group * (uint32_t)p.image_g + (uint32_t)u.x * (uint32_t)p.image_c;
    at.exists = at.exists && u.exists;
    const int64_t line = at.n * p.row_n + at.d * p.axes[0].row_stride + u.group * p.row_g + u.dy * p.row_c;
    const int d = Tile::begin(p, 0, at.d) + u.tap.d * (int)p.axes[0].tap_step, count = (int)p.gemm.m - u.dy;
    TW_UNROLL
    for (int r = 0; r < rows; r++) {
      const int h = Tile::begin(p, 1, at.h + r) + u.tap.h * (int)p.axes[1].tap_step;
      const int w = Tile::begin(p, 2, at.w) + u.tap.w * (int)p.axes[2].tap_step, step = (int)p.axes[2].row_step;
      keep_order();
      const auto from = Tile::line(p, (const char*)p.gemm.b, at, d, h);
      constexpr int kSpan = Tile::fixed ? Tile::span_w : run;
      float x[kSpan > 0 ? kSpan : 1][wide];
      TW_UNROLL
      for (int i = 0; i < kSpan; i++) Tile::load(x[i], p, from, w + i * (Tile::fixed ? 1 : step));
      TW_UNROLL
      for (int s = 0; s < run; s++) {
        const bool exists = at.exists && at.h + r < (int)p.axes[1].rows && at.w + s < (int)p.axes[2].rows;
        float dy[tall];
        load_gradient(dy, p,
                      (const char*)p.gemm.a + (line + (at.h + r) * p.axes[1].row_stride +
                                               (at.w + s) * p.axes[2].row_stride) * size_of<Gradient>,
                      count, exists);
        TW_UNROLL
        for (int t = 0; t < taps_w; t++)
          TW_UNROLL
          for (int o = 0; o < tall; o++)
            TW_UNROLL
            for (int v = 0; v < wide; v++)
              sum[t][o][v] = fma(dy[o], x[Tile::fixed ? s * Tile::row_w + t * Tile::tap_w : s][v], sum[t][o][v]);
      }
    }
  }

  TW_DEVICE static void run_block(const ConvParams<Config>& params) {
    const int thread = thread_index(), slices = (int)params.launch.split_k;
    const tw_conv_problem& p = params.task.conv;
    const int block = block_index() / slices, slice = block_index() % slices;
    const int total = Tile::tiles(p), each = ceil_div(ceil_div(total, slices), lanes_p) * lanes_p;
    const int begin = min_of(slice * each, total), end = min_of(begin + each, total);
    const Unit own = unit(p, block * lanes_c + thread % lanes_c);
    Accumulators sum;
    TW_UNROLL
    for (int t = 0; t < taps_w; t++)
      TW_UNROLL
      for (int o = 0; o < tall; o++)
        TW_UNROLL
        for (int v = 0; v < wide; v++) sum[t][o][v] = 0.0f;
    TW_NO_UNROLL
    for (int tile = begin + thread / lanes_c; tile < end; tile += lanes_p) {
      typename Tile::Place at = Tile::place(p, tile, 0, 0);
      at.exists = true;
      add(sum, p, at, own);
    }
    const int64_t item = p.gemm.m * p.gemm.n;
    char* const partial = (char*)params.launch.workspace + (int64_t)slice * p.groups * item * 4;
    const int plane_h = (int)p.axes[1].taps, plane_w = (int)p.axes[2].taps;
    TW_UNROLL
    for (int t = 0; t < taps_w; t++)
      TW_UNROLL
      for (int o = 0; o < tall; o++)
        add_over_threads<threads, lanes_c>(sum[t][o], thread, shared_base(), [&](int lane, int v, float result) {
          const Unit u = unit(p, block * lanes_c + lane);
          if (!u.exists || u.dy + o >= (int)p.gemm.m) return;
          const int tap = (u.tap.d * plane_h + u.tap.h) * plane_w + u.tap.w + t;
          const int64_t at = u.group * item + (u.dy + o) * p.gemm.n + tap * p.channels + u.x + v;
          store_global(partial + at * 4, result);
        });
  }
};

template <class Config, bool kDepthwise = Config::kind == ConvKind::depthwise>
struct DirectWeight : DepthwiseWeight<Config> {};
template <class Config>
struct DirectWeight<Config, false> : GroupWeight<Config> {};

template <class Config, bool kMerged = (Config::groups_merged > 1)>
struct DirectWeightFor {
  static_assert(!kMerged, "merged groups take NVIDIA's matrix instructions");
  using type = DirectWeight<Config>;
  static constexpr int min_blocks = 1;
};
#if !defined(__HIP__)
template <class Config>
struct DirectWeightFor<Config, true> {
  using type = MergedWeight<Config>;
  static constexpr int min_blocks = type::min_blocks;
};
#endif

}  // namespace tw::gpu

#define TW_CONV_KERNEL(NAME, ...) \
  TW_KERNEL(tw::gpu::DirectWeightFor<__VA_ARGS__>::type::threads, tw::gpu::DirectWeightFor<__VA_ARGS__>::min_blocks, NAME, \
            tw::ConvParams<__VA_ARGS__>, \
            tw::gpu::release_convert(); \
            tw::gpu::DirectWeightFor<__VA_ARGS__>::type::run_block(params);)
