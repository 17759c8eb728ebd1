"""Attention for static analysis: which problem a text means for a kernel, and what products its kernels compute."""

from __future__ import annotations

from math import ceil, prod

from tilewright_fmha.config.config import FmhaConfig
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.vocabulary import BiasKind, Family, MaskKind, Mode
from tilewright_kit.contract.abilities import Product, WorkShare
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.requests.attributes import refuse
from tilewright_kit.types.tensor import TensorDesc

__all__ = ["fmha_analysis_request", "fmha_analysis_shape", "fmha_product", "fmha_share"]

_FORM = "B,HQ,HK,SQ,SK,D,DV"


def fmha_analysis_shape(config: FmhaConfig) -> str:
    """A layer of a language model: 32 heads, 4096 queries and keys."""
    q, v = config.hdim
    return f"1,32,32,4096,4096,{q},{v}"


def fmha_analysis_request(config: FmhaConfig, shape: str) -> OperationRequest:
    """The plain attention of ``B,HQ,HK,SQ,SK,D,DV``, or its gradients, in the kernel's types and with its mask.

    Raises ``InvalidArgumentError``: for a malformed shape, and for kernels of caches and of sequences of different
    lengths, whose work depends on what tables hold.
    """
    plain = config.mode is Mode.BATCH and not config.paged and config.bias is BiasKind.NONE
    if config.family not in (Family.FWD, Family.SPLITKV, Family.DQ_DK_DV) or not plain:
        fix = "take a kernel of fwd, fwd_splitkv or bwd_dq_dk_dv for items of one size, without pages or a bias"
        raise refuse("the kernel's work depends on data", "kernel", config.name, "analysis_kernel", fix)
    try:
        batch, heads_q, heads_k, seq_q, seq_k, q, v = (int(item) for item in shape.split(","))
        good = min(batch, heads_q, heads_k, seq_q, seq_k, q, v) >= 1 and heads_q % heads_k == 0
    except ValueError:
        good = False
    if not good:
        fix = f"write it as {_FORM}, with HQ a multiple of HK"
        raise refuse("this is no problem of attention", "shape", shape, "analysis_shape", fix)
    sizes = {"q": (heads_q, seq_q, q), "k": (heads_k, seq_k, q), "v": (heads_k, seq_k, v)}
    inputs = {
        name: TensorDesc.of(config.q if name == "q" else config.kv, (batch, *size)) for name, size in sizes.items()
    }
    attributes: dict[str, bool | int | float | str] = {}
    if config.family is Family.DQ_DK_DV:
        inputs |= {name: TensorDesc.of(config.o, (batch, heads_q, seq_q, v)) for name in ("o", "do")}
        inputs["lse"] = TensorDesc.of("fp32", (batch, heads_q, seq_q))
    else:
        attributes |= {"out_dtype": config.o.value, "return_lse": config.lse}
    if config.mask is MaskKind.CAUSAL:
        attributes["causal"] = True
    elif config.mask is MaskKind.WINDOW:
        attributes |= {"window_left": max(seq_k // 8, 1), "window_right": 0}
    return OperationRequest(config.operation, inputs, {}, attributes)


def fmha_product(problem: FmhaProblem) -> Product:
    """Both products of a forward kernel, or all five of gradients, as one: scores by queries and keys, as deep as all
    of them together.
    """
    operands = [(item.desc, item.role.value) for item in problem.operands]
    q, v = problem.hdim_q, problem.hdim_v
    return Product(
        m=problem.seq_q,
        n=problem.seq_k,
        k=3 * q + 2 * v if problem.family is Family.DQ_DK_DV else q + v,
        batch=problem.batch * problem.heads_q,
        dtype=problem.dtype.q,
        dtype_out=problem.dtype.o,
        bytes_in=sum(prod(desc.shape) * desc.dtype.bytes for desc, role in operands if role == "input"),
        bytes_out=sum(prod(desc.shape) * desc.dtype.bytes for desc, role in operands if role == "output"),
    )


def fmha_share(problem: FmhaProblem, config: FmhaConfig, workgroups: int) -> WorkShare:
    """Forward, a tile of queries and all keys that any of them sees, or a part of these; of gradients, a tile of keys
    and the queries that see any of them. All work is in whole blocks of m0 queries and n0 keys.
    """
    q, v, m0, n0 = problem.hdim_q, problem.hdim_v, config.m0, config.n0
    gradient = problem.family is Family.DQ_DK_DV
    depth = 3 * config.hdim[0] + 2 * config.hdim[1] if gradient else sum(config.hdim)
    seen, whole = _blocks(problem, m0, n0)
    blocks = seen * problem.batch * problem.heads_q
    element = config.q.bytes
    begin = n0 * sum(config.hdim) + m0 * sum(config.hdim) if gradient else m0 * config.hdim[0] + n0 * sum(config.hdim)
    end = n0 * sum(config.hdim) if gradient else m0 * config.hdim[1]
    return WorkShare(
        slices=workgroups,
        flops=2.0 * blocks * m0 * n0 * depth / workgroups,
        useful_flops=2.0 * problem.pairs * (3 * q + 2 * v if gradient else q + v),
        bytes_begin=begin * element,
        bytes_end=end * config.o.bytes,
        turn_flops=2.0 * m0 * n0 * depth,
        cut=1.0 - whole / seen if seen else 0.0,
    )


def _blocks(problem: FmhaProblem, m0: int, n0: int) -> tuple[int, int]:
    """Blocks of scores of a head that have a visible pair, which are those that kernels compute; and those of whose
    pairs all are visible, where queries end or not.
    """
    mask, found, whole = problem.mask, 0, 0
    offset = mask.offset(problem.seq_q, problem.seq_k)
    for first in range(0, problem.seq_q, m0):
        last = min(first + m0, problem.seq_q) - 1
        end = problem.seq_k if mask.right < 0 else min(max(last + offset + mask.right + 1, 0), problem.seq_k)
        begin = 0 if mask.left < 0 else max(first + offset - mask.left, 0) // n0
        found += max(ceil(end / n0) - begin, 0)
        all_end = problem.seq_k if mask.right < 0 else min(max(first + offset + mask.right + 1, 0), problem.seq_k)
        all_begin = 0 if mask.left < 0 else ceil(max(last + offset - mask.left, 0) / n0)
        whole += max(all_end // n0 - all_begin, 0)
    return found, whole
