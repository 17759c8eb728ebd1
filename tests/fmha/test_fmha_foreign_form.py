"""Configurations in the dictionaries of another dispatcher."""

from __future__ import annotations

from typing import Any

import pytest

from tilewright_fmha.kernel_sets.composable_kernel import is_foreign, read_foreign
from tilewright_fmha.vocabulary import BiasKind, Family, FmhaDType, KvLayout, KvLookup, MaskKind, Mode, QScale, VLayout
from tilewright_kit.types.errors import InvalidArgumentError

RECORD: dict[str, Any] = {
    "signature": {"family": "fwd", "data_type": "fp16", "hdim_q": 128, "mask": "top_left", "lse": True},
    "algorithm": {"pipeline": "qr_async", "tile": [128, 128, 32, 128, 32, 128], "wave": [4, 1, 1, 4, 1, 1]},
}


def test_a_record_is_read_with_the_values_that_it_had_there() -> None:
    config = read_foreign(RECORD)
    assert (config.family, config.dtype, config.hdim) == (Family.FWD, FmhaDType.FP16, (128, 128))
    assert (config.mask, config.lse, config.mode, config.v_layout) == (MaskKind.CAUSAL, True, Mode.BATCH, VLayout.VR)
    assert config.wave == (4, 1, 1, 4, 1, 1, 1, 1, 1) and config.warp_tile[:3] == (32, 32, 16)
    assert not config.paged and config.kv_layout is KvLayout.LINEAR


def test_words_of_there_are_understood() -> None:
    signature = {
        "family": "batch_prefill", "data_type": "bf16", "mode": "group", "mask": "window_generic", "bias": "bias",
        "paged_kv": True, "kv_memory_layout": "vectorized", "kv_lookup_table": "sglang", "page_size": 16,
        "logits": True, "qscale": "no_scale", "rope": "none", "vlayout": "r", "hdim_q": 192, "hdim_v": 128,
    }  # fmt: skip
    config = read_foreign({"signature": signature, "algorithm": {"pipeline": "qr_async_trload_v3"}})
    assert (config.mask, config.bias, config.softcap, config.paged) == (
        MaskKind.WINDOW,
        BiasKind.ELEMENTWISE,
        True,
        True,
    )
    assert (config.kv_layout, config.kv_lookup, config.page_size) == (KvLayout.VECTORIZED, KvLookup.SGLANG, 16)
    assert (config.pipeline, config.hdim) == ("v3", (192, 128))
    static = read_foreign({"signature": {"data_type": "fp8", "fp8_static_quant": True}, "algorithm": {}})
    assert (static.dtype, static.qscale) == (FmhaDType.FP8FP16, QScale.PERTENSOR)


@pytest.mark.parametrize(
    ("section", "changes", "rule"),
    [
        ("signature", {"family": "sideways"}, "foreign_words"),
        ("signature", {"data_type": "fp12"}, "foreign_words"),
        ("signature", {"mask": "diagonal"}, "foreign_words"),
        ("signature", {"lse": "yes"}, "foreign_boolean"),
        ("signature", {"hdim_q": "128"}, "foreign_integer"),
        ("signature", {"colour": "red"}, "foreign_keys"),
        ("algorithm", {"colour": "red"}, "foreign_keys"),
        ("algorithm", {"tile": "128x128"}, "foreign_sizes"),
        ("algorithm", {"padding": [True]}, "foreign_sizes"),
    ],
)
def test_mistakes_in_a_record_are_named(section: str, changes: dict[str, Any], rule: str) -> None:
    record = {**RECORD, section: {**RECORD[section], **changes}}
    with pytest.raises(InvalidArgumentError) as error:
        read_foreign(record)
    assert error.value.rule == rule and error.value.fix


def test_a_record_needs_both_sections() -> None:
    with pytest.raises(InvalidArgumentError, match="algorithm is no object"):
        read_foreign({"signature": {}})


def test_the_form_is_told_from_our_own() -> None:
    assert is_foreign(RECORD) and not is_foreign(read_foreign(RECORD).to_dict())
