"""The thread that confirms choices: builds the likeliest kernels of busy problems, times them, records the times."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.contract.operation import Operation
from tilewright_kit.contract.problem import Problem
from tilewright_kit.selection.measurements import Measurement, point_of
from tilewright_kit.selection.strategies import Selector
from tilewright_kit.types.errors import BuildFailedError, ConfigInvalidError, TilewrightError
from tilewright_server.clients.client import Client, Priority
from tilewright_server.engine.call import Call, Cancellation
from tilewright_server.engine.engine import Engine, Prepared
from tilewright_server.engine.lru import Lru
from tilewright_server.engine.measurements.database import Filter, PerfDatabase
from tilewright_server.engine.types import Selection
from tilewright_server.hosting.confirmation.budget import Budget
from tilewright_server.hosting.confirmation.contest import Contest, Times
from tilewright_server.hosting.confirmation.hot_problems import HotProblem, HotProblems
from tilewright_server.hosting.confirmation.trials import Trial, traffic_of

__all__ = ["Confirmation"]

log = logging.getLogger(__name__)

RIVALS = 4
"""Kernels that are compared, the chosen one among them."""
LEAST = 3
"""So many have to be measured for measurements to decide."""
MARGIN = 0.95
"""A kernel takes the chosen one's place if it takes no more than this part of its time: less is noise."""
INTERVAL_S = 5.0
_LEAST_SHARE = 0.005
"""Part of the time for which a problem's kernels have to run to be worth it."""
_ATTEMPTS = 3
_CLIENT = Client("server", "confirmation", b"", Priority.BACKGROUND)


class Confirmation:
    """Confirms one problem after the other, in a thread of its own. ``problems`` is to hear of all that are asked for;
    ``changed`` is called in the thread after every look, since measurements may have been recorded."""

    def __init__(
        self,
        engine: Engine,
        database: PerfDatabase,
        budget: Budget,
        changed: Callable[[], object],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.problems = HotProblems()
        self.confirmed = 0
        """Problems whose kernels were timed."""
        self.demoted = 0
        """Kernels that were taken, and were slower than their predecessors in traffic."""
        self._trials: list[Trial] = []
        self._engine, self._database, self._budget = engine, database, budget
        self._changed = changed
        self._interval_s = interval_s
        self._attempts: Lru[tuple[object, ...], int] = Lru(4096)
        self._cancellation = Cancellation()
        self._thread = threading.Thread(target=self._run, name="confirmation", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Return when the thread has ended, after one more launch at most."""
        self._budget.end()
        self._cancellation.cancel()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while self._budget.pause(self._interval_s):
            for problem in self.problems.hottest(self._interval_s, _LEAST_SHARE):
                try:
                    if self.confirm(problem):
                        break  # what is busy now may be something else
                except TilewrightError as error:
                    log.info("kernels of a busy problem were not compared: %s", error)
                except Exception:
                    log.exception("comparing kernels failed")
            try:
                self.judge()
            except TilewrightError as error:
                log.warning("kernels that were slower than before could not be demoted: %s", error)
            self._changed()

    def judge(self) -> None:
        """End the trials that traffic has decided: a kernel that turned out slower than its predecessor loses its place
        for good, with all that was measured for it.
        """
        for trial in list(self._trials):
            verdict = trial.verdict()
            if verdict is None:
                continue
            if verdict.slower and self.problems.is_alone(trial.problem):
                self._database.withdraw(trial.rows)
                self._attempts.put(trial.key, _ATTEMPTS)
                self.demoted += 1
                log.warning(
                    "demoted %s: in traffic it takes %.1f us a launch, the kernel before it %.1f us",
                    min(trial.rows, key=lambda row: row.median_ns).kernel, verdict.mean_ns / 1e3, trial.mean_ns / 1e3,
                )  # fmt: skip
            self._trials.remove(trial)

    def confirm(self, hot: HotProblem) -> bool:
        """Time the likeliest kernels of a problem and record the times. False if there is nothing to do.

        Raises what planning, building and running raise.
        """
        engine = self._engine
        operation = engine.catalogs.operation(hot.request.operation)
        problem = operation.parse(hot.request)
        device = engine.devices.get(hot.device)
        key = (hot.device, operation.name, problem.signature)
        attempts = self._attempts.get(key) or 0
        if attempts >= _ATTEMPTS or self._is_measured(operation, problem, device.info.name, device.info.arch.id):
            return False
        self._attempts.put(key, attempts + 1)
        counters, traffic = hot.counters, traffic_of(hot.counters)
        call = Call(cancellation=self._cancellation, client=_CLIENT)
        strategy = engine.catalogs.strategy(hot.selection)
        ranked = Selector(strategy).rank(operation, problem, device.info)
        configs = [item.config for item in ranked[:RIVALS]]
        rivals = [(config, prepared) for config in configs if (prepared := self._prepared(hot, config, call))]
        if len(rivals) < LEAST:
            return False
        with Contest(engine, device, problem, self._budget, call) as contest:
            plans = [item for _, item in rivals]
            right = contest.agree(plans)
            for (config, _), is_right in zip(rivals, right, strict=True):
                if not is_right:
                    log.error("%s and %s give different results; neither is preferred", config.name, configs[0].name)
            if not all(right):
                self._attempts.put(key, _ATTEMPTS)
                return False
            times = contest.times(plans)
            if not times:
                return False
            rows = [
                self._row(operation, problem, hot.device, config, found, contest.sets)
                for (config, _), found in zip(rivals, times, strict=True)
            ]
        self.confirmed += 1
        fastest = min(rows, key=lambda row: row.median_ns)
        if fastest.median_ns <= MARGIN * rows[0].median_ns:
            self._database.record(rows)
            if traffic.mean_ns:
                self._trials.append(Trial(key, hot, rows, counters, traffic.mean_ns))
        else:
            self._attempts.put(key, _ATTEMPTS)
        log.info(
            "compared %d kernels of %s %s: %s takes %.1f us, the chosen one %.1f us",
            len(rows), operation.name, point_of(problem).text, fastest.kernel, fastest.median_ns / 1e3,
            rows[0].median_ns / 1e3,
        )  # fmt: skip
        return True

    def _prepared(self, hot: HotProblem, config: KernelConfig, call: Call) -> Prepared | None:
        """The plan with that kernel; None if it does not build, or may not be built now."""
        engine = self._engine
        arch = engine.devices.info(hot.device).arch
        unit = engine.operations[config.operation].generate(config, arch)
        held = engine.cache.get(engine.pool.key(unit, arch))
        if held is not None:
            held.release()
        elif not self._budget.may_build():
            return None
        selection = Selection(config=json.dumps(config.to_dict()), device=hot.device)
        try:
            return engine.plan(hot.request, selection, call)
        except (BuildFailedError, ConfigInvalidError) as error:
            log.info("a kernel that might be faster is left out: %s", error)
            return None

    def _is_measured(self, operation: Operation[Any, Any], problem: Problem, device: str, arch: str) -> bool:
        point = point_of(problem)
        rows = self._database.select(Filter(operation=operation.name, arch=arch))
        return len({row.kernel for row in rows if row.point == point and row.device == device}) >= LEAST

    def _row(
        self,
        operation: Operation[Any, Any],
        problem: Problem,
        device: str,
        config: KernelConfig,
        found: Times,
        sets: int,
    ) -> Measurement:
        info, point = self._engine.devices.info(device), point_of(problem)
        return Measurement(
            operation.name,
            point.signature,
            dict(point.sizes),
            info.arch.id,
            info.name,
            config.to_dict(),
            found.median_ns,
            found.p10_ns,
            found.p90_ns,
            found.samples,
            config.name,
            str(config.key(info.arch.id)),
            problem.flops,
            problem.bytes_moved,
            plugin_version=operation.version,
            date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            conditions={"init": "normal", "rotating": sets, "flush": False, "timer": "device", "beside": "live work"},
        )
