"""Launch plans: prepared plans for callers that launch them in their own processes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.launch_plan import Entry, launch_plan
from tilewright_kit.contract.plan import ExecutionPlan
from tilewright_kit.types.errors import AccessError, InternalError, NotFoundError, UnsupportedError
from tilewright_server.devices.contract import shares_host_memory
from tilewright_server.engine.execution.prepared import Prepared
from tilewright_server.engine.execution.value_check import ValueCheck

__all__ = ["CallerPlan", "CodeObject", "caller_plan", "check_values", "code_object"]


class CodeObject:
    """A compiled file in the artifact cache, by its hash. It stays there while its plan is prepared."""

    __slots__ = ("_binary", "nbytes", "sha256")

    def __init__(self, sha256: bytes, nbytes: int, binary: Path) -> None:
        self.sha256 = sha256
        self.nbytes = nbytes
        self._binary = binary

    def read(self, offset: int = 0, count: int = -1) -> bytes:
        """Bytes of it. Raises ``InternalError`` if the file has gone, which the device's loss can cause."""
        try:
            with self._binary.open("rb") as file:
                file.seek(offset)
                return file.read(count)
        except OSError as error:
            raise InternalError(
                "the kernel is not in the cache any more",
                rule="cache_vanished",
                fix="make the plan again",
            ) from error


class CallerPlan:
    """The bytes that libtilewright opens, and the code objects that they name."""

    __slots__ = ("_objects", "data")

    def __init__(self, data: bytes, objects: Iterable[CodeObject]) -> None:
        self.data = data
        self._objects = {item.sha256: item for item in objects}

    @property
    def objects(self) -> tuple[CodeObject, ...]:
        return tuple(self._objects.values())

    def find(self, sha256: bytes) -> CodeObject | None:
        return self._objects.get(sha256)


def code_object(plan: CallerPlan | None, sha256: bytes) -> CodeObject:
    """A code object of a plan that a session was given, if it was. Raises ``NotFoundError``."""
    found = plan.find(sha256) if plan is not None else None
    if found is None:
        raise NotFoundError(
            "no launch plan that this session was given under that id names such a code object",
            field="sha256",
            value=sha256.hex(),
            rule="code_object",
            fix="ask for objects of the reply to Plan with PLACEMENT_CALLER",
        )
    return found


def caller_plan(prepared: Prepared, *, allowed: bool) -> CallerPlan:
    """The launch plan of a prepared plan, made once. ``allowed`` is the operator's word.

    Raises ``AccessError`` (rule ``caller_launch_forbidden``) where the operator's settings forbid it, and
    ``UnsupportedError`` (rule ``caller_launch_values``) for operations whose operands are looked into before every
    launch.
    """
    _check(prepared, allowed)
    known = prepared.caller_plan
    if not isinstance(known, CallerPlan):
        known = prepared.caller_plan = _made(prepared)
    return known


def _check(prepared: Prepared, allowed: bool) -> None:
    isolated = bool(prepared.device.attributes.get("isolated")) and prepared.device.kind == "cpu"
    if not allowed or isolated:
        why = "kernels of the CPU are kept in a process of their own" if isolated else "the operator does not allow it"
        raise AccessError(
            f"plans of this server are not launched by callers: {why}",
            field="placement",
            value="caller",
            rule="caller_launch_forbidden",
            fix='launch it in the server: launch="server" or "auto"',
        )
    check_values(prepared.values, prepared.plan, prepared.device)


def check_values(values: ValueCheck | None, plan: ExecutionPlan, device: DeviceInfo) -> None:
    """Raise ``UnsupportedError`` (rule ``caller_launch_values``) where operands are looked into before every launch."""
    if values is not None and shares_host_memory(device):
        names = ", ".join(values.names)
        raise UnsupportedError(
            f"{plan.operation} is launched by the server, which looks into {names} before every launch",
            field="placement",
            value="caller",
            rule="caller_launch_values",
            fix='launch it in the server: launch="server" or "auto"',
        )


def _made(prepared: Prepared) -> CallerPlan:
    objects: list[CodeObject] = []
    entries: list[Entry] = []
    uses = dict(zip(prepared.plan.kernels, prepared.uses, strict=False))
    for stage in prepared.plan.stages:
        use = uses[stage.config]
        artifact = use.module.artifact
        sha256, nbytes = bytes.fromhex(artifact.meta.binary_sha256), artifact.meta.binary_bytes
        entries.append(Entry(sha256, nbytes, use.unit.symbol(stage.role)))
        objects.append(CodeObject(sha256, nbytes, artifact.binary))
    return CallerPlan(launch_plan(prepared.plan, prepared.device, entries), objects)
