"""core/heuristics: how a paged call is cut up for CUDA, from static sizes. Pure, so the CPU module shows it too."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jax_turboattn.backends import ffi

if ffi.load("cpu").reason is not None:
    pytest.skip(f"cpu: {ffi.load('cpu').reason}", allow_module_level=True)

SMS = 132  # kPrefillSms
BLOCK, SPLIT, MOST_SPLITS = 64, 1024, 32  # kDecodeKeys, kInvariantSplit, kMaxInvariantSplits


def plan(**sizes):
    common = dict(uniform_q_len=0, num_heads=32, num_kv_heads=8, value_dim=128, max_keys=8192, batch_invariant=False)
    return ffi.load("cpu").module.paged_plan(**common | sizes)


def test_one_token_a_sequence_is_decode_alone():
    for sizes in (dict(batch=64, num_tokens=64), dict(batch=64, num_tokens=64, uniform_q_len=1)):
        found = plan(**sizes)
        assert found["runs_decode"] and not found["runs_prefill"]
        assert found["row_tile"] == 8  # 4 heads a group


@pytest.mark.parametrize("heads, tokens, tile", [((32, 8), 1, 8), ((32, 8), 4, 16), ((64, 8), 2, 16), ((32, 1), 1, 16)])
def test_rows_of_a_decode_unit(heads, tokens, tile):
    found = plan(batch=2, num_tokens=2 * tokens, uniform_q_len=tokens, num_heads=heads[0], num_kv_heads=heads[1])
    assert (found["runs_decode"], found["row_tile"]) == (True, tile)


def test_more_tokens_than_a_unit_holds_are_prefill():
    found = plan(batch=2, num_tokens=10, uniform_q_len=5)  # 5 tokens x 4 heads > 16 rows
    assert found["runs_prefill"] and not found["runs_decode"]


def test_a_mixed_batch_runs_both():
    found = plan(batch=64, num_tokens=64 + 512)
    assert found["runs_decode"] and found["runs_prefill"]
    assert found["decode_q_len"] == 4


def test_decode_appends_where_it_runs_alone():
    assert plan(batch=64, num_tokens=64)["decode_appends"]
    assert plan(batch=300, num_tokens=128)["decode_appends"]
    assert not plan(batch=300, num_tokens=129)["decode_appends"]  # all could be one sequence's, in many units
    assert not plan(batch=64, num_tokens=65)["decode_appends"]  # there is a prefill kernel too
    assert not plan(batch=64, num_tokens=64, batch_invariant=True)["decode_appends"]
    assert not plan(batch=64, num_tokens=64, num_heads=0)["decode_appends"]  # nothing runs


@pytest.mark.parametrize(
    "heads, tokens, units, cluster",
    [
        ((32, 8), 1, 8, 16),
        ((64, 8), 1, 8, 16),
        ((128, 8), 1, 8, 16),  # 16 rows a unit
        ((32, 8), 3, 8, 16),
        ((40, 10), 1, 10, 16),
        ((32, 32), 1, 32, 8),
        ((32, 1), 1, 0, 0),  # 2 tiles: a card would be mostly idle
        ((32, 4), 1, 0, 0),
        ((64, 64), 1, 0, 0),  # so many units fill one without
    ],
)
def test_one_sequence_has_a_cluster_a_unit(heads, tokens, units, cluster):
    sizes = dict(batch=1, num_tokens=tokens, num_heads=heads[0], num_kv_heads=heads[1])
    found = plan(**sizes, uniform_q_len=tokens)
    assert (found["decode_units"], found["decode_cluster"]) == (units, cluster)
    if tokens == 1:
        packed = plan(**sizes)
        assert (packed["decode_units"], packed["decode_cluster"]) == (units, cluster)


def test_clusters_are_for_one_short_sequence_and_bits_that_may_depend_on_the_batch():
    assert plan(batch=1, num_tokens=1)["decode_cluster"] == 16
    assert plan(batch=1, num_tokens=1, max_keys=32768)["decode_cluster"] == 0  # two blocks an SM read faster
    assert plan(batch=2, num_tokens=2)["decode_cluster"] == 0  # their lengths may differ
    assert plan(batch=1, num_tokens=2)["decode_cluster"] == 0  # there is a prefill kernel too
    assert plan(batch=1, num_tokens=1, batch_invariant=True)["decode_cluster"] == 0


def test_workspace_does_not_grow_with_batch_or_context():
    small, large = plan(batch=2, num_tokens=2), plan(batch=4096, num_tokens=4096, max_keys=1 << 20)
    assert small["workspace_bytes"] == large["workspace_bytes"] < 8 << 20


def test_few_rows_on_a_long_context_are_split():
    found = plan(batch=1, num_tokens=128, uniform_q_len=128, max_keys=131072)
    assert found["prefill_tiles"] == 4 * 8 and found["prefill_splits"] == 264 // 32
    assert plan(batch=1, num_tokens=128, uniform_q_len=128, max_keys=1000)["prefill_splits"] == 1  # merging costs more
    assert plan(batch=4, num_tokens=4 * 4096, uniform_q_len=4096, max_keys=4096)["prefill_splits"] == 1  # fills a card
    assert (
        plan(batch=1, num_tokens=128, uniform_q_len=128, max_keys=131072, batch_invariant=True)["prefill_splits"] == 1
    )


@pytest.mark.parametrize("dim, rows", [(64, 192), (128, 128), (256, 128)])
def test_workspace_holds_the_parts_of_either_family(dim, rows):
    few = dict(batch=1, num_tokens=128, uniform_q_len=128, value_dim=dim)
    split, whole = plan(**few, max_keys=131072), plan(**few, max_keys=131072, batch_invariant=True)
    assert (split["prefill_parts"], whole["prefill_parts"]) == (4 * SMS, 0)
    floats = max(4 * SMS * rows, split["prefill_tiles"] * split["prefill_splits"] * min(128, 16384 // dim)) * (dim + 2)
    assert split["workspace_bytes"] >= floats * 4 and whole["workspace_bytes"] == 0
    assert plan(**few, max_keys=1000)["prefill_parts"] == 0
    # As many tiles as fill the card eight times, of which none can be long, or some may be; one long sequence among 64.
    assert plan(batch=4, num_tokens=4096, max_keys=8192)["prefill_parts"] == 0
    assert plan(batch=5, num_tokens=4096 + 64, max_keys=131072)["prefill_parts"] == 4 * SMS
    assert plan(batch=64, num_tokens=64 + 128, max_keys=131072)["prefill_parts"] == 4 * SMS


def test_tiles_of_one_packed_sequence_are_counted_exactly():
    assert plan(batch=1, num_tokens=128, max_keys=131072)["prefill_tiles"] == 4 * 8
    assert plan(batch=1, num_tokens=129, max_keys=131072)["prefill_tiles"] == 5 * 8


@pytest.mark.parametrize("empty", [dict(batch=4, num_tokens=0), dict(batch=4, num_tokens=4, num_heads=0)])
def test_nothing_to_do(empty):
    found = plan(**empty)
    assert not found["runs_decode"] and not found["runs_prefill"] and found["workspace_bytes"] == 0


def test_prefill_takes_every_sequence_without_a_decode_kernel():
    for sizes in (dict(), dict(uniform_q_len=1), dict(batch_invariant=True), dict(num_tokens=80)):
        found = plan(**dict(batch=64, num_tokens=64, has_decode=False) | sizes)
        assert found["runs_prefill"] and not found["runs_decode"] and not found["decode_appends"]


def test_rows_without_sequences_are_written_by_decode():
    assert plan(batch=0, num_tokens=7)["runs_decode"]


@pytest.mark.parametrize("seed", range(20))
def test_batch_invariant_parts_fit_their_slots(seed):
    """The device counts the parts of each sequence by its own length; slots are allocated from static sizes."""
    rng = np.random.default_rng(seed)
    kv_heads, group = int(rng.integers(1, 9)), int(rng.choice([1, 2, 3, 4, 7, 8, 12, 16, 71, 128]))
    batch, max_keys = int(rng.integers(1, 9)), int(rng.choice([64, 1000, 1024, 5000, 32768, 40000, 1 << 20]))
    found = plan(
        batch=batch, num_tokens=64, num_heads=kv_heads * group, num_kv_heads=kv_heads, max_keys=max_keys,
        batch_invariant=True,
    )  # fmt: skip
    parts = 0
    for _ in range(batch):
        prefix = int(rng.integers(0, max_keys + 1))
        runs = (prefix, int(rng.integers(0, max_keys - prefix + 1)))
        blocks = max(1, sum(math.ceil(keys / BLOCK) + (keys > 0) for keys in runs))  # a window may cut a block in two
        part = SPLIT * max(1, math.ceil(blocks * BLOCK / (SPLIT * MOST_SPLITS))) // BLOCK
        q_len = int(rng.integers(1, found["decode_q_len"] + 1))
        parts += kv_heads * math.ceil(q_len * group / found["row_tile"]) * math.ceil(blocks / part)
    assert parts <= found["slots"]
