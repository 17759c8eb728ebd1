"""The backend of ``torch.compile``: what it takes over, that results stay, and how it chooses."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tilewright as tw  # noqa: E402
import tilewright.torch as twt  # noqa: E402
from tilewright.torch.compiler import choice  # noqa: E402
from tilewright.torch.compiler.backend import tilewright as backend  # noqa: E402

F = torch.nn.functional
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("client"), pytest.mark.filterwarnings("default")]
ALWAYS = {"choose": "always", "rest": "eager"}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choice._Times, "_kept", None)
    monkeypatch.setattr(choice, "_decisions", [])
    torch.compiler.reset()


def rand(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


W, B, R, K = rand(24, 16) * 0.3, rand(24), rand(4, 5, 24), rand(6, 5, 3)
CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "linear, gelu": (lambda x: F.gelu(F.linear(x, W, B)), "activation=gelu"),
    "linear, gelu by tanh": (lambda x: F.gelu(F.linear(x, W), approximate="tanh"), "activation=gelu_tanh"),
    "linear, residual, relu": (lambda x: F.relu(R + F.linear(x, W, B)), "activation=relu"),
    "matmul, silu": (lambda x: F.silu(x @ W.t()), "activation=silu"),
    "products of products": (lambda x: F.linear(F.relu(F.linear(x, W, B)), W.t()) + x, "activation=relu"),
    "a sum of products": (lambda x: torch.tanh(F.linear(x, W) + F.linear(x, W, B)), "activation=tanh"),
    "a value used twice": (lambda x: F.linear(x, W, B) * F.relu(F.linear(x, W, B)), "activation=relu"),
    "addmm": (lambda x: torch.addmm(B, x[0], W.t()), "linear=False"),
    "bmm": (lambda x: torch.bmm(x, x.transpose(1, 2)), "linear=False"),
    "convolution": (lambda x: F.conv1d(x, K, B[:6], padding=1), "convolution"),
    "attention": (lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True), "attention"),
}


@pytest.mark.parametrize("name", CASES)
def test_results_stay_when_a_problem_is_taken_over(name: str) -> None:
    function, shown = CASES[name]
    x = rand(4, 5, 16)
    found = torch.compile(function, backend=backend, fullgraph=True, options=ALWAYS)(x)
    torch.testing.assert_close(found, function(x), rtol=1e-4, atol=1e-4)
    assert any(shown in item.problem and item.replaced for item in twt.report())


def test_gradients_go_through_what_was_taken_over() -> None:
    weight = W.clone().requires_grad_()

    def function(x: Any) -> Any:
        return F.gelu(F.linear(x, weight, B)).square().sum()

    x = rand(4, 5, 16).requires_grad_()
    compiled = torch.compile(function, backend=backend, options={"choose": "always", "rest": "aot_eager"})
    ours, theirs = (torch.autograd.grad(each(x), [x, weight]) for each in (compiled, function))
    for left, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


LEFT: dict[str, Callable[[Any], Any]] = {
    "vectors": lambda x: torch.matmul(x, W[0]),
    "doubles": lambda x: F.linear(x.double(), W.double()),
    "dropout": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5),
    "a scaled sum": lambda x: torch.addmm(B, x[0], W.t(), alpha=2),
    "nothing to do": lambda x: x.relu() + 1,
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_none_of_ours_is_left(name: str) -> None:
    torch.compile(LEFT[name], backend=backend, fullgraph=True, options=ALWAYS)(rand(4, 5, 16))
    assert twt.report() == []


def test_a_value_that_something_else_needs_is_not_fused_away() -> None:
    def function(x: Any) -> Any:
        y = F.linear(x, W, B)
        return y, F.relu(y)

    x = rand(4, 5, 16)
    for left, right in zip(torch.compile(function, backend=backend, options=ALWAYS)(x), function(x), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
    assert "activation=None" in twt.report()[0].problem


def test_operands_that_are_written_on_the_way_are_read_before() -> None:
    def function(x: Any) -> Any:
        x = x + 1
        y = F.linear(x, W, B)
        x.mul_(0)
        return F.relu(y) + x.sum()

    x = rand(4, 5, 16)
    found = torch.compile(function, backend=backend, options=ALWAYS)(x)
    torch.testing.assert_close(found, function(x), rtol=1e-4, atol=1e-4)
    assert "activation=None" in twt.report()[0].problem


def test_the_faster_one_is_taken_and_the_measurement_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    x = rand(4, 5, 16)

    def compiled() -> Any:
        torch.compiler.reset()
        return torch.compile(lambda x: F.linear(x, W, B), backend=backend, options={"rest": "eager"})(x)

    compiled()
    first = twt.report()[-1]
    assert first.reason == "measured" and first.ours_us and first.pytorch_us
    assert first.replaced == (first.ours_us <= choice.GAIN * first.pytorch_us)
    choice._Times._kept = None  # as in another process
    compiled()
    again = twt.report()[-1]
    assert again.reason == "measured before" and again.ours_us == first.ours_us and again.replaced == first.replaced
    for times, taken in (((1.0, 2.0), True), ((2.0, 1.0), False)):
        monkeypatch.setattr(choice, "_measured", lambda *_, times=times: times)
        choice._Times._file().unlink()
        choice._Times._kept = None
        torch.testing.assert_close(compiled(), F.linear(x, W, B), rtol=1e-4, atol=1e-4)
        assert twt.report()[-1].replaced is taken


def test_a_damaged_cache_is_measured_again() -> None:
    choice._Times._file().parent.mkdir(parents=True)
    choice._Times._file().write_bytes(b"\xff\n[1]\n{}\nnull\n")
    assert choice._Times.known() == {}


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(Exception, match="there is no choice 'sometimes'"):
        torch.compile(lambda x: x + 1, backend=backend, options={"choose": "sometimes"})(rand(2, 2))


def test_without_a_server_everything_is_left_and_said(client: tw.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_TARGET", "unix:/nonexistent/socket")
    x = rand(4, 5, 16)
    twt.use(None)
    try:
        with pytest.warns(UserWarning, match="nothing is left to Tilewright"):
            found = torch.compile(lambda x: F.linear(x, W), backend=backend, options={"rest": "eager"})(x)
    finally:
        twt.use(client)
    torch.testing.assert_close(found, F.linear(x, W))


def test_the_backend_has_a_name() -> None:
    names = {item.name for item in entry_points(group="torch_dynamo_backends")}
    if "tilewright" not in names:
        pytest.skip("the distribution was installed before it had this name: install it again")
    assert torch._dynamo.lookup_backend("tilewright") is backend
