"""Custom operations of PyTorch: values and gradients against PyTorch's own, ``opcheck``, compilation and export."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tilewright as tw

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import tilewright.torch as twt  # noqa: E402

F = torch.nn.functional
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("client")]


def rand(*shape: int, grad: bool = False, dtype: Any = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_(grad)


def grads(function: Callable[..., Any], *given: Any) -> list[Any]:
    leaves = [value for value in given if isinstance(value, torch.Tensor) and value.requires_grad]
    out = function(*given)
    weight = torch.linspace(0.5, 1.5, out.numel()).reshape(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad((out * weight).sum(), leaves)]


def same(ours: list[Any], theirs: list[Any], tolerance: float = 2e-4) -> None:
    assert len(ours) == len(theirs)
    for left, right in zip(ours, theirs, strict=True):
        assert left.shape == right.shape and left.dtype == right.dtype
        scale = float(right.detach().abs().max()) + 1e-6
        assert float((left - right).detach().abs().max()) <= tolerance * scale


ACTIVATIONS = {
    None: lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "hard_swish": F.hardswish,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_linear_layer_and_its_gradients_are_those_of_pytorch(activation: str | None) -> None:
    given = rand(3, 16, 32, grad=True), rand(24, 32, grad=True), rand(24, grad=True)
    ours = grads(lambda x, w, b: twt.linear(x, w, b, activation=activation), *given)
    same(ours, grads(lambda x, w, b: ACTIVATIONS[activation](F.linear(x, w, b)), *given))


@pytest.mark.parametrize("shapes", [((5, 8), (8, 7)), ((2, 3, 5, 8), (3, 8, 7)), ((8,), (8, 7)), ((5, 8), (8,))])
def test_products_broadcast_as_those_of_pytorch(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    given = [rand(*shape, grad=True) for shape in shapes]
    same(grads(twt.matmul, *given), grads(torch.matmul, *given))


def test_an_epilogue_with_addends_has_gradients() -> None:
    given = rand(6, 8, grad=True), rand(8, 10, grad=True), rand(6, 10, grad=True), rand(6, 10, grad=True)
    ours = grads(lambda a, b, c, d: twt.gemm(a, b, None, c, [d], alpha=0.5, activation="silu"), *given)
    same(ours, grads(lambda a, b, c, d: F.silu(0.5 * (a @ b) + c + d), *given))


def test_gradients_that_are_not_there_are_refused() -> None:
    a, b = rand(4, 8, grad=True), rand(8, 4)
    with pytest.raises(NotImplementedError, match="multiplied"):
        twt.gemm(a, b, None, None, [rand(4, 4)], binary="multiply").sum().backward()


def test_bf16_goes_there_and_back() -> None:
    a, b = rand(16, 32, dtype=torch.bfloat16), rand(32, 8, dtype=torch.bfloat16)
    same([twt.matmul(a, b)], [a @ b], 2e-2)


def test_int8_with_scales() -> None:
    a, b = torch.ones(4, 64, dtype=torch.int8), torch.ones(64, 8, dtype=torch.int8)
    scale = torch.arange(8, dtype=torch.float32)
    found = twt.gemm(a, b, scale_b=scale, out_dtype=torch.float32)
    assert torch.equal(found, 64 * scale.expand(4, 8))


def test_grouped_products_and_gradients() -> None:
    a, b = [rand(5, 8, grad=True), rand(3, 8, grad=True)], [rand(8, 4, grad=True), rand(8, 6, grad=True)]
    outs = twt.grouped_gemm(a, b)
    ours = [*outs, *torch.autograd.grad(sum(out.square().sum() for out in outs), [*a, *b])]
    outs = [left @ right for left, right in zip(a, b, strict=True)]
    same(ours, [*outs, *torch.autograd.grad(sum(out.square().sum() for out in outs), [*a, *b])])


CONVOLUTIONS = [
    (twt.conv1d, F.conv1d, (2, 4, 9), (6, 4, 3), {"padding": 1, "stride": 2}),
    (twt.conv2d, F.conv2d, (2, 4, 8, 9), (6, 2, 3, 3), {"padding": (1, 2), "groups": 2}),
    (twt.conv2d, F.conv2d, (2, 4, 8, 9), (6, 4, 2, 3), {"padding": "same"}),
    (twt.conv3d, F.conv3d, (1, 4, 5, 6, 7), (4, 4, 2, 3, 2), {"dilation": 2}),
    (twt.conv_transpose1d, F.conv_transpose1d, (2, 4, 9), (4, 6, 3), {"padding": 1, "stride": 2}),
    (twt.conv_transpose2d, F.conv_transpose2d, (2, 4, 5, 6), (4, 3, 3, 3), {"stride": 2, "output_padding": 1}),
    (twt.conv_transpose3d, F.conv_transpose3d, (1, 4, 3, 4, 3), (4, 2, 2, 2, 2), {"groups": 2}),
]


@pytest.mark.filterwarnings("default:Using padding='same'")
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("ours,theirs,x,w,words", CONVOLUTIONS)
def test_convolutions_and_their_gradients_are_those_of_pytorch(
    ours: Any, theirs: Any, x: tuple[int, ...], w: tuple[int, ...], words: dict[str, Any], last: bool
) -> None:
    image = rand(*x)
    if last:
        image = image.movedim(1, -1).contiguous().movedim(-1, 1)
    channels = w[0] if ours.__name__ in ("conv1d", "conv2d", "conv3d") else w[1] * words.get("groups", 1)
    given = image.requires_grad_(), rand(*w, grad=True), rand(channels, grad=True)
    same(grads(lambda *all_: ours(*all_, **words), *given), grads(lambda *all_: theirs(*all_, **words), *given))


@pytest.mark.parametrize("words", [{}, {"is_causal": True}, {"scale": 0.3}, {"enable_gqa": True}])
def test_attention_and_its_gradients_are_those_of_pytorch(words: dict[str, Any]) -> None:
    heads = 2 if words.get("enable_gqa") else 4
    given = rand(2, 4, 17, 32, grad=True), rand(2, heads, 17, 32, grad=True), rand(2, heads, 17, 32, grad=True)
    ours = grads(lambda *qkv: twt.scaled_dot_product_attention(*qkv, **words), *given)
    same(ours, grads(lambda *qkv: F.scaled_dot_product_attention(*qkv, **words), *given))


def test_a_mask_of_bools_hides_keys() -> None:
    given = [rand(2, 4, 9, 32, grad=True) for _ in range(3)]
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[0, ..., 5:] = False
    ours = grads(lambda *qkv: twt.scaled_dot_product_attention(*qkv, mask), *given)
    same(ours, grads(lambda *qkv: F.scaled_dot_product_attention(*qkv, mask), *given))


def test_dropout_follows_the_generator_of_pytorch() -> None:
    q = rand(1, 2, 16, 32)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(twt.scaled_dot_product_attention(q, q, q, dropout_p=0.5))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_sequences_of_different_lengths_with_gradients() -> None:
    q, k, v = (rand(12, 2, 32, grad=True) for _ in range(3))
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)

    def ours(*qkv: Any) -> Any:
        return twt.attention_varlen(*qkv, starts, starts, 7, 7, is_causal=True)[0]

    def theirs(*qkv: Any) -> Any:
        parts = []
        for begin, end in ((0, 5), (5, 12)):
            heads = [each[begin:end].transpose(0, 1)[None] for each in qkv]
            parts.append(F.scaled_dot_product_attention(*heads, is_causal=True)[0].transpose(0, 1))
        return torch.cat(parts)

    same(grads(ours, q, k, v), grads(theirs, q, k, v))


def test_a_paged_cache_is_written_in_place_and_read() -> None:
    k_pages, v_pages = torch.zeros(4, 16, 2, 32), torch.zeros(4, 16, 2, 32)
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    k, v, q = (rand(1, 2, 20, 32) for _ in range(3))
    twt.kv_append(k, v + 1, k_pages, v_pages, torch.zeros(1, dtype=torch.int32), table)
    assert torch.equal(k_pages[2], k[0].transpose(0, 1)[:16]) and torch.equal(k_pages[0, :4], k[0].transpose(0, 1)[16:])
    found = twt.attention_paged(q, k_pages, v_pages, table, torch.tensor([20], dtype=torch.int32))
    same([found], [F.scaled_dot_product_attention(q, k, v + 1)])


INDEX = torch.tensor([0, 5, 12], dtype=torch.int32)
TWO = ([1, 1], [1, 1], [1, 1], 1)
CHECKED: dict[str, Callable[[], tuple[Any, ...]]] = {
    "gemm": lambda: (rand(4, 8, grad=True), rand(8, 6, grad=True), rand(6, grad=True)),
    "grouped_gemm": lambda: ([rand(4, 8, grad=True), rand(3, 8)], [rand(8, 6, grad=True), rand(8, 2)]),
    "conv": lambda: (rand(2, 4, 6, 7, grad=True), rand(4, 4, 3, 3, grad=True), rand(4, grad=True), *TWO),
    "conv_backward_data": lambda: (rand(2, 4, 6, 7), rand(4, 4, 3, 3), [6, 7], *TWO),
    "conv_backward_weight": lambda: (rand(2, 4, 6, 7), rand(2, 4, 6, 7), [3, 3], *TWO),
    "conv_transpose": lambda: (rand(2, 4, 6, 7, grad=True), rand(4, 4, 3, 3, grad=True), None, *TWO, [0, 0]),
    "attention": lambda: tuple(rand(1, 2, 9, 32, grad=True) for _ in range(3)),
    "attention_backward": lambda: (
        *(rand(1, 2, 9, 32) for _ in range(5)),
        torch.logsumexp(rand(1, 2, 9, 32) @ rand(1, 2, 9, 32).mT / 32**0.5, -1),
    ),
    "attention_varlen": lambda: (*(rand(12, 2, 32, grad=True) for _ in range(3)), INDEX, INDEX, 7, 7),
    "attention_paged": lambda: (
        rand(1, 2, 1, 32), rand(2, 16, 2, 32), rand(2, 16, 2, 32),
        torch.tensor([[1, 0]], dtype=torch.int32), torch.tensor([20], dtype=torch.int32),
    ),
    "kv_append": lambda: (
        rand(1, 2, 3, 32), rand(1, 2, 3, 32), torch.zeros(1, 2, 8, 32), torch.zeros(1, 2, 8, 32),
        torch.zeros(1, dtype=torch.int32),
    ),
}  # fmt: skip


def test_every_operation_is_checked() -> None:
    every = {
        name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("tilewright::")
    }
    more = {"attention_latent", "attention_latent_paged", "gemm_block_scaled", "gemm_int4", "gemm_packed", "moe_gemm"}
    more |= {"moe_gemm_quantised"}
    assert every == CHECKED.keys() | more  # those: test_weights.py


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", CHECKED)
def test_opcheck_passes(name: str) -> None:
    found = torch.library.opcheck(getattr(torch.ops.tilewright, name).default, CHECKED[name]())
    assert set(found.values()) == {"SUCCESS"}


class Block(torch.nn.Module):
    """A convolution, attention over its pixels, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = torch.nn.Parameter(rand(64, 4, 3, 3) * 0.1)
        self.weight = torch.nn.Parameter(rand(16, 64) * 0.1)

    def forward(self, x: Any) -> Any:
        y = twt.conv2d(x, self.filter, padding=1)
        heads = y.flatten(2).unflatten(1, (2, 32)).transpose(2, 3)
        y = twt.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return twt.linear(y.transpose(1, 2).flatten(2), self.weight, activation="gelu")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.extended)])
def test_a_model_compiles_in_one_graph_with_gradients(backend: str) -> None:
    model, x = Block(), rand(2, 4, 5, 6, grad=True)
    given = x, *model.parameters()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    ours = [compiled(x)]
    ours += torch.autograd.grad(ours[0].square().sum(), given)
    theirs = [model(x)]
    theirs += torch.autograd.grad(theirs[0].square().sum(), given)
    same(ours, theirs)


@pytest.mark.filterwarnings("default")
def test_a_model_is_exported_with_the_operations_in_it() -> None:
    model, x = Block().eval(), rand(2, 4, 5, 6)
    program = torch.export.export(model, (x,))
    names = {str(node.target) for node in program.graph.nodes}
    assert {f"tilewright.{name}.default" for name in ("conv", "attention", "gemm")} <= names
    same([program.module()(x)], [model(x)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_operands_to_its_type_with_gradients(dtype: Any) -> None:
    a, b, bias = rand(8, 16, grad=True), rand(16, 8, grad=True), rand(8, grad=True)
    with torch.autocast("cpu", dtype):
        found = twt.gemm(a, b, bias)
        wanted = a @ b + bias
    assert found.dtype is dtype
    ours, theirs = (torch.autograd.grad(each.float().square().sum(), [a, b, bias]) for each in (found, wanted))
    same([found.float(), *ours], [wanted.float(), *theirs], 3e-2)


def test_autocast_leaves_scales_as_they_are() -> None:
    a, b = torch.ones(4, 64, dtype=torch.int8), torch.ones(64, 8, dtype=torch.int8)
    scale = torch.full((8,), 1 / 3)
    with torch.autocast("cpu", torch.bfloat16):
        found = twt.gemm(a, b, scale_b=scale, out_dtype=torch.float32)
    assert torch.equal(found, (64 * scale).expand(4, 8))


def test_operands_are_read_where_they_lie(client: tw.Client) -> None:
    x = twt.matmul(rand(256, 256), rand(256, 256))
    twt.matmul(x, x)
    assert client.report is not None
    assert client.report.placement == "caller" and client.report.bytes_copied == client.report.staged_bytes == 0
