// A strided copy with conversion: what brings tensors into an order that a kernel takes, and back. Config states From
// and To. A unit exports
//   TW_TRANSFORM(name, Config)
//     name   tw_cpu_kernel with tw_transform_args as args; any team, no workspace
// Where source and destination disagree on which elements are neighbours, blocks of L x L elements are transposed in
// registers, so that both are read and written by whole vectors.
#pragma once
#include "tilewright/core/args/strided_copy.h"
#include "tilewright/cpu/blocks/pack.hpp"
#include "tilewright/cpu/team.hpp"

TW_NAMESPACE_BEGIN

template <class Config>
struct Transform {
  using From = typename Config::From;
  using To = typename Config::To;
  static constexpr bool same = is_same<From, To>;
  static constexpr int64_t kBlock = 64;  // lines of the source that one piece of work covers

  // L elements as 32-bit lanes: their bits, or fp32 where the type changes.
  static TW_INLINE u32v get(const char* from) {
    if constexpr (same) return load_raw<From>(from);
    else return (u32v)load_f32<From>(from);
  }
  static TW_INLINE void put(char* to, u32v x) {
    if constexpr (!same) store_f32<To>(to, (f32v)x);
    else if constexpr (size_of<To> == 4) store_as(to, x);
    else if constexpr (size_of<To> == 2) store_low_u16(to, x);
    else store_low_u8(to, x);
  }
  // The first `count` of them; the rest counts as zero and is neither read nor written.
  static TW_INLINE u32v get(const char* from, int64_t count) {
    if (count >= kLanes) return get(from);
    alignas(64) char buffer[kLanes * size_of<From>] = {};
    if (count > 0) __builtin_memcpy(buffer, from, (size_t)count * size_of<From>);
    return get(buffer);
  }
  static TW_INLINE void put(char* to, u32v x, int64_t count) {
    if (count >= kLanes) return put(to, x);
    alignas(64) char buffer[kLanes * size_of<To>];
    put(buffer, x);
    if (count > 0) __builtin_memcpy(to, buffer, (size_t)count * size_of<To>);
  }
  static TW_INLINE void put_one(char* to, u32v x) {
    if constexpr (same) {
      const uint32_t bits = x[0];
      __builtin_memcpy(to, &bits, size_of<To>);
    } else {
      put(to, x, 1);
    }
  }

  // Neighbours in the destination are neighbours in the source, or at least lie at one distance.
  static TW_NOINLINE void copy_line(const char* from, int64_t from_step, char* to, int64_t to_step, int64_t kept,
                                    int64_t size) {
    if (to_step == 1 && from_step == 1) {
      for (int64_t i = 0; i < kept; i += kLanes)
        put(to + i * size_of<To>, get(from + i * size_of<From>, kept - i), kept - i);
    } else {
      for (int64_t i = 0; i < kept; i++)
        put_one(to + i * to_step * size_of<To>, get(from + i * from_step * size_of<From>, 1));
    }
    if (to_step == 1) {
      if (size > kept) __builtin_memset(to + kept * size_of<To>, 0, (size_t)((size - kept) * size_of<To>));
    } else {
      for (int64_t i = kept; i < size; i++) put_one(to + i * to_step * size_of<To>, u32v{});
    }
  }

  // Element (f, t) from `from + t*from_step + f` to `to + f*to_step + t`: up to L lines each way.
  static TW_NOINLINE void turn(const char* from, int64_t from_step, int64_t lines, char* to, int64_t to_step,
                               int64_t columns) {
    u32v block[kLanes];
    TW_UNROLL
    for (int t = 0; t < kLanes; t++) block[t] = t < lines ? get(from + t * from_step * size_of<From>, columns) : u32v{};
    transpose(block);
    TW_UNROLL
    for (int f = 0; f < kLanes; f++)
      if (f < columns) put(to + f * to_step * size_of<To>, block[f], lines);
  }

  struct Place {
    int64_t from = 0, to = 0;  // elements
    bool kept = true;
  };
  // The place of piece `index` along all dimensions but `skip` and the last.
  static Place place_of(const tw_transform_args& args, int skip, int64_t index) {
    Place place;
    for (int dim = 4; dim >= 0; dim--) {
      if (dim == skip) continue;
      const int64_t at = index % args.sizes[dim];
      index /= args.sizes[dim];
      place.from += at * args.from_strides[dim], place.to += at * args.to_strides[dim];
      place.kept = place.kept && at < args.kept[dim];
    }
    return place;
  }

  static void run(const tw_transform_args& args, const tw_team* team) {
    Crew crew = crew_of(team, 1 << 30);
    const char* const from = (const char*)args.from;
    char* const to = (char*)args.to;
    // The dimension along which the source is contiguous, if it is another than the destination's.
    int lines = 4;
    const bool turned = args.to_strides[5] == 1 && args.from_strides[5] != 1;
    for (int dim = 0; turned && dim < 5; dim++)
      if (args.sizes[dim] > 1 && args.from_strides[dim] == 1) lines = dim;
    const bool turns = turned && args.from_strides[lines] == 1 && args.sizes[lines] > 1;
    const int64_t size = args.sizes[lines], kept = args.kept[lines], blocks = ceil_div(size, kBlock);
    int64_t pieces = blocks;
    for (int dim = 0; dim < 5; dim++) pieces *= dim == lines ? 1 : args.sizes[dim];
    if (args.sizes[5] == 0) pieces = 0;
    for (int64_t piece; (piece = crew.claim(pieces)) >= 0;) {
      const Place place = place_of(args, lines, piece / blocks);
      const int64_t begin = piece % blocks * kBlock, end = min_of(begin + kBlock, size);
      const int64_t length = place.kept ? args.kept[5] : 0, there = min_of(end, kept);
      int64_t done = begin;
      if (turns && length > 0) {
        for (int64_t f = begin; f < there; f += kLanes)
          for (int64_t t = 0; t < length; t += kLanes)
            turn(from + (place.from + f + t * args.from_strides[5]) * size_of<From>, args.from_strides[5], length - t,
                 to + (place.to + f * args.to_strides[lines] + t) * size_of<To>, args.to_strides[lines], there - f);
        for (int64_t f = begin; f < there; f++)
          if (args.sizes[5] > length)
            __builtin_memset(to + (place.to + f * args.to_strides[lines] + length) * size_of<To>, 0,
                             (size_t)((args.sizes[5] - length) * size_of<To>));
        done = max_of(begin, there);
      }
      for (int64_t f = done; f < end; f++)
        copy_line(from + (place.from + f * args.from_strides[lines]) * size_of<From>, args.from_strides[5],
                  to + (place.to + f * args.to_strides[lines]) * size_of<To>, args.to_strides[5],
                  f < kept ? length : 0, args.sizes[5]);
    }
    crew.end_stage(pieces);
  }
};

TW_NAMESPACE_END

#define TW_TRANSFORM(NAME, CONFIG)                                                                       \
  extern "C" __attribute__((visibility("default"))) void NAME(const void* args, tw_team* team) {         \
    tw::Transform<CONFIG>::run(*(const tw_transform_args*)args, team);                                   \
  }
