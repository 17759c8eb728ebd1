"""GEMM: arguments as people write them, turned into the generic call. All rules about shapes and dtypes are the
server's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.dispatch.operands.request import BuildPolicy
from tilewright.dispatch.run import run
from tilewright.errors import InvalidArgumentError, UnsupportedError
from tilewright.operations.call import CHOICE, Asked, Choice, planning, running
from tilewright.operations.epilogue import Blocks, addends, block_words, elementwise, scale_operand
from tilewright.operations.int4 import FORMAT, Int4Weights
from tilewright.operations.matrices import fold_scales, readable, writable
from tilewright.session.state import Core
from tilewright.tensor.interop import alignment, all_recognised
from tilewright.tensor.resident import PackedTensor
from tilewright.transport.rpc import Flow
from tilewright.types.arguments import number
from tilewright.types.dtypes import DTypeLike, dtype_name
from tilewright.types.narrow import NARROW, format_of, pack_narrow
from tilewright.types.spec import Array, Spec, as_array

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["gemm", "grouped_gemm", "pack_b", "plan_gemm"]

Operand = Any
"""An array, a nested list of numbers that NumPy reads, or a tensor that the server keeps."""


def _int4(b: Any, b_format: str | None, scale_b: Any, zero_b: Any) -> tuple[Any, str | None, Any, Any]:
    """``Int4Weights`` as the operands that they stand for, and bytes of other types as the operation's."""
    if isinstance(b, Int4Weights):
        given = {"b_format": b_format, "scale_b": scale_b, "zero_b": zero_b}
        for name, value in given.items():
            if value is not None and not (name == "b_format" and value == FORMAT):
                raise InvalidArgumentError(
                    f"b has its own {name}",
                    field=name,
                    value=value if isinstance(value, str) else "",
                    rule="int4_weights",
                    fix=f"leave {name} out, or pass the arrays of b one by one",
                )
        b, b_format, scale_b, zero_b = b.b, FORMAT, b.scale_b, b.zero_b
    if b_format == FORMAT:
        b, zero_b = _signed(b), _signed(zero_b)
    return b, b_format, scale_b, zero_b


def _narrow(name: str, operand: Any, form: str | None) -> tuple[Any, str | None]:
    """An operand of fewer than 8 bits as packed bytes, and its format. ``name``: ``a``, whose values lie along rows, or
    ``b``, along columns. Others are as they were given.
    """
    own = format_of(operand)
    if own is None:
        return (_signed(operand) if form in NARROW else operand), form
    if form not in (None, own):
        raise InvalidArgumentError(
            f"{name} is {operand.dtype}, which is {own}",
            field=f"{name}_format",
            value=form,
            rule="narrow_values",
            fix=f"leave {name}_format out, or pass packed bytes",
        )
    packed = pack_narrow(operand) if name == "a" else pack_narrow(operand.swapaxes(-1, -2)).swapaxes(-1, -2)
    return packed, own


def _signed(array: Any) -> Any:
    """The same bytes as int8."""
    dtype = getattr(array, "dtype", None)
    if isinstance(array, np.ndarray):
        return array.view(np.int8) if array.dtype == np.uint8 else array
    if str(dtype) == "torch.uint8":
        return array.view(sys.modules["torch"].int8)
    return array


def attributes(
    *,
    split_k: int | None = None,
    scale_block: Blocks | None = None,
    a_format: str | None = None,
    b_format: str | None = None,
    tensors: Iterable[Any] = (),
    **words: Any,
) -> dict[str, Any]:
    """The operation's attributes. Raises ``InvalidArgumentError`` for words that are none. ``tensors`` are the matrices
    of the product: kernels must know if some lie at odd addresses of a device.
    """
    found = elementwise(**words)
    if scale_block is not None:
        found["scale_block"] = block_words(scale_block)
    found |= {name: form for name, form in (("a_format", a_format), ("b_format", b_format)) if form is not None}
    if (least := alignment(tensors)) is not None:
        found["alignment"] = least
    if split_k is not None:
        found["split_k"] = split_k
    return found


_EXPONENTS = "float8_e8m0fnu"


def _exponents(scale: Any) -> Any:
    """Exponents of 8 bits (E8M0) as the operation describes them: the same bytes as int8."""
    if str(getattr(scale, "dtype", "")).rpartition(".")[2] == _EXPONENTS:
        return scale.view(np.int8 if isinstance(scale, np.ndarray) else sys.modules["torch"].int8)
    return _signed(scale)


def operands(
    a: Operand,
    b: Operand,
    bias: Operand,
    c: Operand,
    d: Sequence[Operand],
    scale_a: Any,
    scale_b: Any,
    zero_b: Any = None,
    group: str = "",
) -> dict[str, Any]:
    """Inputs by the operation's names."""
    listed = addends(d, group)
    found = {f"a{group}": readable(a, f"a{group}"), f"b{group}": readable(b, f"b{group}")}
    for name, value in (("bias", bias), ("c", c)):
        if value is not None:
            found[f"{name}{group}"] = value
    found |= listed
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale is not None:
            found[f"{name}{group}"] = scale_operand(_exponents(scale), name)
    if zero_b is not None:
        found[f"zero_b{group}"] = zero_b
    return all_recognised(found)


def _gemm(
    core: Core,  # noqa: ARG001 (of every call; others need it)
    /,
    a: Operand,
    b: Operand,
    *,
    c: Operand | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    bias: Operand | None = None,
    d: Sequence[Operand] = (),
    binary: str | None = None,
    activation: str | None = None,
    clamp: tuple[float | None, float | None] | None = None,
    slope: float | None = None,
    scale_a: Operand | float | None = None,
    scale_b: Operand | float | None = None,
    zero_b: Operand | None = None,
    a_format: str | None = None,
    b_format: str | None = None,
    scale_block: Blocks | None = None,
    out_dtype: DTypeLike | None = None,
    out: Array | Spec | None = None,
    split_k: int | None = None,
    **options: Unpack[Choice],
) -> Asked:
    """``activation(binary(alpha * scale_a * scale_b * (a @ b) + bias, d...))``, in one pass.

    ``a`` is ``[..., M, K]``, ``b`` is ``[..., K, N]`` (leading dimensions broadcast) or a ``PackedTensor`` of
    ``pack_b``; the result is ``[..., M, N]``. Layouts are read off the strides, so ``b.T`` of a row-major ``[N, K]``
    matrix costs nothing. Element types: equal ones, or fp8 with bf8.

    A vector stands for a row on the left and for a column on the right, as NumPy's ``matmul`` has it.

    ``bias`` is ``[N]``; ``beta * c`` is added (a copy is made of ``c`` unless ``beta`` is 1 or 0); ``d`` is a list of
    tensors that broadcast to the result, brought in by ``binary`` ("add", the default, or "multiply"); ``activation``
    is one of ``ACTIVATIONS``; ``clamp=(low, high)``, either of which may be None, are the bounds of "clamp", and imply
    it if no activation is given; ``slope`` is the factor below zero of "leaky_relu" and "elu"; ``scale_a`` is a number
    or one for each row, ``scale_b`` a number or one for each column. With ``scale_block=((1, 128), (128, 128))``
    products of fp8 have one for each block: ``scale_a`` is ``[..., M, ceil(K / 128)]``, ``scale_b`` ``[...,
    ceil(N / 128), ceil(K / 128)]``, or with ``((1, 128), (1, 128))`` ``[..., N, ceil(K / 128)]``. ``b`` may be 4-bit
    weights in groups of 128, ``Int4Weights`` of ``quantize_int4``, beside an ``a`` of fp16, bf16, fp8 or int8; or their
    arrays, with ``b_format="int4_128"``, ``scale_b`` and maybe ``zero_b``. With blocks of 32 ``a`` and ``b`` may have
    values of fewer than 8 bits: arrays of ``float4_e2m1fn``, ``float6_e2m3fn`` or ``float6_e3m2fn`` of ``ml_dtypes``,
    which are packed at every call, or what ``pack_narrow`` makes of them (of ``b`` the transposed view of packed
    ``[N, K]``), with ``a_format`` and ``b_format`` "fp4", "fp6" or "bf6". ``out_dtype`` is what the result is to be;
    ``out`` is an array to write it into, in place if it is in shared memory or on a GPU. Without
    ``out`` the result is a fresh array in shared memory; for operands on a GPU it is a fresh one there, of the library
    that made them if that is PyTorch or CuPy, else a ``DeviceArray``. The other arguments, and the errors, are those of
    ``run``.

        >>> y = client.gemm(x, w.T, bias=b, activation="gelu")  # doctest: +SKIP
    """
    lone = tuple(axis for axis, item in ((-2, a), (-1, b)) if getattr(item, "ndim", 0) == 1)
    if lone:
        a, b = (a[None] if -2 in lone else a), (b[:, None] if -1 in lone else b)
        out = _lifted(out, lone)
    c = _scaled(c, beta)
    b, b_format, scale_b, zero_b = _int4(b, b_format, scale_b, zero_b)
    (a, a_format), (b, b_format) = _narrow("a", a, a_format), _narrow("b", b, b_format)
    alpha, scale_a, scale_b = fold_scales(a, alpha, scale_a, scale_b)
    inputs, target = operands(a, b, bias, c, d, scale_a, scale_b, zero_b), writable(out)
    words = attributes(
        alpha=alpha,
        binary=binary,
        count_d=len(d),
        activation=activation,
        clamp=clamp,
        slope=slope,
        out_dtype=out_dtype,
        split_k=split_k,
        scale_block=scale_block,
        a_format=a_format,
        b_format=b_format,
        tensors=(inputs["a"], inputs["b"], target),
    )
    squeezed = tuple(sorted(lone))
    return Asked("gemm", inputs, words, {**CHOICE, **options}, {"out": out}, {"out": target}, squeezed=squeezed)


def _lifted(out: Any, lone: Sequence[int]) -> Any:
    """The array to write into as the matrix that a product of a vector is."""
    if out is None or isinstance(out, Spec):
        return None if out is None else Spec.of((*(1 for _ in lone), *out.shape), out.dtype)
    for axis in sorted(lone):
        out = out[..., None, :] if axis == -2 and out.ndim else out[..., None]
    return out


def _scaled(c: Operand | None, beta: float) -> Operand | None:
    """``beta * c``: a copy, unless ``beta`` is 1."""
    factor = number("beta", beta)
    if c is None or factor == 1:
        if c is None and factor != 1:
            raise InvalidArgumentError(
                "beta has no effect: there is no c", field="beta", value=beta, rule="no_effect", fix="pass c as well"
            )
        return c
    if factor == 0:
        return None
    array = c if hasattr(c, "dtype") and not isinstance(c, Spec) else as_array(c, "c")
    return array * array.dtype.type(factor) if isinstance(array, np.ndarray) else array * factor


gemm = running(_gemm)
plan_gemm = planning(
    _gemm, "The plan takes a, b and then what else was given here (by name: ``plan(a, b, bias=bias, out=c)``)."
)


def _grouped_gemm(
    core: Core,  # noqa: ARG001 (as above)
    /,
    a: Sequence[Operand],
    b: Sequence[Operand],
    *,
    c: Sequence[Operand] | None = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    bias: Sequence[Operand] | None = None,
    d: Sequence[Sequence[Operand]] | None = None,
    binary: str | None = None,
    activation: str | None = None,
    clamp: tuple[float | None, float | None] | None = None,
    slope: float | None = None,
    scale_a: Sequence[Any] | None = None,
    scale_b: Sequence[Any] | None = None,
    zero_b: Sequence[Any] | None = None,
    a_format: str | None = None,
    b_format: str | None = None,
    scale_block: Blocks | None = None,
    out_dtype: DTypeLike | None = None,
    out: Sequence[Array] | None = None,
    split_k: int | None = None,
    **options: Unpack[Choice],
) -> Asked:
    """Products of different sizes in one dispatch: ``[gemm(a[0], b[0]), gemm(a[1], b[1]), ...]``.

    Every list has one entry for each group; element types and the kinds of operands are the same in all groups.
    Arguments as for ``gemm``.
    """
    count = len(a)
    lists = {
        "b": b, "c": c, "bias": bias, "d": d, "scale_a": scale_a, "scale_b": scale_b, "zero_b": zero_b, "out": out,
    }  # fmt: skip
    for name, values in lists.items():
        if values is not None and len(values) != count:
            raise InvalidArgumentError(
                f"a has {count} groups, but {name} has {len(values)}",
                field=name,
                value=len(values),
                rule="group_count",
                fix="give one entry for each group",
            )
    inputs: dict[str, Any] = {}
    form_a, form = a_format, b_format
    for group in range(count):
        own_a, form_a = _narrow("a", a[group], a_format)
        own_b, form, own_scale, own_zero = _int4(
            b[group],
            b_format,
            scale_b[group] if scale_b is not None else None,
            zero_b[group] if zero_b is not None else None,
        )
        own_b, form = _narrow("b", own_b, form)
        inputs |= operands(
            own_a,
            own_b,
            bias[group] if bias is not None else None,
            _scaled(c[group] if c is not None else None, beta),
            d[group] if d is not None else (),
            scale_a[group] if scale_a is not None else None,
            own_scale,
            own_zero,
            f"[{group}]",
        )
    names = [f"out[{group}]" for group in range(count)]
    written = {name: writable(out[group]) if out is not None else None for group, name in enumerate(names)}
    words = attributes(
        alpha=alpha,
        binary=binary,
        count_d=len(d[0]) if d else 0,
        activation=activation,
        clamp=clamp,
        slope=slope,
        out_dtype=out_dtype,
        split_k=split_k,
        scale_block=scale_block,
        a_format=form_a,
        b_format=form,
        tensors=(*(value for name, value in inputs.items() if name[0] in "ab" and name[1] == "["), *written.values()),
    )
    targets = out if out is not None else [None] * count
    return Asked(
        "gemm",
        inputs,
        words | {"groups": count},
        {**CHOICE, **options},
        dict(zip(names, targets, strict=True)),
        written,
        listed=True,
    )


grouped_gemm = running(_grouped_gemm)


def pack_b(
    core: Core,
    b: Operand,
    *,
    m_hint: int | None = None,
    dtype_a: DTypeLike | None = None,
    build: BuildPolicy = "wait",
    device: str | None = None,
    timeout: float | None = None,
) -> Flow[PackedTensor]:
    """Pack ``b`` ``[K, N]`` once, in the order that kernels for about ``m_hint`` rows of ``a`` read fastest; the
    server keeps it.

    Pass the result as ``b`` to ``gemm`` or a plan, as often as wanted. It is freed when the last reference goes, or
    by ``close()``.
    """
    results = yield from run(
        core,
        "gemm_pack_b",
        {"b": readable(b, "b")},
        None,
        {"m": m_hint, "dtype_a": dtype_name(dtype_a) if dtype_a is not None else None},
        build=build,
        device=device,
        timeout=timeout,
    )
    packed = next(iter(results.values()))
    if not isinstance(packed, PackedTensor):
        raise UnsupportedError(
            "the server's packing is of another kind than this client knows", fix="update the client"
        )
    return packed
