"""Parts of a request beyond plain attention: a bias, slopes, learned sinks, factors of fp8 operands, random seeds."""

from __future__ import annotations

from tilewright_fmha.problem.attributes import Attributes
from tilewright_fmha.problem.operands import Tensors, check_index
from tilewright_fmha.problem.problem import Paging, Scaling, Strides
from tilewright_fmha.problem.shapes import Sizes
from tilewright_fmha.vocabulary import BiasKind, FmhaDType, QScale
from tilewright_kit.requests.attributes import refuse
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["need_dropout", "read_bias", "read_divisors", "read_dtype", "read_rng", "read_scaling", "read_sinks"]


def read_bias(tensors: Tensors, sizes: Sizes, q: DType) -> tuple[BiasKind, DType | None]:
    """Which bias there is, and its element type."""
    bias, slopes = tensors.desc("bias"), tensors.desc("alibi_slopes")
    if slopes is not None:
        _fp32(tensors, "alibi_slopes")
        both = ((sizes.heads_q,), (sizes.batch, sizes.heads_q))
        if slopes.shape not in both or (slopes.strides[-1] != 1 and slopes.shape[-1] > 1):
            raise refuse(
                f"alibi_slopes has shape {list(slopes.shape)} and strides {list(slopes.strides)}",
                "alibi_slopes.shape",
                slopes.shape,
                "slopes_shape",
                f"give one slope a query head, without gaps: [{sizes.heads_q}] or [{sizes.batch}, {sizes.heads_q}]",
            )
    if bias is None:
        return BiasKind.NONE if slopes is None else BiasKind.ALIBI, None
    lead = 1 if sizes.varlen else sizes.batch
    full = (lead, sizes.heads_q, sizes.seq_q, sizes.seq_k)
    if len(bias.shape) != 4 or any(have not in (1, want) for have, want in zip(bias.shape, full, strict=True)):
        raise refuse(
            f"bias has shape {list(bias.shape)}, but scores have {list(full)}",
            "bias.shape",
            bias.shape,
            "bias_shape",
            f"give four sizes, each that of {list(full)} or 1",
        )
    allowed = tuple(dict.fromkeys((DType.FP32, *((q,) if q.bytes > 1 else ()))))
    if bias.dtype not in allowed:
        raise refuse(
            f"bias cannot be {bias.dtype} here",
            "bias.dtype",
            bias.dtype.value,
            "bias_dtype",
            f"use one of: {', '.join(allowed)}",
        )
    tensors.place("bias", False)
    return BiasKind.ELEMENTWISE, bias.dtype


def read_sinks(tensors: Tensors, sizes: Sizes) -> bool:
    sinks = tensors.desc("sinks")
    if sinks is None:
        return False
    _fp32(tensors, "sinks")
    if sinks.shape != (sizes.heads_q,) or not sinks.is_contiguous:
        raise refuse(
            f"sinks has shape {list(sinks.shape)}",
            "sinks.shape",
            sinks.shape,
            "sinks_shape",
            f"give one logit for each query head, [{sizes.heads_q}], side by side",
        )
    return True


def _fp32(tensors: Tensors, name: str, rule: str = "option_dtype") -> None:
    desc = tensors.inputs[name]
    if desc.dtype != DType.FP32:
        raise refuse(f"{name} is {desc.dtype}", f"{name}.dtype", desc.dtype.value, rule, "give fp32 numbers")


def need_dropout(attributes: Attributes) -> None:
    """``randval`` is described as an output: something must be drawn."""
    if not attributes.dropout:
        raise refuse(
            "there are no random values to return: nothing is dropped",
            "randval",
            "",
            "randval_without_dropout",
            "give dropout_p above 0, or leave the output randval out",
        )


def read_rng(tensors: Tensors, attributes: Attributes) -> tuple[int, int]:
    """Seed and offset; zeros if they are an operand."""
    if "rng" not in tensors.inputs:
        return attributes.seed, attributes.offset
    if not attributes.dropout:
        raise refuse(
            "rng seeds dropout, but nothing is dropped",
            "rng",
            tensors.inputs["rng"].shape,
            "randval_without_dropout",
            "give dropout_p above 0, or leave rng out",
        )
    if attributes.seed or attributes.offset:
        raise refuse(
            "rng and attributes both say what dropout is seeded with",
            "attributes.seed" if attributes.seed else "attributes.offset",
            attributes.seed or attributes.offset,
            "seed_given_once",
            "leave seed and offset out",
        )
    check_index(tensors, "rng", (4,), "rng_shape", "give the seed's low and high 32 bits, the offset, and 0")
    return 0, 0


# ---- element types ----


def read_dtype(tensors: Tensors, attributes: Attributes, names: tuple[str, str, str], output: str) -> FmhaDType:
    """The word for the element types of queries, keys, values and the output."""
    _, k_name, v_name = names
    q, k, v = (tensors.inputs[name].dtype for name in names)
    if v != k:
        raise refuse(
            f"{v_name} is {v}, but {k_name} is {k}",
            f"{v_name}.dtype",
            v.value,
            "dtype_combination",
            f"give {v_name} as {k}",
        )
    given = tensors.given.get(output) or tensors.desc(output)
    asked = attributes.out_dtype or (given.dtype if given else None)
    if given is not None and asked != given.dtype:
        raise refuse(
            f"{output} is {given.dtype}, but out_dtype says {asked}",
            "attributes.out_dtype",
            str(asked),
            "output_dtype",
            "leave out_dtype out, or let both agree",
        )
    choices = [word for word in FmhaDType if (word.q, word.kv) == (q, k) and not word.value.startswith("mx")]
    if not choices:
        raise refuse(
            f"there is no attention of {q} queries with {k} keys and values",
            f"{k_name}.dtype",
            k.value,
            "dtype_combination",
            f"give {k_name} and {v_name} as {q}" + (" or fp8" if q in (DType.FP16, DType.BF16) else "")
            if any(word.q == q for word in FmhaDType)
            else "give queries, keys and values in one of fp32, fp16, bf16, fp8",
        )
    if asked is None:
        return choices[0]
    found = FmhaDType.of(q, k, asked)
    if found is None:
        raise refuse(
            f"attention of {q} queries with {k} keys and values cannot give {asked}",
            f"{output}.dtype" if given else "attributes.out_dtype",
            asked.value,
            "output_dtype",
            f"use one of: {', '.join(dict.fromkeys(word.o.value for word in choices))}",
        )
    return found


# ---- factors of fp8 operands ----


def read_scaling(
    tensors: Tensors, attributes: Attributes, sizes: Sizes, dtype: FmhaDType, paging: Paging | None
) -> Scaling | None:
    """How fp8 operands are scaled; None if they are not."""
    given = {name: tensors.inputs[f"{name}_descale"] for name in "qkv" if f"{name}_descale" in tensors.inputs}
    for name, desc in given.items():
        full = f"{name}_descale"
        _fp32(tensors, full, "scale_dtype")
        if (dtype.q if name == "q" else dtype.kv).bytes != 1:
            raise refuse(
                f"{full} is given, but {name} is {dtype.q if name == 'q' else dtype.kv}",
                full,
                desc.shape,
                "scale_dtype",
                f"leave {full} out (the attribute scale scales scores), or give {name} as fp8",
            )
    kind = attributes.qscale or _deduced(given, sizes, paging)
    if attributes.qscale is QScale.NONE and given:
        raise refuse(
            "qscale is no, but there are factors",
            "attributes.qscale",
            "no",
            "descale_shape",
            "leave qscale out: it follows from the shapes of the factors",
        )
    if kind is QScale.NONE or (not given and dtype.kv.bytes != 1):
        if attributes.qscale not in (None, QScale.NONE):
            raise refuse(
                f"qscale {kind} is for fp8 operands",
                "attributes.qscale",
                str(kind),
                "scale_dtype",
                "leave qscale out, or give fp8 operands",
            )
        return None
    if kind is QScale.KV_BLOCKSCALE and paging is None:
        raise refuse(
            "kv_blockscale has a factor for each page, but there are no pages",
            "attributes.qscale",
            str(kind),
            "kv_blockscale_paged",
            "use qscale=blockscale, or give block_table and keys and values in pages",
        )
    blocks = kind is QScale.BLOCKSCALE
    places = {name: _factor(name, desc, kind, attributes, sizes, paging) for name, desc in given.items()}
    absent = Strides()
    return Scaling(
        kind,
        attributes.scale_block_q if blocks else 0,
        attributes.scale_block_k if blocks else 0,
        places.get("q", absent),
        places.get("k", absent),
        places.get("v", absent),
    )


def read_divisors(tensors: Tensors, attributes: Attributes, sizes: Sizes, new: DType, cache: DType) -> Scaling | None:
    """Factors that new rows of a cache are divided by when they become 8-bit floats; None if they do not."""
    given = {name: tensors.inputs[f"{name}_descale"] for name in "kv" if f"{name}_descale" in tensors.inputs}
    if new == cache:
        for name, desc in given.items():
            other = f", or give {name}_new as fp16 or bf16, which is divided by it" if cache.bytes == 1 else ""
            raise refuse(
                f"{name}_descale is given, but {name}_new is {new} and stored as it comes",
                f"{name}_descale",
                desc.shape,
                "scale_dtype",
                f"leave {name}_descale out{other}",
            )
        return None
    kind, places = QScale.PERTENSOR, {}
    for name, desc in given.items():
        _fp32(tensors, f"{name}_descale", "scale_dtype")
        places[name] = _factor(name, desc, kind, attributes, sizes, None)
    return Scaling(kind, k=places.get("k", Strides()), v=places.get("v", Strides()))


def _deduced(given: dict[str, TensorDesc], sizes: Sizes, paging: Paging | None) -> QScale:
    if not given:
        return QScale.NONE
    if any(len(desc.shape) == 3 for desc in given.values()):
        return QScale.BLOCKSCALE
    pages = (paging.pages, sizes.heads_k) if paging else None
    name = next((name for name in "kv" if name in given and given[name].shape == pages), "")
    if not name:
        return QScale.PERTENSOR
    if pages == (sizes.batch, sizes.heads_k) and sizes.batch > 1:
        raise refuse(
            f"{name}_descale has a factor for each of {pages[0]} pages, or for each of as many sequences",
            f"{name}_descale.shape",
            pages,
            "descale_shape",
            "say which: qscale=kv_blockscale (pages) or qscale=pertensor (sequences)",
        )
    return QScale.KV_BLOCKSCALE


def _factor(
    name: str,
    desc: TensorDesc,
    kind: QScale,
    attributes: Attributes,
    sizes: Sizes,
    paging: Paging | None,
) -> Strides:
    heads, rows = (sizes.heads_q, sizes.seq_q) if name == "q" else (sizes.heads_k, sizes.seq_k)
    block = attributes.scale_block_q if name == "q" else attributes.scale_block_k
    if kind is QScale.BLOCKSCALE:
        wanted: tuple[tuple[int, ...], ...] = ((sizes.batch, heads, -(-rows // block)),)
        what = f"one factor for {block} rows"
    elif kind is QScale.KV_BLOCKSCALE and name != "q" and paging is not None:
        wanted, what = ((paging.pages, heads),), "one factor for each page and head"
    else:
        wanted, what = ((), (heads,), (sizes.batch, heads)), "one factor, one for each head, or for each item and head"
    if desc.shape not in wanted:
        shapes = " or ".join(str(list(shape)) for shape in wanted)
        raise refuse(
            f"{name}_descale has shape {list(desc.shape)}, but {kind} factors have {shapes}",
            f"{name}_descale.shape",
            desc.shape,
            "descale_shape",
            f"give {what}: {shapes}",
        )
    axes = "h" if len(desc.shape) == 1 else "bhr"[: len(desc.shape)]
    steps = {axis: step if size > 1 else 0 for axis, size, step in zip(axes, desc.shape, desc.strides, strict=True)}
    return Strides(f"{name}_descale", steps.get("b", 0), steps.get("h", 0), steps.get("r", 0), 0)
