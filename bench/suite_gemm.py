"""GEMM through the service, with prepared plans, against NumPy and PyTorch in the same run.

Two figures of ours: `kernel` is the time on the device, as peers are measured inside one process; `service` is the
round trip from the client, shared memory both ways. Ratios are ours over the peer's: above 1 we are faster.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import peers
import timing
from suite import Options, Table, main

import tilewright
from tilewright_server.cli.private import PrivateServer


@contextlib.contextmanager
def client_of_new_server(threads: int) -> Iterator[tilewright.Client]:
    with PrivateServer(["--cpu-threads", str(threads)]) as target, tilewright.connect(target) as client:
        yield client


def device_timed(client: tilewright.Client, plan: Any, operands: tuple[Any, ...], out: Any) -> timing.Timed:
    """Seconds on the device, of ``repeat`` executions in one request."""

    def timed(repeat: int) -> float:
        plan(*operands, out=out, repeat=repeat)
        report = client.report
        assert report is not None
        return max(report.timing.device_ns, 1) / 1e9

    return timed


def ours(
    client: tilewright.Client, dtype: str, shape: peers.Shape, packed: bool
) -> tuple[dict[str, timing.Timed], str]:
    """Our two ways to time a product, and the kernel's name."""
    a = client.asarray(peers.random((shape.m, shape.k), dtype, 1))
    b = client.asarray(peers.random((shape.n, shape.k), dtype, 2)).T
    operands = (a, client.pack_b(b, m_hint=shape.m) if packed else b)
    out = client.gemm(*operands)
    plan = client.plan_gemm(*operands, out=out)
    return {
        "kernel": device_timed(client, plan, operands, out),
        "service": timing.wall(plan.bind(*operands, out=out)),
    }, ", ".join(plan.kernels)


def compare(client: tilewright.Client, options: Options, packed: bool) -> Table:
    peer_names = ["torch packed"] if packed else ["numpy", "torch"]
    kind = "B packed beforehand" if packed else "B as it lies"
    table = Table(
        f"GEMM, {kind}, {options.threads} thread{'s' if options.threads > 1 else ''} (GFLOP/s)",
        ["dtype", "M x N x K", "", "kernel", "service", *peer_names, *(f"kernel / {name}" for name in peer_names)],
    )
    ratios: dict[tuple[str, str], list[float]] = {}
    dtypes = ("fp32", "bf16") if packed else peers.DTYPES
    shapes = peers.PACKED_SHAPES if packed else peers.SHAPES
    for dtype in dtypes[:2] if options.quick else dtypes:
        for shape in shapes[:2] if options.quick else shapes:
            try:
                candidates, _ = ours(client, dtype, shape, packed)
            except tilewright.UnsupportedError as error:
                table.notes.append(f"- {dtype} {shape}: {error}")
                continue
            others = peers.peers(dtype, shape, packed=packed)
            candidates |= {name: timing.wall(call) for name, call in others.calls.items()}
            table.notes += [f"- {text}" for text in others.left_out]
            rounds = 3 if options.quick else 9
            measured = timing.alternate(candidates, rounds=rounds)
            rate = {name: shape.flops / item.seconds / 1e9 for name, item in measured.items()}
            row: list[Any] = [dtype, str(shape), shape.note, rate["kernel"], rate["service"]]
            row += [rate.get(name) for name in peer_names]
            for name in peer_names:
                ratio = rate["kernel"] / rate[name] if name in rate else None
                row.append(ratio)
                if ratio is not None:
                    ratios.setdefault((dtype, name), []).append(ratio)
            table.rows.append(row)
    for (dtype, name), values in ratios.items():
        table.notes.append(
            f"- {dtype}: geometric mean {timing.geomean(values):.2f} of {name} over {len(values)} shapes"
        )
    return table


def measure(options: Options) -> list[Table]:
    peers.set_threads(options.threads)
    with client_of_new_server(options.threads) as client:
        tables = [compare(client, options, packed=False)]
        if peers.torch() is not None:
            tables.append(compare(client, options, packed=True))
        else:
            tables[0].notes.append("- PyTorch is not installed: not compared with it")
    return tables


if __name__ == "__main__":
    raise SystemExit(main(measure))
