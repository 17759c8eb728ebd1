"""GEMM: arguments as people write them, turned into the generic call. All rules about shapes and dtypes are the
server's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tilewright.core import Core
from tilewright.device_arrays import alignment, all_recognised
from tilewright.dispatch import BuildPolicy, run
from tilewright.dtypes import DTypeLike, dtype_name
from tilewright.errors import InvalidArgumentError, UnsupportedError
from tilewright.layout import Array, Spec
from tilewright.matrices import deliver, fold_scales, number, readable, writable
from tilewright.plans import PlanState, prepare
from tilewright.resident import PackedTensor, ResidentTensor
from tilewright.steps import Flow

__all__ = ["ACTIVATIONS", "gemm", "grouped_gemm", "pack_b", "plan_gemm"]

ACTIVATIONS = {
    "relu": "Relu",
    "gelu": "Gelu",
    "fast_gelu": "FastGelu",
    "gelu_tanh": "FastGelu",
    "silu": "Silu",
    "swish": "Silu",
    "sigmoid": "Sigmoid",
    "tanh": "Tanh",
    "hard_swish": "HardSwish",
    "clamp": "Clamp",
}
"""What ``activation`` may be, and the server's word for it. ``gelu`` is exact (erf), ``fast_gelu`` its tanh
approximation.
"""

_BINARY = {"add": ("Add", "MultiDAdd"), "multiply": ("Multiply", "MultiDMultiply")}

Operand = Any
"""An array, a nested list of numbers that NumPy reads, or a tensor that the server keeps."""


def attributes(
    *,
    alpha: float = 1.0,
    binary: str | None = None,
    count_d: int = 0,
    activation: str | None = None,
    clamp: tuple[float | None, float | None] | None = None,
    out_dtype: DTypeLike | None = None,
    split_k: int | None = None,
    tensors: Iterable[Any] = (),
) -> dict[str, Any]:
    """The operation's attributes. Raises ``InvalidArgumentError`` for words that are none. ``tensors`` are the matrices
    of the product: kernels must know if some lie at odd addresses of a device.
    """
    found: dict[str, Any] = {}
    if (least := alignment(tensors)) is not None:
        found["alignment"] = least
    if number("alpha", alpha) != 1:
        found["alpha"] = float(alpha)
    if binary is not None:
        if binary not in _BINARY:
            raise _word("binary", binary, _BINARY)
        if count_d:
            found["binary"] = _BINARY[binary][count_d > 1]
    if activation is None and clamp is not None:
        activation = "clamp"
    if activation is not None:
        if activation not in ACTIVATIONS:
            raise _word("activation", activation, ACTIVATIONS)
        found["unary"] = ACTIVATIONS[activation]
    if clamp is not None:
        if not isinstance(clamp, (tuple, list)) or len(clamp) != 2:
            raise InvalidArgumentError(
                "clamp is a pair of bounds",
                field="clamp",
                value=clamp,
                rule="clamp_bounds",
                fix="give (low, high); either may be None",
            )
        for name, bound in zip(("clamp_lo", "clamp_hi"), clamp, strict=True):
            if bound is not None:
                found[name] = number("clamp", bound)
    if out_dtype is not None:
        found["out_dtype"] = dtype_name(out_dtype, "out_dtype")
    if split_k is not None:
        found["split_k"] = split_k
    return found


def _word(field: str, value: object, known: Mapping[str, object]) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"{field} {value!r} is not known",
        field=field,
        value=value,
        rule="attribute_choice",
        fix=f"use one of {', '.join(known)}",
    )


def operands(
    a: Operand, b: Operand, bias: Operand, c: Operand, d: Sequence[Operand], scale_a: Any, scale_b: Any, group: str = ""
) -> dict[str, Any]:
    """Inputs by the operation's names."""
    if isinstance(d, (np.ndarray, ResidentTensor)) or hasattr(d, "__dlpack__"):
        raise InvalidArgumentError("d is a list of tensors", field="d", rule="operand_list", fix="pass d=[tensor]")
    found = {f"a{group}": readable(a, f"a{group}"), f"b{group}": readable(b, f"b{group}")}
    for name, value in (("bias", bias), ("c", c)):
        if value is not None:
            found[f"{name}{group}"] = value
    for index, value in enumerate(d):
        found[f"d{group}[{index}]"] = value
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale is not None:
            plain = isinstance(scale, (int, float, list, np.generic)) and not isinstance(scale, bool)
            found[f"{name}{group}"] = np.asarray(scale, np.float32) if plain else scale
    return all_recognised(found)


def gemm(
    core: Core,
    a: Operand,
    b: Operand,
    *,
    c: Operand | None = None,
    alpha: float = 1.0,
    bias: Operand | None = None,
    d: Sequence[Operand] = (),
    binary: str | None = None,
    activation: str | None = None,
    clamp: tuple[float | None, float | None] | None = None,
    scale_a: Operand | float | None = None,
    scale_b: Operand | float | None = None,
    out_dtype: DTypeLike | None = None,
    out: Array | None = None,
    kernel: str | None = None,
    strategy: str | None = None,
    split_k: int | None = None,
    build: BuildPolicy = "wait",
    device: str | None = None,
    timeout: float | None = None,
) -> Flow[Any]:
    """``activation(binary(alpha * scale_a * scale_b * (a @ b) + bias, d...))``, in one pass.

    ``a`` is ``[..., M, K]``, ``b`` is ``[..., K, N]`` (leading dimensions broadcast) or a ``PackedTensor`` of
    ``pack_b``; the result is ``[..., M, N]``. Layouts are read off the strides, so ``b.T`` of a row-major ``[N, K]``
    matrix costs nothing. Element types: equal ones, or fp8 with bf8.

    ``bias`` is ``[N]``; ``c`` is added; ``d`` is a list of tensors that broadcast to the result, brought in by
    ``binary`` ("add", the default, or "multiply"); ``activation`` is one of ``ACTIVATIONS``;
    ``clamp=(low, high)``, either of which may be None, are the bounds of "clamp", and imply it if no activation is
    given; ``scale_a`` is a number or one for each row, ``scale_b`` a number or one for each column.
    ``out_dtype`` is what the result is to be; ``out`` is an array to write it into, in place if it is in shared
    memory or on a GPU. Without ``out`` the result is a fresh array in shared memory; for operands on a GPU it is a
    fresh one there, of the library that made them if that is PyTorch or CuPy, else a ``DeviceArray``. The other
    arguments, and the errors, are those of ``run``.

        >>> y = client.gemm(x, w.T, bias=b, activation="gelu")  # doctest: +SKIP
    """
    alpha, scale_a, scale_b = fold_scales(a, alpha, scale_a, scale_b)
    inputs = operands(a, b, bias, c, d, scale_a, scale_b)
    target = writable(out)
    words = attributes(
        alpha=alpha,
        binary=binary,
        count_d=len(d),
        activation=activation,
        clamp=clamp,
        out_dtype=out_dtype,
        split_k=split_k,
        tensors=(inputs["a"], inputs["b"], target),
    )
    results = yield from run(
        core,
        "gemm",
        inputs,
        {"out": target},
        words,
        kernel=kernel,
        strategy=strategy,
        build=build,
        device=device,
        timeout=timeout,
    )
    return deliver(core, out, results["out"])


def grouped_gemm(
    core: Core,
    a: Sequence[Operand],
    b: Sequence[Operand],
    *,
    c: Sequence[Operand] | None = None,
    alpha: float = 1.0,
    bias: Sequence[Operand] | None = None,
    d: Sequence[Sequence[Operand]] | None = None,
    binary: str | None = None,
    activation: str | None = None,
    clamp: tuple[float | None, float | None] | None = None,
    scale_a: Sequence[Any] | None = None,
    scale_b: Sequence[Any] | None = None,
    out_dtype: DTypeLike | None = None,
    out: Sequence[Array] | None = None,
    kernel: str | None = None,
    strategy: str | None = None,
    split_k: int | None = None,
    build: BuildPolicy = "wait",
    device: str | None = None,
    timeout: float | None = None,
) -> Flow[list[Any]]:
    """Products of different sizes in one dispatch: ``[gemm(a[0], b[0]), gemm(a[1], b[1]), ...]``.

    Every list has one entry for each group; element types and the kinds of operands are the same in all groups.
    Arguments as for ``gemm``.
    """
    count = len(a)
    lists = {"b": b, "c": c, "bias": bias, "d": d, "scale_a": scale_a, "scale_b": scale_b, "out": out}
    for name, values in lists.items():
        if values is not None and len(values) != count:
            raise InvalidArgumentError(
                f"a has {count} groups, but {name} has {len(values)}",
                field=name,
                value=len(values),
                rule="group_count",
                fix="give one entry for each group",
            )
    if count == 0:
        return []
    inputs: dict[str, Any] = {}
    for group in range(count):
        inputs |= operands(
            a[group],
            b[group],
            bias[group] if bias is not None else None,
            c[group] if c is not None else None,
            d[group] if d is not None else (),
            scale_a[group] if scale_a is not None else None,
            scale_b[group] if scale_b is not None else None,
            f"[{group}]",
        )
    names = [f"out[{group}]" for group in range(count)]
    written = {name: writable(out[group]) if out is not None else None for group, name in enumerate(names)}
    words = attributes(
        alpha=alpha,
        binary=binary,
        count_d=len(d[0]) if d is not None else 0,
        activation=activation,
        clamp=clamp,
        out_dtype=out_dtype,
        split_k=split_k,
        tensors=(*(value for name, value in inputs.items() if name[0] in "ab" and name[1] == "["), *written.values()),
    )
    results = yield from run(
        core,
        "gemm",
        inputs,
        written,
        words | {"groups": count},
        kernel=kernel,
        strategy=strategy,
        build=build,
        device=device,
        timeout=timeout,
    )
    targets = out if out is not None else [None] * count
    return [deliver(core, target, results[name]) for name, target in zip(names, targets, strict=True)]


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


def plan_gemm(
    core: Core,
    a: Operand | Spec,
    b: Operand | Spec,
    *,
    c: Operand | Spec | None = None,
    alpha: float = 1.0,
    bias: Operand | Spec | None = None,
    d: Sequence[Operand | Spec] = (),
    binary: str | None = None,
    activation: str | None = None,
    clamp: tuple[float | None, float | None] | None = None,
    scale_a: Operand | Spec | float | None = None,
    scale_b: Operand | Spec | float | None = None,
    out_dtype: DTypeLike | None = None,
    out: Array | Spec | None = None,
    kernel: str | None = None,
    strategy: str | None = None,
    split_k: int | None = None,
    build: BuildPolicy = "wait",
    device: str | None = None,
    timeout: float | None = None,
) -> Flow[PlanState]:
    """Prepare ``gemm`` for operands like these: arrays, ``Spec``, or ``(shape, dtype)``. Calling the plan does no
    planning.

    The plan takes a, b and then what else was given here (by name: ``plan(a, b, bias=bias, out=c)``).
    """
    alpha, scale_a, scale_b = fold_scales(a, alpha, scale_a, scale_b)
    inputs, target = operands(a, b, bias, c, d, scale_a, scale_b), writable(out)
    words = attributes(
        alpha=alpha,
        binary=binary,
        count_d=len(d),
        activation=activation,
        clamp=clamp,
        out_dtype=out_dtype,
        split_k=split_k,
        tensors=(inputs["a"], inputs["b"], target),
    )
    state = yield from prepare(
        core,
        "gemm",
        inputs,
        {"out": target},
        words,
        kernel=kernel,
        strategy=strategy,
        build=build,
        device=device,
        timeout=timeout,
    )
    return state
