// The vocabulary that a generated source unit uses to state its configuration. Plain C++17 without vector types, so
// that every device may include it.
#pragma once

namespace tw {

// A list of element types, for example of the D operands.
template <class... Ts>
struct types {
  static constexpr int size = sizeof...(Ts);
};

// direct: no product at all, but loops of their own (depthwise and small convolutions). bulk: the same, with tensors
// moved by a copy engine.
enum class Pipeline { mem, compv1, compv3, compv4, comp_async, preshufflev1, preshufflev2, ws, direct, bulk };
// default_: the order of instructions is the compiler's.
enum class Scheduler { intrawave, interwave, cooperative, pingpong, default_ };
// How results leave the registers: default_ stores them where they stand, cshuffle passes them through shared memory, so
// that neighbouring threads write neighbouring elements. (GPUs only.)
enum class EpilogueKind { default_, cshuffle };
// linear: the work is cut into equal ranges of (output tile, step along k), whose partial tiles are added afterwards
// (Stream-K). (GPUs only.)
enum class Reduction { none, linear };
enum class Scale { none, tensor, row, column };

// Convolutions: what is computed, and how.
enum class Direction { forward, backward_data, backward_weight };
// implicit: a product whose operand is gathered from the image. pointwise: one that reads the image as the matrix that
// it is. depthwise, direct: loops without a product, for one channel per group and for few.
enum class ConvKind { implicit, pointwise, depthwise, direct };

// How the operands D0, D1, ... enter: x = op(...op(op(x, D0), D1)...). MultiDAdd and MultiDMultiply are Add and
// Multiply over any number of operands.
enum class Binary { PassThrough, Add, Multiply, MultiDAdd, MultiDMultiply };
enum class Unary {
  PassThrough, Relu, Gelu, FastGelu, Silu, Sigmoid, Tanh, HardSwish, Clamp, LeakyRelu, Elu, Softplus, Mish
};

// Attention: what a kernel computes. split, paged and prefill are forward ones; the last three make up the backward.
enum class FmhaFamily { forward, split, combine, paged, prefill, append, dot_do_o, dq_dk_dv, convert_dq };
enum class FmhaPipeline {
  qr, qr_async, qs, qr_async_trload, v3, qr_pagedkv, qr_nwarp_sshuffle, appendkv, batch_prefill_async, bwd,
  splitkv_combine, ws
};
enum class FmhaMask { no, causal, window };
enum class FmhaBias { no, elementwise, alibi };
enum class FmhaScale { no, pertensor, blockscale, kv_blockscale };
enum class FmhaRope { none, interleaved, half };
enum class KvLayout { linear, vectorized };
enum class KvLookup { vllm, sglang };

}  // namespace tw
