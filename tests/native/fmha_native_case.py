"""One attention call with random operands in guarded memory, and the truth to compare it with: for every template of
attention, on every device, before there is a plan.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from attention_truth import attention_truth
from fmha_native_args import (
    FmhaArgs,
    FmhaKernel,
    FmhaShape,
    Scale,
    Tensor,
    combine_of,
)
from native_harness import DTYPES, Guarded, Library, Runtime, guarded

from tilewright_fmha.problem.philox import random_bytes

Array = np.ndarray[Any, Any]


class FmhaCall:
    """Operands in guarded memory, ready to launch; NaN wherever a kernel must not look."""

    def __init__(self, kernel: FmhaKernel, shape: FmhaShape, rng: np.random.Generator, at_end: bool = True) -> None:
        self.kernel, self.shape, self.rng, self.at_end = kernel, shape, rng, at_end
        self.keep: list[Any] = []
        self.arrays: dict[str, Array] = {}
        self.args = FmhaArgs()
        b = shape.batch
        self.lens_q = list(shape.lens_q) or [shape.seq[0]] * b
        self.lens_k = list(shape.lens_k) or [shape.seq[1]] * b
        self.q_at = self.k_at = [0] * b
        self._scalars()
        self._lengths()
        self._queries()
        self._caches()
        self._features()
        self._results()
        self.before = {name: self._flat(name).copy() for name in self.flats}

    # ---- memory ----

    def place(self, values: Array) -> Array:
        memory, array = guarded(np.ascontiguousarray(values).reshape(-1), self.at_end)
        self.keep.append(memory)
        return array

    def pointer(self, name: str, values: Array) -> Array:
        """An operand that is a plain array."""
        array = self.place(values)
        setattr(self.args, name, array.ctypes.data)
        self.arrays[name] = array
        return array

    def array(self, name: str) -> Array:
        """What a pointer of the struct points to."""
        return self.arrays[name]

    def random(self, dtype: str, sizes: tuple[int, ...]) -> Array:
        values = self.rng.standard_normal(sizes).astype(np.float32)
        return values.astype(DTYPES[dtype])

    def tensor(self, name: str, dtype: str, sizes: tuple[int, ...], order: tuple[int, ...], gap: int = 5) -> Array:
        """A view [batch, head, row, column] with axes in ``order`` from the outermost in memory to the innermost, and a
        gap behind each row; everything is NaN (bytes: 0x7f). ``gap`` 0 leaves none.
        """
        strides, step = [0] * 4, 1
        for position, axis in reversed(list(enumerate(order))):
            strides[axis] = step
            step *= sizes[axis]
            if position == 3:
                step += gap
        span = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1 if all(sizes) else 0
        kind = DTYPES[dtype]
        flat = self.place(np.full(span * kind.itemsize, 0x7F, np.uint8)).view(kind)
        if dtype not in ("int8", "fp8"):
            flat[:] = np.array(np.nan).astype(kind)
        bits = flat.view(f"u{kind.itemsize}")
        view = np.lib.stride_tricks.as_strided(bits, sizes, [s * kind.itemsize for s in strides]).view(kind)
        setattr(self.args, name, Tensor(flat.ctypes.data, *strides, 0))
        self.flats[name] = flat
        return view

    def _flat(self, name: str) -> Array:
        return self.flats[name].view(np.uint8)

    def order(self) -> tuple[int, int, int, int]:
        return {"bhsd": (0, 1, 2, 3), "bshd": (0, 2, 1, 3), "bhds": (0, 1, 3, 2)}[self.shape.layout]

    # ---- what the struct says ----

    def _scalars(self) -> None:
        s, args, kernel = self.shape, self.args, self.kernel
        self.flats: dict[str, Array] = {}
        args.batch, (args.heads_q, args.heads_k) = s.batch, s.heads
        args.seq_q, args.seq_k = s.seq
        args.hdim_q, args.hdim_v = s.hdim
        args.left, args.right = s.mask.left, s.mask.right
        args.bottom_right, args.sink_size = s.mask.bottom_right, s.mask.sink
        self.scale = s.scale or s.hdim[0] ** -0.5
        args.scale, args.softcap, args.p_scale = self.scale, s.softcap, 1.0
        args.splits, args.min_q, args.drop_below = s.splits, s.min_q, s.drop_below
        args.keep_scale = 256 / (256 - s.drop_below)
        self.seed, self.offset = int(self.rng.integers(1 << 62)), int(self.rng.integers(1 << 32))
        if kernel.dropout and s.rng:
            low, high = np.array([self.seed & 0xFFFFFFFF, self.seed >> 32], np.uint32).view(np.int32)
            offset = np.array([self.offset], np.uint32).view(np.int32)[0]
            self.pointer("rng", np.array([low, high, offset, 0], np.int32))
        else:
            args.seed, args.offset = self.seed, self.offset
        args.cache_items = s.cache_items or s.batch
        self.status = self.pointer("status", np.full(4, 0x7F, np.int32))

    def _lengths(self) -> None:
        s, kernel = self.shape, self.kernel
        if kernel.varlen:
            starts = np.cumsum([3, *(n + s.room[0] for n in self.lens_q)]).astype(np.int32)
            self.pointer("cu_q", starts)
            self.q_at, self.args.total_q = [int(x) for x in starts[:-1]], int(starts[-1]) + 2
        if (kernel.varlen and s.room[0]) or (not kernel.varlen and s.lens_q):
            self.pointer("len_q", np.array(self.lens_q, np.int32))
        if kernel.varlen and not kernel.paged:
            starts = np.cumsum([1, *(n + s.room[1] for n in self.lens_k)]).astype(np.int32)
            self.pointer("cu_k", starts)
            self.k_at, self.args.total_k = [int(x) for x in starts[:-1]], int(starts[-1]) + 2
        if kernel.paged or (kernel.varlen and s.room[1]) or (not kernel.varlen and s.lens_k):
            self.pointer("len_k", np.array(self.lens_k, np.int32))

    def _queries(self) -> None:
        s, kernel = self.shape, self.kernel
        rows = self.args.total_q if kernel.varlen else s.seq[0]
        sizes = (1 if kernel.varlen else s.batch, s.heads[0], rows, s.hdim[0])
        view = self.tensor("q", kernel.q, sizes, self.order())
        self.q = [self._fill(view[0 if kernel.varlen else b, :, at : at + n], kernel.q)
                  for b, (at, n) in enumerate(zip(self.q_at, self.lens_q, strict=True))]  # fmt: skip

    def _fill(self, view: Array, dtype: str) -> Array:
        view[...] = self.random(dtype, view.shape)
        return view.astype(np.float64)

    def _caches(self) -> None:
        s, kernel = self.shape, self.kernel
        self.present = [np.ones(n, bool) for n in self.lens_k]
        if kernel.paged:
            self._pages()
            return
        items = 1 if kernel.varlen else (s.cache_items or s.batch)
        rows = self.args.total_k if kernel.varlen else s.seq[1]
        chosen = list(range(s.batch))
        if s.cache_items:
            chosen = [int(x) for x in self.rng.permutation(s.cache_items)[: s.batch]]
            self.pointer("cache_index", np.array(chosen, np.int32))
        self.chosen = chosen
        self.k, self.v = [], []
        for name, hdim, into in (("k", s.hdim[0], self.k), ("v", s.hdim[1], self.v)):
            order = self.order()
            if name == "v" and kernel.v_col:
                order = (*(axis for axis in order if axis != 2), 2)
            view = self.tensor(name, kernel.kv, (items, s.heads[1], rows, hdim), order)
            for b, (at, n) in enumerate(zip(self.k_at, self.lens_k, strict=True)):
                into.append(self._fill(view[0 if kernel.varlen else chosen[b], :, at : at + n], kernel.kv))

    def _pages(self) -> None:
        """Pages in any order among others, the table rows longer than needed and full of numbers that are none."""
        s, kernel, args = self.shape, self.kernel, self.args
        counts = [-(-n // s.page) for n in self.lens_k]
        args.page_size, args.num_pages = s.page, sum(counts) + 3
        pages = [int(x) for x in self.rng.permutation(args.num_pages)]
        self.tables = [[pages.pop() for _ in range(count)] for count in counts]
        if kernel.kv_lookup == "vllm":
            args.table_stride = -(-s.seq[1] // s.page)
            table = np.full((s.batch, args.table_stride), -77, np.int32)
            for row, used in zip(table, self.tables, strict=True):
                row[: len(used)] = used
            self.pointer("block_table", table)
        else:
            flat = [page for used in self.tables for page in (*used, -77)]
            starts = np.cumsum([0, *(len(used) + 1 for used in self.tables)]).astype(np.int32)
            self.pointer("block_table", np.array(flat, np.int32))
            self.pointer("page_starts", starts)
            args.table_stride = len(flat)
        self.k = self._paged("k", s.hdim[0])
        self.v = self._paged("v", s.hdim[1])

    def _paged(self, name: str, hdim: int) -> list[Array]:
        s, kernel, args = self.shape, self.kernel, self.args
        x, heads = 16 // DTYPES[kernel.kv].itemsize, s.heads[1]
        if kernel.kv_layout == "linear":
            view = self.tensor(name, kernel.kv, (args.num_pages, heads, s.page, hdim), (0, 2, 1, 3))
        else:  # as [page, head, outer, inner, x]
            inner = s.page if name == "k" else hdim
            outer = -(-hdim // x) if name == "k" else s.page // x
            raw = self.tensor(name, kernel.kv, (args.num_pages, heads, outer, inner * x), (0, 1, 2, 3), 0)
            place = getattr(args, name)
            place.chunk = place.row
            place.row, place.col = (x, 0) if name == "k" else (0, x)
            blocks = raw.reshape(args.num_pages, heads, outer, inner, x)
            assert np.shares_memory(blocks, raw)
            axes = (0, 1, 3, 2, 4) if name == "k" else (0, 1, 2, 4, 3)
            turned = blocks.transpose(axes)
            return [self._fill_vectorized(turned, name, used, n, hdim)
                    for used, n in zip(self.tables, self.lens_k, strict=True)]  # fmt: skip
        values = []
        for used, n in zip(self.tables, self.lens_k, strict=True):
            own = self.random(kernel.kv, (heads, n, hdim))
            for slot, page in enumerate(used):
                rows = own[:, slot * s.page : (slot + 1) * s.page]
                view[page, :, : rows.shape[1]] = rows
            values.append(own.astype(np.float64))
        return values

    def _fill_vectorized(self, turned: Array, name: str, used: list[int], n: int, hdim: int) -> Array:
        s, kernel = self.shape, self.kernel
        own = self.random(kernel.kv, (s.heads[1], n, hdim))
        x = turned.shape[-1] if name == "k" else turned.shape[-2]
        for j in range(n):
            page, place = used[j // s.page], j % s.page
            for c in range(hdim):
                if name == "k":
                    turned[page, :, place, c // x, c % x] = own[:, j, c]
                else:
                    turned[page, :, place // x, place % x, c] = own[:, j, c]
        return own.astype(np.float64)

    def _features(self) -> None:
        s, kernel, args = self.shape, self.kernel, self.args
        self.bias: Array | None = None
        if kernel.bias == "elementwise":
            full = (1 if kernel.varlen else s.batch, s.heads[0], *s.seq)
            sizes = tuple(size if own else 1 for size, own in zip(full, s.bias_axes, strict=True))
            view = self.tensor("bias", kernel.bias_type, sizes, (0, 1, 2, 3))
            view[...] = self.random(kernel.bias_type, sizes)
            view[..., : sizes[3] // 3] = np.array(-np.inf).astype(view.dtype)  # as a boolean mask becomes
            self.bias = view.astype(np.float64)
            place = args.bias
            for name, own in zip(("batch", "head", "row", "col"), s.bias_axes, strict=True):
                if not own or (name == "batch" and kernel.varlen):
                    setattr(place, name, 0)
        self.slopes = self.rng.uniform(0.01, 0.5, (s.batch, s.heads[0])).astype(np.float32)
        if kernel.bias == "alibi":
            if not s.slopes_by_item:
                self.slopes[:] = self.slopes[0]
            self.pointer("slopes", self.slopes if s.slopes_by_item else self.slopes[0])
            args.slope_batch = s.heads[0] if s.slopes_by_item else 0
        self.sinks = self.random("fp32", (s.heads[0],))
        if kernel.learned_sinks:
            self.pointer("sinks", self.sinks)
        self.scales = {name: self._scale(name) for name in "qkv"} if kernel.qscale != "no" else {}

    def _scale(self, name: str) -> Array:
        """[batch, head, blocks] (pages of a cache: [page, head, 1])."""
        s, kernel, args = self.shape, self.kernel, self.args
        heads, rows = (s.heads[0], s.seq[0]) if name == "q" else (s.heads[1], s.seq[1])
        block = s.blocks[0 if name == "q" else 1] if kernel.qscale == "blockscale" else 0
        blocks = -(-rows // block) if block else 1
        items = args.num_pages if kernel.qscale == "kv_blockscale" and name != "q" else s.batch
        values = self.rng.uniform(0.25, 1.5, (items, heads, blocks)).astype(np.float32)
        flat = self.place(values)
        setattr(args, f"{name}_scale", Scale(flat.ctypes.data, heads * blocks, blocks, 1, block))
        return values

    def _results(self) -> None:
        s, kernel = self.shape, self.kernel
        rows = self.args.total_q if kernel.varlen else s.seq[0]
        items = 1 if kernel.varlen else s.batch
        self.o = self.tensor("o", kernel.o, (items, s.heads[0], rows, s.hdim[1]), self.order())
        if kernel.family == "split":
            lines = s.splits * items * s.heads[0] * rows
            pad = kernel.hdim[1]
            self.o_acc = self.pointer("o_acc", np.full(lines * pad, np.nan, np.float32))
            self.lse_acc = self.pointer("lse_acc", np.full(lines, np.nan, np.float32))
        if kernel.lse:
            self.lse = self.tensor("lse", "fp32", (items, s.heads[0], rows, 1), (0, 1, 2, 3), 3)
        if kernel.randval:
            self.randval = self.tensor("randval", "int8", (items, s.heads[0], rows, s.seq[1]), (0, 1, 2, 3))

    # ---- the call and its check ----

    def launch(self, library: Library, runtime: Runtime, team: int | None = None) -> None:
        bytes_ = library.entry(self.kernel, "_workspace")(ctypes.byref(self.args))
        workspace = Guarded(bytes_, 64)
        workspace.array(np.dtype(np.uint8), bytes_)[:] = 0xFF  # NaN in every float type
        self.args.workspace, self.args.workspace_bytes = workspace.address, bytes_
        runtime.launch(library.entry(self.kernel), self.args, team or self.kernel.team)
        self.args.workspace = None
        if self.kernel.family == "split":
            runtime.launch(library.entry(combine_of(self.kernel)), self.args, team or self.kernel.team)

    def truth(self, b: int, h: int) -> tuple[Array, Array, Array]:
        """o and lse of one head, and what the rounding of o is relative to."""
        s, kernel = self.shape, self.kernel
        hk = h // (s.heads[0] // s.heads[1])
        k, v = self.k[b][hk], self.v[b][hk]
        options: dict[str, Any] = {"mask": s.mask, "scale": self.scale, "softcap": s.softcap if kernel.softcap else 0.0}
        if self.bias is not None:
            own = self.bias[b if s.bias_axes[0] and not kernel.varlen else 0, h if s.bias_axes[1] else 0]
            options["bias"] = own[: self.lens_q[b] if s.bias_axes[2] else 1, : self.lens_k[b] if s.bias_axes[3] else 1]
        if kernel.bias == "alibi":
            options["slope"] = float(self.slopes[b, h])
        if kernel.learned_sinks:
            options["sink"] = float(self.sinks[h])
        if kernel.dropout:
            options |= {"drop_below": s.drop_below, "seed": self.seed, "offset": self.offset,
                        "batch_head": b * s.heads[0] + h}  # fmt: skip
        if self.scales:
            options["descale"] = self.descale(b, h, hk)
        options["present"] = self.present[b]
        o, lse = attention_truth(self.q[b][h], k, v, **options)
        bound, _ = attention_truth(self.q[b][h], k, np.abs(v), **options)
        return o, lse, np.abs(bound)

    def descale(self, b: int, h: int, hk: int) -> tuple[Any, Any, Any]:
        s, result = self.shape, []
        for name, head, rows in (("q", h, self.lens_q[b]), ("k", hk, self.lens_k[b]), ("v", hk, self.lens_k[b])):
            block = getattr(self.args, f"{name}_scale").block_rows
            if self.kernel.qscale == "kv_blockscale" and name != "q":
                pages = np.array([self.tables[b][j // s.page] for j in range(rows)], int)
                result.append(self.scales[name][pages, head, 0])
            elif block:
                result.append(self.scales[name][b, head, np.arange(rows) // block])
            else:
                result.append(float(self.scales[name][b, head, 0]))
        return tuple(result)  # type: ignore[return-value]

    def rows_of(self, view: Array, b: int, h: int) -> Array:
        rows: Array = view[0, h, self.q_at[b] :] if self.kernel.varlen else view[b, h]
        return rows

    def check(self, status: int = 0) -> None:
        s, kernel = self.shape, self.kernel
        pairs = kernel.register[2] == 2
        for b in range(s.batch):
            n = self.lens_q[b]
            skipped = kernel.skip_min and n < s.min_q
            for h in range(s.heads[0]):
                o, lse, bound = self.truth(b, h)
                got = self.rows_of(self.o, b, h).astype(np.float64)
                if skipped:
                    o, lse, bound = np.zeros_like(o), np.full_like(lse, -np.inf), np.zeros_like(o)
                near(got[:n], o, bound, kernel.o, pairs, (b, h))
                if not kernel.varlen:
                    assert np.all(got[n:] == 0), ("rows beyond the length", b, h)
                if kernel.lse:
                    lines = self.rows_of(self.lse, b, h)[:, 0].astype(np.float64)
                    np.testing.assert_allclose(lines[:n], lse, rtol=2e-6, atol=4e-6 * (1 + s.hdim[0] / 64))
                    if not kernel.varlen:
                        assert np.all(lines[n:] == -np.inf)
        if kernel.randval:
            self.check_random()
        assert self.status[0] == status, (self.status, status)
        self.untouched()

    def check_random(self) -> None:
        for b, (rows, columns) in enumerate(zip(self.lens_q, self.lens_k, strict=True)):
            for h in range(self.shape.heads[0]):
                got = self.rows_of(self.randval, b, h)[: rows if self.kernel.varlen else None]
                want = np.zeros(got.shape, np.uint8)
                if not (self.kernel.skip_min and rows < self.shape.min_q):
                    head = b * self.shape.heads[0] + h
                    want[:rows, :columns] = random_bytes(self.seed, self.offset, head, rows, columns)
                assert np.array_equal(got.view(np.uint8), want), (b, h)

    def untouched(self) -> None:
        """What was given, and what lies beside the results, is as before."""
        written = {"o": self.o, **({"lse": self.lse} if self.kernel.lse else {})}
        if self.kernel.randval:
            written["randval"] = self.randval
        for name, before in self.before.items():
            now = self._flat(name)
            if name not in written:
                assert np.array_equal(now, before), f"{name} was written"
                continue
            mine = np.zeros(self.flats[name].shape, bool)
            place, view = getattr(self.args, name), written[name]
            steps = (place.batch, place.head, place.row, place.col)
            inside = np.lib.stride_tricks.as_strided(mine, view.shape, steps)
            for b in range(self.shape.batch):
                if self.kernel.varlen:
                    inside[0, :, self.q_at[b] : self.q_at[b] + self.lens_q[b]] = True
                else:
                    inside[b] = True
            outside = np.repeat(~mine, self.flats[name].dtype.itemsize)
            assert np.array_equal(now[outside], before[outside]), f"written beside {name}"


ROUNDING = {"fp32": 2.0**-23, "fp16": 2.0**-11, "bf16": 2.0**-8}


def near(got: Array, want: Array, bound: Array, dtype: str, pairs: bool, where: Any) -> None:
    """``bound``: the same sums of magnitudes. Products of pairs round P to bf16."""
    assert np.array_equal(np.isnan(got), np.isnan(want)), where
    allowed = ROUNDING[dtype] * np.abs(want) + (2.0**-8 if pairs else 1e-5) * bound + 1e-6
    worst = np.nanmax(np.abs(got - want) / allowed, initial=0.0)
    assert worst <= 1, (where, float(worst), dtype)
