"""The walk-through stays true: its example is a valid spec and behaves as the text says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import tilewright_arch as arch

GUIDE = Path(__file__).parents[2] / "docs" / "adding-an-arch.md"


def test_the_example_in_the_guide_is_a_valid_spec(tmp_path: Path) -> None:
    example = re.search(r"```json\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    assert example is not None
    path = tmp_path / f"{json.loads(example[1])['name']}.json"
    path.write_text(example[1])
    arch.validate_spec(path)
    spec = arch.parse_spec(path)
    assert spec.acc_dtype("fp8", "fp8") == "fp32"
    assert spec.lds_budget("compv4") == 163840
    assert spec.warp_tiles["bf16_bf16_fp32"] == spec.warp_tiles["fp16_fp16_fp32"]
    refusal = spec.trait_refusal("compv4", "cshuffle", "interwave")
    assert refusal == "pipeline compv4 takes scheduler intrawave, not interwave"


def test_the_guide_names_every_required_field() -> None:
    text = GUIDE.read_text("utf-8")
    assert [field for field in arch.schema()["properties"] if f"`{field}`" not in text] == []
