"""From a request to a problem: every check that a caller's mistake can fail, each with field, value, rule and fix."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tilewright_gemm.attributes import MAX_GROUPS, Attributes, read_attributes, refuse
from tilewright_gemm.packing import PackedFormat
from tilewright_gemm.problem import GemmProblem, Product, View
from tilewright_gemm.strided import Slot, broadcast_shapes, collapse, layouts_of, overlaps, slot
from tilewright_gemm.words import Binary, ScaleA, ScaleB, Unary, default_output, epilogue_dtypes, is_pair, output_dtypes
from tilewright_kit.dtypes import DType
from tilewright_kit.errors import InvalidArgumentError
from tilewright_kit.problem import Operand, OperationRequest, Role
from tilewright_kit.tensor import MAX_ELEMENTS, TensorDesc

__all__ = ["MAX_D", "parse_gemm"]

MAX_D = 32
_NAME = re.compile(r"(a|b|c|d|bias|scale_a|scale_b|out)((?:\[[0-9]{1,6}\])*)")
_INPUTS = "a, b, bias, c, d[0], d[1], ..., scale_a, scale_b"


@dataclass(slots=True)
class _Group:
    """The operands of one product, as they were named."""

    inputs: dict[str, tuple[str, TensorDesc]] = field(default_factory=dict)
    d: dict[int, tuple[str, TensorDesc]] = field(default_factory=dict)
    out: tuple[str, TensorDesc] | None = None


@dataclass(frozen=True, slots=True)
class _Parsed:
    """One group, checked: its signature, its products, and the layouts that would describe A and B."""

    dtypes: tuple[DType, DType, DType]
    dtype_bias: DType | None
    dtype_d: tuple[DType, ...]
    binary: Binary
    packing: PackedFormat | None
    a_layouts: str
    b_layouts: str
    products: tuple[Product, ...]
    tensors: tuple[Operand, ...]


def parse_gemm(request: OperationRequest) -> GemmProblem:
    """Check a GEMM request and infer what it left out. Raises ``InvalidArgumentError``, never anything else."""
    attributes = read_attributes(request.attributes)
    groups, grouped = _groups(request, attributes.groups)
    parsed = [_parse_group(group, attributes) for group in groups]
    first = parsed[0]
    for index, other in enumerate(parsed[1:], 1):
        _require_same_signature(first, other, index)
    layout = _common(parsed, "a") + _common(parsed, "b") + "r"
    products = tuple(product for item in parsed for product in item.products)
    scale_a = ScaleA(_scale_kind(products, "scale_a", "row"))
    scale_b = ScaleB(_scale_kind(products, "scale_b", "column"))
    _check_integer_output(first, attributes, scale_a, scale_b)
    tensors = tuple(operand for item in parsed for operand in item.tensors)
    return GemmProblem(
        dtype_a=first.dtypes[0],
        dtype_b=first.dtypes[1],
        dtype_c=first.dtypes[2],
        layout=layout,
        products=products,
        tensors=tuple(sorted(tensors, key=lambda operand: operand.role is Role.OUTPUT)),
        grouped=grouped or len(products) > 1,
        packing=first.packing,
        alpha=attributes.alpha,
        binary=first.binary,
        unary=attributes.unary,
        clamp_lo=attributes.clamp_lo,
        clamp_hi=attributes.clamp_hi,
        dtype_bias=first.dtype_bias,
        dtype_d=first.dtype_d,
        scale_a=scale_a,
        scale_b=scale_b,
        split_k=attributes.split_k,
    )


# ---- names ----


def _groups(request: OperationRequest, asked: int) -> tuple[list[_Group], bool]:
    """The request's tensors by group; whether the caller named them as groups (``a[0]``, ``a[1]``, ...)."""
    for name, desc in (*request.inputs.items(), *request.outputs.items()):
        check_tensor(name, desc)
    grouped = asked > 0 or "a[0]" in request.inputs
    groups: dict[int, _Group] = {}
    for name, desc in request.inputs.items():
        base, numbers = _split_name(name, grouped)
        if base == "out":
            raise _unknown_operand(name, grouped)
        group = groups.setdefault(numbers[0] if grouped else 0, _Group())
        if base == "d":
            group.d[numbers[-1]] = (name, desc)
        else:
            group.inputs[base] = (name, desc)
    for name, desc in request.outputs.items():
        base, numbers = _split_name(name, grouped)
        if base != "out":
            raise refuse(
                f"GEMM has no output {name!r}",
                name,
                name,
                "operand_known",
                "the output is named out (out[0], ... if grouped)",
            )
        groups.setdefault(numbers[0] if grouped else 0, _Group()).out = (name, desc)
    count = asked or max(len(groups), 1)
    if count > MAX_GROUPS:
        raise refuse(
            f"at most {MAX_GROUPS} groups fit in a call",
            "attributes.groups",
            count,
            "group_count",
            "make several calls",
        )
    if sorted(groups) != list(range(count)):
        missing = next((index for index in range(count) if index not in groups), None)
        raise refuse(
            f"{count} groups are asked for, but the operands name others"
            if missing is None
            else f"group {missing} has no operands",
            "attributes.groups",
            asked or len(groups),
            "group_count",
            f"number the operands a[0] to a[{count - 1}] without gaps, and likewise b and out",
        )
    return [groups[index] for index in range(count)], grouped


def _split_name(name: str, grouped: bool) -> tuple[str, list[int]]:
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        raise _unknown_operand(name, grouped)
    numbers = [int(number) for number in re.findall("[0-9]+", match[2])]
    if len(numbers) != grouped + (match[1] == "d"):
        raise _unknown_operand(name, grouped)
    return match[1], numbers


def _unknown_operand(name: object, grouped: bool) -> InvalidArgumentError:
    form = "a[g], b[g], bias[g], c[g], d[g][i], scale_a[g], scale_b[g] for group g" if grouped else _INPUTS
    return refuse(f"GEMM has no input {name!r}", str(name), name, "operand_known", f"the inputs are {form}")


def check_tensor(name: str, desc: Any) -> None:
    """Raise ``InvalidArgumentError`` unless ``desc`` is a tensor whose sizes and strides make sense."""
    if not isinstance(desc, TensorDesc):
        raise refuse(
            f"{name} is not a tensor", str(name), type(desc).__name__, "tensor_type", "give a tensor description"
        )
    numbers = (*desc.shape, *desc.strides)
    if not isinstance(desc.dtype, DType) or any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
        raise refuse(
            f"{name} is malformed", str(name), desc, "tensor_type", "give an element type and integer sizes and strides"
        )
    desc.check(name)


# ---- one group ----


def _parse_group(group: _Group, attributes: Attributes) -> _Parsed:
    a_name, a = _matrix(group, "a")
    b_name, b = _matrix(group, "b")
    if a.packing:
        raise refuse(
            "only B may be packed", f"{a_name}.packing", a.packing, "packed_operand", "pass a as a plain tensor"
        )
    if not is_pair(a.dtype, b.dtype):
        raise refuse(
            f"there is no GEMM of {a.dtype} with {b.dtype}",
            f"{b_name}.dtype",
            b.dtype.value,
            "dtype_pair",
            f"convert b to {a.dtype} (fp8 and bf8 mix with each other; the rest must be equal)"
            if a.dtype != DType.INT32
            else "use int8 or floating-point operands",
        )
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if b.shape[-2] != k:
        raise refuse(
            f"{a_name} has {k} columns but {b_name} has {b.shape[-2]} rows",
            f"{b_name}.shape",
            b.shape,
            "k_mismatch",
            "the last dimension of a and the second-to-last of b must be equal: transpose one of them, or correct its shape",
        )
    batch = broadcast_shapes([(a_name, a.shape[:-2]), (b_name, b.shape[:-2])])
    out_name, out = _output(group, attributes, (*batch, m, n), a.dtype)
    packing = _packed_b(b_name, b)
    binary, d = _binary(group, attributes)
    descs = {"a": a, "b": b, "out": out} | {
        name: group.inputs[name][1] for name in ("bias", "scale_a", "scale_b") if name in group.inputs
    }
    names = {"a": a_name, "b": b_name, "out": out_name} | {
        name: group.inputs[name][0] for name in ("bias", "scale_a", "scale_b") if name in group.inputs
    }
    for index, (d_name, desc) in enumerate(d):
        descs[f"d{index}"], names[f"d{index}"] = desc, d_name
    for key in descs:
        if key not in ("a", "b", "out"):
            _check_epilogue_dtype(names[key], key, descs[key], a.dtype)
    slots = _slots(names, descs, batch, m, k, n)
    products, a_layouts, b_layouts = _products(names, slots, batch, (m, n, k), packing, len(d), out)
    inputs = [Operand(names[key], desc, Role.INPUT) for key, desc in descs.items() if key != "out"]
    return _Parsed(
        dtypes=(a.dtype, b.dtype, out.dtype),
        dtype_bias=descs["bias"].dtype if "bias" in descs else None,
        dtype_d=tuple(desc.dtype for _, desc in d),
        binary=binary,
        packing=packing,
        a_layouts=a_layouts,
        b_layouts=b_layouts,
        products=products,
        tensors=(*inputs, Operand(out_name, out, Role.OUTPUT)),
    )


def _matrix(group: _Group, base: str) -> tuple[str, TensorDesc]:
    if base not in group.inputs:
        raise refuse(f"the input {base} is missing", base, "", "operand_missing", f"give the matrix {base}")
    name, desc = group.inputs[base]
    if len(desc.shape) < 2:
        raise refuse(
            f"{name} has {len(desc.shape)} dimensions; a matrix needs at least two",
            f"{name}.shape",
            desc.shape,
            "matrix_rank",
            "reshape a vector of n elements to [1, n] or [n, 1]",
        )
    return name, desc


def _output(group: _Group, attributes: Attributes, shape: tuple[int, ...], dtype_a: DType) -> tuple[str, TensorDesc]:
    wanted = attributes.out_dtype
    if group.out is None:
        name = "out" + group.inputs["a"][0][1:]
        elements = 1
        for size in shape:
            elements *= size
        if elements > MAX_ELEMENTS:
            raise refuse(
                "the result has more than 2**48 elements",
                f"{name}.shape",
                shape,
                "tensor_overflow",
                "split the problem",
            )
        desc = TensorDesc.of(wanted or default_output(dtype_a), shape)
    else:
        name, desc = group.out
        if desc.shape != shape:
            raise refuse(
                f"{name} has shape {list(desc.shape)}, but the product has {list(shape)}",
                f"{name}.shape",
                desc.shape,
                "output_shape",
                f"give an output of shape {list(shape)}",
            )
        if wanted is not None and wanted != desc.dtype:
            raise refuse(
                f"{name} is {desc.dtype}, but out_dtype says {wanted}",
                "attributes.out_dtype",
                wanted.value,
                "output_dtype",
                "leave out_dtype out, or let both agree",
            )
        if desc.packing:
            raise refuse(
                f"{name} cannot be packed", f"{name}.packing", desc.packing, "packed_operand", "give a plain output"
            )
        if desc.span and overlaps(desc):
            raise refuse(
                f"elements of {name} overlap in memory",
                f"{name}.strides",
                desc.strides,
                "output_overlap",
                "use strides that give every element its own place",
            )
    if desc.dtype not in output_dtypes(dtype_a):
        raise refuse(
            f"a GEMM of {dtype_a} cannot write {desc.dtype}",
            f"{name}.dtype",
            desc.dtype.value,
            "output_dtype",
            f"use one of: {', '.join(output_dtypes(dtype_a))}",
        )
    return name, desc


def _packed_b(name: str, b: TensorDesc) -> PackedFormat | None:
    if not b.packing:
        return None
    packing = PackedFormat.parse(b.packing, name)
    if len(b.shape) != 2:
        raise refuse(
            f"packed {name} has {len(b.shape)} dimensions",
            f"{name}.shape",
            b.shape,
            "packed_rank",
            "pack every matrix on its own and use groups",
        )
    needed = packing.nbytes(*b.shape)
    if b.packed_bytes != needed:
        raise refuse(
            f"packed {name} holds {b.packed_bytes} bytes, but {list(b.shape)} in this format fills {needed}",
            f"{name}.packed_bytes",
            b.packed_bytes,
            "packed_size",
            "pass the shape that the matrix had when it was packed",
        )
    return packing


def _binary(group: _Group, attributes: Attributes) -> tuple[Binary, list[tuple[str, TensorDesc]]]:
    """The canonical binary step (``MultiD`` forms only for two or more D) and its operands, the addend ``c`` last."""
    if sorted(group.d) != list(range(len(group.d))) or len(group.d) > MAX_D:
        raise refuse(
            "the D operands are not numbered from 0 without gaps",
            "d",
            sorted(group.d),
            "d_numbering",
            f"name them d[0], d[1], ... (at most {MAX_D})",
        )
    d = [group.d[index] for index in range(len(group.d))]
    given = attributes.binary
    if "c" in group.inputs:
        if given not in (None, Binary.ADD, Binary.MULTI_D_ADD) and (d or given is not Binary.PASS):
            raise refuse(
                f"c is added, which does not go together with {given}",
                "attributes.binary",
                given.value,
                "one_binary_step",
                "use binary=MultiDAdd, or leave c out",
            )
        d.append(group.inputs["c"])
    elif given is not None:
        _check_d_count(given, len(d))
    if not d:
        return Binary.PASS, d
    if given in (Binary.MULTIPLY, Binary.MULTI_D_MULTIPLY):
        return Binary.MULTIPLY if len(d) == 1 else Binary.MULTI_D_MULTIPLY, d
    return Binary.ADD if len(d) == 1 else Binary.MULTI_D_ADD, d


def _check_d_count(given: Binary, count: int) -> None:
    if given is Binary.PASS and count:
        reason, fix = (
            "D operands are given, but no step uses them",
            "set binary to Add, Multiply, MultiDAdd or MultiDMultiply, or leave d out",
        )
    elif given in (Binary.MULTI_D_ADD, Binary.MULTI_D_MULTIPLY) and not count:
        reason, fix = f"{given} needs D operands", "give d[0], d[1], ..."
    elif given in (Binary.ADD, Binary.MULTIPLY) and count != 1:
        reason, fix = (
            f"{given} takes exactly one D operand, not {count}",
            f"use MultiD{given} for several, and give at least d[0]",
        )
    else:
        return
    raise refuse(reason, "attributes.binary", given.value, "d_count", fix)


def _check_epilogue_dtype(name: str, key: str, desc: TensorDesc, dtype_a: DType) -> None:
    allowed = (DType.FP32,) if key.startswith("scale") else epilogue_dtypes(dtype_a)
    if desc.packing:
        raise refuse(
            f"{name} cannot be packed", f"{name}.packing", desc.packing, "packed_operand", "give a plain tensor"
        )
    if desc.dtype not in allowed:
        raise refuse(
            f"{name} cannot be {desc.dtype} in a GEMM of {dtype_a}",
            f"{name}.dtype",
            desc.dtype.value,
            "epilogue_dtype",
            f"use one of: {', '.join(allowed)}",
        )


# ---- strides ----


def _slots(
    names: Mapping[str, str], descs: Mapping[str, TensorDesc], batch: tuple[int, ...], m: int, k: int, n: int
) -> dict[str, Slot]:
    slots: dict[str, Slot] = {}
    for key, desc in descs.items():
        name, target = names[key], (*batch, m, n)
        if key == "a":
            target = (*batch, m, k)
        elif key == "b":
            target = (*batch, k, n)
        elif key == "bias":
            target = (*batch, 1, n)
        elif key == "scale_a":
            desc, target = _as_column(desc, m), (*batch, m, 1)
        elif key == "scale_b":
            target = (*batch, 1, n)
        slots[key] = slot(name, desc, target)
    return slots


def _as_column(desc: TensorDesc, m: int) -> TensorDesc:
    """Per-row scales may come as [M] as well as [M, 1]."""
    if desc.shape and desc.shape[-1] == m and desc.shape[-2:] != (m, 1):
        return replace(desc, shape=(*desc.shape, 1), strides=(*desc.strides, 0))
    return desc


def _products(
    names: Mapping[str, str],
    slots: Mapping[str, Slot],
    batch: tuple[int, ...],
    sizes: tuple[int, int, int],
    packing: PackedFormat | None,
    num_d: int,
    out: TensorDesc,
) -> tuple[tuple[Product, ...], str, str]:
    """The products, and the layouts that would describe A and B."""
    m, n, k = sizes
    if 0 in (*batch, m, n):
        views = {key: View(names[key], 0, 0) for key in slots}
        return (_product(0, m, n, k, views, num_d),), "rc", "cr"
    done = collapse(batch, m, slots, foldable=True, limit=MAX_GROUPS)
    m = done.m
    a, b, c = done.slots["a"], done.slots["b"], done.slots["out"]
    a_layouts = layouts_of(m, k, a.row_stride, a.col_stride, "r") if k else "rc"
    b_layouts = layouts_of(k, n, b.row_stride, b.col_stride, "c") if k and packing is None else "cr"
    for key, found in (("a", a_layouts), ("b", b_layouts)):
        if not found:
            raise refuse(
                f"{names[key]} has unit stride in neither of its last two dimensions",
                f"{names[key]}.strides",
                (done.slots[key].row_stride, done.slots[key].col_stride),
                "unit_stride",
                "make a contiguous copy of it",
            )
    if n > 1 and c.col_stride != 1:
        raise refuse(
            f"{names['out']} is not row-major",
            f"{names['out']}.strides",
            out.strides,
            "output_layout",
            "give an output with unit stride in its last dimension, or compute the transposed product (swap a and b, both transposed)",
        )
    products = []
    for offsets in done.offsets:
        views = {
            key: View(
                names[key],
                item.row_stride if (k if key == "b" else m) > 1 else 0,
                item.col_stride,
                item.batch_strides[0],
                offsets[key],
            )
            for key, item in done.slots.items()
        }
        products.append(_product(done.size, m, n, k, views, num_d))
    return tuple(products), a_layouts, b_layouts


def _product(batch: int, m: int, n: int, k: int, views: Mapping[str, View], num_d: int) -> Product:
    return Product(
        m=m,
        n=n,
        k=k,
        batch=batch,
        a=views["a"],
        b=views["b"],
        out=views["out"],
        bias=views.get("bias"),
        d=tuple(views[f"d{index}"] for index in range(num_d)),
        scale_a=views.get("scale_a"),
        scale_b=views.get("scale_b"),
    )


# ---- all groups together ----


def _require_same_signature(first: _Parsed, other: _Parsed, index: int) -> None:
    for what in ("dtypes", "dtype_bias", "dtype_d", "binary", "packing"):
        if getattr(first, what) != getattr(other, what):
            raise refuse(
                f"group {index} differs from group 0 in its {what}",
                f"a[{index}]",
                str(getattr(other, what)),
                "group_signature",
                "all groups of a call share element types, bias, D operands and packed format; make two calls",
            )
    if {view is None for item in (first, other) for product in item.products for view in (product.scale_a,)} == {
        True,
        False,
    }:
        raise refuse(
            f"group {index} differs from group 0 in scale_a",
            f"scale_a[{index}]",
            "",
            "group_signature",
            "give scale_a for all groups or for none",
        )
    if {view is None for item in (first, other) for product in item.products for view in (product.scale_b,)} == {
        True,
        False,
    }:
        raise refuse(
            f"group {index} differs from group 0 in scale_b",
            f"scale_b[{index}]",
            "",
            "group_signature",
            "give scale_b for all groups or for none",
        )


def _common(parsed: list[_Parsed], which: str) -> str:
    choices: list[str] = [item.a_layouts if which == "a" else item.b_layouts for item in parsed]
    for letter in choices[0]:
        if all(letter in others for others in choices):
            return letter
    index = next(index for index, others in enumerate(choices) if not set(others) & set(choices[0]))
    raise refuse(
        f"{which} is row-major in one group and column-major in another",
        f"{which}[{index}].strides",
        choices[index],
        "group_layout",
        "give all groups the same layout, or make two calls",
    )


def _scale_kind(products: tuple[Product, ...], which: str, vector: str) -> str:
    views: list[View | None] = [getattr(product, which) for product in products]
    if views[0] is None:
        return "none"
    return vector if any(view is not None and (view.row_stride or view.col_stride) for view in views) else "tensor"


def _check_integer_output(parsed: _Parsed, attributes: Attributes, scale_a: ScaleA, scale_b: ScaleB) -> None:
    """An int32 result is the exact sum: the epilogue computes in fp32, which would round."""
    if parsed.dtypes[2] != DType.INT32:
        return
    rounding = [
        (field, value)
        for field, value, rounds in (
            ("attributes.alpha", attributes.alpha, attributes.alpha != 1.0),
            ("scale_a", "", scale_a is not ScaleA.NONE),
            ("scale_b", "", scale_b is not ScaleB.NONE),
            ("attributes.unary", attributes.unary.value, attributes.unary is not Unary.PASS),
            ("bias", "", parsed.dtype_bias is not None),
            ("d" if parsed.binary is not Binary.ADD else "c", "", parsed.binary is not Binary.PASS),
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
