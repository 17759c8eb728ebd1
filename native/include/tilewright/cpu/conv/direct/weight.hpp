// The gradient of a convolution's weights without a product, for groups of few channels: a product would spend its time
// packing panels that are mostly empty.
//
// Channels-last: lanes run over channels of the side that has more of them per group (the wide one, of x or dy); to
// each belong the `narrow` channels of the other side's group. A line of pixels is widened to fp32 once, its narrow
// channels spread over the lanes that they meet, with zeros where the filter looks outside the image. Lines of x are
// kept while the filter moves down. Channels-first (depthwise only): lanes run over the pixels of a line. The usual
// filters have loops of their own: cpu/conv/depthwise/weight.hpp and cpu/conv/group_weight.hpp.
//
// The lines of all images are cut into split_k slices, whose sums (partials) are added in their order. Each element is
// summed in an order that depends on the problem and the Config alone. What a unit exports: cpu/conv/entries.hpp.
#pragma once
#include "tilewright/cpu/conv/entries.hpp"
#include "tilewright/cpu/conv/depthwise/weight.hpp"
#include "tilewright/cpu/conv/direct/plan.hpp"
#include "tilewright/cpu/conv/group_weight.hpp"
#include "tilewright/cpu/conv/line_sums.hpp"
#include "tilewright/cpu/blocks/blocked_summation.hpp"
#include "tilewright/cpu/team.hpp"
#include "tilewright/cpu/conv/weight_output.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct ConvKernel {
  using Plan = DirectPlan<Config>;
  using X = typename Config::B;
  using Dy = typename Config::A;
  static constexpr bool depthwise = Plan::depthwise, across = Plan::across;
  static constexpr int64_t L = kLanes;
  static constexpr int64_t kGroupLines = 21, kCopiedLines = 12;  // whose sums are put aside together, at most
  static constexpr int64_t kPiece = 12;                         // pixels of a line that make a chain

  struct Memory {
    float* x;
    float* dy;
    int64_t* tags;  // which line of x each of the kept ones is
    int32_t* index;  // for every narrow channel, from which lane of the loaded ones each lane takes it
    float* fresh;    // of fp32: sums of a few lines, those of some blocks
  };

  const tw_conv_problem& problem;
  const Plan plan;
  Memory memory;

  ConvKernel(const tw_conv_args& args, int rank) : problem(args.problems[0]), plan(problem, args.split_k) {
    char* at = (char*)args.workspace + plan.partial_bytes() + rank * plan.member_bytes(problem);
    memory.x = (float*)at, at += plan.chunk * x_block() * 4;
    memory.dy = (float*)at, at += plan.chunk * dy_block() * 4;
    memory.tags = (int64_t*)at, at += round_up(plan.kept * 8, 64);
    memory.index = (int32_t*)at, at += plan.narrow * L * 4;
    memory.fresh = (float*)at;
  }

  // Floats that the lines of one block take.
  int64_t x_block() const { return round_up(plan.kept * plan.x_line_of(problem.axes[2]), 16); }
  int64_t dy_block() const { return round_up(plan.dy_line(), 16); }

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
    int64_t x, dy;                // where its channels begin in a pixel, in elements
  };
  Block block_at(int64_t index) const {
    Block block = {index / plan.blocks_a_group, index % plan.blocks_a_group * L, 0, 0, 0};
    if (plan.block_groups > 0) {
      block.group = index * plan.block_groups, block.first = 0;
      block.lanes = min_of(plan.groups - block.group, plan.block_groups) * plan.wide;
    } else {
      block.lanes = min_of(plan.wide - block.first, L);
    }
    block.x = block.group * problem.image_g + (plan.x_is_wide ? block.first : 0);
    block.dy = block.group * problem.row_g + (plan.x_is_wide ? 0 : block.first);
    return block;
  }

  // Pixels of one side with the channels of `count` blocks in the lanes that they belong to: a vector each on the wide
  // side, else `narrow` of them. Blocks go `each` floats apart.
  template <class E, bool kIsX>
  TW_NOINLINE void widen(const char* from, int64_t pitch, int64_t pixels, float* to, int64_t each, const Block* blocks,
                         int64_t count) const {
    const bool is_wide = depthwise || kIsX == plan.x_is_wide;
    const int64_t step = pitch * size_of<E>, vectors = (is_wide ? 1 : plan.narrow) * L;
    constexpr int64_t kAhead = 512;
    if (is_wide && plan.block_groups > 0 && blocks[count - 1].lanes == L) {
      // Whole vectors, one behind the other.
      from += (kIsX ? blocks[0].x : blocks[0].dy) * size_of<E>;
      for (int64_t i = 0; i < pixels; i++, from += step, to += L)
        for (int64_t b = 0; b < count; b++) {
          __builtin_prefetch(from + b * L * size_of<E> + kAhead, 0, 3);
          store_as(to + b * each, load_f32<E>(from + b * L * size_of<E>));
        }
      return;
    }
    for (int64_t i = 0; i < pixels; i++, from += step, to += vectors)
      for (int64_t b = 0; b < count; b++) {
        const Block& block = blocks[b];
        const char* const at = from + (kIsX ? block.x : block.dy) * size_of<E>;
        float* out = to + b * each;
        __builtin_prefetch(at + kAhead, 0, 3);
        if (is_wide) {
          store_as(out, load_f32_partial<E>(at, block.lanes));
        } else if (plan.block_groups > 0) {
          const f32v x = load_f32_partial<E>(at, block.lanes / plan.wide * plan.narrow);
          for (int64_t c = 0; c < plan.narrow; c++, out += L)
            store_as(out, pick(x, load_as<i32v>(memory.index + c * L)));
        } else {
          for (int64_t first = 0; first < plan.narrow; first += L) {
            const f32v x = load_f32_partial<E>(at + first * size_of<E>, plan.narrow - first);
            for (int64_t c = 0; c < min_of(plan.narrow - first, L); c++, out += L)
              store_as(out, pick(x, i32v{} + (int32_t)c));
          }
        }
      }
  }

  // Where lanes find the narrow channels of their group among those that are loaded.
  void fill_index() const {
    for (int64_t c = 0; c < plan.narrow; c++)
      for (int64_t lane = 0; lane < L; lane++)
        memory.index[c * L + lane] = (int32_t)min_of(lane / plan.wide * plan.narrow + c, L - 1);
  }

  static TW_INLINE void clear(float* to, int64_t count) {
    for (; count >= L; count -= L, to += L) store_as(to, f32v{});
    for (; count > 0; count--) *to++ = 0;
  }

  // `count` elements, zeros behind them. `readable`: that many may be read.
  template <class E>
  static TW_INLINE f32v load_some(const char* from, int64_t count, int64_t readable) {
    if (count >= L) return load_f32<E>(from);
    if (readable < L) return load_f32_partial<E>(from, count);
    i32v lane;
    for (int i = 0; i < kLanes; i++) lane[i] = i;
    return select(lane < (int32_t)count, load_f32<E>(from), f32v{});
  }

  // Pixels [first, first + plan.pixels) along W of one line of x, zeros outside the image. Behind the line `beyond`
  // elements more may be read.
  void load_x(const char* line, int64_t first, int64_t beyond, float* to, const Block* blocks, int64_t count) const {
    const tw_conv_axis& axis = problem.axes[2];
    const int64_t begin = min_of(max_of(-first, 0), plan.pixels),
                  end = max_of(min_of(axis.size - first, plan.pixels), begin);
    const char* const from = line + (first + begin) * axis.image_stride * size_of<X>;
    if constexpr (across) {
      const int64_t step = axis.row_step, each = ceil_div(plan.pixels, step) + 2 * L;
      const char* const at = from + blocks[0].x * size_of<X>;
      clear(to, step * each);
      if (step == 1 && axis.image_stride <= 1) {
        for (int64_t i = begin; i < end; i += L)
          store_as(to + i, load_some<X>(at + (i - begin) * size_of<X>, end - i, end - i + beyond));
      } else if (step == 2 && axis.image_stride <= 1) {
        float* const even = to + begin % 2 * each + begin / 2;
        float* const odd = to + (begin + 1) % 2 * each + (begin + 1) / 2;
        for (int64_t i = 0; i < end - begin; i += 2 * L) {
          const int64_t left = end - begin - i;
          const f32v low = load_some<X>(at + i * size_of<X>, left, left + beyond);
          const f32v high = left > L ? load_some<X>(at + (i + L) * size_of<X>, left - L, left - L + beyond) : f32v{};
          store_as(even + i / 2, every_second<0>(low, high, MakeSequence<kLanes>::type{}));
          store_as(odd + i / 2, every_second<1>(low, high, MakeSequence<kLanes>::type{}));
        }
      } else {
        for (int64_t i = begin; i < end; i++)
          to[i % step * each + i / step] = to_float<X>(at + (i - begin) * axis.image_stride * size_of<X>);
      }
    } else {
      const int64_t vectors = (depthwise || plan.x_is_wide ? 1 : plan.narrow) * L;
      for (int64_t b = 0; b < count; b++) {
        clear(to + b * x_block(), begin * vectors);
        clear(to + b * x_block() + end * vectors, (plan.pixels - end) * vectors);
      }
      widen<X, true>(from, axis.image_stride, end - begin, to + begin * vectors, x_block(), blocks, count);
    }
  }

  void load_dy(const char* from, int64_t pixels, int64_t beyond, const Block* blocks, int64_t count) const {
    const tw_conv_axis& axis = problem.axes[2];
    if constexpr (across) {
      from += blocks[0].dy * size_of<Dy>;
      if (axis.row_stride > 1) clear(memory.dy, round_up(pixels, L));
      for (int64_t i = 0; i < pixels; i += axis.row_stride <= 1 ? L : 1) {
        const char* const at = from + i * axis.row_stride * size_of<Dy>;
        if (axis.row_stride <= 1) store_as(memory.dy + i, load_some<Dy>(at, pixels - i, pixels - i + beyond));
        else memory.dy[i] = to_float<Dy>(at);
      }
    } else {
      widen<Dy, false>(from, axis.row_stride, pixels, memory.dy, dy_block(), blocks, count);
    }
  }

  // ---- sums ----

  template <int kTaps, int kNarrow>
  void add_taps(const float* x, int64_t x_step, int64_t tap_step, const float* dy, int64_t dy_step, int64_t count,
                int64_t c, float* sums) const {
    float* const to = sums + c * L;
    const int64_t sums_step = plan.narrow * L;
    if (!depthwise && plan.x_is_wide)
      LineSums::add<kTaps, kNarrow, true>(x, x_step, tap_step, dy + c * L, dy_step, count, to, sums_step);
    else LineSums::add<kTaps, kNarrow, false>(x + c * L, x_step, tap_step, dy, dy_step, count, to, sums_step);
  }
  template <int kNarrow>
  void add_narrow(const float* x, int64_t x_step, int64_t tap_step, const float* dy, int64_t dy_step, int64_t count,
                  int64_t c, float* sums) const {
    const int64_t taps = problem.axes[2].taps, each = plan.narrow * L;
    int64_t t = 0;
    for (; t + 3 <= taps; t += 3)
      add_taps<3, kNarrow>(x + t * tap_step, x_step, tap_step, dy, dy_step, count, c, sums + t * each);
    for (; t < taps; t++)
      add_taps<1, kNarrow>(x + t * tap_step, x_step, tap_step, dy, dy_step, count, c, sums + t * each);
  }

  // Where tap t of a line begins.
  int64_t tap_offset(int64_t t) const {
    const tw_conv_axis& axis = problem.axes[2];
    const int64_t at = t * axis.tap_step, phase = ceil_div(plan.pixels, axis.row_step) + 2 * L;
    if constexpr (across) return at % axis.row_step * phase + at / axis.row_step;
    else return at * L;
  }

  // One line of x (as loaded) with the line of dy, all taps along W.
  void add_line(const float* x, const float* dy, int64_t dy_step, int64_t count, float* sums) const {
    const tw_conv_axis& axis = problem.axes[2];
    if constexpr (across) {
      for (int64_t t = 0; t < axis.taps; t++)
        LineSums::add<1, 1, false>(x + tap_offset(t), L, 0, dy, L, ceil_div(count, L), sums + t * L, L);
    } else {
      const int64_t x_pixel = depthwise || plan.x_is_wide ? L : plan.narrow * L;
      const int64_t x_step = axis.row_step * x_pixel, tap_step = axis.tap_step * x_pixel;
      const int64_t most = Plan::folds ? even_part(count, kPiece) : count;
      for (; count > 0; count -= most, x += most * x_step, dy += most * dy_step) {
        const int64_t some = min_of(count, most);
        int64_t c = 0;
        if constexpr (!depthwise)
          for (; c + 4 <= plan.narrow; c += 4) add_narrow<4>(x, x_step, tap_step, dy, dy_step, some, c, sums);
        for (; c < (depthwise ? 1 : plan.narrow); c++) add_narrow<1>(x, x_step, tap_step, dy, dy_step, some, c, sums);
      }
    }
  }

  // The sums of `count` blocks over lines [begin, end) of dy.
  void sum_blocks(int64_t first_block, int64_t count, int64_t begin, int64_t end, float* sums) const {
    clear(sums, count * plan.block_sums());
    if constexpr (depthwise && !across) {
      const int64_t whole = min_of(count, problem.groups / L - first_block);
      if (DepthwiseWeight<X, Dy>::suits(problem) && whole + min_of(first_block, 1) >= 2) {
        DepthwiseWeight<X, Dy>::add_blocks(problem, first_block * L, whole, begin, end, sums, plan.block_sums());
        first_block += whole, count -= whole, sums += whole * plan.block_sums();
      }
    }
    if constexpr (!depthwise && !across) {
      if (GroupWeight<X, Dy>::suits(problem, plan)) {
        sum_groups(first_block, count, begin, end, sums);
        return;
      }
    }
    if (count > 0) sum_copies(first_block, count, begin, end, sums);
  }

  // Where the sums of some lines are gathered: apart, and then added to those of the lines before.
  float* begin_lines(int64_t count, float* sums) const {
    if constexpr (!Plan::folds) return sums;
    clear(memory.fresh, count * plan.block_sums());
    return memory.fresh;
  }
  TW_NOINLINE void end_lines(int64_t count, float* sums) const {
    if constexpr (Plan::folds)
      for (int64_t i = 0; i < count * plan.block_sums(); i += L) {
        const f32v old = load_as<f32v>(sums + i), more = load_as<f32v>(memory.fresh + i), all = old + more;
        const f32v of_old = all - more, lost = (old - of_old) + (more - (all - of_old));
        store_as(sums + i, all);
        store_as(memory.fresh + i, select(lost == lost, lost, f32v{}));  // by rounding: the next lines' begin with it
      }
  }

  // Plane by plane (or fewer lines), so that all blocks read it from a cache.
  void sum_groups(int64_t first_block, int64_t count, int64_t begin, int64_t end, float* sums) const {
    const int64_t rows = problem.axes[1].rows, most = Plan::folds ? kGroupLines : rows;
    int64_t fresh = 0;
    float* const to = begin_lines(count, sums);
    for (int64_t line = begin; line < end;) {
      const int64_t next = min_of(end, min_of((line / rows + 1) * rows, line + most));
      if (fresh + next - line > most) end_lines(count, sums), fresh = 0;
      fresh += next - line;
      for (int64_t b = 0; b < count; b++) {
        const Block block = block_at(first_block + b);
        GroupWeight<X, Dy>::add_block(problem, block.x, block.dy, plan.narrow, plan.block_groups, plan.run, line, next,
                                      to + b * plan.block_sums(), (uint32_t*)memory.x, (uint32_t*)memory.dy);
      }
      line = next;
    }
    end_lines(count, sums);
  }

  // The same from copies of lines.
  void sum_copies(int64_t first_block, int64_t count, int64_t begin, int64_t end, float* sums) const {
    const tw_conv_axis* const axes = problem.axes;
    const int64_t width = axes[2].rows, x_size = plan.x_line_of(axes[2]), each = axes[2].taps * plan.narrow * L;
    const char* const x = (const char*)problem.gemm.b;
    const char* const dy = (const char*)problem.gemm.a;
    Block blocks[kMostBlocks];
    for (int64_t b = 0; b < count; b++) blocks[b] = block_at(first_block + b);
    // A gradient that is fp32 already is read where it lies, any other where it is read but once.
    const bool whole = !across && (depthwise || !plan.x_is_wide) && blocks[count - 1].lanes == L;
    const bool in_place = whole && is_same<Dy, fp32>;
    const int64_t dy_step = in_place ? axes[2].row_stride : (depthwise || !plan.x_is_wide ? L : plan.narrow * L);
    // The usual filter, whose three lines are all kept at a time.
    const bool square = depthwise && axes[1].taps == 3 && axes[2].taps == 3 && axes[1].tap_step % 3 != 0;
    const int64_t offsets[3] = {tap_offset(0), tap_offset(1), tap_offset(2)};
    const int64_t together = lines_aside(end - begin, square ? 1 : ceil_div(plan.run, kPiece), kCopiedLines);
    float *const all = sums, *const fresh = begin_lines(count, all);
    for (int64_t w0 = 0; w0 < width; w0 += plan.run) {
      const int64_t pixels = min_of(width - w0, plan.run), first = axes[2].origin + w0 * axes[2].row_step;
      for (int64_t i = 0; i < plan.kept; i++) memory.tags[i] = -1;
      for (int64_t line = begin; line < end; line++) {
        const int64_t row = line % axes[1].rows, plane = line / axes[1].rows;
        const int64_t n = plane / axes[0].rows, depth = plane % axes[0].rows;
        const char* const dy_line = dy + (n * problem.row_n + depth * axes[0].row_stride + row * axes[1].row_stride +
                                          w0 * axes[2].row_stride) * size_of<Dy>;
        const int64_t beyond = (axes[1].rows - 1 - row) * axes[1].row_stride;
        if (Plan::folds && (line - begin) % together == 0 && line > begin) end_lines(count, all);
        if (!in_place && !(whole && square)) load_dy(dy_line, pixels, beyond, blocks, count);
        for (int64_t td = 0; td < axes[0].taps; td++) {
          const int64_t d = axes[0].origin + depth * axes[0].row_step + td * axes[0].tap_step;
          if (d < 0 || d >= axes[0].size) continue;
          const float* lines[3] = {};
          for (int64_t th = 0; th < axes[1].taps; th++) {
            const int64_t h = axes[1].origin + row * axes[1].row_step + th * axes[1].tap_step;
            if (h < 0 || h >= axes[1].size) continue;
            const int64_t slot = d % axes[0].taps * axes[1].taps + h % axes[1].taps;
            const int64_t tag = (n * axes[0].size + d) * axes[1].size + h;
            float* const kept = memory.x + slot * x_size;
            if (memory.tags[slot] != tag)
              load_x(x + (n * problem.image_n + d * axes[0].image_stride + h * axes[1].image_stride) * size_of<X>,
                     first, (axes[1].size - 1 - h) * axes[1].image_stride, kept, blocks, count);
            memory.tags[slot] = tag;
            if (square) {
              lines[th] = kept;
              continue;
            }
            for (int64_t b = 0; b < count; b++) {
              const float* const of_block =
                  in_place ? (const float*)dy_line + blocks[b].dy : memory.dy + b * dy_block();
              add_line(kept + b * x_block(), of_block, dy_step, pixels,
                       fresh + b * plan.block_sums() + (td * axes[1].taps + th) * each);
            }
          }
          if (!square) continue;
          const bool all = lines[0] && lines[1] && lines[2];
          if (!all && whole && !in_place) load_dy(dy_line, pixels, beyond, blocks, count);
          for (int64_t b = 0; b < count; b++) {
            float* const to = fresh + b * plan.block_sums() + td * axes[1].taps * each;
            const char* const raw = dy_line + blocks[b].dy * size_of<Dy>;
            const float* const of_block = in_place ? (const float*)raw : memory.dy + b * dy_block();
            const float* of_lines[3];
            for (int th = 0; th < 3; th++) of_lines[th] = lines[th] ? lines[th] + b * x_block() : nullptr;
            if (all && whole)
              LineSums::add_square<Dy>(of_lines, axes[2].row_step * L, offsets, raw,
                                       axes[2].row_stride * size_of<Dy>, pixels, to);
            else if (all)
              LineSums::add_square<fp32>(of_lines, across ? L : axes[2].row_step * L, offsets, (const char*)of_block,
                                         L * 4, across ? ceil_div(pixels, L) : pixels, to);
            else
              for (int th = 0; th < 3; th++)
                if (lines[th]) add_line(of_lines[th], of_block, dy_step, pixels, to + th * each);
          }
        }
      }
      end_lines(count, all);
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
      for (int64_t i = 0; i < plan.block_sums(); i += L)
        store_as(sums + i, load_as<f32v>(sums + i) + load_as<f32v>(more + i));
    }
    const float alpha = (float)problem.gemm.alpha;
    const WeightOutput<Config> output(problem, 0);
    for (int64_t tap = 0; tap < plan.taps; tap++) {
      const int64_t tap_offset = output.tap_offset(tap);
      if constexpr (depthwise && !across) {
        const float* const from = sums + tap * L;
        int64_t at = block.group * problem.weight_g + tap_offset;
        for (int64_t lane = 0; lane < block.lanes; lane++, at += problem.weight_g)
          output.store_one(at, from[lane], alpha);
        continue;
      }
      for (int64_t lane = 0; lane < (across ? 1 : block.lanes); lane++) {
        const int64_t in_group = plan.block_groups > 0 ? lane % plan.wide : block.first + lane;
        const int64_t group = block.group + (across || plan.block_groups == 0 ? 0 : lane / plan.wide);
        const int64_t wide_step = plan.x_is_wide ? problem.weight_c : problem.weight_n,
                      narrow_step = plan.x_is_wide ? problem.weight_n : problem.weight_c;
        const int64_t at = group * problem.weight_g + tap_offset + in_group * wide_step;
        const float* const of_tap = sums + tap * plan.narrow * L;
        for (int64_t c = 0; c < plan.narrow; c++) {
          const float sum = across ? sum_lanes(load_as<f32v>(of_tap)) : of_tap[c * L + lane];
          output.store_one(at + c * narrow_step, sum, alpha);
        }
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
    const int64_t pieces = plan.split * plan.chunks;
    for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
      const int64_t slice = piece / plan.chunks, first = piece % plan.chunks * plan.chunk,
                    count = min_of(plan.blocks - first, plan.chunk);
      const int64_t begin = min_of(slice * plan.length, plan.lines), end = min_of(begin + plan.length, plan.lines);
      of.sum_blocks(first, count, begin, end, of.partial(args, slice, first));
      for (int64_t b = 0; !partial && b < count; b++) of.finish(args, first + b);
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
