// Merged groups, the gradient of the weights: see gpu/conv/merged/tile.hpp. A workgroup adds up the products of one
// slice of the tiles; the sums of every slice go to the workspace in fp32, [slice][group][m][n], and the kernel of
// gpu/conv/convert.hpp adds them. Workgroups: ceil(channels / channel_tile) * launch.split_k. While a tile is computed,
// as many as `repeats` says are on their way: one is enough for large tiles, small ones take less time than memory to
// answer.
//
// A wave owns 16 output channels, all taps, and the input channels that these meet. An instruction multiplies 16 input
// channels, a unit of pixels and eight output channels; of groups of less than 16 channels the sums of other groups are
// left where they are. Of more waves than there are such channels, each takes a part of the units.
#pragma once
#include "tilewright/gpu/conv/convert.hpp"
#include "tilewright/gpu/conv/merged/tile.hpp"

namespace tw::gpu {

template <class Config>
struct MergedWeight : MergedTile<Config> {
  using Tile = MergedTile<Config>;
  using E = typename Tile::E;
  static constexpr int threads = Tile::threads, taps = Tile::taps, taps_w = Tile::taps_w, units = Tile::units;
  static constexpr int depths = Tile::depths, each = Tile::each;
  static constexpr int channel_waves = Tile::blocks / 2, pixel_waves = Tile::waves / channel_waves;
  static_assert(Tile::blocks % 2 == 0 && Tile::waves == channel_waves * pixel_waves, "a wave owns a pair of blocks");
  static constexpr int gradient_bytes = Tile::rows * Tile::run * Tile::pixel_bytes;
  static constexpr int stage_bytes = Tile::image_bytes + gradient_bytes, ahead = Tile::repeats, stages = ahead + 1;
  static constexpr int sums = depths * taps * 2 * 4;
  static constexpr int sum_bytes = pixel_waves > 1 ? channel_waves * sums * kWave * 4 : 0;  // once all tiles are done
  static constexpr int min_blocks = max_of((sums > 144 ? 4 : depths > 1 ? 8 : 12) / Tile::waves, 1);
  // Rows: input channels; columns: output channels of the two blocks.
  using Accumulators = float[depths][taps][2][4];

  TW_DEVICE static void copy(uint32_t to, const tw_conv_problem& p, int tile, int channel, int thread) {
    const auto at = Tile::place(p, tile);
    Tile::template copy_image<Tile::span_h>(to, p, p.gemm.b, at, 0, channel, thread);
    const typename Tile::Pixels gradient = {(const char*)p.gemm.a,
                                            (int)p.row_n,
                                            (int)p.axes[1].row_stride,
                                            (int)p.axes[2].row_stride,
                                            (int)p.axes[1].rows,
                                            (int)p.axes[2].rows,
                                            Tile::channels(p)};
    Tile::template copy<Tile::rows, Tile::run, 1>(to + Tile::image_bytes, gradient, at.n, at.h, at.w, channel, thread);
  }

  // `depth` rows of a strip, of whose first pixels a lane reads x and dy there.
  TW_DEVICE static void multiply(Accumulators& sum, uint32_t image, uint32_t gradient) {
    Words<4> dy[units];
    TW_UNROLL
    for (int row = 0; row <= Tile::last_row; row++) {
      if (!Tile::is_met(row)) continue;
      Words<4> x[depths][taps_w];
      TW_UNROLL
      for (int d = 0; d < depths; d++)
        TW_UNROLL
        for (int tw = 0; tw < taps_w; tw++)
          x[d][tw] = load_matrices<4, true>(image + row * Tile::row_bytes + d * 32 +
                                            Tile::column_bytes(tw * Tile::across().tap_step));
      TW_UNROLL
      for (int u = 0; u < units; u++) {
        if (u * Tile::unit_step == row)
          dy[u] = load_matrices<4, true>(gradient + u * Tile::unit_rows * Tile::run * Tile::pixel_bytes);
        TW_UNROLL
        for (int th = 0; th < Tile::taps_h; th++)
          if (u * Tile::unit_step + th * Tile::tap_step == row) {
            TW_UNROLL
            for (int tw = 0; tw < taps_w; tw++)
              TW_UNROLL
              for (int d = 0; d < depths; d++)
                TW_UNROLL
                for (int b = 0; b < 2; b++)
                  mma_16x8<E, E>(sum[d][th * taps_w + tw][b], x[d][tw], {dy[u].w[2 * b], dy[u].w[2 * b + 1]});
          }
      }
    }
  }

  // Calls use(value, index) for every sum of a lane.
  template <class Use>
  TW_DEVICE static void for_each(Accumulators& sum, const Use& use) {
    TW_UNROLL
    for (int i = 0; i < sums; i++) use(sum[i / (taps * 8)][i / 8 % taps][i / 4 % 2][i % 4], i);
  }
  // Adds what the waves of the same channels have, in their order, to the sums of the first.
  TW_DEVICE static void add_waves(Accumulators& sum, uint32_t shared, int wave, int lane) {
    const uint32_t own = shared + (wave % channel_waves * sums * kWave + lane) * 4;
    TW_NO_UNROLL
    for (int other = 1; other < pixel_waves; other++) {
      barrier();
      if (wave / channel_waves == other)
        for_each(sum, [&](float& x, int i) { store_shared<1>(own + i * (kWave * 4), {bits_of(x)}); });
      barrier();
      if (wave < channel_waves)
        for_each(sum, [&](float& x, int i) { x += float_of(load_shared<1>(own + i * (kWave * 4)).w[0]); });
    }
  }

  TW_DEVICE static void store(const Accumulators& sum, const tw_conv_problem& p, char* partial, int pair, int lane) {
    const int first = pair * 16, input0 = Tile::whole ? first / each * each : first;
    TW_UNROLL
    for (int d = 0; d < depths; d++)
      TW_UNROLL
      for (int b = 0; b < 2; b++)
        TW_UNROLL
        for (int l = 0; l < 4; l++) {
          const int input = input0 + d * 16 + lane / 4 + l / 2 * 8, output = first + b * 8 + lane % 4 * 2 + l % 2;
          if (output / each != input / each || output >= Tile::channels(p)) continue;
          // Groups lie side by side.
          char* const to = partial + ((int64_t)output * p.gemm.n + input % each) * 4;
          TW_UNROLL
          for (int tap = 0; tap < taps; tap++) store_global(to + tap * each * 4, sum[d][tap][b][l]);
        }
  }

  TW_DEVICE static void run_block(const ConvParams<Config>& params) {
    const int thread = thread_index(), lane = lane_index(), wave = quotient(thread, kWave);
    const int slices = (int)params.launch.split_k;
    const tw_conv_problem& p = params.task.conv;
    const int part = quotient(block_index(), slices), slice = block_index() - part * slices;
    const int channel = part * Tile::channel_tile, total = Tile::tiles(p), share = quotient(total + slices - 1, slices);
    const int begin = min_of(slice * share, total), end = min_of(begin + share, total);
    const int pair = wave % channel_waves, pixels = wave / channel_waves;
    const uint32_t shared = shared_base();
    TW_NO_UNROLL
    for (int i = 0; i < ahead; i++) {
      if (begin + i < end) copy(shared + i * stage_bytes, p, begin + i, channel, thread);
      commit_async();
    }
    Accumulators sum;
    for_each(sum, [&](float& x, int) { x = 0.0f; });
    // Eight pixels of a unit and one block that a lane reads, of x (whose blocks come first) and of dy.
    constexpr int kHalf = Tile::wide ? 8 * Tile::pixel_bytes : Tile::row_step * Tile::row_bytes;
    constexpr int kGradientHalf = Tile::wide ? 8 * Tile::pixel_bytes : Tile::run * Tile::pixel_bytes;
    const int own = lane % 8 * Tile::pixel_bytes, low = lane / 8 % 2, high = lane / 16;
    const uint32_t image = shared + own + Tile::met_bytes(pair * 2) + low * 16 + high * kHalf;
    const uint32_t gradient = shared + Tile::image_bytes + own + pair * 32 + high * 16 + low * kGradientHalf;
    uint32_t stage = 0, next = ahead * stage_bytes;
    TW_NO_UNROLL
    for (int tile = begin; tile < end; tile++) {
      if (tile + ahead < end) copy(shared + next, p, tile + ahead, channel, thread);
      commit_async();
      wait_async<ahead>();
      barrier();
      TW_NO_UNROLL
      for (int i = pixels; i < Tile::steps * Tile::strips; i += pixel_waves) {
        const int step = i / Tile::strips, strip = i - step * Tile::strips;
        multiply(sum,
                 image + stage + step * Tile::step_rows * Tile::row_bytes + strip * Tile::unit_run * Tile::pixel_bytes,
                 gradient + stage + (step * Tile::depth * Tile::run + strip * Tile::unit_run) * Tile::pixel_bytes);
      }
      next = stage;
      stage = stage + stage_bytes < stages * stage_bytes ? stage + stage_bytes : 0;
      barrier();
    }
    wait_async<0>();
    if constexpr (pixel_waves > 1) add_waves(sum, shared, wave, lane);
    char* const partial = (char*)params.launch.workspace + (int64_t)slice * p.groups * p.gemm.m * p.gemm.n * 4;
    if (pixels == 0) store(sum, p, partial, part * channel_waves + pair, lane);
  }
};

}  // namespace tw::gpu
