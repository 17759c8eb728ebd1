"""`tilewright doctor --deep`: tests of one device through a server: kernels, memory, order and faults.

Operations bring the problems (``ProblemCommand.demonstrated``); of each kind of kernel that a problem can run with one
is run and compared with float64.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tilewright
    from tilewright_kit.commands.problem_command import Example, ProblemCommand
    from tilewright_tools.cli.problems.loading import Loaded

__all__ = ["Outcome", "self_test"]

_SIZE = 64
"""Rows and columns of square problems: small, since an emulated GPU may run them."""
_REPEATS = 8
"""Launches of a plan one behind the other: a plan of several kernels becomes a graph meanwhile."""
_CLIENTS = 3
_WAIT_S = 60.0
_KILLED = """
import sys, numpy as np, tilewright as tw
from tilewright_kit.commands.discovery import installed_commands
from tilewright_tools.cli.problems.loading import load, operands
command = next(item for item in installed_commands().values() if item.demonstrated(64))
loaded = load(command, command.demonstrated(64)[0].case)
with tw.connect(sys.argv[1]) as client:
    inputs = operands(client, loaded)
    while True:
        client.run(loaded.operation.name, inputs, attributes=loaded.request.attributes, device=sys.argv[2])
        print("ran", flush=True)
"""


@dataclass(frozen=True)
class Outcome:
    """One test. ``state``: ok, failed, or skipped."""

    topic: str
    state: str
    detail: str
    seconds: float = 0.0


def self_test(target: str, device: str, limit_s: float) -> Iterator[Outcome]:
    """Tests of a device of the server at ``target``; none is begun after ``limit_s`` seconds. Never raises."""
    import tilewright

    end = time.monotonic() + limit_s
    with tilewright.connect(target) as client:
        for topic, test in (
            ("memory", _memory),
            ("order", _order),
            ("refusals", _refusals),
            ("lost client", _lost_client),
        ):
            if time.monotonic() > end:
                yield Outcome(topic, "skipped", "the time is up")
            else:
                yield _tried(topic, lambda test=test: test(client, device))  # type: ignore[misc]
        yield from _kernels(client, device, end)


def _tried(topic: str, test: Callable[[], str]) -> Outcome:
    """A test's outcome: what it returns, or the error that it raises. An empty text: it does not apply."""
    begun = time.monotonic()
    try:
        detail = test()
        state = "ok" if detail else "skipped"
    except Exception as error:  # one broken part must not hide the others
        state, detail = "failed", f"{type(error).__name__}: {error}"
    return Outcome(topic, state, detail or "does not apply to this device", time.monotonic() - begun)


# ---- kernels ----


def _examples() -> Iterator[tuple[ProblemCommand, Example]]:
    from tilewright_kit.commands.discovery import installed_commands

    for command in installed_commands().values():
        for item in command.demonstrated(_SIZE):
            if not command.prepared(item.case):
                yield command, item


def _kernels(client: tilewright.Client, device: str, end: float) -> Iterator[Outcome]:
    """One kernel of each kind that problems can run with."""
    from tilewright_tools.cli.problems.loading import load

    seen: set[tuple[str, str, str]] = set()
    for command, item in _examples():
        if time.monotonic() > end:
            yield Outcome(f"kernel {item.title}", "skipped", "the time is up")
            continue
        try:
            loaded = load(command, item.case)
            kinds = _kinds(client, loaded, device)
        except Exception as error:
            yield Outcome(f"kernel {item.title}", "failed", f"{type(error).__name__}: {error}")
            continue
        if not kinds:
            yield Outcome(f"kernel {item.title}", "skipped", "no kernel of this device computes it")
        for kind, kernel in kinds.items():
            key = (loaded.operation.name, str(getattr(item.case, "dtype", "")), kind)
            if key in seen:
                continue
            seen.add(key)
            yield _tried(
                f"kernel {item.title}, {kind}",
                lambda loaded=loaded, kernel=kernel: _right(client, loaded, device, kernel),  # type: ignore[misc]
            )


def _kinds(client: tilewright.Client, loaded: Loaded, device: str) -> dict[str, str]:
    """The model's favourite of each pipeline, by the pipeline's name."""
    from tilewright_tools.cli.problems.loading import specs

    found = client.explain(
        loaded.operation.name, specs(loaded.request), attributes=loaded.request.attributes, device=device
    )
    kinds: dict[str, str] = {}
    for item in found["candidates"]:
        kinds.setdefault(str(item["config"].get("pipeline", "plain")), item["kernel"])
    return kinds


def _right(client: tilewright.Client, loaded: Loaded, device: str, kernel: str) -> str:
    """Run a kernel several times behind one another, and compare what the last run wrote. Raises ``ValueError``."""
    from tilewright_tools.cli.problems.checks import check_outputs
    from tilewright_tools.cli.problems.loading import operands
    from tilewright_tools.cli.problems.running import poison

    inputs = operands(client, loaded)
    given: dict[str, Any] = dict(inputs)
    operation, attributes = loaded.operation.name, loaded.request.attributes
    outputs = client.run(operation, inputs, attributes=attributes, device=device, kernel=kernel)
    report = client.report
    kernels = len(report.kernels) if report is not None else 0
    plan = client.plan(operation, inputs, outputs, attributes, device=device, kernel=kernel)
    for _ in range(_REPEATS if kernels > 1 else 1):
        for out in outputs.values():
            poison(out)  # only what the plan writes can pass the check
        plan(**given, out=outputs)
    found = check_outputs(loaded, inputs, outputs)
    if not found.ok:
        raise ValueError(f"{kernel}: relative error {found.error:.1e}, allowed {found.tolerance:.1e}")
    again = f", {kernels} kernels launched {_REPEATS} times" if kernels > 1 else ""
    return f"{kernel}: relative error {found.error:.1e}, allowed {found.tolerance:.1e}{again}"


# ---- memory, order, faults ----


def _first(client: tilewright.Client, device: str) -> Loaded:
    """The first problem that the device computes. Raises ``ValueError``."""
    from tilewright_tools.cli.problems.loading import load

    for command, item in _examples():
        loaded = load(command, item.case)
        if _kinds(client, loaded, device):
            return loaded
    raise ValueError("the device computes none of the problems that the operations show")


def _memory(client: tilewright.Client, device: str) -> str:
    """Memory of the device that the server lends to this process: written here, read here, and read by a kernel."""
    import numpy as np

    from tilewright_tools.cli.problems.checks import check_outputs
    from tilewright_tools.cli.problems.loading import operands

    if device.startswith("cpu"):
        return ""
    loaded = _first(client, device)
    inputs = operands(client, loaded, 3)
    lent: dict[str, Any] = {}
    for name, array in inputs.items():
        lent[name] = client.device_empty(array.shape, array.dtype, device=device)
        lent[name].copy_from(array)
        back = lent[name].numpy()
        if back.tobytes() != np.ascontiguousarray(array).tobytes():
            raise ValueError(f"the operand {name} came back changed")
    outputs = client.run(loaded.operation.name, lent, attributes=loaded.request.attributes, device=device)
    got = {name: out.numpy() if hasattr(out, "numpy") else out for name, out in outputs.items()}
    if not check_outputs(loaded, inputs, got).ok:
        raise ValueError("a kernel that read lent memory computed something else")
    return "memory of the server was mapped here, and holds for both sides what either wrote"


def _order(client: tilewright.Client, device: str) -> str:
    """Several clients at a time, each with launches one behind the other into the same output: the last one counts."""
    import tilewright
    from tilewright_tools.cli.problems.checks import check_outputs
    from tilewright_tools.cli.problems.loading import operands

    loaded = _first(client, device)
    operation, attributes = loaded.operation.name, loaded.request.attributes
    wrong: list[str] = []

    def one(number: int) -> None:
        try:
            with tilewright.connect(client.target) as own:
                sets: list[dict[str, Any]] = [operands(own, loaded, 10 * number + turn) for turn in range(2)]
                outputs = own.run(operation, sets[0], attributes=attributes, device=device)
                plan = own.plan(operation, sets[0], outputs, attributes, device=device)
                for turn in range(2 * _REPEATS + number % 2):
                    plan(**sets[turn % 2], out=outputs)
                last = sets[(2 * _REPEATS + number % 2 - 1) % 2]
                if not check_outputs(loaded, last, outputs).ok:
                    wrong.append(f"client {number} has not the result of its last launch")
        except Exception as error:  # of a thread: told below
            wrong.append(f"client {number}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(_CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_WAIT_S)
    if any(thread.is_alive() for thread in threads):
        wrong.append(f"a client had no answer within {_WAIT_S:.0f} s")
    if wrong:
        raise ValueError("; ".join(wrong))
    return f"{_CLIENTS} clients, {2 * _REPEATS} launches each: every output is that of the last launch"


def _refusals(client: tilewright.Client, device: str) -> str:
    """A request that cannot be meant is refused, and the next one is served."""
    from tilewright import TilewrightError
    from tilewright_tools.cli.problems.loading import operands

    loaded = _first(client, device)
    inputs = operands(client, loaded)
    try:
        client.run(loaded.operation.name, inputs, attributes=loaded.request.attributes, device=f"{device}000")
    except TilewrightError as error:
        refused = error.rule
    else:
        raise ValueError("a device that does not exist ran a kernel")
    client.run(loaded.operation.name, inputs, attributes=loaded.request.attributes, device=device)
    return f"refused by the rule {refused}; the next request was served"


def _lost_client(client: tilewright.Client, device: str) -> str:
    """A client is killed among its launches; the device serves others as before."""
    from tilewright_tools.cli.problems.checks import check_outputs
    from tilewright_tools.cli.problems.loading import operands

    loaded = _first(client, device)
    argv = [sys.executable, "-c", _KILLED, client.target, device]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        ran = process.stdout.readline().strip()  # ends with the process, too
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_WAIT_S)
    if ran != b"ran":
        raise ValueError("the client that was to be killed could not launch")
    inputs = operands(client, loaded, 5)
    outputs = client.run(loaded.operation.name, inputs, attributes=loaded.request.attributes, device=device)
    if not check_outputs(loaded, inputs, outputs).ok:
        raise ValueError("the result after a client was killed is off")
    return "a client was killed among its launches, and the next one's result is right"
