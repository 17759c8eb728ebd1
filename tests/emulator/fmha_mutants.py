"""Bugs to plant in the project's attention kernels: edits of headers, each with a case of the native tests."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import test_fmha_append_gpu as append
import test_fmha_backward_gpu as backward
import test_fmha_decode_emulated as decode
import test_fmha_gpu as forward
import test_fmha_gpu_emulated as plans
from fmha_gpu_case import GpuFmhaCall, GpuFmhaKernel, HostKernels
from native_harness import INCLUDE

import tilewright_arch
from tilewright_kit.conformance.check_plugin import device_of

__all__ = ["FMHA_MUTANTS", "PLANNED", "FmhaMutant", "kernel_of", "planted", "run", "run_planned"]

PLANNED = ("decode", "planned")
"""Suites of kernels as a device's plans have them."""
DEVICE = dataclasses.replace(device_of(tilewright_arch.load("sm_90a")), units=4)


@dataclass(frozen=True)
class FmhaMutant:
    """``old`` becomes ``new``, wherever it stands, in header ``file``; ``case`` of ``suite`` meets it."""

    kind: str
    file: str
    old: str
    new: str
    case: str
    suite: str = "forward"


ITEM, FORWARD, APPEND = "core/fmha_item.hpp", "gpu/fmha/forward.hpp", "gpu/fmha/append.hpp"
COMBINE, DOT, CONVERT = "gpu/fmha/combine.hpp", "gpu/fmha/dot.hpp", "gpu/fmha/convert.hpp"
BACKWARD, DECODE, JOIN = "gpu/fmha/backward/backward.hpp", "gpu/fmha/decode.hpp", "gpu/fmha/splitkv_reduce.hpp"
PARAMS = "gpu/fmha/params.hpp"
BYTES, GRADIENT, MMA = "gpu/fmha/bytes.hpp", "gpu/fmha/backward/gradient.hpp", "gpu/fmha/backward/mma.hpp"

FMHA_MUTANTS = [
    # which keys a query sees
    FmhaMutant(
        "the diagonal begins in the wrong corner",
        ITEM,
        "item.off = args.bottom_right ? item.k_rows - item.q_rows : 0;",
        "item.off = 0;",
        "bottom_right",
    ),
    FmhaMutant("a block of keys too few", ITEM, "r1 + item.off + args.right", "r0 + item.off + args.right", "causal"),
    FmhaMutant(
        "sinks are out of sight",
        ITEM,
        "range.sink_last = fmha_min(args.sink_size, range.first);",
        "range.sink_last = 0;",
        "window_sinks",
    ),
    FmhaMutant(
        "all sequences have the first one's pages",
        ITEM,
        "int64_t at = b * args.table_stride + slot;",
        "int64_t at = slot;",
        "vllm",
    ),
    FmhaMutant(
        "parts of the keys overlap", ITEM, "start + (split + 1) * rows", "start + (split + 1) * rows + n0", "split"
    ),
    FmhaMutant(
        "too few queries are computed all the same",
        ITEM,
        "item.skip = item.q_rows < args.min_q;",
        "item.skip = false;",
        "skip_min",
    ),
    # forward
    FmhaMutant("other random numbers", "core/philox.hpp", "0xD2511F53", "0xD2511F55", "dropout"),
    FmhaMutant(
        "keys are replaced while others multiply", FORWARD, "barrier();\n      c0 = next;", "c0 = next;", "fp32"
    ),
    FmhaMutant(
        "pages of the block before",
        FORWARD,
        "look_up(item, b, key_head, next, columns);",
        "look_up(item, b, key_head, c0, columns);",
        "prefill",
    ),
    FmhaMutant(
        "results whose columns lie apart are stored side by side",
        PARAMS,
        "if (step == 1 && ((uintptr_t)to & 15) == 0)",
        "if (((uintptr_t)to & 15) == 0)",
        "columns",
    ),
    FmhaMutant(
        "packed heads all read the first one's queries",
        FORWARD,
        "p / g * args.q.row + p % g * args.q.head",
        "p / g * args.q.row",
        "packed",
    ),
    FmhaMutant(
        "all parts of a row weigh the same",
        COMBINE,
        "const float weight = exp_of(",
        "const float weight = 0.0f * exp_of(",
        "split_scores",
    ),
    # few rows and many keys
    FmhaMutant(
        "sums of other waves are lost",
        JOIN,
        "total += l[w] * m[w];",
        "total = l[w] * m[w];",
        "long",
        "decode",
    ),
    FmhaMutant(
        "the last workgroup but one adds the parts",
        JOIN,
        "+ 1 != parts) return;",
        "+ 2 != parts) return;",
        "more_parts_than_blocks",
        "decode",
    ),
    FmhaMutant(
        "tickets are left as they are",
        JOIN,
        "store_coherent(args.counters + kFmhaTickets + work.ticket, Words<1>{0});",
        "{}",
        "long",
        "decode",
    ),
    FmhaMutant(
        "all tiles have one ticket",
        JOIN,
        "kFmhaTickets + work.ticket",
        "kFmhaTickets",
        "more_parts_than_blocks",
        "decode",
    ),
    FmhaMutant(
        "parts weigh as much as the first of them",
        JOIN,
        "first % kWave + n",
        "0",
        "more_parts_than_blocks",
        "decode",
    ),
    FmhaMutant(
        "a sink counts in every part",
        JOIN,
        "if (alone && row.exists) most",
        "if (row.exists) most",
        "sinks",
        "decode",
    ),
    FmhaMutant(
        "parts skip the blocks that do not divide",
        JOIN,
        "from = start + part * each + min_of((uint32_t)part, more);",
        "from = start + part * each;",
        "more_parts_than_blocks",
        "decode",
    ),
    FmhaMutant(
        "all waves have the same keys",
        DECODE,
        "const int own = forward.thread / kWave * columns;",
        "const int own = 0;",
        "long",
        "decode",
    ),
    FmhaMutant(
        "one page for all keys of a wave",
        DECODE,
        "table + (j >> page_bits)",
        "table + (c0 >> page_bits)",
        "small_pages",
        "decode",
    ),
    FmhaMutant(
        "queries of sixteen columns keep their places",
        BYTES,
        "{w[0], w[2], w[4], w[6]}",
        "{w[0], w[1], w[2], w[3]}",
        "eight_bits",
        "decode",
    ),
    FmhaMutant(
        "values of even columns stand in odd ones",
        BYTES,
        "tile / 2 * 16 + lane % 4 * 4 + tile % 2",
        "tile / 2 * 16 + lane % 4 * 4 + 1 - tile % 2",
        "eight_bits_halves",
        "decode",
    ),
    # appending
    FmhaMutant("keys turn the other way", APPEND, "? sin : -sin", "? -sin : sin", "interleaved", "append"),
    FmhaMutant("halves are neighbours", APPEND, "kHalf ? c % pairs : c / 2", "c / 2", "half", "append"),
    FmhaMutant("old rows overwrite new ones", APPEND, "if (is_new(page, r)) continue;", "", "copied", "append"),
    FmhaMutant(
        "rows lie one too far",
        APPEND,
        "position = item.k_rows + n",
        "position = item.k_rows + n + 1",
        "batch",
        "append",
    ),
    FmhaMutant(
        "lengths do not advance",
        APPEND,
        "(int32_t)fmha_min(item.k_rows + item.q_rows, item.k_room)",
        "(int32_t)item.k_rows",
        "batch",
        "append",
    ),
    FmhaMutant(
        "rows of a chunk lie in one place",
        APPEND,
        "base + r / x * cache.chunk + c * cache.col + r % x",
        "base + r / x * cache.chunk + c * cache.col",
        "vectorized",
        "append",
    ),
    # gradients
    FmhaMutant(
        "delta has half of its columns",
        DOT,
        "mask > 0; mask /= 2) sum += shuffle_xor(sum, mask);",
        "mask > 1; mask /= 2) sum += shuffle_xor(sum, mask);",
        "fp32",
        "backward",
    ),
    FmhaMutant(
        "dQ is not scaled",
        CONVERT,
        "const float scale = (float)args.scale;",
        "const float scale = 1.0f;",
        "fp32",
        "backward",
    ),
    FmhaMutant(
        "a sink's gradient has the wrong sign", CONVERT, "sum -= exp2(", "sum += exp2(", "alibi_sinks", "backward"
    ),
    FmhaMutant("dQ of the last keys alone", BACKWARD, "load_global<float>(at) + x[e]", "x[e]", "fp32", "backward"),
    FmhaMutant("delta is left out", GRADIENT, "p * (step - delta)", "p * step", "fp32", "backward"),
    FmhaMutant(
        "dropped weights have gradients",
        GRADIENT,
        "x = Config::dropout && drops ? 0.0f : p;",
        "x = p;",
        "scores",
        "backward",
    ),
    FmhaMutant(
        "hidden queries have gradients",
        GRADIENT,
        "? 0 : fmha_max(j - item.off - args.right, 0);",
        "? 0 : 0;",
        "gradients",
        "planned",
    ),
    FmhaMutant(
        "dK of the last head of queries alone",
        MMA,
        "later = {hk * group, first}",
        "later = {hk * group + group - 1, first}",
        "gradients",
        "planned",
    ),
    FmhaMutant(
        "rows of dQ lie over each other",
        MMA,
        "add_global_four(to + row * hq + pair * 16, four)",
        "add_global_four(to + row / 2 * hq + pair * 16, four)",
        "gradients",
        "planned",
    ),
]


def kernel_of(mutant: FmhaMutant) -> GpuFmhaKernel:
    if mutant.suite == "append":
        return append.kernel_of(mutant.case)[0]
    return {"forward": forward, "backward": backward}[mutant.suite].CASES[mutant.case][0]


def planted(mutant: FmhaMutant, folder: Path) -> Path:
    """A copy of all headers with the bug. Raises ``ValueError`` if the place to change is not there (any more)."""
    include = folder / "include"
    shutil.copytree(INCLUDE, include)
    header = include / "tilewright" / mutant.file
    text = header.read_text()
    if mutant.old not in text:
        raise ValueError(f"{mutant.kind}: {mutant.file} has no {mutant.old!r}")
    header.write_text(text.replace(mutant.old, mutant.new))
    return include


def run_planned(mutant: FmhaMutant, folder: Path) -> None:
    """Builds, launches and compares a case of kernels that a device's plans have. Raises ``AssertionError``."""
    if mutant.suite == "decode":
        decode.test_waves_share_keys(mutant.case, DEVICE, folder)
    else:
        plans.test_planned_kernels_are_right(mutant.case, DEVICE, folder)


def run(mutant: FmhaMutant, kernels: HostKernels) -> None:
    """Launches and compares. Raises ``AssertionError``."""
    rng = np.random.default_rng(1)
    if mutant.suite == "append":
        append.run(kernels, *append.kernel_of(mutant.case), rng)
        return
    if mutant.suite == "backward":
        call = backward.Gradients(*backward.CASES[mutant.case], rng)
        call.run(kernels)
        call.check_gradients()
        return
    own = GpuFmhaCall(*forward.CASES[mutant.case], rng)
    own.run(kernels)
    own.check()
