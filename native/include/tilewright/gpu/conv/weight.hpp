// The gradient of the weights as an implicit product, and the kernel that adds its slices: see
// gpu/conv/implicit_gemm.hpp.
#pragma once
#include "tilewright/gpu/conv/implicit_gemm.hpp"
#include "tilewright/gpu/conv/convert.hpp"
