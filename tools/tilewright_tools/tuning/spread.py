"""A sweep spread over the machines of a Ray cluster (extra ``ray``): a problem is a task, and rows come together here.

A task has a worker process of its own, as a sweep on one machine has. A node that is lost takes unfinished tasks with
it, which Ray starts again on others; rows of finished ones are here already.
"""

from __future__ import annotations

import importlib
import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tilewright_kit.commands.cases import Case
from tilewright_kit.selection.measured import Auto, Measured
from tilewright_kit.selection.measurements import ShippedMeasurements
from tilewright_kit.types.errors import UnavailableError, UnsupportedError
from tilewright_server.engine.engine import Engine
from tilewright_server.engine.measurements.strategies import measured_strategies
from tilewright_tools.tuning.choices import Choices
from tilewright_tools.tuning.measure.setup import Setup
from tilewright_tools.tuning.oracle import DRAWS, Oracle
from tilewright_tools.tuning.results import Result
from tilewright_tools.tuning.sweep import Sweep, SweepOptions

__all__ = ["Kind", "spread"]

log = logging.getLogger(__name__)

_CONNECT_S = 5.0
_RETRIES = 3
"""How often a problem is begun again whose node was lost."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Work that is done with every problem."""

    oracle: bool = False
    draws: int = DRAWS
    strategies: tuple[str, ...] = ()
    """Names of strategies whose choices are compared."""

    def sweep(self, engine: Engine, setup: Setup, options: SweepOptions) -> Sweep:
        """The sweep on this machine."""
        if self.strategies:
            return Choices(engine, setup, options, {name: engine.strategies[name] for name in self.strategies})
        if not self.oracle:
            return Sweep(engine, setup, options)
        # By what plugins ship: the user's own measurements may be of these very problems. Beside it, the choice without
        # learned models.
        choosers = (
            measured_strategies(engine.plugins, None, None)["auto"],
            Auto(Measured([ShippedMeasurements(engine.plugins.measurements)])),
        )
        return Oracle(engine, setup, options, choosers, draws=self.draws)


def measured(kind: Kind, setup: Setup, options: SweepOptions, case: Case, known: Sequence[Result]) -> list[Result]:
    """All rows of one problem, on the machine that this runs on."""
    engine = setup.engine()
    try:
        sweep = kind.sweep(engine, setup, options)
        try:
            return list(sweep.run([case], {case: known}))
        finally:
            sweep.close()
    finally:
        engine.close()


def _reached(address: str) -> None:
    """Raise ``OSError`` if nobody listens there: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "://" not in host:
        socket.create_connection((host, int(port)), _CONNECT_S).close()


def spread(
    address: str,
    kind: Kind,
    setup: Setup,
    options: SweepOptions,
    cases: Sequence[Case],
    known: Mapping[Case, Sequence[Result]],
) -> Iterator[Result]:
    """Rows as problems end, in any order. A problem that fails on its machine is told in the log and left out: the next
    run with its output resumed tries it again.

    Raises ``UnsupportedError`` without Ray, ``UnavailableError`` if there is no cluster at the address.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise UnsupportedError(
            "Ray is not installed", field="ray", rule="extra", fix="pip install 'tilewright[ray]'"
        ) from None
    try:
        _reached(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise UnavailableError(
            f"there is no Ray cluster at {address}: {error}", field="ray", value=address, rule="ray_cluster",
            fix="start one with `ray start --head`, and name its address",
        ) from error  # fmt: skip
    try:
        gpus = 0 if options.device.startswith("cpu") else 1
        task = ray.remote(measured).options(max_retries=_RETRIES, num_cpus=1, num_gpus=gpus)
        options = replace(options, device="cpu:0" if not gpus else f"{options.device.partition(':')[0]}:0")
        running = {task.remote(kind, setup, options, case, list(known.get(case, ()))): case for case in cases}
        while running:
            (done,), _ = ray.wait(list(running), num_returns=1)
            case = running.pop(done)
            try:
                rows = ray.get(done)
            except Exception as error:
                log.error("%s was not measured: %s", case.label, error)
                continue
            yield from rows
    finally:
        ray.shutdown()
