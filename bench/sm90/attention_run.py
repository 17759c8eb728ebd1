"""One attention on PyTorch's tensors: its request, launches of named kernels, and the truth in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from common.cuda_local import Cuda, describe
from torch.nn.attention import SDPBackend, sdpa_kernel

from sm90.attention_cases import Case
from tilewright_fmha.config.decode import decodes
from tilewright_kit.contract.problem import OperationRequest
from tilewright_server.engine.call import Call
from tilewright_tools.tuning.measure.testbed import Loaded

__all__ = ["Attended"]

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = {"bf16": 8e-3, "fp16": 2e-3}
"""Relative difference in norm."""


class Attended:
    def __init__(self, cuda: Cuda, operation: Any, case: Case) -> None:
        self.cuda, self.operation, self.case = cuda, operation, case
        self._loaded: list[Loaded] = []
        self.plain: dict[str, torch.Tensor] = {}  # keys and values before they were cut into pages
        torch.manual_seed(7)
        self.tensors: dict[str, torch.Tensor] = {}
        self.attributes: dict[str, Any] = {"window_left": case.left, "window_right": case.right}
        if case.left < 0 and case.right < 0:
            self.attributes = {}
        elif case.bottom_right:
            self.attributes["mask_align"] = "bottom_right"
        if case.token_sinks:
            self.attributes["sink_size"] = case.token_sinks
        for name in ("softcap", "scale"):
            if getattr(case, name):
                self.attributes[name] = getattr(case, name)
        if case.min_q:
            self.attributes["min_seqlen_q"] = case.min_q
        (self._varlen if case.varlen else self._dense)()
        if case.page:
            self._cut()
        if case.sinks:
            self.tensors["sinks"] = torch.randn(case.heads_q, device="cuda") * 2
        self.outputs = {"o", "lse", "status"} & set(self.tensors)
        if case.status:
            self.tensors["status"] = torch.zeros(4, dtype=torch.int32, device="cuda")
            self.outputs.add("status")
        inputs = {name: describe(item) for name, item in self.tensors.items() if name not in self.outputs}
        outputs = {name: describe(self.tensors[name]) for name in self.outputs}
        self.problem = operation.parse(OperationRequest("attention", inputs, outputs, self.attributes))

    @property
    def flops(self) -> float:
        return float(self.problem.flops)

    # ---- operands ----

    def _new(self, items: int, heads: int, rows: int, elements: int) -> torch.Tensor:
        """[items, heads, rows, elements] in the case's layout."""
        shape = (items, heads, rows, elements) if self.case.layout == "bhsd" else (items, rows, heads, elements)
        made = torch.randn(shape, device="cuda", dtype=torch.float32).to(DTYPES[self.case.dtype])
        return made if self.case.layout == "bhsd" else made.transpose(1, 2)

    def _dense(self) -> None:
        case, tensors = self.case, self.tensors
        tensors["q"] = self._new(case.batch, case.heads_q, case.seq_q, case.hdim)
        tensors["k"] = self._new(case.items or case.batch, case.heads_k, case.seq_k, case.hdim)
        tensors["v"] = self._new(case.items or case.batch, case.heads_k, case.seq_k, case.v)
        tensors["o"] = self._new(case.batch, case.heads_q, case.seq_q, case.v)
        if case.lse:
            tensors["lse"] = torch.zeros(case.batch, case.heads_q, case.seq_q, device="cuda")
        for name, lengths in (("seqlens_q", case.lengths_q), ("seqlens_k", case.lengths_k)):
            if lengths:
                tensors[name] = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        if case.cache_index:
            tensors["cache_index"] = torch.tensor(case.cache_index, dtype=torch.int32, device="cuda")
        for b, length in enumerate(case.lengths_k):
            item = case.cache_index[b] if case.cache_index else b
            tensors["k"][item, :, length:], tensors["v"][item, :, length:] = math.nan, math.nan

    def _varlen(self) -> None:
        case, tensors = self.case, self.tensors
        rows_q, rows_k = sum(case.lengths_q) + case.seq_q, sum(case.lengths_k) + case.seq_k
        for name, heads, rows, elements in (
            ("q", case.heads_q, rows_q, case.hdim), ("k", case.heads_k, rows_k, case.hdim),
            ("v", case.heads_k, rows_k, case.v), ("o", case.heads_q, rows_q, case.v),
        ):  # fmt: skip
            tensors[name] = torch.randn(rows, heads, elements, device="cuda").to(DTYPES[case.dtype])
        tensors["k"][sum(case.lengths_k) :] = math.nan
        tensors["v"][sum(case.lengths_k) :] = math.nan
        if case.lse:
            tensors["lse"] = torch.zeros(case.heads_q, rows_q, device="cuda")
        for name, lengths in (("cu_seqlens_q", case.lengths_q), ("cu_seqlens_k", case.lengths_k)):
            starts = torch.tensor((0, *lengths), device="cuda").cumsum(0)
            tensors[name] = starts.to(torch.int32)
        self.attributes |= {"max_seqlen_q": max(case.lengths_q), "max_seqlen_k": max(case.lengths_k)}

    def _cut(self) -> None:
        """Keys and values into pages, in any order; what lies behind a length, and pages of nobody, hold NaN."""
        case, tensors = self.case, self.tensors
        room = -(-max(case.lengths_k) // case.page)
        count = case.batch * room + 3
        table = torch.randperm(count)[: case.batch * room].reshape(case.batch, room)
        self.plain = {name: tensors[name] for name in "kv"}
        first = 0
        caches = {
            name: torch.full((count, case.page, case.heads_k, self.plain[name].shape[-1]), math.nan) for name in "kv"
        }
        for b, length in enumerate(case.lengths_k):
            for name in "kv":
                plain = self.plain[name]
                rows = plain[first : first + length] if case.varlen else plain[b, :, :length].transpose(0, 1)
                for row in range(0, length, case.page):
                    part = rows[row : row + case.page]
                    caches[name][table[b, row // case.page], : part.shape[0]] = part.float().cpu()
            first += length
        if case.absent:
            table[0, 1] = -1
        for name in "kv":
            tensors[name] = caches[name].to("cuda", self.plain[name].dtype)
        tensors["block_table"] = table.to("cuda", torch.int32)
        if case.sglang:
            used = [-(-length // case.page) for length in case.lengths_k]
            tensors["block_table"] = torch.cat([table[b, :count] for b, count in enumerate(used)]).to(
                "cuda", torch.int32
            )
            tensors["page_starts"] = torch.tensor((0, *used), device="cuda").cumsum(0).to(torch.int32)
            self.attributes["kv_lookup"] = "sglang"
        tensors["seqlens_k"] = torch.tensor(case.lengths_k, dtype=torch.int32, device="cuda")
        for name in ("cu_seqlens_k",):
            tensors.pop(name, None)
        self.attributes.pop("max_seqlen_k", None)

    # ---- launches ----

    def call(self, config: Any) -> Callable[[], object]:
        cuda = self.cuda
        found = self.operation.mismatches(self.problem, config, cuda.info)
        if found:
            raise ValueError("; ".join(f"{item.rule}: {item.reason}" for item in found))
        plan = self.operation.plan(self.problem, config, cuda.info)
        for result in cuda.engine.build(list(plan.kernels), cuda.info.arch, lambda _: None, Call()):
            if result.error is not None:
                raise result.error
        loaded = Loaded(cuda.engine, cuda.device, plan)
        names = [item.name for item in plan.operands]
        program = cuda.device.program(loaded.stages, names, counter_bytes=plan.counter_bytes)
        addresses = [self.tensors[name].data_ptr() for name in names]
        workspace = torch.empty(max(plan.workspace_bytes, 16), dtype=torch.uint8, device="cuda")
        self._loaded.append(loaded)  # modules live as long as what is launched from them
        return lambda: cuda.stream.launch(program, addresses, 0, 0, workspace.data_ptr())

    def portable(self) -> tuple[Any, ...]:
        """The kernel that the planner would take if there were no specialised ones."""
        found = [item for item in self.operation.candidates(self.problem, self.cuda.info) if item.pipeline != "ws"]
        found = [item for item in found if item.family is self.problem.family]
        predicted = [(self.operation.predict(self.problem, item, self.cuda.info).seconds, item.name) for item in found]
        return tuple(item for item in found if item.name == min(predicted)[1])

    def few_rows(self) -> tuple[Any, ...]:
        """The specialised kernel for few rows, keys in as many parts as are planned, in one and in three."""
        found = next(item for item in self.operation.candidates(self.problem, self.cuda.info) if decodes(item))
        return tuple(found.replace(num_splits=parts) for parts in (0, 1, 3))

    def peer(self) -> Callable[[], object]:
        case, (q, k, v) = self.case, (self.tensors[name] for name in "qkv")

        def attend() -> None:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=case.right == 0, enable_gqa=case.heads_q != case.heads_k
                )

        return attend

    # ---- the truth ----

    def poison(self) -> None:
        self.tensors["o"].fill_(math.nan)
        if "lse" in self.tensors:
            self.tensors["lse"].fill_(math.nan)
        torch.cuda.synchronize()

    def check(self, call: Callable[[], object]) -> str:
        """``ok``, or what is wrong."""
        o, lse = self._truth()
        for turn in range(2):
            self.poison()
            call()
            torch.cuda.synchronize()
            for name, wanted in (("o", o), ("lse", lse)):
                if name in self.tensors and (told := self._compare(name, wanted)):
                    return f"run {turn}: {told}"
        if "status" in self.tensors and self.tensors["status"].any():
            return f"status {self.tensors['status'].tolist()}"
        return "ok"

    def glance(self, call: Callable[[], object]) -> str:
        """The first and the last head of a large case."""
        self.poison()
        call()
        torch.cuda.synchronize()
        if self.tensors["o"].isnan().any():
            return "NaN"
        case = self.case
        for b, h in ((0, 0), (case.batch - 1, case.heads_q - 1)):
            group = case.heads_q // case.heads_k
            q, k, v = self.tensors["q"][b, h], self.tensors["k"][b, h // group], self.tensors["v"][b, h // group]
            some = min(case.seq_q, 2048)
            own = self._item(q[-some:, None].transpose(0, 1), k[None], v[None], case.seq_q - some)[0]
            error = (self.tensors["o"][b, h, -some:].float() - own[0]).norm() / own.norm()
            if not error < TOLERANCE[case.dtype]:
                return f"head {h}: {error:.1e}"
        return "ok"

    def _compare(self, name: str, wanted: torch.Tensor) -> str:
        have = self.tensors[name].float()
        if not torch.equal(have.isnan(), wanted.isnan()):
            return f"{name}: {int(have.isnan().sum())} NaN, wanted {int(wanted.isnan().sum())}"
        if not torch.equal(have.isinf(), wanted.isinf()):
            return f"{name}: {int(have.isinf().sum())} infinities, wanted {int(wanted.isinf().sum())}"
        finite = wanted.isfinite()
        have, wanted = have[finite], wanted[finite]
        if wanted.numel() == 0:
            return ""
        if name == "lse":
            error = float((have - wanted).abs().max())
            return f"lse: off by {error:.1e}" if error > 2e-3 else ""
        error = float((have - wanted).norm() / wanted.norm().clamp(min=1e-6))
        worst = float((have - wanted).abs().max())
        limit = TOLERANCE[self.case.dtype]
        return f"o: {error:.1e}, worst {worst:.1e}" if not error < limit or worst > 40 * limit else ""

    def _truth(self) -> tuple[torch.Tensor, torch.Tensor]:
        case, tensors = self.case, self.tensors | self.plain
        o = torch.full(tensors["o"].shape, math.nan, device="cuda")
        shape = (case.heads_q, o.shape[0]) if case.varlen else (case.batch, case.heads_q, case.seq_q)
        lse = torch.full(shape, math.nan, device="cuda")
        first_q = first_k = 0
        for b in range(case.batch):
            rows = case.lengths_q[b] if case.lengths_q else case.seq_q
            keys = case.lengths_k[b] if case.lengths_k else case.seq_k
            if case.varlen:
                at = slice(first_q, first_q + rows)
                q = tensors["q"][at].transpose(0, 1)
                k, v = (tensors[name][first_k : first_k + keys].transpose(0, 1) for name in "kv")
                first_q, first_k = first_q + rows, first_k + keys
                own, sums = self._item(q, k, v, hidden=self._hidden(b))
                o[at], lse[:, at] = own.transpose(0, 1), sums
            else:
                item = case.cache_index[b] if case.cache_index else b
                q, k, v = tensors["q"][b, :, :rows], tensors["k"][item, :, :keys], tensors["v"][item, :, :keys]
                own, sums = self._item(q, k, v, hidden=self._hidden(b))
                o[b], lse[b] = 0.0, -math.inf
                o[b, :, :rows], lse[b, :, :rows] = own, sums
        return o, lse

    def _hidden(self, b: int) -> slice:
        """Keys of a page that is not there."""
        page = self.case.page if self.case.absent and b == 0 else 0
        return slice(page, 2 * page)

    def _item(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, skipped: int = 0, hidden: slice = slice(0, 0)
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[heads, rows, elements] each; ``skipped`` rows of the item come before."""
        case = self.case
        rows, keys = q.shape[1] + skipped, k.shape[1]
        group = q.shape[0] // k.shape[0]
        k, v = (item.float().repeat_interleave(group, 0) for item in (k, v))
        if rows < case.min_q:
            return torch.zeros(*q.shape[:2], v.shape[2], device="cuda"), torch.full(
                q.shape[:2], -math.inf, device="cuda"
            )
        s = q.float() @ k.transpose(1, 2) * (case.scale or case.hdim**-0.5)
        if case.softcap:
            s = case.softcap * torch.tanh(s / case.softcap)
        i = torch.arange(skipped, rows, device="cuda")[:, None] + (keys - rows if case.bottom_right else 0)
        j = torch.arange(keys, device="cuda")[None]
        if case.right >= 0:
            s = s.masked_fill(j > i + case.right, -math.inf)
        if case.left >= 0:
            s = s.masked_fill((j < i - case.left) & (j >= case.token_sinks), -math.inf)
        s[..., hidden] = -math.inf
        if case.sinks:
            s = torch.cat([s, self.tensors["sinks"][:, None, None].expand(-1, s.shape[1], 1)], 2)
        lse = torch.logsumexp(s, 2) if s.shape[2] else torch.full(s.shape[:2], -math.inf, device="cuda")
        p = torch.exp(s - lse.clamp(min=-1e30)[..., None])[..., :keys]
        return p @ v, lse
