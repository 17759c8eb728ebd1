// The only parameter of a convolution kernel of Hopper's ws pipeline, passed by value: that of a GEMM, whose m, n, k,
// batch and maps are those of the implicit product, and how the image is walked. The Python side packs the same bytes
// (tilewright_grouped_conv/launch/im2col.py).
//
//                    A                          B                             C
//   forward          pixels of x (im2col map)   weights, boxes along k        y
//   backward data    pixels of dy (im2col map)  weights, boxes along columns  dx
//   backward weight  dy, boxes along m          pixels of x (im2col map)      dw
// Maps of weights have the axes (channels of x, channels of y, taps). An item of the batch is a group; of backward
// weight with `tap_items` it is a tap of the only group.
#pragma once
#include "tilewright/gpu/gemm/params.hpp"

namespace tw {

// One spatial axis. Pixel `row` begins at origin + row * step; tap t of it lies offset + t * offset_step further.
struct ConvWalkAxis {
  int64_t rows, taps, step, origin, offset, offset_step;
};

struct ConvWalk {
  ConvWalkAxis axes[3];  // D, H, W; absent ones have one row and one tap
  int64_t channels;      // of the image, per group
  int64_t channel_steps; // steps of 128 bytes along the channels of a tap
  int64_t tap_items;     // see above; n is then `channels`, else `channels` times the taps
  int64_t reserved;
};
static_assert(sizeof(ConvWalk) == 176, "as the plugin packs it");

template <class Config>
struct Sm90ConvParams : GemmParams<Config> {
  ConvWalk walk;
};

}  // namespace tw
