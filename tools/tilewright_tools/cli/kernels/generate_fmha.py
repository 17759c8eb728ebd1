"""The options of `tilewright kernels generate` that choose among kernels of attention. Here they are only gathered:
what they mean is the operation's ``select_set`` to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

__all__ = ["OPTIONS", "TUPLES", "chosen_options"]

_PANEL = "Kernels of attention"


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_PANEL, show_default=False, **more)


Family = Annotated[str, _option("Only this family: fwd, fwd_splitkv, fwd_pagedkv, batch_prefill, bwd_dq_dk_dv, ...")]
Receipt = Annotated[str, _option("Kernels of this receipt, by its number: 2, 4, 100, ...")]
Profile = Annotated[str, _option("The same by name: flash_fwd, pytorch, aiter_batch, fp8_test, all, ...")]
Hdim = Annotated[list[int], _option("Only heads of so many elements. Repeatable.", "--hdim")]
HdimV = Annotated[list[int], _option("Likewise heads of v.", "--hdim-v")]
Mask = Annotated[str, _option("Only this mask: no, causal, bottom_right, generic.")]
Bias = Annotated[str, _option("Only this bias: no, bias, alibi.", "--attention-bias")]
Mode = Annotated[str, _option("Only batch, or only group: sequences of different lengths.")]
TileM0 = Annotated[int | None, _option("Only tiles of so many rows of queries.", "--tile-m0")]
TileN0 = Annotated[int | None, _option("Only tiles of so many columns of keys.", "--tile-n0")]
TileK0 = Annotated[int | None, _option("Only steps of so many elements in the first product.", "--tile-k0")]
TileN1 = Annotated[int | None, _option("Only so many columns of values in the second product.", "--tile-n1")]
TileK1 = Annotated[int | None, _option("Only steps of so many keys in the second product.", "--tile-k1")]
TileK0Max = Annotated[int | None, _option("Only tiles that keep so many elements of queries.", "--tile-k0max")]
Wave = Annotated[
    str,
    _option(
        "Only these waves, as names have them: rows x columns x depth of each product, 4x1x1x4x1x1; * is any number, "
        "and what is left out too.",
        "--wave",
        metavar="NxNx...",
    ),
]
WarpTile = Annotated[str, _option("Likewise matrix instructions: 16x16x16, *x*x32.", "--warp-tile", metavar="NxNx...")]
Rope = Annotated[str, _option("Only this rotation of appended keys: none, interleaved, half.")]
QScale = Annotated[str, _option("Only these factors of 8-bit operands: no, pertensor, blockscale, kv_blockscale.")]
Sink = Annotated[bool | None, _option("Only kernels whose windows always show the first keys, or do not.")]
LearnedSinks = Annotated[bool | None, _option("Only kernels with, or without, a learned logit for each head.")]
Lse = Annotated[bool | None, _option("Only kernels that write logarithms of sums, or do not.")]
Dropout = Annotated[bool | None, _option("Only kernels with, or without, dropout.")]
Softcap = Annotated[bool | None, _option("Only kernels with, or without, a soft cap.")]
Paged = Annotated[bool | None, _option("Only kernels over pages, or others.")]
Deterministic = Annotated[bool | None, _option("Only gradients in a fixed order, or others.")]

OPTIONS = (
    "family", "receipt", "profile", "hdim", "hdim_v", "mask", "bias", "mode", "tile_m0", "tile_n0", "tile_k0",
    "tile_n1", "tile_k1", "tile_k0max", "rope", "qscale", "sink", "learned_sinks", "lse", "dropout", "softcap",
    "paged", "deterministic",
)  # fmt: skip
"""Those above that are options of ``select_set``, by the names of the command's arguments."""
TUPLES: Mapping[str, str] = {"wave": "wave", "warp_tile": "warp"}
"""Those of several numbers, by how ``select_set`` calls each: wave_m0, wave_n0, ..., wave_k2."""
_PLACES = tuple(f"{axis}{product}" for product in range(3) for axis in "mnk")


def chosen_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """What of them the user gave. Raises ``InvalidArgumentError`` for a malformed list of numbers."""
    found = {name: given[name] for name in OPTIONS if given[name] not in (None, "", [])}
    for option, prefix in TUPLES.items():
        if given[option]:
            found |= {f"{prefix}_{place}": size for place, size in _numbers(option, given[option])}
    return found


def _numbers(option: str, text: str) -> list[tuple[str, int]]:
    """Places and sizes of ``4x1x1``; those of ``*`` are left out."""
    from tilewright_kit.types.errors import InvalidArgumentError

    sizes = text.strip().split("x")
    if len(sizes) > len(_PLACES) or not all(size == "*" or (size.isascii() and size.isdigit()) for size in sizes):
        raise InvalidArgumentError(
            f"--{option.replace('_', '-')} takes at most {len(_PLACES)} numbers",
            field=option,
            value=text,
            rule="numbers_joined",
            fix="join them by x, with * for any: 4x1x1x4x1x1 or 4x*x1",
        )
    return [(place, int(size)) for place, size in zip(_PLACES, sizes, strict=False) if size != "*"]
