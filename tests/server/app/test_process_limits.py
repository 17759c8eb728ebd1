"""Limits of the system are found, and settings fit them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from tilewright_server.hosting.limits import ProcessLimits, fitted, process_limits, quota_limits
from tilewright_server.session.quotas import Resource
from tilewright_server.settings import Settings

FREE = ProcessLimits(None, None, 64 << 30, None)


def test_a_machine_without_limits_changes_nothing() -> None:
    settings = Settings()
    assert fitted(settings, FREE) == (replace(settings, host_buffer_bytes=48 << 30), [])


def test_few_mappings_are_divided() -> None:
    settings, _ = fitted(Settings(), replace(FREE, mappings=1000))
    assert (settings.all_regions, settings.all_buffers) == (250, 250)
    assert fitted(Settings(), replace(FREE, mappings=65530))[1] == [], "what systems allow without being asked"


def test_few_threads_are_divided() -> None:
    settings, told = fitted(Settings(), ProcessLimits(128, None, 64 << 30, None))
    assert (settings.workers, settings.local_connections) == (20, 20)
    assert told == ["workers is 20 instead of 64", "local_connections is 20 instead of 256"]
    least, _ = fitted(Settings(), ProcessLimits(10, None, 64 << 30, None))
    assert (least.workers, least.local_connections) == (4, 8)


def test_little_memory_and_address_space_bound_messages_and_regions() -> None:
    settings, _ = fitted(Settings(), ProcessLimits(None, None, 1 << 30, None))
    assert settings.receive_bytes == settings.request_bytes == settings.unread_bytes == 128 << 20
    settings, _ = fitted(Settings(), ProcessLimits(None, None, 64 << 30, 4 << 30))
    assert settings.region_bytes == 2 << 30
    assert settings.workers < 64


def test_pages_that_the_server_makes_for_clients_take_a_quarter_of_the_memory_at_most() -> None:
    settings, told = fitted(Settings(), replace(FREE, memory_bytes=1 << 30))
    assert settings.kserve_region_bytes == quota_limits(settings)[Resource.KSERVE_REGION_BYTES] == 256 << 20
    assert "kserve_region_bytes is 268435456 instead of 4294967296" in told
    assert fitted(Settings(kserve_region_bytes=9), replace(FREE, memory_bytes=1 << 30))[0].kserve_region_bytes == 9


def test_few_descriptors_bound_connections() -> None:
    assert fitted(Settings(), ProcessLimits(None, 512, 64 << 30, None))[0].local_connections == 64
    assert fitted(Settings(), ProcessLimits(None, 512, 64 << 30, None))[0].max_connections == 128


def test_what_was_set_lower_stays() -> None:
    settings, told = fitted(
        Settings(workers=3, local_connections=2, max_connections=9), ProcessLimits(100, 400, 64 << 30, None)
    )
    assert (settings.workers, settings.local_connections, told) == (3, 2, [])


def test_groups_limit_processes(tmp_path: Path) -> None:
    group = tmp_path / "sys" / "fs" / "cgroup" / "a" / "b"
    group.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("0::/a/b\n")
    (group / "pids.max").write_text("max\n")
    (group / "pids.current").write_text("3\n")
    if os.geteuid() == 0:
        assert process_limits(tmp_path).threads is None
    (group.parent / "pids.max").write_text("60\n")
    (group.parent / "pids.current").write_text("20\n")
    found = process_limits(tmp_path)
    assert found.threads == 40
    assert "threads 40" in found.describe()
