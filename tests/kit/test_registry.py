"""One rule on taken keys, and one order."""

from __future__ import annotations

import threading
from datetime import datetime, timezone
from typing import Any

import toy
from hypothesis import given
from hypothesis import strategies as st

from tilewright_kit.kernel_sets.registry import Outcome, Priority, RegistrationReport, Registry

ToyConfig = toy.ToyConfig
TYPES = {"toy": ToyConfig}
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
CONFIGS = [ToyConfig(vector=vector) for vector in (1, 2, 4, 8)]

steps = st.lists(st.tuples(st.sampled_from(CONFIGS), st.sampled_from(Priority)), max_size=12)


def filled(items: Any, how: str = "register") -> Registry:
    registry = Registry()
    for number, (config, priority) in enumerate(items):
        if how == "register":
            registry.register(config, "a", priority, str(number))
        else:
            registry.register_set([config], "a", priority, str(number))
    return registry


@given(steps)
def test_one_rule_on_taken_keys_holds_for_every_way_in(items: Any) -> None:
    expected: dict[Any, tuple[Priority, str]] = {}
    for number, (config, priority) in enumerate(items):
        if config not in expected or priority > expected[config][0]:
            expected[config] = (priority, str(number))
    for how in ("register", "register_set"):
        assert {entry.config: (entry.priority, entry.origin) for entry in filled(items, how)} == expected


@given(steps)
def test_order_is_by_priority_and_then_by_registration(items: Any) -> None:
    entries = list(filled(items))
    assert entries == sorted(entries, key=lambda entry: (-entry.priority, int(entry.origin)))


def test_outcomes_are_told() -> None:
    registry, config = Registry(), ToyConfig()
    assert registry.register(config, "a") is Outcome.ADDED
    assert registry.register(config, "a") is Outcome.KEPT
    assert registry.register(config, "a", Priority.LOW) is Outcome.KEPT
    assert registry.register(config, "a", Priority.HIGH) is Outcome.REPLACED
    report = registry.register_set(CONFIGS, "a")
    assert report == RegistrationReport(
        added=tuple(item.key("a") for item in CONFIGS if item != config), kept=(config.key("a"),)
    )
    replaced = registry.register_set(CONFIGS[1:3], "a", Priority.HIGH).replaced
    assert replaced == tuple(
        entry.key for entry in registry if entry.priority is Priority.HIGH and entry.config != config
    )


# Export


def test_an_export_has_its_schema() -> None:
    registry = Registry("node")
    registry.register(ToyConfig(), "gfx942")
    document = registry.to_dict(NOW)
    assert document["metadata"] == {
        "timestamp": "2026-01-02T03:04:05Z",
        "registry_name": "node",
        "total_kernels": 1,
        "export_version": "1.0.0",
    }
    assert document["statistics"] == {
        "by_datatype": {"fp32": 1},
        "by_pipeline": {"mem": 1},
        "by_scheduler": {},
        "by_layout": {},
        "by_gfx_arch": {"gfx942": 1},
    }
    [kernel] = document["kernels"]
    assert kernel["name"] == ToyConfig().name
    assert kernel["signature"] == {"dtype": "fp32"}
    assert kernel["algorithm"] == {
        "pipeline": "mem",
        "tile_shape": {"m": 1024, "n": 1, "k": 1},
        "vector": 4,
        "streaming": False,
    }
    assert kernel["gfx_arch"] == "gfx942"


def test_threads_register_each_kernel_once_and_read_meanwhile() -> None:
    registry = Registry()
    configs = [ToyConfig(vector=vector) for vector in range(1, 41)]
    added: list[Outcome] = []

    def work() -> None:
        for config in configs:
            added.append(registry.register(config, "a"))
            assert len(list(registry)) <= len(configs)
            assert registry.to_dict()["metadata"]["total_kernels"] <= len(configs)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert added.count(Outcome.ADDED) == len(configs) == len(registry)
    assert len(added) == 4 * len(configs)
