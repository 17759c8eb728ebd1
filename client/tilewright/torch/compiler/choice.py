"""Choice between Tilewright and PyTorch: by a measurement that is made once, while a model is compiled, and kept in the
user's cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilewright.errors import TilewrightError
from tilewright.session.settings import cache_folder
from tilewright.torch.compiler.problems import Kind
from tilewright.torch.connection import client

__all__ = ["Decision", "decide", "report"]

ROUNDS = 7
ROUND_S = 0.004
"""Length of a round of one side, in seconds, where a call takes less."""
GAIN = 0.97
"""Ours is taken if it needs at most that part of PyTorch's time: less is noise."""


@dataclass(frozen=True)
class Decision:
    """A problem of a compiled model, and the side that does it."""

    problem: str
    device: str
    replaced: bool
    reason: str
    ours_us: float | None = None
    pytorch_us: float | None = None


_lock = threading.Lock()
_decisions: list[Decision] = []


def report() -> list[Decision]:
    """All decisions of the backend in this process, in order: problem by problem, graph by graph."""
    return list(_decisions)


def decide(kind: Kind, values: Sequence[Any], words: Mapping[str, Any], always: bool) -> bool:
    """True if Tilewright is to do a problem, whose operands are like ``values``."""
    first: Any = values[0]
    decision = _decided(kind, values, words, always, _device(first.device))
    with _lock:
        _decisions.append(decision)
    return decision.replaced


def _decided(kind: Kind, values: Sequence[Any], words: Mapping[str, Any], always: bool, device: str) -> Decision:
    problem = _described(kind, values, words)
    if always:
        return Decision(problem, device, True, "always")
    key = json.dumps([problem, device, torch.__version__, client().session.server_version, torch.get_num_threads()])
    with _lock:
        times, reason = _Times.known().get(key), "measured before"
        if times is None:
            try:
                times, reason = _measured(kind, values, words), "measured"
            except (TilewrightError, NotImplementedError, RuntimeError, TypeError) as error:
                return Decision(problem, device, False, f"{type(error).__name__}: {error}")
            _Times.remember(key, times)
    return Decision(problem, device, times[0] <= GAIN * times[1], reason, *times)


def _device(place: Any) -> str:
    if place.type == "cuda":
        return str(torch.cuda.get_device_name(place))
    found = next((item for item in client().session.devices if item.kind == "cpu"), None)
    return "cpu" if found is None else f"{found.name} {found.arch}"


def _described(kind: Kind, values: Sequence[Any], words: Mapping[str, Any]) -> str:
    parts = [
        "-" if value is None else f"{str(value.dtype)[6:]}{list(value.shape)}/{list(value.stride())}"
        for value in values
    ]
    return " ".join([kind.name, *parts, *(f"{name}={value}" for name, value in words.items())])


# ---- measurements ----


def _measured(kind: Kind, values: Any, words: Mapping[str, Any]) -> tuple[float, float]:
    """Microseconds of a call by Tilewright and by PyTorch: the best of rounds that take turns."""
    with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.no_grad():
        given = [None if value is None else _like(value) for value in values]
        calls: list[Any] = [partial(_use, kind, function, given, words) for function in (kind.ours, kind.theirs)]
        settle: Any = torch.cuda.synchronize if values[0].device.type == "cuda" else _nothing
        counts = []
        for call in calls:
            for _ in range(3):
                call()
            counts.append(max(1, int(ROUND_S / max(_seconds(call, 1, settle), 1e-7))))
        best = [float("inf")] * 2
        for _ in range(ROUNDS):
            for side, call in enumerate(calls):
                best[side] = min(best[side], _seconds(call, counts[side], settle))
    return best[0] * 1e6, best[1] * 1e6


def _use(kind: Kind, function: Callable[..., Any], given: Sequence[Any], words: Mapping[str, Any]) -> Any:
    return kind.used(function(*given, **words))


def _nothing() -> None:
    """The host needs no settling."""


def _seconds(call: Callable[[], Any], count: int, settle: Callable[[], Any]) -> float:
    settle()
    begun = time.perf_counter()
    for _ in range(count):
        call()
    settle()
    return (time.perf_counter() - begun) / count


def _like(value: Any) -> Any:
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
    return made.fill_(True) if value.dtype is torch.bool else made.normal_()


class _Times:
    """Measurements that were made before, a line each in a file that processes add to."""

    _kept: dict[str, tuple[float, float]] | None = None

    @classmethod
    def _file(cls) -> Path:
        return cache_folder() / "torch" / "times.jsonl"

    @classmethod
    def known(cls) -> dict[str, tuple[float, float]]:
        """Measurements of the file. Lines that cannot be read are left out, so that they are measured again."""
        if cls._kept is None:
            cls._kept = {}
            try:
                lines = cls._file().read_text("utf-8", "replace").splitlines()
            except OSError:
                lines = []
            for line in lines:
                cls._read(cls._kept, line)
        return cls._kept

    @staticmethod
    def _read(kept: dict[str, tuple[float, float]], line: str) -> None:
        with contextlib.suppress(ValueError, TypeError):
            key, ours, theirs = json.loads(line)
            kept[str(key)] = (float(ours), float(theirs))

    @classmethod
    def remember(cls, key: str, times: tuple[float, float]) -> None:
        """Add a measurement; to this process alone, where the folder cannot be written."""
        cls.known()[key] = times
        line = json.dumps([key, *times]) + "\n"
        try:
            cls._file().parent.mkdir(parents=True, exist_ok=True)
            place = os.open(cls._file(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError:
            return
        try:
            os.write(place, line.encode())
        finally:
            os.close(place)
