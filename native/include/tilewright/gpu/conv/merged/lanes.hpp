// Merged groups, forward and backward data, in a second form (Config: epilogue cshuffle): see gpu/conv/merged/tile.hpp
// for what is computed, and gpu/conv/merged/conv.hpp for the first one. It takes fewer instructions:
// - Groups of less than 16 channels fill half the depth of an instruction; here it multiplies two taps of a row.
// - A lane stores four neighbouring channels of a pixel. Which channel a column of the product computes is free in
//   groups of 16 channels and more: forward, a lane's columns of two blocks are chosen to be neighbours. Else lanes 2i
//   and 2i + 1 exchange two channels each.
// - Weights of groups of 16 channels and more are copied to shared memory, 16 bytes at a time (their strides are
//   multiples of 8 elements), and read there as matrices. Those of smaller groups are copied as well, forward.
// - Where a pixel's results belong is worked out once for a strip, in elements from C (less than 2^32).
#pragma once
#include "tilewright/gpu/conv/merged/conv.hpp"

namespace tw::gpu {

template <class Config>
struct MergedLanes : MergedConv<Config> {
  using Base = MergedConv<Config>;
  using Tile = MergedTile<Config>;
  using E = typename Tile::E;
  using C = typename Config::C;
  using Place = typename Tile::Place;
  using Weights = typename Base::Weights;
  using Accumulators = typename Base::Accumulators;
  static constexpr int threads = Tile::threads, taps = Tile::taps, taps_w = Tile::taps_w, each = Tile::each;
  static constexpr bool whole = Tile::whole, wide = Tile::wide;
  static_assert(Tile::blocks % 2 == 0, "lanes store channels of two blocks");
  static constexpr int channel_waves = Base::channel_waves, pixel_waves = Base::pixel_waves;
  static constexpr int own_blocks = Base::own_blocks, depths = Tile::depths, words = Base::words;
  static constexpr int units = Tile::units, unit_rows = Tile::unit_rows, steps = Tile::steps;
  // Workgroups that a unit shall hold: compilers would read ahead until all registers are taken.
  // Of tiles that follow one another more, which are copied ahead.
  static constexpr int alone = wide || Tile::is_backward ? 128 : 104, heavy = units > 4 ? 208 : 144;
  static constexpr int light = units > 4 ? 168 : Tile::repeats > 1 ? 80 : alone;
  static constexpr int several = Tile::is_backward ? 168 : 144;
  static constexpr int registers = depths > 1 ? 168 : whole ? heavy : own_blocks > 2 ? several : light;
  static constexpr int min_blocks = max_of(65536 / (registers * threads), 1);

  // ---- weights ----

  static constexpr bool staged = whole;
  static constexpr bool permuted = whole && !Tile::is_backward;  // whether a lane's columns are neighbours
  // The channel of a column of two blocks that begin with an even one.
  TW_DEVICE static int channel_in(int b, int column) {
    return permuted ? column / 2 * 4 + b % 2 * 2 + column % 2 : b % 2 * 8 + column;
  }

  // To shared memory: a line for every channel of y, with all taps and the channels of x of its group.
  static constexpr int tap_bytes = each * size_of<E>, line_bytes = taps * tap_bytes + 16;
  static constexpr int weight_bytes = staged ? Tile::channel_tile * line_bytes
                                      : Tile::is_backward ? 0
                                                          : Tile::channel_tile * taps * each * (int)size_of<E>;
  TW_DEVICE static void copy_weights(uint32_t to, const tw_conv_problem& p, int channel, int thread) {
    constexpr int kChunks = tap_bytes / 16, kLines = max_of(threads / kChunks, 1);
    const int chunk = thread % kChunks, step = (int)(Tile::is_backward ? p.weight_c : p.weight_n);
    TW_UNROLL_BY(2)
    for (int line = thread / kChunks; line < Tile::channel_tile; line += kLines) {
      const int own = channel + line, group = own / each;
      const char* const from =
          (const char*)p.gemm.b + (group * p.weight_g + (own - group * each) * step + chunk * 8) * size_of<E>;
      const bool in = own < Tile::channels(p);
      TW_UNROLL
      for (int tap = 0; tap < taps; tap++) {
        bool exists;
        const int offset = Tile::weight_offset(p, tap, exists) * size_of<E>;
        if (!Tile::is_backward) exists = true;
        copy_async(to + line * line_bytes + tap * tap_bytes + chunk * 16, from + offset, exists && in ? 16 : 0);
      }
    }
  }
  // The result of load_weights for blocks `inside` and on of the tile.
  TW_DEVICE static void read_weights(Weights& to, uint32_t from, int inside, int lane) {
    constexpr int kTotal = taps * words;
    const int own_word = lane / 8 % words, own_tap = lane / 8 / words;
    TW_UNROLL
    for (int own = 0; own < own_blocks; own++) {
      const int channel = (inside + own) * 8, group = channel / each * each;
      const int forward = channel / 16 * 16 + channel_in(own, lane % 8), backward = group + own_word * 8 + lane % 8;
      const uint32_t at = from + (Tile::is_backward ? backward : forward) * line_bytes +
                          (Tile::is_backward ? (channel - group) / 8 : own_word) * 16;
      TW_UNROLL
      for (int i = 0; i < kTotal; i += 4) {
        const auto w = load_matrices<4, Tile::is_backward>(at + min_of(i / words + own_tap, taps - 1) * tap_bytes);
        TW_UNROLL
        for (int l = 0; l < 4; l++)
          if (i + l < kTotal) to.w[own][(i + l) / words][(i + l) % words] = w.w[l];
      }
    }
  }

  // Weights of a tile of smaller groups, forward, mostly lie in memory without a gap, tap by tap: they are copied as
  // they lie.
  static constexpr bool copies = !whole && !Tile::is_backward;
  static constexpr int line_elements = taps * each, word_bytes = Tile::channel_tile * line_elements * size_of<E>;
  TW_DEVICE static bool are_packed(const tw_conv_problem& p) {
    return (int64_t)p.gemm.b % 16 == 0 && (each == 1 || (p.weight_n == line_elements && p.weight_c == 1)) &&
           p.weight_g == each * line_elements && (taps_w == 1 || p.axes[2].tap_stride == each) &&
           (Tile::taps_h == 1 || p.axes[1].tap_stride == each * taps_w);
  }
  // In 16 bytes each, which whole tiles of channels are.
  TW_DEVICE static void copy_packed(uint32_t to, const tw_conv_problem& p, int channel, int thread) {
    constexpr int kChunks = word_bytes / 16;
    const int there = (Tile::channels(p) - channel) * line_elements / 8;
    const char* const from = (const char*)p.gemm.b + ((int64_t)channel * line_elements + thread * 8) * size_of<E>;
    TW_UNROLL
    for (int i = 0; i < kChunks; i += threads)
      if (thread + i < kChunks)
        copy_async(to + (thread + i) * 16, from + i * 16, thread + i < there ? 16 : 0);
  }
  // Others are gathered as they would lie.
  TW_DEVICE static void gather_packed(uint32_t to, const tw_conv_problem& p, int channel, int thread) {
    TW_NO_UNROLL
    for (int id = thread; id < word_bytes / 4; id += threads) {
      uint32_t two = 0;
      TW_UNROLL
      for (int half = 0; half < 2; half++) {
        const int element = id * 2 + half, line = quotient(element, line_elements);
        const int within = element - line * line_elements;
        const int tap = quotient(within, each), output = channel + line;
        bool exists;
        const int64_t at = output / each * p.weight_g + output % each * p.weight_n + within % each * p.weight_c;
        const int64_t offset = at + Tile::weight_offset(p, tap, exists);
        if (output < Tile::channels(p))
          two |= (uint32_t)load_constant<uint16_t>((const char*)p.gemm.b + offset * size_of<E>) << half * 16;
      }
      store_shared<1>(to + id * 4, {two});
    }
  }

  TW_DEVICE static void take_packed(uint32_t to, const tw_conv_problem& p, int channel, int thread) {
    if (are_packed(p)) copy_packed(to, p, channel, thread);
    else gather_packed(to, p, channel, thread);
  }
  // Weights of the output channel of column lane / 4 and of input channels 2 * (lane % 4) and the next of every block.
  TW_DEVICE static void read_packed(Weights& to, uint32_t from, int inside, int lane) {
    const int output = lane / 4, input = lane % 4 * 2;
    const bool meets = each == 1 ? input == output - output % 2 : input / each == output / each;
    TW_UNROLL
    for (int own = 0; own < own_blocks; own++) {
      // Two taps of channels by themselves are a word; those of a channel may begin with its second half.
      const int first = ((inside + own) * 8 + output) * line_elements;
      const uint32_t at = from + (each == 1 ? first / 2 * 4 : (first + input % each) * size_of<E>);
      if constexpr (each == 1) {
        constexpr int kWords = (taps + 2) / 2;
        uint32_t x[kWords + 1] = {};
        TW_UNROLL
        for (int i = 0; i < kWords; i++) x[i] = load_shared<1>(at + i * 4).w[0];
        TW_UNROLL
        for (int tap = 0; tap < taps; tap++) {
          const uint32_t two = funnel_right(x[tap / 2], x[tap / 2 + 1], (uint32_t)(first % 2 * 16));
          const uint32_t one = tap % 2 == 0 ? two & 0xffff : two >> 16;
          to.w[own][tap][0] = meets ? one << output % 2 * 16 : 0;
        }
      } else {
        TW_UNROLL
        for (int tap = 0; tap < taps; tap++) {
          const uint32_t x = load_shared<1>(at + tap * each * size_of<E>).w[0];
          to.w[own][tap][0] = meets ? x : 0;
        }
      }
    }
  }

  // Backward, to registers at once: of the output channel of column lane / 4 and of input channels 2 * (lane % 4) and
  // the next of every block.
  TW_DEVICE static void load_weights(Weights& to, const tw_conv_problem& p, int block, int lane) {
    const int step = (int)p.weight_c;
    TW_UNROLL
    for (int own = 0; own < own_blocks; own++) {
      const int output = (block + own) * 8 + lane / 4, group = output / each;
      const char* const from = (const char*)p.gemm.b + (group * p.weight_g + output % each * p.weight_n) * size_of<E>;
      const int input = (block + own) * 8 + lane % 4 * 2;
      const bool meets =
          output < Tile::channels(p) && (each == 1 ? input == output - output % 2 : input / each == group);
      const char* const first = from + (each == 1 ? 0 : input % each * step) * size_of<E>;
      TW_UNROLL
      for (int tap = 0; tap < taps; tap++) {
        bool exists;
        const int offset = Tile::weight_offset(p, tap, exists) * size_of<E>;
        uint32_t x = 0, y = 0;
        if (exists && meets) x = load_constant<uint16_t>(first + offset);
        if (each > 1 && exists && meets) y = load_constant<uint16_t>(first + offset + step * size_of<E>);
        to.w[own][tap][0] = each == 1 ? x << output % 2 * 16 : x | y << 16;
      }
    }
  }

  // ---- products ----

  static constexpr int tap_pairs = whole ? 0 : taps_w / 2, singles = taps_w - 2 * tap_pairs;
  // A row of the image: pixels and channels that the taps of one row meet. Of two taps, for each of two blocks, both
  // halves of a unit ahead of those of the second tap; of other taps, both halves of either block.
  struct Row {
    Words<4> two[tap_pairs > 0 ? tap_pairs : 1][2], one[depths][singles > 0 ? singles : 1];
  };
  // Bytes from the pixel of a pair's first tap to that of its second.
  static constexpr int apart(int at) {
    const int step = Tile::across().tap_step;
    return Tile::column_bytes((2 * at + 1) * step) - Tile::column_bytes(2 * at * step);
  }
  // `lane_pixel`: where the lane's pixel of the first tap lies; `high`: whether it reads the second tap, or block.
  TW_DEVICE static void load_row(Row& row, uint32_t lane_pixel, int high) {
    TW_UNROLL
    for (int at = 0; at < tap_pairs; at++)
      TW_UNROLL
      for (int b = 0; b < 2; b++)
        row.two[at][b] = load_matrices<4, false>(lane_pixel + high * apart(at) + b * 16 +
                                                 Tile::column_bytes(2 * at * Tile::across().tap_step));
    TW_UNROLL
    for (int d = 0; d < depths; d++)
      TW_UNROLL
      for (int i = 0; i < singles; i++)
        row.one[d][i] = load_matrices<4, false>(lane_pixel + high * 16 + d * 32 +
                                                Tile::column_bytes((2 * tap_pairs + i) * Tile::across().tap_step));
  }
  TW_DEVICE static void multiply(Accumulators& sum, const Row& row, const Weights& w, int own, int th) {
    TW_UNROLL
    for (int at = 0; at < tap_pairs; at++)
      TW_UNROLL
      for (int b = 0; b < 2; b++) {
        const int tap = th * taps_w + 2 * at;
        mma_16x8<E, E>(sum[b], row.two[at][b], {w.w[own + b][tap][0], w.w[own + b][tap + 1][0]});
      }
    TW_UNROLL
    for (int i = 0; i < singles; i++)
      TW_UNROLL
      for (int b = 0; b < 2; b++) {
        const uint32_t(&v)[words] = w.w[own + b][th * taps_w + 2 * tap_pairs + i];
        if constexpr (whole) {
          TW_UNROLL
          for (int d = 0; d < depths; d++) mma_16x8<E, E>(sum[b], row.one[d][i], {v[2 * d], v[2 * d + 1]});
        } else {
          mma_16x8_half<E>(sum[b], row.one[0][i].w[2 * b], row.one[0][i].w[2 * b + 1], v[0]);
        }
      }
  }

  // ---- the result ----

  // Where the results of a strip of a step belong. A lane has those of pixel lane / 4 of both halves of every unit: of
  // columns 2 * (lane % 4) and the next of two blocks.
  static constexpr bool joins = size_of<C> == 2;
  struct Out {
    Place at;
    int block, column, height, width, channels;
    bool stores[2];             // whether the lane's pixel of a half, and the channels that it stores, exist
    uint32_t offset, row, half;  // in elements: of these; from row to row, and from half to half
  };
  TW_DEVICE static Out out_of(const tw_conv_problem& p, const Place& at, int block, int lane) {
    Out y = {};
    y.at = at, y.block = block, y.column = at.w + lane / 4;
    y.height = (int)p.axes[1].rows, y.width = (int)p.axes[2].rows, y.channels = Tile::channels(p);
    const int q = lane % 4, channel = block * 8 + (permuted ? q * 4 : q % 2 * 8 + q / 2 * 4);
    y.stores[0] = y.column < y.width && channel < y.channels;
    y.stores[1] = wide ? y.column + 8 < y.width && channel < y.channels : y.stores[0];
    y.row = (uint32_t)p.axes[1].row_stride;
    y.half = wide ? 8 * (uint32_t)p.axes[2].row_stride : y.row;
    // Kept: compilers would work it out anew for every row.
    y.offset = (uint32_t)compute_again((int)((uint32_t)at.n * (uint32_t)p.row_n + (uint32_t)at.h * y.row +
                                             (uint32_t)y.column * (uint32_t)p.axes[2].row_stride + (uint32_t)channel));
    return y;
  }
  // The first of a lane's two channels of a block.
  TW_DEVICE static int channel_of(int block, int b, int lane) {
    return block * 8 + channel_in(b, lane % 4 * 2);
  }
  // Two lanes have two neighbouring channels each of two blocks; the first gets four of block 0, the second of block 1.
  TW_DEVICE static Words<2> join(uint32_t x, uint32_t y, int lane) {
    if constexpr (permuted) return {x, y};
    const bool odd = lane % 2 != 0;
    const uint32_t other = (uint32_t)shuffle((int)(odd ? x : y), lane ^ 1);
    return {odd ? other : x, odd ? y : other};
  }
  template <class Finish>
  TW_DEVICE static void store(const Accumulators& sum, const Finish& finish, const Columns<2> (&columns)[2],
                              const Out& y,
                              int row, int lane) {
    TW_UNROLL
    for (int half = 0; half < 2; half++) {
      const int line = y.at.h + row + (wide ? 0 : half), column = y.column + (wide ? half * 8 : 0);
      // Elements outside of the result are finished as their neighbours, and not stored.
      const int i = (y.at.n * y.height + min_of(line, y.height - 1)) * y.width + (column < y.width ? column : y.at.w);
      uint32_t packed[2] = {};
      TW_UNROLL
      for (int b = 0; b < 2; b++) {
        const float x[2] = {sum[b][half * 2], sum[b][half * 2 + 1]};
        const int j = channel_of(y.block, b, lane), left = y.channels - j;
        if constexpr (joins) packed[b] = finish.finish(x, columns[b], i, j, left).data.w[0];
        else if (line < y.height && column < y.width && left > 0) finish.store(x, columns[b], i, j, 2);
      }
      if constexpr (joins) {
        const Words<2> vector = join(packed[0], packed[1], lane);
        const uint32_t offset = y.offset + (uint32_t)row * y.row + (uint32_t)half * y.half;
        if (y.stores[half] && line < y.height) store_global(finish.c + (uint64_t)offset * size_of<C>, vector);
      }
    }
  }

  // `depth` rows of a strip of pixels, whose first pixel of the image a lane reads at `from`.
  template <class Finish>
  TW_DEVICE static void compute(const Weights& w, int own, const Finish& finish, const Out& y, uint32_t from,
                                int lane) {
    Columns<2> columns[2];
    TW_UNROLL
    for (int b = 0; b < 2; b++) {
      const int j = channel_of(y.block, b, lane);
      columns[b] = finish.template columns<2>(j < y.channels ? j : 0, 2);
    }
    Accumulators sum[units];
    TW_UNROLL
    for (int u = 0; u < units; u++)
      TW_UNROLL
      for (int b = 0; b < 2; b++)
        TW_UNROLL
        for (int l = 0; l < 4; l++) sum[u][b][l] = 0.0f;
    TW_UNROLL
    for (int row = 0; row <= Tile::last_row; row++) {
      if (!Tile::is_met(row)) continue;
      Row x;
      load_row(x, from + row * Tile::row_bytes, lane / 16);
      TW_UNROLL
      for (int u = 0; u < units; u++)
        TW_UNROLL
        for (int th = 0; th < Tile::taps_h; th++)
          if (u * Tile::unit_step + th * Tile::tap_step == row) multiply(sum[u], x, w, own, th);
      TW_UNROLL
      for (int u = 0; u < units; u++)
        if (u * Tile::unit_step + (Tile::taps_h - 1) * Tile::tap_step == row)
          store(sum[u], finish, columns, y, u * unit_rows, lane);
    }
  }

  // ---- tiles ----

  TW_DEVICE static void run_block(const ConvParams<Config>& params) {
    const int index = block_index(), thread = thread_index(), lane = lane_index(), wave = quotient(thread, kWave);
    const auto* const task = task_of<Config>(params, index);
    const tw_conv_problem& p = task->conv;
    const int within = Config::grouped ? index - (int)task->first_tile : index;
    const int parts = Tile::channel_blocks(p), some = quotient(within, parts), part = within - some * parts;
    const int first = some * Tile::repeats;
    const int channel = part * Tile::channel_tile, count = min_of(Tile::repeats, Tile::tiles(p) - first);
    const uint32_t weights = shared_base(), shared = weights + weight_bytes;
    Place next = Tile::place(p, first);
    // Weights are there with the first step; those of a single step come behind the image, which they would delay.
    if constexpr (copies && steps > 1) take_packed(weights, p, channel, thread);
    Base::copy(shared, p, next, channel, thread);
    if constexpr (copies && steps == 1) {
      take_packed(weights, p, channel, thread);
      commit_async();
    }
    if constexpr (staged) {
      copy_weights(weights, p, channel, thread);
      commit_async();
    }
    const int inside = wave % channel_waves * own_blocks, block = part * Tile::blocks + inside;
    Weights w;
    if constexpr (!staged && !copies) load_weights(w, p, block, lane);
    const typename Base::Operands operands = Base::by_channel(p, task->operands());
    const ConvRows<Config> where(p, 0, size_of<C>);
    const Epilogue<Config, float, ConvRows<Config>> finish(operands.problem, operands.d, 0, where);
    // The pixel of a unit that a lane reads for the matrix instruction.
    const int pixel = lane % 16;
    const uint32_t own_image =
        shared + (uint32_t)(wide ? pixel * Tile::pixel_bytes
                                 : pixel / 8 * Tile::row_step * Tile::row_bytes + pixel % 8 * Tile::pixel_bytes);
    TW_NO_UNROLL
    for (int i = 0; i < count; i++) {
      const Place at = next;
      const bool more = Tile::repeats > 1 && i + 1 < count;
      if (more) {
        Tile::advance(p, next);
        Base::copy(shared + (i + 1) % 2 * Tile::image_bytes, p, next, channel, thread);
      }
      const uint32_t image = own_image + i % 2 * Tile::image_bytes;
      TW_NO_UNROLL
      for (int step = 0; step < steps; step++) {
        const bool reads = staged && i == 0 && step == 0;  // the weights, which come behind all steps
        wait_for_copies<(Tile::repeats > 1 ? 2 : 1) * steps - 1>((more ? steps : 0) + (reads ? 0 : steps - 1 - step));
        barrier();
        if constexpr (staged)
          if (reads) read_weights(w, weights, inside, lane);
        if constexpr (copies)
          if (i == 0 && step == 0) read_packed(w, weights, inside, lane);
        const int h = at.h + step * Tile::depth;
        if (h >= (int)p.axes[1].rows) continue;
        const uint32_t line = image + step * Tile::step_rows * Tile::row_bytes;
        TW_NO_UNROLL
        for (int strip = (wave / channel_waves + step * Tile::strips) % pixel_waves; strip < Tile::strips;
             strip += pixel_waves) {
          const int column = at.w + strip * Tile::unit_run;
          if (column >= (int)p.axes[2].rows) break;
          TW_UNROLL
          for (int own = 0; own < own_blocks; own += 2)
            compute(w, own, finish, out_of(p, {at.n, h, column}, block + own, lane),
                    line + strip * Tile::unit_run * Tile::pixel_bytes + Tile::met_bytes(inside + own), lane);
        }
      }
      if (Tile::repeats > 1) barrier();  // the tile has been read
    }
    wait_async<0>();
  }
};

// The form that a configuration names.
template <class Config, bool kLanes = MergedTile<Config>::in_lanes>
struct MergedFor {
  using type = MergedConv<Config>;
};
template <class Config>
struct MergedFor<Config, true> {
  using type = MergedLanes<Config>;
};

}  // namespace tw::gpu
