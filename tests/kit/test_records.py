"""Records of configurations: whose they are, and what they mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import part
from tilewright_kit.config.records import config_of_record
from tilewright_kit.types.errors import InvalidArgumentError, NotFoundError


@dataclass(frozen=True)
class Sum(KernelConfig):
    operation: ClassVar[str] = "sum"

    dtype: str = part("fp32")
    tile: int = part(16)


@dataclass(frozen=True)
class BlockSum(Sum):
    operation: ClassVar[str] = "block_sum"

    block: int = part(4)


@dataclass(frozen=True)
class Scan(KernelConfig):
    operation: ClassVar[str] = "scan"

    dtype: str = part("fp32")
    direction: str = part("up")


@dataclass(frozen=True)
class DownScan(KernelConfig):
    operation: ClassVar[str] = "down_scan"

    dtype: str = part("fp32")
    direction: str = part("down")


class Reads:
    def __init__(self, config_type: type[KernelConfig]) -> None:
        self.config_type = config_type


class ReadsForeign(Reads):
    """Reads ``{"foreign": tile}``."""

    def is_foreign(self, record: Any) -> bool:
        return "foreign" in record

    def read_foreign(self, record: Any) -> KernelConfig:
        return Sum(tile=record["foreign"])


OPERATIONS = {kind.operation: Reads(kind) for kind in (BlockSum, Scan, DownScan)} | {"sum": ReadsForeign(Sum)}


def test_an_operation_follows_from_fields_that_only_it_has() -> None:
    assert config_of_record({"tile": 32, "block": 8}, OPERATIONS) == BlockSum(tile=32, block=8)


def test_of_a_class_of_configurations_and_those_derived_from_it_the_class_is_meant() -> None:
    assert config_of_record({"tile": 32}, OPERATIONS) == Sum(tile=32)


def test_a_field_whose_default_tells_two_operations_apart_tells_which_is_meant() -> None:
    assert config_of_record({"direction": "down"}, OPERATIONS) == DownScan()


def test_fields_that_several_operations_have_need_its_name() -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        config_of_record({"dtype": "fp16"}, OPERATIONS)
    assert caught.value.rule == "config_operation"
    assert config_of_record({"dtype": "fp16"}, OPERATIONS, "scan") == Scan(dtype="fp16")
    assert config_of_record({"dtype": "fp16", "operation": "scan"}, OPERATIONS) == Scan(dtype="fp16")


def test_an_entry_of_an_exported_catalog_is_its_configuration() -> None:
    entry = {"name": "n", "operation": "scan", "config": {"dtype": "fp16"}, "digest": "d", "signature": {}}
    assert config_of_record(entry, OPERATIONS) == Scan(dtype="fp16")


def test_a_field_that_no_operation_has_is_named_with_the_closest_operation() -> None:
    with pytest.raises(InvalidArgumentError, match="block_sum come closest, without 'blok'"):
        config_of_record({"tile": 1, "block": 2, "blok": 2}, OPERATIONS)


def test_an_unknown_operation_is_answered_with_those_that_there_are() -> None:
    with pytest.raises(NotFoundError) as caught:
        config_of_record({}, OPERATIONS, "sort")
    assert "block_sum" in caught.value.fix


def test_another_systems_form_is_read_by_the_operation_that_knows_it() -> None:
    assert config_of_record({"foreign": 64}, OPERATIONS) == Sum(tile=64)
