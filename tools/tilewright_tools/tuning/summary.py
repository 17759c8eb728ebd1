"""A sweep in a table: the best kernel of each problem, against the peak, the model's choice and a peer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewright_kit.commands.cases import Case
from tilewright_tools.tuning.results import FAILED, Result
from tilewright_tools.tuning.sweep import PeerTime

__all__ = ["Line", "summarise"]


@dataclass(frozen=True, slots=True)
class Line:
    """One problem. ``best`` is None if no kernel was right."""

    case: Case
    best: Result | None
    model: Result | None
    """The model's favourite, if it was measured."""
    peer: PeerTime | None
    tried: int
    failed: int
    skipped: int

    @property
    def model_efficiency(self) -> float | None:
        """Time of the best over time of the model's favourite."""
        if self.best is None or self.model is None or not self.model.median_ns:
            return None
        return self.best.median_ns / self.model.median_ns

    @property
    def over_peer(self) -> float | None:
        """Speed of the best over the peer's."""
        if self.best is None or self.peer is None or not self.peer.median_ns:
            return None
        return self.peer.median_ns / self.best.median_ns

    def cells(self) -> tuple[str, ...]:
        """For the table: problem, us, TFLOP/s, GB/s, share of peak, model, peer, kernel, tried, failed."""
        best = self.best
        if best is None:
            return (self.case.label, *[""] * 6, "none was right", str(self.tried), str(self.failed))
        return (
            self.case.label,
            f"{best.median_ns / 1e3:.4g}",
            f"{best.tflops:.4g}",
            f"{best.gbps:.4g}",
            f"{best.share_of_peak:.0%}" if best.ideal_ns else "",
            f"{self.model_efficiency:.0%}" if self.model_efficiency is not None else "",
            f"{self.over_peer:.2f}" if self.over_peer is not None else "",
            best.kernel,
            str(self.tried),
            str(self.failed),
        )

    def to_dict(self) -> dict[str, Any]:
        best = self.best
        return {
            "problem": self.case.to_dict(),
            "kernel": best.kernel if best else None,
            "median_us": best.median_ns / 1e3 if best else None,
            "tflops": best.tflops if best else None,
            "gbps": best.gbps if best else None,
            "share_of_peak": best.share_of_peak if best and best.ideal_ns else None,
            "model_efficiency": self.model_efficiency,
            "peer": None
            if self.peer is None
            else {
                "name": self.peer.name,
                "median_us": self.peer.median_ns / 1e3 or None,
                "ours_over_peer": self.over_peer,
                "note": self.peer.note,
            },
            "tried": self.tried,
            "failed": self.failed,
            "skipped": self.skipped,
        }


def summarise(cases: Sequence[Case], results: Iterable[Result], peers: Mapping[Case, PeerTime]) -> list[Line]:
    """One line for each case, in order. Of several results for one kernel the last counts."""
    found: dict[Case, dict[str, Result]] = {case: {} for case in cases}
    for result in results:
        if result.case in found:
            found[result.case][result.kernel] = result
    return [_line(case, list(found[case].values()), peers.get(case)) for case in cases]


def _line(case: Case, results: Sequence[Result], peer: PeerTime | None) -> Line:
    good = sorted((item for item in results if item.status == "ok"), key=lambda item: (item.median_ns, item.kernel))
    return Line(
        case=case,
        best=good[0] if good else None,
        model=next((item for item in good if item.place == 1), None),
        peer=peer,
        tried=len(results),
        failed=sum(item.status in FAILED for item in results),
        skipped=sum(item.status == "skipped" for item in results),
    )
