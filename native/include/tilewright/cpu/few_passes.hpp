// For kernels without a product, before anything else: their loops are written as they are to run, with what loops share
// computed ahead of them. These passes of GCC take a fifth of the time to compile, and gain nothing there.
#pragma once
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-tree-pre,no-gcse,no-tree-vrp,no-tree-vectorize,no-tree-slp-vectorize,no-code-hoisting")
#pragma GCC optimize("no-tree-tail-merge,no-crossjumping,no-cse-follow-jumps,no-rerun-cse-after-loop,no-thread-jumps")
#endif
