"""Run by test_sharding.py with four fake CPU devices: every primitive under auto, explicit and manual sharding."""

import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_turboattn as ta
from jax_turboattn import backends

B, T, H, K, D, PAGE, N, M = 4, 6, 8, 4, 16, 8, 16, 3


def collectives(function, *arguments):
    text = jax.jit(function).lower(*arguments).compile().as_text()
    return re.findall(r" %?(all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", text)


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def inputs(dtype):
    table = jnp.asarray(np.random.default_rng(0).permutation(N)[: B * M].reshape(B, M).astype(np.int32))
    lens = jnp.array([1, 8, 17, 24], jnp.int32)
    cache = ta.PagedKVCache.create(N, K, D, page_size=PAGE, dtype=dtype, param_dtype=jnp.float32)
    rows = B * M * PAGE
    offsets = jnp.arange(B + 1, dtype=jnp.int32) * (M * PAGE)
    full = jnp.full(B, M * PAGE, jnp.int32)
    cache = ta.append_kv(cache, random(1, rows, K, D), random(2, rows, K, D), table, full, offsets)
    return cache, table, lens


def close(a, b):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-5)


def check(axis_type, dtype):
    mesh = jax.make_mesh((4,), ("tp",), axis_types=(axis_type,))
    cache, table, lens = inputs(dtype)
    offsets = jnp.array([0, 1, 2, 5, 6], jnp.int32)
    q, qt, new = random(3, B, H, D), random(4, T, H, D), random(5, T, K, D)
    sinks = random(6, H)
    scope = jax.set_mesh(mesh)
    on = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    want_decode = ta.paged_decode(q, cache, table, lens, sinks=sinks)
    want_packed = ta.paged_attention(qt, cache, table, lens, offsets)
    (want_out, want_lse), want_cache = ta.paged_attention_step(
        qt, new, new, cache, table, lens, offsets, return_residual=True
    )
    want_k, want_v = ta.gather_kv(cache, table, lens)
    dense_q, dense_k = random(7, B, T, H, D), random(8, B, T, K, D)
    want_dense = ta.attention(dense_q, dense_k, dense_k, is_causal=True)
    with scope:
        sharded = cache.with_sharding(mesh, heads="tp")
        qs, qts, news, sinks_s = on(q, None, "tp"), on(qt, None, "tp"), on(new, None, "tp"), on(sinks, "tp")
        table, lens, offsets = on(table), on(lens), on(offsets)

        # heads over the mesh: no collective, results sharded like the queries
        decode = lambda q, c, s: ta.paged_decode(q, c, table, lens, sinks=s)  # noqa: E731
        assert collectives(decode, qs, sharded, sinks_s) == [], collectives(decode, qs, sharded, sinks_s)
        out = jax.jit(decode)(qs, sharded, sinks_s)
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "tp", None)), 3), out.sharding
        close(out, want_decode)
        packed = lambda q, c: ta.paged_attention(q, c, table, lens, offsets)  # noqa: E731
        assert collectives(packed, qts, sharded) == []
        close(jax.jit(packed)(qts, sharded), want_packed)
        step = lambda q, n, c: ta.paged_attention_step(q, n, n, c, table, lens, offsets, return_residual=True)  # noqa: E731
        assert collectives(step, qts, news, sharded) == []
        (out, lse), written = jax.jit(step)(qts, news, sharded)
        close(out, want_out)
        close(lse, want_lse)
        for got, want in zip(jax.tree.leaves(written), jax.tree.leaves(want_cache)):
            close(got, want)
        # a plan is for all heads: shards plan for themselves
        planned = lambda q, c, s: ta.paged_decode(  # noqa: E731
            q, c, table, lens, sinks=s, plan=ta.make_plan(q, c, table, lens, None, sinks=s)
        )
        assert collectives(planned, qs, sharded, sinks_s) == []
        close(jax.jit(planned)(qs, sharded, sinks_s), want_decode)
        gather = lambda c: ta.gather_kv(c, table, lens)  # noqa: E731
        assert collectives(gather, sharded) == []
        close(jax.jit(gather)(sharded)[0], want_k)
        close(jax.jit(gather)(sharded)[1], want_v)

        # dense: batch over the mesh, and heads over the mesh
        attend = lambda q, k: ta.attention(q, k, k, is_causal=True)  # noqa: E731
        for spec in (("tp",), (None, None, "tp")):
            qd, kd = on(dense_q, *spec), on(dense_k, *spec)
            assert collectives(attend, qd, kd) == []
            close(jax.jit(attend)(qd, kd), want_dense)

        if axis_type == AxisType.Explicit:
            assert jax.typeof(decode(qs, sharded, sinks_s)).sharding.spec == P(None, "tp", None)
            return
        # more shards than kv heads, pages sharded, only one side sharded: right, whatever it costs
        close(jax.jit(decode)(q, sharded, sinks), want_decode)
        close(jax.jit(decode)(qs, cache, sinks), want_decode)
        pages = jax.tree.map(lambda x: on(x, "tp"), cache)
        close(jax.jit(decode)(qs, pages, sinks), want_decode)

    # manual: shard_map with its check of varying values
    heads = jax.tree.map(lambda x: P(None, "tp"), cache)
    mapped = jax.shard_map(
        lambda q, c: ta.paged_decode(q, c, table, lens, plan=ta.make_plan(q, c, table, lens, None)),
        mesh=mesh,
        in_specs=(P(None, "tp"), heads),
        out_specs=P(None, "tp"),
    )
    close(mapped(q, cache), ta.paged_decode(q, cache, table, lens))
    replicated_query = jax.shard_map(
        lambda q, c: ta.paged_decode(q[:, :2], c, table, lens), mesh=mesh, in_specs=(P(), heads), out_specs=P()
    )
    try:
        replicated_query(q, cache)
    except Exception:
        pass
    else:
        raise AssertionError("shard_map accepted a device-dependent result as replicated")


def main():
    name = os.environ["JAX_TURBOATTN_IMPLEMENTATION"]
    if name == "cpu" and backends.ffi.load("cpu").reason is not None:
        print(backends.ffi.load("cpu").reason)
        sys.exit(77)
    for dtype in ("float32", "int8"):
        for axis_type in (AxisType.Auto, AxisType.Explicit):
            check(axis_type, dtype)


main()
