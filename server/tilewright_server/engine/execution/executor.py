"""Execution of prepared plans on one device, in the threads of their callers.

The caller's own thread runs its launches as soon as it is admitted: handing them to another thread would cost more than
a small kernel takes. Admission is by weight: the teams of all executions that run at the same time never have more
threads than the device has cores. Clients that wait take turns by what they have used; who runs for long (many
executions, or many repeats) makes way for those who wait every few milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright_kit.contract.device import Device
from tilewright_kit.types.errors import CancelledError, DeadlineError, TilewrightError
from tilewright_server.engine.call import Call
from tilewright_server.engine.execution.admission import Admission
from tilewright_server.engine.execution.prepared import Execution, Prepared
from tilewright_server.engine.execution.turn import Slices, Turn
from tilewright_server.engine.execution.workspace_arena import Arena
from tilewright_server.engine.statistics import Statistics
from tilewright_server.engine.types import Outcome

__all__ = ["Executor"]


class Executor(Admission):
    """Runs prepared plans on one device. Thread-safe."""

    def __init__(self, device: Device, lanes: int, arena: Arena, statistics: Statistics, queue_limit: int) -> None:
        """``lanes`` is the sum of the weights that may run at a time."""
        super().__init__(device.info.id, lanes, queue_limit)
        self.device = device
        self._arena = arena
        self._statistics = statistics

    @property
    def workspace_bytes(self) -> int:
        return self._arena.reserved_bytes

    def claim_workspace(self, nbytes: int) -> None:
        """See ``Arena.claim``: for launches that the device serves by itself."""
        self._arena.claim(nbytes)

    def disclaim_workspace(self, nbytes: int) -> None:
        self._arena.disclaim(nbytes)

    def run(self, prepared: Prepared, addresses: Sequence[int], call: Call, repeat: int = 1) -> Outcome:
        """See ``Engine.execute``."""
        prepared.check(addresses)
        prepared.check_values(addresses)
        call.check()
        weight = min(prepared.weight, self.lanes)
        if repeat > 1:
            turn = Turn(self, weight, call)
            try:
                return self._repeat(prepared, addresses, repeat, call, turn)
            finally:
                turn.end()
        waiter = self.enter(weight, call)
        spent_ns = 0
        try:
            outcome = self._launch(prepared, addresses, call, 0 if waiter is None else waiter.queue_ns)
            spent_ns = outcome.device_ns
            return outcome
        finally:
            self.leave(weight, call, spent_ns, waiter)

    def run_many(self, executions: Sequence[Execution], call: Call) -> list[Outcome | TilewrightError]:
        """See ``Engine.execute_many``: one admission for all, given up now and then if others wait; the deadline looked
        at before each.
        """
        call.check()
        weight = min(max((prepared.weight for prepared, _, _ in executions), default=1), self.lanes)
        turn = Turn(self, weight, call)
        try:
            return [self._tried(execution, call, turn) for execution in executions]
        finally:
            turn.end()

    def _tried(self, execution: Execution, call: Call, turn: Turn) -> Outcome | TilewrightError:
        prepared, addresses, repeat = execution
        try:
            call.check()
            prepared.check(addresses)
            prepared.check_values(addresses)
            if self.queue_depth:
                turn.yield_to_waiters()
            if repeat > 1:
                return self._repeat(prepared, addresses, repeat, call, turn)
            # All of them waited together: the first says how long.
            return self._launch(prepared, addresses, call, turn.take_queue_ns() if turn.queue_ns else 0)
        except TilewrightError as error:
            return error

    def _repeat(self, prepared: Prepared, addresses: Sequence[int], repeat: int, call: Call, turn: Turn) -> Outcome:
        """Run in slices; between them others get their turn, and a caller who is late or gone stops it."""
        slices = Slices(repeat)
        times: tuple[int, ...] = (0,) * len(prepared.kernel_counters)
        try:
            while count := slices.begin():
                times = tuple(map(int.__add__, times, self._on_device(prepared, addresses, count)))
                slices.end()
                if slices.done < repeat:
                    call.check()
                    turn.yield_to_waiters()
        except (DeadlineError, CancelledError) as error:
            self._note(prepared, call, times, slices.done, turn.take_queue_ns(), complete=False)
            raise _given_up(error, slices) from error
        return self._note(prepared, call, times, repeat, turn.take_queue_ns())

    def forget(self) -> None:
        """The device was lost: its memory is not there any more."""
        self._arena.forget()

    def close(self) -> None:
        self._arena.close()

    def _launch(self, prepared: Prepared, addresses: Sequence[int], call: Call, queue_ns: int) -> Outcome:
        return self._note(prepared, call, self._on_device(prepared, addresses, 1), 1, queue_ns)

    def _on_device(self, prepared: Prepared, addresses: Sequence[int], repeat: int) -> tuple[int, ...]:
        program = prepared.program
        if program is None:
            return ()
        arena = self._arena
        workspace = arena.take(prepared.workspace_bytes)
        try:
            return program.run(addresses, workspace.address, repeat)
        finally:
            arena.give_back(workspace)

    def _note(
        self,
        prepared: Prepared,
        call: Call,
        times: tuple[int, ...],
        repeat: int,
        queue_ns: int,
        *,
        complete: bool = True,
    ) -> Outcome:
        operation, kernels, priority = prepared.operation_counters, prepared.kernel_counters, call.client.priority
        self._statistics.executed(operation, kernels, times, repeat, queue_ns, priority, complete=complete)
        device_ns = sum(times)
        # Only a hint for those who are turned away, so a lost update does not matter.
        self.mean_ns += 0.05 * (device_ns - self.mean_ns)
        return Outcome(device_ns, queue_ns, times)


def _given_up(error: DeadlineError | CancelledError, slices: Slices) -> DeadlineError | CancelledError:
    """``error``, for work that was under way."""
    done = f"{slices.done} of {slices.total} repeats were done"
    if isinstance(error, CancelledError):
        return CancelledError(
            f"the request was cancelled; {done}", field="repeat", value=slices.done, rule=error.rule, fix=error.fix
        )
    return DeadlineError(
        f"the deadline passed; {done}",
        field="repeat",
        value=slices.done,
        rule="deadline",
        fix="allow more time, or repeat it less often",
    )
