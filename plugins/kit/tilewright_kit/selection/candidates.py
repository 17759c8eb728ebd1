"""Choice among kernels that could compute a problem: cached verdicts of the rules, and a shortlist by prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from tilewright_arch import Caches
from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.rules import RuleBook
from tilewright_kit.contract.device import DeviceInfo
from tilewright_kit.contract.operation import Candidates, Prediction, predictions_of
from tilewright_kit.contract.problem import Problem
from tilewright_kit.tiles.choices import cpu_teams

__all__ = ["Verdicts", "fastest", "shortlist", "teams_for"]

C = TypeVar("C", bound=KernelConfig)

_ALONE_FLOPS, _ALONE_BYTES = 2 * 96**3, 1 << 18
"""Below both, a team saves a microsecond or two at best, and waking it takes the processor from the server."""


class Verdicts(Generic[C]):
    """Cached verdicts of the rules: problems of other sizes have the same candidates, and rules take longer than a plan
    may.
    """

    MOST = 8192
    """Verdicts that are kept; one more, and all are forgotten."""

    def __init__(self, rules: RuleBook[C]) -> None:
        self._rules = rules
        self._known: dict[tuple[C, str, int, Caches], bool] = {}

    def allows(self, config: C, device: DeviceInfo) -> bool:
        """True if ``config`` is valid on the device's arch."""
        arch = device.arch
        # These limits of an arch alone differ from device to device.
        key = (config, arch.id, arch.lds_bytes, arch.caches)
        verdict = self._known.get(key)
        if verdict is None:
            if len(self._known) >= self.MOST:
                self._known.clear()
            verdict = self._known[key] = self._rules.allows(config, arch)
        return verdict


def shortlist(configs: Sequence[C], most: int, predict: Callable[[C], Prediction]) -> Candidates[C]:
    """At most ``most`` configurations, in their order: those of the least predicted time, and the last, which is the
    most general and stays whatever the model predicts.
    """
    if len(configs) <= most:
        return Candidates(configs)
    predictions = [*map(predict, configs[:-1]), None]
    fastest = sorted(range(len(configs) - 1), key=[item.seconds for item in predictions if item].__getitem__)
    kept = [*sorted(fastest[: most - 1]), len(configs) - 1]
    return Candidates((configs[place] for place in kept), (predictions[place] for place in kept))


def fastest(candidates: Sequence[C], predict: Callable[[C], Prediction]) -> C:
    """The candidate of the least predicted time, of equal ones the first by name; ``predict`` is asked where a
    prediction did not come with it. Raises ``ValueError`` if there are none."""
    known = predictions_of(candidates)
    return min(candidates, key=lambda config: ((known.get(config) or predict(config)).seconds, config.name))


def teams_for(problem: Problem, device: DeviceInfo) -> tuple[int, ...]:
    """CPU: sizes of teams worth trying. A small problem is computed by one thread."""
    alone = problem.flops < _ALONE_FLOPS and problem.bytes_moved < _ALONE_BYTES
    return (1,) if alone else cpu_teams(device.arch, device.units)
