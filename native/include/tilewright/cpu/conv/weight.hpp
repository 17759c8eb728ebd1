// The gradient of a convolution's weights: for each group a product of dy and the gathered image, summed over pixels.
//     dw[k][tap, c] = sum over pixels p of dy[p][k] * x[p * step + tap][c]
// Rows are output channels, columns taps with input channels. Both operands lie across the pixels (channels-last), so
// a panel is a few channels of many pixels: it is packed from a table of addresses, one per pixel, in which pixels
// outside the image stand for a line of zeros. There is no copy of the image beyond one panel of a block of pixels.
// Each element is summed in an order that depends on the problem and the Config alone, never on who computes it.
#pragma once
#include "tilewright/cpu/conv/entries.hpp"
#include "tilewright/cpu/blocks/microkernel.hpp"
#include "tilewright/cpu/blocks/blocked_summation.hpp"
#include "tilewright/cpu/team.hpp"
#include "tilewright/cpu/conv/weight_output.hpp"
#include "tilewright/cpu/conv/weight_plan.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct ConvKernel {
  using Plan = WeightPlan<Config>;
  using E = typename Plan::E;
  using Dot = typename Plan::Dot;
  static constexpr int mr = Plan::mr, nr = Plan::nr, depth = Plan::depth, size = size_of<E>;
  static_assert(!Config::channels_first, "channels lie side by side");
  static constexpr int64_t kCopyLine = Plan::wide * size + 16;

  // One member's part of the workspace.
  struct Memory {
    uint32_t* a;
    uint32_t* b;
    char* copy;
    const char** dy;  // addresses of a block's pixels
    const char** x;   // and of what one tap sees of the image from there
    char* zeros;
    char* edges;  // stretches of taps that reach over the image's edge
    float* sums;
  };

  const tw_conv_problem& problem;
  const Plan plan;
  Memory memory;
  int64_t chain = Plan::groups;  // groups of pixels that are summed at a time (cpu/blocks/blocked_summation.hpp)
  static constexpr int64_t kPixelChain = 64;  // of usual convolutions; eight of any are put aside together

  ConvKernel(const tw_conv_args& args, int rank) : problem(args.problems[0]), plan(problem, args.split_k) {
    if (is_same<E, fp32>) {
      const bool usual = usual_chain(problem, plan.m, kPixelChain) == kPixelChain;
      chain = even_part(plan.k, usual ? kPixelChain : plan.k > 1024 ? 24 : plan.k > 256 ? 12 : 8);
    }
    char* at = (char*)args.workspace + plan.partial_bytes() + rank * plan.member_bytes(problem.channels);
    memory.a = (uint32_t*)at, at += plan.a_bytes();
    memory.b = (uint32_t*)at, at += Plan::b_bytes;
    memory.copy = at, at += Plan::copy_bytes;
    memory.dy = (const char**)at, at += Plan::table_bytes;
    memory.x = (const char**)at, at += Plan::table_bytes;
    memory.zeros = at, at += plan.zero_bytes(problem.channels);
    memory.edges = at, at += Plan::copy_bytes;
    memory.sums = (float*)at;
  }

  // ---- addresses ----

  struct Pixel {
    int64_t n, d, h, w;
  };
  Pixel pixel_at(int64_t index) const {
    const tw_conv_axis* const axes = problem.axes;
    const int64_t w = index % axes[2].rows, line = index / axes[2].rows;
    const int64_t h = line % axes[1].rows, plane = line / axes[1].rows;
    return {plane / axes[0].rows, plane % axes[0].rows, h, w};
  }
  // To the first pixel of the next line.
  void next_line(Pixel& at) const {
    at.w = 0;
    if (++at.h < problem.axes[1].rows) return;
    at.h = 0;
    if (++at.d < problem.axes[0].rows) return;
    at.d = 0, at.n++;
  }

  void dy_lines(const char* base, int64_t first, int64_t count) const {
    const tw_conv_axis* const axes = problem.axes;
    const char** to = memory.dy;
    for (Pixel at = pixel_at(first); count > 0; next_line(at)) {
      const int64_t run = min_of(axes[2].rows - at.w, count), step = axes[2].row_stride * size;
      const char* from = base + (at.n * problem.row_n + at.d * axes[0].row_stride + at.h * axes[1].row_stride +
                                 at.w * axes[2].row_stride) * size;
      for (int64_t i = 0; i < run; i++) to[i] = from + i * step;
      to += run, count -= run;
    }
    for (int d = 0; d < depth; d++) to[d] = memory.zeros;
  }

  void x_lines(const char* base, int64_t tap, int64_t first, int64_t count) const {
    const tw_conv_axis* const axes = problem.axes;
    const int64_t tap_w = tap % axes[2].taps, rest = tap / axes[2].taps, tap_h = rest % axes[1].taps,
                  tap_d = rest / axes[1].taps;
    const int64_t d0 = axes[0].origin + tap_d * axes[0].tap_step, h0 = axes[1].origin + tap_h * axes[1].tap_step,
                  w0 = axes[2].origin + tap_w * axes[2].tap_step, width = axes[2].size;
    const char** to = memory.x;
    const char* const zeros = memory.zeros;
    for (Pixel at = pixel_at(first); count > 0; next_line(at)) {
      const int64_t run = min_of(axes[2].rows - at.w, count);
      const int64_t d = d0 + at.d * axes[0].row_step, h = h0 + at.h * axes[1].row_step, step = axes[2].row_step;
      if ((uint64_t)d < (uint64_t)axes[0].size && (uint64_t)h < (uint64_t)axes[1].size) {
        const int64_t w = w0 + at.w * step, pitch = axes[2].image_stride * size;
        const char* const from =
            base + (at.n * problem.image_n + d * axes[0].image_stride + h * axes[1].image_stride) * size;
        for (int64_t i = 0; i < run; i++) {
          const int64_t x = w + i * step;
          to[i] = (uint64_t)x < (uint64_t)width ? from + x * pitch : zeros;
        }
      } else {
        for (int64_t i = 0; i < run; i++) to[i] = zeros;
      }
      to += run, count -= run;
    }
    for (int d = 0; d < depth; d++) to[d] = zeros;
  }

  // True if the taps of a line follow one another in memory as their channels do: then a stretch of columns is a
  // stretch of memory, over several taps.
  bool taps_adjoin() const {
    const tw_conv_axis& axis = problem.axes[2];
    return axis.taps > 1 && axis.tap_step * axis.image_stride == problem.channels;
  }

  // As x_lines, for elements [begin, begin + length) of a line of taps (tap * channels + channel). What reaches over
  // the image's edge is put together in `edges`.
  void x_stretches(const char* base, int64_t line_of_taps, int64_t begin, int64_t length, int64_t first,
                   int64_t count) const {
    const tw_conv_axis* const axes = problem.axes;
    const int64_t channels = problem.channels, tap = begin / channels, last = (begin + length - 1) / channels;
    const int64_t tap_h = line_of_taps % axes[1].taps, tap_d = line_of_taps / axes[1].taps;
    const int64_t d0 = axes[0].origin + tap_d * axes[0].tap_step, h0 = axes[1].origin + tap_h * axes[1].tap_step;
    const int64_t step = axes[2].row_step, width = axes[2].size, tap_step = axes[2].tap_step;
    const int64_t reach = (last - tap) * tap_step, pitch = axes[2].image_stride * size;
    const char** to = memory.x;
    char* edge = memory.edges;
    for (Pixel at = pixel_at(first); count > 0; next_line(at)) {
      const int64_t run = min_of(axes[2].rows - at.w, count);
      const int64_t d = d0 + at.d * axes[0].row_step, h = h0 + at.h * axes[1].row_step;
      const bool inside = (uint64_t)d < (uint64_t)axes[0].size && (uint64_t)h < (uint64_t)axes[1].size;
      const char* const from =
          base + (at.n * problem.image_n + d * axes[0].image_stride + h * axes[1].image_stride) * size;
      for (int64_t i = 0; i < run; i++) {
        const int64_t w = axes[2].origin + (at.w + i) * step + tap * tap_step;
        if (inside && w >= 0 && w + reach < width) {
          to[i] = from + w * pitch + begin % channels * size;
        } else if (!inside) {
          to[i] = memory.zeros;
        } else {
          to[i] = edge;
          int64_t done = 0;
          for (int64_t t = tap, channel = begin % channels; done < length; t++, channel = 0) {
            const int64_t x = w + (t - tap) * tap_step, some = min_of(channels - channel, length - done);
            if ((uint64_t)x < (uint64_t)width)
              __builtin_memcpy(edge + done * size, from + x * pitch + channel * size, (size_t)(some * size));
            else __builtin_memset(edge + done * size, 0, (size_t)(some * size));
            done += some;
          }
          edge += kCopyLine;
        }
      }
      to += run, count -= run;
    }
    for (int d = 0; d < depth; d++) to[d] = memory.zeros;
  }

  // ---- packing ----

  struct Table {
    const char* const* lines;
    int64_t offset;
    TW_INLINE const char* operator[](int64_t i) const { return lines[i] + offset; }
  };
  struct Copies {
    const char* data;
    TW_INLINE const char* operator[](int64_t i) const { return data + i * kCopyLine; }
  };
  
  // A panel of kR channels of `groups` groups of pixels. Whole vectors are read; what lies beyond the channels gives
  // rows or columns of the result that nobody stores.
  template <int kR, class Lines>
  static TW_NOINLINE void pack(Lines lines, int64_t groups, uint32_t* to) {
    constexpr int kV = (kR + kLanes - 1) / kLanes, kAhead = 12;
    for (int64_t g = 0; g < groups; g++, to += kR) {
      const char* from[depth];
      TW_UNROLL
      for (int d = 0; d < depth; d++) from[d] = lines[g * depth + d];
      if constexpr (!is_same<Lines, Copies>)
        TW_UNROLL
        for (int d = 0; d < depth; d++)
          if (g + kAhead < groups) {
            const char* const next = lines[(g + kAhead) * depth + d];
            TW_UNROLL
            for (int byte = 0; byte < kR * size; byte += 64) __builtin_prefetch(next + byte, 0, 3);
          }
      TW_UNROLL
      for (int v = 0; v < kV; v++) {
        u32v x;
        if constexpr (depth == 1) {
          x = load_groups_along_k<E, Dot>(from[0] + v * kLanes * size);
        } else {
          u32v raw[depth];
          TW_UNROLL
          for (int d = 0; d < depth; d++) raw[d] = load_raw<E>(from[d] + v * kLanes * size);
          x = combine_raw<E, Dot>(raw);
        }
        store_as(to + v * kLanes, x);
      }
    }
  }

  // `bytes` (at least one element) of every line into the copy, `at` bytes into its lines.
  TW_NOINLINE void gather(const char* const* lines, int64_t offset, int64_t bytes, int64_t at, int64_t count) const {
    char* to = memory.copy + at;
    if (bytes >= 16) {
      for (int64_t i = 0; i < count; i++, to += kCopyLine) {
        const char* const from = lines[i] + offset;
        int64_t b = 0;
        for (; b + 16 <= bytes; b += 16) copy<16>(to + b, from + b);
        if (b < bytes) copy<16>(to + bytes - 16, from + bytes - 16);
      }
    } else if (bytes >= 8) {
      gather_ends<8>(lines, offset, bytes, to, count);
    } else if (bytes >= 4) {
      gather_ends<4>(lines, offset, bytes, to, count);
    } else {
      for (int64_t i = 0; i < count; i++, to += kCopyLine) __builtin_memcpy(to, lines[i] + offset, (size_t)size);
    }
  }
  template <int kBytes>
  static TW_INLINE void copy(char* to, const char* from) {
    __builtin_memcpy(to, from, kBytes);
  }
  template <int kBytes>
  static TW_INLINE void gather_ends(const char* const* lines, int64_t offset, int64_t bytes, char* to, int64_t count) {
    for (int64_t i = 0; i < count; i++, to += kCopyLine) {
      const char* const from = lines[i] + offset;
      copy<kBytes>(to, from);
      copy<kBytes>(to + bytes - kBytes, from + bytes - kBytes);
    }
  }

  void pack_a(int64_t pixels) const {
    const int64_t groups = ceil_div(pixels, depth);
    constexpr int kRead = (int)round_up(mr, kLanes);
    for (int64_t tile = 0; tile < plan.row_tiles; tile++) {
      uint32_t* const to = memory.a + tile * mr * groups;
      const int64_t channel = tile * mr;
      if (channel + kRead <= plan.m) {
        pack<mr>(Table{memory.dy, channel * size}, groups, to);
      } else {
        gather(memory.dy, channel * size, min_of(plan.m - channel, mr) * size, 0, groups * depth);
        pack<mr>(Copies{memory.copy}, groups, to);
      }
    }
  }

  // Columns [column, column + nr): channels of one tap, or of several. `tap` is the one that the table is for, or -1.
  void pack_b(const char* base, int64_t column, int64_t first, int64_t pixels, int64_t& tap) const {
    const int64_t groups = ceil_div(pixels, depth), channels = problem.channels;
    int64_t now = column / channels, channel = column % channels;
    const auto turn_to = [&](int64_t next) {
      if (tap != next) x_lines(base, next, first, pixels);
      tap = next;
    };
    if (channel + nr <= channels) {
      turn_to(now);
      return pack<nr>(Table{memory.x, channel * size}, groups, memory.b);
    }
    const int64_t end = min_of(plan.n - column, nr);
    if (taps_adjoin()) {
      const int64_t each = problem.axes[2].taps * channels;
      for (int64_t at = 0; at < end;) {
        const int64_t begin = (column + at) % each, length = min_of(each - begin, end - at);
        x_stretches(base, (column + at) / each, begin, length, first, pixels);
        gather(memory.x, 0, length * size, at * size, groups * depth);
        at += length;
      }
      tap = -1;
      return pack<nr>(Copies{memory.copy}, groups, memory.b);
    }
    for (int64_t at = 0; at < end; now++, channel = 0) {
      const int64_t length = min_of(channels - channel, end - at);
      turn_to(now);
      gather(memory.x, channel * size, length * size, at * size, groups * depth);
      at += length;
    }
    pack<nr>(Copies{memory.copy}, groups, memory.b);
  }

  // ---- one group, slice and range of columns ----

  // Adds a block's products to a tile of sums, or begins it with them: eight chains' at a time.
  TW_NOINLINE void multiply_tile(const uint32_t* a, int64_t groups, bool fresh, float* out) const {
    alignas(64) static const float zeros[nr] = {};
    alignas(64) float block[Plan::tile];
    const char* const ahead = (const char*)(a + mr * groups);
    if (groups <= chain)
      return microkernel<Dot, mr, nr>(groups, a, memory.b, fresh ? zeros : out, fresh ? 0 : nr, out, nr, ahead, mr * 4);
    for (int64_t first = 0; first < groups; first += 8 * chain, fresh = false) {
      float* const sums = fresh ? out : block;
      const int64_t end = min_of(groups, first + 8 * chain);
      for (int64_t g = first; g < end; g += chain)
        microkernel<Dot, mr, nr>(min_of(end - g, chain), a + g * mr, memory.b + g * nr, g > first ? sums : zeros,
                                 g > first ? nr : 0, sums, nr, ahead + g * mr * 4, mr * 4);
      if (!fresh)
        for (int64_t e = 0; e < Plan::tile; e += kLanes)
          store_as(out + e, load_as<f32v>(out + e) + load_as<f32v>(block + e));
    }
  }

  // Sums of tiles of columns [begin, end) over the slice's pixels: tile (i, j) at to + (j * row_tiles + i) * tile, j
  // counted from `begin`.
  void multiply(int64_t group, int64_t slice, int64_t begin, int64_t end, float* to) const {
    const char* const x = (const char*)problem.gemm.b + group * problem.image_g * size;
    const char* const dy = (const char*)problem.gemm.a + group * problem.row_g * size;
    const int64_t k0 = min_of(slice * plan.length, plan.k), k1 = min_of(k0 + plan.length, plan.k);
    if (k0 >= k1) {
      for (int64_t i = 0; i < (end - begin) * plan.row_tiles * Plan::tile; i++) to[i] = 0;
      return;
    }
    for (int64_t first = k0; first < k1; first += Plan::block) {
      const int64_t pixels = min_of(k1 - first, Plan::block), groups = ceil_div(pixels, depth);
      dy_lines(dy, first, pixels);
      pack_a(pixels);
      int64_t tap = -1;
      for (int64_t j = begin; j < end; j++) {
        pack_b(x, j * nr, first, pixels, tap);
        float* out = to + (j - begin) * plan.row_tiles * Plan::tile;
        for (int64_t i = 0; i < plan.row_tiles; i++, out += Plan::tile)
          multiply_tile(memory.a + i * mr * groups, groups, first == k0, out);
      }
    }
  }

  void store(int64_t group, int64_t i, int64_t j, const float* tile) const {
    const WeightOutput<Config> output(problem, group);
    const int64_t rows = min_of(plan.m - i * mr, mr), cols = min_of(plan.n - j * nr, nr);
    for (int64_t r = 0; r < rows; r++) output.store(i * mr + r, j * nr, cols, tile + r * nr);
  }

  float* partial(const tw_conv_args& args, int64_t group, int64_t slice) const {
    return (float*)args.workspace + (group * plan.slices + slice) * plan.row_tiles * plan.col_tiles * Plan::tile;
  }

  static int64_t workspace(const tw_conv_args& args) { return weight_workspace<Config>(args); }

  // The whole gradient, or (partial, and what more than one slice means) the sums of every slice.
  static void run(const tw_conv_args& args, const tw_team* team, bool) {
    Crew crew = crew_of(team, Plan::team);
    if (crew.rank >= crew.size) return;
    const ConvKernel of(args, crew.rank);
    const Plan& plan = of.plan;
    for (int64_t i = 0; i < plan.zero_bytes(of.problem.channels); i++) of.memory.zeros[i] = 0;
    // Neighbours share the pixels of a slice, not the columns.
    const int64_t pieces = plan.items * plan.slices * plan.chunks;
    for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
      const int64_t item = piece / plan.chunks, group = item % plan.items, slice = item / plan.items;
      const int64_t begin = piece % plan.chunks * plan.chunk, end = min_of(begin + plan.chunk, plan.col_tiles);
      if (plan.slices > 1) {
        of.multiply(group, slice, begin, end, of.partial(args, group, slice) + begin * plan.row_tiles * Plan::tile);
        continue;
      }
      of.multiply(group, slice, begin, end, of.memory.sums);
      for (int64_t j = begin; j < end; j++)
        for (int64_t i = 0; i < plan.row_tiles; i++)
          of.store(group, i, j, of.memory.sums + ((j - begin) * plan.row_tiles + i) * Plan::tile);
    }
    crew.end_stage(pieces);
  }

  static void reduce(const tw_conv_args& args, const tw_team* team) {
    Crew crew = crew_of(team, 1 << 30);  // needs no scratch memory: any team
    const ConvKernel of(args, 0);
    const Plan& plan = of.plan;
    const int64_t tiles = plan.row_tiles * plan.col_tiles, pieces = plan.items * tiles;
    for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
      const int64_t group = piece / tiles, at = piece % tiles;
      alignas(64) float sums[Plan::tile];
      for (int64_t e = 0; e < Plan::tile; e += kLanes) {
        f32v sum = {};
        for (int64_t slice = 0; slice < plan.slices; slice++)
          sum += load_as<f32v>(of.partial(args, group, slice) + at * Plan::tile + e);
        store_as(sums + e, sum);
      }
      of.store(group, at % plan.row_tiles, at / plan.row_tiles, sums);
    }
    crew.end_stage(pieces);
  }
};

TW_NAMESPACE_END
