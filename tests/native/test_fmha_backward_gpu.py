"""Gradients on GPUs against float64: the three stages in the emulation of the CUDA form, and in the emulator of AMD
instructions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from amd_config import ARCHS, WAVE, missing_tools
from fmha_gpu_case import AmdKernels, GpuFmhaCall, GpuFmhaKernel, HostKernels
from fmha_native_args import FmhaShape
from grouping import wanted

from tilewright_fmha.problem.masks import Mask
from tilewright_fmha.problem.philox import random_bytes
from tilewright_fmha.references.forward import score

Array = np.ndarray[Any, Any]

PLAIN = GpuFmhaKernel(family="dq_dk_dv", block=(32, 32), waves=2)
BF16 = PLAIN.replace(q="bf16", kv="bf16", o="bf16", register=(1, 1, 2), block=(32, 64), waves=4)
FP16 = BF16.replace(q="fp16", kv="fp16", o="fp16")
PARTS = BF16.replace(parts=2, dq_rows=2)
LENGTHS = FmhaShape(batch=4, seq=(40, 80), heads=(2, 1), lens_q=(17, 0, 40, 1), lens_k=(65, 9, 0, 1), splits=2)
WINDOW = Mask(20, 4, True, 3)
SCORES = {"mask": "window", "token_sinks": True, "softcap": True, "dropout": True}

CASES: dict[str, tuple[GpuFmhaKernel, FmhaShape]] = {
    "fp32": (PLAIN, FmhaShape(seq=(33, 65), hdim=(40, 64), heads=(4, 2), layout="bshd")),
    "bf16": (BF16.replace(hdim=(64, 32)), FmhaShape(seq=(33, 130), hdim=(64, 24), splits=2)),
    "fp16_atomics": (FP16.replace(deterministic=False), FmhaShape(seq=(40, 130), heads=(2, 1))),
    "causal": (FP16.replace(mask="causal"), FmhaShape(seq=(70, 100), mask=Mask(-1, 0), batch=1, splits=2)),
    "lengths": (BF16.replace(v_col=True), LENGTHS),
    "varlen": (PLAIN.replace(varlen=True, mask="causal"), LENGTHS.replace(mask=Mask(-1, 0, True))),
    "varlen_skip": (FP16.replace(varlen=True, skip_min=True, learned_sinks=True), LENGTHS.replace(min_q=4)),
    "random_bytes": (FP16.replace(dropout=True, randval=True), LENGTHS.replace(drop_below=77)),
    "random_bytes_varlen": (
        PARTS.replace(dropout=True, randval=True, varlen=True, skip_min=True, deterministic=False),
        LENGTHS.replace(drop_below=77, min_q=4),
    ),
    "random_bytes_fp32": (
        PLAIN.replace(dropout=True, randval=True, varlen=True, mask="causal"),
        LENGTHS.replace(drop_below=77, mask=Mask(-1, 0, True)),
    ),
    "bias": (BF16.replace(bias="elementwise", dbias=True), FmhaShape(seq=(17, 70), splits=2)),
    "bias_rows": (
        PLAIN.replace(bias="elementwise", dbias=True, softcap=True, deterministic=False),
        FmhaShape(bias_axes=(False, True, False, True), softcap=2.0),
    ),
    "alibi_sinks": (FP16.replace(bias="alibi", learned_sinks=True), FmhaShape(seq=(17, 70), heads=(4, 2))),
    "scores": (PLAIN.replace(**SCORES), LENGTHS.replace(mask=WINDOW, softcap=2.0, drop_below=77)),
    "scores_bf16": (
        BF16.replace(**SCORES, learned_sinks=True, varlen=True),
        LENGTHS.replace(mask=WINDOW, softcap=2.0, drop_below=77),
    ),
    "parts": (PARTS, FmhaShape(seq=(33, 130), heads=(4, 2), splits=2)),
    "parts_causal": (
        PARTS.replace(block=(64, 64), dq_rows=4, mask="causal", hdim=(96, 96), deterministic=False),
        FmhaShape(seq=(100, 90), hdim=(72, 96), mask=Mask(-1, 0, True), batch=1),
    ),
    "parts_scores": (
        PARTS.replace(**SCORES, bias="elementwise", dbias=True),
        LENGTHS.replace(mask=WINDOW, softcap=2.0, drop_below=77),
    ),
    "parts_fp32": (
        PLAIN.replace(**SCORES, block=(16, 32), parts=2, waves=4, hdim=(192, 128), bias="elementwise", dbias=True),
        LENGTHS.replace(mask=WINDOW, softcap=2.0, drop_below=77, hdim=(192, 128)),
    ),
    "parts_256": (
        PARTS.replace(block=(64, 64), parts=4, waves=8, hdim=(256, 256)),
        FmhaShape(seq=(70, 65), hdim=(256, 200), batch=1),
    ),
}  # fmt: skip


def amd_cases(arch: str) -> dict[str, tuple[GpuFmhaKernel, FmhaShape]]:
    wide = WAVE[arch] == 64
    plain = PLAIN.replace(arch=arch, warp=(16, 16, 4) if wide else (16, 8, 4))
    half = {"register": (1, 1, 2), "warp": (16, 16, 16)}
    bf16 = plain.replace(q="bf16", kv="bf16", o="bf16", **half, **SCORES, randval=True, varlen=True)
    fp16 = plain.replace(q="fp16", kv="fp16", o="fp16", **half, mask="causal", learned_sinks=True)
    found = {
        "bf16": (bf16, FmhaShape(batch=2, seq=(20, 40), heads=(2, 1), lens_q=(17, 3), lens_k=(40, 9), mask=WINDOW,
                                 softcap=2.0, drop_below=77)),
    }  # fmt: skip
    if arch in ("gfx90a", "gfx1201"):
        long = fp16.replace(block=(16, 16), parts=4, waves=4, hdim=(256, 256))
        found["fp16_256"] = (long, FmhaShape(batch=1, seq=(20, 20), heads=(1, 1), hdim=(256, 248), mask=Mask(-1, 0)))
    if arch in ("gfx942", "gfx1100"):
        found["fp32"] = (plain.replace(hdim=(32, 32)), FmhaShape(batch=1, seq=(33, 40), hdim=(24, 32), heads=(2, 1)))
        found["fp16"] = (fp16, FmhaShape(batch=1, seq=(20, 70), heads=(2, 2), mask=Mask(-1, 0, True), splits=2))
    return found


AMD = {f"{arch}_{name}": case for arch in ARCHS for name, case in amd_cases(arch).items()}


class Gradients(GpuFmhaCall):
    """A call with what forward stored, and gradients of what it gave."""

    def __init__(self, kernel: GpuFmhaKernel, shape: FmhaShape, rng: np.random.Generator) -> None:
        super().__init__(kernel, shape, rng, at_end=bool(rng.integers(2)))
        s, args = shape, self.args
        lead, rows_q = (1, args.total_q) if kernel.varlen else (s.batch, s.seq[0])
        rows_k = args.total_k if kernel.varlen else s.seq[1]
        self.d_o = self.tensor("d_o", kernel.o, (lead, s.heads[0], rows_q, s.hdim[1]), self.order())
        self.out = {
            "dq": self.tensor("dq", kernel.q, (lead, s.heads[0], rows_q, s.hdim[0]), self.order()),
            "dk": self.tensor("dk", kernel.kv, (lead, s.heads[1], rows_k, s.hdim[0]), self.order()),
            "dv": self.tensor("dv", kernel.kv, (lead, s.heads[1], rows_k, s.hdim[1]), self.order()),
        }
        lines = lead * s.heads[0] * rows_q
        self.pointer("delta", np.full(lines, np.nan, np.float32))
        self.pointer("dq_acc", np.full(s.splits * lines * kernel.hdim[0], np.nan, np.float32))
        if kernel.learned_sinks:
            self.dsinks = self.pointer("dsinks", np.full(s.heads[0], np.nan, np.float32))
        if kernel.dbias:
            full = (s.batch, s.heads[0], *s.seq)
            sizes = tuple(size if own else 1 for size, own in zip(full, s.bias_axes, strict=True))
            self.out["dbias"] = self.tensor("dbias", kernel.bias_type, sizes, (0, 1, 2, 3))
            for name, own in zip(("batch", "head", "row", "col"), s.bias_axes, strict=True):
                if not own:
                    setattr(args.dbias, name, 0)
            copies = 1 if s.bias_axes[3] else s.splits
            self.pointer("dbias_acc", np.full(copies * int(np.prod(sizes)), np.nan, np.float32))
        self.outputs = tuple(getattr(args, name).ptr for name in self.out)
        for b, n in enumerate(self.lens_q):
            for h in range(s.heads[0]):
                o, lse, _ = self.truth(b, h)
                if n == 0 or (kernel.skip_min and n < s.min_q):
                    o, lse = np.zeros_like(o), np.full_like(lse, -np.inf)
                self.rows_of(self.o, b, h)[:n] = o
                self.rows_of(self.lse, b, h)[:n, 0] = lse
                self.rows_of(self.d_o, b, h)[:n] = self.rng.standard_normal((n, s.hdim[1]))

    def check_gradients(self) -> None:
        s, kernel = self.shape, self.kernel
        g, keep = s.heads[0] // s.heads[1], 256 / (256 - s.drop_below)
        dsinks = np.zeros(s.heads[0])
        dbias = np.zeros(self.out["dbias"].shape) if "dbias" in self.out else None
        for b, (n, m) in enumerate(zip(self.lens_q, self.lens_k, strict=True)):
            for hk in range(s.heads[1]):
                dk, dv = np.zeros((m, s.hdim[0])), np.zeros((m, s.hdim[1]))
                for h in range(hk * g, hk * g + g):
                    q, k, v = self.q[b][h], self.k[b][hk], self.v[b][hk]
                    o, do = (self.rows_of(x, b, h)[:n].astype(np.float64) for x in (self.o, self.d_o))
                    lse = self.rows_of(self.lse, b, h)[:n, 0].astype(np.float64)
                    seen = s.mask.visible(n, m) & (lse > -np.inf)[:, None]
                    bias = None
                    if self.bias is not None:
                        own = self.bias[b if s.bias_axes[0] else 0, h if s.bias_axes[1] else 0]
                        bias = own[: n if s.bias_axes[2] else 1, : m if s.bias_axes[3] else 1]
                    slope = float(self.slopes[b, h]) if kernel.bias == "alibi" else 0.0
                    cap = s.softcap if kernel.softcap else 0.0
                    x = score(q, k, self.scale, cap, bias, slope, s.mask.offset(n, m))
                    p = np.where(seen, np.exp(np.where(seen, x - np.where(seen, lse[:, None], 0), 0)), 0)
                    delta, kept = (do * o).sum(axis=1), np.ones((n, m))
                    if kernel.dropout:
                        drawn = random_bytes(self.seed, self.offset, b * s.heads[0] + h, n, m)
                        kept = np.where(drawn >= s.drop_below, keep, 0.0)
                    ds = p * ((do @ v.T) * kept - delta[:, None])
                    if kernel.learned_sinks:
                        known = lse > -np.inf
                        dsinks[h] -= (np.exp(self.sinks[h] - lse[known]) * delta[known]).sum()
                    if dbias is not None:
                        part = ds if s.bias_axes[2] else ds.sum(axis=0, keepdims=True)
                        part = part if s.bias_axes[3] else part.sum(axis=1, keepdims=True)
                        to = dbias[b if s.bias_axes[0] else 0, h if s.bias_axes[1] else 0]
                        to[: part.shape[0], : part.shape[1]] += part
                    if cap:
                        ds = ds * (1 - (score(q, k, self.scale, cap) / cap) ** 2)
                    dv += (p * kept).T @ do
                    dk += self.scale * ds.T @ q
                    self.near(self.rows_of(self.out["dq"], b, h), self.scale * ds @ k, n, ("dq", b, h))
                self.near(self.keys_of("dk", b, hk), dk, m, ("dk", b, hk))
                self.near(self.keys_of("dv", b, hk), dv, m, ("dv", b, hk))
        if kernel.learned_sinks:
            np.testing.assert_allclose(self.dsinks, dsinks, rtol=1e-3, atol=1e-3)
        if kernel.randval:
            self.check_random()
        if dbias is not None:
            self.near(self.out["dbias"].reshape(-1, 1), dbias.reshape(-1, 1), dbias.size, "dbias")

    def keys_of(self, name: str, b: int, h: int) -> Array:
        view = self.out[name]
        rows: Array = view[0, h, self.k_at[b] :] if self.kernel.varlen else view[b, h]
        return rows

    def near(self, got: Array, want: Array, rows: int, where: Any) -> None:
        """Within the rounding of P, dS and the result; rows beyond the item are zero, or (varlen) somebody else's."""
        if rows:
            error = np.abs(got[:rows].astype(np.float64) - want).max(initial=0)
            unit = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 3e-2}[self.kernel.q]
            assert error <= unit * max(np.abs(want).max(initial=0), 1.0), (where, error, np.abs(want).max())
        if not self.kernel.varlen:
            assert np.all(got[rows:] == 0), where


@pytest.fixture(scope="module")
def gradients(build_folder: Path, request: pytest.FixtureRequest) -> HostKernels:
    return HostKernels(
        build_folder, [kernel for kernel, _ in CASES.values()], 9, [kernel for kernel, _ in wanted(request, CASES)]
    )


@pytest.fixture(scope="module")
def emulated(build_folder: Path, request: pytest.FixtureRequest) -> AmdKernels:
    if missing := missing_tools(build_folder):
        pytest.skip(f"needs {missing}")
    return AmdKernels(
        build_folder, [kernel for kernel, _ in AMD.values()], 9, [kernel for kernel, _ in wanted(request, AMD)]
    )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.extended
def test_features(gradients: HostKernels, name: str, rng: np.random.Generator) -> None:
    call = Gradients(*CASES[name], rng)
    call.run(gradients, int(rng.integers(1, 100)))
    call.check_gradients()


@pytest.mark.parametrize("name", AMD)
@pytest.mark.some(1)
def test_features_on_amd(emulated: AmdKernels, name: str, rng: np.random.Generator) -> None:
    kernel, shape = AMD[name]
    call = Gradients(kernel, shape, rng)
    call.run(emulated)
    call.check_gradients()
    built, symbol = emulated.built(kernel)
    facts = built.resources(symbol)
    assert facts.vgpr_spills == facts.scratch_bytes == 0
