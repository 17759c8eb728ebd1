// Sums of boosted regression trees: the order in which kernels are proposed.

#include "worker.h"

extern "C" void tw_trees_sum(const tw_trees* trees, const float* rows, int64_t count, int64_t width, double* sums) {
  for (int64_t row = 0; row < count; ++row) sums[row] = 0.0;
  // A tree's nodes stay in the first cache while all rows pass through it.
  for (int64_t tree = 0; tree < trees->count; ++tree) {
    for (int64_t row = 0; row < count; ++row) {
      const float* values = rows + row * width;
      int32_t node = trees->root[tree];
      while (trees->feature[node] >= 0) {
        // Chosen without a branch, which would be guessed wrong every other time.
        const int32_t* next = values[trees->feature[node]] <= trees->threshold[node] ? trees->left : trees->right;
        node = next[node];
      }
      sums[row] += trees->value[node];
    }
  }
}
