// Parts shared by kernels without a product: results are finished line by line, wherever the line lies.
#pragma once
#include "tilewright/cpu/conv/entries.hpp"
#include "tilewright/cpu/conv/output.hpp"
#include "tilewright/cpu/team.hpp"

TW_NAMESPACE_BEGIN

// A stretch of one line of pixels, all channels of which are numbered through.
struct LineOutput : Output {
  const char* old;  // accumulation: what lies at `data` (or a copy of it)
  int64_t operands_of;
};

// Rows `ld` apart, of which `data` is the first whatever its number.
template <class Config>
struct LineRows {
  using Output = LineOutput;
  static constexpr bool linear = false, accumulates = Config::accumulate, bias_along_rows = Config::bias_rows;
  static TW_INLINE int64_t operand_item(const LineOutput& out) { return out.operands_of; }
  static TW_INLINE const char* earlier(const LineOutput& out) { return out.old; }
  struct Offsets {
    const LineOutput& out;
    TW_INLINE Offsets(const LineOutput& output, int64_t, int64_t) : out(output) {}
    TW_INLINE int64_t operator[](int64_t i) const { return i * out.ld; }
  };
};

// Sums in fp32, of integers too: a group's sum of products of int8 is exact as long as it is below 2^24.
template <bool kToIntegers>
struct FloatSums {
  using accumulator = f32v;
  using scalar = float;
  static constexpr bool is_float = !kToIntegers, offset_a = false;
};

// The problem with its operands numbered by channel instead of by group and channel: a group's channels follow those of
// the group before.
template <class Config>
struct ChannelOperands {
  tw_gemm_problem problem;
  tw_gemm_operand d[Config::D::size > 0 ? Config::D::size : 1];

  TW_INLINE explicit ChannelOperands(const tw_conv_problem& p, int64_t channels) : problem(p.gemm) {
    number(problem.bias, channels), number(problem.scale_b, channels);
    for (int i = 0; i < Config::D::size; i++) d[i] = p.gemm.d[i], number(d[i], channels);
    problem.d = d;
  }
  ChannelOperands(const ChannelOperands&) = delete;

  // True if that is so for operands of groups with several channels.
  static bool suits(const tw_conv_problem& p, int64_t channels) {
    bool suits = p.row_g == channels && (channels == 1 || p.row_c == 1);
    if constexpr (BiasType<typename Config::Bias>::present) suits = suits && follows(p.gemm.bias, channels);
    if constexpr (Config::scale_b == Scale::column) suits = suits && follows(p.gemm.scale_b, channels);
    for (int i = 0; i < Config::D::size; i++) suits = suits && follows(p.gemm.d[i], channels);
    return suits;
  }

 private:
  static TW_INLINE void number(tw_gemm_operand& operand, int64_t channels) {
    if (channels == 1) operand.col_stride = operand.batch_stride;
  }
  static TW_INLINE bool follows(const tw_gemm_operand& operand, int64_t channels) {
    return channels == 1 || operand.batch_stride == channels * operand.col_stride;
  }
};

// How the lines of a problem are dealt out: every piece is a strip of lines of one plane, short enough that there are
// a few for each member.
struct Strips {
  int64_t lines, length, planes;
  TW_INLINE Strips(int64_t of_lines, int64_t of_planes, int team) : lines(of_lines), planes(of_planes) {
    const int64_t wanted = team > 1 ? ceil_div(4 * team, max_of(planes, 1)) : 1;
    length = max_of(ceil_div(lines, wanted), 1);
  }
  TW_INLINE int64_t per_plane() const { return ceil_div(lines, length); }
  TW_INLINE int64_t pieces() const { return planes * per_plane(); }
};

TW_NAMESPACE_END
