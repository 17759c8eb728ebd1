"""What happens to sums before they are stored: the operands and steps of a request, checked."""

from __future__ import annotations

from typing import Any

from tilewright_grouped_conv.attributes import Attributes
from tilewright_grouped_conv.geometry import ConvGeometry
from tilewright_grouped_conv.operands import Tensors
from tilewright_grouped_conv.views import VectorView, image_view, vector_view
from tilewright_grouped_conv.words import Direction, Scale
from tilewright_kit.attributes import refuse
from tilewright_kit.dtypes import DType
from tilewright_kit.tensor import TensorDesc
from tilewright_kit.words import Binary, Unary, epilogue_dtypes

__all__ = ["read_epilogue"]


def read_epilogue(
    tensors: Tensors, attributes: Attributes, geometry: ConvGeometry, direction: Direction, output: TensorDesc
) -> tuple[dict[str, Any], dict[str, TensorDesc], TensorDesc]:
    """The epilogue's fields of a problem, all inputs in binding order, and the output.

    Raises ``InvalidArgumentError``.
    """
    names = tensors.names
    a = tensors.inputs[names.first].dtype
    channels = geometry.c if direction is Direction.BACKWARD_DATA else geometry.k
    inputs = {name: tensors.inputs[name] for name in (names.first, names.second)}
    found: dict[str, Any] = {"binary": _binary(attributes, len(tensors.d)), "scale_view": None}
    if "bias" in tensors.inputs:
        bias = inputs["bias"] = tensors.inputs["bias"]
        _check_dtype("bias", bias, epilogue_dtypes(a), a)
        found["bias"] = _vector("bias", bias, channels, geometry.groups, "bias_shape", scalar=False)
        found["dtype_bias"] = bias.dtype
    views = []
    for index, desc in enumerate(tensors.d):
        name = f"d[{index}]"
        inputs[name] = desc
        _check_dtype(name, desc, epilogue_dtypes(a), a)
        _same_shape(name, desc, names.output, output.shape)
        views.append(image_view(name, desc.shape, desc.strides, geometry.groups))
    found |= {"d": tuple(views), "dtype_d": tuple(desc.dtype for desc in tensors.d)}
    if "scale" in tensors.inputs:
        scale = inputs["scale"] = tensors.inputs["scale"]
        _check_dtype("scale", scale, (DType.FP32,), a)
        view = _vector("scale", scale, channels, geometry.groups, "scale_shape", scalar=True)
        found["scale_view"] = view
        found["scale"] = Scale.CHANNEL if view.g or view.c else Scale.TENSOR
    if attributes.accumulate:
        inputs["acc"] = _accumulated(tensors, output)
    elif "acc" in tensors.inputs:
        raise refuse(
            "acc is given, but nothing says that it is to be added",
            "acc",
            "",
            "acc_without_accumulate",
            "set accumulate=True, or leave acc out",
        )
    _check_integer_output(output.dtype, attributes, inputs, found)
    return found, inputs, output


def _binary(attributes: Attributes, count: int) -> Binary:
    """The canonical step: ``MultiD`` forms only for two or more D."""
    given = attributes.binary
    if given is not None:
        if given is Binary.PASS and count:
            reason, fix = "D operands are given, but no step uses them", "set binary to Add or Multiply, or leave d out"
        elif given in (Binary.MULTI_D_ADD, Binary.MULTI_D_MULTIPLY) and not count:
            reason, fix = f"{given} needs D operands", "give d[0], d[1], ..."
        elif given in (Binary.ADD, Binary.MULTIPLY) and count != 1:
            reason, fix = (
                f"{given} takes exactly one D operand, not {count}",
                f"use MultiD{given} for several, and give at least d[0]",
            )
        else:
            reason = fix = ""
        if reason:
            raise refuse(reason, "attributes.binary", given.value, "d_count", fix)
    if not count:
        return Binary.PASS
    if given in (Binary.MULTIPLY, Binary.MULTI_D_MULTIPLY):
        return Binary.MULTIPLY if count == 1 else Binary.MULTI_D_MULTIPLY
    return Binary.ADD if count == 1 else Binary.MULTI_D_ADD


def _check_dtype(name: str, desc: TensorDesc, allowed: tuple[DType, ...], a: DType) -> None:
    if desc.dtype not in allowed:
        raise refuse(
            f"{name} cannot be {desc.dtype} in a convolution of {a}",
            f"{name}.dtype",
            desc.dtype.value,
            "epilogue_dtype",
            f"use one of: {', '.join(allowed)}",
        )


def _vector(name: str, desc: TensorDesc, channels: int, groups: int, rule: str, scalar: bool) -> VectorView:
    """One value per channel, or (``scalar``) one for all."""
    if scalar and desc.shape in ((), (1,)):
        return VectorView(name, 0, 0)
    if desc.shape != (channels,):
        forms = f"[{channels}]" + (" or [] for one value" if scalar else "")
        raise refuse(
            f"{name} has shape {list(desc.shape)}, but the result has {channels} channels",
            f"{name}.shape",
            desc.shape,
            rule,
            f"give it the shape {forms}",
        )
    return vector_view(name, channels, desc.strides[0], groups)


def _same_shape(name: str, desc: TensorDesc, output: str, shape: tuple[int, ...]) -> None:
    if desc.shape != shape:
        raise refuse(
            f"{name} has shape {list(desc.shape)}, but {output} has {list(shape)}",
            f"{name}.shape",
            desc.shape,
            "operand_shape",
            f"give it the shape {list(shape)}; what repeats may have strides of zero",
        )


def _accumulated(tensors: Tensors, output: TensorDesc) -> TensorDesc:
    name = tensors.names.output
    if "acc" not in tensors.inputs:
        raise refuse(
            "accumulate is set, but there is nothing to add to",
            "acc",
            "",
            "operand_missing",
            f"give acc, of {name}'s shape: the very memory of {name} will do",
        )
    acc = tensors.inputs["acc"]
    _same_shape("acc", acc, name, output.shape)
    if acc.dtype != output.dtype:
        raise refuse(
            f"acc is {acc.dtype}, but {name} is {output.dtype}",
            "acc.dtype",
            acc.dtype.value,
            "epilogue_dtype",
            f"convert acc to {output.dtype}, or set out_dtype={acc.dtype}",
        )
    wanted, have = (
        [stride for size, stride in zip(desc.shape, desc.strides, strict=True) if size > 1] for desc in (output, acc)
    )
    if wanted != have and output.size:
        raise refuse(
            f"acc has the strides {list(acc.strides)}, but {name} {list(output.strides)}",
            "acc.strides",
            acc.strides,
            "acc_strides",
            f"give acc and {name} the same strides, or leave {name} out",
        )
    return acc


def _check_integer_output(
    out: DType, attributes: Attributes, inputs: dict[str, TensorDesc], found: dict[str, Any]
) -> None:
    """An int32 result is the exact sum: the epilogue computes in fp32, which would round."""
    if out != DType.INT32:
        return
    rounding = [
        (field, value)
        for field, value, rounds in (
            ("attributes.alpha", attributes.alpha, attributes.alpha != 1.0),
            ("scale", "", "scale" in inputs),
            ("attributes.unary", attributes.unary.value, attributes.unary is not Unary.PASS),
            ("bias", "", "bias" in inputs),
            ("d", "", found["binary"] is not Binary.PASS),
        )
        if rounds
    ]
    if rounding:
        field, value = rounding[0]
        raise refuse(
            f"an int32 result is the exact sum of products and takes no {field.split('.')[-1]}",
            field,
            value,
            "integer_output",
            "set out_dtype to fp32, fp16 or bf16",
        )
