"""Which kernels of grouped and depthwise convolutions ``cuda_groups.py`` tries first, and in which order; without a GPU
it lists and builds them.

    python bench/lab/group_tries.py                  # every layer's kernels, and those that today's rules refuse
    python bench/lab/group_tries.py --build          # compiles them all, as the sweep will

Entries read ``[L|B]channels/waves/repeats x rows x run[/slices]``; L is the form of ``merged_lanes.hpp``, B that of
``merged/bulk.hpp``, whose first number of pixels is that of its stages. What has been measured before stands among
them, so that a sweep tells whether something else is faster.
"""

from __future__ import annotations

import argparse
import csv
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tilewright_arch
from tilewright_grouped_conv.commands.cases import DIRECTIONS, ConvCase
from tilewright_grouped_conv.commands.family import CONV
from tilewright_grouped_conv.config.config import BULK_PIPELINE, DIRECT_PIPELINE, ConvConfig
from tilewright_grouped_conv.pipelines.candidates import conv_candidates, conv_mismatches
from tilewright_grouped_conv.rules.rulebook import RULES
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.loading.loader import PluginManager
from tilewright_kit.types.vocabulary import Epilogue
from tilewright_server.engine.call import Call
from tilewright_server.engine.engine import Engine
from tilewright_server.engine.types import EngineOptions

__all__ = ["DTYPES", "LIMIT", "asked", "layers", "offered"]

SHAPES = Path(__file__).resolve().parents[1] / "shapes" / "conv.csv"
DTYPES = ("fp16", "bf16")
LIMIT = 12
_ENTRY = re.compile(r"([LB]?)(\d+)/(\d+)/(\d+)x(\d+)x(\d+)(?:/(\d+))?")

# By channels; forward also serves backward data without a stride.
_FORWARD = {
    128: "B64/4/4x8x8 B64/4/3x8x8 B64/4/3x14x8 B64/4/4x4x8 B64/4/2x8x8 B64/4/5x8x8 B64/4/2x14x8 B64/8/3x8x16 "
    "B64/4/1x14x8 L64/4/4x8x8 L128/8/4x8x8 L64/4/5x8x8 B32/2/4x14x8 B64/4/3x4x8 B32/2/1x14x8 B32/2/3x14x8 "
    "B32/2/4x8x8 L64/2/4x8x8 L128/8/6x8x8 L64/4/2x8x8 L64/4/2x8x16 L32/2/5x8x8 L32/2/4x8x8 L64/4/1x14x16 "
    "L128/8/3x8x8 L64/4/3x8x8",
    256: "B32/2/1x8x8 B32/2/2x8x8 B32/2/1x4x8 B64/4/4x4x8 B64/4/1x4x8 B32/2/1x4x16 B32/2/1x14x8 B64/4/2x4x8 "
    "B64/8/1x4x16 L64/4/3x4x8 L32/2/3x4x8 L64/4/2x8x8 B64/4/1x14x8 B32/4/1x4x16 B64/4/2x4x16 B32/4/3x4x16 "
    "B32/4/2x8x16 L64/4/2x4x8 L64/4/1x4x8 L128/8/1x4x16 L64/4/1x4x16 L32/2/1x4x16 L64/4/1x2x16 L128/8/2x4x8 "
    "L32/2/2x4x8 L64/4/2x4x16 L32/2/1x14x8",
    96: "B32/2/4x14x8 B32/2/3x14x8 B32/2/1x8x8 B32/2/4x8x8 B32/2/6x8x8 B32/2/1x14x8 B32/2/5x8x8 B32/2/3x8x8 "
    "B64/4/4x8x8 L96/6/3x8x8 L96/6/4x8x8 L32/2/3x8x8 B32/4/3x8x16 B32/8/3x4x56 B64/4/5x8x8 B32/2/2x8x8 "
    "B32/14/3x4x56 L48/3/3x8x8 L48/3/4x8x8 L32/2/4x8x8 L96/3/4x8x8 L96/6/2x8x8 L48/3/5x8x8 L32/4/1x14x56 "
    "L96/6/2x8x16 96/6/4x8x8",
    512: "B16/2/1x14x16 B32/2/1x14x8 B32/4/1x14x16 B32/4/2x14x16 B64/4/1x14x8 B64/8/1x14x16 B32/2/1x14x16 "
    "B32/4/2x4x16 B16/2/2x14x16 L32/2/2x14x16 L64/4/1x14x16 L32/2/1x14x16 B64/8/2x14x16 B64/8/2x8x16 "
    "B32/2/2x14x8 B64/4/1x14x16 B32/4/3x4x16 L64/4/4x4x16 L16/1/1x14x16 L32/4/1x14x16 L32/2/4x4x16 "
    "L64/4/3x4x16 L64/4/2x4x16",
    1024: "L32/2/4x8x8 L64/4/4x8x8 L32/2/2x8x8 L64/4/2x8x8 L32/2/3x8x8 L128/8/2x8x8 L64/4/3x8x8 B64/4/4x8x8 "
    "B32/4/3x8x8 B64/4/1x8x8 B64/8/3x8x8 B32/2/4x8x8 B64/4/3x4x8 B64/4/2x8x8 B64/4/2x4x8 B32/2/3x8x8 "
    "B32/2/3x4x8 L32/2/6x8x8",
    144: "B32/2/2x4x8 B32/2/3x4x8 B64/4/2x8x8 B32/2/3x8x8 B32/8/2x4x32 B64/4/1x4x8 B64/4/3x4x8 B32/8/3x2x32 "
    "B32/4/2x4x32 L48/3/4x4x8 L48/3/4x4x16 L144/9/1x4x8 B32/2/4x4x8 B64/4/2x4x8 B32/4/3x2x32 B32/2/1x4x8 "
    "B32/2/2x14x8 L48/3/1x4x8 L48/3/2x4x8 L48/3/3x4x8 L48/3/1x4x16 L144/9/2x4x8 L144/9/1x2x16 L16/1/4x4x8 "
    "L48/3/2x4x16 L16/1/2x4x16",
    384: "B32/2/1x8x8 B32/2/1x14x8 B16/1/1x14x8 B32/2/2x14x8 B16/2/1x14x16 B64/4/1x8x8 B32/4/1x8x16 B16/2/2x14x16 "
    "B32/4/2x14x16 L32/2/1x8x16 L64/4/2x4x16 L96/6/1x14x16 B64/4/1x14x8 B32/4/2x8x16 B32/4/3x4x16 "
    "B32/4/1x14x16 B32/4/2x4x16 L32/2/1x14x16 L64/4/1x8x16 L96/6/1x14x8 L32/4/1x14x16 L64/4/1x14x16 "
    "L64/4/1x14x8 L16/1/1x8x16 L32/2/2x8x8 L64/4/2x8x8 L64/4/2x8x16 L32/2/1x8x8",
    960: "B32/2/1x8x8 B32/2/2x8x8 B16/1/1x8x8 B64/4/1x8x8 B64/4/3x8x8 B32/2/3x4x8 B64/4/2x8x8 B16/1/2x8x8 "
    "B32/2/3x8x8 L32/2/1x8x8 L48/3/1x8x8 L32/2/2x8x8 B32/4/3x8x8 B64/4/3x4x8 B32/4/3x4x8 B32/2/1x4x8 "
    "B64/8/3x8x8 L64/4/1x8x8 L96/6/1x8x8 L48/3/2x8x8 L64/4/2x8x8 L32/2/3x8x8 L96/6/2x8x8 L96/6/1x4x8",
}
_STRIDED_DATA = {
    256: "L64/2/1x14x16 L32/2/1x14x16 L32/2/4x8x8 L32/2/2x8x16 L16/1/1x14x16 L64/4/2x8x8 L64/4/4x8x8 L64/4/2x8x16 "
    "L32/1/1x8x16 L64/4/1x14x16",
    144: "L48/3/1x14x16 L48/3/1x8x32 L48/3/4x8x16 L48/3/2x8x16 L48/3/4x8x8 L48/6/1x14x32 L48/3/1x8x16 L144/9/2x8x8 "
    "L48/3/1x28x8 L16/1/1x14x32",
}
_WEIGHT = {
    128: "64/4/1x16x8/255 64/4/2x8x8/255 64/4/2x16x8/132 64/4/3x8x8/132 32/2/2x16x16/66 32/2/1x16x16/66 "
    "32/2/2x14x8/132 32/2/2x14x8/66 64/4/2x8x8/132 32/2/3x8x8/132 32/2/2x16x8/132 16/1/2x14x8/66",
    256: "64/4/1x8x8/33 64/4/2x4x8/66 32/2/2x8x8/33 64/4/2x8x8/33 64/4/1x4x8/66 32/4/2x8x8/33 32/4/1x14x8/33 "
    "32/2/2x14x8/33 64/4/2x4x16/33 64/4/3x4x8/33 32/2/3x4x8/66 32/2/2x4x16/33",
    96: "96/6/1x8x8/255 96/6/2x8x8/255 96/6/2x8x8/132 32/2/2x8x8/176 48/3/2x8x8/132 48/3/3x8x8/132 32/2/1x16x16/88 "
    "32/2/2x16x16/44 48/3/2x14x8/132 32/2/3x8x8/176 32/2/2x14x8/88 32/2/1x4x16/176",
    512: "64/8/1x14x8/16 32/4/2x14x16/16 64/8/2x14x8/16 32/4/2x14x16/8 32/2/2x14x16/16 64/4/2x14x8/16 32/4/1x14x16/16 "
    "32/2/3x14x8/16 64/4/2x14x16/8 64/8/3x14x8/16 32/2/2x14x16/8 64/8/2x14x16/16",
    1024: "32/4/1x8x8/4 32/4/4x8x8/4 32/4/7x8x8/4 32/2/4x8x8/4 32/2/3x8x8/8 64/8/4x8x8/8 64/4/4x8x8/8 32/4/3x8x8/8 "
    "32/4/3x8x8/4 64/8/4x8x8/4 32/4/4x8x8/2 32/2/7x8x8/4",
    144: "48/3/1x4x16/88 48/3/2x4x16/88 16/1/2x4x16/58 48/3/2x4x8/88 16/1/2x14x8/29 48/3/3x4x8/88 48/3/2x8x8/44 "
    "16/1/3x4x16/58 16/1/1x4x16/58 16/1/1x14x8/29 48/3/2x4x16/44 144/9/2x4x8/132",
    384: "32/2/1x16x8/22 32/2/2x16x8/22 16/1/2x14x8/22 16/1/1x14x8/22 32/2/2x14x8/22 16/1/2x4x16/22 32/2/2x14x16/22 "
    "32/2/3x14x8/22 32/2/2x14x16/11 64/4/2x14x8/44 32/2/2x14x16/16 16/1/2x14x16/11",
    960: "32/2/1x8x8/17 32/2/1x8x8/16 32/2/2x8x8/11 32/2/3x8x8/8 48/3/1x8x8/16 32/2/2x8x8/8 96/6/1x8x8/16 16/1/3x8x8/8 "
    "96/6/3x8x8/16 32/2/3x8x8/4 48/3/3x8x8/8 16/1/1x8x8/8",
}


def layers() -> list[ConvCase]:
    """The suite's layers of groups, in the order of its list: the goal names the first three."""
    with SHAPES.open() as file:
        rows = [CONV.from_record(row, f"{SHAPES.name}:{line}") for line, row in enumerate(csv.DictReader(file), 2)]
    return [case for case in rows if case.groups > 1]


def asked(dtypes: Sequence[str], directions: Sequence[str]) -> list[ConvCase]:
    """Every layer with every type and direction; those of one type and direction stand together."""
    return [
        replace(case, dtype=dtype, direction=direction)
        for dtype in dtypes
        for direction in directions
        for case in layers()
    ]


def offered(case: ConvCase, operation: Any, device: DeviceInfo, limit: int) -> tuple[list[ConvConfig], list[str]]:
    """Up to ``limit`` kernels of a case, what is tried first ahead of the model's favourites; and tries that the rules
    refuse.
    """
    problem = operation.parse(case.request())
    candidates = conv_candidates(problem, device)
    base = next((config for config in candidates if config.num_groups_to_merge > 1), None)
    found, refused = [], []
    for text, config in _tries(case, base) if base is not None else ():
        wrong = [*RULES.check(config, device.arch), *conv_mismatches(problem, config, device)]
        if wrong:
            refused.append(f"{text}: {wrong[0].reason}")
        else:
            found.append(config)
    return list(dict.fromkeys([*found, *candidates]))[:limit], refused


def _tries(case: ConvCase, base: ConvConfig) -> Iterator[tuple[str, ConvConfig]]:
    table = _WEIGHT if case.direction == "bwd_weight" else _FORWARD
    if case.direction == "bwd_data" and case.stride != "1":
        table = _STRIDED_DATA
    for text in table.get(case.c, "").split():
        match = _ENTRY.fullmatch(text)
        assert match is not None, text
        channels, waves, repeats, rows, run, slices = (int(value or 1) for value in match.groups()[1:])
        yield (
            text,
            base.replace(
                channel_tile=channels,
                wave=(waves, 1, 1),
                pixel_tile=(repeats, rows, run),
                epilogue=Epilogue.CSHUFFLE if match[1] else Epilogue.DEFAULT,
                pipeline=BULK_PIPELINE if match[1] == "B" else DIRECT_PIPELINE,
                **({"split_k": slices} if case.direction == "bwd_weight" else {}),
            ),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--directions", nargs="+", default=list(DIRECTIONS), choices=list(DIRECTIONS))
    parser.add_argument("--limit", type=int, default=LIMIT, help="kernels of each layer")
    parser.add_argument("--build", action="store_true", help="compile them")
    given = parser.parse_args()
    device = DeviceInfo("cuda:0", "cuda", "NVIDIA H200", tilewright_arch.load("sm_90a"), 132, 141 << 30)
    plugins = PluginManager()
    plugins.load_entry_points()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(EngineOptions(cache_dir=Path(folder) / "cache", default_device="cpu:0"), plugins)
        kernels: dict[ConvConfig, None] = {}
        for case in asked(given.dtypes, given.directions):
            found, refused = offered(case, engine.operations[case.request().operation], device, given.limit)
            kernels |= dict.fromkeys(found)
            print(f"{case.label}: {len(found)} kernels", *(f"\n  refused: {text}" for text in refused))
        print(f"{len(kernels)} kernels")
        if given.build:
            start = time.perf_counter()
            results = engine.build(list(kernels), device.arch, lambda _: None, Call())
            for config, result in zip(kernels, results, strict=True):
                if result.error is not None:
                    print(f"not built: {config.name}: {result.error}")
            print(f"built in {time.perf_counter() - start:.0f} s")
        engine.close()


if __name__ == "__main__":
    main()
