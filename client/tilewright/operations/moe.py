"""Products of mixtures of experts: arguments as people write them, turned into the generic call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tilewright.errors import InvalidArgumentError
from tilewright.operations.call import CHOICE, Asked, Choice, planning, running
from tilewright.operations.epilogue import Blocks, block_word, block_words, scale_operand
from tilewright.operations.matrices import fold_scales, readable, writable
from tilewright.session.state import Core
from tilewright.tensor.interop import alignment, all_recognised
from tilewright.types.arguments import number
from tilewright.types.dtypes import DTypeLike, dtype_name
from tilewright.types.spec import Array, Spec

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["moe_gemm", "plan_moe_gemm"]


def _moe_gemm(
    core: Core,  # noqa: ARG001 (of every call; others need it)
    /,
    x: Any,
    w: Any,
    counts: Any,
    *,
    scale_x: Any = None,
    scale_w: Any = None,
    scale_block: Blocks | None = None,
    activation: str | None = None,
    out_scale_block: Blocks | None = None,
    alpha: float = 1.0,
    expected_rows: int | None = None,
    out_dtype: DTypeLike | None = None,
    out: Array | Spec | None = None,
    out_scale: Array | Spec | None = None,
    return_status: bool = False,
    **options: Unpack[Choice],
) -> Asked:
    """Each row of ``x`` times the weights of its expert: ``alpha * scale_x * scale_w[e] * (x @ w[e].T)``.

    ``w`` is ``[experts, N, K]`` and ``counts`` ``[experts]``, int32: the rows of each expert, which kernels read when
    they run. ``x`` is ``[T, K]``, the rows of the first expert first, then those of the second, and so on, without
    gaps; or ``[experts, R, K]``, with room for R rows of each expert, of which the first are used. The result is
    ``[T, N]`` or ``[experts, R, N]``. Rows that belong to no expert mean nothing; those of an ``out`` that is written
    in place (in shared memory, on a GPU) stay as they were.

    ``scale_x`` is a number, ``scale_w`` one or one for each expert. With ``scale_block=((1, 128), (128, 128))`` or
    ``((1, 128), (1, 128))`` blocks of 8-bit floats have factors: ``scale_x`` is ``[T, ceil(K/128)]`` or ``[experts, R,
    ceil(K/128)]``, ``scale_w`` ``[experts, ceil(N/128) or N, ceil(K/128)]``, fp32.

    With ``activation="swiglu"`` the result is ``silu(gate) * up``, ``[.., N / 2]``: ``w`` holds both projections, as
    ``join_gate_up`` joins them. With ``out_scale_block=(1, 128)`` the result is fp8, and a second one, ``out_scale``
    ``[.., ceil(columns/128)]``, has the fp32 factors by which it is to be multiplied: together they are the ``x`` and
    ``scale_x`` of another product.

    ``expected_rows`` are the rows that an expert usually has, for the choice of a kernel. With ``return_status`` there
    is one more result, int32 ``[4]``: what kernels found wrong with ``counts`` (bits: 1 negative, 2 more than R, 4 more
    than T together), the first expert concerned, its count, 0. In the host's memory wrong counts are an error before
    the launch. The other arguments, and the errors, are those of ``run``.

        >>> y = client.moe_gemm(x, w, counts)  # doctest: +SKIP
    """
    if scale_block is None:
        alpha, scale_x, scale_w = fold_scales(x, alpha, scale_x, scale_w)
    inputs = {"x": readable(x, "x"), "w": readable(w, "w"), "counts": counts}
    for name, scale in (("scale_x", scale_x), ("scale_w", scale_w)):
        if scale is not None:
            inputs[name] = scale_operand(scale, name)
    inputs = all_recognised(inputs)
    target = writable(out)
    if isinstance(target, Spec) and not isinstance(out, Spec):
        reason, fix = "rows of out have gaps, and what no expert writes is to stay", "give out with rows of stride 1"
        raise InvalidArgumentError(reason, field="out", value=getattr(out, "strides", ""), rule="row_layout", fix=fix)
    words: dict[str, Any] = {}
    if (least := alignment((inputs["x"], inputs["w"], target))) is not None:
        words["alignment"] = least
    if (factor := number("alpha", alpha)) != 1.0:
        words["alpha"] = factor
    if scale_block is not None:
        words["scale_block"] = block_words(scale_block)
    if activation is not None:
        words["activation"] = activation
    if expected_rows is not None:
        words["expected_rows"] = expected_rows
    if out_dtype is not None:
        words["out_dtype"] = dtype_name(out_dtype)
    outs: dict[str, Any] = {"out": out}
    targets: dict[str, Any] = {"out": target}
    if out_scale_block is not None or out_scale is not None:
        words["out_scale_block"] = "1x128" if out_scale_block is None else block_word(out_scale_block)
        outs["out_scale"], targets["out_scale"] = out_scale, writable(out_scale)
    if return_status:
        words["return_status"] = True
        outs["status"] = targets["status"] = None
    return Asked("moe_gemm", inputs, words, {**CHOICE, **options}, outs, targets)


moe_gemm = running(_moe_gemm)
plan_moe_gemm = planning(
    _moe_gemm, "The plan takes x, w, counts and then what else was given here (by name: ``plan(x, w, counts, out=y)``)."
)
