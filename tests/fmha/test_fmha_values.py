"""What lengths and tables hold is checked before a launch: each mistake has its rule, and names the culprit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fmha_requests import (
    ROTARY,
    VARLEN,
    Array,
    append_of,
    append_paged_of,
    batch_of,
    desc,
    drawn,
    ints,
    paged_of,
    parsed,
    prefill_of,
    varlen_of,
)

from tilewright_fmha.problem.integer_operands import check_values, value_operands
from tilewright_fmha.problem.problem import FmhaProblem
from tilewright_fmha.references.samples import fmha_samples
from tilewright_fmha.vocabulary import ATTENTION, KV_APPEND, OPERATIONS
from tilewright_kit.contract.problem import OperationRequest
from tilewright_kit.types.errors import InvalidArgumentError


def of(**values: Any) -> dict[str, Array]:
    return {name: np.array(value, np.int32) for name, value in values.items()}


def refused(problem: FmhaProblem, values: dict[str, Array], field: str, rule: str, value: int) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        check_values(problem, values)
    error = caught.value
    assert (error.field, error.rule, error.value) == (field, rule, str(value)), str(error)
    assert error.reason and error.fix


@pytest.mark.parametrize("operation", OPERATIONS)
def test_content_that_makes_sense_is_taken(operation: str) -> None:
    for seed in range(5):
        for request in fmha_samples(operation):
            problem = parsed(operation, request.inputs, **request.attributes)
            content = drawn(request, seed)
            names = value_operands(problem)
            assert set(names) == {name for name in content if content[name].dtype == np.int32 and name != "rng"}
            check_values(problem, {name: content[name] for name in names})


def test_what_cannot_be_read_is_not_looked_at() -> None:
    check_values(parsed(ATTENTION, paged_of()), {})
    check_values(parsed(ATTENTION, paged_of()), of(block_table=np.full((3, 4), 99)))


@pytest.mark.parametrize(
    "values, field, rule, value",
    [
        ({"cu_seqlens_q": [1, 5, 5, 20]}, "cu_seqlens_q[0]", "cu_seqlens_ascending", 1),
        ({"cu_seqlens_q": [0, 6, 5, 9]}, "cu_seqlens_q[2]", "cu_seqlens_ascending", 5),
        ({"cu_seqlens_q": [0, 8, 16, 21]}, "cu_seqlens_q[3]", "cu_seqlens_ascending", 21),
        ({"cu_seqlens_k": [0, -1, 3, 4]}, "cu_seqlens_k[1]", "cu_seqlens_ascending", -1),
        ({"cu_seqlens_q": [0, 3, 12, 13]}, "cu_seqlens_q[2]", "seqlen_range", 9),
        ({"cu_seqlens_k": [0, 13, 14, 15]}, "cu_seqlens_k[1]", "seqlen_range", 13),
    ],
)
def test_starts_must_ascend_within_what_there_is(values: Any, field: str, rule: str, value: int) -> None:
    refused(parsed(ATTENTION, varlen_of(), **VARLEN), of(**values), field, rule, value)


def test_sequences_with_gaps_behind_them_fit_between_their_starts() -> None:
    tensors = {**varlen_of(), "seqlens_q": ints(3), "seqlens_k": ints(3)}
    problem = parsed(ATTENTION, tensors, **VARLEN)
    starts = {"cu_seqlens_q": [0, 10, 10, 20], "cu_seqlens_k": [0, 10, 20, 30]}
    check_values(problem, of(**starts, seqlens_q=[8, 0, 3], seqlens_k=[10, 0, 1]))
    refused(problem, of(**starts, seqlens_q=[8, 1, 3]), "seqlens_q[1]", "seqlen_range", 1)
    refused(problem, of(**starts, seqlens_k=[1, 11, 3]), "seqlens_k[1]", "seqlen_range", 11)
    refused(problem, of(**starts, seqlens_q=[9, 0, 3]), "cu_seqlens_q[1]", "seqlen_range", 9)


@pytest.mark.parametrize("name, room", [("seqlens_q", 5), ("seqlens_k", 7)])
@pytest.mark.parametrize("bad", [-1, 8, 2**31 - 1])
def test_lengths_must_fit_their_items(name: str, room: int, bad: int) -> None:
    problem = parsed(ATTENTION, {**batch_of(), name: ints(2)})
    check_values(problem, of(**{name: [0, room]}))
    refused(problem, of(**{name: [0, bad]}), f"{name}[1]", "seqlen_range", bad)


def test_only_pages_in_use_are_looked_at() -> None:
    problem = parsed(ATTENTION, paged_of())
    table = np.full((3, 4), -7, np.int32)
    table[0, :3], table[2, :1] = [9, 0, 4], [9]
    lengths = np.array([17, 0, 8], np.int32)
    check_values(problem, {"block_table": table, "seqlens_k": lengths})
    for bad in (-1, 10):
        table[0, 1] = bad
        refused(problem, {"block_table": table, "seqlens_k": lengths}, "block_table[1]", "block_table_range", bad)
    table[0, 1] = 0
    refused(problem, {"block_table": table, "seqlens_k": lengths + 8}, "block_table[3]", "block_table_range", -7)
    refused(problem, {"block_table": table, "seqlens_k": lengths + 16}, "seqlens_k[0]", "seqlen_range", 33)


def test_flat_tables_are_cut_where_they_say() -> None:
    tensors = {**prefill_of(), "block_table": ints(6), "page_starts": ints(4)}
    problem = parsed(ATTENTION, tensors, max_seqlen_q=4)
    good = of(cu_seqlens_q=[0, 4, 4, 8], seqlens_k=[9, 0, 30], page_starts=[0, 2, 2, 6], block_table=[1, 2, 3, 4, 5, 6])
    check_values(problem, good)
    refused(problem, good | of(seqlens_k=[17, 0, 30]), "page_starts[1]", "seqlen_range", 2)
    refused(problem, good | of(page_starts=[0, 3, 2, 6]), "page_starts", "cu_seqlens_ascending", 6)
    refused(problem, good | of(page_starts=[0, 2, 2, 7]), "page_starts", "cu_seqlens_ascending", 7)
    refused(problem, good | of(block_table=[1, 2, 3, 10, 5, 6]), "block_table[3]", "block_table_range", 10)


def test_items_of_a_cache_exist() -> None:
    tensors = {**batch_of(), "k": desc("fp16", 6, 2, 7, 16), "v": desc("fp16", 6, 2, 7, 24), "cache_index": ints(2)}
    problem = parsed(ATTENTION, tensors)
    check_values(problem, of(cache_index=[5, 5]))
    refused(problem, of(cache_index=[0, 6]), "cache_index[1]", "cache_index_range", 6)
    refused(problem, of(cache_index=[-1, 0]), "cache_index[0]", "cache_index_range", -1)


def test_two_sequences_do_not_append_to_one_item() -> None:
    tensors = {**append_of(), "k_past": desc("fp16", 6, 2, 20, 16), "v_past": desc("fp16", 6, 2, 20, 24)}
    problem = parsed(KV_APPEND, {**tensors, "cache_index": ints(2)})
    check_values(problem, of(cache_index=[5, 1], seqlens_k=[0, 17]))
    refused(problem, of(cache_index=[5, 5], seqlens_k=[0, 1]), "cache_index[1]", "cache_index_range", 5)


def test_rows_are_appended_where_there_is_room() -> None:
    problem = parsed(KV_APPEND, append_of())
    check_values(problem, of(seqlens_k=[0, 17]))
    refused(problem, of(seqlens_k=[0, 18]), "seqlens_k[1]", "cache_full", 18)
    refused(problem, of(seqlens_k=[-2, 1]), "seqlens_k[0]", "seqlen_range", -2)


def test_positions_have_a_row_in_the_rotary_tables() -> None:
    tables = {name: desc("fp32", 10, 4) for name in ROTARY}
    problem = parsed(KV_APPEND, {**append_of(), **tables})
    check_values(problem, of(seqlens_k=[0, 7]))
    refused(problem, of(seqlens_k=[8, 1]), "seqlens_k[0]", "rotary_positions", 8)


def test_prompts_of_different_lengths_are_appended_by_their_own() -> None:
    tensors = {**append_of(), "k_new": desc("fp16", 9, 2, 16), "v_new": desc("fp16", 9, 2, 24), "cu_seqlens_q": ints(3)}
    problem = parsed(KV_APPEND, tensors, max_seqlen_q=6)
    check_values(problem, of(cu_seqlens_q=[0, 6, 9], seqlens_k=[14, 17]))
    refused(problem, of(cu_seqlens_q=[0, 6, 9], seqlens_k=[14, 18]), "seqlens_k[1]", "cache_full", 18)
    refused(problem, of(cu_seqlens_q=[0, 7, 9], seqlens_k=[0, 0]), "cu_seqlens_q[1]", "seqlen_range", 7)


def test_a_page_that_is_written_belongs_to_one_sequence() -> None:
    problem = parsed(KV_APPEND, append_paged_of())
    table = np.array([[0, 1, -1, -1], [0, 2, -1, -1], [3, -1, -1, -1]], np.int32)
    # Sequences 0 and 1 share their first page, which is full: both append behind it.
    check_values(problem, of(block_table=table, seqlens_k=[8, 9, 0]))
    refused(problem, of(block_table=table, seqlens_k=[7, 9, 0]), "block_table", "page_shared", 0)
    table[2, 0] = 1
    refused(problem, of(block_table=table, seqlens_k=[8, 9, 0]), "block_table", "page_shared", 1)
    table[2] = [4, 4, -1, -1]
    refused(problem, of(block_table=table, seqlens_k=[8, 9, 6]), "block_table", "page_shared", 4)
    table[2] = [4, 9, -1, -1]
    check_values(problem, of(block_table=table, seqlens_k=[8, 9, 6]))
    refused(problem, of(block_table=table, seqlens_k=[30, 9, 6]), "seqlens_k[0]", "cache_full", 30)
    refused(problem, of(block_table=table, seqlens_k=[14, 9, 6]), "block_table[2]", "block_table_range", -1)


def test_a_batch_of_none_is_fine() -> None:
    tensors = {name: item for name, item in paged_of().items() if name in ("k", "v")}
    tensors |= {"q": desc("fp16", 0, 4, 1, 16), "block_table": ints(0, 4), "seqlens_k": ints(0)}
    values = {"block_table": np.zeros((0, 4), np.int32), "seqlens_k": np.zeros(0, np.int32)}
    check_values(parsed(ATTENTION, tensors), values)
    request = OperationRequest(ATTENTION, {**varlen_of(), "cu_seqlens_q": ints(1), "cu_seqlens_k": ints(1)}, {}, VARLEN)
    problem = parsed(ATTENTION, request.inputs, **VARLEN)
    check_values(problem, of(cu_seqlens_q=[0], cu_seqlens_k=[0]))
