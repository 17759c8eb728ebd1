"""What people expect from NumPy, PyTorch and ONNX, and refusals in the words that they used; on the service itself."""

from __future__ import annotations

import numpy as np
import pytest

import tilewright as tw


@pytest.fixture(scope="module")
def client(real_server):
    with tw.connect(real_server.target) as found:
        yield found


def random(*shape):
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(("left", "right"), [((9,), (9, 5)), ((4, 9), (9,)), ((9,), (9,)), ((3, 4, 9), (9,))])
@pytest.mark.parametrize("launch", ["server", "auto"])
def test_vectors_stand_for_a_row_and_a_column(client, left, right, launch):
    a, b = random(*left), random(*right)
    for _ in range(2):  # the second time it is a call that is known
        found = client.gemm(a, b, launch=launch)
        assert found.shape == (a @ b).shape
        np.testing.assert_allclose(found, a @ b, rtol=1e-4, atol=1e-5)


def test_a_product_of_a_vector_is_written_into_out(client):
    a, b, out = random(9), random(9, 5), np.full(5, np.nan, np.float32)
    client.gemm(a, b, out=out)
    np.testing.assert_allclose(out, a @ b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beta", [0, 1, -0.5])
def test_beta_scales_what_is_added(client, beta):
    a, b, c = random(6, 9), random(9, 5), random(6, 5)
    kept = c.copy()
    np.testing.assert_allclose(
        client.gemm(a, b, c=c, beta=beta, alpha=2.0), 2 * (a @ b) + beta * c, rtol=1e-4, atol=1e-4
    )
    assert (c == kept).all()


def test_relu6_is_a_clamp(client):
    a, b = 3 * random(6, 9), random(9, 5)
    np.testing.assert_allclose(client.gemm(a, b, activation="relu6"), np.clip(a @ b, 0, 6), rtol=1e-4, atol=1e-4)


def test_lists_of_numbers_are_arrays_of_fp32(client):
    assert (client.gemm([[1.0, 2.0]], [[3.0], [4.0]], bias=[0.5]) == [[11.5]]).all()


def scattered(x, w, stride, padding, dilation, output_padding):
    """Transposed convolution of one image and axis, by its definition."""
    count = (x.shape[2] - 1) * stride - 2 * padding + dilation * (w.shape[2] - 1) + output_padding + 1
    out = np.zeros((x.shape[0], w.shape[1], count + 4 * (padding + output_padding + 1)))
    for i in range(x.shape[2]):
        for r in range(w.shape[2]):
            out[:, :, i * stride + r * dilation] += x[:, :, i] @ w[:, :, r]
    return out[:, :, padding : padding + count]


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "output_padding"),
    [(1, 0, 3, 2), (2, 1, 4, 3), (1, 2, 2, 1), (2, 0, 1, 1), (3, 1, 7, 6)],
)
def test_output_padding_below_stride_or_dilation_is_taken(client, stride, padding, dilation, output_padding):
    x, w = random(2, 3, 5), random(3, 4, 3)
    given = {"stride": stride, "padding": padding, "dilation": dilation, "output_padding": output_padding}
    np.testing.assert_allclose(client.conv_transpose(x, w, **given), scattered(x, w, **given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("stride", "dilation", "taps"), [(2, 1, 3), (3, 1, 2), (2, 3, 3), (1, 1, 4)])
@pytest.mark.parametrize("word", ["same", "same_lower"])
def test_transposed_convolution_takes_words_for_padding(client, word, stride, dilation, taps):
    x, w = random(2, 3, 5), random(3, 4, taps)
    full = 4 * stride + dilation * (taps - 1) + 1
    surplus = full - 5 * stride
    begin = (surplus + (word == "same_lower")) // 2 if surplus > 0 else 0
    want = scattered(x, w, stride, 0, dilation, max(-surplus, 0))[:, :, begin : begin + 5 * stride]
    found = client.conv_transpose(x, w, stride=stride, dilation=dilation, padding=word)
    assert found.shape == want.shape
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [9, 10])
def test_the_size_of_a_transposed_convolution_may_be_given(client, size):
    x, w = random(2, 3, 5), random(3, 4, 3)
    found = client.conv_transpose(x, w, stride=2, padding=1, output_size=size)
    np.testing.assert_allclose(found, scattered(x, w, 2, 1, 1, size - 9), rtol=1e-4, atol=1e-4)
    plan = client.plan_conv_transpose(x, w, stride=2, padding=1, output_size=[size])
    np.testing.assert_array_equal(plan(x, w), found)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"output_size": 12}, "output_size"),
        ({"output_size": 10, "output_padding": 1}, "output_padding"),
        ({"padding": "full"}, "padding"),
        ({"padding": "same", "output_size": 40}, "output_padding"),
    ],
)
def test_sizes_that_a_transposed_convolution_cannot_have_are_refused(client, given, field):
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.conv_transpose(random(2, 3, 5), random(3, 4, 3), **{"stride": 2, "padding": 1, **given})
    assert caught.value.field == field


ACTIVATIONS = {
    "leaky_relu": lambda x: np.where(x < 0, 0.01 * x, x),
    "elu": lambda x: np.where(x < 0, np.expm1(np.minimum(x, 0)), x),
    "softplus": lambda x: np.logaddexp(x, 0),
    "mish": lambda x: x * np.tanh(np.logaddexp(x, 0)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_products_and_convolutions(client, name):
    a, b = random(6, 9), random(9, 5)
    want = ACTIVATIONS[name](a.astype(np.float64) @ b)
    np.testing.assert_allclose(client.gemm(a, b, activation=name), want, rtol=1e-4, atol=1e-5)
    x, w = random(1, 9, 6, 1), b.T.copy().reshape(5, 9, 1, 1)
    want = ACTIVATIONS[name](np.einsum("nchw,kc->nkhw", x.astype(np.float64), b.T))
    np.testing.assert_allclose(client.conv(x, w, activation=name), want, rtol=1e-4, atol=1e-5)


def test_the_slope_below_zero_may_be_given(client):
    a, b = random(6, 9), random(9, 5)
    x = a.astype(np.float64) @ b
    found = client.gemm(a, b, activation="leaky_relu", slope=0.3)
    np.testing.assert_allclose(found, np.where(x < 0, 0.3 * x, x), rtol=1e-4, atol=1e-5)
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.gemm(a, b, activation="relu", slope=0.3)
    assert (caught.value.field, caught.value.rule) == ("slope", "no_effect")


def test_words_are_taken_as_onnx_spells_them(client):
    a, b, x, w = random(4, 9), random(9, 5), random(1, 4, 7, 7), random(6, 4, 3, 3)
    for theirs, ours in (("LeakyRelu", "leaky_relu"), ("Relu6", "relu6"), ("HardSwish", "hard_swish")):
        assert np.array_equal(client.gemm(a, b, activation=theirs), client.gemm(a, b, activation=ours))
    assert np.array_equal(
        client.conv(x, w, stride=2, padding="SAME_LOWER"), client.conv(x, w, stride=2, padding="same_lower")
    )
    flipped = w.swapaxes(0, 1).copy()
    assert client.conv_transpose(x, flipped, stride=2, padding="SAME_UPPER").shape == (1, 6, 14, 14)
    with pytest.raises(tw.InvalidArgumentError, match="Leaky"):
        client.gemm(a, b, activation="Leaky_Relu")


@pytest.mark.torch
def test_a_plan_is_bound_to_tensors_of_pytorch_on_the_host(client):
    torch = pytest.importorskip("torch")
    a, b = random(8, 16), random(16, 12)
    want = a @ b
    plan = client.plan("gemm", {"a": a, "b": b})
    shared = [torch.from_numpy(client.asarray(item)) for item in (a, b)]
    for left, right, out in (
        (*shared, torch.from_numpy(client.empty((8, 12), np.float32))),
        (torch.from_numpy(a), torch.from_numpy(b), torch.full((8, 12), float("nan"))),
    ):
        try:
            call = plan.bind(left, right, out=out)
        except tw.InvalidArgumentError as error:  # memory of this process alone, and a server that launches
            assert (error.rule, left is shared[0]) == ("bound_shared", False)
            continue
        assert call() is out
        assert call.out is out
        np.testing.assert_allclose(out.numpy(), want, rtol=1e-4, atol=1e-5)
        left *= 2
        call()
        np.testing.assert_allclose(out.numpy(), 2 * want, rtol=1e-4, atol=1e-5)


def test_attention_takes_three_dimensions_as_pytorchs_does(client):
    q, k, v = random(2, 7, 16), random(2, 9, 16), random(2, 9, 16)
    want = client.attention(q[None], k[None], v[None])[0]
    assert np.array_equal(client.attention(q, k, v), want)
    o, lse = client.attention(q, k, v, return_lse=True)
    assert (o.shape, lse.shape) == ((2, 7, 16), (2, 7))


def test_a_window_with_is_causal_sees_nothing_to_the_right(client):
    q = random(1, 2, 12, 16)
    want = client.attention(q, q, q, window=(2, 0))
    assert np.array_equal(client.attention(q, q, q, is_causal=True, window=(2, -1)), want)


def test_first_keys_that_no_window_hides_are_refused(client):
    q = random(1, 2, 12, 16)
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.attention(q, q, q, sink_size=3)
    assert (caught.value.field, caught.value.rule) == ("sink_size", "no_effect")
    assert client.attention(q, q, q, sink_size=3, window=(2, 0)).shape == q.shape


def test_lse_with_sinks_includes_them(client):
    q, k, v = random(1, 2, 5, 16), random(1, 2, 6, 16), random(1, 2, 6, 16)
    sinks = np.array([0.5, -1.0], np.float32)
    _, lse = client.attention(q, k, v, sinks=sinks, return_lse=True)
    scores = q.astype(np.float64) @ k.swapaxes(2, 3) / 4
    want = np.log(np.exp(scores).sum(-1) + np.exp(sinks)[None, :, None])
    np.testing.assert_allclose(lse, want, rtol=1e-4, atol=1e-4)


def test_random_values_of_dropout_are_unsigned_bytes(client):
    q = random(1, 1, 16, 16)
    for _ in range(2):
        _, randval = client.attention(q, q, q, dropout_p=0.5, seed=3, return_randval=True)
        assert randval.dtype == np.uint8
    assert randval.max() > 127


Q = random(1, 2, 8, 16)
M = random(8, 8)


@pytest.mark.parametrize(
    ("call", "field", "rule"),
    [
        (lambda c: c.attention(Q, Q, Q, seed=3), "seed", "no_effect"),
        (lambda c: c.attention(Q, Q, Q, mask_align="bottom_right"), "mask_align", "no_effect"),
        (lambda c: c.attention(Q, Q, Q, scale_block_q=64), "scale_block_q", "no_effect"),
        (lambda c: c.attention(Q, Q, Q, is_causal=True, mask="bottom_right"), "mask", "mask_conflict"),
        (lambda c: c.gemm(M, M, binary="multiply"), "binary", "no_effect"),
        (lambda c: c.gemm(M, M, beta=2.0), "beta", "no_effect"),
        (lambda c: c.attention(Q, Q, Q, window=(-5, 2)), "window", "window_range"),
        (lambda c: c.attention(Q, Q, Q, attn_mask=np.zeros((3, 5), np.float32)), "attn_mask.shape", ""),
        (lambda c: c.conv_transpose(Q, random(2, 4, 3, 3), padding=9), "padding", "output_size"),
        (lambda c: c.plan_attention(Q, Q, Q, window=(-5, 2)), "window", "window_range"),
    ],
)
def test_refusals_name_the_argument_that_was_given(client, call, field, rule):
    with pytest.raises(tw.InvalidArgumentError) as caught:
        call(client)
    assert caught.value.field == field
    assert caught.value.rule == rule or not rule
    assert "attributes." not in str(caught.value)
    assert "window_left" not in str(caught.value)


def test_odd_heads_have_the_scale_of_their_own_size(client):
    odd = Q[..., :10]
    scores = odd.astype(np.float64) @ odd.swapaxes(2, 3) * 10**-0.5
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(client.attention(odd, odd, Q), weights @ Q, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(client.attention(odd, odd, odd), weights @ odd, rtol=1e-4, atol=1e-4)


def test_the_fix_for_unsigned_bytes_does_not_wrap_them_around(client):
    with pytest.raises(tw.InvalidArgumentError) as caught:
        client.gemm(M.astype(np.uint8), M.astype(np.uint8))
    assert "float32" in caught.value.fix
