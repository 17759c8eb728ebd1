"""Runs the waves of some workgroups: in lock-step while they agree, apart where they do not, or in an order of waves
that a launch asks for (``Checks.waves``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tilewright_emulator.decode.program import Program
from tilewright_emulator.errors import BarrierDivergence, EmulationError, InstructionLimit, LaneFault, WaveFault
from tilewright_emulator.isa.registers import Array
from tilewright_emulator.launch.control_flow import Jump, Stop
from tilewright_emulator.state.run import Run
from tilewright_emulator.state.waves import Waves

SLICE = 20_000  # instructions after which others have their turn
LONGEST_TURN = 48  # instructions, where turns are drawn
SETBACK = 1 / 16  # how often a wave loses its priority. Burckhardt et al., "A Randomized Scheduler with Probabilistic
# Guarantees of Finding Bugs", 2010: priorities find what turns by chance do not


@dataclass(eq=False)
class Scheduler:
    """``executed``: wave instructions by place in the program. ``name``: coordinates of each slot's workgroup, for
    messages. ``finished``: waves that have ended."""

    program: Program
    run: Run
    name: dict[int, tuple[int, int, int]]
    executed: list[int]
    ready: list[Waves] = field(default_factory=list)
    parked: list[Waves] = field(default_factory=list)
    finished: list[Waves] = field(default_factory=list)

    def __post_init__(self) -> None:
        groups = int(self.run.groups.max()) + 1
        self.alive: Array = np.bincount(self.run.groups, minlength=groups)
        self.waiting: Array = np.zeros(groups, np.int64)
        self.ended: Array = np.zeros(groups, np.int64)
        order, count = self.run.checks.waves, self.run.per_group
        self._drawn = np.random.default_rng(order) if order > 1 or order < -1 else None
        waves = self.run.groups.size
        self._priority = [] if self._drawn is None else self._drawn.permutation(waves).tolist()
        self._rank = [0] * count if not order else list(range(count))[:: 1 if order > 0 else -1]

    def start(self, waves: Waves) -> None:
        """Runs to the end of all. Raises ``EmulationError``."""
        self.ready = self._apart(waves)
        while self.ready or self.parked:
            if not self.ready or (self._drawn is not None and self._complete().size):
                self._release()
            waves = self._next()
            rank = self._rank_of(waves)
            stop = min((other.pc for other in self.ready if self._rank_of(other) == rank), default=-1)
            if self._drawn is not None:
                stop = waves.pc + int(self._drawn.integers(1, LONGEST_TURN))
                if self._drawn.random() < SETBACK:  # the last of all now: others come first, also if it waits for them
                    self._priority[int(waves.ids[0])] = min(self._priority) - 1
            self._execute(waves, stop)

    def _apart(self, waves: Waves) -> list[Waves]:
        """Waves that run in lock-step: all, those that have the same number in their workgroups, or none."""
        if not self.run.checks.waves:
            return [waves]
        if self._drawn is not None:
            return [waves.select(np.array([row])) for row in range(waves.count)]
        places = waves.ids % self.run.per_group
        return [waves.select(np.flatnonzero(places == place)) for place in range(self.run.per_group)]

    def _rank_of(self, waves: Waves) -> int:
        """Place in the order in which waves of a workgroup run."""
        return self._rank[int(waves.ids[0]) % self.run.per_group]

    def _next(self) -> Waves:
        """The waves that are furthest behind, with all others at the same place."""
        if self._drawn is not None:
            first = max(self.ready, key=lambda w: self._priority[int(w.ids[0])])
        else:
            first = min(self.ready, key=lambda w: (w.turns, self._rank_of(w), w.pc))
        rank = self._rank_of(first)
        same = [
            w
            for w in self.ready
            if w is first
            or (self._drawn is None and w.turns == first.turns and self._rank_of(w) == rank and w.can_join(first))
        ]
        self.ready = [w for w in self.ready if not any(w is other for other in same)]
        turns = first.turns
        joined = Waves.join(same)
        joined.turns = turns
        return joined

    def _execute(self, w: Waves, stop: int) -> None:
        """Until the waves part, stop, or reach ``stop``, where others are."""
        program, executed, steps, masks = self.program, self.executed, self.program.steps, self.program.masks
        turn = SLICE if self._drawn is None else LONGEST_TURN
        pc, count, until = w.pc, w.count, w.steps + turn
        begin = pc
        try:
            while True:
                if w.hazard & masks[pc]:
                    program.guard(w, pc)
                executed[pc] += count
                result = steps[pc](w)
                pc += 1
                if result is not None:
                    w.steps += pc - begin
                    w.pc = pc
                    if isinstance(result, Stop):
                        self._stop(w, result)
                        return
                    if not isinstance(result.taken, bool):
                        self._part(w, result)
                        return
                    begin = w.pc = pc = program.at[result.target]
                    if w.steps > until:
                        until = w.steps + turn
                        if self._must_yield(w):
                            return
                if pc == stop:
                    w.pc = pc
                    w.steps += pc - begin
                    self.ready.append(w)
                    return
        except LaneFault as fault:
            raise self._placed(fault.kind, w, pc, fault.message, lane=fault.lane) from None
        except WaveFault as fault:
            raise self._placed(fault.kind, w, pc, fault.message, wave=fault.wave) from None
        except EmulationError as error:
            raise self._placed(type(error), w, pc, str(error), wave=0) from None

    def _must_yield(self, w: Waves) -> bool:
        """True if others have their turn now, after so many instructions."""
        self._check_limit(w)
        if self._complete().size:  # they may be what these wait for
            self._release()
        if not self.ready:
            return False
        w.turns += 1
        self.ready.append(w)
        return True

    def _part(self, w: Waves, jump: Jump) -> None:
        assert not isinstance(jump.taken, bool)
        there, here = w.select(np.flatnonzero(jump.taken)), w.select(np.flatnonzero(~jump.taken))
        there.pc = self.program.at[jump.target]
        self.ready += [here, there]

    def _check_limit(self, w: Waves) -> None:
        if w.steps > self.run.checks.instruction_limit:
            raise InstructionLimit(f"more than {self.run.checks.instruction_limit} instructions")

    def _stop(self, w: Waves, stop: Stop) -> None:
        self._check_limit(w)
        groups = self.run.groups[w.ids]
        if stop.why == "end":
            np.add.at(self.ended, groups, 1)
            if self.run.weak is not None:
                self.run.weak.ended(w)
            self.finished.append(w)
            return
        np.add.at(self.waiting, groups, 1)
        touched = np.unique(groups)
        if (self.waiting[touched] == self.alive[touched]).all() and w.count == int(self.waiting[touched].sum()):
            self._pass(w)  # all are here together: the common case
            self.ready.append(w)
        else:
            self.parked.append(w)

    def _pass(self, w: Waves) -> None:
        """Waves whose workgroups are complete go on behind a barrier."""
        groups = np.unique(self.run.groups[w.ids])
        self.run.epochs[groups] += 1
        self.waiting[groups] = 0
        self._behind(w)

    def _behind(self, w: Waves) -> None:
        w.refresh_marks()
        late = w.since_signal if w.signalled else [p for queue in w.queues.by_counter.values() for p in queue]
        for pending in {id(p): p for p in late}.values():
            if pending.again is not None:
                pending.again(w.ids)
        w.signalled, w.since_signal = False, []

    def _complete(self) -> Array:
        """Workgroups of which every wave is at a barrier or has ended, and some are at it."""
        return np.flatnonzero((self.waiting > 0) & (self.waiting + self.ended == self.alive))

    def _release(self) -> None:
        """Complete workgroups go on. There are some, unless the launch has come to a stop."""
        complete = self._complete()
        broken = complete[self.ended[complete] > 0]
        if broken.size or not complete.size:
            group = int(broken[0]) if broken.size else int(self.run.groups[self.parked[0].ids[0]])
            for w in self.parked:
                rows = np.flatnonzero(self.run.groups[w.ids] == group)
                if rows.size:
                    text = f"{int(self.ended[group])} of {int(self.alive[group])} waves have ended without this barrier"
                    raise self._placed(BarrierDivergence, w, w.pc - 1, text, wave=int(rows[0]))
        self.run.epochs[complete] += 1
        self.waiting[complete] = 0
        parked, self.parked = self.parked, []
        released: list[Waves] = []
        for w in parked:
            goes = np.isin(self.run.groups[w.ids], complete)
            for rows, target in ((np.flatnonzero(goes), released), (np.flatnonzero(~goes), self.parked)):
                if rows.size:
                    target.append(w if rows.size == w.count else w.select(rows))
        for w in released:
            self._behind(w)
        self.ready += released

    def _placed(
        self, kind: type[EmulationError], w: Waves, pc: int, message: str, lane: int | None = None, wave: int = 0
    ) -> EmulationError:
        """An error that says where: instruction, workgroup, wave and lane."""
        place = ""
        if lane is not None:
            rows, lanes = np.nonzero(w.exec)
            if lane < rows.size:
                wave, place = int(rows[lane]), f" lane {int(lanes[lane])}"
        number = int(w.ids[wave])
        group = self.name.get(int(self.run.groups[number]), (0, 0, 0))
        instruction = self.program.instructions[min(pc, len(self.program.instructions) - 1)]
        offset = instruction.address - self.program.instructions[0].address
        where = f"workgroup {group} wave {number % self.run.per_group}{place}"
        return kind(f"{self.program.name}{offset:+#x} `{instruction.text}`: {where}: {message}")
