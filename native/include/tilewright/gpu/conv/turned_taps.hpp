// The image's gradient of gpu/conv/taps.hpp in 16 bits on gfx950, whose LDS transposes as it is read: weights, of which
// columns lie side by side, stay so in LDS, where k runs from line to line, and nothing is turned in registers.
//
// ds_read_b64_tr_b16 works on 16 lanes: the four neighbouring elements that each reads are a part of a block of four
// lines and 16 columns, of which lane l gets column l. ("CDNA4 Instruction Set Architecture", section MFMA Transpose
// Load from LDS. All lanes have to be active.)
#pragma once
#include "tilewright/gpu/conv/taps.hpp"

namespace tw::gpu {

// Elements of a tile whose k runs from line to line.
template <class E>
struct Turned : E {};
template <class E>
struct MultipliedAs<Turned<E>> {
  using type = E;
};

// To those who bring it and to schedules a k-major tile: of kDepth lines, each of kExtent columns.
template <class E, int kExtent, int kDepth, int kBanks>
struct LdsTile<Turned<E>, false, kExtent, kDepth, kBanks, false> {
  using Element = Turned<E>;
  using Plain = LdsTile<E, false, kExtent, kDepth, kBanks>;
  static constexpr bool k_major = false, source_k_major = true, raw = false;
  static constexpr int element_bytes = size_of<E>, extent = kDepth, depth = kDepth, lines = kDepth;
  static constexpr int line_bytes = kExtent * element_bytes, chunks = line_bytes / 16, bytes = lines * line_bytes;
  static constexpr int units = kBanks / 4, period = 16;
  static_assert(element_bytes == 2 && units == 16, "LDS of gfx950");
  static_assert(chunks == 8 || chunks == 16 || chunks == 32, "lines fill the banks a whole number of times, or half");

  // Half of a wave reads two neighbouring chunks of lines 0 to 3 and 8 to 11 (or 4 to 7, and 12 to 15) of 16: of each
  // line others, in banks of their own. Two lines of eight chunks share all banks, and a key.
  static constexpr int key(int line) {
    return chunks == 8 ? (line / 2 % 2 + line / 8 % 2 * 2) * 2 : (line % 4 + line / 8 % 2 * 4) * 2;
  }
  static constexpr uint32_t offset(int line, int chunk) {
    return (uint32_t)(((line * chunks + chunk) ^ key(line)) * 16);
  }
};

// A lane's 16 bytes of k of a column, in two reads of four lines each.
template <class E, int kExtent, int kDepth, int kBanks, int kLines, int kGroups, int kLaneBytes>
struct MatrixSide<LdsTile<Turned<E>, false, kExtent, kDepth, kBanks, false>, kLines, kGroups, kLaneBytes> {
  using Tile = LdsTile<Turned<E>, false, kExtent, kDepth, kBanks, false>;
  using Element = typename Tile::Element;
  static_assert(kLines == 16 && kLaneBytes == 16, "blocks of 16 columns, and 8 of k");
  static constexpr int parts = 2;  // reads
  using Part = Vector<uint32_t, 4>;
  struct Fragment {
    Part part[1];
  };

  TW_DEVICE static Fragment load(uint32_t tile, int first, int line, int beyond, int group, int kk) {
    const int own = group * 8 + line / 4, column = first + line % 4 * 4;
    const uint32_t to_column = (uint32_t)(beyond / 8 * 16);  // whole chunks, which keys change like others
    Fragment x;
    TW_UNROLL
    for (int half = 0; half < 2; half++) {
      const uint32_t at = Tile::offset(own + half * 4, column / 8) + (uint32_t)(column % 8 * 2);
      const uint32_t from = tile + (at ^ to_column % 256) + to_column / 256 * 256 +
                            (uint32_t)(kk * kGroups * 8 * Tile::line_bytes);
      const Vector<uint32_t, 2> words = turned(from);
      x.part[0][half * 2] = words[0], x.part[0][half * 2 + 1] = words[1];
    }
    return x;
  }

 private:
  TW_DEVICE static Vector<uint32_t, 2> turned(uint32_t from) {
    typedef short Four __attribute__((ext_vector_type(4)));
    return bits_as<Vector<uint32_t, 2>>(__builtin_amdgcn_ds_read_tr16_b64_v4i16((TW_SHARED Four*)from));
  }
};

template <class Config, class E, int kExtent, int kDepth, int kBanks, int kThreads>
struct TapColumns<Config, LdsTile<Turned<E>, false, kExtent, kDepth, kBanks, false>, kThreads>
    : TapColumns<Config, LdsTile<E, false, kExtent, kDepth, kBanks>, kThreads> {
  using TapColumns<Config, LdsTile<E, false, kExtent, kDepth, kBanks>, kThreads>::TapColumns;
};

template <class Config>
struct TurnedTaps : Config {
  using B = Turned<typename Config::B>;
  static_assert(Config::direction == Direction::backward_data, "forward weights are k-major in memory");
};

}  // namespace tw::gpu

#undef TW_CONV_KERNEL
#define TW_CONV_KERNEL(NAME, ...)                                                                    \
  TW_KERNEL(tw::gpu::Conv<tw::gpu::TurnedTaps<__VA_ARGS__>>::threads, 1, NAME,                       \
            tw::ConvParams<tw::gpu::TurnedTaps<__VA_ARGS__>>,                                        \
            tw::gpu::Conv<tw::gpu::TurnedTaps<__VA_ARGS__>>::run(params);)
