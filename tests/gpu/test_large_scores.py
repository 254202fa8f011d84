"""Scores so large that what they are rounded to is several steps of exponents."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_turboattn as ta

GPU = jax.default_backend() == "gpu"
PAGE, LENGTH = 64, 512


@pytest.mark.parametrize("implementation", ["cuda", "cuda:sm80", "cpu"])
@pytest.mark.parametrize("kv_dtype, dim", [("int8", 64), ("int8", 128), ("int8", 256), ("bf16", 64), ("fp16", 64)])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_maximum_grows_by_one_rounding_step(rows, kv_dtype, dim, implementation):
    """The second half's scores are one float32 step above 2^28 (2^29 at head dim 256), some 5.8 exponents of 2.

    A maximum that is left where it was gives int8's values weights beyond float16's range, and fp16's rows
    probabilities near it.
    """
    if implementation.startswith("cuda") and not GPU:
        pytest.skip("needs a GPU")
    with jax.default_device(jax.devices("cpu")[0] if implementation == "cpu" else None):
        check_maximum(rows, kv_dtype, dim, implementation)


def check_maximum(rows, kv_dtype, dim, implementation):
    dtype = jnp.float16 if kv_dtype == "fp16" else jnp.bfloat16
    codes = kv_dtype == "int8"
    cache = ta.PagedKVCache.create(
        LENGTH // PAGE, 1, dim, page_size=PAGE, dtype=jnp.int8 if codes else dtype, param_dtype=dtype
    )
    later = np.arange(LENGTH) >= LENGTH // 2
    key, value = np.zeros((LENGTH, dim)), np.broadcast_to(1.0 + later[:, None], (LENGTH, dim))
    key[:, 0], key[:, 1] = 128, later
    key_scale, value_scale = 128.0, 1.8984375
    if not codes:
        key, value = key * key_scale, value * value_scale

    def pool(x):
        return jnp.asarray(x, cache.key.dtype).reshape(cache.key.shape)

    def params(scale):
        return jnp.broadcast_to(jnp.array([scale, 0], dtype), (*cache.key.shape[:-1], 2)) if codes else None

    cache = dataclasses.replace(
        cache, key=pool(key), value=pool(value), key_params=params(key_scale), value_params=params(value_scale)
    )
    query = np.zeros((rows, 1, dim), np.float32)
    query[..., 0], query[..., 1] = 16384, 0.25
    if dim == 256:
        query *= 2
    out = ta.paged_attention(
        jnp.asarray(query, dtype),
        cache,
        jnp.arange(LENGTH // PAGE, dtype=jnp.int32)[None],
        jnp.array([LENGTH], jnp.int32),
        jnp.array([0, rows], jnp.int32),
        is_causal=False,
        max_q_len=rows,
        implementation=implementation,
    )
    out = np.asarray(out, np.float32)
    assert np.isfinite(out).all()
    assert (out > 0.99 * value_scale).all() and (out < 2.01 * value_scale).all()
