"""The primitives under JAX's transformations: vmap equals a loop, scan, checkpoint, export, lowering for other platforms."""

import functools
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jax_turboattn as ta
from jax_turboattn import backends
from jax_turboattn.spec import PLAN_SHAPE

V, B, T, H, K, D, P, N, M, L = 2, 3, 5, 4, 2, 16, 8, 8, 2, 2


@pytest.fixture(params=["xla", "cpu"], autouse=True)
def implementation(request, monkeypatch):
    if request.param != "xla" and backends.ffi.load(request.param).reason is not None:
        pytest.skip(backends.ffi.load(request.param).reason)
    monkeypatch.setenv("JAX_TURBOATTN_IMPLEMENTATION", request.param)
    return request.param


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def filled(dtype="float32", num_layers=None, seed=0):
    cache = ta.PagedKVCache.create(N, K, D, page_size=P, dtype=dtype, param_dtype=jnp.float32, num_layers=num_layers)
    table = jnp.arange(N, dtype=jnp.int32)[None]
    for layer in [None] if num_layers is None else range(num_layers):
        new = normal(seed + 7 * (layer or 0), N * P, K, D)
        full, offsets = jnp.array([N * P], jnp.int32), jnp.array([0, N * P], jnp.int32)
        cache = ta.append_kv(cache, new, new[::-1], table, full, offsets, layer=layer)
    return cache


TABLES = jnp.asarray(np.random.default_rng(5).permutation(N)[: B * M].reshape(B, M).astype(np.int32))
LENS = jnp.array([[3, 16, 9], [1, 0, 12]], jnp.int32)
OFFSETS = jnp.array([[0, 2, 3, 5], [0, 1, 1, 4]], jnp.int32)
Q = normal(1, V, T, H, D)
NEW = normal(2, V, T, K, D)


def same(got, want):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want)
    for a, b in zip(got, want):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2e-6, atol=2e-6)


def check_vmap(function, in_axes, *arguments):
    """vmap over `in_axes` against a Python loop; both leave unmapped arguments alone."""
    take = lambda i: [jax.tree.map(lambda x: x[i], a) if d == 0 else a for a, d in zip(arguments, in_axes)]  # noqa: E731
    looped = [function(*take(i)) for i in range(V)]
    want = jax.tree.map(lambda *xs: jnp.stack(xs), *looped)
    same(jax.vmap(function, in_axes)(*arguments), want)
    same(jax.jit(jax.vmap(function, in_axes))(*arguments), want)


def stack_caches(*caches):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *caches)


paged = functools.partial(ta.paged_attention, return_residual=True)


@pytest.mark.parametrize("dtype", ["float32", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("mapped_cache", [False, True])
def test_vmap_of_paged_attention(dtype, mapped_cache):
    cache = stack_caches(filled(dtype), filled(dtype, seed=3)) if mapped_cache else filled(dtype)
    check_vmap(paged, (0, 0 if mapped_cache else None, None, 0, 0), Q, cache, TABLES, LENS, OFFSETS)


def test_vmap_of_paged_attention_over_layers():
    cache = stack_caches(filled(num_layers=L), filled(num_layers=L, seed=3))
    layers = jnp.array([1, 0], jnp.int32)
    function = lambda q, c, n, o, i: paged(q, c, TABLES, n, o, layer=i)  # noqa: E731
    check_vmap(function, (0, 0, 0, 0, 0), Q, cache, LENS, OFFSETS, layers)
    check_vmap(function, (0, None, 0, 0, 0), Q, filled(num_layers=L), LENS, OFFSETS, layers)


def test_vmap_of_operands_that_all_sequences_share():
    sinks = normal(3, V, H)
    function = lambda q, s: paged(q, filled(), TABLES, LENS[0], OFFSETS[0], sinks=s)  # noqa: E731
    check_vmap(function, (None, 0), Q[0], sinks)


def test_vmap_of_a_traced_window():
    windows = jnp.array([[2, 0], [-1, 1]], jnp.int32)
    function = lambda w: paged(Q[0], filled(), TABLES, LENS[0], OFFSETS[0], local_window_size=w)  # noqa: E731
    check_vmap(function, (0,), windows)


def test_vmap_of_paged_decode():
    function = functools.partial(ta.paged_decode, return_residual=True)
    check_vmap(function, (0, None, None, 0), normal(4, V, B, H, D), filled(), TABLES, LENS)


@pytest.mark.parametrize("dtype", ["float32", "int4"])
@pytest.mark.parametrize("mapped_cache", [False, True])
def test_vmap_of_append_and_step(dtype, mapped_cache):
    cache = stack_caches(filled(dtype), filled(dtype, seed=3)) if mapped_cache else filled(dtype)
    axis = 0 if mapped_cache else None
    rope = ta.RopeConfig(dim=16)
    append = lambda c, k, n, o: ta.append_kv(c, k, k, TABLES, n, o, rope=rope)  # noqa: E731
    check_vmap(append, (axis, 0, 0, 0), cache, NEW, LENS, OFFSETS)
    step = lambda c, q, k, n, o: ta.paged_attention_step(  # noqa: E731
        q, k, k, c, TABLES, n, o, rope=rope, return_residual=True
    )
    check_vmap(step, (axis, 0, 0, 0, 0), cache, Q, NEW, LENS, OFFSETS)


def test_vmap_of_dense_and_ragged():
    q, k = normal(1, V, B, T, H, D), normal(2, V, B, T, K, D)
    lens = jnp.array([[5, 3, 0], [1, 2, 5]], jnp.int32)
    dense = lambda q, k, n: ta.attention(q, k, k, is_causal=True, key_value_seq_lengths=n, return_residual=True)  # noqa: E731
    check_vmap(dense, (0, 0, 0), q, k, lens)
    check_vmap(dense, (0, None, None), q, k[0], lens[0])
    ragged = lambda q, k, o: ta.ragged_attention(q, k, k, o, o, return_residual=True)  # noqa: E731
    check_vmap(ragged, (0, 0, 0), Q, NEW, OFFSETS)


def test_vmap_of_gather_copy_merge():
    caches = stack_caches(filled("int8"), filled("int8", seed=3))
    check_vmap(lambda c, n: ta.gather_kv(c, TABLES, n), (0, 0), caches, LENS)
    check_vmap(lambda c, n: ta.gather_kv(c, TABLES, n), (None, 0), filled("int8"), LENS)
    source, destination = jnp.array([[0, 1], [2, -1]], jnp.int32), jnp.array([[4, 5], [6, 7]], jnp.int32)
    check_vmap(ta.copy_pages, (0, 0, 0), caches, source, destination)
    check_vmap(ta.copy_pages, (None, 0, 0), filled("int8"), source, destination)
    outs, lses = normal(1, V, 3, T, H, D), normal(2, V, 3, T, H)
    check_vmap(ta.merge_partials, (0, 0), outs, lses)
    check_vmap(lambda o, n: ta.merge_partials(o, n, sinks=normal(3, H)), (0, None), outs, lses[0])


def test_scan_and_checkpoint():
    cache = filled()
    want = ta.paged_decode(Q[0, :B], cache, TABLES, LENS[0])
    _, got = jax.lax.scan(lambda c, n: (c, ta.paged_decode(Q[0, :B], cache, TABLES, n)), 0, LENS)
    same(got[0], want)
    same(jax.checkpoint(ta.paged_decode)(Q[0, :B], cache, TABLES, LENS[0]), want)


# Plans change speed alone. What vmap folds into one call plans for itself, wherever its plan was made.


def planned(q, cache, n, plan=None):
    plan = ta.make_plan(q, cache, TABLES, n, None) if plan is None else plan
    return ta.paged_decode(q, cache, TABLES, n, plan=plan, return_residual=True)


def test_plan_under_jit_scan_and_export():
    cache, q = filled(), Q[0, :B]
    plan = jax.jit(lambda q, c: ta.make_plan(q, c, TABLES, LENS[0], None))(q, cache)
    assert plan.data.shape == PLAN_SHAPE and plan.data.dtype == jnp.int32
    want = ta.paged_decode(q, cache, TABLES, LENS[0], return_residual=True)
    same(planned(q, cache, LENS[0]), want)
    same(jax.jit(lambda q, p: planned(q, cache, LENS[0], p))(q, plan), want)
    _, layers = jax.lax.scan(lambda p, x: (p, planned(x, cache, LENS[0], p)), plan, jnp.stack([q, q]))
    same(jax.tree.map(lambda x: x[1], layers), want)
    flat, structure = jax.tree.flatten((q, cache, LENS[0]))
    exported = jax.export.export(
        jax.jit(lambda *xs: planned(*jax.tree.unflatten(structure, xs))), disabled_checks=ta.export_disabled_checks()
    )(*flat)
    same(jax.export.deserialize(exported.serialize()).call(*flat), want)


def test_plan_under_vmap():
    cache, q = filled(), normal(4, V, B, H, D)
    check_vmap(planned, (0, None, 0), q, cache, LENS)
    check_vmap(planned, (0, None, None), q, cache, LENS[0])
    plan = ta.make_plan(q[0], cache, TABLES, LENS[0], None)
    check_vmap(planned, (0, None, None, None), q, cache, LENS[0], plan)
    check_vmap(planned, (None, None, None, 0), q[0], cache, LENS[0], jax.tree.map(lambda x: jnp.stack([x, x]), plan))


def test_plan_of_the_fused_step():
    cache, rope = filled(), ta.RopeConfig(dim=16)

    def step(q, k, n, o, with_plan):
        plan = ta.make_plan(q, cache, TABLES, n, o) if with_plan else None
        return ta.paged_attention_step(q, k, k, cache, TABLES, n, o, rope=rope, plan=plan, return_residual=True)

    same(step(Q[0], NEW[0], LENS[0], OFFSETS[0], True), step(Q[0], NEW[0], LENS[0], OFFSETS[0], False))
    check_vmap(functools.partial(step, with_plan=True), (0, 0, 0, 0), Q, NEW, LENS, OFFSETS)


@pytest.mark.parametrize(
    "how", [dict(batch_invariant=True), dict(local_window_size=(3, 0)), dict(cp_size=2), dict(is_causal=False)], ids=str
)
def test_plan_of_calls_that_read_none(how):
    arguments = (Q[0, :B], filled(), TABLES, LENS[0])
    plan = ta.make_plan(*arguments, None, **how)
    same(ta.paged_decode(*arguments, plan=plan, **how), ta.paged_decode(*arguments, **how))
    shared = dict(shared_prefix=(jnp.array([7], jnp.int32), 5))
    plan = ta.make_plan(*arguments, None, **shared)
    same(ta.paged_decode(*arguments, plan=plan, **shared), ta.paged_decode(*arguments, **shared))


def test_export_round_trip():
    cache = filled("int8")
    function = lambda q, c, n: ta.paged_decode(q, c, TABLES, n)  # noqa: E731
    arguments = Q[0, :B], cache, LENS[0]
    flat, structure = jax.tree.flatten(arguments)
    exported = jax.export.export(
        jax.jit(lambda *xs: function(*jax.tree.unflatten(structure, xs))), disabled_checks=ta.export_disabled_checks()
    )(*flat)
    restored = jax.export.deserialize(exported.serialize())
    same(restored.call(*flat), function(*arguments))


def test_an_exported_program_may_be_the_first_of_a_process(tmp_path):
    exported = jax.export.export(
        jax.jit(lambda q, k, v: ta.attention(q, k, v)), disabled_checks=ta.export_disabled_checks()
    )(*(jax.ShapeDtypeStruct((1, 4, 2, 16), jnp.float32),) * 3)
    path = tmp_path / "program"
    path.write_bytes(exported.serialize())
    program = f"""
import pathlib, jax, jax_turboattn, jax.numpy as jnp
ones = jnp.ones((1, 4, 2, 16))
print(float(jax.export.deserialize(bytearray(pathlib.Path({str(path)!r}).read_bytes())).call(ones, ones, ones).sum()))
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "128.0", done.stderr


def test_lowering_for_another_platform_takes_its_own_rule(implementation, monkeypatch):
    monkeypatch.delenv("JAX_TURBOATTN_IMPLEMENTATION")
    traced = jax.jit(lambda q, c: ta.paged_decode(q, c, TABLES, LENS[0])).trace(Q[0, :B], filled())
    assert "turboattn" not in traced.lower(lowering_platforms=("tpu",)).as_text()
    text = traced.lower(lowering_platforms=("cpu",)).as_text()
    assert ("turboattn_paged_attention_v1" in text) == (backends.ffi.load("cpu").reason is None)


def test_a_named_implementation_does_not_run_elsewhere(implementation):
    if implementation == "xla":
        pytest.skip("xla runs on every platform")
    traced = jax.jit(lambda q, c: ta.paged_decode(q, c, TABLES, LENS[0])).trace(Q[0, :B], filled())
    with pytest.raises(NotImplementedError, match="implementation='cpu' runs on platform cpu, and .* lowered for another platform"):
        traced.lower(lowering_platforms=("tpu",))


def test_one_executable_serves_all_lengths():
    traces = 0

    @jax.jit
    def decode(q, c, n):
        nonlocal traces
        traces += 1
        return ta.paged_decode(q, c, TABLES, n)

    for n in LENS:
        decode(Q[0, :B], filled(), n)
    assert traces == 1


def test_explain_names_the_choice(implementation, monkeypatch):
    monkeypatch.delenv("JAX_TURBOATTN_IMPLEMENTATION")
    shapes = jax.eval_shape(filled)
    found = ta.explain(ta.paged_decode, jax.ShapeDtypeStruct((B, H, D), jnp.float32), shapes, TABLES, LENS[0], platform="cpu")
    assert [c.implementation for c in found] == ["cpu", "xla"]
    assert [c.implementation for c in found if c.chosen] == [c.implementation for c in found if c.reason is None][:1]
    found = ta.explain(ta.paged_decode, Q[0, :B], filled(), TABLES, LENS[0], platform="cuda")
    assert [c.implementation for c in found] == ["cuda", "pallas", "xla"]
    assert found[1].reason and found[2].reason is None
