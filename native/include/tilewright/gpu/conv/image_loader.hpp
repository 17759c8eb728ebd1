// Operands of convolutions on their way to shared memory: what stands where products of matrices have Operand and
// Loader (gpu/blocks/loader.hpp). An access is `vector` elements, which lie within one tap: vectors divide the number
// of channels and every stride, and addresses are aligned to them. With a vector of one element everything fits.
//
//   ImageRows     the image, k-major: a line is a pixel, k runs over taps and channels
//   ImageColumns  the image with pixels along k: a line is a pixel, and runs over taps and channels
//   TapPanels     weights that are read tap by tap
// A thread keeps to its chunk of all lines, so that it finds out once per step which tap and channel it reads.
#pragma once
#include "tilewright/gpu/conv/image.hpp"
#include "tilewright/gpu/blocks/loader.hpp"

namespace tw::gpu {

// `kBytes` of an address that is aligned to them, at most 4; or zero.
template <int kBytes>
TW_DEVICE uint32_t load_few(const char* from, bool exists) {
  if (!exists) return 0;
  if constexpr (kBytes == 4) return load_constant<Words<1>>(from).w[0];
  else if constexpr (kBytes == 2) return load_constant<uint16_t>(from);
  else return load_constant<uint8_t>(from);
}

// Accesses to a 16-byte chunk of elements of `kSize` bytes, kVector elements at a time.
template <int kSize, int kVector>
struct Pieces {
  static constexpr int vector = min_of(kVector, 16 / kSize), bytes = vector * kSize, count = 16 / bytes;
  static_assert((vector & (vector - 1)) == 0, "vectors are powers of two");
  static constexpr bool is_async = bytes >= 4;

  // Asynchronous, of 4 bytes or more.
  TW_DEVICE static void copy(uint32_t to, const char* from, bool exists) {
    if constexpr (bytes == 16) {
      copy_async(to, from, exists ? 16 : 0);
    } else {
      TW_UNROLL
      for (int w = 0; w < bytes / 4; w++) copy_word_async(to + w * 4, from + w * 4, exists);
    }
  }
  // Adds piece `i` to a chunk that was zero.
  TW_DEVICE static void load(Words<4>& chunk, int i, const char* from, bool exists) {
    if constexpr (bytes == 16) {
      if (exists) chunk = load_constant<Words<4>>(from);
    } else if constexpr (bytes >= 4) {
      TW_UNROLL
      for (int w = 0; w < bytes / 4; w++) chunk.w[i * (bytes / 4) + w] = load_few<4>(from + w * 4, exists);
    } else {
      chunk.w[i * bytes / 4] |= load_few<bytes>(from, exists) << (i * bytes % 4 * 8);
    }
  }
};

// ---- matrices ----

// Operand's panels, by vectors.
template <class Tile, int kThreads, int kVector>
struct PanelLoader {
  using Places = Loader<Tile, kThreads>;
  using Piece = Pieces<Tile::element_bytes, kVector>;
  static constexpr int per_thread = Places::per_thread;

  TW_DEVICE static const char* from_of(const Panel& panel, typename Places::Place at) {
    return panel.base + at.line * panel.ld + at.chunk * 16;
  }
  TW_DEVICE static Words<4> load(const Panel& panel, typename Places::Place at) {
    const int bytes = Places::bytes_of(panel, at);
    Words<4> x = {};
    TW_UNROLL
    for (int i = 0; i < Piece::count; i++)
      Piece::load(x, i, from_of(panel, at) + i * Piece::bytes, i * Piece::bytes < bytes);
    return x;
  }

  TW_DEVICE static void copy_aligned(uint32_t to, const Panel& panel, int thread) {
    if constexpr (Piece::bytes == 16) {
      Places::copy_aligned(to, panel, thread);
    } else {
      TW_UNROLL_BY(2)
      for (int j = 0; j < per_thread; j++)
        if (Places::exists(thread, j)) {
          const auto at = Places::place(thread, j);
          const uint32_t place = to + Places::offset_of(thread, j);
          if constexpr (Piece::is_async) {
            const int bytes = Places::bytes_of(panel, at);
            TW_UNROLL
            for (int i = 0; i < Piece::count; i++)
              Piece::copy(place + i * Piece::bytes, from_of(panel, at) + i * Piece::bytes, i * Piece::bytes < bytes);
          } else {
            store_shared(place, load(panel, at));
          }
        }
    }
  }

  using Held = typename Places::Held;
  TW_DEVICE static void fetch(Held& held, const Panel& panel, int thread) {
    TW_UNROLL
    for (int j = 0; j < per_thread; j++) held.data[j] = load(panel, Places::place(thread, j));
  }
  TW_DEVICE static void put(const Held& held, uint32_t to, const Panel& panel, int thread) {
    Places::put(held, to, panel, thread);
  }
};

// Weights whose steps along k keep within a tap: step `s` is channels (s % each) * depth and on of tap s / each.
template <class Config, class Tile>
struct TapPanels {
  const tw_conv_problem& problem;
  const char* base;
  int64_t ld;        // bytes from line to line
  int extent, each;  // columns that exist; steps of a tap
  int begin, count;  // steps

  TW_DEVICE TapPanels(const tw_conv_problem& of, int64_t item, int first, int each_tap, int begin_step, int steps_here)
      : problem(of),
        base((const char*)of.gemm.b + (item * of.weight_g + first * of.weight_n) * Tile::element_bytes),
        ld((Tile::source_k_major ? of.weight_n : of.weight_c) * Tile::element_bytes),
        extent((int)of.gemm.n - first),
        each(each_tap),
        begin(begin_step),
        count(steps_here) {}

  TW_DEVICE int steps() const { return count; }
  TW_DEVICE Panel at(int step) const {
    const int tap = (begin + step) / each, channel = (begin + step - tap * each) * Tile::depth;
    const Spot s = spot_of_tap<Config::ndim>(problem.axes, tap);
    int64_t offset = channel * problem.weight_c;
    TW_UNROLL
    for (int i = 3 - Config::ndim; i < 3; i++) offset += s.axis(i) * problem.axes[i].tap_stride;
    const char* const from = base + offset * Tile::element_bytes;
    const int left = min_of((int)problem.channels - channel, Tile::depth), channels = step < count ? left : 0;
    const int columns = min_of(extent, Tile::extent);
    if constexpr (Tile::source_k_major) return {from, ld, columns, channels * Tile::element_bytes};
    else return {from, ld, channels, columns * Tile::element_bytes};
  }
};

// ---- the image, k-major ----

// kByTaps: steps keep within a tap, as those of TapPanels; else k is cut as it comes.
template <class Config, class Tile, int kThreads, int kVector, bool kByTaps>
struct ImageRows {
  using Places = Loader<Tile, kThreads>;
  using Piece = Pieces<Tile::element_bytes, kVector>;
  using Bits = TapBits<Config::ndim>;
  static constexpr int size = Tile::element_bytes, per_thread = Places::per_thread;
  static_assert(Tile::k_major && Places::regular, "threads keep to a chunk: tile_k is a power of two");

  const tw_conv_problem& problem;
  const char* base;  // of the group
  uint32_t offset[per_thread], taps[per_thread];
  int first, own;     // the tile's first row; the thread's first element of a step
  int each;           // by taps: steps of one
  int begin, length;  // of k; by taps: of steps
  bool wide;

  // loop: the same problem, for what is read later.
  TW_DEVICE ImageRows(const tw_conv_problem& of, const tw_conv_problem& loop, int64_t item, int first_row, int each_tap,
                      int from, int many, int thread)
      : problem(loop),
        base((const char*)of.gemm.a + item * of.image_g * size),
        first(first_row),
        own(Places::place(thread, 0).chunk * (16 / size)),
        each(each_tap),
        begin(from),
        length(many),
        wide(Bits::is_wide(of)) {
    Pixel pixels[per_thread];
    TW_UNROLL
    for (int j = 0; j < per_thread; j++) {
      pixels[j] = pixel_of<Config::ndim>(of, first + Places::place(thread, j).line);
      offset[j] = pixels[j].offset;
    }
    Bits::of_pixels(taps, of, pixels);
    TW_UNROLL
    for (int j = 0; j < per_thread; j++)
      if (first + Places::place(thread, j).line >= (int)of.gemm.m) taps[j] = 0;
  }

  TW_DEVICE int steps() const { return kByTaps ? length : ceil_div(length, Tile::depth); }

  struct Step {
    const ImageRows& image;
    int tap, from, end;  // k (by taps: channels) of the thread's chunk, and where it ends
  };
  TW_DEVICE Step at(int step) const {
    if constexpr (kByTaps) {
      const int tap = (begin + step) / each, channels = (int)problem.channels;
      const int end = step < length ? channels : 0;  // of a step beyond the end nothing exists
      return {*this, tap, (begin + step - tap * each) * Tile::depth + own, end};
    } else {
      return {*this, 0, begin + step * Tile::depth + own, begin + length};
    }
  }

  // The elements of every pixel that piece i of the thread's chunk reads.
  struct Read {
    int tap;
    uint32_t offset, bits;
    bool exists;
  };
  TW_DEVICE static Read read_of(const Step& step, int i) {
    const tw_conv_problem& p = step.image.problem;
    const int k = step.from + i * Piece::vector;
    int tap = step.tap, channel = k;
    if constexpr (!kByTaps) {
      tap = divide(k, p.by_channels);
      channel = k - tap * (int)p.channels;
    }
    uint32_t more = step_of<Config::ndim>(p, tap).offset;
    more += Piece::vector == 1 ? (uint32_t)channel * (uint32_t)p.image_c : (uint32_t)channel;
    return {tap, more, Bits::of_tap(p, tap), k < step.end};
  }
  TW_DEVICE bool inside(const Read& read, int j) const { return read.exists && (taps[j] & read.bits) == read.bits; }
  TW_DEVICE const char* address(const Read& read, int j) const {
    return base + (uint64_t)(offset[j] + read.offset) * size;
  }
  // The same for filters with more taps than bits, from the beginning.
  TW_DEVICE const char* wide_address(const Read& read, int line, bool& in) const {
    const int row = first + line;
    const Pixel pixel = pixel_of<Config::ndim>(problem, row), step = step_of<Config::ndim>(problem, read.tap);
    in = read.exists && row < (int)problem.gemm.m && is_inside<Config::ndim>(problem, pixel, step);
    return base + (uint64_t)(pixel.offset + read.offset) * size;
  }
};

template <class Rows>
struct ImageRowsLoader {
  using Places = typename Rows::Places;
  using Piece = typename Rows::Piece;
  using Step = typename Rows::Step;
  static constexpr int per_thread = Rows::per_thread;

  TW_DEVICE static void copy_aligned(uint32_t to, const Step& step, int thread) {
    const Rows& image = step.image;
    if (image.wide) return copy_wide(to, step, thread);
    if constexpr (Piece::is_async) {
      TW_UNROLL
      for (int i = 0; i < Piece::count; i++) {
        const auto read = Rows::read_of(step, i);
        TW_UNROLL
        for (int j = 0; j < per_thread; j++)
          if (Places::exists(thread, j))
            Piece::copy(to + Places::offset_of(thread, j) + i * Piece::bytes, image.address(read, j),
                        image.inside(read, j));
      }
    } else {
      constexpr int kPerWord = 4 / Piece::bytes;
      TW_NO_UNROLL
      for (int word = 0; word < 4; word++) {
        typename Rows::Read reads[kPerWord];
        TW_UNROLL
        for (int i = 0; i < kPerWord; i++) reads[i] = Rows::read_of(step, word * kPerWord + i);
        TW_UNROLL
        for (int j = 0; j < per_thread; j++)
          if (Places::exists(thread, j)) {
            uint32_t x = 0;
            TW_UNROLL
            for (int i = 0; i < kPerWord; i++)
              x |= load_few<Piece::bytes>(image.address(reads[i], j), image.inside(reads[i], j))
                   << (i * Piece::bytes * 8);
            store_shared<1>(to + Places::offset_of(thread, j) + word * 4, {x});
          }
      }
    }
  }
  TW_DEVICE static void copy_wide(uint32_t to, const Step& step, int thread) {
    constexpr int kTogether = Piece::is_async ? 1 : 4 / Piece::bytes;  // pieces of one word or more
    constexpr int kWords = max_of(Piece::bytes / 4, 1);
    TW_NO_UNROLL
    for (int j = 0; j < per_thread; j++)
      if (Places::exists(thread, j)) {
        TW_NO_UNROLL
        for (int word = 0; word < 4; word += kWords) {
          Words<4> chunk = {};
          TW_UNROLL
          for (int i = 0; i < kTogether; i++) {
            bool in;
            const auto read = Rows::read_of(step, word / kWords * kTogether + i);
            const char* const from = step.image.wide_address(read, Places::place(thread, j).line, in);
            Piece::load(chunk, i, from, in);
          }
          Words<kWords> some;
          TW_UNROLL
          for (int w = 0; w < kWords; w++) some.w[w] = chunk.w[w];
          store_shared(to + Places::offset_of(thread, j) + word * 4, some);
        }
      }
  }

  using Held = typename Places::Held;
  TW_DEVICE static void fetch(Held& held, const Step& step, int thread) {
    const Rows& image = step.image;
    TW_UNROLL
    for (int j = 0; j < per_thread; j++) held.data[j] = {};
    TW_UNROLL
    for (int i = 0; i < Piece::count; i++) {
      const auto read = Rows::read_of(step, i);
      TW_UNROLL
      for (int j = 0; j < per_thread; j++)
        if (Places::exists(thread, j)) {
          bool in = image.inside(read, j);
          const char* from = image.address(read, j);
          if (image.wide) from = image.wide_address(read, Places::place(thread, j).line, in);
          Piece::load(held.data[j], i, from, in);
        }
    }
  }
  TW_DEVICE static void put(const Held& held, uint32_t to, const Step&, int thread) {
    TW_UNROLL
    for (int j = 0; j < per_thread; j++)
      if (Places::exists(thread, j)) store_shared(to + Places::offset_of(thread, j), held.data[j]);
  }
};

// ---- the image with pixels along k ----

template <class Config, class Tile, int kThreads, int kVector>
struct ImageColumns {
  using Places = Loader<Tile, kThreads>;
  using Piece = Pieces<Tile::element_bytes, kVector>;
  static constexpr int size = Tile::element_bytes, per_thread = Places::per_thread, ndim = Config::ndim;
  // The lines of a wave, whose lanes find out about one of them each.
  static constexpr int lines_at_once = max_of(kWave / Tile::chunks, 1);
  static constexpr bool shares =
      kWave % Tile::chunks == 0 && Places::total % kThreads == 0 && lines_at_once * per_thread <= kWave;
  static_assert(!Tile::source_k_major && Places::regular, "threads keep to a chunk: tile_n is a power of two");

  struct Column {
    Pixel step;  // of its tap; with its channel
    bool exists;
  };
  const tw_conv_problem& problem;
  const char* base;  // of the group
  Column columns[Piece::count];
  int begin, length;  // of k

  TW_DEVICE ImageColumns(const tw_conv_problem& of, int64_t item, int first, int from, int many, int thread)
      : problem(of), base((const char*)of.gemm.b + item * of.image_g * size), begin(from), length(many) {
    TW_UNROLL
    for (int i = 0; i < Piece::count; i++) {
      const int column = first + Places::place(thread, 0).chunk * (16 / size) + i * Piece::vector;
      const int tap = divide(column, of.by_channels), channel = column - tap * (int)of.channels;
      columns[i] = {step_of<ndim>(of, tap), column < (int)of.gemm.n};
      columns[i].step.offset +=
          Piece::vector == 1 ? (uint32_t)channel * (uint32_t)of.image_c : (uint32_t)channel;
    }
  }

  TW_DEVICE int steps() const { return ceil_div(length, Tile::depth); }

  struct Step {
    const ImageColumns& image;
    int first;  // pixel
    Pixel own;  // of the lane's own line
  };
  TW_DEVICE Pixel line_pixel(int row) const {
    Pixel x = pixel_of<ndim>(problem, row);
    if (row >= begin + length) x.at[2] = 0x40000000;  // outside with every tap
    return x;
  }
  TW_DEVICE Step at(int step) const {
    const int first = begin + step * Tile::depth;
    Pixel own = {};
    if constexpr (shares) {
      // Line r + j * (lines of a pass), where lane j * lines_at_once + r looks at it.
      const int lane = lane_index(), thread = thread_index();
      const int r = lane % lines_at_once, j = lane / lines_at_once;
      const int line = thread / kWave * lines_at_once + r + j * (kThreads / Tile::chunks);
      own = line_pixel(first + line);
    }
    return {*this, first, own};
  }
  TW_DEVICE static Pixel pixel(const Step& step, int thread, int j) {
    if constexpr (shares) {
      const int lane = j * lines_at_once + lane_index() / Tile::chunks;
      Pixel x;
      x.offset = (uint32_t)shuffle((int)step.own.offset, lane);
      TW_UNROLL
      for (int i = 3 - ndim; i < 3; i++) x.at[i] = shuffle(step.own.at[i], lane);
      return x;
    } else {
      return step.image.line_pixel(step.first + Places::place(thread, j).line);
    }
  }
};

template <class Columns>
struct ImageColumnsLoader {
  using Places = typename Columns::Places;
  using Piece = typename Columns::Piece;
  using Step = typename Columns::Step;
  static constexpr int per_thread = Columns::per_thread, size = Columns::size;

  template <class Use>
  TW_DEVICE static void for_each(const Step& step, int thread, int j, const Use& use) {
    const Columns& image = step.image;
    const Pixel pixel = Columns::pixel(step, thread, j);
    TW_UNROLL
    for (int i = 0; i < Piece::count; i++) {
      const auto& column = image.columns[i];
      const bool in = column.exists && is_inside<Columns::ndim>(image.problem, pixel, column.step);
      use(i, image.base + (uint64_t)(pixel.offset + column.step.offset) * size, in);
    }
  }

  TW_DEVICE static void copy_aligned(uint32_t to, const Step& step, int thread) {
    TW_UNROLL_BY(Columns::shares ? per_thread : 2)
    for (int j = 0; j < per_thread; j++)
      if (Places::exists(thread, j)) {
        const uint32_t place = to + Places::offset_of(thread, j);
        if constexpr (Piece::is_async) {
          for_each(step, thread, j,
                   [&](int i, const char* from, bool in) { Piece::copy(place + i * Piece::bytes, from, in); });
        } else {
          Words<4> chunk = {};
          for_each(step, thread, j, [&](int i, const char* from, bool in) { Piece::load(chunk, i, from, in); });
          store_shared(place, chunk);
        }
      }
  }

  using Held = typename Places::Held;
  TW_DEVICE static void fetch(Held& held, const Step& step, int thread) {
    TW_UNROLL
    for (int j = 0; j < per_thread; j++) {
      held.data[j] = {};
      if (Places::exists(thread, j))
        for_each(step, thread, j, [&](int i, const char* from, bool in) { Piece::load(held.data[j], i, from, in); });
    }
  }
  TW_DEVICE static void put(const Held& held, uint32_t to, const Step&, int thread) {
    TW_UNROLL
    for (int j = 0; j < per_thread; j++)
      if (Places::exists(thread, j)) store_shared(to + Places::offset_of(thread, j), held.data[j]);
  }
};

}  // namespace tw::gpu
