"""The options of `tilewright kernels generate` that choose among kernels of convolution, as the seeds' generator has
them. Here they are only gathered: what they mean is the operation's ``select_set`` to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from tilewright_arch import ArchSpec
    from tilewright_kit.config.kernel_config import KernelConfig
    from tilewright_kit.contract.operation import Operation

__all__ = ["OPTIONS", "RULE_SETS", "chosen_options", "operation_of", "select"]

RULE_SETS = ("default", "full", "full-tests", "profiler", "tests", "tiny")
_PANEL = "Kernels of convolution"


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_PANEL, show_default=False, **more)


def _words(words: tuple[str, ...]) -> Any:
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


RuleSet = Annotated[
    str,
    _option(f"Kernels to choose from: {', '.join(RULE_SETS)}.", "--rule-set", "-r", autocompletion=_words(RULE_SETS)),
]
Variant = Annotated[
    str, _option("Direction: fwd, bwd_data, bwd_weight, or another of its spellings.", "--variant", "-v")
]
Ndim = Annotated[int | None, _option("Spatial axes: 1, 2 or 3.", "--ndim", "-n")]
TileM = Annotated[int | None, _option("Only tiles of so many rows.")]
TileN = Annotated[int | None, _option("Only tiles of so many columns.")]
TileK = Annotated[int | None, _option("Only tiles of that depth.")]
WarpM = Annotated[int | None, _option("Only kernels with so many waves along M.")]
WarpN = Annotated[int | None, _option("Likewise along N.")]
WarpK = Annotated[int | None, _option("Likewise along K.")]
WarpTileM = Annotated[int | None, _option("Only matrix instructions of so many rows.")]
WarpTileN = Annotated[int | None, _option("Only matrix instructions of so many columns.")]
WarpTileK = Annotated[int | None, _option("Only matrix instructions of that depth.")]
Pipeline = Annotated[str, _option("Only this pipeline.")]
Scheduler = Annotated[str, _option("Only this scheduler: intrawave or interwave.")]
Epilogue = Annotated[str, _option("Only this epilogue: default or cshuffle.")]
PadM = Annotated[bool | None, _option("Only kernels that take M that their tile does not divide, or that do not.")]
PadN = Annotated[bool | None, _option("Likewise N.")]
PadK = Annotated[bool | None, _option("Likewise K.")]
VectorA = Annotated[int | None, _option("Only accesses to A of so many elements.")]
VectorB = Annotated[int | None, _option("Likewise to B.")]
VectorC = Annotated[int | None, _option("Likewise to C.")]
WaveGroups = Annotated[int | None, _option("Only this number of wave groups.", "--num-wave-groups")]
MergedGroups = Annotated[int | None, _option("Only kernels that merge so many groups.", "--num-groups-to-merge")]
DoubleBuffer = Annotated[
    bool | None,
    _option(
        "Only kernels with, or without, two buffers in shared memory.", "--double-smem-buffer/--single-smem-buffer"
    ),
]
SplitImage = Annotated[bool | None, _option("Only kernels that split large images, or do not.")]
TwoStage = Annotated[bool | None, _option("Only kernels with, or without, a second stage that converts sums.")]
ExplicitGemm = Annotated[bool | None, _option("Only pointwise kernels that read the image as a matrix, or others.")]
StreamK = Annotated[
    bool | None, _option("Only kernels with, or without, Stream-K.", "--streamk-enabled/--streamk-disabled")
]
StreamKReduction = Annotated[str, _option("Only this way to add up: tree or linear.", "--streamk-reduction-strategy")]
StreamKPersistent = Annotated[bool | None, _option("Only persistent Stream-K kernels, or others.")]

OPTIONS = (
    "rule_set", "ndim", "tile_m", "tile_n", "tile_k", "warp_m", "warp_n", "warp_k", "warp_tile_m", "warp_tile_n",
    "warp_tile_k", "pipeline", "scheduler", "epilogue", "pad_m", "pad_n", "pad_k", "vector_a", "vector_b", "vector_c",
    "num_wave_groups", "num_groups_to_merge", "double_smem_buffer", "split_image", "two_stage", "explicit_gemm",
    "streamk_enabled", "streamk_reduction_strategy", "streamk_persistent",
)  # fmt: skip
"""Those above but for the variant, by the names of the command's arguments."""


def chosen_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """What of them the user gave."""
    found = {name: given[name] for name in OPTIONS if given[name] not in (None, "")}
    if "streamk_reduction_strategy" in found:
        found["streamk_reduction_strategy"] = found["streamk_reduction_strategy"].lower()
    return found


def operation_of(name: str, variant: str) -> str:
    """The operation that a variant of another means. Raises ``NotFoundError``."""
    from tilewright_kit.contract.abilities import HasVariants
    from tilewright_kit.types.errors import NotFoundError
    from tilewright_tools.cli.kernels.generate import load_operation

    if not variant:
        return name
    operation = load_operation(name if name != "gemm" else "conv")
    variants: Mapping[str, str] = operation.variants if isinstance(operation, HasVariants) else {}
    if variant not in variants:
        raise NotFoundError(
            f"{name} has no variant {variant!r}",
            field="variant",
            value=variant,
            rule="variant_known",
            fix=f"use one of {', '.join(variants) or 'other operations'}",
        )
    return variants[variant]


def select(operation: Operation[Any, Any], arch: ArchSpec, options: Mapping[str, Any]) -> list[KernelConfig]:
    """The kernels that the options select. Raises what ``select_set`` raises, ``InvalidArgumentError`` for options that
    the operation has not.
    """
    from tilewright_kit.contract.abilities import GeneratesSets
    from tilewright_kit.types.errors import InvalidArgumentError, UnsupportedError

    known: Sequence[str] = operation.generate_options if isinstance(operation, GeneratesSets) else ()
    for name in options:
        if name not in known:
            raise InvalidArgumentError(
                f"{operation.name} has no option {name.replace('_', '-')}",
                field=name,
                value=options[name],
                rule="generate_options",
                fix=f"use {', '.join(known)}" if known else "leave it out, or name an --operation that has it",
            )
    if not isinstance(operation, GeneratesSets):
        raise UnsupportedError(
            f"{operation.name} selects no kernels by options",
            field="operation",
            value=operation.name,
            rule="generate_options",
            fix="leave the options out",
        )
    return list(operation.select_set(arch, **options))
