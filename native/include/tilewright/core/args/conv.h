// Launch arguments of every convolution kernel, on every device: the implicit product of core/args/gemm.h, and how one
// of its operands is gathered from an image. Plain-old-data, the same bytes on host and device; the Python side packs
// it field by field in this order (tilewright_grouped_conv/launch/kernel_args.py); all fields are 8-byte aligned.
//
// "Rows" are the pixels that a product runs over (those of the result, of backward weight those of the gradient), and
// "taps" the positions of the filter. For every pair of them and every axis one coordinate of the image is read,
//     coordinate = origin + row * row_step + tap * tap_step,
// and what lies outside [0, size) counts as zero. The pixels of all images are numbered as ((image * D + d) * H + h) *
// W + w, taps likewise, and k = tap * channels + channel.
#pragma once
#include "tilewright/core/args/gemm.h"

// Division by a constant: n / d == (n * multiplier) >> shift for 0 <= n < 2^31. GPUs only; elsewhere it may be zero.
typedef struct tw_divisor {
  int64_t multiplier, shift;
} tw_divisor;

// One spatial axis, in the order D, H, W; of fewer axes the first are absent: rows, size and taps 1, all steps 0.
typedef struct tw_conv_axis {
  int64_t rows, size, taps;            // pixels; extent of the gathered image; taps (0: no tap meets these pixels)
  int64_t row_step, tap_step, origin;  // see above; tap_step and origin may be negative
  int64_t image_stride;                // elements from coordinate to coordinate of the gathered image
  int64_t row_stride;                  // elements from row to row of the tensor that is not gathered (see row_n)
  int64_t tap_stride;                  // elements from tap to tap of the weights
  tw_divisor by_rows, by_taps;
} tw_conv_axis;

// Directions differ in what the operands are. Item: one index of the product's batch.
//                            gathered image    rows of C     columns of C   other operand
//   forward                  x                 pixels of y   channels of y  weights
//   backward data            dy                pixels of dx  channels of dx weights, K and C exchanged by strides
//   backward weight          x                 channels of y taps, channels dy (columns of A are its pixels)
//   forward, channels-first  x                 channels of y pixels of y    weights
// Channels-last: an item is a group. Channels-first: an item is (image, group), image * groups + group.
// Backward data with a stride computes one problem per phase (the pixels dx = phase + row * stride), whose pointers
// begin at the phase's first pixel and first tap, and whose strides reach from one of its pixels or taps to the next.
typedef struct tw_conv_problem {
  // The implicit product: m, n, k, batch, alpha, clamps, epilogue operands; c, ldc (pixels at one distance) and
  // stride_c. a, b: first elements of the image, the weights or the gradient; where pointwise filters make a plain
  // product of it, lda, ldb, stride_a and stride_b hold as well.
  tw_gemm_problem gemm;
  tw_conv_axis axes[3];
  int64_t images, groups;
  int64_t channels;                      // of the gathered image, per group
  int64_t image_n, image_g, image_c;     // strides of the gathered image: per image, group, channel; in elements
  int64_t row_n, row_g, row_c;           // likewise of the tensor that is not gathered: y, dx, or dy for the weights
  int64_t weight_g, weight_n, weight_c;  // of the weights: per group; per channel that is not gathered (of the result,
                                         // or of dy); per gathered channel
  tw_divisor by_channels, by_groups;
  const void* acc;  // accumulation: what is added to the result, laid out as C; may be C
} tw_conv_problem;

// Arguments of a launch on a CPU. The fields are those of tw_gemm_args.
typedef struct tw_conv_args {
  const tw_conv_problem* problems;  // the phases of backward data, else one
  int64_t count;
  void* workspace;  // 64-byte aligned
  int64_t workspace_bytes;
  int64_t split_k;  // number of slices of k, cut as in tw_gemm_args
} tw_conv_args;

#ifdef __cplusplus
static_assert(sizeof(tw_conv_axis) == 104 && sizeof(tw_conv_problem) == 680 && sizeof(tw_conv_args) == 40,
              "the Python side packs these bytes");
#endif
