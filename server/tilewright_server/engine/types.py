"""Inputs and results of the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

__all__ = ["BuildPolicy", "EngineOptions", "Outcome", "RegisteredLimits", "Selection"]

BuildPolicy = Literal["wait", "fallback"]


@dataclass(frozen=True, slots=True)
class RegisteredLimits:
    """Kernels that may be registered. Of ``sessions`` and ``shared`` a process has at most as many as it leaves."""

    session: int = 1000
    """By one session, for itself."""
    sessions: int = 16384
    """By all sessions, for themselves."""
    shared: int = 10_000
    """For all, by whomever."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Settings of the engine, all of them values: nothing below reads the environment.

    Zero means "choose for this machine" where a count is meant.
    """

    cache_dir: Path
    """Artifact cache. Created with mode 0700; refused if others can write to it."""
    cache_bytes: int = 2 << 30
    cache_age_s: float = 90 * 24 * 3600.0
    build_workers: int = 0
    """Compilers at a time; 0: one per usable core."""
    build_timeout_s: float = 120.0
    build_memory_bytes: int = 4 << 30
    """Limit of address space for one compiler."""
    build_budget_bytes: int = 0
    """Memory that all compilers together may be expected to use; 0: half of what the machine has."""
    failure_ttl_s: float = 300.0
    """For how long a failed build is answered from memory."""
    queued_builds: int = 32768
    """Builds that may wait; one process has at most half of them."""
    registered: RegisteredLimits = field(default_factory=RegisteredLimits)
    """Kernels that clients may register."""
    compiler: str = ""
    """C++ compiler, by name or path; empty: the first that is found."""
    hip_compiler: str = ""
    """``hiprtc``, ``ziglang``, or a clang++ by name or path; empty: the first that is found."""
    default_device: str = ""
    """Device by id; empty: the first GPU, else the CPU."""
    default_strategy: str = "auto"
    perf_database: Path | None = None
    selection_lock: Path | None = None
    """The user's own measurements; None: only those that plugins bring."""
    cpu_arch: str = ""
    """CPU level to generate code for, by arch id (``x86-64-v2``); empty: what the machine has."""
    cpu_threads: int = 0
    """Threads of the CPU device; 0: the usable cores."""
    cpu_isolated: bool = False
    """Run the CPU's kernels in a process of their own: slower, but a kernel that faults ends only that process."""
    plan_cache: int = 4096
    """Plans that are remembered."""
    plan_cache_bytes: int = 64 << 20
    """Memory that remembered plans and requests may take, all together; what a session prepared counts as its own."""
    max_loaded_kernels: int = 1024
    """Kernels that stay loaded; more do only while sessions and executions use them."""
    negative_ttl_s: float = 2.0
    """For how long a problem that could not be planned is refused from memory."""
    queue_limit: int = 1024
    """Executions that may wait for a device."""
    workspace_bytes: int = 4 << 30
    """Workspace of all executions and bindings of a device together."""


@dataclass(frozen=True, slots=True)
class Selection:
    """How a kernel is to be chosen. Empty fields take the server's defaults."""

    strategy: str = ""
    kernel: str = ""
    """A kernel by name; implies the strategy ``explicit``."""
    build: BuildPolicy = "wait"
    device: str = ""
    config: str = ""
    """JSON object of a kernel's fields, in place of its name."""


@dataclass(slots=True)
class Outcome:
    """Times of an execution. Not frozen for the sake of speed: one is made for each execution."""

    device_ns: int = 0
    queue_ns: int = 0
    stages_ns: tuple[int, ...] = field(default=())
    """Device time of each stage, summed over repeats."""
