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
  static constexpr int pairs = Tile::pairs, threads = Tile::threads, own_blocks = Tile::own_blocks;
  static constexpr int gradient_bytes = Tile::rows * Tile::run * Tile::pixel_bytes;
  static constexpr int stage_bytes = Tile::image_bytes + gradient_bytes, stages = 2;
  using Sums = float[own_blocks][pairs][4];  // rows: input channels of two taps; columns: output channels

  TW_DEVICE static void copy(uint32_t to, const tw_conv_problem& p, int tile, int channel, int thread) {
    const auto at = Tile::place(p, tile);
    Tile::copy_image(to, p, p.gemm.b, at, channel, thread);
    Tile::template copy<Tile::rows, Tile::run>(
        to + Tile::image_bytes, (const char*)p.gemm.a, (int)p.row_n,
        {(int)p.axes[1].row_stride, (int)p.axes[2].row_stride}, {(int)p.axes[1].rows, (int)p.axes[2].rows}, at.n, at.h,
        at.w, channel, Tile::channels(p), thread);
  }

  TW_DEVICE static void multiply(Sums& sum, uint32_t stage, int wave, int lane) {
    constexpr int kAcross = Tile::run / 8, kSteps = Tile::rows / 2 * kAcross;
    constexpr int kRowStep = Tile::row_step, kRunStep = Tile::run_step;
    // Matrices of x: the first and the second tap of the upper row of pixels, then of the lower one.
    const bool second = lane / 8 % 2 != 0, lower = lane / 16 != 0;
    const uint32_t x = stage + Tile::lane_offset(lane, lower);
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
            x + block + (uint32_t)((row * kRowStep * Tile::span_w + column * kRunStep) * Tile::pixel_bytes);
        if constexpr (Tile::shares_rows) {
          typename Tile::Window pixels;
          Tile::template load_window<true>(pixels, from, lane);
          TW_UNROLL
          for (int t = 0; t < pairs; t++)
            mma_16x8<E, E>(sum[own][t],
                           {Tile::matrix(pixels, 2 * t, 0), Tile::matrix(pixels, 2 * t + 1, 0),
                            Tile::matrix(pixels, 2 * t, 1), Tile::matrix(pixels, 2 * t + 1, 1)},
                           b);
        } else {
          TW_UNROLL
          for (int t = 0; t < pairs; t++)
            mma_16x8<E, E>(
                sum[own][t],
                load_matrices<4, true>(from + (second ? Tile::tap_offset(2 * t + 1) : Tile::tap_offset(2 * t))), b);
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
