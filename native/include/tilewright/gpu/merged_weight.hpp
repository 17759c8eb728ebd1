// Merged groups, the gradient of the weights: see merged_tile.hpp. A workgroup adds up the products of one slice of the
// tiles; the sums of every slice go to the workspace in fp32, [slice][group][m][n], and the kernel of conv_convert.hpp
// adds them. Workgroups: ceil(channels / channel_tile) * launch.split_k. (repeats is idle.)
#pragma once
#include "tilewright/gpu/conv_convert.hpp"
#include "tilewright/gpu/merged_tile.hpp"

namespace tw::gpu {

template <class Config>
struct MergedWeight : MergedTile<Config> {
  using Tile = MergedTile<Config>;
  using E = typename Tile::E;
  static constexpr int threads = Tile::threads, pairs = (Tile::taps + 1) / 2;
  static constexpr int own_blocks = Tile::blocks / Tile::waves;  // of a wave: neighbours
  static_assert(Tile::each <= 8, "a block holds whole groups");
  static constexpr int gradient_bytes = Tile::rows * Tile::run * Tile::pixel_bytes;
  static constexpr int stage_bytes = Tile::image_bytes + gradient_bytes, stages = 2;
  using Sums = float[own_blocks][pairs][4];  // rows: input channels of two taps; columns: output channels

  TW_DEVICE static void copy(uint32_t to, const tw_conv_problem& p, int tile, int channel, int thread) {
    const auto at = Tile::place(p, tile);
    Tile::template copy_image<Tile::span_h>(to, p, p.gemm.b, at, 0, channel, thread);
    const typename Tile::Pixels gradient = {(const char*)p.gemm.a,       (int)p.row_n,
                                            (int)p.axes[1].row_stride,   (int)p.axes[2].row_stride,
                                            (int)p.axes[1].rows,         (int)p.axes[2].rows,
                                            Tile::channels(p)};
    Tile::template copy<Tile::rows, Tile::run, 1>(to + Tile::image_bytes, gradient, at.n, at.h, at.w, channel, thread);
  }

  // ---- fragments ----

  // Where the lower row of an instruction's pixels meets with one tap what the upper one meets with the next, rows of the
  // image are read once for both.
  static constexpr bool shares_rows = Tile::down().row_step == Tile::down().tap_step;
  static constexpr int window_rows = shares_rows ? Tile::taps_h + 1 : 1;
  struct Window {
    uint32_t m[window_rows][Tile::taps_w];  // one 8 x 8 matrix of (pixels, channels) each
  };

  // What a lane adds to the address of an instruction's first pixel (without sharing: for its matrix's pixels).
  TW_DEVICE static uint32_t lane_offset(int lane, bool lower) {
    return (uint32_t)((!shares_rows && lower ? Tile::row_step * Tile::row_bytes : 0) + lane % 8 * Tile::pixel_bytes);
  }
  // An odd last tap is taken twice.
  static constexpr int tap_bytes(int tap) { return Tile::tap_bytes(min_of(tap, Tile::taps - 1)); }
  TW_DEVICE static void load_window(Window& x, uint32_t from, int lane) {
    TW_UNROLL
    for (int first = 0; first < window_rows; first += 4) {
      const int row = min_of(first + lane / 8, window_rows - 1);
      const uint32_t own = from + (uint32_t)(row * Tile::down().tap_step * Tile::row_bytes);
      TW_UNROLL
      for (int tw = 0; tw < Tile::taps_w; tw++) {
        const Words<4> w = load_matrices<4, true>(own + Tile::column_bytes(tw * Tile::across().tap_step));
        TW_UNROLL
        for (int l = 0; l < 4; l++)
          if (first + l < window_rows) x.m[first + l][tw] = w.w[l];
      }
    }
  }
  // Of tap `tap` and the upper or lower row of pixels.
  TW_DEVICE static uint32_t matrix(const Window& x, int tap, int lower) {
    const int t = min_of(tap, Tile::taps - 1);
    return x.m[t / Tile::taps_w + lower][t % Tile::taps_w];
  }

  TW_DEVICE static void multiply(Sums& sum, uint32_t stage, int wave, int lane) {
    constexpr int kAcross = Tile::run / 8, kSteps = Tile::rows / 2 * kAcross;
    // Matrices of x: the first and the second tap of the upper row of pixels, then of the lower one.
    const bool second = lane / 8 % 2 != 0, lower = lane / 16 != 0;
    const uint32_t x = stage + lane_offset(lane, lower);
    const uint32_t dy = stage + Tile::image_bytes + (lane / 8 % 2 * Tile::run + lane % 8) * Tile::pixel_bytes;
    TW_UNROLL
    for (int own = 0; own < own_blocks; own++) {
      const uint32_t block = (uint32_t)(wave * own_blocks + own) * 16;
      TW_NO_UNROLL
      for (int step = 0; step < kSteps; step++) {
        const int row = step / kAcross * 2, column = step % kAcross * 8;
        const Words<2> b =
            load_matrices<2, true>(dy + block + (uint32_t)((row * Tile::run + column) * Tile::pixel_bytes));
        const uint32_t from =
            x + block + (uint32_t)(row * Tile::row_step * Tile::row_bytes + column * Tile::pixel_bytes);
        if constexpr (shares_rows) {
          Window pixels;
          load_window(pixels, from, lane);
          TW_UNROLL
          for (int t = 0; t < pairs; t++)
            mma_16x8<E, E>(sum[own][t],
                           {matrix(pixels, 2 * t, 0), matrix(pixels, 2 * t + 1, 0),
                            matrix(pixels, 2 * t, 1), matrix(pixels, 2 * t + 1, 1)},
                           b);
        } else {
          TW_UNROLL
          for (int t = 0; t < pairs; t++)
            mma_16x8<E, E>(
                sum[own][t],
                load_matrices<4, true>(from + (second ? tap_bytes(2 * t + 1) : tap_bytes(2 * t))), b);
        }
      }
    }
  }

  TW_DEVICE static void store(const Sums& sum, const tw_conv_problem& p, char* partial, int first_block, int wave,
                              int lane) {
    constexpr int each = Tile::each;
    TW_UNROLL
    for (int own = 0; own < own_blocks; own++) {
      const int block = first_block + wave * own_blocks + own, input = block * 8 + lane / 4, group = input / each;
      if (input >= Tile::channels(p)) continue;
      TW_UNROLL
      for (int t = 0; t < pairs; t++)
        TW_UNROLL
        for (int l = 0; l < 4; l++) {
          const int tap = 2 * t + l / 2, output = block * 8 + lane % 4 * 2 + l % 2;
          if (tap >= Tile::taps || output / each != group) continue;
          const int64_t at =
              (output * p.gemm.n) + (int64_t)tap * each + (input - group * each);  // groups lie side by side
          store_global(partial + at * 4, sum[own][t][l]);
        }
    }
  }

  TW_DEVICE static void run_block(const ConvParams<Config>& params) {
    const int thread = thread_index(), lane = lane_index(), wave = thread / kWave, slices = (int)params.launch.split_k;
    const tw_conv_problem& p = params.task.conv;
    const int part = block_index() / slices, slice = block_index() % slices, channel = part * Tile::channel_tile;
    const int total = Tile::tiles(p), each = ceil_div(total, slices);
    const int begin = min_of(slice * each, total), end = min_of(begin + each, total);
    Sums sum;
    TW_UNROLL
    for (int own = 0; own < own_blocks; own++)
      TW_UNROLL
      for (int t = 0; t < pairs; t++)
        TW_UNROLL
        for (int l = 0; l < 4; l++) sum[own][t][l] = 0.0f;
    const uint32_t shared = shared_base();
    if (begin < end) copy(shared, p, begin, channel, thread);
    commit_async();
    TW_NO_UNROLL
    for (int tile = begin; tile < end; tile++) {
      const uint32_t stage = shared + (tile - begin) % stages * stage_bytes;
      if (tile + 1 < end) copy(shared + (tile + 1 - begin) % stages * stage_bytes, p, tile + 1, channel, thread);
      commit_async();
      wait_async<1>();
      barrier();
      multiply(sum, stage, wave, lane);
      barrier();
    }
    wait_async<0>();
    char* const partial = (char*)params.launch.workspace + (int64_t)slice * p.groups * p.gemm.m * p.gemm.n * 4;
    store(sum, p, partial, part * Tile::blocks, wave, lane);
  }
};

}  // namespace tw::gpu
