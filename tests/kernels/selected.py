"""Parameters of the tests of a run, so that fixtures make nothing that no test wants."""

from __future__ import annotations

from typing import Any

import pytest

__all__ = ["Selected"]


class Selected:
    """Parameters of those tests of a request's module that this run has."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._values: list[Any] = []
        for item in request.session.items:
            call = getattr(item, "callspec", None)
            if item.path == request.path and call is not None:
                self._values += call.params.values()

    def __contains__(self, value: object) -> bool:
        return value in self._values
