"""Kernels of attention as source units state them, sizes of calls, and the C structures of their arguments."""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass
from typing import Any

from tilewright_fmha.problem.masks import Mask

EVERYTHING = Mask()
TENSORS = (
    "q", "k", "v", "o", "lse", "bias", "randval", "d_o", "dq", "dk", "dv", "dbias", "k_new", "v_new", "k_past",
    "v_past",
)  # fmt: skip
POINTERS = (
    "cu_q", "cu_k", "len_q", "len_k", "block_table", "page_starts", "cache_index", "slopes", "sinks", "dsinks",
    "rot_cos", "rot_sin", "rng", "status", "lens_out", "delta", "dq_acc", "dbias_acc", "o_acc", "lse_acc", "workspace",
    "counters",
)  # fmt: skip
INTEGERS = (
    "batch", "heads_q", "heads_k", "seq_q", "seq_k", "hdim_q", "hdim_v", "total_q", "total_k", "table_stride",
    "page_size", "num_pages", "cache_items", "slope_batch", "left", "right", "bottom_right", "sink_size", "seed",
    "offset", "drop_below", "splits", "split_rows", "q_tiles", "k_tiles", "tiles", "new_rows", "rotary_dim",
    "rotary_stride", "workspace_bytes", "min_q",
)  # fmt: skip


class Tensor(ctypes.Structure):
    """``tw_fmha_tensor``."""

    _fields_ = [("ptr", ctypes.c_void_p), *((n, ctypes.c_int64) for n in ("batch", "head", "row", "col", "chunk"))]


class Scale(ctypes.Structure):
    """``tw_fmha_scale``."""

    _fields_ = [("ptr", ctypes.c_void_p), *((n, ctypes.c_int64) for n in ("batch", "head", "block", "block_rows"))]


class FmhaArgs(ctypes.Structure):
    """``tw_fmha_args`` of core/args/fmha.h."""

    _fields_ = [
        *((name, Tensor) for name in TENSORS),
        *((name, Scale) for name in ("q_scale", "k_scale", "v_scale")),
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in INTEGERS),
        *((name, ctypes.c_double) for name in ("scale", "softcap", "keep_scale", "p_scale")),
    ]


@dataclass(frozen=True)
class FmhaKernel:
    """One kernel configuration, as a generated source unit states it."""

    q: str = "fp32"
    kv: str = "fp32"
    o: str = "fp32"
    bias_type: str = "fp32"
    rot: str = "fp32"
    family: str = "forward"
    hdim: tuple[int, int] = (64, 64)
    block: tuple[int, int] = (24, 64)
    register: tuple[int, int, int] = (6, 32, 1)
    mask: str = "no"
    bias: str = "no"
    qscale: str = "no"
    rope: str = "none"
    kv_layout: str = "linear"
    kv_lookup: str = "vllm"
    varlen: bool = False
    v_col: bool = False
    lse: bool = True
    dropout: bool = False
    softcap: bool = False
    paged: bool = False
    token_sinks: bool = False
    learned_sinks: bool = False
    skip_min: bool = False
    randval: bool = False
    page_size: int = 0
    team: int = 2

    def replace(self, **changes: Any) -> FmhaKernel:
        return dataclasses.replace(self, **changes)

    def lines(self) -> list[str]:
        """The members of the struct that states this configuration."""
        types = {"Q": self.q, "K": self.kv, "V": self.kv, "O": self.o, "P": self.q, "Bias": self.bias_type}
        lines = [f"using {name} = tw::{dtype};" for name, dtype in {**types, "Rot": self.rot}.items()]
        numbers = {
            "hdim_q": self.hdim[0], "hdim_v": self.hdim[1], "m0": self.block[0], "n0": self.block[1],
            **dict(zip(("warp_m0", "warp_n0", "warp_k0"), self.register, strict=True)),
            "page_size": self.page_size, "team": self.team,
        }  # fmt: skip
        lines += [f"static constexpr int {name} = {value};" for name, value in numbers.items()]
        words = {
            "family": ("FmhaFamily", self.family), "mask": ("FmhaMask", self.mask), "bias": ("FmhaBias", self.bias),
            "qscale": ("FmhaScale", self.qscale), "rope": ("FmhaRope", self.rope),
            "kv_layout": ("KvLayout", self.kv_layout), "kv_lookup": ("KvLookup", self.kv_lookup),
        }  # fmt: skip
        lines += [f"static constexpr tw::{kind} {name} = tw::{kind}::{word};" for name, (kind, word) in words.items()]
        for name in (
            "varlen", "v_col", "lse", "dropout", "softcap", "paged", "token_sinks", "learned_sinks", "skip_min",
            "randval",
        ):  # fmt: skip
            lines.append(f"static constexpr bool {name} = {'true' if getattr(self, name) else 'false'};")
        return lines

    def source(self, name: str) -> str:
        body = "\n  ".join(self.lines())
        kind = self.family if self.family in ("combine", "append") else "forward"
        text = f'#include "tilewright/cpu/fmha/{kind}.hpp"\nnamespace {{ struct Config_{name} {{\n  {body}\n}}; }}\n'
        text += f"TW_FMHA_{kind.upper()}({name}, Config_{name})\n"
        return text + (f"TW_FMHA_WORKSPACE({name}, Config_{name})\n" if kind == "forward" else "")


@dataclass(frozen=True)
class FmhaShape:
    """Sizes of a problem and how it lies in memory. ``lens_q``, ``lens_k``: true lengths (varlen: always)."""

    batch: int = 2
    heads: tuple[int, int] = (2, 2)
    seq: tuple[int, int] = (17, 65)
    hdim: tuple[int, int] = (64, 64)
    mask: Mask = EVERYTHING
    layout: str = "bhsd"
    lens_q: tuple[int, ...] = ()
    lens_k: tuple[int, ...] = ()
    room: tuple[int, int] = (0, 0)  # varlen: rows between sequences; their lengths are then given beside cu_seqlens
    page: int = 0
    bias_axes: tuple[bool, bool, bool, bool] = (True, True, True, True)
    slopes_by_item: bool = False
    scale: float = 0.0
    softcap: float = 0.0
    drop_below: int = 0
    splits: int = 1
    min_q: int = 0
    blocks: tuple[int, int] = (0, 0)  # rows of q, of k and v, that share a scale; 0: one for each head
    rng: bool = False
    cache_items: int = 0  # of a cache that items choose from; 0: every item has its own

    def replace(self, **changes: Any) -> FmhaShape:
        return dataclasses.replace(self, **changes)


def combine_of(kernel: FmhaKernel) -> FmhaKernel:
    """The second stage of a split kernel."""
    return FmhaKernel(
        q=kernel.q, kv=kernel.kv, o=kernel.o, family="combine", hdim=kernel.hdim, varlen=kernel.varlen, lse=kernel.lse,
        learned_sinks=kernel.learned_sinks, skip_min=kernel.skip_min,
    )  # fmt: skip
