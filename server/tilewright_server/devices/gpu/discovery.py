"""Asking a machine for its GPUs, by a process that ends at once."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tilewright_arch import ArchError, ArchSpec
from tilewright_kit.contract.device import DeviceInfo
from tilewright_server.devices.contract import Absence

__all__ = ["Discovery", "Kind", "ask", "sort_out"]

_TIMEOUT_S = 30.0
_LAST_S = 1.0


@dataclass(frozen=True, slots=True)
class Discovery:
    """Result of a search for devices; where nothing was, ``problem`` says why and ``fix`` what to do. ``notes`` are
    of devices that
    differ from their arch's figures, ``left_out`` says why there are others that cannot be used, by id."""

    devices: tuple[DeviceInfo, ...] = ()
    driver: int = 0
    problem: str = ""
    fix: str = ""
    notes: tuple[str, ...] = ()
    left_out: Mapping[str, Absence] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Kind:
    """How a vendor's probe is read: its records are mappings, one for each device."""

    arch_of: Callable[[Mapping[str, Any]], ArchSpec]
    """Raises ``ArchError`` for a device that kernels cannot be made for."""
    differences: Callable[[Mapping[str, Any], ArchSpec], Sequence[str]]
    """Where the device is not what its arch's spec says."""
    info: Callable[[str, str, Mapping[str, Any], ArchSpec], DeviceInfo]
    """From its id, the kind's name, record and arch."""
    other_fix: str
    """Fix for owners of another device."""
    nothing: tuple[str, str]
    """Problem and fix where there is no device of a known arch."""


def sort_out(records: Sequence[Mapping[str, Any]], name: str, driver: int, kind: Kind) -> Discovery:
    """Which of the devices that the driver shows can be used, as ``name:0``, ``name:1``, ..."""
    devices: list[DeviceInfo] = []
    notes: list[str] = []
    left_out: dict[str, Absence] = {}
    for record in records:
        device = f"{name}:{record['ordinal']}"
        try:
            arch = kind.arch_of(record)
        except ArchError as error:
            left_out[device] = Absence(f"{record['name']}: {error}", kind.other_fix)
            continue
        notes += [f"{device}: {text}" for text in kind.differences(record, arch)]
        devices.append(kind.info(device, name, record, arch))
    problem, fix = ("", "") if devices else kind.nothing
    return Discovery(tuple(devices), driver, problem, fix, tuple(notes), left_out)


def ask(vendor: str, command: Sequence[str], parse: Callable[[Any], Discovery], look: str) -> Discovery:
    """Result of ``parse`` for the JSON that ``command`` prints. ``look`` is what an operator may run instead."""
    try:
        return parse(json.loads(_answer(command)))
    except subprocess.TimeoutExpired:
        return Discovery(
            problem=f"the {vendor} driver did not answer within {_TIMEOUT_S:g} s", fix="restart the machine"
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # or it answered something else
        return Discovery(problem=f"asking the {vendor} driver failed", fix=f"run `{look}` and look what it says")


def _answer(argv: Sequence[str]) -> bytes:
    """Output of the process. Raises ``OSError``, ``TimeoutExpired``."""
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            return process.communicate(timeout=_TIMEOUT_S)[0]
        except subprocess.TimeoutExpired:
            process.kill()
            if not _ends(process):
                # In a driver that hangs no signal reaches it: whoever waits for it waits as long as the driver.
                process.returncode = -signal.SIGKILL
            raise


def _ends(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_LAST_S)
    except subprocess.TimeoutExpired:
        return False
    return True
