"""Two different configurations never share a name or a key, and damaged ones are refused by field."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from tilewright_kit.config.kernel_config import KernelConfig
from tilewright_kit.config.naming import digest_of, part, require_naming, suffix
from tilewright_kit.types.dtypes import DType
from tilewright_kit.types.errors import InvalidArgumentError


class Mode(str, Enum):
    OFF = "off"
    FAST = "fast"
    D2 = "d2x"


@dataclass(frozen=True)
class Full(KernelConfig):
    """One field of every kind, with tags that come close to one another."""

    operation: ClassVar[str] = "full"
    signature_fields: ClassVar[tuple[str, ...]] = ("dtype", "layout")

    dtype: DType = part(DType.FP16)  # noqa: RUF009
    layout: str = part("rcr")
    pad: bool = part(True)
    tile: tuple[int, int, int] = part((128, 128, 32))
    mode: Mode = suffix("", Mode.OFF)  # noqa: RUF009
    d: int = suffix("d", 0)
    dtypes: tuple[str, ...] = suffix("D", ())
    scheduler: Literal["intra", "inter"] = suffix("sched", "intra")
    sizes: tuple[int, ...] = suffix("sz", ())
    persistent: bool = suffix("persistent", False)
    fallback: bool = suffix("fb", True)


words = st.text(alphabet="abdx2-_.=", max_size=4)
numbers = st.integers(min_value=-3, max_value=130)
configs = st.builds(
    Full,
    dtype=st.sampled_from(DType),
    layout=words,
    pad=st.booleans(),
    tile=st.tuples(numbers, numbers, numbers),
    mode=st.sampled_from(Mode),
    d=numbers,
    dtypes=st.lists(words, max_size=3).map(tuple),
    scheduler=st.sampled_from(["intra", "inter"]),
    sizes=st.lists(numbers, max_size=3).map(tuple),
    persistent=st.booleans(),
    fallback=st.booleans(),
)


@given(configs, configs)
def test_different_configurations_have_different_names_and_keys(one: Full, other: Full) -> None:
    assert (one == other) == (one.name == other.name)
    assert (one == other) == (one.key("a") == other.key("a"))
    assert one.key("a").digest != one.key("b").digest


@given(st.lists(configs, min_size=2, max_size=40, unique=True))
def test_a_set_of_configurations_has_as_many_names(many: list[Full]) -> None:
    assert len({config.name for config in many}) == len(many)


@given(configs)
def test_a_configuration_comes_back_from_json(config: Full) -> None:
    assert Full.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@given(configs)
def test_every_field_is_in_exactly_one_of_signature_and_algorithm(config: Full) -> None:
    signature, algorithm = config.signature(), config.algorithm()
    assert set(signature) == {"dtype", "layout"}
    assert not set(signature) & set(algorithm)
    assert len(signature) + len(algorithm) == len(Full.field_names())


def test_a_name_reads_as_parts_then_what_is_not_default() -> None:
    assert Full().name == "full_fp16_rcr_True_128x128x32"
    assert Full(d=2, persistent=True).name == "full_fp16_rcr_True_128x128x32_d2_persistent"


@pytest.mark.parametrize(
    ("tags", "defaults"),
    [
        (("d", "d"), (0, 0)),
        (("d", "d2"), (0, 0)),
        (("d", "d2"), (0, False)),
        (("", "fast"), (Mode.OFF, False)),
        (("", "d"), ("", 0)),
        (("d", "double"), ("", False)),
        (("sz", "sz1x"), ((1,), (1,))),
    ],
)
def test_suffixes_that_could_be_read_as_one_another_are_refused(tags: Any, defaults: Any) -> None:
    members: dict[str, Any] = {"operation": "clash", "__annotations__": {"one": object, "two": object}}
    members |= {name: suffix(tag, value) for name, tag, value in zip(("one", "two"), tags, defaults, strict=True)}
    made = dataclass(frozen=True)(type("Clash", (KernelConfig,), members))
    with pytest.raises(TypeError, match="can give the same word"):
        require_naming(made)


def test_suffixes_that_only_begin_alike_are_allowed() -> None:
    require_naming(Full)  # d and D, d and "d2x" of an enumeration, sz and sched


def test_a_field_without_a_place_in_the_name_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match=r"Forgotten\.vector has no place"):

        class Forgotten(KernelConfig):
            operation: ClassVar[str] = "forgotten"
            vector: int = 4


def test_an_unknown_signature_field_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match="names no field: tiles"):

        class Misspelt(KernelConfig):
            operation: ClassVar[str] = "misspelt"
            signature_fields: ClassVar[tuple[str, ...]] = ("tiles",)
            tile: int = part(1)


def test_two_values_with_one_text_are_refused() -> None:
    @dataclass(frozen=True)
    class Lossy(KernelConfig):
        operation: ClassVar[str] = "lossy"
        mode: Mode = part(Mode.OFF, text=lambda mode: "same")  # noqa: RUF009

    with pytest.raises(TypeError, match="same text"):
        require_naming(Lossy)


@pytest.mark.parametrize("text", ["", "a-b", "a/b", "../x", "a b", "\n", "é"])
def test_a_text_that_no_name_can_hold_is_given_as_a_digest(text: str) -> None:
    assert re.fullmatch(r"full_fp16_=[0-9a-f]{12}_True_128x128x32", Full(layout=text).name)


def test_an_underscore_becomes_a_hyphen_so_that_names_can_be_split() -> None:
    assert Full(layout="comp_async").name == "full_fp16_comp-async_True_128x128x32"


@pytest.mark.parametrize(
    ("record", "field"),
    [
        ({"tiles": [1, 2, 3]}, "config.tiles"),
        ({"tile": [1, 2]}, "config.tile"),
        ({"tile": [1, 2, "3"]}, "config.tile"),
        ({"tile": [1, 2, True]}, "config.tile"),
        ({"tile": 128}, "config.tile"),
        ({"tile": "128"}, "config.tile"),
        ({"dtype": "fp64"}, "config.dtype"),
        ({"pad": 1}, "config.pad"),
        ({"d": True}, "config.d"),
        ({"d": 1.5}, "config.d"),
        ({"d": None}, "config.d"),
        ({"layout": 3}, "config.layout"),
        ({"dtypes": [1]}, "config.dtypes"),
        ({"sizes": ["1"]}, "config.sizes"),
        ({"scheduler": "outer"}, "config.scheduler"),
    ],
)
def test_a_damaged_record_is_refused_by_field(record: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        Full.from_dict(record)
    assert caught.value.field == field


def test_a_digest_is_not_made_of_what_has_no_json_form() -> None:
    with pytest.raises(TypeError):
        digest_of({"path": object()})


def test_element_types_know_their_numpy_type_and_back() -> None:
    for dtype in DType:
        assert DType.from_numpy(dtype.numpy) is dtype
        assert dtype.numpy.itemsize == dtype.bytes
    with pytest.raises(KeyError, match="complex64"):
        DType.from_numpy("complex64")


def test_the_default_statistics_come_from_the_fields_names() -> None:
    assert toy.ToyConfig().statistics() == {"by_datatype": "fp32", "by_pipeline": "mem"}


def test_a_prefix_takes_the_place_of_the_operation_in_names_only() -> None:
    worded = type("Worded", (Full,), {"prefix": "two_words", "operation": "full", "__annotations__": {}})
    assert worded().name == "two_" + Full().name.replace("full_", "words_")
    assert worded().key("a").operation == "full"


def test_only_triples_that_stand_for_m_n_and_k_are_exported_so() -> None:
    class Listed(Full):
        operation: ClassVar[str] = "listed"
        mnk_fields: ClassVar[tuple[str, ...]] = ()

    assert Full().export_field("tile") == ("tile_shape", {"m": 128, "n": 128, "k": 32})
    assert Listed().export_field("tile") == ("tile", [128, 128, 32])


_LOADED = """
import pickle, sys, toy
config = pickle.loads(bytes.fromhex(sys.argv[1]))
sys.exit(config != toy.ToyConfig(vector=8) or hash(config) != hash(toy.ToyConfig(vector=8)))
"""


def test_a_configuration_that_knows_its_hash_is_another_ones_equal_in_another_process() -> None:
    config = toy.ToyConfig(vector=8)
    assert hash(config) == hash(config.replace(streaming=False)) == hash(toy.ToyConfig(vector=8))
    assert hash(config) != hash(config.replace(vector=4))
    text = pickle.dumps(config).hex()
    places = os.pathsep.join([str(Path(toy.__file__).parent), *filter(None, sys.path)])
    for seed in "12":
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": places}
        subprocess.run([sys.executable, "-c", _LOADED, text], env=environment, check=True)


def test_a_configuration_with_slots_is_hashed_too() -> None:
    @dataclass(frozen=True, slots=True)
    class Slotted(KernelConfig):
        operation: ClassVar[str] = "slotted"
        signature_fields: ClassVar[tuple[str, ...]] = ("size",)
        size: int = part(1)

    assert len({Slotted(1), Slotted(1), Slotted(2)}) == 2
