// A product, a convolution and an attention from a bundle, on the CPU, beside plain loops. Needs libtilewright alone:
//
//   tilewright bundle build --gemm 64x48x32 --conv 2x6x8x9x7:3s1p1g1 --attention 1x2x33x40 --dtype fp32 -o model.twb
//   c++ -std=c++17 -Inative/runtime examples/c_api/main.cpp native/tilewright_native/libtilewright.so -o c_api
//   TILEWRIGHT_BUNDLE=model.twb LD_LIBRARY_PATH=native/tilewright_native ./c_api
#include <cmath>
#include <cstring>
#include <vector>

#include "dispatcher.hpp"

namespace {

using Values = std::vector<float>;

Values numbers(size_t count, unsigned seed) {
  Values made(count);
  for (float& value : made) {
    seed = seed * 1664525u + 1013904223u;
    value = (float)(seed >> 8) / (1 << 23) - 1;
  }
  return made;
}

int report(const char* what, const Values& have, const std::vector<double>& want) {
  double worst = 0;
  for (size_t i = 0; i < want.size(); i++) {
    const double off = std::fabs(have[i] - want[i]);
    if (!(off <= worst)) worst = off;  // a NaN is the worst
  }
  const bool good = worst < 1e-4;
  std::printf("%s: %s, at most %.1e off\n", what, good ? "right" : "WRONG", worst);
  return good ? 0 : 1;
}

int failed(const char* what) {
  const tw_error* const error = tw_last_error();
  std::printf("%s: %s [%s] Fix: %s\n", what, error->message, error->rule, error->fix);
  return 1;
}

// Finds a plan and launches it twice, bound.
int run(const char* name, const std::vector<uint64_t>& operands) {
  tw_plan* plan;
  if (tw_bundle_find(dispatcher_bundle, name, &plan)) return failed(name);
  tw_binding* bound = nullptr;
  tw_status status = tw_bind(plan, operands.data(), (uint32_t)operands.size(), nullptr, &bound);
  for (int turn = 0; turn < 2 && !status; turn++) status = tw_launch(bound, nullptr);
  const int result = status ? failed(name) : 0;
  tw_binding_close(bound);
  tw_plan_close(plan);
  return result;
}

int product() {
  const int m = 64, n = 48, k = 32;
  const Values a = numbers(m * k, 1), b = numbers(k * n, 2);
  Values c(m * n, NAN);
  if (!dispatcher_is_supported(m, n, k) || dispatcher_is_supported(m + 1, n, k)) return failed("is_supported");
  float ms;
  if (dispatcher_run_gemm(a.data(), b.data(), c.data(), m, n, k, &ms)) return failed("run_gemm");
  std::vector<double> want(m * n);
  for (int i = 0; i < m; i++)
    for (int j = 0; j < n; j++)
      for (int s = 0; s < k; s++) want[i * n + j] += (double)a[i * k + s] * b[j * k + s];
  return report("gemm", c, want);
}

int convolution() {  // images, rows and columns before channels; padding 1
  const int images = 2, inner = 6, outer = 8, rows = 9, columns = 7;
  const Values x = numbers(images * rows * columns * inner, 3), w = numbers(outer * 9 * inner, 4);
  Values y(images * rows * columns * outer, NAN);
  if (run("conv(x: fp32[2, 6, 9, 7]:[378, 1, 42, 6], w: fp32[8, 6, 3, 3]:[54, 1, 18, 6], "
          "y: fp32[2, 8, 9, 7]:[504, 1, 56, 8]; dilation=[1, 1], groups=1, padding=[1, 1], stride=[1, 1])",
          {(uint64_t)x.data(), (uint64_t)w.data(), (uint64_t)y.data()}))
    return 1;
  std::vector<double> want(y.size());
  for (size_t place = 0; place < want.size(); place++) {
    const int o = place % outer, q = place / outer % columns, p = place / outer / columns % rows;
    const int image = (int)(place / outer / columns / rows);
    for (int r = 0; r < 3; r++)
      for (int s = 0; s < 3; s++)
        for (int i = 0; i < inner; i++) {
          const int row = p + r - 1, column = q + s - 1;
          if (row < 0 || row >= rows || column < 0 || column >= columns) continue;
          const double pixel = x[((image * rows + row) * columns + column) * inner + i];
          want[place] += pixel * w[((o * 3 + r) * 3 + s) * inner + i];
        }
  }
  return report("conv", y, want);
}

int attention() {
  const int heads = 2, length = 33, depth = 40, count = heads * length * depth;
  const Values q = numbers(count, 5), k = numbers(count, 6), v = numbers(count, 7);
  Values o(count, NAN);
  if (run("attention(q: fp32[1, 2, 33, 40], k: fp32[1, 2, 33, 40], v: fp32[1, 2, 33, 40], o: fp32[1, 2, 33, 40])",
          {(uint64_t)q.data(), (uint64_t)k.data(), (uint64_t)v.data(), (uint64_t)o.data()}))
    return 1;
  std::vector<double> want(count);
  for (int row = 0; row < heads * length; row++) {
    const int head = row / length * length;
    std::vector<double> share(length);
    double sum = 0;
    for (int j = 0; j < length; j++) {
      double dot = 0;
      for (int d = 0; d < depth; d++) dot += (double)q[row * depth + d] * k[(head + j) * depth + d];
      sum += share[j] = std::exp(dot / std::sqrt((double)depth));
    }
    for (int j = 0; j < length; j++)
      for (int d = 0; d < depth; d++) want[row * depth + d] += share[j] / sum * v[(head + j) * depth + d];
  }
  return report("attention", o, want);
}

}  // namespace

int main() {
  if (dispatcher_initialize()) return failed("TILEWRIGHT_BUNDLE");
  std::printf("%d plans\n", dispatcher_get_kernel_count());
  const int wrong = product() + convolution() + attention();
  dispatcher_cleanup();
  return wrong ? 1 : 0;
}
