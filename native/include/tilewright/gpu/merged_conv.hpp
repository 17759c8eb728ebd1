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
  static constexpr int own_blocks = Tile::own_blocks;
  using Weights = Words<2>[own_blocks][pairs];

  // Of output channel lane / 4 and input channels 2 * (lane % 4), 2 * (lane % 4) + 1 of every block.
  TW_DEVICE static void load_weights(Weights& w, const tw_conv_problem& p, int block, int lane) {
    constexpr int each = Tile::each;
    const int step = (int)p.weight_c;
    TW_UNROLL
    for (int own = 0; own < own_blocks; own++) {
      const int output = (block + own) * 8 + lane / 4, group = output / each;
      const char* const from =
          (const char*)p.gemm.b + (group * p.weight_g + output % each * p.weight_n) * size_of<E>;
      TW_UNROLL
      for (int half = 0; half < 2 * pairs; half++) {
        bool exists;
        const int offset = Tile::weight_offset(p, half, exists);
        uint32_t word = 0;
        TW_UNROLL
        for (int e = 0; e < 2; e++) {
          const int input = (block + own) * 8 + lane % 4 * 2 + e;
          if (exists && output < Tile::channels(p) && input / each == group)
            word |= (uint32_t)load_constant<uint16_t>(from + (offset + input % each * step) * size_of<E>) << (16 * e);
        }
        w[own][half / 2].w[half % 2] = word;
      }
    }
  }

  // Four lanes hold two neighbouring channels each of four vectors of eight; lane q gets the whole of vector q.
  TW_DEVICE static Words<4> gather_vector(const uint32_t (&v)[4], int lane) {
    const bool odd = (lane & 1) != 0, upper = (lane & 2) != 0;
    const uint32_t a = (uint32_t)shuffle((int)(odd ? v[0] : v[1]), lane ^ 1);
    const uint32_t b = (uint32_t)shuffle((int)(odd ? v[2] : v[3]), lane ^ 1);
    const uint32_t x[4] = {odd ? a : v[0], odd ? v[1] : a, odd ? b : v[2], odd ? v[3] : b};
    const uint32_t c = (uint32_t)shuffle((int)(upper ? x[0] : x[2]), lane ^ 2);
    const uint32_t d = (uint32_t)shuffle((int)(upper ? x[1] : x[3]), lane ^ 2);
    return {upper ? c : x[0], upper ? d : x[1], upper ? x[2] : c, upper ? x[3] : d};
  }

  // Whether pairs of blocks are stored as vectors, which takes fewer and whole sectors of memory.
  static constexpr bool pairs_blocks = own_blocks % 2 == 0 && size_of<typename Config::C> == 2;
  static constexpr int blocks_at_once = pairs_blocks ? 2 : 1;

  // All pixels of a tile, for blocks `block` and on, of which `first` is the wave's.
  template <class Finish>
  TW_DEVICE static void multiply(const Weights& w, int first, const Finish& finish, const tw_conv_problem& p,
                                 const typename Tile::Place& at, int block, uint32_t image, bool aligned, int lane) {
    constexpr int kAcross = Tile::run / 8, kDown = Tile::rows / 2, kBlocks = blocks_at_once;
    constexpr int kRowStep = Tile::row_step, kRunStep = Tile::run_step;
    // Matrices: the upper row and the lower one of the first tap, then of the second.
    const bool lower = lane / 8 % 2 != 0, second = lane / 16 != 0;
    const uint32_t own = image + block % Tile::blocks * 16 + Tile::lane_offset(lane, lower);
    uint32_t offset[pairs];  // without shared rows
    TW_UNROLL
    for (int t = 0; t < pairs; t++) offset[t] = own + (second ? Tile::tap_offset(2 * t + 1) : Tile::tap_offset(2 * t));
    const int j = block * 8 + lane % 4 * 2, height = (int)p.axes[1].rows, width = (int)p.axes[2].rows;
    Columns<2> columns[kBlocks];
    TW_UNROLL
    for (int b = 0; b < kBlocks; b++)
      columns[b] = finish.template columns<2>(j + b * 8 < Tile::channels(p) ? j + b * 8 : 0, 2);
    const int line = (at.n * height + at.h) * width + at.w;
    // The vector that the lane stores of the first pixels, and how far it is to the next ones.
    const int64_t pixel = finish.rows.distance() * size_of<typename Config::C>;
    char* const to = finish.c + (line + lane / 2 % 2 * width + lane / 4) * pixel +
                     (block + lane % 2) * 8 * size_of<typename Config::C>;
    TW_NO_UNROLL
    for (int down = 0; down < kDown; down++) {
      const int row = down * 2;
      if (at.h + row >= height) break;
      TW_UNROLL_BY(2)
      for (int across = 0; across < kAcross; across++) {
        float sum[kBlocks][4];
        TW_UNROLL
        for (int b = 0; b < kBlocks; b++) {
          TW_UNROLL
          for (int l = 0; l < 4; l++) sum[b][l] = 0.0f;
          const uint32_t moved =
              (uint32_t)((row * kRowStep * Tile::span_w + across * 8 * kRunStep) * Tile::pixel_bytes + b * 16);
          if constexpr (Tile::shares_rows) {
            typename Tile::Window x;
            Tile::template load_window<false>(x, own + moved, lane);
            TW_UNROLL
            for (int t = 0; t < pairs; t++)
              mma_16x8<E, E>(sum[b],
                             {Tile::matrix(x, 2 * t, 0), Tile::matrix(x, 2 * t, 1), Tile::matrix(x, 2 * t + 1, 0),
                              Tile::matrix(x, 2 * t + 1, 1)},
                             w[first + b][t]);
          } else {
            TW_UNROLL
            for (int t = 0; t < pairs; t++)
              mma_16x8<E, E>(sum[b], load_matrices<4, false>(offset[t] + moved), w[first + b][t]);
          }
        }
        const int column = across * 8 + lane / 4;
        const bool exists = at.w + column < width;
        const int i = line + row * width + (exists ? column : 0);
        if constexpr (pairs_blocks) {
          if (aligned) {
            uint32_t words[4];
            TW_UNROLL
            for (int l = 0; l < 4; l++) {
              const int b = l % 2, half = at.h + row + l / 2 < height ? l / 2 : 0;
              const float x[2] = {sum[b][l / 2 * 2], sum[b][l / 2 * 2 + 1]};
              words[l] = finish.finish(x, columns[b], i + half * width, j + b * 8, Tile::channels(p) - j - b * 8).data.w[0];
            }
            const Words<4> whole = gather_vector(words, lane);
            const int half = lane / 2 % 2, b = lane % 2;
            if (exists && at.h + row + half < height && block + b < Tile::channels(p) / 8)
              store_global(Config::linear_rows
                               ? to + (row * width + across * 8) * pixel
                               : finish.c + (finish.rows(i + half * width) + (block + b) * 8) * 2,
                           whole);
            continue;
          }
        }
        TW_UNROLL
        for (int b = 0; b < kBlocks; b++)
          TW_UNROLL
          for (int half = 0; half < 2; half++) {
            if (!exists || at.h + row + half >= height || j + b * 8 >= Tile::channels(p)) continue;
            const float x[2] = {sum[b][half * 2], sum[b][half * 2 + 1]};
            finish.store(x, columns[b], i + half * width, j + b * 8, 2);
          }
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
    const uint32_t shared = shared_base();
    const Operands operands = by_channel(p, task->operands());
    const ConvRows<Config> where(p, 0, size_of<typename Config::C>);
    const Epilogue<Config, float, ConvRows<Config>> finish(operands.problem, operands.d, 0, where);
    const bool aligned = is_aligned(finish.c, 16) && where.divisible(8);
    const int block = part * Tile::blocks + wave * own_blocks, channel = part * Tile::channel_tile;
    const int count = min_of(Tile::repeats, Tile::tiles(p) - first);
    auto next = Tile::place(p, first);
    Tile::copy_image(shared, p, p.gemm.a, next, channel, thread);
    commit_async();
    Weights w;
    load_weights(w, p, block, lane);
    TW_NO_UNROLL
    for (int i = 0; i < count; i++) {
      const auto at = next;
      if (Tile::repeats > 1 && i + 1 < count) {
        next = Tile::place(p, first + i + 1);
        Tile::copy_image(shared + (i + 1) % 2 * Tile::image_bytes, p, p.gemm.a, next, channel, thread);
      }
      commit_async();
      wait_async<1>();
      barrier();
      TW_UNROLL
      for (int own = 0; own < own_blocks; own += blocks_at_once)
        multiply(w, own, finish, p, at, block + own, shared + i % 2 * Tile::image_bytes, aligned, lane);
      if (Tile::repeats > 1) barrier();  // the tile has been read
    }
    wait_async<0>();
  }
};

}  // namespace tw::gpu
