"""Stages on the CPU: one foreign call runs all of them."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright_kit.types.errors import DeviceError
from tilewright_server.devices.argument_layout import Block, BlockLayout
from tilewright_server.devices.contract import ProgramStage
from tilewright_server.devices.cpu.runtime import STAGE_BYTES, Pool, StageRecord

__all__ = ["CpuProgram", "launch_refused"]

_WORDS = STAGE_BYTES // 8
_TIME = StageRecord.nanoseconds.offset // 8


class _Layout(BlockLayout):
    """Argument blocks with the runtime's stage records before them."""

    def __init__(self, stages: Sequence[ProgramStage], operands: Sequence[str], counter_bytes: int) -> None:
        super().__init__(stages, operands, len(stages) * STAGE_BYTES, counter_bytes)
        self._functions = [(stage.function, stage.geometry.team) for stage in stages]

    def prepare(self, block: Block) -> None:
        for place, ((function, team), offset) in enumerate(zip(self._functions, self.offsets, strict=True)):
            record = StageRecord.from_address(block.address + place * STAGE_BYTES)
            record.function, record.args, record.team = function, block.address + offset, team


class CpuProgram:
    """See ``Program``. The weight is the largest team of all stages."""

    __slots__ = ("_count", "_layout", "_pool", "_run", "weight")

    def __init__(
        self, pool: Pool, stages: Sequence[ProgramStage], operands: Sequence[str], counter_bytes: int = 0
    ) -> None:
        self.weight = max((stage.geometry.team for stage in stages), default=1)
        self._layout = _Layout(stages, operands, counter_bytes)
        self._count = len(stages)
        self._pool = pool
        self._run = pool.runtime.run

    def run(self, addresses: Sequence[int], workspace: int, repeat: int = 1) -> tuple[int, ...]:
        layout = self._layout
        block = layout.take(addresses, workspace)
        words, count = block.words, self._count
        status = self._run(self._pool.handle, block.address, count)
        if count == 1 and repeat <= 1:
            times: tuple[int, ...] = (words[_TIME],)
        else:
            times = tuple(words[_TIME : count * _WORDS : _WORDS].tolist())
            for _ in range(repeat - 1):
                status = status or self._run(self._pool.handle, block.address, count)
                again = words[_TIME : count * _WORDS : _WORDS].tolist()
                times = tuple(map(int.__add__, times, again))
        layout.give_back(block)
        if status:
            raise launch_refused(status)
        return times


def launch_refused(status: int) -> DeviceError:
    """For what the runtime answers instead of running."""
    return DeviceError(
        "the CPU device refused a launch",
        field="status",
        value=status,
        rule="cpu_launch",
        fix="report it as a fault of the operation's plugin, with the request",
    )
