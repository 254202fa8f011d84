"""Run by test_grad.py on four fake CPU devices: gradients with sharded heads and batch, in all three ways to shard."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_turboattn as ta

B, T, H, K, D = 4, 6, 8, 4, 8
RNG = np.random.default_rng(0)
QUERY = RNG.standard_normal((B, T, H, D)).astype(np.float32)
KEY, VALUE = (RNG.standard_normal((B, T, K, D)).astype(np.float32) for _ in range(2))
SINKS, BIAS = RNG.standard_normal(H).astype(np.float32), RNG.standard_normal((1, H, T, T)).astype(np.float32)
OFFSETS = jnp.array([0, 2, T], jnp.int32)


def dense(q, k, v, sinks, bias):
    return ta.attention(q, k, v, bias, is_causal=True, sinks=sinks, alibi_slopes=sinks, implementation="xla").sum()


def packed(q, k, v, sinks):
    return ta.ragged_attention(q, k, v, OFFSETS, OFFSETS, sinks=sinks, alibi_slopes=sinks, implementation="xla").sum()


dense_grad, packed_grad = jax.grad(dense, argnums=(0, 1, 2, 3, 4)), jax.grad(packed, argnums=(0, 1, 2, 3))
DENSE, PACKED = (QUERY, KEY, VALUE, SINKS, BIAS), (QUERY[0], KEY[0], VALUE[0], SINKS)


def check(name, got, want):
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(g), np.asarray(w), rtol=1e-5, atol=1e-5, err_msg=name)


def main():
    assert jax.device_count() == 4
    want_dense, want_packed = jax.jit(dense_grad)(*DENSE), jax.jit(packed_grad)(*PACKED)

    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((2, 2), ("b", "h"), axis_types=(kind, kind))
        put = functools.partial(lambda mesh, x, spec: jax.device_put(x, NamedSharding(mesh, spec)), mesh)
        with jax.set_mesh(mesh):
            for spec in (P("b"), P(None, None, "h"), P("b", None, "h")):
                arrays = [*(put(x, spec) for x in DENSE[:3]), *(put(x, P()) for x in DENSE[3:])]
                got = jax.jit(dense_grad)(*arrays)
                check(f"{kind} {spec}", got, want_dense)
                assert tuple(got[0].sharding.spec)[: len(spec)] == tuple(spec)
            arrays = [*(put(x, P(None, "h")) for x in PACKED[:3]), put(SINKS, P())]
            check(f"{kind} packed", jax.jit(packed_grad)(*arrays), want_packed)

    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    heads = P(None, "x")
    specs = (heads, heads, heads, P("x"))
    mapped = jax.shard_map(packed_grad, mesh=mesh, in_specs=specs, out_specs=specs)
    check("shard_map over heads", jax.jit(mapped)(*PACKED), want_packed)

    # Queries split over devices, one key and value for all: their gradients are sums over the devices.
    def total(q, k, v):
        return jax.lax.psum(ta.attention(q, k, v, implementation="xla").sum(), "x")

    grad = jax.grad(total, argnums=(0, 1, 2))
    mapped = jax.shard_map(grad, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=(P("x"), P(), P()))

    def whole(q, k, v):
        k, v = (jnp.broadcast_to(x, (B, *x.shape[1:])) for x in (k, v))
        return ta.attention(q, k, v, implementation="xla").sum()

    arrays = (QUERY, KEY[:1], VALUE[:1])
    check("shard_map with one key", jax.jit(mapped)(*arrays), jax.grad(whole, argnums=(0, 1, 2))(*arrays))


if __name__ == "__main__":
    main()
