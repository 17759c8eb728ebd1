"""Kernels that planners propose for AMD GPUs, over problems of many kinds, and a part that covers all of them: each one
is to build within its registers. What one could not compile is not to be proposed.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from sampling import covering

from tilewright_arch import ArchSpec
from tilewright_gemm.config.block_scales import SCALES, block_of, block_word, scale_shapes
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.loading.loader import PluginManager
from tilewright_kit.types.errors import UnsupportedError
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["REQUESTS", "block_scales", "convolutions", "cover", "narrow_weights", "owner", "proposed", "requests"]

Requests = Iterator[OperationRequest]
FLOATS = ("fp32", "fp16", "bf16")
LAYERS = (
    (32, 64, 64, 56, 3, 1, 1, 1), (32, 512, 512, 7, 3, 1, 1, 1), (32, 256, 64, 56, 1, 1, 0, 1),
    (32, 3, 64, 224, 7, 2, 3, 1), (32, 128, 256, 28, 3, 2, 1, 1), (8, 64, 64, 28, 3, 1, 1, 16),
    (8, 64, 64, 28, 5, 1, 2, 16), (8, 32, 32, 28, 7, 1, 3, 16), (32, 256, 256, 28, 3, 2, 1, 32),
    (32, 96, 96, 56, 3, 1, 1, 96),
)  # fmt: skip
"""Images, channels, outputs, size, taps, stride, padding, groups."""
HEADS = ((32, 32), (64, 64), (96, 128), (128, 128), (256, 256))


def products() -> Requests:
    """Large, small, few rows, a long K and odd sizes, in every type and layout."""
    sizes = ((4096, 4096, 4096), (1024, 1024, 1024), (16, 4096, 4096), (512, 512, 16384), (333, 777, 1111))
    types = (("fp32", "fp32"), ("fp16", "fp16"), ("bf16", "bf16"), ("fp8", "bf16"), ("bf8", "fp16"), ("int8", "fp32"))
    for (m, n, k), (dtype, out), a, b in itertools.product(sizes, types, "rc", "rc"):
        inputs = {
            "a": TensorDesc.of(dtype, (m, k), (k, 1) if a == "r" else (1, m)),
            "b": TensorDesc.of(dtype, (k, n), (n, 1) if b == "r" else (1, k)),
        }
        yield OperationRequest("gemm", inputs, {}, {"out_dtype": out})


def narrow_weights() -> Requests:
    """Packed weights of 4 bits, with scales of each type, and zero points or none; lines that are aligned, and not."""
    of = TensorDesc.of
    sizes = ((1, 4096, 4096), (16, 4096, 4096), (64, 4096, 4096), (1024, 4096, 4096), (33, 1000, 1111))
    for (m, n, k), dtype, scales, zeros in itertools.product(
        sizes, ("fp16", "bf16", "fp8"), ("fp32", "fp16", "bf16"), (False, True)
    ):
        groups, rows = -(-k // 128), -(-k // 2)
        inputs = {"a": of(dtype, (m, k)), "b": of("int8", (rows, n), (1, rows)), "scale_b": of(scales, (n, groups))}
        inputs |= {"zero_b": of("int8", (n, groups))} if zeros else {}
        yield OperationRequest("gemm", inputs, {}, {"b_format": "int4_128", "out_dtype": "bf16"})


def block_scales() -> Requests:
    """8-bit floats with scales of blocks, in every layout."""
    of = TensorDesc.of
    sizes = ((4096, 4096, 4096), (16, 4096, 4096), (333, 777, 1111))
    for (m, n, k), dtype, blocks, a, b in itertools.product(sizes, ("fp8", "bf8"), SCALES.values(), "rc", "rc"):
        inputs = {
            "a": of(dtype, (m, k), (k, 1) if a == "r" else (1, m)),
            "b": of(dtype, (k, n), (n, 1) if b == "r" else (1, k)),
        }
        shapes = scale_shapes(blocks[1], m, n, k)
        inputs |= {
            f"scale_{side}": of(block_of(blocks[1]).dtype, shape) for side, shape in zip("ab", shapes, strict=True)
        }
        word = block_word(*blocks).value
        yield OperationRequest("gemm", inputs, {}, {"scale_block": word, "out_dtype": "bf16"})


def convolutions(name: str) -> Requests:
    """Bodies and first layers, strides, small groups with filters of 3, 5 and 7, depthwise; channels last and first."""
    operands = {"conv": ("x", "w"), "conv_backward_data": ("dy", "w"), "conv_backward_weight": ("x", "dy")}[name]
    for (n, c, k, size, taps, stride, pad, groups), dtype, last in itertools.product(LAYERS, FLOATS, (True, False)):
        rows = (size + 2 * pad - taps) // stride + 1
        shapes = {"x": (n, c, size, size), "w": (k, c // groups, taps, taps), "dy": (n, k, rows, rows)}
        inputs = {item: TensorDesc.of(dtype, shapes[item], _strides(shapes[item], last)) for item in operands}
        attributes: dict[str, Any] = {"stride": stride, "padding": pad, "groups": groups}
        attributes |= {"input_size": (size, size)} if name == "conv_backward_data" else {}
        attributes |= {"filter_size": (taps, taps)} if name == "conv_backward_weight" else {}
        yield OperationRequest(name, inputs, {}, attributes)


def _strides(shape: tuple[int, ...], last: bool) -> tuple[int, ...]:
    _, c, h, w = shape
    return (h * w * c, 1, w * c, c) if last else (c * h * w, h * w, w, 1)


def attentions(name: str) -> Requests:
    """Heads of all sizes, few and many queries, masks, and (of gradients) an order that is always the same."""
    backward = name == "attention_backward"
    masks: tuple[Mapping[str, Any], ...] = ({}, {"causal": True}, {"window_left": 64, "window_right": 0})
    for (q, v), dtype, rows, mask in itertools.product(HEADS, FLOATS, (1, 128, 4096), masks):
        if backward and rows == 1:
            continue
        sizes = {"q": (rows, q), "k": (4096, q), "v": (4096, v)}
        sizes |= {"o": (rows, v), "do": (rows, v)} if backward else {}
        inputs = {item: TensorDesc.of(dtype, (2, 8, *size)) for item, size in sizes.items()}
        if not backward:
            yield OperationRequest(name, inputs, {}, dict(mask))
            continue
        inputs["lse"] = TensorDesc.of("fp32", (2, 8, rows))
        for fixed in (False, True):
            yield OperationRequest(name, inputs, {}, {**mask, "deterministic": fixed})


def more_attentions() -> Requests:
    """Latent caches, scores as an output, heads above 256, a bias with slopes, pages, and 8-bit floats."""
    of = TensorDesc.of
    for dtype, rows in itertools.product(FLOATS, (1, 128)):
        q, k, v = of(dtype, (2, 16, rows, 128)), of(dtype, (2, 4, 4096, 128)), of(dtype, (2, 4, 4096, 128))
        for latent, values in ((576, 512), (288, 256), (72, 64)):
            inputs = {"q": of(dtype, (2, 16, rows, latent)), "k": of(dtype, (2, 1, 4096, latent))}
            yield OperationRequest("attention", inputs, {}, {"head_dim_v": values})
        for word in ("scaled", "masked", "probabilities"):
            yield OperationRequest("attention", {"q": q, "k": k, "v": v}, {}, {"return_scores": word})
        wide = {name: of(dtype, (2, 4, 128 if name != "q" else rows, 512)) for name in "qkv"}
        yield OperationRequest("attention", wide, {}, {"causal": True})
        both = {"bias": of("fp32", (2, 16, rows, 4096)), "alibi_slopes": of("fp32", (16,))}
        yield OperationRequest("attention", {"q": q, "k": k, "v": v, **both}, {}, {})
        pages = {name: of(dtype, (128, 64, 4, 128)) for name in "kv"}
        table = {"block_table": of("int32", (2, 64)), "seqlens_k": of("int32", (2,))}
        yield OperationRequest("attention", {"q": q, **pages, **table}, {}, {})
    for rows, size in itertools.product((1, 128, 4096), (64, 128, 256)):
        inputs = {name: of("fp8", (2, 8, rows if name == "q" else 4096, size)) for name in "qkv"}
        inputs |= {f"{name}_descale": of("fp32", ()) for name in "qkv"}
        yield OperationRequest("attention", inputs, {}, {"out_dtype": "bf16"})


def appends() -> Requests:
    """Rows appended to caches of their own type, and rounded to 8-bit floats; with rotation and without."""
    of = TensorDesc.of
    tables = {name: of("fp32", (4096, 64)) for name in ("rotary_cos", "rotary_sin")}
    for new, cache_type, size in itertools.product(FLOATS, (None, "fp8"), (64, 128, 256)):
        if cache_type and new == "fp32":
            continue
        inputs = {name: of(new, (3, 2, 5, size)) for name in ("k_new", "v_new")}
        inputs |= {name: of(cache_type or new, (12, 16, 2, size)) for name in ("k_past", "v_past")}
        inputs |= {"block_table": of("int32", (3, 4)), "seqlens_k": of("int32", (3,))}
        inputs |= {"k_descale": of("fp32", (2,)), "v_descale": of("fp32", ())} if cache_type else {}
        yield OperationRequest("kv_append", inputs, {}, {})
        if size == 128:
            for rope in ("half", "interleaved"):
                yield OperationRequest("kv_append", inputs | tables, {}, {"rope": rope})


REQUESTS: Mapping[str, Callable[[], Requests]] = {
    "gemm": lambda: itertools.chain(products(), narrow_weights(), block_scales()),
    "conv": lambda: convolutions("conv"),
    "conv_backward_data": lambda: convolutions("conv_backward_data"),
    "conv_backward_weight": lambda: convolutions("conv_backward_weight"),
    "attention": lambda: itertools.chain(attentions("attention"), more_attentions()),
    "attention_backward": lambda: attentions("attention_backward"),
    "kv_append": appends,
    "moe_gemm": lambda: iter(()),
}
"""Problems by operation, beside the operation's own samples."""


def requests(name: str) -> list[OperationRequest]:
    """All problems of an operation."""
    return [*REQUESTS[name](), *owner(name).samples()]


def proposed(
    operation: Operation[Any, Any], arch: ArchSpec, requests: Iterable[OperationRequest]
) -> list[KernelConfig]:
    """All candidates for the problems and the kernels that their plans need beside them, each once, in their order."""
    found: dict[KernelConfig, None] = {}
    device = device_of(arch)
    for request in requests:
        try:
            problem = operation.parse(request)
            candidates = list(operation.candidates(problem, device))
        except UnsupportedError:
            continue  # a type that the arch has no instruction for
        found |= {config: None for config in candidates if config.operation == operation.name}
        if operation.name not in _ALONE:
            for config in candidates:
                found |= dict.fromkeys(operation.plan(problem, config, device).kernels)
    return list(found)


_ALONE = ("gemm", "moe_gemm")
"""Operations whose plans have no other kernels than the candidate."""


@cache
def _operations() -> Mapping[str, Operation[Any, Any]]:
    manager = PluginManager()
    manager.load_entry_points()
    return manager.operations


def owner(name: str) -> Operation[Any, Any]:
    """The operation that generates kernels of this name."""
    return _operations()[name]


def cover(configs: Iterable[KernelConfig]) -> list[KernelConfig]:
    """A part of the kernels in which every shape (all that decides about registers, but for what follows) is there with
    each type and each layout that it is proposed with, and every other field with each of its values in every pipeline.
    Of kernels that show as much, those of the largest tiles.
    """
    found = sorted(configs, key=lambda item: -math.prod(item.to_dict().get("tile", ())[:2]))
    return [found[place] for place in covering(found, _shown)]


_TYPES = ("dtype", "dtype_a", "dtype_b", "dtype_in", "layout", "family")
_SHAPE = (
    "pipeline", "tile", "wave", "warp_tile", "hdim", "specialization", "channel_tile", "pixel_tile", "filter",
    "vector_sizes", "explicit_gemm", "two_stage",
)  # fmt: skip


def _shown(config: KernelConfig) -> set[str]:
    fields = config.to_dict()
    for name in ("split_k", "max_splits_log2", "num_splits"):
        if name in fields:
            fields[name] = fields[name] > 1  # how many decides about nothing but the launch
    shape = json.dumps([config.operation, *(fields.get(name) for name in _SHAPE)])
    shown = {f"{shape} {name} {fields.get(name)}" for name in _TYPES}
    kind = f"{config.operation} {fields.get('pipeline')} {fields.get('family')}"
    return shown | {f"{kind} {name} {value}" for name, value in fields.items() if name not in _SHAPE}
