// Merged groups, forward and backward data without a stride, in a third form (Config: pipeline bulk), for sm_90 and
// later: see gpu/conv/merged/tile.hpp for what is computed. Tensors are moved by the bulk tensor copy engine, to which
// a few instructions suffice: what does not exist of the image arrives as zero, and of the result stays unwritten.
// - A workgroup keeps its channels, and computes one tile of pixels after the other. Pixels of as many tiles as there
//   are stages are on their way at a time; a result leaves while the next tile is computed.
// - Pixels lie in shared memory without gaps, swizzled over as many bytes as a pixel has: channel_tile is 16, 32 or 64.
// - A wave computes two blocks of channels of strips of eight columns. The two rows of eight pixels that an instruction
//   computes are half a tile apart, so that what it reads of the image for one row of taps serves the others as well.
//
// Config: as gpu/conv/merged/tile.hpp says, but pixel_tile is (stages, rows, run); results are of 16 bits. The grid of
// a launch is (blocks of channels, workgroups that share the tiles of pixels). A generated source unit writes
// TW_CONV_KERNEL(symbol, Config).
#pragma once
#include "tilewright/gpu/conv/merged/conv.hpp"
#include "tilewright/sm90/blocks/mbarrier.hpp"
#include "tilewright/sm90/blocks/store.hpp"
#include "tilewright/sm90/blocks/tma.hpp"

namespace tw::gpu {

// Coordinates of a box of an image, fastest first.
struct BoxPlace {
  int channel, w, h, n;
};
TW_DEVICE void load_pixels(uint32_t to, const void* map, const BoxPlace& at, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to), "l"(map), "r"(barrier), "r"(at.channel), "r"(at.w), "r"(at.h), "r"(at.n)
      : "memory");
}
TW_DEVICE void store_pixels(const void* map, uint32_t from, const BoxPlace& at) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(from), "r"(at.channel), "r"(at.w), "r"(at.h), "r"(at.n)
               : "memory");
}

template <class Config>
struct MergedBulk : MergedConv<Config> {
  using Base = MergedConv<Config>;
  using Tile = MergedTile<Config>;
  using E = typename Tile::E;
  using C = typename Config::C;
  using Weights = typename Base::Weights;
  static_assert(!Config::grouped, "phases of a stride are not moved in boxes");
  static_assert(size_of<C> == 2, "results are moved as they lie in registers: of 16 bits");
  static constexpr int threads = Tile::threads, taps = Tile::taps, taps_w = Tile::taps_w, taps_h = Tile::taps_h;
  static constexpr int each = Tile::each, depths = Tile::depths, words = Base::words;
  static constexpr bool whole = Tile::whole, is_backward = Tile::is_backward;
  static constexpr int pairs = Tile::blocks / 2;
  static_assert(Tile::channel_tile == 16 || Tile::channel_tile == 32 || Tile::channel_tile == 64, "of a swizzled pixel");
  static_assert(Tile::waves % pairs == 0 && Base::own_blocks == 2, "a wave has two blocks");

  // ---- shared memory: stages of pixels of the image, pixels of one or two results, a barrier for every stage ----

  static constexpr int stages = Tile::repeats, rows = Tile::rows, units = rows / 2, strips = Tile::run / 8;
  static constexpr int results = min_of(stages, 2);
  static constexpr int row_step = Tile::row_step, run_step = Tile::run_step, tap_step = Tile::tap_step;
  static constexpr int pixel_bytes = Tile::channel_tile * 2, span = Tile::span_h, columns = Tile::span_w;
  static constexpr int row_bytes = columns * pixel_bytes, result_row = Tile::run * pixel_bytes;
  static constexpr int whole_bytes(int bytes) { return (bytes + 1023) / 1024 * 1024; }
  static constexpr int stage_bytes = whole_bytes(span * row_bytes), result_bytes = whole_bytes(rows * result_row);
  static constexpr int bulk_bytes = stages * stage_bytes + results * result_bytes + stages * 8;
  static_assert(columns <= 256 && span <= 256, "as long as a box may be");

  // Workgroups that a unit shall hold: compilers would read ahead until all registers are taken. Operands of an
  // epilogue and taps that lie apart, whose sums wait longer, take more.
  using Finish = Epilogue<Config, float, ConvRows<Config>>;
  static constexpr bool roomy = !Finish::plain || tap_step > 1;
  static constexpr int registers = each == 32 ? (roomy ? 168 : 128) : each == 16 ? (roomy ? 128 : 96) : roomy ? 104 : 72;
  static constexpr int min_blocks = max_of(65536 / (registers * threads), 1);

  // Where the byte at this address, counted as if pixels lay one after the other, lies.
  TW_DEVICE static uint32_t swizzled(uint32_t at) { return at ^ (at >> 3 & (uint32_t)(pixel_bytes - 16)); }

  // ---- weights, which lie without gaps: all taps of a channel of y, of each of which the channels of x ----

  // Weights of the result's channel of column lane / 4 and of gathered channels 2 * (lane % 4) and the next of every
  // block.
  TW_DEVICE static void load_weights(Weights& to, const ConvBulk& p, int block, int lane) {
    TW_UNROLL
    for (int b = 0; b < 2; b++) {
      const int own = (block + b) * 8 + lane / 4, pair = lane % 4 * 2;
      const bool same = each == 1 ? pair / 2 == lane / 8 : pair / each == lane / 4 / each;
      const bool meets = own < (int)p.channels && (whole || same);
      // The first of the two in the group: forward they lie side by side, backward they are channels of y.
      const int gathered = each == 1 ? 0 : pair % each;
      const int first = is_backward ? (own - own % each + gathered) * (taps * each) + own % each
                                    : own * (taps * each) + gathered;
      const char* from = (const char*)p.weights + (int64_t)first * size_of<E>;
      asm volatile("" : "+l"(from));  // else the compiler works every address out anew
      constexpr int kNext = is_backward ? taps * each : 1;
      TW_UNROLL
      for (int tap = 0; tap < taps; tap++)
        TW_UNROLL
        for (int word = 0; word < words; word++) {
          const int at = ((is_backward ? taps - 1 - tap : tap) * each + word * 8 * kNext) * size_of<E>;
          uint32_t x = 0;
          if constexpr (each == 1) {
            if (meets) x = (uint32_t)load_constant<uint16_t>(from + at) << lane / 4 % 2 * 16;
          } else if constexpr (is_backward) {
            if (meets)
              x = load_constant<uint16_t>(from + at) | (uint32_t)load_constant<uint16_t>(from + at + kNext * size_of<E>) << 16;
          } else {
            if (meets) x = load_constant<Words<1>>(from + at).w[0];
          }
          to.w[b][tap][word] = x;
        }
    }
  }

  // ---- products: as in gpu/conv/merged/lanes.hpp, but that the rows of a unit are half a tile apart ----

  static constexpr int tap_pairs = whole ? 0 : taps_w / 2, singles = taps_w - 2 * tap_pairs;
  static constexpr int tap_bytes = Tile::across().tap_step * pixel_bytes;
  // Pixels of a row of the image, and of the one half a tile below: of two taps, for each of two blocks; of other taps,
  // those of both blocks, or of all that a group has.
  struct Row {
    Words<4> two[tap_pairs > 0 ? tap_pairs : 1][2], one[depths][singles > 0 ? singles : 1];
  };
  // `from`: where the lane's pixel of the row's first tap lies; `high`: whether it reads the second tap, or block.
  TW_DEVICE static void load_row(Row& row, uint32_t from, int high) {
    TW_UNROLL
    for (int at = 0; at < tap_pairs; at++) {
      const uint32_t first = swizzled(from + high * tap_bytes + 2 * at * tap_bytes);
      TW_UNROLL
      for (int b = 0; b < 2; b++) row.two[at][b] = load_matrices<4, false>(first ^ b * 16);
    }
    TW_UNROLL
    for (int d = 0; d < depths; d++)
      TW_UNROLL
      for (int i = 0; i < singles; i++)
        row.one[d][i] = load_matrices<4, false>(swizzled(from + high * 16 + (2 * tap_pairs + i) * tap_bytes + d * 32));
  }
  TW_DEVICE static void multiply(float (&sum)[2][4], const Row& row, const Weights& w, int th) {
    TW_UNROLL
    for (int b = 0; b < 2; b++) {
      TW_UNROLL
      for (int at = 0; at < tap_pairs; at++) {
        const int tap = th * taps_w + 2 * at;
        mma_16x8<E, E>(sum[b], row.two[at][b], {w.w[b][tap][0], w.w[b][tap + 1][0]});
      }
      TW_UNROLL
      for (int i = 0; i < singles; i++) {
        const uint32_t(&v)[words] = w.w[b][th * taps_w + 2 * tap_pairs + i];
        if constexpr (whole) {
          TW_UNROLL
          for (int d = 0; d < depths; d++) mma_16x8<E, E>(sum[b], row.one[d][i], {v[2 * d], v[2 * d + 1]});
        } else {
          mma_16x8_half<E>(sum[b], row.one[0][i].w[2 * b], row.one[0][i].w[2 * b + 1], v[0]);
        }
      }
    }
  }

  // ---- a strip of a tile ----

  static constexpr int last_row = (units - 1) * row_step + (taps_h - 1) * tap_step;
  static constexpr bool is_met(int row) {
    for (int th = 0; th < taps_h; th++) {
      const int first = row - th * tap_step;
      if (first >= 0 && first % row_step == 0 && first / row_step < units) return true;
    }
    return false;
  }
  // Where results belong: the first pixel of the strip, and the first channel of the wave.
  struct Out {
    int n, h, w, height, width, channel, channels;
  };
  // Eight pixels of a row, and of the one half a tile below; a lane writes one pixel of a block to `to`.
  TW_DEVICE static void store(const float (&sum)[2][4], const Finish& finish, const Columns<2> (&columns)[2], const Out& y,
                              int row, uint32_t to, int lane) {
    uint32_t packed[4];
    TW_UNROLL
    for (int half = 0; half < 2; half++) {
      // Elements outside of the result are finished as their neighbours, and not stored.
      const int h = min_of(y.h + row + half * units, y.height - 1), w = min_of(y.w + lane / 4, y.width - 1);
      TW_UNROLL
      for (int b = 0; b < 2; b++) {
        const float x[2] = {sum[b][half * 2], sum[b][half * 2 + 1]};
        const int j = y.channel + b * 8 + lane % 4 * 2;
        const int i = (y.n * y.height + h) * y.width + w;
        packed[b * 2 + half] = finish.finish(x, columns[b], i, j, y.channels - j).data.w[0];
      }
    }
    sm90::store_fragments(swizzled(to), packed);
  }
  TW_DEVICE static void compute(const Weights& w, const Finish& finish, const Columns<2> (&columns)[2], const Out& y,
                                uint32_t from, uint32_t to, int lane) {
    float sum[units][2][4] = {};
    TW_UNROLL
    for (int row = 0; row <= last_row; row++) {
      if (!is_met(row)) continue;
      Row x;
      load_row(x, from + row * row_bytes, lane / 16);
      TW_UNROLL
      for (int u = 0; u < units; u++)
        TW_UNROLL
        for (int th = 0; th < taps_h; th++)
          if (u * row_step + th * tap_step == row) multiply(sum[u], x, w, th);
      TW_UNROLL
      for (int u = 0; u < units; u++)
        if (u * row_step + (taps_h - 1) * tap_step == row)
          store(sum[u], finish, columns, y, u, to + u * result_row, lane);
    }
  }

  // ---- tiles ----

  using Place = typename Tile::Place;
  TW_DEVICE static Place place(const ConvBulk& p, int tile) {
    const int line = divide(tile, p.by_across), n = divide(line, p.by_down);
    return {n, (line - n * (int)p.down) * rows, (tile - line * (int)p.across) * Tile::run};
  }
  // Requests that one thread makes of the copy engine.
  TW_DEVICE static void load(const ConvBulk& p, uint32_t images, uint32_t barriers, int stage, int channel,
                             const Place& at) {
    const uint32_t barrier = barriers + stage * 8;
    sm90::arrive_expecting(barrier, span * row_bytes);
    load_pixels(images + stage * stage_bytes, &p.image,
                {channel, (int)p.origin_w + at.w * run_step, (int)p.origin_h + at.h * row_step, at.n}, barrier);
  }
  TW_DEVICE static void store(const ConvBulk& p, uint32_t result, int channel, const Place& at) {
    store_pixels(&p.result, result, {channel, at.w, at.h, at.n});
    sm90::commit_stores();
  }

  TW_DEVICE static void run_block(const ConvParams<Config>& params) {
    const int thread = thread_index(), lane = lane_index(), wave = quotient(thread, kWave);
    const tw_conv_problem& p = params.task.conv;
    const ConvBulk& bulk = params.task.bulk;
    const int part = (int)blockIdx.x, first = (int)blockIdx.y, next = (int)gridDim.y, count = (int)bulk.tiles;
    const int channel = part * Tile::channel_tile;
    const uint32_t images = shared_base(), all_results = images + stages * stage_bytes;
    const uint32_t barriers = all_results + results * result_bytes;
    if (thread == 0) {
      TW_UNROLL
      for (int stage = 0; stage < stages; stage++) sm90::init_barrier(barriers + stage * 8, 1);
      sm90::fence_barrier_init();
    }
    barrier();
    if (thread == 0) {
      TW_NO_UNROLL
      for (int stage = 0; stage < stages && first + stage * next < count; stage++)
        load(bulk, images, barriers, stage, channel, place(bulk, first + stage * next));
      sm90::prefetch_map(&bulk.result);
    }
    const int pair = wave % pairs, block = part * Tile::blocks + pair * 2;
    Weights weights;
    load_weights(weights, bulk, block, lane);
    const typename Base::Operands operands = Base::by_channel(p, params.task.operands());
    const ConvRows<Config> where(p, 0, size_of<C>);
    const Finish finish(operands.problem, operands.d, 0, where);
    Out y = {0, 0, 0, (int)p.axes[1].rows, (int)p.axes[2].rows, block * 8, (int)bulk.channels};
    Columns<2> columns_of[2];
    TW_UNROLL
    for (int b = 0; b < 2; b++) {
      const int j = y.channel + b * 8 + lane % 4 * 2;
      columns_of[b] = finish.template columns<2>(j < y.channels ? j : 0, 2);
    }
    // Lanes 8 * i to 8 * i + 7 give the addresses of matrix i: i % 2 is the row and, of results, i / 2 the block.
    const int pixel = lane % 8, second = lane / 8 % 2 * units;
    const uint32_t own =
        images + (second * row_step * columns + pixel * run_step) * pixel_bytes + Tile::met_bytes(pair * 2);
    const uint32_t own_result = all_results + (second * Tile::run + pixel) * pixel_bytes + pair * 32 + lane / 16 * 16;
    int stage = 0, parity = 0, result = 0;
    TW_NO_UNROLL
    for (int tile = first; tile < count; tile += next) {
      Place at = {};
      if (!Finish::plain || thread == 0) at = place(bulk, tile);
      sm90::wait(barriers + stage * 8, parity);
      TW_NO_UNROLL
      for (int strip = wave / pairs; strip < strips; strip += Tile::waves / pairs) {
        y.n = at.n, y.h = at.h, y.w = at.w + strip * 8;
        compute(weights, finish, columns_of, y, own + stage * stage_bytes + strip * (8 * run_step * pixel_bytes),
                own_result + result * result_bytes + strip * (8 * pixel_bytes), lane);
      }
      sm90::fence_async_proxy();
      if (results > 1 && thread == 0) sm90::wait_stores_read<0>();  // the result before, whose place comes next
      barrier();
      if (thread == 0) {
        store(bulk, all_results + result * result_bytes, channel, at);
        const int later = tile + stages * next;
        if (later < count) load(bulk, images, barriers, stage, channel, place(bulk, later));
      }
      if (results == 1 && tile + next < count) {
        if (thread == 0) sm90::wait_stores_read<0>();
        barrier();
      }
      if (++stage == stages) stage = 0, parity ^= 1;
      if (++result == results) result = 0;
    }
    if (thread == 0) sm90::wait_stores_read<0>();
  }
};

}  // namespace tw::gpu

#define TW_CONV_KERNEL(NAME, ...)                                                                            \
  TW_KERNEL(tw::gpu::MergedBulk<__VA_ARGS__>::threads, tw::gpu::MergedBulk<__VA_ARGS__>::min_blocks, NAME,   \
            tw::ConvParams<__VA_ARGS__>, tw::gpu::MergedBulk<__VA_ARGS__>::run_block(params);)
