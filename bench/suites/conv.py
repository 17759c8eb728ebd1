"""Grouped convolution on a CPU against PyTorch (oneDNN), both channels-last, all three directions.

The kernel is the one that the server would take, run by an engine in this very process. All contenders of a layer take
turns on the same memory. Figures are of the fastest round, since other work on the machine only ever adds time; ratios
are ours over the peer's in speed: above 1 we are faster. With one thread it is the processor's time that counts, of
both, so that ratios hold on a busy machine too; with several it is the clock's. Every result is compared with the
peer's before it is timed, and for one image of each kind of layer both are compared with float64.
"""

from __future__ import annotations

import dataclasses
import re
import sys
import time
from collections.abc import Iterator
from typing import Any

from common import conv_peer, local, peers, timing
from common.conv_peer import DIRECTIONS, Convolution, kind_of

from suites.base import Options, Table, main
from tilewright_grouped_conv.commands.cases import ConvCase
from tilewright_grouped_conv.commands.family import CONV
from tilewright_kit.types.errors import TilewrightError

NETWORKS = {"resnet50": "ResNet-50", "resnext50": "ResNeXt-50", "mobilenet_v2": "MobileNetV2", "conv3d": "3D"}
"""Lists of the family of convolutions. Each layer comes once, however often the network has it."""
CHECKED = {
    "resnet50": ("first layer", "dense"),
    "resnext50": ("grouped",),
    "mobilenet_v2": ("depthwise", "pointwise"),
    "conv3d": ("3D",),
}
"""The kinds of layers of each network in a check: the first of each, every kind once, each in one direction."""
IMAGES = {"pointwise": 16, "3D": 2}
"""Images of a layer, by kind, where 8 are not it. With fewer of these PyTorch would leave oneDNN on one thread, for
code of its own that takes two to ten times as long.
"""
DTYPES = ("fp32", "bf16")
COLUMNS = ("N", "layer", "dtype", *(text for label in DIRECTIONS.values() for text in (label, "ratio")))
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
"""Relative difference, in norm, beyond which one of the two computed something else."""
ODD = (
    {"n": 2, "c": 20, "k": 28, "size": "19x23", "filter": "3x5", "stride": "2x1", "padding": "1x2", "groups": 4},
    {"n": 2, "c": 15, "k": 10, "size": "17x13", "filter": "3", "padding": "2", "dilation": "2", "groups": 5},
    {"n": 1, "c": 9, "k": 9, "size": "31x29", "filter": "2", "stride": "3"},
    {"n": 3, "c": 7, "k": 11, "size": "41", "filter": "5", "padding": "2"},
)
"""For the table of errors: nothing here is a multiple of anything."""


SAMPLED = 2
"""Layers of each kind of each network in a sample: the first, and the one in the middle of the others."""


def cases(name: str, options: Options) -> Iterator[ConvCase]:
    """The layers of a network, of a check those in ``CHECKED``, of a sample ``SAMPLED`` of each kind."""
    kinds: set[str] = set()
    if options.sample:
        by_kind: dict[str, list[ConvCase]] = {}
        for case in cases(name, dataclasses.replace(options, sample=False)):
            by_kind.setdefault(kind_of(case), []).append(case)
        for found in by_kind.values():
            yield from (found[0], *found[1:][len(found[1:]) // 2 :][: SAMPLED - 1])
        return
    for row in CONV.named[name]:
        case = CONV.from_record(row, name)
        case = dataclasses.replace(case, n=1 if options.quick else IMAGES.get(kind_of(case), 8))
        if options.quick and (kind_of(case) in kinds or kind_of(case) not in CHECKED[name]):
            continue
        if options.quick:  # a layer's length over four
            case = dataclasses.replace(case, size="x".join(str(int(side) // 4) for side in case.size.split("x")))
        kinds.add(kind_of(case))
        yield case


def title(text: str, options: Options) -> str:
    return f"{text}, {options.threads} thread{'s' if options.threads > 1 else ''}"


class Ratios:
    """Ratios by what they are of."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, str, str], list[float]] = {}

    def add(self, group: str, dtype: str, direction: str, ratio: float) -> None:
        self.found.setdefault((group, dtype, direction), []).append(ratio)

    def table(self, name: str) -> Table:
        """A row for each group and type, with the three directions and all of them."""
        heads = list(DIRECTIONS.values())
        table = Table(name, ["", "dtype", "layers", *heads, "all", "least"])
        for group, dtype in dict.fromkeys(key[:2] for key in self.found):
            lists = [self.found.get((group, dtype, direction), []) for direction in DIRECTIONS]
            every = [ratio for values in lists for ratio in values]
            means = [timing.geomean(values) if values else None for values in lists]
            table.rows.append(
                [group, dtype, max(map(len, lists)), *means, timing.geomean(every), min(every)],
            )
        return table


def compare(here: local.Local, torch: Any, options: Options) -> list[Table]:
    by_network, by_kind = Ratios(), Ratios()
    tables = []
    for name, label in NETWORKS.items():
        table = Table(title(f"Convolution: {label}", options) + " (ours in GFLOP/s, and ours / PyTorch)", list(COLUMNS))
        for place, case in enumerate(cases(name, options)):
            for dtype in DTYPES[:1] if options.quick else DTYPES:
                row: list[Any] = [case.n, geometry(case), dtype]
                for index, direction in enumerate(DIRECTIONS):
                    if options.quick and index != place % len(DIRECTIONS):
                        row += [None, None]
                        continue
                    asked = dataclasses.replace(case, dtype=dtype, direction=direction)
                    try:
                        rate, ratio, kernel = one(here, torch, asked, options)
                    except (TilewrightError, ValueError) as error:
                        table.notes.append(f"- {asked.label}: {error}")
                        row += [None, None]
                        continue
                    row += [rate, ratio]
                    by_network.add(label, dtype, direction, ratio)
                    by_kind.add(kind_of(case), dtype, direction, ratio)
                    print(f"{asked.label}: {rate:.0f} GFLOP/s, {ratio:.2f}, {kernel}", file=sys.stderr, flush=True)
                table.rows.append(row)
        tables.append(table)
    return [
        by_network.table(title("Convolution against PyTorch by network, geometric means of ours / PyTorch", options)),
        by_kind.table(title("The same layers by kind", options)),
        *tables,
    ]


def one(here: local.Local, torch: Any, case: ConvCase, options: Options) -> tuple[float, float, str]:
    """Our GFLOP/s, the ratio to the peer's, and our kernel."""
    item = Convolution.of(here, case)
    ours, theirs = item.ours(here), conv_peer.peer(torch, item)
    ours.timed(1)
    off = conv_peer.relative(tensor(torch, item), theirs())
    if not off < TOLERANCE[case.dtype]:
        raise ValueError(f"{ours.kernel}: the result is off by {off:.1e}")
    calls = {"ours": ours.timed, "PyTorch": timing.wall(theirs)}
    if options.threads == 1:
        calls = {name: processor_time(call) for name, call in calls.items()}
        measured = timing.alternate(calls, rounds=5, round_s=0.01, settle_s=0.0)
    else:
        measured = timing.alternate(calls, rounds=3 if options.quick else 7, round_s=0.02)
    mine = measured["ours"].best
    return case.flops / mine / 1e9, measured["PyTorch"].best / mine, brief(ours.kernel)


def processor_time(call: timing.Timed) -> timing.Timed:
    """The time that this thread had a processor for: what others take meanwhile does not count."""

    def timed(repeat: int) -> float:
        begun = time.thread_time()
        call(repeat)
        return time.thread_time() - begun

    return timed


def tensor(torch: Any, item: Convolution) -> Any:
    """Our result, as PyTorch sees it."""
    array = item.arrays[item.output]
    return torch.from_numpy(array.astype("float32"))


def geometry(case: ConvCase) -> str:
    text = f"{case.c}, {case.k}, {case.size}, {case.filter}"
    text += f", stride {case.stride}" if case.stride != "1" else ""
    return text + (f", {case.groups} groups" if case.groups > 1 else "")


def brief(kernels: str) -> str:
    """Distinctions of the main kernel of a plan: pipeline, tile, wave, warp tile and all that follows."""
    name = next((name for name in kernels.split(", ") if name.startswith("grouped_conv")), kernels)
    pipeline, _, _, *others = re.split(r"_[123]d_", name)[-1].split("_")
    more = kernels.count(", ")
    return " ".join([pipeline, *others]) + (f" (+ {more})" if more else "")


def errors(here: local.Local, torch: Any, options: Options) -> Table:
    """Errors against float64, ours over the peer's."""
    heads = [text for label in DIRECTIONS.values() for text in (label, "ratio")]
    table = Table(
        "Convolution: our relative error against float64, and its ratio to PyTorch's", ["layer", "dtype", *heads]
    )
    worst: dict[str, float] = {}
    firsts: dict[str, ConvCase] = {}
    for name in () if options.quick else NETWORKS:
        for case in cases(name, options):
            firsts.setdefault(kind_of(case), dataclasses.replace(case, n=1))
    odd = [CONV.from_record(row, "odd") for row in ODD]
    for case in (*firsts.values(), *odd[: 1 if options.quick else None]):
        for dtype in DTYPES[1:] if options.quick else DTYPES:
            row: list[Any] = [geometry(case), dtype]
            for direction in DIRECTIONS:
                asked = dataclasses.replace(case, dtype=dtype, direction=direction)
                item = Convolution.of(here, asked)
                try:
                    item.ours(here).timed(1)
                except TilewrightError as error:
                    table.notes.append(f"- {asked.label}: {error}")
                    row += [None, None]
                    continue
                want = conv_peer.truth(torch, item)
                mine = conv_peer.relative(tensor(torch, item), want)
                theirs = conv_peer.relative(conv_peer.peer(torch, item)(), want)
                ratio = mine / theirs if theirs else float(mine > 0)
                worst[dtype] = max(worst.get(dtype, 0.0), ratio)
                row += [f"{mine:.1e}", ratio]
            table.rows.append(row)
    table.notes += [f"- {dtype}: at most {ratio:.2f} times the error of PyTorch" for dtype, ratio in worst.items()]
    return table


def measure(options: Options) -> list[Table]:
    torch = peers.torch()
    if torch is None:
        return [Table("Convolution", [""], [["PyTorch is not installed: there is nothing to compare with"]])]
    peers.set_threads(options.threads)
    with local.Local(options.threads) as here, torch.inference_mode():
        tables = compare(here, torch, options)
        # Errors are the same for any number of threads.
        return tables if options.sample else [*tables, errors(here, torch, options)]


if __name__ == "__main__":
    raise SystemExit(main(measure))
