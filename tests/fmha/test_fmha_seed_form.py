"""Configurations in the seeds' form: nested dictionaries, identifiers and file names."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from fmha_configs import AMD, CPU, all_templates, valid

from tilewright_fmha.compat.dictionaries import from_seed, seed_file, seed_identifier, to_seed
from tilewright_fmha.compat.summary import format_config, format_registry
from tilewright_fmha.kernel_sets.sets import KERNEL_SETS
from tilewright_fmha.rules.rulebook import RULES
from tilewright_fmha.vocabulary import BiasKind, Family, FmhaDType, KvLayout, KvLookup, MaskKind, Mode, QScale, VLayout
from tilewright_kit.config.rules import RuleBook
from tilewright_kit.kernel_sets.registry import Registry
from tilewright_kit.types.errors import InvalidArgumentError

RECORD: dict[str, Any] = {
    "signature": {"family": "fwd", "data_type": "fp16", "hdim_q": 128, "mask": "top_left", "lse": True},
    "algorithm": {"pipeline": "qr_async", "tile": [128, 128, 32, 128, 32, 128], "wave": [4, 1, 1, 4, 1, 1]},
}
OURS = ("learned_sinks", "dtype_bias", "rope_dtype", "pack_gqa", "persistent", "stages", "scheduler", "num_splits")


def test_a_record_is_read_with_the_values_that_it_had_there() -> None:
    config = from_seed(RECORD)
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
    config = from_seed({"signature": signature, "algorithm": {"pipeline": "qr_async_trload_v3"}})
    assert (config.mask, config.bias, config.softcap, config.paged) == (
        MaskKind.WINDOW,
        BiasKind.ELEMENTWISE,
        True,
        True,
    )
    assert (config.kv_layout, config.kv_lookup, config.page_size) == (KvLayout.VECTORIZED, KvLookup.SGLANG, 16)
    assert (config.pipeline, config.hdim) == ("v3", (192, 128))
    static = from_seed({"signature": {"data_type": "fp8", "fp8_static_quant": True}, "algorithm": {}})
    assert (static.dtype, static.qscale) == (FmhaDType.FP8FP16, QScale.PERTENSOR)


def test_both_directions_agree_for_all_kernels() -> None:
    with all_templates():
        book = RuleBook(RULES.rules)
        for arch in (CPU, AMD):
            for sets in KERNEL_SETS.values():
                for config in sets["default"].expand(arch, book):
                    record = json.loads(json.dumps(to_seed(config)))
                    plain = {name: type(config)().to_dict()[name] for name in OURS}
                    assert from_seed(record).to_dict() == {**config.to_dict(), **plain}, config.name


@pytest.mark.parametrize(
    ("section", "changes", "rule"),
    [
        ("signature", {"family": "sideways"}, "seed_words"),
        ("signature", {"data_type": "fp12"}, "seed_words"),
        ("signature", {"mask": "diagonal"}, "seed_words"),
        ("signature", {"lse": "yes"}, "seed_boolean"),
        ("signature", {"hdim_q": "128"}, "seed_integer"),
        ("signature", {"colour": "red"}, "seed_keys"),
        ("algorithm", {"colour": "red"}, "seed_keys"),
        ("algorithm", {"tile": "128x128"}, "seed_sizes"),
        ("algorithm", {"padding": [True]}, "seed_sizes"),
    ],
)
def test_mistakes_in_a_record_are_named(section: str, changes: dict[str, Any], rule: str) -> None:
    record = {**RECORD, section: {**RECORD[section], **changes}}
    with pytest.raises(InvalidArgumentError) as error:
        from_seed(record)
    assert error.value.rule == rule and error.value.fix


def test_a_record_needs_both_sections() -> None:
    with pytest.raises(InvalidArgumentError, match="algorithm is no object"):
        from_seed({"signature": {}})


def test_the_identifier_is_written_as_there() -> None:
    config = from_seed(RECORD)
    assert seed_identifier(config) == (
        "fmha_fwd_fp16_batch_vr_hq128_hv128_pqr_async_m1_b0_lse1_do0_qs0_rp0_pkv0_sq0_sk0_sink0_db0_sr0_det0_km1_kl0_"
        "ps1_t128x128x32x128x32x128_w04x1x1_w14x1x1_wt032x32x16_wt132x32x16_pads1111_tr0_bpc-1_wg1_ms0_mq0_aq8_av8_r0_"
        "rc-1"
    )
    # It leaves out what tells these apart: our names and keys do not.
    capped = config.replace(softcap=True)
    assert seed_identifier(capped) == seed_identifier(config) and capped.name != config.name
    assert seed_file(capped) != seed_file(config)


def test_files_are_named_by_a_digest() -> None:
    name = seed_file(from_seed(RECORD))
    assert re.fullmatch(r"fmha_fwd_fp16_batch_h128x128_qr_async_[0-9a-f]{12}", name)
    assert seed_file(from_seed(RECORD)) == name


def test_kernels_and_registries_in_a_few_words() -> None:
    config = valid(CPU, Family.PAGEDKV, mask=MaskKind.CAUSAL, lse=True, dtype=FmhaDType.FP16)
    text = format_config(config)
    assert text.startswith("fwd_pagedkv fp16 batch h64x64: qr ") and text.endswith("causal, linear pages by vllm, lse")
    registry = Registry("mine")
    registry.register(config, CPU.id)
    registry.register(valid(CPU, Family.APPENDKV), CPU.id)
    assert format_registry(registry).splitlines() == [
        "mine: 2 kernels of attention",
        "  fwd_appendkv bf16 x86-64-v3: 1",
        "  fwd_pagedkv fp16 x86-64-v3: 1",
    ]
    exported = registry.to_dict()
    assert exported["metadata"]["total_kernels"] == 2
    assert exported["statistics"]["by_family"] == {"fwd_pagedkv": 1, "fwd_appendkv": 1}
