"""Products of 8-bit floats with block scales on the GPU, of every kernel of the set and of what is chosen, against
float64.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_cases import torch_dtype

import tilewright
import tilewright_arch
from tilewright_gemm.fusion import RULES
from tilewright_gemm.pipelines.kernel_sets import KERNEL_SETS

SIZES = [(1, 128, 128), (17, 300, 260), (64, 129, 1000), (128, 512, 896), (300, 1000, 384), (257, 24, 4096)]
BLOCKS = {1: ((1, 128), (1, 128)), 128: ((1, 128), (128, 128))}


def product(
    torch: Any, m: int, n: int, k: int, across: int, dtypes: tuple[str, str]
) -> tuple[dict[str, Any], Any, Any]:
    """Operands whose blocks differ by orders of magnitude, the truth, and the sums of magnitudes."""
    made = torch.Generator("cuda").manual_seed(m * 31 + n * 7 + k)
    draw = lambda *shape: torch.randn(shape, generator=made, device="cuda")  # noqa: E731
    blocks = -(-k // 128)
    a, w = draw(m, k).to(torch_dtype(torch, dtypes[0])), draw(n, k).to(torch_dtype(torch, dtypes[1]))
    scale_a = torch.exp2(4 * draw(blocks, m)).t()  # by blocks of k first
    scale_b = torch.exp2(4 * draw(-(-n // across), blocks))
    wide_a = scale_a.double().repeat_interleave(128, 1)[:, :k]
    wide_b = scale_b.double().repeat_interleave(128, 1)[:, :k].repeat_interleave(across, 0)[:n]
    left, right = a.double() * wide_a, w.double() * wide_b
    operands = {"a": a, "b": w.t(), "scale_a": scale_a, "scale_b": scale_b}
    return operands, left @ right.t(), left.abs() @ right.abs().t()


def check(torch: Any, client: tilewright.Client, sizes: tuple[int, int, int], across: int, **more: Any) -> None:
    out_dtype, dtypes = more.pop("out_dtype", "bf16"), more.pop("dtypes", ("fp8", "fp8"))
    inputs, truth, magnitude = product(torch, *sizes, across, dtypes)
    if "bias" in more:
        truth = torch.relu(truth + more["bias"].double())
    out = torch.full(truth.shape, float("nan"), dtype=torch_dtype(torch, out_dtype), device="cuda")
    client.gemm(**inputs, scale_block=BLOCKS[across], out=out, **more)
    torch.cuda.synchronize()
    step = {"fp32": 2.0**-22, "fp16": 2.0**-11, "bf16": 2.0**-8}[out_dtype]
    # The matrix unit keeps some 14 bits of the sums within a block, which are four steps. A wrong factor is far off.
    allowed = truth.abs() * step * 1.01 + magnitude * 2.0**-11 + 1e-20
    good = (out.double() - truth).abs() <= allowed
    if out_dtype == "fp16":  # beyond the range of its normal numbers
        good |= (truth.abs() > 65000) & (out.abs().double() > 65000)
        good |= (out.double() - truth).abs() <= 2.0**-24
    assert bool(good.all()), f"{int((~good).sum())} of {good.numel()} with {client.report and client.report.kernels}"


@pytest.mark.parametrize("across", [1, 128])
@pytest.mark.parametrize("out_dtype", ["bf16", "fp16", "fp32"])
def test_chosen_kernels_scale_every_block(torch: Any, client: tilewright.Client, across: int, out_dtype: str) -> None:
    for sizes in SIZES:
        check(torch, client, sizes, across, out_dtype=out_dtype)
    check(torch, client, (100, 300, 512), across, dtypes=("fp8", "bf8"), out_dtype=out_dtype)
    bias = torch.randn(300, device="cuda")
    check(torch, client, (77, 300, 640), across, out_dtype=out_dtype, bias=bias, activation="relu")


@pytest.mark.parametrize("across", [1, 128])
def test_every_kernel_of_the_set_scales_every_block(torch: Any, client: tilewright.Client, across: int) -> None:
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        pytest.skip("the set is that of Hopper")
    arch = tilewright_arch.load("sm_90a")
    for config in KERNEL_SETS["block_scaled"].expand(arch, RULES):
        if config.layout != "rcr" or config.scale_b.value != f"{across}x128":
            continue
        for sizes in ((300, 1000, 400), (64, 136, 1024), (1, 64, 128)):
            check(torch, client, (*sizes[:2], sizes[2] // 16 * 16), across, config=config.to_dict())


@pytest.mark.parametrize("across", [1, 128])
@pytest.mark.parametrize("slices", [2, 5])
def test_slices_of_k_add_up(torch: Any, client: tilewright.Client, across: int, slices: int) -> None:
    for sizes in ((16, 256, 4096), (200, 256, 1152), (130, 300, 272)):
        check(torch, client, sizes, across, split_k=slices)


@pytest.mark.parametrize("size", [(1, 128, 128), (70, 300, 250), (128, 512, 896)], ids=str)
def test_exponents_scale_blocks_of_32(torch: Any, client: tilewright.Client, size: tuple[int, int, int]) -> None:
    m, n, k = size
    k = k // 16 * 16
    made = torch.Generator("cuda").manual_seed(m)
    values = [torch.randn(rows, k, generator=made, device="cuda").to(torch_dtype(torch, "fp8")) for rows in (m, n)]
    bytes_ = [torch.randint(117, 137, (rows, -(-k // 32)), generator=made, device="cuda") for rows in (m, n)]
    left, right = (
        value.double() * torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)[:, :k]
        for value, exponents in zip(values, bytes_, strict=True)
    )
    scales = [exponents.to(torch.uint8) for exponents in bytes_]
    out = torch.full((m, n), float("nan"), device="cuda")
    client.gemm(values[0], values[1].t(), scale_a=scales[0], scale_b=scales[1], scale_block=((1, 32), (1, 32)), out=out)
    torch.cuda.synchronize()
    allowed = (left @ right.t()).abs() * 2.0**-22 + left.abs() @ right.abs().t() * 2.0**-11
    assert bool(((out.double() - left @ right.t()).abs() <= allowed).all()), client.report
