"""Registered kernels of one process leave room to those of others."""

from __future__ import annotations

from pathlib import Path

import pytest
from vector_operation import VectorConfig, VectorOperation

from tilewright_kit.types.errors import ResourceExhaustedError
from tilewright_server.engine.kernels.registered import RegisteredKernels
from tilewright_server.engine.types import RegisteredLimits

FLOOD = ("uid:1", "pid:1@1")
OTHER = ("uid:1", "pid:2@1")


@pytest.fixture
def kernels(tmp_path: Path) -> RegisteredKernels:
    return RegisteredKernels(tmp_path, {"vector": VectorOperation()}, RegisteredLimits(sessions=16, shared=16))


def test_a_process_registers_half_of_what_all_sessions_may(kernels: RegisteredKernels) -> None:
    for session, owner in ((b"a", FLOOD), (b"b", FLOOD), (b"c", OTHER)):
        kernels.opened(session, owner)
    for rank in range(8):
        kernels.add(VectorConfig(rank=rank), b"ab"[rank % 2 :][:1], FLOOD)
    kernels.add(VectorConfig(rank=0), b"a", FLOOD)  # which is there
    with pytest.raises(ResourceExhaustedError) as full:
        kernels.add(VectorConfig(rank=100), b"b", FLOOD)
    assert (full.value.field, full.value.value, full.value.rule) == ("registered_kernels", "16", "quota")
    assert full.value.retry_after_s
    for rank in range(4):
        kernels.add(VectorConfig(rank=rank), b"c", OTHER)
    kernels.forget(b"a")
    kernels.add(VectorConfig(rank=100), b"b", FLOOD)


def test_a_full_session_and_a_full_cache_name_their_quotas(tmp_path: Path) -> None:
    limits = RegisteredLimits(session=1, sessions=16, shared=2)
    kernels = RegisteredKernels(tmp_path, {"vector": VectorOperation()}, limits)
    kernels.opened(b"a", FLOOD)
    kernels.add(VectorConfig(rank=0), b"a", FLOOD)
    for owner in (FLOOD, OTHER):
        kernels.add(VectorConfig(rank=1 + (owner is OTHER)), owner=owner)
    refusals = (
        (b"a", "max_registered_kernels", "1", "session_quota"),  # which nobody else makes room in
        (b"", "shared_kernels", "2", "quota"),
    )
    for session, quota, limit, rule in refusals:
        with pytest.raises(ResourceExhaustedError, match=f"this one has {limit}") as full:
            kernels.add(VectorConfig(rank=100), session, ("uid:2", "pid:3@1"))
        assert (full.value.field, full.value.value, full.value.rule) == (quota, limit, rule)
        assert bool(full.value.retry_after_s) == (rule == "quota")


def test_a_process_shares_half_of_what_a_cache_keeps(kernels: RegisteredKernels) -> None:
    for rank in range(8):
        kernels.add(VectorConfig(rank=rank), owner=FLOOD)
    kernels.add(VectorConfig(rank=0), owner=FLOOD)  # which is there
    with pytest.raises(ResourceExhaustedError, match="8 of them by this client's process") as full:
        kernels.add(VectorConfig(rank=100), owner=FLOOD)
    assert full.value.field == "shared_kernels"
    for rank in range(100, 104):
        kernels.add(VectorConfig(rank=rank), owner=OTHER)
    for rank in range(4):
        assert kernels.remove("vector", VectorConfig(rank=rank).name)
    kernels.add(VectorConfig(rank=200), owner=FLOOD)
