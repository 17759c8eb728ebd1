// Merged groups, forward and backward data: see merged_tile.hpp.
#pragma once
#include "tilewright/gpu/merged_tile.hpp"
#include "tilewright/gpu/scheduler.hpp"

namespace tw::gpu {

template <class Config>
struct MergedConv : MergedTile<Config> {
  using Tile = MergedTile<Config>;
  using E = typename Tile::E;
  static constexpr int pairs = Tile::pairs, threads = Tile::threads;
  using Weights = Words<2>[pairs];

  // Of output channel lane / 4 and input channels 2 * (lane % 4), 2 * (lane % 4) + 1 of a block.
  TW_DEVICE static void load_weights(Weights& w, const tw_conv_problem& p, int block, int lane) {
    const int each = (int)p.channels, output = block * 8 + lane / 4, group = output / each;
    const char* const from =
        (const char*)p.gemm.b + (group * p.weight_g + (output - group * each) * p.weight_n) * size_of<E>;
    TW_UNROLL
    for (int half = 0; half < 2 * pairs; half++) {
      bool exists;
      const int64_t offset = Tile::weight_offset(p, Tile::tap_of(p, half, exists));
      uint32_t word = 0;
      TW_UNROLL
      for (int e = 0; e < 2; e++) {
        const int input = block * 8 + lane % 4 * 2 + e;
        if (exists && output < Tile::channels(p) && input / each == group)
          word |= (uint32_t)load_constant<uint16_t>(from + (offset + (input - group * each) * p.weight_c) * size_of<E>)
                  << (16 * e);
      }
      w[half / 2].w[half % 2] = word;
    }
  }

  // All pixels of a tile, for one block of channels.
  template <class Finish>
  TW_DEVICE static void multiply(const Weights& w, const Finish& finish, const tw_conv_problem& p,
                                 const typename Tile::Place& at, int block, uint32_t image, int lane) {
    constexpr int kAcross = Tile::run / 8, kSteps = Tile::rows / 2 * kAcross;
    constexpr int kRowStep = Tile::down().row_step, kRunStep = Tile::across().row_step;
    // Matrices: the upper row and the lower one of the first tap, then of the second.
    const bool lower = lane / 8 % 2 != 0, second = lane / 16 != 0;
    const uint32_t own = image + block % Tile::blocks * 16 +
                         ((lower ? kRowStep * Tile::span_w : 0) + lane % 8 * kRunStep) * Tile::pixel_bytes;
    uint32_t offset[pairs];
    TW_UNROLL
    for (int t = 0; t < pairs; t++) offset[t] = own + (second ? Tile::tap_offset(2 * t + 1) : Tile::tap_offset(2 * t));
    const int j = block * 8 + lane % 4 * 2, left = Tile::channels(p) - j;
    const auto columns = finish.template columns<2>(left > 0 ? j : 0, left > 0 ? min_of(left, 2) : 1);
    const int line = (at.n * (int)p.axes[1].rows + at.h) * (int)p.axes[2].rows + at.w;
    TW_UNROLL_BY(2)
    for (int step = 0; step < kSteps; step++) {
      const int row = step / kAcross * 2, column = step % kAcross * 8;
      const uint32_t moved = (uint32_t)((row * kRowStep * Tile::span_w + column * kRunStep) * Tile::pixel_bytes);
      float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      TW_UNROLL
      for (int t = 0; t < pairs; t++)
        mma_16x8<E, E>(sum, load_matrices<4, false>(offset[t] + moved), w[t]);
      const int across = column + lane / 4;
      if (at.w + across >= (int)p.axes[2].rows || left <= 0) continue;
      TW_UNROLL
      for (int half = 0; half < 2; half++) {
        if (at.h + row + half >= (int)p.axes[1].rows) continue;
        const float x[2] = {sum[half * 2], sum[half * 2 + 1]};
        finish.store(x, columns, line + (row + half) * (int)p.axes[2].rows + across, j, left);
      }
    }
  }

  // The product's operands, with all channels as its columns.
  struct Operands {
    tw_gemm_problem problem;
    tw_gemm_operand d[Config::D::size > 0 ? Config::D::size : 1];
  };
  TW_DEVICE static Operands by_channel(const tw_conv_problem& p, const tw_gemm_operand* d) {
    Operands x;
    x.problem = p.gemm;
    x.problem.n = Tile::channels(p);
    TW_UNROLL
    for (int i = 0; i < Config::D::size; i++) x.d[i] = d[i];
    if (p.channels == 1) {  // a channel is an item
      x.problem.bias.col_stride = p.gemm.bias.batch_stride;
      if constexpr (Config::scale_b == Scale::column) x.problem.scale_b.col_stride = p.gemm.scale_b.batch_stride;
      TW_UNROLL
      for (int i = 0; i < Config::D::size; i++) x.d[i].col_stride = d[i].batch_stride;
    }
    return x;
  }

  TW_DEVICE static void run_block(const ConvParams<Config>& params) {
    const int index = block_index(), thread = thread_index(), lane = lane_index(), wave = thread / kWave;
    const auto* const task = task_of<Config>(params, index);
    const tw_conv_problem& p = task->conv;
    const int within = Config::grouped ? index - (int)task->first_tile : index;
    const int parts = Tile::channel_blocks(p), part = within % parts, first = within / parts * Tile::repeats;
    const uint32_t image = shared_base();
    const Operands operands = by_channel(p, task->operands());
    const ConvRows<Config> where(p, 0, size_of<typename Config::C>);
    const Epilogue<Config, float, ConvRows<Config>> finish(operands.problem, operands.d, 0, where);
    TW_NO_UNROLL
    for (int i = 0; i < Tile::repeats && first + i < Tile::tiles(p); i++) {
      const auto at = Tile::place(p, first + i);
      if (i > 0) barrier();  // the tile before has been read
      Tile::copy_image(image, p, p.gemm.a, at, part * Tile::channel_tile, thread);
      commit_async();
      TW_UNROLL
      for (int own = 0; own < Tile::own_blocks; own++) {
        const int block = part * Tile::blocks + own * Tile::waves + wave;
        Weights w;
        load_weights(w, p, block, lane);
        if (own == 0) {
          wait_async<0>();
          barrier();
        }
        multiply(w, finish, p, at, block, image, lane);
      }
    }
  }
};

}  // namespace tw::gpu
