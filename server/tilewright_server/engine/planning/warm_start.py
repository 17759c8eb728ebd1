"""Warm start: problems of journals and bundles are planned, built and loaded before a server says that it is ready."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilewright_kit.contract.bundle import read_bundle_index
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.requests.record import request_from_dict
from tilewright_kit.types.errors import TilewrightError
from tilewright_server.engine.call import Call
from tilewright_server.engine.execution.prepared import Prepared
from tilewright_server.engine.planning.journal import read_journal
from tilewright_server.engine.types import Selection
from tilewright_server.protocol.signatures import check_signature

__all__ = ["WarmProblem", "bundle_problems", "journal_problems", "warm_start"]

log = logging.getLogger(__name__)

Plan = Callable[[OperationRequest, Selection, Call], Prepared]


@dataclass(frozen=True, slots=True)
class WarmProblem:
    """A problem to be ready for. ``selection.device`` is a device by id, or empty for all of the ``arch``."""

    request: OperationRequest
    selection: Selection
    arch: str


def journal_problems(path: Path) -> list[WarmProblem]:
    """Problems of a journal, those asked for most first. Raises what ``read_journal`` raises."""
    problems, skipped = read_journal(path)
    for item in skipped:
        log.warning("line %d of the journal is skipped: %s", item.line, item.reason)
    return [WarmProblem(item.request, item.selection, item.arch) for item in problems]


def bundle_problems(path: Path, keys: Sequence[Any] = ()) -> list[WarmProblem]:
    """Problems of a bundle. With ``keys`` one of them must have signed it. Raises what ``read_bundle_index`` and
    ``check_signature`` raise, and ``InvalidArgumentError`` for an entry without its request.
    """
    found = []
    if keys and path.exists():
        with path.open("rb") as file:
            check_signature(path, file, keys)
    for entry in read_bundle_index(path).entries:
        strategy, kernel, config = (str(entry.details.get(name, "")) for name in ("strategy", "kernel", "config"))
        request = request_from_dict(entry.details.get("request"))
        found.append(WarmProblem(request, Selection(strategy, kernel, config=config), entry.arch))
    return found


def warm_start(
    plan: Plan,
    devices: Sequence[DeviceInfo],
    problems: Sequence[WarmProblem],
    workers: int,
    wanted: Callable[[], bool],
) -> tuple[int, int]:
    """Plan all problems on the devices that they are for; returns how many plans are ready, and how many are not, which
    the log names. Ends early when it is not ``wanted`` any more.
    """
    work = [item for problem in problems for item in _placed(problem, devices)]
    if not work:
        return 0, len(problems)

    def planned(item: tuple[OperationRequest, Selection]) -> bool:
        if not wanted():
            return False
        try:
            plan(*item, Call())
        except TilewrightError as error:
            log.warning("a problem of %s is not warm: %s", item[0].operation, error)
            return False
        return True

    with ThreadPoolExecutor(max(1, min(workers, len(work))), "tilewright-warm") as pool:
        ready = sum(pool.map(planned, work))
    return ready, len(work) - ready


def _placed(problem: WarmProblem, devices: Sequence[DeviceInfo]) -> Iterator[tuple[OperationRequest, Selection]]:
    """The problem for each device that it is for: as it may be asked for by id, and without."""
    wanted = problem.selection.device
    there = [item for item in devices if item.arch.id == problem.arch and wanted in ("", item.id)]
    if not there:
        log.warning("a problem of %s is skipped: no device %s of %s", problem.request.operation, wanted, problem.arch)
    for item in there:
        yield problem.request, replace(problem.selection, device=item.id)
