// The gradient of a convolution's weights without a product, for groups of few channels: a product would spend its time
// packing panels that are mostly empty.
//
// Channels-last: lanes run over channels of the side that has more of them per group (the wide one, of x or dy); to each
// belong the `narrow` channels of the other side's group. A line of pixels is widened to fp32 once, its narrow channels
// spread over the lanes that they meet, with zeros where the filter looks outside the image. Lines of x are kept while
// the filter moves down. Channels-first (depthwise only): lanes run over the pixels of a line.
//
// The lines of all images are cut into launch.split_k slices, whose sums (partials) are added in their order. Each
// element is summed in an order that depends on the problem and the Config alone. What a unit exports: conv_entries.hpp.
#pragma once
#include "tilewright/cpu/blocking.hpp"
#include "tilewright/cpu/conv_entries.hpp"
#include "tilewright/cpu/team.hpp"
#include "tilewright/cpu/weight_output.hpp"

TW_NAMESPACE_BEGIN

constexpr int64_t kRun = 128;  // pixels of a line that are held at a time

// Lane i becomes x[index[i]].
TW_INLINE f32v pick(f32v x, i32v index) {
#if !defined(__clang__)
  return __builtin_shuffle(x, index);
#elif TW_VECTOR_BYTES == 64
  return __builtin_ia32_permvarsf512(x, index);
#elif TW_VECTOR_BYTES == 32 && defined(__x86_64__)
  return __builtin_ia32_permvarsf256(x, index);
#else
  f32v y = {};
  for (int i = 0; i < kLanes; i++) y[i] = x[index[i]];
  return y;
#endif
}

// How the channels are cut into blocks of lanes, and what that takes. Sizes in bytes, multiples of 64.
template <class Config>
struct DirectPlan {
  static constexpr bool depthwise = Config::kind == ConvKind::depthwise, across = Config::channels_first;
  static_assert(!across || depthwise, "channels-first is for depthwise filters");
  static constexpr int team = Config::wave_m * Config::wave_n;
  static constexpr int64_t L = kLanes;

  int64_t groups, x_channels, dy_channels, wide, narrow;  // of one group
  bool x_is_wide;
  int64_t block_groups;   // whole groups in a block of lanes; 0: a block is a part of a group
  int64_t blocks_a_group, blocks;
  int64_t taps, lines, split, length;  // lines of pixels in all, and of a slice
  int64_t run, pixels;    // of dy and of x that are held at a time
  int64_t kept;           // lines of x

  constexpr DirectPlan(const tw_conv_problem& p, int64_t slices)
      : groups(p.groups), x_channels(p.channels), dy_channels(p.gemm.m) {
    const tw_conv_axis* const axes = p.axes;
    x_is_wide = x_channels > dy_channels;
    wide = x_is_wide ? x_channels : dy_channels, narrow = x_is_wide ? dy_channels : x_channels;
    block_groups = across ? 1 : L / wide;
    blocks_a_group = ceil_div(wide, L);
    blocks = block_groups > 0 ? ceil_div(groups, block_groups) : groups * blocks_a_group;
    taps = axes[0].taps * axes[1].taps * axes[2].taps;
    lines = p.images * axes[0].rows * axes[1].rows;
    split = max_of(slices, 1);
    length = max_of(ceil_div(lines, split), 1);
    run = max_of(min_of(axes[2].rows, kRun), 1);
    pixels = (run - 1) * axes[2].row_step + (axes[2].taps - 1) * axes[2].tap_step + 1;
    kept = axes[0].taps * axes[1].taps;
  }

  // Sums of one block: [tap][narrow][lane].
  constexpr int64_t block_sums() const { return taps * narrow * L; }
  constexpr int64_t partial_bytes() const { return blocks * split * block_sums() * 4; }
  constexpr int64_t x_line() const {
    // Across: one line for each remainder of a pixel by the stride, each whole vectors.
    return across ? 0 : pixels * (x_is_wide ? 1 : narrow) * L;
  }
  constexpr int64_t x_line_of(const tw_conv_axis& axis) const {
    return across ? axis.row_step * (ceil_div(pixels, axis.row_step) + 2 * L) : x_line();
  }
  constexpr int64_t dy_line() const { return across ? round_up(run, L) : run * (x_is_wide ? narrow : 1) * L; }
  constexpr int64_t member_bytes(const tw_conv_problem& p) const {
    return round_up(kept * x_line_of(p.axes[2]) * 4, 64) + round_up(dy_line() * 4, 64) + round_up(kept * 8, 64) +
           narrow * L * 4;
  }
};

template <class Config>
struct ConvKernel {
  using Plan = DirectPlan<Config>;
  using X = typename Config::B;
  using Dy = typename Config::A;
  static constexpr bool depthwise = Plan::depthwise, across = Plan::across;
  static constexpr int64_t L = kLanes;

  struct Memory {
    float* x;
    float* dy;
    int64_t* tags;  // which line of x each of the kept ones is
    int32_t* index;  // for every narrow channel, from which lane of the loaded ones each lane takes it
  };

  const tw_conv_problem& problem;
  const Plan plan;
  Memory memory;

  ConvKernel(const tw_conv_args& args, int rank) : problem(args.problems[0]), plan(problem, args.split_k) {
    char* at = (char*)args.workspace + plan.partial_bytes() + rank * plan.member_bytes(problem);
    memory.x = (float*)at, at += round_up(plan.kept * plan.x_line_of(problem.axes[2]) * 4, 64);
    memory.dy = (float*)at, at += round_up(plan.dy_line() * 4, 64);
    memory.tags = (int64_t*)at, at += round_up(plan.kept * 8, 64);
    memory.index = (int32_t*)at;
  }

  static int64_t workspace(const tw_conv_args& args) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < args.count; i++) {
      const Plan plan(args.problems[i], args.split_k);
      bytes = max_of(bytes, plan.partial_bytes() + plan.team * plan.member_bytes(args.problems[i]));
    }
    return bytes;
  }

  // ---- lines of pixels, widened ----

  // One block of lanes: its groups or part of a group.
  struct Block {
    int64_t group, first, lanes;  // first group, first wide channel in it, lanes in use
  };
  Block block_at(int64_t index) const {
    if (plan.block_groups > 0) {
      const int64_t group = index * plan.block_groups;
      return {group, 0, min_of(plan.groups - group, plan.block_groups) * plan.wide};
    }
    const int64_t first = index % plan.blocks_a_group * L;
    return {index / plan.blocks_a_group, first, min_of(plan.wide - first, L)};
  }

  // Pixels of a side with its channels in the lanes that they belong to. kIsWide: a vector each, else `narrow` of them.
  template <class E>
  TW_NOINLINE void widen(const char* from, int64_t pitch, int64_t count, float* to, const Block& block,
                         bool is_wide) const {
    const int64_t step = pitch * size_of<E>;
    constexpr int64_t kAhead = 8;
    if (depthwise || is_wide) {
      from += block.first * size_of<E>;
      if (block.lanes == L) {
        for (int64_t i = 0; i < count; i++, from += step, to += L) {
          __builtin_prefetch(from + kAhead * step, 0, 3);
          store_as(to, load_f32<E>(from));
        }
      } else {
        for (int64_t i = 0; i < count; i++, from += step, to += L)
          store_as(to, load_f32_partial<E>(from, block.lanes));
      }
    } else if (plan.block_groups > 0) {
      const int64_t given = block.lanes / plan.wide * plan.narrow;
      for (int64_t i = 0; i < count; i++, from += step) {
        __builtin_prefetch(from + kAhead * step, 0, 3);
        const f32v x = load_f32_partial<E>(from, given);
        for (int64_t c = 0; c < plan.narrow; c++, to += L) store_as(to, pick(x, load_as<i32v>(memory.index + c * L)));
      }
    } else {
      for (int64_t i = 0; i < count; i++, from += step)
        for (int64_t c = 0; c < plan.narrow; c++, to += L) store_as(to, splat(to_float<E>(from + c * size_of<E>)));
    }
  }

  // Where lanes find the narrow channels of their group among those that are loaded.
  void fill_index() const {
    for (int64_t c = 0; c < plan.narrow; c++)
      for (int64_t lane = 0; lane < L; lane++)
        memory.index[c * L + lane] = (int32_t)min_of(lane / plan.wide * plan.narrow + c, L - 1);
  }

  static TW_NOINLINE void clear(float* to, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = 0;
  }

  // Pixels [first, first + plan.pixels) along W of one line of x, zeros outside the image.
  void load_x(const char* line, int64_t first, float* to, const Block& block) const {
    const tw_conv_axis& axis = problem.axes[2];
    const int64_t begin = min_of(max_of(-first, 0), plan.pixels), end = max_of(min_of(axis.size - first, plan.pixels), begin);
    const char* const from = line + (first + begin) * axis.image_stride * size_of<X>;
    if constexpr (across) {
      const int64_t step = axis.row_step, each = ceil_div(plan.pixels, step) + 2 * L;
      clear(to, step * each);
      if (step == 1 && axis.image_stride <= 1) {
        for (int64_t i = begin; i < end; i += L)
          store_lanes(to + i, load_f32_partial<X>(from + (i - begin) * size_of<X>, end - i), end - i);
      } else {
        for (int64_t i = begin; i < end; i++)
          to[i % step * each + i / step] = to_float<X>(from + (i - begin) * axis.image_stride * size_of<X>);
      }
    } else {
      const int64_t vectors = depthwise || plan.x_is_wide ? 1 : plan.narrow;
      clear(to, begin * vectors * L);
      clear(to + end * vectors * L, (plan.pixels - end) * vectors * L);
      widen<X>(from, axis.image_stride, end - begin, to + begin * vectors * L, block, plan.x_is_wide);
    }
  }

  void load_dy(const char* from, int64_t count, const Block& block) const {
    const tw_conv_axis& axis = problem.axes[2];
    if constexpr (across) {
      clear(memory.dy, round_up(count, L));
      for (int64_t i = 0; i < count; i += axis.row_stride <= 1 ? L : 1) {
        const char* const at = from + i * axis.row_stride * size_of<Dy>;
        if (axis.row_stride <= 1) store_lanes(memory.dy + i, load_f32_partial<Dy>(at, count - i), count - i);
        else memory.dy[i] = to_float<Dy>(at);
      }
    } else {
      widen<Dy>(from, axis.row_stride, count, memory.dy, block, !plan.x_is_wide);
    }
  }

  static TW_INLINE void store_lanes(float* to, f32v x, int64_t count) {
    if (count >= L) store_as(to, x);
    else __builtin_memcpy(to, &x, (size_t)count * 4);
  }

  // ---- sums ----

  // Adds a line's products with kTaps taps along W (tap_step vectors apart) and kNarrow narrow channels to `sums`.
  template <int kTaps, int kNarrow, bool kXIsWide>
  static TW_NOINLINE void add(const float* x, int64_t x_step, int64_t tap_step, const float* dy, int64_t dy_step,
                              int64_t count, float* sums, int64_t sums_step) {
    constexpr int kChains = kTaps * kNarrow >= 8 ? 1 : kTaps * kNarrow >= 4 ? 2 : 4;
    f32v sum[kChains][kTaps][kNarrow];
    TW_UNROLL
    for (int u = 0; u < kChains; u++)
      TW_UNROLL
      for (int t = 0; t < kTaps; t++)
        TW_UNROLL
        for (int c = 0; c < kNarrow; c++) sum[u][t][c] = f32v{};
    int64_t i = 0;
    for (; i + kChains <= count; i += kChains) {
      TW_UNROLL
      for (int u = 0; u < kChains; u++)
        step<kTaps, kNarrow, kXIsWide>(x + (i + u) * x_step, tap_step, dy + (i + u) * dy_step, sum[u]);
    }
    for (; i < count; i++) step<kTaps, kNarrow, kXIsWide>(x + i * x_step, tap_step, dy + i * dy_step, sum[0]);
    TW_UNROLL
    for (int t = 0; t < kTaps; t++)
      TW_UNROLL
      for (int c = 0; c < kNarrow; c++) {
        f32v all = sum[0][t][c];
        TW_UNROLL
        for (int u = 1; u < kChains; u++) all += sum[u][t][c];
        float* const to = sums + t * sums_step + c * L;
        store_as(to, load_as<f32v>(to) + all);
      }
  }
  template <int kTaps, int kNarrow, bool kXIsWide>
  static TW_INLINE void step(const float* x, int64_t tap_step, const float* dy, f32v (*sum)[kNarrow]) {
    TW_UNROLL
    for (int t = 0; t < kTaps; t++)
      TW_UNROLL
      for (int c = 0; c < kNarrow; c++)
        sum[t][c] += load_as<f32v>(x + t * tap_step + (kXIsWide ? 0 : c * L)) * load_as<f32v>(dy + (kXIsWide ? c * L : 0));
  }

  template <int kTaps, int kNarrow>
  void add_taps(const float* x, int64_t x_step, int64_t tap_step, int64_t dy_step, int64_t count, int64_t c,
                float* sums) const {
    float* const to = sums + c * L;
    const int64_t sums_step = plan.narrow * L;
    if (!depthwise && plan.x_is_wide)
      add<kTaps, kNarrow, true>(x, x_step, tap_step, memory.dy + c * L, dy_step, count, to, sums_step);
    else add<kTaps, kNarrow, false>(x + c * L, x_step, tap_step, memory.dy, dy_step, count, to, sums_step);
  }
  template <int kNarrow>
  void add_narrow(const float* x, int64_t x_step, int64_t tap_step, int64_t dy_step, int64_t count, int64_t c,
                  float* sums) const {
    const int64_t taps = problem.axes[2].taps, each = plan.narrow * L;
    int64_t t = 0;
    for (; t + 3 <= taps; t += 3)
      add_taps<3, kNarrow>(x + t * tap_step, x_step, tap_step, dy_step, count, c, sums + t * each);
    for (; t < taps; t++) add_taps<1, kNarrow>(x + t * tap_step, x_step, tap_step, dy_step, count, c, sums + t * each);
  }

  // One line of x (as loaded) with the line of dy, all taps along W.
  void add_line(const float* x, int64_t count, float* sums) const {
    const tw_conv_axis& axis = problem.axes[2];
    if constexpr (across) {
      const int64_t each = ceil_div(plan.pixels, axis.row_step) + 2 * L;
      for (int64_t t = 0; t < axis.taps; t++) {
        const int64_t at = t * axis.tap_step;
        add<1, 1, false>(x + at % axis.row_step * each + at / axis.row_step, L, 0, memory.dy, L, ceil_div(count, L),
                         sums + t * L, L);
      }
    } else {
      const int64_t x_pixel = depthwise || plan.x_is_wide ? L : plan.narrow * L;
      const int64_t dy_pixel = !depthwise && plan.x_is_wide ? plan.narrow * L : L;
      const int64_t x_step = axis.row_step * x_pixel, tap_step = axis.tap_step * x_pixel;
      int64_t c = 0;
      if constexpr (!depthwise)
        for (; c + 4 <= plan.narrow; c += 4) add_narrow<4>(x, x_step, tap_step, dy_pixel, count, c, sums);
      for (; c < (depthwise ? 1 : plan.narrow); c++) add_narrow<1>(x, x_step, tap_step, dy_pixel, count, c, sums);
    }
  }

  // The sums of one block over lines [begin, end) of dy.
  void sum_block(const Block& block, int64_t begin, int64_t end, float* sums) const {
    const tw_conv_axis* const axes = problem.axes;
    const int64_t width = axes[2].rows, x_size = plan.x_line_of(axes[2]), each = axes[2].taps * plan.narrow * L;
    const char* const x = (const char*)problem.gemm.b + block.group * problem.image_g * size_of<X>;
    const char* const dy = (const char*)problem.gemm.a + block.group * problem.row_g * size_of<Dy>;
    clear(sums, plan.block_sums());
    for (int64_t w0 = 0; w0 < width; w0 += plan.run) {
      const int64_t count = min_of(width - w0, plan.run), first = axes[2].origin + w0 * axes[2].row_step;
      for (int64_t i = 0; i < plan.kept; i++) memory.tags[i] = -1;
      for (int64_t line = begin; line < end; line++) {
        const int64_t row = line % axes[1].rows, plane = line / axes[1].rows;
        const int64_t n = plane / axes[0].rows, depth = plane % axes[0].rows;
        load_dy(dy + (n * problem.row_n + depth * axes[0].row_stride + row * axes[1].row_stride +
                      w0 * axes[2].row_stride) * size_of<Dy>, count, block);
        for (int64_t td = 0; td < axes[0].taps; td++) {
          const int64_t d = axes[0].origin + depth * axes[0].row_step + td * axes[0].tap_step;
          if (d < 0 || d >= axes[0].size) continue;
          for (int64_t th = 0; th < axes[1].taps; th++) {
            const int64_t h = axes[1].origin + row * axes[1].row_step + th * axes[1].tap_step;
            if (h < 0 || h >= axes[1].size) continue;
            const int64_t slot = d % axes[0].taps * axes[1].taps + h % axes[1].taps;
            const int64_t tag = (n * axes[0].size + d) * axes[1].size + h;
            float* const kept = memory.x + slot * x_size;
            if (memory.tags[slot] != tag)
              load_x(x + (n * problem.image_n + d * axes[0].image_stride + h * axes[1].image_stride) * size_of<X>,
                     first, kept, block);
            memory.tags[slot] = tag;
            add_line(kept, count, sums + (td * axes[1].taps + th) * each);
          }
        }
      }
    }
  }

  float* partial(const tw_conv_args& args, int64_t slice, int64_t block) const {
    return (float*)args.workspace + (slice * plan.blocks + block) * plan.block_sums();
  }

  // Adds the slices of one block in their order, into the first, and stores the result.
  void finish(const tw_conv_args& args, int64_t index) const {
    const Block block = block_at(index);
    float* const sums = partial(args, 0, index);
    for (int64_t slice = 1; slice < plan.split; slice++) {
      const float* const more = partial(args, slice, index);
      for (int64_t i = 0; i < plan.block_sums(); i += L) store_as(sums + i, load_as<f32v>(sums + i) + load_as<f32v>(more + i));
    }
    alignas(64) float one[L] = {};
    for (int64_t tap = 0; tap < plan.taps; tap++)
      for (int64_t c = 0; c < plan.narrow; c++) {
        const float* const lanes = sums + (tap * plan.narrow + c) * L;
        for (int64_t lane = 0; lane < (across ? 1 : block.lanes); lane++) {
          const int64_t in_group = plan.block_groups > 0 ? lane % plan.wide : block.first + lane;
          const int64_t group = block.group + (across || plan.block_groups == 0 ? 0 : lane / plan.wide);
          const int64_t k = plan.x_is_wide ? c : in_group, channel = plan.x_is_wide ? in_group : c;
          one[0] = across ? sum_lanes(load_as<f32v>(lanes)) : lanes[lane];
          WeightOutput<Config>(problem, group).store(k, tap * plan.x_channels + channel, 1, one);
        }
      }
  }

  // Sums of every slice and block; what is not partial is then finished, by whoever made it: there is one slice.
  static void run(const tw_conv_args& args, const tw_team* team, bool partial) {
    Crew crew = crew_of(team, Plan::team);
    if (crew.rank >= crew.size) return;
    const ConvKernel of(args, crew.rank);
    const Plan& plan = of.plan;
    if constexpr (!depthwise) of.fill_index();
    const int64_t pieces = plan.split * plan.blocks;
    for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
      const int64_t slice = piece / plan.blocks, block = piece % plan.blocks;
      const int64_t begin = min_of(slice * plan.length, plan.lines), end = min_of(begin + plan.length, plan.lines);
      of.sum_block(of.block_at(block), begin, end, of.partial(args, slice, block));
      if (!partial) of.finish(args, block);
    }
    crew.end_stage(pieces);
  }

  static void reduce(const tw_conv_args& args, const tw_team* team) {
    Crew crew = crew_of(team, 1 << 30);  // needs no scratch memory of its own: any team
    const ConvKernel of(args, 0);
    for (int64_t block; (block = crew.claim(of.plan.blocks)) >= 0;) of.finish(args, block);
    crew.end_stage(of.plan.blocks);
  }
};

TW_NAMESPACE_END
