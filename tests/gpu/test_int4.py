"""Products with 4-bit weights on the GPU, of every kernel of the set and of what is chosen, against float64."""

from __future__ import annotations

import random
from typing import Any

import pytest
from gpu_cases import torch_dtype

import tilewright
import tilewright_arch
from tilewright_gemm.fusion import RULES
from tilewright_gemm.pipelines.kernel_sets import KERNEL_SETS

TYPES = ("bf16", "fp16", "fp8", "int8")
SIZES = [(1, 128, 128), (1, 4096, 4096), (17, 300, 261), (64, 129, 1000), (128, 512, 896), (300, 1000, 384)]


def product(
    torch: Any, m: int, n: int, k: int, a_type: str, scales: str, zeros: bool, pad: int = 0
) -> tuple[dict[str, Any], Any, Any]:
    """Operands whose groups differ by orders of magnitude, the truth, and the sums of magnitudes."""
    made = torch.Generator("cuda").manual_seed(m * 31 + n * 7 + k)
    draw = lambda *shape: torch.randn(shape, generator=made, device="cuda")  # noqa: E731
    groups, rows = -(-k // 128), -(-k // 2)
    wide = draw(m, k + pad)[:, :k] if not pad else torch.zeros(m, k + pad, device="cuda")
    if pad:
        wide[:, :k] = draw(m, k)
    a = (wide * 30).round().clamp(-127, 127).to(torch.int8) if a_type == "int8" else wide.to(torch_dtype(torch, a_type))
    a = a[:, :k]
    packed = torch.randint(-128, 128, (n, rows + pad), generator=made, device="cuda", dtype=torch.int8)[:, :rows]
    scale_b = torch.exp2(2 * draw(groups, n)).to(torch_dtype(torch, scales)).t()  # by groups first
    zero_b = torch.randint(0, 16, (n, groups), generator=made, device="cuda", dtype=torch.int8) if zeros else None
    unsigned = packed.to(torch.int32) & 255
    values = torch.stack([unsigned & 15, unsigned >> 4], -1).reshape(n, -1)[:, :k].double()
    shift = zero_b.double().repeat_interleave(128, 1)[:, :k] if zeros else 8.0
    weights = (values - shift) * scale_b.double().repeat_interleave(128, 1)[:, :k]
    operands = {"a": a, "b": packed.t(), "scale_b": scale_b, "zero_b": zero_b, "b_format": "int4_128"}
    return operands, a.double() @ weights.t(), a.double().abs() @ weights.abs().t()


def check(torch: Any, client: tilewright.Client, sizes: tuple[int, int, int], a_type: str, **more: Any) -> None:
    out_dtype, scales, zeros = more.pop("out_dtype", "bf16"), more.pop("scales", "fp16"), more.pop("zeros", True)
    inputs, truth, magnitude = product(torch, *sizes, a_type, scales, zeros, more.pop("pad", 0))
    if "bias" in more:
        truth = torch.relu(truth + more["bias"].double())
    out = torch.full(truth.shape, float("nan"), dtype=torch_dtype(torch, out_dtype), device="cuda")
    client.gemm(**inputs, out=out, **more)
    torch.cuda.synchronize()
    step = {"fp32": 2.0**-22, "fp16": 2.0**-11, "bf16": 2.0**-8}[out_dtype]
    # The matrix unit keeps some 14 bits of sums of 8-bit floats within a group. A wrong factor is far off.
    allowed = truth.abs() * step * 1.01 + magnitude * (2.0**-11 if a_type == "fp8" else 2.0**-17) + 1e-20
    good = (out.double() - truth).abs() <= allowed
    if out_dtype == "fp16":
        good |= (truth.abs() > 65000) & (out.abs().double() > 65000)
        good |= (out.double() - truth).abs() <= 2.0**-24
    shown = client.report and client.report.kernels
    assert bool(good.all()), f"{sizes} {a_type}: {int((~good).sum())} of {good.numel()} with {shown}"


@pytest.mark.parametrize("a_type", TYPES)
@pytest.mark.parametrize("out_dtype", ["bf16", "fp16", "fp32"])
def test_chosen_kernels_scale_every_group(torch: Any, client: tilewright.Client, a_type: str, out_dtype: str) -> None:
    for sizes in SIZES:
        check(torch, client, sizes, a_type, out_dtype=out_dtype)
    check(torch, client, (33, 200, 512), a_type, out_dtype=out_dtype, zeros=False, scales="fp32")
    check(torch, client, (33, 200, 515), a_type, out_dtype=out_dtype, scales="bf16", pad=5)
    bias, rows = torch.randn(300, device="cuda"), torch.rand(77, 1, device="cuda") * 0 + 1
    check(torch, client, (77, 300, 640), a_type, out_dtype=out_dtype, bias=bias, scale_a=rows, activation="relu")


def test_every_kernel_of_the_set_scales_every_group(torch: Any, client: tilewright.Client) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the set is expanded for Hopper")
    arch = tilewright_arch.load("sm_90a")
    for config in KERNEL_SETS["int4"].expand(arch, RULES):
        if config.layout != "rcr":
            continue
        kind = config.scale_b.value.removeprefix("int4")
        more = {"scales": kind.rstrip("z"), "zeros": kind.endswith("z"), "config": config.to_dict()}
        for sizes in ((300, 1000, 416), (64, 136, 1024), (1, 64, 128)):
            check(torch, client, sizes, config.a, **more)


@pytest.mark.parametrize("slices", [2, 5])
def test_slices_of_k_add_up(torch: Any, client: tilewright.Client, slices: int) -> None:
    for a_type in TYPES:
        for sizes in ((16, 256, 4096), (200, 256, 1152), (130, 300, 288)):
            check(torch, client, sizes, a_type, split_k=slices)


def test_random_problems_come_out_right(torch: Any, client: tilewright.Client) -> None:
    rng = random.Random(11)
    for _ in range(40):
        sizes = (rng.choice((1, 2, 7, 16, 31, 70, 200)), rng.randint(1, 900), rng.randint(1, 3000))
        check(
            torch, client, sizes, rng.choice(TYPES), scales=rng.choice(("fp32", "fp16", "bf16")),
            zeros=rng.random() < 0.5, pad=rng.choice((0, 0, 3, 16)), out_dtype=rng.choice(("bf16", "fp32")),
        )  # fmt: skip
