"""Named findings of a conformance test."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

__all__ = ["Check", "CheckFailed", "CheckReport", "Skipped", "Status"]


class Status(str, Enum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """One promise and whether it was kept. ``detail`` is the first broken instances, or why it was skipped."""

    name: str
    status: Status
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.status.value:7} {self.name}" + (f": {self.detail}" if self.detail else "")


class CheckFailed(AssertionError):
    """Raised by ``CheckReport.raise_if_failed``; the message names every failed check."""


class Skipped(Exception):
    """Raised inside a check that cannot be made; its text is the reason."""


@dataclass(slots=True)
class CheckReport:
    """The outcome of all checks, in the order in which they were made."""

    operation: str
    checks: list[Check] = field(default_factory=list)

    SHOWN: ClassVar[int] = 3
    """Broken instances per check that are spelled out."""

    def with_status(self, status: Status) -> list[Check]:
        return [check for check in self.checks if check.status is status]

    @property
    def failed(self) -> list[Check]:
        return self.with_status(Status.FAILED)

    @property
    def passed(self) -> bool:
        """No check failed. Skipped ones are for the reader to judge."""
        return not self.failed

    def __getitem__(self, name: str) -> Check:
        return next(check for check in self.checks if check.name == name)

    def __str__(self) -> str:
        return "\n".join([f"conformance of {self.operation!r}", *map(str, self.checks)])

    def raise_if_failed(self) -> None:
        """Raise ``CheckFailed`` with all failures, if there are any."""
        if self.failed:
            raise CheckFailed("\n".join([f"operation {self.operation!r}:", *map(str, self.failed)]))

    def run(self, name: str, check: Callable[..., Iterable[str]], *args: object) -> bool:
        """Make one check: it yields a sentence per broken instance. An exception is a failure as well."""
        findings: list[str] = []
        try:
            for finding in check(*args):
                findings.append(finding)
                if len(findings) > self.SHOWN:
                    findings[-1] = "..."
                    break
        except Skipped as reason:
            if not findings:
                self.checks.append(Check(name, Status.SKIPPED, str(reason)))
                return True
        except Exception as error:  # the operation's code may raise anything
            where = traceback.extract_tb(error.__traceback__)[-1]
            findings.append(f"raised {type(error).__name__}: {error} (in {where.name}, line {where.lineno})")
        self.checks.append(Check(name, Status.FAILED if findings else Status.PASSED, "; ".join(findings)))
        return not findings
