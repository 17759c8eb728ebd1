"""Calls against a server in another process."""

import gc
import inspect
import threading

import ml_dtypes
import numpy as np
import pytest
from client_helpers import close, objects, random, used_bytes

import tilewright as tw
from tilewright.operations import call as calls


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("layout", ["rr", "rc", "cr", "cc"])
@pytest.mark.parametrize("size", [8, 200])
@pytest.mark.some(16)
def test_layouts_are_read_off_the_strides(served: tw.Client, shared: bool, layout: str, size: int) -> None:
    a, b = random(size, size + 8), random(size + 8, size)
    x = a if layout[0] == "r" else np.ascontiguousarray(a.T)
    y = b if layout[1] == "r" else np.ascontiguousarray(b.T)
    if shared:
        x, y = served.asarray(x), served.asarray(y)
    close(served.gemm(x if layout[0] == "r" else x.T, y if layout[1] == "r" else y.T), a @ b)
    report = served.report
    assert report is not None
    assert (report.staged_bytes == 0) is shared


def test_large_shared_arrays_are_never_copied(client: tw.Client) -> None:
    a, b, out = client.zeros((2048, 64)), client.zeros((64, 4096)), client.zeros((2048, 4096))
    a[0, 0] = b[0, 0] = 2
    assert client.gemm(a, b, out=out) is out
    assert out[0, 0] == 4
    report = client.report
    assert report is not None
    assert report.bytes_copied == report.staged_bytes == 0


def test_views_of_shared_arrays_go_by_reference(client: tw.Client) -> None:
    base = client.asarray(random(64, 64))
    view = base[8:40:2, 16:48]
    close(client.gemm(view, view.T), np.array(view) @ np.array(view).T)
    assert client.report is not None
    assert client.report.staged_bytes == 0
    close(client.gemm(base[::-1], base), np.array(base[::-1]) @ base)
    assert client.report.staged_bytes == base.nbytes
    odd = base[::2, ::2]  # adjacent in neither direction: no kernel reads that, so it is copied
    close(client.gemm(odd, odd), np.array(odd) @ np.array(odd))


@pytest.mark.parametrize("shape", [(8, 8), (300, 300)])
def test_output_is_written_where_the_caller_said(client: tw.Client, shape: tuple[int, int]) -> None:
    a = random(*shape)
    shared = client.empty((shape[0], 2 * shape[1]))
    shared.fill(5)
    target = shared[:, ::2]
    assert client.gemm(a, a, out=target) is target
    close(target, a @ a, 1e-3)
    assert (shared[:, 1::2] == 5).all()
    private = np.zeros(shape, np.float32)[::-1]
    assert client.gemm(a, a, out=private) is private
    close(private, a @ a, 1e-3)


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "fp8", "bf8", "int8"])
@pytest.mark.some(6)
def test_every_element_type_goes_there_and_back(client: tw.Client, dtype: str) -> None:
    a = client.asarray(np.arange(-8, 8).reshape(4, 4), dtype)
    result = client.gemm(a, a, out_dtype="fp32")
    close(result, np.array(a, np.float32) @ np.array(a, np.float32))
    assert client.zeros((2, 2), dtype).dtype == tw.DTYPES[dtype]
    default = {"fp8": np.float16, "bf8": np.float16, "int8": np.int32, "bf16": ml_dtypes.bfloat16}
    assert client.gemm(a, a).dtype == default.get(dtype, tw.DTYPES[dtype])


@pytest.mark.extended
def test_epilogue_operands_arrive_under_their_names(client: tw.Client) -> None:
    a, b, bias, c = random(6, 5), random(5, 4), random(4), random(6, 4)
    close(client.gemm(a, b, bias=bias, c=c, alpha=0.5), 0.5 * (a @ b) + bias + c)
    close(client.gemm(a, b, d=[c, c], binary="multiply"), (a @ b) * c * c, 1e-3)
    rows = np.arange(1, 7, dtype=np.float32)
    close(client.gemm(a, b, scale_a=rows, scale_b=2.0, activation="relu"), np.maximum(2 * rows[:, None] * (a @ b), 0))


def test_batches_and_groups(client: tw.Client) -> None:
    a, b = random(3, 4, 5), random(5, 6)
    close(client.gemm(a, np.broadcast_to(b, (3, 5, 6))), a @ b)
    pairs = [(random(m, 4), random(4, m + 1)) for m in (1, 7, 30)]
    results = client.grouped_gemm([x for x, _ in pairs], [y for _, y in pairs])
    for (x, y), result in zip(pairs, results, strict=True):
        close(result, x @ y)
    with pytest.raises(tw.InvalidArgumentError, match="groups"):
        client.grouped_gemm([a], [])
    assert client.grouped_gemm([], []) == []
    out = client.empty((5, 5))
    (alone,) = client.grouped_gemm([b], [b.T], out=[out], split_k=1)
    assert alone is out
    close(out, b @ b.T)


def test_groups_take_the_arguments_of_every_call(client: tw.Client) -> None:
    one, many = (inspect.signature(getattr(client, name)).parameters for name in ("gemm", "grouped_gemm"))
    assert one.keys() == many.keys()
    assert all(one[name].annotation == many[name].annotation for name in calls.CHOICE)
    with pytest.raises(TypeError, match=r"grouped_gemm\(\) got an unexpected keyword argument 'kernels'"):
        client.grouped_gemm([random(3, 3)], [random(3, 3)], kernels="x")


def test_empty_problems_are_legal(client: tw.Client) -> None:
    assert client.gemm(client.empty((0, 4)), random(4, 5)).shape == (0, 5)


@pytest.mark.extended
def test_packed_weights_are_kept_by_the_server_until_they_go(client: tw.Client) -> None:
    a, b = random(8, 16), random(16, 4)
    packed = client.pack_b(b, m_hint=8)
    close(client.gemm(a, packed), a @ b)
    plan = client.plan_gemm(a, packed)
    close(plan(a, packed), a @ b)
    assert objects(client)[1] == 1
    del packed
    assert objects(client)[1] == 0


def test_resident_buffers_are_operands(client: tw.Client) -> None:
    a = random(300, 300)
    with client.buffer(a.nbytes) as buffer, client.buffer(a.nbytes) as result:
        buffer.write(a)
        np.testing.assert_array_equal(buffer.read(400).view(np.float32), a.reshape(-1)[:100])
        tensor = buffer.tensor((300, 300), "fp32")
        found = client.run("gemm", {"a": tensor, "b": a}, {"out": result.tensor((300, 300), "fp32")})
        assert isinstance(found["out"], tw.ResidentTensor)
        close(result.read(out=np.empty_like(a)), a @ a, 1e-3)
        with pytest.raises(tw.InvalidArgumentError):
            buffer.read(4, offset=a.nbytes)
    with pytest.raises(tw.InvalidArgumentError, match="freed"):
        tensor.location()
    assert objects(client)[1] == 0


def test_new_operations_need_no_client_code(fake_client: tw.Client) -> None:
    assert fake_client.run("sleep", {}, attributes={"seconds": 0.0})["out"] == np.ones(1)


def test_errors_carry_what_the_server_said(fake_client: tw.Client) -> None:
    with pytest.raises(tw.InvalidArgumentError) as caught:
        fake_client.gemm(random(3, 4), random(5, 6))
    assert (caught.value.field, caught.value.rule) == ("b.shape", "k_mismatch")
    with pytest.raises(tw.NotFoundError):
        fake_client.run("no such operation", {})
    out = {"out": np.zeros(1, np.float32)}
    with pytest.raises(tw.ResourceExhaustedError) as full:
        fake_client.run("fail", {}, out, {"code": "resource_exhausted"})
    assert full.value.retry_after == 0.25
    with pytest.raises(tw.UnavailableError, match="asked to fail"):
        fake_client.run("fail", {}, out, {"code": "unavailable"})
    assert fake_client.gemm(random(2, 2), random(2, 2)).shape == (2, 2)  # and the session lives on


def test_mistakes_are_refused_before_anything_is_sent(client: tw.Client) -> None:
    good = random(4, 4)
    for bad in (good.astype(np.float64), good.astype(">f4"), good.astype(object), "text", None):
        with pytest.raises(tw.InvalidArgumentError) as caught:
            client.gemm(bad, good)
        assert caught.value.fix
    frozen = np.zeros((4, 4), np.float32)
    frozen.flags.writeable = False
    for wrong in ({"out": frozen}, {"out": [1]}, {"build": "later"}, {"timeout": -1}, {"kernel": 3}, {"d": good}):
        with pytest.raises(tw.InvalidArgumentError):
            client.gemm(good, good, **wrong)
    with pytest.raises(tw.InvalidArgumentError):
        client.empty((2, -1))


def test_outputs_that_are_not_there_are_refused(client: tw.Client) -> None:
    operands = {"a": random(2, 2), "b": random(2, 2)}
    plan = client.plan("gemm", operands)
    for outputs in ({"typo": None}, {"out": None, "typo": None}):
        for ask in (lambda: client.run("gemm", operands, outputs), lambda: client.plan("gemm", operands, outputs)):  # noqa: B023
            with pytest.raises(tw.InvalidArgumentError, match="no output 'typo'") as caught:
                ask()
            assert caught.value.fix == "use one of out"
    with pytest.raises(tw.InvalidArgumentError, match="no output 'typo'"):
        plan(**operands, out={"typo": random(2, 2)})
    del plan
    assert objects(client)[2] == 0


def test_numbers_beyond_the_protocol_are_refused(client: tw.Client) -> None:
    a = random(2, 2)
    plan = client.plan_gemm(a, a)
    bound = plan.bind(client.asarray(a), client.asarray(a))
    by_hand = tw.Spec((2**70, 2), a.dtype)
    for ask in (
        lambda: client.plan_gemm(((2**70, 2), "fp32"), a),
        lambda: client.plan_gemm(by_hand, a),
        lambda: client.plan_gemm(((2, 2.5), "fp32"), a),
        lambda: client.empty((2**70,)),
        lambda: client.buffer(2**70),
        lambda: client.kernels.list(limit=2**70),
        lambda: client.gemm(a, a, clamp=("low", None)),
        lambda: client.gemm(a, a, timeout=float("inf")),
        lambda: client.gemm(a, a, timeout=float("nan")),
        lambda: client.gemm(a, a, timeout=1e10),
        lambda: plan(a, a, timeout=float("inf")),
        lambda: plan(a, [[1, 2], [3]]),
        lambda: bound(timeout=-1.0),
        lambda: plan.run_many([(a, a)], timeout=float("inf")),
        lambda: plan.stream(timeout=float("inf")),
        lambda: tw.connect("unix:/none", timeout=float("inf")),
    ):
        with pytest.raises(tw.InvalidArgumentError) as caught:
            ask()
        assert caught.value.field
        assert caught.value.fix


@pytest.mark.parametrize("code", ["deadline_exceeded", "unavailable", "cancelled", "internal"])
def test_memory_of_a_call_that_may_still_run_is_kept_back(fake_client: tw.Client, code: str) -> None:
    pool = fake_client._subject.pool
    out = fake_client.zeros((1,))
    with pytest.raises(tw.TilewrightError) as caught:
        fake_client.run("fail", {}, {"out": out}, {"code": code, "ends_call": True})
    assert caught.value.code == code
    used = used_bytes(pool)
    del out, caught
    gc.collect()
    assert used_bytes(pool) == used > 0


def test_memory_of_a_call_that_was_refused_is_free_at_once(fake_client: tw.Client) -> None:
    out = fake_client.zeros((1,))
    with pytest.raises(tw.InvalidArgumentError):
        fake_client.run("fail", {}, {"out": out}, {"code": "invalid_argument"})
    del out
    gc.collect()
    assert used_bytes(fake_client._subject.pool) == 0


def test_deadline_is_reported_and_its_memory_kept_back(fake_client: tw.Client) -> None:
    out = fake_client.zeros((1,))
    with pytest.raises(tw.DeadlineError) as caught:
        fake_client.run("sleep", {}, {"out": out}, {"seconds": 0.5}, timeout=0.05)
    assert caught.value.field == "timeout"
    assert caught.value.fix
    del caught
    used = used_bytes(fake_client._subject.pool)
    del out
    gc.collect()
    assert used_bytes(fake_client._subject.pool) == used


def test_threads_share_a_client(client: tw.Client) -> None:
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            a = client.zeros((16, 16))
            a[...] = number
            for _ in range(20):
                result = client.gemm(a, a)
                if not (result == 16 * number * number).all():
                    wrong.append(number)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_catalog_calls(fake_client: tw.Client) -> None:
    assert [kernel.name for kernel in fake_client.kernels.list()] == ["k0", "k1", "k2", "k3", "k4"]
    assert [kernel.name for kernel in fake_client.kernels.list(limit=3)] == ["k0", "k1", "k2"]
    assert fake_client.kernels.sets() == ["default"]
    seen: list[str] = []
    results = fake_client.kernels.build(["x", "y"], progress=lambda event: seen.append(event.state))
    assert [(event.name, event.state, event.seconds) for event in results] == [("x", "built", 1.0), ("y", "built", 1.0)]
    assert seen == ["building", "built"] * 2
    assert fake_client.kernels.statistics()["sessions"] >= 1
    assert (
        fake_client.explain("gemm", {"a": ((2, 2), "fp32"), "b": tw.Spec.of((2, 2), "fp32")})["strategy"] == "heuristic"
    )


def test_over_tcp_everything_travels_in_messages(tcp_server) -> None:
    with tw.connect(tcp_server.target) as client:
        assert not client.session.shared_memory
        a = random(700, 700)
        close(client.gemm(a, a), a @ a, 1e-2)  # larger than the inline limit, both ways
        out = client.zeros((700, 700))
        close(client.gemm(a, a, out=out), a @ a, 1e-2)
        small = random(4, 4)
        plan = client.plan_gemm(small, small)
        close(plan(small, small), small @ small)
        with plan.stream() as stream:
            close(stream.submit(small, small).result(), small @ small)
        with pytest.raises(tw.InvalidArgumentError, match="copied"):
            plan.bind(small, small, out=np.zeros((4, 4), np.float32))
