"""The GPU benchmark's parts on this host: shapes that are tiny, implementations that run here."""

import dataclasses
import pathlib
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_turboattn import backends

sys.path.append(str(pathlib.Path(__file__).parents[1] / "benchmarks"))
import grid  # noqa: E402
import peers  # noqa: E402
import timing  # noqa: E402

if backends.ffi.load("cpu").reason is not None:
    pytest.skip(f"cpu: {backends.ffi.load('cpu').reason}", allow_module_level=True)


@pytest.fixture(autouse=True)
def implementations_of_this_host(monkeypatch):
    monkeypatch.setattr(peers, "OURS", ("cpu",))
    monkeypatch.setattr(peers, "ROTATED_BYTES", 1 << 16)


CASES = [
    grid.Decode((48,) * 3, heads=(4, 2), page_size=16, head_dim=16),
    grid.Decode((48, 8, 8), heads=(4, 2), page_size=16, head_dim=16),
    grid.Decode((33,) * 2, heads=(4, 2), page_size=16, head_dim=16, kv_dtype="int8"),
    grid.Decode((33,) * 2, heads=(4, 2), page_size=16, head_dim=16, kv_dtype="int4"),
    grid.Decode((33,) * 2, heads=(4, 2), page_size=16, head_dim=16, kv_dtype="float8_e4m3fn"),
    grid.Decode((33,) * 2, heads=(4, 2), page_size=16, head_dim=16, fused=True),
    grid.Decode((33,) * 2, heads=(4, 2), page_size=16, head_dim=16, planned=True),
    grid.Decode((33,) * 2, heads=(4, 2), page_size=16, head_dim=16, batch_invariant=True),
    grid.Prefill(2, 24, (4, 2), 16, True),
    grid.Chunked(2, 8, 24, page_size=16, heads=(4, 2), head_dim=16),
    grid.Mixed(((1, 20), (1, 20), (9, 5)), page_size=16, heads=(4, 2), head_dim=16),
    grid.Append(64, kv_heads=2, head_dim=16, page_size=16),
    grid.Append(64, "int8", kv_heads=2, head_dim=16, page_size=16),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind} {case.name}")
def test_every_peer_is_timed_or_says_why_not(case):
    found = {}
    for name, make in peers.works(case):
        if name == "xla" and case is not CASES[0]:
            continue  # slow to compile
        try:
            found[name] = timing.measure(make(), 3, repeats=2)
        except (peers.Absent, NotImplementedError) as reason:
            assert str(reason)
        except (ValueError, RuntimeError) as error:
            assert "cudnn" in name or "fa3" in name, error
    assert ("cpu" in found) == (case.kind in ("decode", "chunked", "mixed"))
    assert all(times.us > 0 and times.single_us > 0 for times in found.values())
    assert {*found, *peers.outside(case)} <= {*peers.NAMES, "cpu"}
    amount, unit = peers.amount(case)
    assert amount > 0 and unit in ("TB/s", "TFLOP/s") and peers.memory(case) > 0


def test_every_outside_reference_is_timed_or_says_why_not():
    entries = [(case, peer) for case in CASES for peer in peers.outside(case)]
    assert {case.kind for case, _ in entries} == {"decode", "prefill", "chunked", "mixed"}
    found = peers.outside_us(entries, 60.0)
    assert len(found) == len(entries)
    assert all(result if isinstance(result, str) else result > 0 for result in found)


def test_peers_read_the_same_keys_and_values():
    """Our pages, gathered for the dense peers and turned for FlashAttention-3, give the same result."""
    case = CASES[0]
    data = peers.pages(case.lens, 2, 16, 16, "bfloat16")
    assert len(data.tables) > 1
    table = data.tables[1]
    query = peers.random(100, (3, 4, 16))
    work = dict(peers.works(case))["cpu"]()
    ours = np.asarray(work.call(query, work.shared, work.items[1]), np.float32)
    key, value = data.dense(table)
    dense = jax.nn.dot_product_attention(query[:, None], key, value)[:, 0]
    np.testing.assert_allclose(ours, np.asarray(dense, np.float32), atol=0.03)
    pool, _ = data.tokens_first()
    np.testing.assert_array_equal(pool[table].reshape(key.shape), key)


def test_a_call_that_is_left_out_is_seen():
    """The second call does not depend on the first: XLA computes both at once, and the count says so."""
    x = jnp.ones((8, 8))
    work = timing.Work(lambda carry, shared, _: carry + shared @ shared, x, x, ((),), r" dot\(")
    with pytest.raises(timing.Hoisted, match="1 of 3 calls"):
        timing.measure(work, 3)


def test_the_grid():
    names = [(case.kind, case.name) for case in grid.ALL]
    assert len(set(names)) == len(names)
    assert grid.CEILING in [case.name for case in grid.DECODE if case.quick]
    kinds = {case.kind for case in grid.ALL}
    assert kinds == set(peers.WORKS) == {case.kind for case in grid.ALL if case.quick}


def test_amounts():
    """Bytes and FLOPs against the tables of figures: 268 MB of int8 at 8.25 bits, 1.1 TFLOP of a 16k prefill."""
    int8 = grid.Decode((4096,) * 64, kv_dtype="int8")
    assert peers.amount(int8)[0] * 1e12 == 64 * 4096 * 2 * 8 * (128 + 4)
    full = grid.Prefill(1, 16384, (16, 16), 128, False)
    assert peers.amount(full)[0] == pytest.approx(4 * 16 * 128 * 16384**2 / 1e12)
    causal = dataclasses.replace(full, is_causal=True)
    assert peers.amount(causal)[0] / peers.amount(full)[0] == pytest.approx(0.5, rel=1e-3)


def test_patterns_are_regular_expressions():
    for name in ("cuda", "cuda:sm80", "pallas", "xla"):
        assert re.compile(peers.pattern(name))
