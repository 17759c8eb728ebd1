"""Appending to a cache: new rows are where their positions say, rotated, and nothing else has changed."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fmha_native_args import FmhaArgs, FmhaKernel, Tensor
from native_harness import DTYPES, LEVELS, Library, Runtime, guarded, missing_features

from tilewright_fmha.references.append import rotate
from tilewright_fmha.vocabulary import Rope

Array = np.ndarray[Any, Any]
BEST = next((name for name in reversed(LEVELS) if not missing_features(name)), "")
PLAIN = FmhaKernel(family="append")
PAGED = PLAIN.replace(paged=True)


@dataclass(frozen=True)
class Append:
    """What is appended to what. ``before``: lengths; ``new``: new rows (varlen: of each item)."""

    heads: tuple[int, int] = (4, 2)
    hdim: tuple[int, int] = (64, 40)
    before: tuple[int, ...] = (0, 5, 17)
    new: tuple[int, ...] = (3, 3, 3)
    room: int = 40
    page: int = 0
    rotary: int = 0
    in_place: bool = True
    queries: bool = True
    cache_items: int = 0


CASES: dict[str, tuple[FmhaKernel, Append]] = {
    "batch": (PLAIN, Append(queries=False)),
    "copied": (PLAIN.replace(q="bf16", kv="bf16"), Append(in_place=False, queries=False)),
    "interleaved": (PLAIN.replace(rope="interleaved"), Append(rotary=64)),
    "half": (PLAIN.replace(rope="half", q="bf16", kv="bf16"), Append(rotary=40, hdim=(72, 64), in_place=False)),
    "half_tables": (PLAIN.replace(rope="half", q="fp16", kv="fp16", rot="fp16"), Append(rotary=16, before=(33, 1, 2))),
    "varlen": (PLAIN.replace(varlen=True, rope="interleaved"), Append(rotary=6, new=(0, 19, 1))),
    "v_columns": (PLAIN.replace(v_col=True), Append(queries=False, in_place=False)),
    "cache_index": (PLAIN, Append(queries=False, cache_items=6)),
    "paged": (PAGED.replace(rope="interleaved"), Append(rotary=10, page=4)),
    "paged_sglang": (PAGED.replace(kv_lookup="sglang", q="bf16", kv="bf16"), Append(page=1, queries=False)),
    "paged_copied": (PAGED, Append(page=16, queries=False, in_place=False)),
    "vectorized": (PAGED.replace(kv_layout="vectorized", rope="half"), Append(page=8, rotary=32)),
    "vectorized_fp8": (
        PAGED.replace(kv_layout="vectorized", kv="fp8", q="fp8", varlen=True, page_size=16),
        Append(page=16, queries=False, in_place=False, new=(4, 0, 20)),
    ),
}


class Call:
    """Operands in guarded memory; the caches full of numbers, so that a change shows."""

    def __init__(self, kernel: FmhaKernel, what: Append, rng: np.random.Generator) -> None:
        self.kernel, self.what, self.rng, self.keep = kernel, what, rng, []
        self.args, self.flats = FmhaArgs(), {}
        b, args = len(what.before), self.args
        args.batch, (args.heads_q, args.heads_k), (args.hdim_q, args.hdim_v) = b, what.heads, what.hdim
        args.new_rows, args.seq_k, args.left, args.right = max(what.new), what.room, -1, -1
        args.cache_items = what.cache_items or b
        args.total_k = args.cache_items * what.room
        args.rotary_dim, args.rotary_stride = what.rotary, what.rotary // 2 + 3
        self.items = list(range(b))
        self.lens = self.pointer("len_k", np.array(what.before, np.int32))
        args.lens_out = args.len_k
        self.status = self.pointer("status", np.full(4, 0x7F, np.int32))
        self.first = [0] * b
        if kernel.varlen:
            starts = np.cumsum([2, *what.new]).astype(np.int32)
            self.pointer("cu_q", starts)
            self.first, args.total_q = [int(x) for x in starts[:-1]], int(starts[-1]) + 1
        if what.cache_items:
            self.items = [int(x) for x in rng.permutation(what.cache_items)[:b]]
            self.pointer("cache_index", np.array(self.items, np.int32))
        self._tables()
        rows = int(args.total_q) if kernel.varlen else max(what.new)
        lead = 1 if kernel.varlen else b
        self.new = {
            name: self.tensor(f"{name}_new", kernel.kv, (lead, what.heads[1], rows, hdim), (0, 2, 1, 3))
            for name, hdim in zip("kv", what.hdim, strict=True)
        }
        if what.queries:
            sizes = (lead, what.heads[0], rows, what.hdim[0])
            self.q = self.tensor("q", kernel.q, sizes, (0, 1, 2, 3))
            self.o = self.tensor("o", kernel.q, sizes, (0, 2, 1, 3))
            self.o[...] = np.array(np.nan).astype(self.o.dtype)
        self.caches = {name: self._cache(name) for name in "kv"}
        self.before = {name: flat.copy() for name, flat in self.flats.items()}

    def pointer(self, name: str, values: Array) -> Array:
        memory, array = guarded(values.reshape(-1), True)
        self.keep.append(memory)
        setattr(self.args, name, array.ctypes.data)
        return array

    def tensor(self, name: str, dtype: str, sizes: tuple[int, ...], order: tuple[int, ...]) -> Array:
        """A view [batch, head, row, element], each innermost line followed by three elements more."""
        strides, step = [0] * len(sizes), 1
        for position, axis in reversed(list(enumerate(order))):
            strides[axis] = step
            step = step * sizes[axis] + (3 if position == len(sizes) - 1 and len(sizes) == 4 else 0)
        span = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
        kind = DTYPES[dtype]
        memory, flat = guarded(self.rng.standard_normal(span).astype(np.float32).astype(kind), True)
        self.keep.append(memory)
        self.flats[name] = flat
        bits = flat.view(f"u{kind.itemsize}")
        view = np.lib.stride_tricks.as_strided(bits, sizes, [s * kind.itemsize for s in strides]).view(kind)
        if len(sizes) == 4:
            setattr(self.args, name, Tensor(flat.ctypes.data, *strides, 0))
        return view

    def _tables(self) -> None:
        what, args = self.what, self.args
        if what.rotary:
            args.k_tiles = what.room - 4  # positions beyond are not rotated
            angles = self.rng.uniform(-3, 3, (args.k_tiles, args.rotary_stride))
            kind = DTYPES[self.kernel.rot]
            self.cos = self.pointer("rot_cos", np.cos(angles).astype(kind)).reshape(angles.shape)
            self.sin = self.pointer("rot_sin", np.sin(angles).astype(kind)).reshape(angles.shape)
        if not what.page:
            return
        each = -(-what.room // what.page)
        args.page_size, args.num_pages = what.page, each * len(what.before) + 3
        pages = self.rng.permutation(args.num_pages).astype(np.int32)
        self.table = pages[: each * len(what.before)].reshape(-1, each)
        self.pointer("block_table", np.ascontiguousarray(self.table))
        args.table_stride = each
        if self.kernel.kv_lookup == "sglang":
            self.pointer("page_starts", (np.arange(len(what.before) + 1) * each).astype(np.int32))
            args.table_stride = self.table.size

    def _cache(self, name: str) -> Array:
        """What is written, as a view [item or page, head, row, element]; ``past`` may be another memory."""
        what, kernel, args = self.what, self.kernel, self.args
        hdim, kind = what.hdim["kv".index(name)], DTYPES[kernel.kv]
        if kernel.kv_layout == "vectorized":
            x = 16 // kind.itemsize
            inner = (-(-hdim // x), what.page, x) if name == "k" else (what.page // x, hdim, x)
            sizes = (args.num_pages, what.heads[1], *inner)
            place = ((x, 0), (0, x))["kv".index(name)]
            views = [self.tensor(each, kernel.kv, sizes, (0, 1, 2, 3, 4)) for each in (name, f"{name}_past")]
            step = inner[1] * x
            for each in (name, f"{name}_past"):
                flat = self.flats[each]
                setattr(
                    args, each, Tensor(flat.ctypes.data, what.heads[1] * inner[0] * step, inner[0] * step, *place, step)
                )
            if name == "k":
                views = [view.transpose(0, 1, 3, 2, 4).reshape(*sizes[:2], what.page, -1)[..., :hdim] for view in views]
        else:
            rows = what.page or what.room
            order = (0, 1, 3, 2) if name == "v" and kernel.v_col else (0, 2, 1, 3)
            sizes = (args.num_pages if what.page else args.cache_items, what.heads[1], rows, hdim)
            views = [self.tensor(each, kernel.kv, sizes, order) for each in (name, f"{name}_past")]
        if what.in_place:
            setattr(args, f"{name}_past", getattr(args, name))
        return views[0] if what.in_place else views[1]

    def rotated(self, rows: Array, positions: Array) -> Array:
        """[head, row, element]"""
        if not self.what.rotary:
            return rows.astype(np.float64)
        pairs, known = self.what.rotary // 2, positions < self.args.k_tiles
        at = np.minimum(positions, self.args.k_tiles - 1)
        cos = np.where(known[:, None], self.cos[at, :pairs].astype(np.float64), 1.0)
        sin = np.where(known[:, None], self.sin[at, :pairs].astype(np.float64), 0.0)
        return rotate(rows, cos, sin, Rope(self.kernel.rope))

    def line(self, cache: Array, name: str, b: int, position: int) -> tuple[Any, ...]:
        """Index of a row [head, element] of a cache as it lies in memory."""
        what = self.what
        if not what.page:
            return (self.items[b], slice(None), position)
        page, row = self.table[b, position // what.page], position % what.page
        if self.kernel.kv_layout == "vectorized" and name == "v":
            x = cache.shape[-1]
            return (page, slice(None), row // x, slice(None), row % x)
        return (page, slice(None), row)


def written(call: Call, name: str) -> Array:
    """The cache that was written, as a view like ``Call.caches``."""
    what, kernel, flat = call.what, call.kernel, call.flats[name]
    past = call.flats[name if what.in_place else f"{name}_past"]
    view = call.caches[name]
    assert flat.shape == past.shape
    if kernel.kv_layout == "vectorized" and name == "k":
        x = 16 // DTYPES[kernel.kv].itemsize
        blocks = flat.reshape(call.args.num_pages, what.heads[1], -1, what.page, x)
        whole = blocks.transpose(0, 1, 3, 2, 4).reshape(*blocks.shape[:2], what.page, -1)
        return whole[..., : what.hdim[0]]
    bits = flat.view(f"u{flat.dtype.itemsize}")
    return np.lib.stride_tricks.as_strided(bits, view.shape, view.strides).view(flat.dtype)


@pytest.fixture(scope="session")
def library(build_folder: Path) -> Library:
    return Library(build_folder, [kernel for kernel, _ in CASES.values()], BEST, header="fmha/append.hpp")


def launch(library: Library, runtime: Runtime, call: Call, team: int) -> None:
    runtime.launch(library.entry(call.kernel), call.args, team)


def check(call: Call, status: int) -> None:
    what, kernel, args = call.what, call.kernel, call.args
    want = {name: np.array(view).astype(np.float64) for name, view in call.expected.items()}
    turned = np.full(call.o.shape, np.nan) if what.queries else np.empty(0)
    for b, (before, count) in enumerate(zip(what.before, what.new, strict=True)):
        rows = slice(call.first[b], call.first[b] + count)
        item = 0 if kernel.varlen else b
        positions = before + np.arange(count)
        for name in "kv":
            values = call.new[name][item, :, rows].astype(np.float64)
            values = call.rotated(values, positions) if name == "k" else values
            for n, position in enumerate(positions):
                if position < what.room:
                    want[name][call.line(want[name], name, b, int(position))] = values[:, n]
        if what.queries:
            turned[item, :, rows] = call.rotated(call.q[item, :, rows].astype(np.float64), positions)
    kind = DTYPES[kernel.kv]
    for name in "kv":
        got = written(call, name).astype(np.float64)
        same = np.isclose(got, want[name], rtol=0.51 * 2.0 ** -{"fp32": 22, "fp16": 10, "bf16": 7, "fp8": 3}[kernel.kv],
                          atol=1e-6)  # fmt: skip
        assert same.all(), (name, np.argwhere(~same)[:4], kind)
    if what.queries:
        got = call.o.astype(np.float64)
        assert np.array_equal(np.isnan(got), np.isnan(turned)), "rows beside the queries were written"
        np.testing.assert_allclose(got, turned, rtol=2.0 ** -{"fp32": 22, "fp16": 10, "bf16": 7}[kernel.q], atol=1e-6)
    after = [min(before + count, what.room) for before, count in zip(what.before, what.new, strict=True)]
    assert list(call.lens) == after
    assert call.status[0] == status, list(call.status)
    for name, flat in call.flats.items():
        if name not in ("k", "v", "o") and not (what.in_place and name in ("k_past", "v_past")):
            assert np.array_equal(flat.view(np.uint8), call.before[name].view(np.uint8)), f"{name} was written"
    assert args.lens_out == args.len_k


@pytest.mark.parametrize("name", CASES)
def test_rows_are_appended(library: Library, runtime: Runtime, name: str, rng: np.random.Generator) -> None:
    kernel, what = CASES[name]
    call = Call(kernel, what, rng)
    call.expected = {each: np.array(view) for each, view in call.caches.items()}
    launch(library, runtime, call, int(rng.integers(1, 3)))
    check(call, 0)


def test_rows_without_room_are_dropped(library: Library, runtime: Runtime, rng: np.random.Generator) -> None:
    kernel, what = CASES["paged"]
    call = Call(kernel, replace(what, before=(0, 39, 17)), rng)
    call.expected = {each: np.array(view) for each, view in call.caches.items()}
    launch(library, runtime, call, 2)
    check(call, 8 | 16)  # and its positions are beyond the tables
    assert call.status[1] == 1


def test_wrong_pages_and_items_are_left_alone(library: Library, runtime: Runtime, rng: np.random.Generator) -> None:
    for name, field, value, bit in (
        ("paged_sglang", "block_table", 1 << 20, 2),
        ("cache_index", "cache_index", 77, 32),
    ):
        kernel, what = CASES[name]
        call = Call(kernel, what, rng)
        array = ctypes.cast(getattr(call.args, field), ctypes.POINTER(ctypes.c_int32))
        slot = 1 if name == "cache_index" else call.table.shape[1] + what.before[1] // what.page
        array[slot] = value
        caches = {each: np.array(view) for each, view in call.caches.items()}
        launch(library, runtime, call, 2)
        assert call.status[0] & bit and call.status[1] == 1, list(call.status)
        changed = sum(int((written(call, each) != caches[each]).any(axis=(1, 3)).sum()) for each in "k")
        assert changed == sum(what.new) - (what.new[1] if bit == 32 else 1)
