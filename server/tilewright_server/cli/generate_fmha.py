"""The options of `tilewright kernels generate` that choose among kernels of attention. Here they are only gathered:
what they mean is the operation's ``select_set`` to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

__all__ = ["OPTIONS", "chosen_options"]

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
Lse = Annotated[bool | None, _option("Only kernels that write logarithms of sums, or do not.")]
Dropout = Annotated[bool | None, _option("Only kernels with, or without, dropout.")]
Softcap = Annotated[bool | None, _option("Only kernels with, or without, a soft cap.")]
Paged = Annotated[bool | None, _option("Only kernels over pages, or others.")]
Deterministic = Annotated[bool | None, _option("Only gradients in a fixed order, or others.")]

OPTIONS = (
    "family", "receipt", "profile", "hdim", "hdim_v", "mask", "bias", "mode", "tile_m0", "tile_n0", "tile_k0",
    "tile_n1", "tile_k1", "tile_k0max", "lse", "dropout", "softcap", "paged", "deterministic",
)  # fmt: skip
"""Those above by the names of the command's arguments."""


def chosen_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """What of them the user gave."""
    return {name: given[name] for name in OPTIONS if given[name] not in (None, "", [])}
