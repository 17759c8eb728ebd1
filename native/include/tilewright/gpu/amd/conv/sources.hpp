// Operands of convolutions whose channels fill whole steps of k, on their way to the LDS of AMD GPUs: a step is then a
// part of one tap, the same for all lanes.
//
//   PixelRows    the image, k-major: a line is a pixel
//   WholeLines   weights of forward: a line is a column, with all taps and channels
//   TapColumns   weights of backward data, tap by tap: columns lie side by side, k runs across
//
// A thread keeps to its lines: where each begins, and which taps of a pixel meet the image, it finds out once, as bits (a
// filter has up to 32 taps). What a tap adds to a place is kept by the lane of the tap's number, and read by number: a
// step takes less than ten scalar instructions, and two vector instructions for each access to the image.
//
// All accesses are raw buffer loads, at the thread's offset and the step's. Both are unsigned: they count from so far
// ahead of the image as a filter reaches. An item's bytes, with that before and behind, are less than 2 GiB. What does
// not exist is read beyond the buffer's end, and zero. Beyond the last step the last one is read again, for nobody.
#pragma once
#include "tilewright/gpu/amd/loader.hpp"
#include "tilewright/gpu/conv/image.hpp"

namespace tw::gpu {

// Where a step lies beyond the thread's own places. It is found a step before it is wanted, and `settle` keeps it so:
// else compilers find it where it is read, with all else waiting.
struct TapStep {
  uint32_t offset;
  TW_DEVICE void settle() { asm volatile("" : "+s"(offset)); }
};
// The same with the places, of which those of pixels that the step's tap does not meet are beyond the buffer's end.
template <int kCount>
struct PixelStep : TapStep {
  uint32_t own[kCount];
  TW_DEVICE void settle() {
    TapStep::settle();
    TW_UNROLL
    for (int j = 0; j < kCount; j++) asm volatile("" : "+v"(own[j]));
  }
};

// Steps of k from `begin` on; those that do not exist are the last one.
template <int kDepth>
struct TapSteps {
  int begin, last, steps;
  TW_DEVICE TapSteps(int from, int many) : begin(from), last(from + many - kDepth), steps(many / kDepth) {}
  TW_DEVICE int k(int step) const { return min_of(begin + step * kDepth, last); }
};

// Offset that tap `tap` adds, in bytes, less the bytes of the k before it.
TW_DEVICE int offset_of_lane(uint32_t elements, int size, int tap, uint32_t bytes_of_channels) {
  return (int)(elements * (uint32_t)size - (uint32_t)tap * bytes_of_channels);
}
TW_DEVICE uint32_t read_lane(int value, int lane) { return (uint32_t)__builtin_amdgcn_readlane(value, lane); }

template <int kBytes>
TW_DEVICE Words<kBytes / 4> load_step(__amdgpu_buffer_rsrc_t buffer, uint32_t place, const TapStep& step) {
  const int own = (int)place, more = (int)step.offset;
  if constexpr (kBytes == 16) return bits_as<Words<4>>(__builtin_amdgcn_raw_buffer_load_b128(buffer, own, more, 0));
  else if constexpr (kBytes == 8) return bits_as<Words<2>>(__builtin_amdgcn_raw_buffer_load_b64(buffer, own, more, 0));
  else return bits_as<Words<1>>(__builtin_amdgcn_raw_buffer_load_b32(buffer, own, more, 0));
}

template <class Config, class Tile, int kThreads>
struct PixelRows : TapSteps<Tile::depth> {
  using Places = RegisterLoader<Tile, kThreads>;
  using Bits = TapBits<Config::ndim>;
  static constexpr int per_thread = Places::per_thread, size = Tile::element_bytes;
  static_assert(Tile::source_k_major && Places::rows == 1, "lines are pixels");
  static constexpr uint32_t kEnd = 0x80000000u;  // a bit that no place has

  __amdgpu_buffer_rsrc_t buffer;
  uint32_t offset[per_thread];   // bytes, to the thread's own place along k
  uint32_t missing[per_thread];  // bits of taps, by their numbers
  int lane_offset;               // of the tap of the lane's number
  tw_divisor by_channels;

  // k from `from` on, `many` of them: whole steps.
  TW_DEVICE PixelRows(const tw_conv_problem& p, int64_t item, int first_row, int from, int many, int thread)
      : TapSteps<Tile::depth>(from, many), by_channels(p.by_channels) {
    // Elements from which offsets of pixels, and of taps, count to the first of all.
    uint32_t before = 0, behind = 0;
    TW_UNROLL
    for (int axis = 3 - Config::ndim; axis < 3; axis++) {
      const auto& a = p.axes[axis];
      before += (uint32_t)max_of(0, -(int)a.origin) * (uint32_t)a.image_stride;
      behind += (uint32_t)max_of(0, -(int)a.tap_step * ((int)a.taps - 1)) * (uint32_t)a.image_stride;
    }
    const char* const base = (const char*)p.gemm.a + (item * p.image_g - (int64_t)before - (int64_t)behind) * size;
    buffer = __builtin_amdgcn_make_buffer_rsrc((char*)uniform(base), 0, (int)kEnd, kBufferFlags);
    Pixel pixels[per_thread];
    TW_UNROLL
    for (int j = 0; j < per_thread; j++) {
      const auto at = Places::place(thread, j);
      pixels[j] = pixel_of<Config::ndim>(p, first_row + at.across);
      offset[j] = (pixels[j].offset + before) * size + (uint32_t)at.along * 16;
    }
    Bits::of_pixels(missing, p, pixels);
    TW_UNROLL
    for (int j = 0; j < per_thread; j++) {
      const int line = Places::place(thread, j).across;
      missing[j] = ~taps_of_axes(missing[j], p.axes);
      if ((line >= Tile::extent) | (first_row + line >= (int)p.gemm.m)) missing[j] = ~0u;
    }
    const int lane = thread % kWave;
    lane_offset = offset_of_lane(step_of<Config::ndim>(p, lane).offset + behind, size, lane, (uint32_t)p.channels * size);
  }

  // From bits for every axis to bits of taps: those of the last axis once for every tap of the one before that meets.
  TW_DEVICE static uint32_t taps_of_axes(uint32_t bits, const tw_conv_axis* axes) {
    constexpr uint32_t kMask = Bits::each == 32 ? ~0u : (1u << Bits::each % 32) - 1;
    uint32_t found = bits & kMask;
    int count = (int)axes[2].taps;
    TW_UNROLL
    for (int axis = 1; axis >= 3 - Config::ndim; axis--) {
      uint32_t all = 0;
      TW_NO_UNROLL
      for (int t = 0; t < (int)axes[axis].taps; t++)
        all |= (bits >> (Bits::each * (2 - axis) + t) & 1) != 0 ? found << (t * count & 31) : 0u;
      found = all;
      count *= (int)axes[axis].taps;
    }
    return found;
  }

  using Step = PixelStep<per_thread>;
  TW_DEVICE Step at(int k) const {
    const int tap = divide(k, by_channels);
    Step step;
    step.offset = read_lane(lane_offset, tap) + (uint32_t)k * size;
    TW_UNROLL
    for (int j = 0; j < per_thread; j++)
      step.own[j] = __builtin_amdgcn_ubfe(missing[j], (uint32_t)tap, 1) << 31 | offset[j];
    return step;
  }
};

template <class Config, class Tile, int kThreads>
struct PixelRowsRegisters : RegisterLoader<Tile, kThreads> {
  using Base = RegisterLoader<Tile, kThreads>;
  using Held = typename Base::Held;
  using Rows = PixelRows<Config, Tile, kThreads>;

  TW_DEVICE static void fetch(Held& held, const Rows& rows, int step, int thread, int part = 0, int parts = 1) {
    fetch(held, rows, rows.at(rows.k(step)), thread, part, parts);
  }
  TW_DEVICE static void fetch(Held& held, const Rows& rows, const typename Rows::Step& step, int, int part = 0,
                              int parts = 1) {
    TW_UNROLL
    for (int j = Base::per_thread * part / parts; j < Base::per_thread * (part + 1) / parts; j++)
      held.data[j][0] = load_step<16>(rows.buffer, step.own[j], step);
  }
};

// Weights: lines that a step reads lie `line` bytes apart; the buffer ends where the item's weights end.
template <class Config, class Tile, int kThreads>
struct WholeLines : TapSteps<Tile::depth> {
  static constexpr int size = Tile::element_bytes;
  static_assert(Tile::source_k_major, "k runs along lines");
  __amdgpu_buffer_rsrc_t buffer;
  uint32_t line;

  TW_DEVICE WholeLines(const tw_conv_problem& p, int64_t item, int first, int from, int many, int)
      : TapSteps<Tile::depth>(from, many), line(uniform((uint32_t)p.weight_n * size)) {
    const char* const base = (const char*)p.gemm.b + (item * p.weight_g + first * p.weight_n) * size;
    const int lines = min_of((int)p.gemm.n - first, Tile::extent);
    const uint32_t bytes = uniform((uint32_t)(lines - 1) * line + (uint32_t)p.gemm.k * size);
    buffer = __builtin_amdgcn_make_buffer_rsrc((char*)uniform(base), 0, (int)bytes, kBufferFlags);
  }
  using Step = TapStep;
  TW_DEVICE Step at(int k) const { return {(uint32_t)k * size}; }
};

template <class Config, class Tile, int kThreads>
struct TapColumns : TapSteps<Tile::depth> {
  static constexpr int size = Tile::element_bytes;
  static_assert(!Tile::source_k_major, "columns lie side by side");
  __amdgpu_buffer_rsrc_t buffer;
  uint32_t line;
  int lane_offset;  // of the tap of the lane's number
  tw_divisor by_channels;

  TW_DEVICE TapColumns(const tw_conv_problem& p, int64_t item, int first, int from, int many, int thread)
      : TapSteps<Tile::depth>(from, many), line(uniform((uint32_t)p.weight_c * size)), by_channels(p.by_channels) {
    const char* const base = (const char*)p.gemm.b + (item * p.weight_g + first * p.weight_n) * size;
    const Spot s = spot_of_tap<Config::ndim>(p.axes, thread % kWave);
    uint32_t own = 0, last = 0;
    TW_UNROLL
    for (int i = 3 - Config::ndim; i < 3; i++) {
      own += (uint32_t)s.axis(i) * (uint32_t)p.axes[i].tap_stride;
      last += (uint32_t)(p.axes[i].taps - 1) * (uint32_t)p.axes[i].tap_stride;
    }
    lane_offset = offset_of_lane(own, size, thread % kWave, (uint32_t)p.channels * line);
    const uint32_t columns = (uint32_t)((int)p.gemm.n - first);
    const uint32_t bytes = uniform((last + columns) * size + (uint32_t)(p.channels - 1) * line);
    buffer = __builtin_amdgcn_make_buffer_rsrc((char*)uniform(base), 0, (int)bytes, kBufferFlags);
  }
  using Step = TapStep;
  TW_DEVICE Step at(int k) const {
    return {read_lane(lane_offset, divide(k, by_channels)) + (uint32_t)k * line};
  }
};

template <class Weights, class Tile, int kThreads>
struct WeightsRegisters : RegisterLoader<Tile, kThreads> {
  using Base = RegisterLoader<Tile, kThreads>;
  using Held = typename Base::Held;

  TW_DEVICE static void fetch(Held& held, const Weights& weights, int step, int thread, int part = 0, int parts = 1) {
    fetch(held, weights, weights.at(weights.k(step)), thread, part, parts);
  }
  TW_DEVICE static void fetch(Held& held, const Weights& weights, const TapStep& step, int thread, int part = 0,
                              int parts = 1) {
    TW_UNROLL
    for (int j = Base::per_thread * part / parts; j < Base::per_thread * (part + 1) / parts; j++) {
      const auto at = Base::place(thread, j);
      TW_UNROLL
      for (int r = 0; r < Base::rows; r++) {
        const int line = Tile::source_k_major ? at.across : at.along * Base::rows + r;
        const int own = (Tile::source_k_major ? at.along : at.across) * Base::width;
        held.data[j][r] = load_step<Base::width>(weights.buffer, (uint32_t)line * weights.line + (uint32_t)own, step);
      }
    }
  }
};

// The operands of a product, as AmdStep asks for them.
template <class Config>
struct TapSources {
  static constexpr bool any_alignment = false, has_wide = false;
  static constexpr bool is_data = Config::direction == Direction::backward_data;
  using Rows = ConvRows<Config>;

  template <class Tile, int kThreads>
  struct A {
    using Place = PixelRows<Config, Tile, kThreads>;
    using Fast = Place;
    using Registers = PixelRowsRegisters<Config, Tile, kThreads>;
  };
  template <class Tile, int kThreads>
  struct Lines {
    using Place = WholeLines<Config, Tile, kThreads>;
    using Fast = Place;
    using Registers = WeightsRegisters<Place, Tile, kThreads>;
  };
  template <class Tile, int kThreads>
  struct Columns {
    using Place = TapColumns<Config, Tile, kThreads>;
    using Fast = Place;
    using Registers = WeightsRegisters<Place, Tile, kThreads>;
  };
  template <class Tile, int kThreads>
  struct B : Choose<is_data, Columns<Tile, kThreads>, Lines<Tile, kThreads>> {};
};

}  // namespace tw::gpu
