"""Edge values whose results the contract fixes and that no spec of the conformance suite can hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_turboattn as ta
from jax_turboattn.backends import ffi


@pytest.fixture(params=["xla", "cpu"])
def implementation(request):
    if request.param != "xla" and ffi.load(request.param).reason is not None:
        pytest.skip(ffi.load(request.param).reason)
    return request.param


def decode(implementation, lens=(3, 0, 5), **options):
    cache = ta.PagedKVCache.create(8, 2, 16, page_size=8, dtype=jnp.float32)
    cache = jax.tree.map(lambda x: jnp.asarray(np.random.default_rng(0).normal(size=x.shape), x.dtype), cache)
    query = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4, 16)), jnp.float32)
    table = jnp.arange(6, dtype=jnp.int32).reshape(3, 2)
    lens = jnp.asarray(lens, jnp.int32)
    return ta.paged_decode(query, cache, table, lens, return_residual=True, implementation=implementation, **options)


@pytest.mark.parametrize("sink", [np.inf, -np.inf, np.nan])
def test_rows_without_keys_hold_zeros_and_the_sink_as_it_is(implementation, sink):
    out, lse = decode(implementation, lens=(0, -3, 0), sinks=jnp.full(4, sink, jnp.float32))
    np.testing.assert_array_equal(out, np.zeros_like(out))
    np.testing.assert_array_equal(lse, np.full_like(lse, sink))


@pytest.mark.parametrize("rank", [-1, 2, 5])
def test_a_context_parallel_rank_that_does_not_exist_holds_no_token(implementation, rank):
    out, lse = decode(implementation, cp_rank=jnp.int32(rank), cp_size=2)
    np.testing.assert_array_equal(out, np.zeros_like(out))
    assert (np.asarray(lse) == -np.inf).all()


def test_the_rank_of_a_mesh_axis_of_size_one(implementation):
    mesh = jax.make_mesh((1,), ("cp",), axis_types=(jax.sharding.AxisType.Auto,))
    P = jax.sharding.PartitionSpec
    ranked = lambda: decode(implementation, cp_rank=jax.lax.axis_index("cp"), cp_size=1)[0]  # noqa: E731
    out = jax.shard_map(ranked, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)()
    np.testing.assert_array_equal(out, decode(implementation)[0])


def test_vmap_over_nothing(implementation):
    query = jnp.zeros((0, 2, 3, 4, 8))
    out = jax.vmap(lambda q: ta.attention(q, q, q, implementation=implementation))(query)
    assert out.shape == query.shape
