"""Attention kernels for CPUs on every level that this machine runs, against float64, between guard pages: every feature
alone and with others, odd sizes, NaN wherever nothing may be read.

Values are drawn anew in every run; the seed is shown when a test fails.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fmha_native_case import FmhaCall, FmhaKernel, FmhaShape
from native_harness import LEVELS, Library, Runtime
from tilewright_fmha.masks import Mask

BF16 = {"q": "bf16", "kv": "bf16", "o": "bf16", "register": (6, 32, 2)}
FP16 = {"q": "fp16", "kv": "fp16", "o": "fp16"}
PLAIN = FmhaKernel()
KERNELS: dict[str, FmhaKernel] = {
    "plain": PLAIN,
    "bf16": FmhaKernel(**BF16),  # type: ignore[arg-type]
    "fp16": FmhaKernel(**FP16),  # type: ignore[arg-type]
    "causal": PLAIN.replace(mask="causal"),
    "window": PLAIN.replace(mask="window", token_sinks=True),
}


@pytest.fixture(scope="session")
def library(build_folder: Path, level: str) -> Library:
    return Library(build_folder, list(KERNELS.values()), level, header="fmha_forward.hpp")


def run(library: Library, runtime: Runtime, kernel: FmhaKernel, shape: FmhaShape, rng: np.random.Generator) -> FmhaCall:
    call = FmhaCall(kernel, shape, rng, at_end=bool(rng.integers(2)))
    call.launch(library, runtime, int(rng.integers(1, 3)))
    call.check()
    return call


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("name", ["plain", "bf16", "fp16"])
def test_whole_sequences(library: Library, runtime: Runtime, name: str, layout: str, rng: np.random.Generator) -> None:
    for seq in ((1, 1), (3, 65), (65, 3), (127, 200), (17, 64), (200, 127)):
        for hdim in ((64, 64), (40, 64), (64, 40), (8, 24)):
            run(library, runtime, KERNELS[name], FmhaShape(seq=seq, hdim=hdim, layout=layout), rng)


@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (5, 1)])
@pytest.mark.parametrize("seq", [(1, 65), (64, 17), (127, 130), (130, 200)])
def test_masks(library: Library, runtime: Runtime, seq: tuple[int, int], heads: tuple[int, int],
               rng: np.random.Generator) -> None:  # fmt: skip
    for bottom_right in (False, True):
        shape = FmhaShape(seq=seq, heads=heads)
        run(library, runtime, KERNELS["causal"], shape.replace(mask=Mask(-1, 0, bottom_right)), rng)
        for left, right, sink in ((0, 0, 0), (5, 0, 3), (70, 9, 0), (-1, 20, 0), (40, -1, 70), (3, -1, 0)):
            run(library, runtime, KERNELS["window"], shape.replace(mask=Mask(left, right, bottom_right, sink)), rng)
