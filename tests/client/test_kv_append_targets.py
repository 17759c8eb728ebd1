"""Everything that appending writes may be another library's memory on a GPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from producers import torch_like

from tilewright.operations.attention.kv_append import _kv_append
from tilewright.tensor.interop import DeviceTensor


def test_caches_and_new_lengths_are_written_where_they_lie_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = torch_like()
    monkeypatch.setitem(sys.modules, "torch", torch)
    core: Any = object()  # nothing is asked of a server yet

    def tensor(*shape: int, dtype: str = "float16") -> Any:
        return torch.Tensor(1 << 20, shape, dtype)

    new, cache, lengths = tensor(2, 2, 3, 16), tensor(2, 2, 20, 16), tensor(2, dtype="int32")
    asked = _kv_append(core, new, new, cache, cache, lengths, seqlens_out=lengths)
    assert list(asked.targets) == ["k_cache", "v_cache", "seqlens_out"]
    assert all(isinstance(target, DeviceTensor) for target in asked.targets.values())
