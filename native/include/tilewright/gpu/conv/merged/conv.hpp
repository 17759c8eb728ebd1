// Merged groups, forward and backward data: see gpu/conv/merged/tile.hpp.
//
// An instruction multiplies a unit of pixels and one tap. The sums of a unit are stored as soon as its last tap has
// been added. Steps of a tile are copied apart: the first is computed while later ones are on their way.
#pragma once
#include "tilewright/gpu/conv/merged/tile.hpp"
#include "tilewright/gpu/blocks/scheduler.hpp"

namespace tw::gpu {

// Waits until at most `pending` of the groups of copies, of which there are at most kMost, are under way.
template <int kMost>
TW_DEVICE void wait_for_copies(int pending) {
  if constexpr (kMost == 0) wait_async<0>();
  else if (pending >= kMost) wait_async<kMost>();
  else wait_for_copies<kMost - 1>(pending);
}

template <class Config>
struct MergedConv : MergedTile<Config> {
  using Tile = MergedTile<Config>;
  using E = typename Tile::E;
  using C = typename Config::C;
  using Place = typename Tile::Place;
  static constexpr int threads = Tile::threads, taps = Tile::taps, taps_w = Tile::taps_w, each = Tile::each;
  static constexpr int pair = Tile::blocks % 2 == 0 ? 2 : 1;  // blocks that a wave computes at a time
  static constexpr int channel_waves = gcd_of(Tile::waves, Tile::blocks / pair);
  static constexpr int pixel_waves = Tile::waves / channel_waves;
  static constexpr int own_blocks = Tile::blocks / channel_waves;
  static constexpr bool whole = Tile::whole, wide = Tile::wide;
  static constexpr int depths = Tile::depths;
  static constexpr int words = whole ? 2 * depths : 1;    // of the weights of a tap, of one block
  static_assert(!whole || pair == 2, "groups of 16 channels are pairs of blocks");
  // Workgroups that a unit shall hold: compilers would read ahead until all registers are taken.
  static constexpr int registers = taps > 9 ? 240 : each <= 8 ? 104 : each == 16 ? 136 : 208;
  static constexpr int min_blocks = max_of(65536 / (registers * threads), 1);

  static constexpr int unit_rows = Tile::unit_rows, units = Tile::units, steps = Tile::steps;

  // ---- weights ----

  struct Weights {
    uint32_t w[own_blocks][taps][words];
  };
  // Forward, the weights of a tap lie side by side.
  static constexpr bool in_pairs = !Tile::is_backward && each > 1;
  // Weights of output channel lane / 4 and input channels 2 * (lane % 4), 2 * (lane % 4) + 1 of every block.
  TW_DEVICE static void load_weights(Weights& to, const tw_conv_problem& p, int block, int lane) {
    const int step = (int)p.weight_c;
    TW_UNROLL
    for (int own = 0; own < own_blocks; own++) {
      const int output = (block + own) * 8 + lane / 4, group = output / each;
      const char* const from = (const char*)p.gemm.b + (group * p.weight_g + output % each * p.weight_n) * size_of<E>;
      TW_UNROLL
      for (int word = 0; word < words; word++) {
        const int input = (whole ? group * each + word * 8 : (block + own) * 8) + lane % 4 * 2;
        const bool meets =
            output < Tile::channels(p) && (each == 1 ? input == output - output % 2 : input / each == group);
        const char* const first = from + (each == 1 ? 0 : input % each * (in_pairs ? 1 : step)) * size_of<E>;
        TW_UNROLL
        for (int tap = 0; tap < taps; tap++) {
          bool exists;
          const int offset = Tile::weight_offset(p, tap, exists) * size_of<E>;
          uint32_t x = 0, y = 0;
          if constexpr (in_pairs) {
            if (exists && meets) x = load_constant<Words<1>>(first + offset).w[0];
          } else {
            if (exists && meets) x = load_constant<uint16_t>(first + offset);
            if (each > 1 && exists && meets) y = load_constant<uint16_t>(first + offset + step * size_of<E>);
            x = each == 1 && output % 2 != 0 ? x << 16 : x | y << 16;
          }
          to.w[own][tap][word] = x;
        }
      }
    }
  }

  // ---- products ----

  using Accumulators = float[pair][4];
  // A row of the image: pixels and channels that the taps of one row meet.
  struct Row {
    uint32_t x[depths][taps_w][2 * pair];
  };
  TW_DEVICE static void load_row(Row& row, uint32_t from) {
    TW_UNROLL
    for (int d = 0; d < depths; d++)
      TW_UNROLL
      for (int tw = 0; tw < taps_w; tw++) {
        const auto m =
            load_matrices<2 * pair, false>(from + d * 32 + Tile::column_bytes(tw * Tile::across().tap_step));
        TW_UNROLL
        for (int l = 0; l < 2 * pair; l++) row.x[d][tw][l] = m.w[l];
      }
  }
  TW_DEVICE static void multiply(Accumulators& sum, const Row& row, const Weights& w, int own, int th) {
    TW_UNROLL
    for (int tw = 0; tw < taps_w; tw++)
      TW_UNROLL
      for (int b = 0; b < pair; b++) {
        const uint32_t(&v)[words] = w.w[own + b][th * taps_w + tw];
        if constexpr (whole) {
          TW_UNROLL
          for (int d = 0; d < depths; d++) {
            const uint32_t(&x)[2 * pair] = row.x[d][tw];
            mma_16x8<E, E>(sum[b], {x[0], x[1], x[2], x[3]}, {v[2 * d], v[2 * d + 1]});
          }
        } else {
          mma_16x8_half<E>(sum[b], row.x[0][tw][2 * b], row.x[0][tw][2 * b + 1], v[0]);
        }
      }
  }

  // ---- the result ----

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

  // Where the results of a step belong. A lane has those of pixel lane / 4 of both halves of an instruction; vectors of
  // 16 bytes, which fill whole sectors of memory, it stores of one half and one block alone.
  static constexpr bool gathers = pair == 2 && size_of<C> == 2;
  struct Out {
    Place at;
    int block, column;     // the first block; of the lane's pixel of the first half
    int height, width, channels;
    char* to;              // the lane's vector of the first row
    int64_t row_bytes;
    bool exists;           // whether the vector's column and channels do
  };
  TW_DEVICE static Out out_of(const tw_conv_problem& p, char* c, const Place& at, int block, int lane) {
    Out y = {at, block, at.w + lane / 4, (int)p.axes[1].rows, (int)p.axes[2].rows, Tile::channels(p), c, 0, false};
    if constexpr (gathers) {
      const int half = lane / 2 % 2, own = block + lane % 2, row = at.h + (wide ? 0 : half);
      const int column = y.column + (wide ? half * 8 : 0);
      y.row_bytes = p.axes[1].row_stride * size_of<C>;
      y.to = c + (at.n * p.row_n + column * p.axes[2].row_stride + own * 8) * size_of<C> + row * y.row_bytes;
      y.exists = column < y.width && own * 8 < y.channels;
    }
    return y;
  }
  template <class Finish>
  TW_DEVICE static void store(const Accumulators& sum, const Finish& finish, const Columns<2> (&columns)[pair],
                              const Out& y,
                              int row, int lane) {
    const int j = y.block * 8 + lane % 4 * 2;
    uint32_t packed[4];
    TW_UNROLL
    for (int half = 0; half < 2; half++) {
      const int down = wide ? 0 : half, column = y.column + (wide ? half * 8 : 0);
      const int line = y.at.h + row + down;
      const bool in = column < y.width && line < y.height;
      // Elements outside of the result are finished as their neighbours, and not stored.
      const int i = (y.at.n * y.height + min_of(line, y.height - 1)) * y.width + (column < y.width ? column : y.at.w);
      TW_UNROLL
      for (int b = 0; b < pair; b++) {
        const float x[2] = {sum[b][half * 2], sum[b][half * 2 + 1]};
        const int left = y.channels - j - b * 8;
        if constexpr (gathers) packed[half * 2 + b] = finish.finish(x, columns[b], i, j + b * 8, left).data.w[0];
        else if (in && left > 0) finish.store(x, columns[b], i, j + b * 8, 2);
      }
    }
    if constexpr (gathers) {
      const Words<4> vector = gather_vector(packed, lane);
      if (y.exists && y.at.h + row + (wide ? 0 : lane / 2 % 2) < y.height)
        store_global(y.to + row * y.row_bytes, vector);
    }
  }

  // `depth` rows of a strip of pixels, whose first pixel of the image a lane reads at `from`.
  template <class Finish>
  TW_DEVICE static void compute(const Weights& w, int own, const Finish& finish, const Out& y, uint32_t from, int lane) {
    constexpr int kStep = Tile::unit_step, kTap = Tile::tap_step;
    Columns<2> columns[pair];
    const int j = y.block * 8 + lane % 4 * 2;
    TW_UNROLL
    for (int b = 0; b < pair; b++) columns[b] = finish.template columns<2>(j + b * 8 < y.channels ? j + b * 8 : 0, 2);
    Accumulators sum[units];
    TW_UNROLL
    for (int u = 0; u < units; u++)
      TW_UNROLL
      for (int b = 0; b < pair; b++)
        TW_UNROLL
        for (int l = 0; l < 4; l++) sum[u][b][l] = 0.0f;
    TW_UNROLL
    for (int row = 0; row <= Tile::last_row; row++) {
      if (!Tile::is_met(row)) continue;
      Row x;
      load_row(x, from + row * Tile::row_bytes);
      TW_UNROLL
      for (int u = 0; u < units; u++)
        TW_UNROLL
        for (int th = 0; th < Tile::taps_h; th++)
          if (u * kStep + th * kTap == row) multiply(sum[u], x, w, own, th);
      TW_UNROLL
      for (int u = 0; u < units; u++)
        if (u * kStep + (Tile::taps_h - 1) * kTap == row) store(sum[u], finish, columns, y, u * unit_rows, lane);
    }
  }
  // ---- tiles ----

  // The pixels that a tile meets, in as many groups of copies as it has steps.
  TW_DEVICE static void copy(uint32_t to, const tw_conv_problem& p, const Place& at, int channel, int thread) {
    Tile::template copy_image<Tile::step_span>(to, p, p.gemm.a, at, 0, channel, thread);
    commit_async();
    TW_NO_UNROLL
    for (int first = Tile::step_span; first < Tile::span_h; first += Tile::step_rows) {
      Tile::template copy_image<Tile::step_rows>(to, p, p.gemm.a, at, first, channel, thread);
      commit_async();
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
    const int index = block_index(), thread = thread_index(), lane = lane_index(), wave = quotient(thread, kWave);
    const auto* const task = task_of<Config>(params, index);
    const tw_conv_problem& p = task->conv;
    const int within = Config::grouped ? index - (int)task->first_tile : index;
    const int parts = Tile::channel_blocks(p), some = quotient(within, parts), part = within - some * parts;
    const int first = some * Tile::repeats;
    const int channel = part * Tile::channel_tile, count = min_of(Tile::repeats, Tile::tiles(p) - first);
    const uint32_t shared = shared_base();
    Place next = Tile::place(p, first);
    copy(shared, p, next, channel, thread);
    const int inside = wave % channel_waves * own_blocks, block = part * Tile::blocks + inside;
    Weights w;
    load_weights(w, p, block, lane);
    const Operands operands = by_channel(p, task->operands());
    const ConvRows<Config> where(p, 0, size_of<C>);
    const Epilogue<Config, float, ConvRows<Config>> finish(operands.problem, operands.d, 0, where);
    // The pixel, and (of a pair of blocks) the block, that a lane reads for the matrix instruction.
    const int pixel = lane % 16;
    const uint32_t own_pixel =
        (uint32_t)(wide ? pixel * Tile::pixel_bytes
                        : pixel / 8 * Tile::row_step * Tile::row_bytes + pixel % 8 * Tile::pixel_bytes);
    const uint32_t own_image = shared + own_pixel + lane / 16 % pair * 16;
    TW_NO_UNROLL
    for (int i = 0; i < count; i++) {
      const Place at = next;
      if (Tile::repeats > 1 && i + 1 < count) {
        next = Tile::place(p, first + i + 1);
        copy(shared + (i + 1) % 2 * Tile::image_bytes, p, next, channel, thread);
      }
      const int later = Tile::repeats > 1 && i + 1 < count ? steps : 0;
      const uint32_t image = own_image + i % 2 * Tile::image_bytes;
      TW_NO_UNROLL
      for (int step = 0; step < steps; step++) {
        wait_for_copies<(Tile::repeats > 1 ? 2 : 1) * steps - 1>(later + steps - 1 - step);
        barrier();
        const int h = at.h + step * Tile::depth;
        if (h >= (int)p.axes[1].rows) continue;
        const int own_strip = (wave / channel_waves + step * Tile::strips) % pixel_waves;
        TW_NO_UNROLL
        for (int strip = own_strip; strip < Tile::strips; strip += pixel_waves) {
          const int column = at.w + strip * Tile::unit_run;
          if (column >= (int)p.axes[2].rows) break;
          const uint32_t from =
              image + step * Tile::step_rows * Tile::row_bytes + strip * Tile::unit_run * Tile::pixel_bytes;
          TW_UNROLL
          for (int own = 0; own < own_blocks; own += pair) {
            const Out y = out_of(p, finish.c, {at.n, h, column}, block + own, lane);
            compute(w, own, finish, y, from + Tile::met_bytes(inside + own), lane);
          }
        }
      }
      if (Tile::repeats > 1) barrier();  // the tile has been read
    }
    wait_async<0>();
  }
};

}  // namespace tw::gpu
