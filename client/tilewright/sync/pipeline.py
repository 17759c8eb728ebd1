"""Many launches on one stream, for the blocking client."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from tilewright.dispatch.plans.pipeline import PipelineState
from tilewright.errors import InvalidArgumentError, TilewrightError
from tilewright.sync.connection import FlowRunner
from tilewright.sync.plan import Bound

__all__ = ["Pipeline"]


class Pipeline:
    """Many launches on one stream, in order, sent in few packets. A context manager; leaving it joins. For one thread.

    Launches see what was on the stream before the first of them, and what earlier ones wrote. Nothing is waited for
    before ``join``; the arrays of what was launched are kept until then.
    """

    def __init__(self, client: FlowRunner, stream: Any) -> None:
        self._client = client
        self._state = PipelineState(client._subject, stream)

    def launch(self, bound: Bound) -> None:
        """Launch a bound plan. Whether that went well is known at ``join``."""
        state, pipeline = bound._state, self._state
        if state.is_here():
            pipeline.add_here(state)
            return
        if not pipeline.ready(state) and self._client._drive(state.settled) is None:
            raise no_pipeline()
        if pipeline.add(state):
            pipeline.flush()

    def order(self) -> None:
        """Later launches wait for what is on the stream now: call it when the stream got new work for their inputs."""
        self._state.order()

    def flush(self) -> None:
        """Send what was launched, without waiting for it. Happens by itself when more is launched, and at ``join``."""
        self._state.flush()

    def join(self) -> None:
        """Make the stream wait for everything that was launched (on a CPU: wait for it). Raises the first error of a
        launch; ``failures`` has all of them. The pipeline can be used again.
        """
        self.failures = self._state.join()
        if self.failures:
            raise self.failures[0][1]

    failures: list[tuple[int, TilewrightError]] = []  # noqa: RUF012 - replaced, never changed
    """(number of the launch, error) of the last ``join``. The stream waits for all others, unless the connection or the
    device was lost."""

    @property
    def launches(self) -> int:
        """How many there were."""
        return self._state.launches

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.join()
        else:
            self.failures = self._state.join()


def no_pipeline() -> InvalidArgumentError:
    return InvalidArgumentError(
        "the bound plan cannot be launched over a local socket",
        field="bound",
        rule="pipeline_local",
        fix="connect to a server of this machine over its Unix socket, with all operands in memory that its device uses"
        " in place; or call the bound plan itself",
    )
