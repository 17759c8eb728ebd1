// How the gradient of depthwise weights and of small groups is cut, and how much scratch memory that takes: the Python
// mirror of these formulas is tilewright_grouped_conv/footprint/cpu.py.
#pragma once
#include "tilewright/core/args/conv.h"
#include "tilewright/core/options.hpp"
#include "tilewright/core/types.hpp"

TW_NAMESPACE_BEGIN

constexpr int64_t kRun = 128;               // pixels of a line that are held at a time,
constexpr int64_t kLineBytes = 384 << 10;   // and what all lines that are held may fill
constexpr int64_t kMostBlocks = 64;

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

// The even (kOdd = 0) or odd lanes of a, then those of b.
template <int kOdd, int... kI>
TW_INLINE f32v every_second(f32v a, f32v b, Sequence<kI...>) {
  return __builtin_shufflevector(a, b, (2 * kI + kOdd)...);
}

// How the channels are cut into blocks of lanes, and what that takes. Sizes in bytes, multiples of 64.
template <class Config>
struct DirectPlan {
  static constexpr bool depthwise = Config::kind == ConvKind::depthwise, across = Config::channels_first;
  static_assert(!across || depthwise, "channels-first is for depthwise filters");
  static constexpr int team = Config::wave_m * Config::wave_n;
  static constexpr int64_t L = kLanes;
  // Sums of a few lines are put aside together (cpu/blocks/blocked_summation.hpp).
  static constexpr bool folds = is_same<typename Config::A, fp32>;

  int64_t groups, x_channels, dy_channels, wide, narrow;  // of one group
  bool x_is_wide;
  int64_t block_groups;   // whole groups in a block of lanes; 0: a block is a part of a group
  int64_t blocks_a_group, blocks;
  int64_t taps, lines, split, length;  // lines of pixels in all, and of a slice
  int64_t run, pixels;    // of dy and of x that are held at a time
  int64_t kept;           // lines of x
  int64_t chunk, chunks;  // blocks whose lines are read together, so that memory is read in its own order

  constexpr DirectPlan(const tw_conv_problem& p, int64_t slices)
      : groups(p.groups), x_channels(p.channels), dy_channels(p.gemm.m) {
    const tw_conv_axis* const axes = p.axes;
    // Between equals x is the wide one: what is narrow is spread, and a stride leaves fewer pixels of dy.
    x_is_wide = !depthwise && x_channels >= dy_channels;
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
    const int64_t fitting = max_of(kLineBytes / max_of(kept * x_line_of(axes[2]) * 4, 1), 1);
    const int64_t fair = team > 1 && split == 1 ? ceil_div(blocks, 2 * team) : blocks;
    chunk = across ? 1 : max_of(min_of(min_of(fair, fitting), kMostBlocks), 1);
    chunks = ceil_div(blocks, chunk);
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
    return chunk * (round_up(kept * x_line_of(p.axes[2]) * 4, 64) + round_up(dy_line() * 4, 64)) +
           round_up(kept * 8, 64) + narrow * L * 4 + (folds ? chunk * block_sums() * 4 : 0);
  }
};

TW_NAMESPACE_END
