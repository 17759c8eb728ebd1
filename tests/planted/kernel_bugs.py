"""Bugs in the kernel templates: for CPUs, and for GPUs as the CPU's emulation and the emulator of AMD GPUs run them."""

from __future__ import annotations

from tests.planted.bug import Bug

__all__ = ["KERNEL_BUGS"]

CPU = "native/include/tilewright/cpu"
GPU = "native/include/tilewright/gpu"
AMD = f"{GPU}/amd"
AMD_LOOPS = "tests/native/test_amd_pipelines.py"
EXPONENTS = f"{GPU}/gemm/exponents.hpp"
ROUNDS = f"{GPU}/gemm/exponent_loop.hpp"
ROUND_TESTS = "tests/gemm/test_exponent_scales.py::test_gfx950_takes_exponents_in_rounds"
NARROW_TESTS = "tests/gemm/test_narrow.py::test_amd_kernels_multiply_packed_values"
EXPONENT_TESTS = "tests/gemm/test_exponent_scales.py::test_amd_kernels_scale_every_block"

GRADIENTS = "tests/native/test_fmha_direct.py::test_gradients"

KERNEL_BUGS = [
    # CPUs
    Bug(
        "CPU: all items of a batch take the first one's operands",
        f"{CPU}/blocks/epilogue.hpp",
        "(const char*)operand.ptr + item * operand.batch_stride",
        "(const char*)operand.ptr + 0 * operand.batch_stride",
        "tests/native/test_gemm.py -k epilogues",
    ),
    Bug(
        "CPU: the last lanes of an operand are read from behind it",
        f"{CPU}/blocks/epilogue.hpp",
        "return load_f32_partial<E>(from, count);",
        "return load_f32_partial<E>(from, kLanes);",
        "tests/native/test_gemm.py -k epilogues",
    ),
    Bug(
        "CPU: slices of split-K are added from other rows",
        f"{CPU}/blocks/partials.hpp",
        "partials + (s * m + row + i) * n + j0 + j",
        "partials + (s * m + i) * n + j0 + j",
        "tests/native/test_gemm.py -k split_k",
    ),
    Bug(
        "CPU: blocks of packed operands are transposed the wrong way",
        f"{CPU}/blocks/pack.hpp",
        "t[i] = zip_low_64(low01, low23, all), t[i + 1] = zip_high_64(low01, low23, all);",
        "t[i] = zip_high_64(low01, low23, all), t[i + 1] = zip_low_64(low01, low23, all);",
        "tests/native/test_gemm.py -k products",
    ),
    Bug(
        "CPU: keys on pages that are not there are seen",
        f"{CPU}/fmha/softmax.hpp",
        "n > c.count || c.absent || !whole(p, rows, c)",
        "n > c.count || !whole(p, rows, c)",
        "tests/native/test_fmha_paged_cpu.py",
    ),
    Bug(
        "CPU: a convolution's dilation is missing",
        f"{CPU}/conv/gather.hpp",
        "at[0] * axes[0].tap_step * axes[0].image_stride + at[1] * axes[1].tap_step",
        "at[0] * axes[0].tap_step * axes[0].image_stride + at[1] * 1",
        "tests/native/test_conv_cpu.py",
    ),
    # GPUs, on the CPU
    Bug(
        "GPU: swizzled chunks of shared memory share a place",
        f"{GPU}/blocks/layout.hpp",
        "(chunk ^ key(of))",
        "(chunk | key(of))",
        "tests/native/test_gpu_layouts.py",
    ),
    Bug(
        "GPU: slices of k overlap",
        f"{GPU}/blocks/scheduler.hpp",
        "const int64_t begin = (int64_t)slice * per_slice,",
        "const int64_t begin = (int64_t)slice * each,",
        "tests/native/test_gpu_gemm.py -k split_k",
    ),
    Bug(
        "GPU: the batch's stride is missing",
        f"{GPU}/gemm/gemm.hpp",
        "(const char*)problem.b + job.item * problem.stride_b",
        "(const char*)problem.b + 0 * problem.stride_b",
        "tests/native/test_gpu_gemm.py -k epilogues",
    ),
    Bug(
        "GPU: a convolution's rows run on from one image to the next",
        f"{GPU}/conv/image.hpp",
        "s.n = rest;",
        "s.n = 0;",
        "tests/native/test_conv_gpu.py",
    ),
    Bug(
        "GPU: parts of the keys overlap",
        "native/include/tilewright/core/fmha_item.hpp",
        "start + (split + 1) * rows",
        "start + (split + 1) * rows + n0",
        "tests/native/test_fmha_gpu.py tests/native/test_fmha_split_cpu.py",
    ),
    Bug(
        "GPU: gradients take the place of K while other waves read it",
        f"{GPU}/fmha/backward/mma.hpp",
        "    barrier();  // K and V are not needed any more\n",
        "",
        "tests/native/test_fmha_backward_gpu.py -k parts",
    ),
    # AMD GPUs, in the emulator
    Bug(
        "AMD, waits: loads into LDS are not waited for",
        f"{AMD}/direct.hpp",
        'asm volatile("s_waitcnt vmcnt(0)" ::: "memory");',
        "",
        AMD_LOOPS,
    ),
    Bug(
        "AMD, waits: stores may be under way when a slice arrives",
        f"{AMD}/platform.hpp",
        "  wait_stores();\n",
        "",
        "tests/native/test_amd_gemm.py -k split_k",
    ),
    Bug(
        "AMD, fences: a slice arrives without releasing what it stored",
        f"{AMD}/platform.hpp",
        "__ATOMIC_ACQ_REL",
        "__ATOMIC_RELAXED",
        "tests/native/test_amd_gemm.py -k split_k",
    ),
    Bug(
        "AMD, fences: a barrier does not wait for LDS",
        f"{AMD}/mainloop.hpp",
        '__builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");\n  wait_shared();\n',
        "",
        "tests/native/test_amd_gemm.py -k epilogues",
    ),
    Bug(
        "AMD, fences: the tile is replaced while it is read",
        f"{AMD}/mainloop.hpp",
        "lds_barrier();  // the tile has been read\n",
        "\n",
        f"{AMD_LOOPS} tests/native/test_amd_gemm.py",
    ),
    Bug(
        "AMD, lanes: A takes its k from another group of lanes",
        f"{AMD}/atom.hpp",
        "i * kTileM, group, kk)",
        "i * kTileM, group ^ 1, kk)",
        AMD_LOOPS,
    ),
    Bug(
        "AMD, lanes: results in the wrong columns",
        f"{AMD}/atom.hpp",
        "return index / runs_per_tile * kTileN +",
        "return index / runs_per_tile * (kTileN - 4) +",
        "tests/native/test_amd_gemm.py -k epilogues",
    ),
    Bug(
        "AMD, strides: a wrong leading dimension",
        f"{AMD}/loader.hpp",
        "buffer, line * source.ld +",
        "buffer, line * (source.ld + 16) +",
        AMD_LOOPS,
    ),
    Bug(
        "AMD, tails: bytes beyond k are kept",
        f"{AMD}/loader.hpp",
        "return keep_bytes(shift_bytes(low, high, shift), bytes);",
        "return shift_bytes(low, high, shift);",
        AMD_LOOPS,
    ),
    Bug(
        "AMD, tails: a slice of k too few",
        f"{AMD}/mainloop.hpp",
        "min_of(ceil_div(a.k - step * Config::tile_k, Atom::depth), slices)",
        "min_of((a.k - step * Config::tile_k) / Atom::depth, slices)",
        AMD_LOOPS,
    ),
    Bug(
        "AMD, swizzles: chunks of other lines are in the same banks",
        f"{AMD}/layout.hpp",
        "return (uint32_t)(((line * chunks + chunk) ^ key(line)) * 16);",
        "return (uint32_t)(((line * chunks + chunk) ^ key(line / 2)) * 16);",
        f"tests/native/test_gpu_layouts.py tests/native/test_amd_fragments.py {AMD_LOOPS}",
    ),
    # exponents of blocks of 32
    Bug(
        "CPU: the least exponent stands for zero",
        "native/include/tilewright/core/block_scales.hpp",
        "x.bits == 0 ? 0x00400000u",
        "x.bits == 0 ? 0u",
        "tests/gemm/test_exponent_scales.py -k least_exponent",
    ),
    Bug(
        "AMD, lanes: exponents of a round are sorted for other lanes",
        ROUNDS,
        "g == 0 ? 0x06040200 : 0x07050301",
        "g == 1 ? 0x06040200 : 0x07050301",
        f"{ROUND_TESTS} -k words",
    ),
    Bug(
        "AMD, lanes: instructions take the first byte of a round's exponents",
        ROUNDS,
        "factors.b[j][turn / 4],\n                              turn % 4);",
        "factors.b[j][turn / 4],\n                              0);",
        f"{ROUND_TESTS} -k words",
    ),
    Bug(
        "AMD, waits: tiles are read before they have arrived, beside exponents in rounds",
        ROUNDS,
        "            wait_direct();\n            if (s == steps - 2)",
        "            if (s == steps - 2)",
        f"{ROUND_TESTS} -k words",
    ),
    Bug(
        "AMD, fences: a tile is overwritten while other waves read it, beside exponents in rounds",
        ROUNDS,
        "            lds_barrier();  // the other tile is complete; this one has been read",
        "            wait_shared();",
        f"{ROUND_TESTS} -k words",
    ),
    Bug(
        "AMD, tails: bytes of exponents beyond the last round are fetched",
        ROUNDS,
        "another ? step[j] : (1 - blocks) * step[j];",
        "another ? step[j] : step[j];",
        f"{ROUND_TESTS} -k bytes",
    ),
    Bug(
        "AMD, tails: what is left of k begins with the first exponents",
        ROUNDS,
        "k + done * blocks * 32, at.lane",
        "k, at.lane",
        f"{ROUND_TESTS} -k words",
    ),
    Bug(
        "AMD, lanes: exponents of the first block for all groups of lanes",
        EXPONENTS,
        "block = k / 32 + layout().group(lane);",
        "block = k / 32;",
        f"{EXPONENT_TESTS} -k direct",
    ),
    Bug(
        "AMD, lanes: all fragments of A have the first one's exponents",
        EXPONENTS,
        "i0 + i * lines + line_a",
        "i0 + line_a",
        f"{EXPONENT_TESTS} -k batch",
    ),
    Bug(
        "AMD, strides: exponents of B are as far apart as those of A",
        EXPONENTS,
        "step_b = b.col_stride;",
        "step_b = a.col_stride;",
        f"{EXPONENT_TESTS} -k direct",
    ),
    Bug(
        "AMD, strides: all items of a batch have the first one's exponents",
        EXPONENTS,
        "(const uint8_t*)b.ptr + item * b.batch_stride",
        "(const uint8_t*)b.ptr",
        f"{EXPONENT_TESTS} -k batch",
    ),
    Bug(
        "AMD, tails: exponents beyond the last block are read",
        EXPONENTS,
        "const int64_t here = min_of(block, last);",
        "const int64_t here = block;",
        f"{EXPONENT_TESTS} -k direct",
    ),
    Bug(
        "AMD, waits: exponents are a step late",
        EXPONENTS,
        "    block += groups;\n    fetch();",
        "    fetch();\n    block += groups;",
        f"{EXPONENT_TESTS} -k direct",
    ),
    Bug(
        "AMD, strides: slices of k begin with the first exponents",
        f"{GPU}/gemm/scaled.hpp",
        "i0, j0, range.begin, a, b, at);",
        "i0, j0, 0, a, b, at);",
        f"{EXPONENT_TESTS} -k slices",
    ),
    # operands of fewer than 8 bits
    Bug(
        "CPU, narrow: the rest of a value in the next byte is left out",
        f"{CPU}/gemm/narrow.hpp",
        "if (bit % 8 + kBits > 8) code |=",
        "if (bit % 8 + kBits > 16) code |=",
        "tests/gemm/test_narrow.py -k cpu_kernels",
    ),
    Bug(
        "AMD, narrow: subnormal values count twice",
        "native/include/tilewright/core/narrow.hpp",
        "kLeast = E::bias - 1 + kMantissa;",
        "kLeast = E::bias - 2 + kMantissa;",
        f"{NARROW_TESTS} -k fnuz",
    ),
    Bug(
        "AMD, narrow: a lane gives the values of another block",
        f"{AMD}/narrow.hpp",
        "const int byte = (kk * kGroups + group) * lane_bytes",
        "const int byte = (kk * kGroups + (group ^ 1)) * lane_bytes",
        f"{NARROW_TESTS} -k fp6",
    ),
    Bug(
        "AMD, narrow: 6-bit values in the other format",
        "native/include/tilewright/core/narrow.hpp",
        "struct bf6 : NarrowFloat<3, 2, 3> {};",
        "struct bf6 : NarrowFloat<3, 2, 2> {};",
        f"{NARROW_TESTS} -k fp6",
    ),
    Bug(
        "AMD, narrow: bytes of the next line count as values",
        f"{GPU}/gemm/narrow.hpp",
        "byte < min_of(left - w * 4, 4)",
        "byte < 4",
        f"{NARROW_TESTS} -k fnuz",
    ),
    # Gradients of attention on the matrix units of gfx942 and gfx950
    Bug(
        "AMD, masks: gradients take blocks that the diagonal cuts for whole ones",
        f"{AMD}/fmha/backward_blocks.hpp",
        "return ((i0 - range.whole) | (",
        "return (0 | (",
        f"{GRADIENTS} -k gfx942_causal",
    ),
    Bug(
        "AMD, masks: gradients take blocks that a window ends in for whole ones",
        f"{AMD}/fmha/backward_blocks.hpp",
        "| (range.whole_end - min_of(i0 + m0, (int)item.q_rows))) >> 31",
        "| 0) >> 31",
        f"{GRADIENTS} -k gfx942_window",
    ),
    Bug(
        "AMD, masks: gradients do not look at sinks before they take a block for a whole one",
        f"{AMD}/fmha/backward_blocks.hpp",
        "const int first = min_of(max_of(j0, sink), last);",
        "const int first = last;",
        f"{GRADIENTS} -k gfx942_sinks",
    ),
    Bug(
        "AMD, tails: gradients take keys that do not exist for some that do",
        f"{AMD}/fmha/backward_blocks.hpp",
        "    if (count == n0) {",
        "    if (count > 0) {",
        f"{GRADIENTS} -k gfx950_one_key",
    ),
    Bug(
        "AMD, strides: dQ of a block goes to the rows of the next one",
        f"{AMD}/fmha/backward.hpp",
        "locate(state.added, dq, i0);",
        "locate(state.added, dq, next_i0);",
        f"{GRADIENTS} -k gfx950_heads",
    ),
    Bug(
        "AMD, tails: dQ of rows that do not exist is added to the last one's",
        f"{AMD}/fmha/backward.hpp",
        "if (part == 7 && lane % 32 < added.rows) {",
        "if (part == 7 && added.rows > 0) {",
        f"{GRADIENTS} -k gfx950_heads",
    ),
    Bug(
        "AMD, fences: a wave reads the next queries before the others have brought them",
        f"{AMD}/fmha/backward.hpp",
        "      meet();\n      h = next_h",
        "      h = next_h",
        f"{GRADIENTS} -k gfx950_heads",
    ),
]
