"""Small requests that show what the operations can do; the conformance test plans, builds, runs and checks them."""

from __future__ import annotations

from collections.abc import Iterator

from tilewright_fmha.vocabulary import ATTENTION, ATTENTION_BACKWARD, KV_APPEND
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["fmha_samples"]

Descs = dict[str, TensorDesc]


def fmha_samples(operation: str) -> Iterator[OperationRequest]:
    yield from _SAMPLES[operation]()


def _of(operation: str, tensors: Descs, **attributes: object) -> OperationRequest:
    return OperationRequest(operation, tensors, {}, attributes)  # type: ignore[arg-type]


def _qkv(dtype: str, q: tuple[int, ...], k: tuple[int, ...], hdim_v: int = 0) -> Descs:
    v = (*k[:-1], hdim_v or k[-1])
    return {"q": TensorDesc.of(dtype, q), "k": TensorDesc.of(dtype, k), "v": TensorDesc.of(dtype, v)}


def _int(*shape: int) -> TensorDesc:
    return TensorDesc.of("int32", shape)


def _fp32(*shape: int) -> TensorDesc:
    return TensorDesc.of("fp32", shape)


def _attention() -> Iterator[OperationRequest]:
    def of(tensors: Descs, **attributes: object) -> OperationRequest:
        return _of(ATTENTION, tensors, **attributes)

    yield of(_qkv("fp32", (2, 4, 33, 40), (2, 2, 45, 40)))
    yield of(_qkv("bf16", (1, 2, 65, 64), (1, 2, 65, 64)), causal=True, return_lse=True)
    window = {"window_left": 9, "window_right": 0, "mask_align": "bottom_right", "sink_size": 2}
    yield of({**_qkv("fp32", (1, 2, 20, 32), (1, 2, 50, 32), 48), "sinks": _fp32(2)}, **window, return_lse=True)
    bias = TensorDesc.of("fp32", (1, 2, 1, 31))
    yield of({**_qkv("fp16", (2, 2, 17, 32), (2, 2, 31, 32)), "bias": bias}, dropout_p=0.25, seed=77)
    yield of({**_qkv("fp32", (2, 2, 7, 32), (2, 1, 19, 32)), "alibi_slopes": _fp32(2), "seqlens_k": _int(2)})
    yield of(_qkv("fp32", (1, 2, 9, 32), (1, 2, 12, 32)), softcap=3.0)
    starts = {"cu_seqlens_q": _int(4), "cu_seqlens_k": _int(4)}
    lengths = {"max_seqlen_q": 16, "max_seqlen_k": 24}
    yield of({**_qkv("bf16", (30, 4, 32), (44, 2, 32)), **starts}, **lengths, mask="b", return_lse=True)
    paged = {**_qkv("fp16", (3, 4, 1, 64), (12, 16, 2, 64)), "block_table": _int(3, 4), "seqlens_k": _int(3)}
    yield of(paged)
    flat = {**_qkv("fp32", (19, 4, 32), (24, 4, 2, 32)), "cu_seqlens_q": _int(4)}
    flat |= {"block_table": _int(40), "page_starts": _int(4), "seqlens_k": _int(3)}
    yield of(flat, max_seqlen_q=10, max_seqlen_k=30, causal=True, mask_align="bottom_right")
    latent = _qkv("fp32", (2, 4, 3, 72), (2, 1, 21, 72))
    yield of({name: latent[name] for name in ("q", "k")}, head_dim_v=64, mask="b")
    scales = {"q_descale": _fp32(), "k_descale": _fp32(), "v_descale": _fp32()}
    yield of({**_qkv("fp8", (1, 2, 18, 64), (1, 2, 40, 64)), **scales}, out_dtype="bf16")


def _backward() -> Iterator[OperationRequest]:
    def of(dtype: str, tensors: Descs, **attributes: object) -> OperationRequest:
        q, v = tensors["q"].shape, tensors["v"].shape
        lse = q[:-1] if len(q) == 4 else (q[1], q[0])
        saved = {"o": (*q[:-1], v[-1]), "do": (*q[:-1], v[-1])}
        given = {name: TensorDesc.of(dtype, shape) for name, shape in saved.items()}
        return _of(ATTENTION_BACKWARD, {**tensors, **given, "lse": _fp32(*lse)}, **attributes)

    yield of("fp32", _qkv("fp32", (2, 4, 17, 32), (2, 2, 29, 32)))
    yield of("bf16", _qkv("bf16", (1, 2, 40, 64), (1, 2, 40, 64)), causal=True, deterministic=False)
    bias = TensorDesc.of("fp32", (1, 2, 11, 21))
    yield of("fp32", {**_qkv("fp32", (2, 2, 11, 40), (2, 2, 21, 40)), "bias": bias}, return_dbias=True, dropout_p=0.2)
    starts = {"cu_seqlens_q": _int(4), "cu_seqlens_k": _int(4)}
    lengths = {"max_seqlen_q": 16, "max_seqlen_k": 24}
    yield of("fp32", {**_qkv("fp32", (30, 2, 32), (44, 1, 32)), **starts}, **lengths, mask="b")


def _append() -> Iterator[OperationRequest]:
    def of(dtype: str, new: tuple[int, ...], cache: tuple[int, ...], more: Descs, **attributes: object) -> Request:
        tensors = {name: TensorDesc.of(dtype, new) for name in ("k_new", "v_new")}
        tensors |= {name: TensorDesc.of(dtype, cache) for name in ("k_past", "v_past")}
        batch = new[0] if len(new) == 4 else more["cu_seqlens_q"].shape[0] - 1
        return _of(KV_APPEND, {**tensors, "seqlens_k": _int(batch), **more}, **attributes)

    yield of("fp32", (2, 2, 3, 32), (2, 2, 20, 32), {})
    tables = {"rotary_cos": _fp32(64, 16), "rotary_sin": _fp32(64, 16)}
    q = TensorDesc.of("bf16", (3, 4, 1, 64))
    yield of("bf16", (3, 2, 1, 64), (12, 16, 2, 64), {"block_table": _int(3, 4), **tables, "q": q}, rope="half")
    yield of("fp16", (2, 1, 5, 32), (4, 1, 30, 32), {"cache_index": _int(2), **tables}, rope="interleaved")
    rounded = {name: TensorDesc.of("bf16", (3, 2, 1, 64)) for name in ("k_new", "v_new")}
    rounded |= {"block_table": _int(3, 4), **tables, "k_descale": _fp32(2), "v_descale": _fp32()}
    yield of("fp8", (3, 2, 1, 64), (12, 16, 2, 64), rounded, rope="half")


Request = OperationRequest
_SAMPLES = {ATTENTION: _attention, ATTENTION_BACKWARD: _backward, KV_APPEND: _append}
