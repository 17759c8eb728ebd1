"""Convolution on the GPU is right in every direction, dimension and layout, on the memory of another process."""

from __future__ import annotations

from typing import Any

import pytest
from gpu_cases import relative, torch_dtype

import tilewright
import tilewright_arch
from tilewright_grouped_conv.config.config import BULK_PIPELINE, CONFIGS
from tilewright_grouped_conv.pipelines.candidates import conv_candidates
from tilewright_grouped_conv.problem.parse import parse_conv
from tilewright_kit.conformance.check_plugin import device_of
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc

FLOOR = {"fp32": 3e-7, "fp16": 2.5e-4, "bf16": 2e-3}
"""Rounding of the result alone."""
SLACK = 1.2
GEOMETRIES: dict[str, tuple[Any, ...]] = {
    # N, C, K, groups, size, filter, stride, padding, dilation
    "dense": (3, 64, 96, 1, (19, 23), (3, 3), (1, 1), (1, 1), (1, 1)),
    "pointwise": (2, 72, 40, 1, (17, 13), (1, 1), (1, 1), (0, 0), (1, 1)),
    "first": (2, 3, 32, 1, (37, 29), (7, 7), (2, 2), (3, 3), (1, 1)),
    "grouped": (2, 64, 128, 8, (15, 14), (3, 3), (2, 1), (1, 1), (1, 1)),
    "small groups": (2, 128, 128, 32, (16, 15), (3, 3), (1, 1), (1, 1), (1, 1)),
    "odd groups": (2, 15, 25, 5, (11, 13), (3, 2), (1, 1), (2, 0), (1, 2)),
    "eights strided": (3, 64, 64, 8, (19, 23), (3, 3), (2, 2), (1, 1), (1, 1)),
    "sixteens": (2, 96, 96, 6, (15, 17), (3, 3), (1, 1), (1, 1), (1, 1)),
    "thirty-twos": (3, 64, 64, 2, (9, 11), (3, 3), (1, 1), (1, 1), (1, 1)),
    "twos dilated": (2, 48, 48, 24, (20, 31), (3, 3), (1, 1), (2, 1), (2, 1)),
    "depthwise": (3, 96, 96, 96, (21, 18), (3, 3), (1, 1), (1, 1), (1, 1)),
    "depthwise strided": (2, 48, 48, 48, (17, 19), (5, 5), (2, 2), (2, 2), (1, 1)),
    "dilated": (1, 24, 16, 1, (20, 22), (3, 3), (1, 1), (2, 3), (2, 3)),
    "stride beyond filter": (2, 16, 24, 1, (22, 25), (2, 2), (3, 3), (0, 0), (1, 1)),
    "one output": (4, 40, 24, 1, (5, 5), (5, 5), (1, 1), (0, 0), (1, 1)),
    "1d": (3, 20, 36, 2, (101,), (7,), (2,), (3,), (1,)),
    "3d": (2, 16, 24, 1, (7, 9, 11), (3, 3, 3), (1, 2, 1), (1, 1, 1), (1, 1, 1)),
}
DTYPES = ["fp32", "fp16", "bf16"]
MERGED = ["small groups", "sixteens", "twos dilated", "depthwise"]
"""Groups of 1 to 16 channels in 16 bits, without a stride."""


class Convolution:
    """One of the geometries with random operands, and PyTorch's answers in float64."""

    def __init__(self, torch: Any, name: str, dtype: str, *, last: bool) -> None:
        n, c, k, self.groups, self.size, self.filter, stride, padding, dilation = GEOMETRIES[name]
        torch.manual_seed(7)
        self.torch, self.last, self.dtype = torch, last, dtype
        self.words = {"stride": stride, "padding": padding, "dilation": dilation, "groups": self.groups}
        self.x = self.tensor(n, c, *self.size)
        self.w = self.tensor(k, c // self.groups, *self.filter)
        forward = getattr(torch.nn.functional, f"conv{len(self.size)}d")
        x, w = (item.detach().double().cpu().contiguous().requires_grad_() for item in (self.x, self.w))
        y = forward(x, w, None, **self.words)
        self.dy = self.tensor(*y.shape)
        y.backward(self.dy.double().cpu())
        self.want = {"y": y.detach().cuda(), "dx": x.grad.cuda(), "dw": w.grad.cuda()}
        self.forward = forward

    def tensor(self, *shape: int) -> Any:
        made = self.torch.randn(shape, device="cuda").to(torch_dtype(self.torch, self.dtype))
        return self.laid_out(made)

    def laid_out(self, tensor: Any) -> Any:
        if not self.last:
            return tensor.contiguous()
        axes = (0, *range(2, tensor.ndim), 1)
        return tensor.permute(axes).contiguous().permute(0, tensor.ndim - 1, *range(1, tensor.ndim - 1))

    def poisoned(self, like: Any) -> Any:
        return self.torch.full_like(like, float("nan"))

    def theirs(self) -> dict[str, Any]:
        """The library's answers on the same operands: the yardstick."""
        backward = self.torch.ops.aten.convolution_backward
        words = [self.words[name] for name in ("stride", "padding", "dilation")]
        zeros = [0] * len(self.size)
        masks = [True, True, False]
        dx, dw, _ = backward(self.dy, self.x, self.w, None, *words, False, zeros, self.groups, masks)
        return {"y": self.forward(self.x, self.w, None, **self.words), "dx": dx, "dw": dw}

    def check(self, name: str, got: Any, theirs: Any, what: object) -> None:
        want = self.want[name]
        limit = SLACK * max(FLOOR[self.dtype], relative(self.torch, theirs, want))
        if self.dtype == "fp32":
            limit = max(limit, 2e-6)  # sums in another order than the library's
        error = relative(self.torch, got, want)
        assert error <= limit, f"{name}: {error:.2e} > {limit:.2e} with {what}"


@pytest.fixture(autouse=True)
def exact(torch: Any) -> Any:
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        yield


@pytest.mark.parametrize("last", [True, False], ids=["channels last", "channels first"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_every_direction(torch: Any, client: tilewright.Client, name: str, dtype: str, last: bool) -> None:
    case = Convolution(torch, name, dtype, last=last)
    y, dx, dw = (case.poisoned(like) for like in (case.dy, case.x, case.w))
    theirs = case.theirs()
    client.conv(case.x, case.w, out=y, **case.words)
    forward = client.report
    client.conv_backward_data(case.dy, case.w, out=dx, **case.words)
    data = client.report
    client.conv_backward_weight(case.x, case.dy, out=dw, **case.words)
    torch.cuda.synchronize()
    for output, got, report in (("y", y, forward), ("dx", dx, data), ("dw", dw, client.report)):
        case.check(output, got, theirs[output], report and report.kernels)


@pytest.mark.parametrize("name", ["dense", "small groups", "depthwise", "3d"])
def test_equal_calls_have_equal_bits(torch: Any, client: tilewright.Client, name: str) -> None:
    case = Convolution(torch, name, "fp16", last=True)
    first = client.conv_backward_weight(case.x, case.dy, filter_size=case.filter, **case.words).clone()
    for _ in range(20):
        again = client.conv_backward_weight(case.x, case.dy, filter_size=case.filter, **case.words)
        torch.cuda.synchronize()
        assert torch.equal(first, again)


@pytest.mark.parametrize("name", ["dense", "grouped", "depthwise"])
def test_gradients_are_added_in_place(torch: Any, client: tilewright.Client, name: str) -> None:
    case = Convolution(torch, name, "fp32", last=True)
    for output, call in (
        ("dx", lambda out: client.conv_backward_data(case.dy, case.w, out=out, accumulate=True, **case.words)),
        ("dw", lambda out: client.conv_backward_weight(case.x, case.dy, out=out, accumulate=True, **case.words)),
    ):
        old = case.laid_out(torch.randn_like(case.want[output]).float())
        out = old.clone()
        call(out)
        torch.cuda.synchronize()
        want = old.double() + case.want[output]
        assert relative(torch, out, want) < 3e-6, output


def copied_in_boxes(case: Convolution, operation: str, tensors: dict[str, Any], **more: Any) -> list[str]:
    """Some of the kernels with a copy engine that are considered for a problem."""
    described = {
        name: TensorDesc.of(case.dtype, tuple(tensor.shape), tuple(tensor.stride())) for name, tensor in tensors.items()
    }
    direction = {item.operation: direction for direction, item in CONFIGS.items()}[operation]
    problem = parse_conv(OperationRequest(operation, described, {}, {**case.words, **more}), direction)
    device = device_of(tilewright_arch.load("sm_90a"))
    found = [config.name for config in conv_candidates(problem, device) if config.pipeline == BULK_PIPELINE]
    return found[::4]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", [*MERGED, "eights strided"])
def test_a_copy_engine_moves_merged_groups(torch: Any, client: tilewright.Client, name: str, dtype: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only sm_90 has kernels with a copy engine")
    case = Convolution(torch, name, dtype, last=True)
    theirs = case.theirs()
    kernels = copied_in_boxes(case, "conv", {"x": case.x, "w": case.w})
    assert kernels
    for kernel in kernels:
        y = case.poisoned(case.dy)
        client.conv(case.x, case.w, out=y, kernel=kernel, **case.words)
        torch.cuda.synchronize()
        case.check("y", y, theirs["y"], kernel)
    if name in MERGED:
        kernels = copied_in_boxes(case, "conv_backward_data", {"dy": case.dy, "w": case.w}, input_size=case.size)
        assert kernels
        for kernel in kernels:
            dx = case.poisoned(case.x)
            client.conv_backward_data(case.dy, case.w, out=dx, kernel=kernel, **case.words)
            torch.cuda.synchronize()
            case.check("dx", dx, theirs["dx"], kernel)


@pytest.mark.parametrize("name", ["sixteens", "depthwise"])
def test_a_copy_engine_stores_what_an_epilogue_made(torch: Any, client: tilewright.Client, name: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only sm_90 has kernels with a copy engine")
    case = Convolution(torch, name, "fp16", last=True)
    bias = torch.randn(case.w.shape[0], device="cuda").half()
    tensors = {"x": case.x, "w": case.w, "bias": bias, "d[0]": case.dy}
    want = torch.relu(case.want["y"] + bias.double().view(1, -1, 1, 1) + case.dy.double())
    kernels = copied_in_boxes(case, "conv", tensors, binary="Add", unary="Relu")
    assert kernels
    for kernel in kernels:
        out = case.poisoned(case.dy)
        client.conv(case.x, case.w, bias=bias, d=[case.dy], activation="relu", out=out, kernel=kernel, **case.words)
        torch.cuda.synchronize()
        assert relative(torch, out, want) < 1e-3, kernel


def test_bias_residual_and_activation_are_fused(torch: Any, client: tilewright.Client) -> None:
    case = Convolution(torch, "dense", "fp16", last=True)
    bias = torch.randn(case.w.shape[0], device="cuda").half()
    out = case.poisoned(case.dy)
    client.conv(case.x, case.w, bias=bias, d=[case.dy], activation="relu", out=out, **case.words)
    torch.cuda.synchronize()
    want = torch.relu(case.want["y"] + bias.double().view(1, -1, 1, 1) + case.dy.double())
    assert relative(torch, out, want) < 1e-3
    assert (out == 0).any() and (out > 0).any()


def test_a_bound_plan_launches_on_the_current_stream(torch: Any, client: tilewright.Client) -> None:
    case = Convolution(torch, "dense", "bf16", last=True)
    out = case.poisoned(case.dy)
    bound = client.plan_conv(case.x, case.w, out=out, **case.words).bind(case.x, case.w, out=out)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        bound.launch()
        doubled = out * 2
    side.synchronize()
    assert relative(torch, doubled, 2 * case.want["y"]) < 4e-3
