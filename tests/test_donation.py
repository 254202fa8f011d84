"""A donated pool is never copied: proved from the optimised HLO and from the pointers of the live buffers."""

import donation
import jax
import jax.numpy as jnp
import pytest

from jax_turboattn import backends

IMPLEMENTATIONS = ["xla", "cpu"]
DTYPES = ["float32", "int8", "bfloat16", "int4", "float8_e4m3fn"]
# XLA's CPU scatter has neither dtype: `xla` scatters the bits, with a pool-sized temporary. The CPU kernels write in place.
COPIED_BY_XLA_CPU = ("bfloat16", "float8_e4m3fn")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request, monkeypatch):
    if request.param != "xla" and backends.ffi.load(request.param).reason is not None:
        pytest.skip(backends.ffi.load(request.param).reason)
    monkeypatch.setenv("JAX_TURBOATTN_IMPLEMENTATION", request.param)
    return request.param


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("program", donation.Programs.STACKED)
def test_donated_pool_is_updated_in_place(program, kv_dtype, implementation):
    if implementation == "xla" and kv_dtype in COPIED_BY_XLA_CPU:
        pytest.skip("XLA's CPU scatter of this dtype needs a pool-sized temporary")
    dtype = "bfloat16" if kv_dtype == "bfloat16" else "float32"
    donation.prove(program, donation.Shapes(), kv_dtype, dtype).check()


def test_the_detector_sees_a_copy(implementation):
    """Without donation the pool must be copied, and the same search finds it, with what stands around it."""
    _, cache, hlo = donation.undonated_append(donation.Shapes(), "float32")
    copies = donation.pool_sized_copies(hlo, cache)
    assert copies and all(c.instruction in c.around and c.computation for c in copies)


def test_eager_append_leaves_the_input_alone(implementation):
    append, cache, _ = donation.undonated_append(donation.Shapes(), "float32")
    written = append(cache)
    assert float(jnp.abs(cache.key).sum()) == 0
    assert float(jnp.abs(written.key).sum()) == donation.Programs(donation.Shapes(), "float32").new.size
    assert not any(x.is_deleted() for x in jax.tree.leaves(cache))
