// Operands of convolutions on their way to the LDS of AMD GPUs: what stands where products of matrices have Source and
// the fetches of RegisterLoader (gpu/amd/loader.hpp). All loads are raw buffer loads without branches: what does not
// exist is read beyond the buffer's end, and zero. Every step goes this way, the last one of k too. The elements of one
// item span less than 2 GiB.
#pragma once
#include "tilewright/gpu/conv/image_loader.hpp"
#include "tilewright/gpu/amd/loader.hpp"

namespace tw::gpu {

template <class Tile>
constexpr bool kIsLds = false;
template <class E, bool kSourceKMajor, int kExtent, int kDepth, int kBanks, bool kRaw>
constexpr bool kIsLds<LdsTile<E, kSourceKMajor, kExtent, kDepth, kBanks, kRaw>> = true;

constexpr uint32_t kBufferEnd = 0x80000000u, kBeyond = 0xfffffff0u;

TW_DEVICE __amdgpu_buffer_rsrc_t checked_buffer(const char* base) {
  return __builtin_amdgcn_make_buffer_rsrc((char*)uniform(base), 0, (int)kBufferEnd, kBufferFlags);
}

// Both values stand ready, so that the compiler chooses between them without a branch. Of a loop with branches it moves
// products to where their sums are needed, many steps on, and keeps the fragments of all these steps until then.
TW_DEVICE uint32_t offset_or_beyond(bool exists, uint32_t offset) { return exists ? offset : kBeyond; }

// kWidth bytes in pieces of kBytes; offset_of(i) is where piece i lies, or kBeyond.
template <int kWidth, int kBytes, class Offset>
TW_DEVICE Words<kWidth / 4> load_pieces(__amdgpu_buffer_rsrc_t buffer, const Offset& offset_of) {
  if constexpr (kBytes >= kWidth) {
    return load_buffer<kWidth>(buffer, offset_of(0));
  } else {
    Words<kWidth / 4> x = {};
    TW_UNROLL
    for (int i = 0; i < kWidth / kBytes; i++) {
      const int offset = (int)offset_of(i);
      if constexpr (kBytes >= 4) {
        const Words<kBytes / 4> part = load_buffer<kBytes>(buffer, (uint32_t)offset);
        TW_UNROLL
        for (int w = 0; w < kBytes / 4; w++) x.w[i * (kBytes / 4) + w] = part.w[w];
      } else {
        uint32_t part;
        if constexpr (kBytes == 2) part = (uint16_t)__builtin_amdgcn_raw_buffer_load_b16(buffer, offset, 0, 0);
        else part = (uint8_t)__builtin_amdgcn_raw_buffer_load_b8(buffer, offset, 0, 0);
        x.w[i * kBytes / 4] |= part << (i * kBytes % 4 * 8);
      }
    }
    return x;
  }
}

// An operand with its steps, as the loops ask for it. kWide: a filter with more taps than TapBits has bits for.
template <class Operand, bool kWide = false>
struct Checked {
  const Operand& operand;
  int steps;
  TW_DEVICE explicit Checked(const Operand& of) : operand(of), steps(of.steps()) {}
};

// Panels of matrices, and of weights tap by tap.
template <class Operand, class Tile, int kThreads, int kVector>
struct PanelRegisters : RegisterLoader<Tile, kThreads> {
  using Base = RegisterLoader<Tile, kThreads>;
  using Held = typename Base::Held;
  static constexpr int bytes = min_of(kVector * Tile::element_bytes, 16);

  TW_DEVICE static void fetch(Held& held, const Checked<Operand>& from, int step, int thread, int part = 0,
                              int parts = 1) {
    const Panel panel = from.operand.at(step);
    const auto buffer = checked_buffer(panel.base);
    const uint32_t ld = uniform((uint32_t)panel.ld);
    TW_UNROLL
    for (int j = Base::per_thread * part / parts; j < Base::per_thread * (part + 1) / parts; j++) {
      const auto at = Base::place(thread, j);
      TW_UNROLL
      for (int r = 0; r < Base::rows; r++) {
        const int line = Tile::source_k_major ? at.across : at.along * Base::rows + r;
        const int byte = (Tile::source_k_major ? at.along : at.across) * Base::width;
        held.data[j][r] = load_pieces<Base::width, bytes>(buffer, [&](int i) {
          const bool in = (line < panel.lines) & (byte + i * bytes < panel.bytes);
          return offset_or_beyond(in, (uint32_t)line * ld + (uint32_t)(byte + i * bytes));
        });
      }
    }
  }
};

// ImageRows of gpu/conv/image_loader.hpp.
template <class Rows, class Tile, int kThreads>
struct ImageRowsRegisters : RegisterLoader<Tile, kThreads> {
  using Base = RegisterLoader<Tile, kThreads>;
  using Held = typename Base::Held;
  using Piece = typename Rows::Piece;
  static_assert(Base::per_thread == Rows::per_thread, "a thread keeps to its lines");

  template <bool kWide>
  TW_DEVICE static void fetch(Held& held, const Checked<Rows, kWide>& from, int step, int thread, int part = 0,
                              int parts = 1) {
    const Rows& image = from.operand;
    const auto buffer = checked_buffer(image.base);
    const auto own = image.at(step);
    typename Rows::Read reads[Piece::count];
    TW_UNROLL
    for (int i = 0; i < Piece::count; i++) reads[i] = Rows::read_of(own, i);
    TW_UNROLL
    for (int j = Base::per_thread * part / parts; j < Base::per_thread * (part + 1) / parts; j++)
      held.data[j][0] = load_pieces<16, Piece::bytes>(buffer, [&](int i) {
        bool in = reads[i].exists & ((image.taps[j] & reads[i].bits) == reads[i].bits);
        if constexpr (kWide) image.wide_address(reads[i], Rows::Places::place(thread, j).line, in);
        return offset_or_beyond(in, (image.offset[j] + reads[i].offset) * Rows::size);
      });
  }
};

// The image with pixels along k (compare ImageColumns): blocks of a few pixels, of which each thread finds the places.
template <class Config, class Tile, int kVector>
struct ImageBlocks {
  const tw_conv_problem& problem;
  const char* base;   // of the group
  int first;          // the tile's first column
  int begin, length;  // of k

  TW_DEVICE ImageBlocks(const tw_conv_problem& of, int64_t item, int first_column, int from, int many, int)
      : problem(of),
        base((const char*)of.gemm.b + item * of.image_g * Tile::element_bytes),
        first(first_column),
        begin(from),
        length(many) {}
  TW_DEVICE int steps() const { return ceil_div(length, Tile::depth); }
};

template <class Config, class Tile, int kThreads, int kVector>
struct ImageBlocksRegisters : RegisterLoader<Tile, kThreads> {
  using Base = RegisterLoader<Tile, kThreads>;
  using Held = typename Base::Held;
  static constexpr int size = Tile::element_bytes, bytes = min_of(min_of(kVector * size, 16), Base::width);
  static constexpr int count = Base::width / bytes, ndim = Config::ndim;

  TW_DEVICE static void fetch(Held& held, const Checked<ImageBlocks<Config, Tile, kVector>>& from, int step, int thread,
                              int part = 0, int parts = 1) {
    const auto& image = from.operand;
    const tw_conv_problem& p = image.problem;
    const auto buffer = checked_buffer(image.base);
    const int end = image.begin + image.length;
    TW_UNROLL
    for (int j = Base::per_thread * part / parts; j < Base::per_thread * (part + 1) / parts; j++) {
      const auto at = Base::place(thread, j);
      Pixel taps[count];
      bool exists[count];
      TW_UNROLL
      for (int i = 0; i < count; i++) {
        const int column = image.first + (at.across * Base::width + i * bytes) / size;
        const int tap = divide(column, p.by_channels), channel = column - tap * (int)p.channels;
        taps[i] = step_of<ndim>(p, tap);
        taps[i].offset += bytes == size ? (uint32_t)channel * (uint32_t)p.image_c : (uint32_t)channel;
        exists[i] = column < (int)p.gemm.n;
      }
      TW_UNROLL
      for (int r = 0; r < Base::rows; r++) {
        const int row = image.begin + step * Tile::depth + at.along * Base::rows + r;
        const Pixel pixel = pixel_of<ndim>(p, row);
        held.data[j][r] = load_pieces<Base::width, bytes>(buffer, [&](int i) {
          bool in = exists[i] & (row < end);  // and is_inside, without branches
          TW_UNROLL
          for (int axis = 3 - ndim; axis < 3; axis++)
            in = in & ((uint32_t)(pixel.at[axis] + taps[i].at[axis]) < (uint32_t)p.axes[axis].size);
          return offset_or_beyond(in, (pixel.offset + taps[i].offset) * size);
        });
      }
    }
  }
};

}  // namespace tw::gpu
