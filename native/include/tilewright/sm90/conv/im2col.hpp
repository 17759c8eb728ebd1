// Loads of an image's pixels as rows of a matrix, by the bulk tensor copy engine. The map describes an image of kAxes
// spatial axes with channels last, and the pixels at which a filter may begin: a box between two corners, walked with
// the convolution's stride, first along the width, then the height, the depth and from image to image. One copy takes
// some channels of as many of these pixels as the map says, each moved by the offsets of one tap. What lies outside of
// the image reads as zero.
#pragma once
#include "tilewright/sm90/blocks/base.hpp"

namespace tw::sm90 {

// A place in an image: of kAxes axes the last are used. Offsets of a tap are not negative.
struct Pixel {
  int image, d, h, w;
};
struct TapOffsets {
  uint16_t d, h, w;
};

#define TW_IM2COL(RANK, WHERE, MORE)                                                                             \
  "cp.async.bulk.tensor." RANK ".shared::cluster.global.im2col.mbarrier::complete_tx::bytes" WHERE " [%0], [%1, " MORE
// Into every workgroup of `ranks` if kMulticast, as tma_load_multicast (blocks/tma.hpp).
template <int kAxes, bool kMulticast>
TW_SM90 void load_pixels(uint32_t to, const void* map, int channel, Pixel at, TapOffsets tap, uint32_t barrier,
                         uint16_t ranks) {
  static_assert(kAxes >= 1 && kAxes <= 3, "one to three spatial axes");
  if constexpr (kAxes == 1) {
    if constexpr (kMulticast)
      asm volatile(TW_IM2COL("3d", ".multicast::cluster", "{%3, %4, %5}], [%2], {%6}, %7;")::"r"(to), "l"(map),
                   "r"(barrier), "r"(channel), "r"(at.w), "r"(at.image), "h"(tap.w), "h"(ranks)
                   : "memory");
    else
      asm volatile(TW_IM2COL("3d", "", "{%3, %4, %5}], [%2], {%6};")::"r"(to), "l"(map), "r"(barrier), "r"(channel),
                   "r"(at.w), "r"(at.image), "h"(tap.w)
                   : "memory");
  } else if constexpr (kAxes == 2) {
    if constexpr (kMulticast)
      asm volatile(TW_IM2COL("4d", ".multicast::cluster", "{%3, %4, %5, %6}], [%2], {%7, %8}, %9;")::"r"(to), "l"(map),
                   "r"(barrier), "r"(channel), "r"(at.w), "r"(at.h), "r"(at.image), "h"(tap.w), "h"(tap.h), "h"(ranks)
                   : "memory");
    else
      asm volatile(TW_IM2COL("4d", "", "{%3, %4, %5, %6}], [%2], {%7, %8};")::"r"(to), "l"(map), "r"(barrier),
                   "r"(channel), "r"(at.w), "r"(at.h), "r"(at.image), "h"(tap.w), "h"(tap.h)
                   : "memory");
  } else {
    if constexpr (kMulticast)
      asm volatile(TW_IM2COL("5d", ".multicast::cluster", "{%3, %4, %5, %6, %7}], [%2], {%8, %9, %10}, %11;")::"r"(to),
                   "l"(map), "r"(barrier), "r"(channel), "r"(at.w), "r"(at.h), "r"(at.d), "r"(at.image), "h"(tap.w),
                   "h"(tap.h), "h"(tap.d), "h"(ranks)
                   : "memory");
    else
      asm volatile(TW_IM2COL("5d", "", "{%3, %4, %5, %6, %7}], [%2], {%8, %9, %10};")::"r"(to), "l"(map), "r"(barrier),
                   "r"(channel), "r"(at.w), "r"(at.h), "r"(at.d), "r"(at.image), "h"(tap.w), "h"(tap.h), "h"(tap.d)
                   : "memory");
  }
}
#undef TW_IM2COL

}  // namespace tw::sm90
