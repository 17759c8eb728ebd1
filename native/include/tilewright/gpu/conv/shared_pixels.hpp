// The weights' gradient of gpu/conv/implicit_gemm.hpp on AMD GPUs with waves of 64, where lanes side by side want the
// same pixels: neighbouring blocks of the image's tile are other channels and taps of the same rows of k. So the four
// lanes of a quad find the place of one pixel each and pass it to the others, by operands of the instructions that add
// what a tap adds (DPP): divisions are by far the longest part of a step of k.
#pragma once
#include "tilewright/gpu/conv/weight.hpp"

namespace tw::gpu {

// The value of lane kLane of every quad, for all four.
template <int kLane>
TW_DEVICE uint32_t quad_lane(uint32_t x) {
  return (uint32_t)__builtin_amdgcn_mov_dpp((int)x, kLane * 0x55, 0xf, 0xf, true);
}
TW_DEVICE uint32_t of_quad(uint32_t x, int lane) {  // of a number that the compiler knows
  return lane == 0 ? quad_lane<0>(x) : lane == 1 ? quad_lane<1>(x) : lane == 2 ? quad_lane<2>(x) : quad_lane<3>(x);
}

template <class Config, class E, int kExtent, int kDepth, int kBanks, int kThreads, int kVector>
struct ImageBlocksRegisters<Config, LdsTile<E, false, kExtent, kDepth, kBanks, false>, kThreads, kVector>
    : RegisterLoader<LdsTile<E, false, kExtent, kDepth, kBanks, false>, kThreads> {
  using Tile = LdsTile<E, false, kExtent, kDepth, kBanks, false>;
  using Base = RegisterLoader<Tile, kThreads>;
  using Held = typename Base::Held;
  static constexpr int size = Tile::element_bytes, bytes = min_of(min_of(kVector * size, 16), Base::width);
  static constexpr int count = Base::width / bytes, ndim = Config::ndim, turns = ceil_div(Base::rows, 4);
  static_assert(Base::near % 4 == 0, "a quad has blocks of the same pixels");
  static constexpr int kFar = 0x40000000;  // no pixel has such a place, nor one this far from it

  TW_DEVICE static void fetch(Held& held, const Checked<ImageBlocks<Config, Tile, kVector>>& from, int step, int thread,
                              int part = 0, int parts = 1) {
    const auto& image = from.operand;
    const tw_conv_problem& p = image.problem;
    const auto buffer = checked_buffer(image.base);
    const int end = image.begin + image.length;
    TW_UNROLL
    for (int j = Base::per_thread * part / parts; j < Base::per_thread * (part + 1) / parts; j++) {
      const auto at = Base::place(thread, j);
      Pixel taps[count], own[turns];
      TW_UNROLL
      for (int i = 0; i < count; i++) {
        const int column = image.first + (at.across * Base::width + i * bytes) / size;
        const int tap = divide(column, p.by_channels), channel = column - tap * (int)p.channels;
        taps[i] = step_of<ndim>(p, tap);
        taps[i].offset += bytes == size ? (uint32_t)channel * (uint32_t)p.image_c : (uint32_t)channel;
        taps[i].offset *= size;
        taps[i].at[2] = column < (int)p.gemm.n ? taps[i].at[2] : kFar;
      }
      TW_UNROLL
      for (int i = 0; i < turns; i++) {
        const int row = image.begin + step * Tile::depth + at.along * Base::rows + thread % min_of(Base::rows, 4) + i * 4;
        own[i] = pixel_of<ndim>(p, row);
        own[i].offset *= size;
        own[i].at[2] = row < end ? own[i].at[2] : kFar;
      }
      TW_UNROLL
      for (int r = 0; r < Base::rows; r++) {
        const Pixel& pixel = own[r / 4];
        held.data[j][r] = load_pieces<Base::width, bytes>(buffer, [&](int i) {
          bool in = true;  // is_inside, without branches
          TW_UNROLL
          for (int axis = 3 - ndim; axis < 3; axis++)
            in = in & (of_quad((uint32_t)pixel.at[axis], r % 4) + (uint32_t)taps[i].at[axis] <
                       (uint32_t)p.axes[axis].size);
          return offset_or_beyond(in, of_quad(pixel.offset, r % 4) + taps[i].offset);
        });
      }
    }
  }
};

}  // namespace tw::gpu
