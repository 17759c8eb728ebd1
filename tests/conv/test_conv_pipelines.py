"""Convolution's pipelines are records: each in one place, for every arch that has it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import tilewright_arch
import tilewright_grouped_conv
from tilewright_grouped_conv.config.config import ConvConfig
from tilewright_grouped_conv.config.pipelines import BULK, GPU_LOOPS, IM2COL, form_of, offered_pipelines
from tilewright_grouped_conv.pipelines.records import PIPELINES, pipeline_of
from tilewright_grouped_conv.vocabulary import Specialization
from tilewright_native import include_dir

FOLDER = Path(tilewright_grouped_conv.__file__).parent
OWN_NAMES = {
    "IM2COL_PIPELINE": {"config/config.py", "config/pipelines.py", "candidates/im2col.py"},
    "TAPS_PIPELINE": {"config/config.py", "config/pipelines.py", "candidates/taps.py"},
    "BULK_PIPELINE": {"config/config.py", "config/pipelines.py", "candidates/direct.py", "kernel_sets/cuda.py"},
}
"""Words that name a pipeline, and the modules that may: its record, and what makes its configurations."""


def test_a_name_has_one_record_on_a_kind_of_device() -> None:
    found = Counter((name, kind) for record in PIPELINES for name in record.form.names for kind in record.form.kinds)
    assert found and set(found.values()) == {1}
    assert all((record.stages is None) == (record.form.kinds == ("cpu",)) for record in PIPELINES)


@pytest.mark.parametrize("record", PIPELINES, ids=lambda record: "_".join((*record.form.kinds, *record.form.names)))
def test_the_files_of_a_record_are_there(record) -> None:
    assert (FOLDER / "templates" / record.form.template).is_file()
    header = record.form.header
    folders = [Path(include_dir()) / "tilewright" / part / "conv" for part in ("gpu", "sm90")]
    assert not header or any((folder / header).is_file() for folder in folders)


@pytest.mark.parametrize("name", tilewright_arch.names())
def test_every_arch_has_records_of_all_pipelines_that_it_is_offered(name: str) -> None:
    arch = tilewright_arch.load(name)
    offered = offered_pipelines(arch)
    assert offered
    for pipeline in offered:
        record = pipeline_of(ConvConfig(pipeline=pipeline), arch.kind)
        assert record.form.has(pipeline, arch) and record.form.is_product
    loop = ConvConfig(pipeline="direct", specialization=Specialization.DEPTHWISE)
    assert pipeline_of(loop, arch.kind).form.drives(arch)


def test_an_unknown_pipeline_has_the_record_of_most_kernels() -> None:
    assert pipeline_of(ConvConfig(pipeline="none"), "cuda").form.names == ("compv3", "compv4")
    loop = ConvConfig(pipeline="none", specialization=Specialization.DIRECT)
    assert pipeline_of(loop, "hip").form is GPU_LOOPS
    assert form_of("none").names == () and form_of("ws") is IM2COL and form_of("bulk") is BULK


@pytest.mark.parametrize("word", OWN_NAMES)
def test_only_its_record_and_what_proposes_its_kernels_name_a_pipeline(word: str) -> None:
    modules = {str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.py") if word in path.read_text("utf-8")}
    assert modules <= OWN_NAMES[word]
