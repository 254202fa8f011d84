"""Gradients of `attention` and `ragged_attention`: against jax.grad of a plain reference, against finite differences of
the float64 golden, under JAX's transformations, and in linear memory."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_turboattn as ta
from jax_turboattn.primitives import attention_vjp
from jax_turboattn.testing import golden

B, T, S, H, K, D, DV = 2, 19, 23, 6, 2, 8, 16


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


QUERY, KEY, VALUE = normal(1, B, T, H, D), normal(2, B, S, K, D), normal(3, B, S, K, DV)
SELF_KEY, SELF_VALUE = KEY[:, :T], VALUE[:, :T]
COTANGENT, LSE_COTANGENT = normal(4, B, T, H, DV), normal(5, B, T, H)
SINKS, SLOPES = normal(6, H), np.exp2(-np.arange(1.0, H + 1)).astype(np.float32)
OFFSET = np.array([S - T, 2], np.int32)
SEGMENTS = (np.sort(np.arange(B * T).reshape(B, T) * 7 % 4), np.sort(np.arange(B * S).reshape(B, S) * 5 % 4))
SEGMENTS = tuple(x.astype(np.int32) for x in SEGMENTS)

# Options by name; floating ones are differentiated too.
DENSE = {
    "plain": {},
    "scale": dict(scale=-0.7),
    "causal": dict(is_causal=True, query_offset=OFFSET),
    "causal_hidden_rows": dict(is_causal=True, query_offset=np.array([-5, 0], np.int32)),
    "window": dict(local_window_size=(3, 2), query_offset=OFFSET),
    "causal_window": dict(is_causal=True, local_window_size=(4, 0), query_offset=OFFSET),
    "soft_cap": dict(logits_soft_cap=2.0, scale=1.5),
    "lengths": dict(query_seq_lengths=np.array([7, 19], np.int32), key_value_seq_lengths=np.array([23, 5], np.int32)),
    "no_keys": dict(key_value_seq_lengths=np.array([0, 9], np.int32), sinks=SINKS),
    "segments": dict(segment_ids=SEGMENTS),
    "sinks": dict(sinks=SINKS, is_causal=True, query_offset=OFFSET),
    "sinks_lengths": dict(sinks=SINKS, query_seq_lengths=np.array([7, 19], np.int32)),
    "alibi": dict(alibi_slopes=SLOPES, query_offset=OFFSET, is_causal=True),
    "bias": dict(bias=normal(7, B, H, T, S)),
    "bias_broadcast": dict(bias=normal(8, 1, H, 1, S), is_causal=True, query_offset=OFFSET),
    "bias_of_rows": dict(bias=normal(9, B, 1, T, 1)),
    "mask": dict(mask=np.random.default_rng(10).random((1, H, T, S)) < 0.6),
    "everything": dict(
        bias=normal(11, 1, 1, T, S), mask=np.random.default_rng(12).random((B, 1, T, S)) < 0.8, sinks=SINKS,
        alibi_slopes=SLOPES, logits_soft_cap=3.0, local_window_size=(9, 9), is_causal=True, query_offset=OFFSET,
        segment_ids=SEGMENTS, key_value_seq_lengths=np.array([20, 23], np.int32),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several blocks, the last ones padded, already at these sizes."""
    monkeypatch.setattr(attention_vjp, "MIN_BLOCK", 8)
    monkeypatch.setattr(attention_vjp, "MAX_BLOCK", 8)


def visible_keys(options):
    """bool [B, H, T, S]"""
    i, s = np.arange(T)[:, None], np.arange(S)[None]
    seen = np.ones((B, H, T, S), bool)
    p = i + np.asarray(options.get("query_offset", np.zeros(B, np.int32))).reshape(B, 1, 1, 1)
    if options.get("is_causal"):
        seen &= s <= p
    if "local_window_size" in options:
        left, right = options["local_window_size"]
        seen &= (p - s <= left) & (p - s >= -right)
    if "segment_ids" in options:
        q, k = options["segment_ids"]
        seen &= (q[:, :, None] == k[:, None, :])[:, None]
    if "key_value_seq_lengths" in options:
        seen &= s < options["key_value_seq_lengths"].reshape(B, 1, 1, 1)
    if "query_seq_lengths" in options:
        seen &= i < options["query_seq_lengths"].reshape(B, 1, 1, 1)
    return seen & options.get("mask", True), np.abs(p - s)


def reference(options):
    """(floating operands by name) -> (out, lse), plainly. Sinks of padding rows aside, as the contract says."""
    seen, distance = visible_keys(options)
    padding = np.arange(T) >= options.get("query_seq_lengths", np.full(B, T)).reshape(B, 1, 1)

    def call(operands):
        q, k, v = (operands[n] for n in ("query", "key", "value"))
        k, v = (jnp.repeat(x, H // K, axis=2) for x in (k, v))
        x = jnp.einsum("bthd,bshd->bhts", q, k, precision="highest") * options.get("scale", D**-0.5)
        if "logits_soft_cap" in options:
            x = options["logits_soft_cap"] * jnp.tanh(x / options["logits_soft_cap"])
        if "alibi_slopes" in operands:
            x = x - operands["alibi_slopes"][:, None, None] * distance
        if "bias" in operands:
            x = x + operands["bias"]
        sink = operands["sinks"][:, None] if "sinks" in operands else jnp.float32(-1e30)
        top = jax.lax.stop_gradient(jnp.maximum(jnp.max(jnp.where(seen, x, -1e30), axis=-1), sink))
        p = jnp.where(seen, jnp.exp(jnp.where(seen, x, 0) - top[..., None]), 0)
        total = p.sum(-1) + jnp.where("sinks" in operands, jnp.exp(sink - top), 0)
        empty = total == 0
        safe = jnp.where(empty, 1, total)
        out = jnp.einsum("bhts,bshd->bthd", p / safe[..., None], v, precision="highest")
        lse = jnp.where(empty | padding, 0, top + jnp.log(safe))  # -inf has no gradient; its cotangent is dropped too
        return out, lse.swapaxes(1, 2)

    return call


def weighted(call):
    """The scalar whose gradient meets both results."""

    def loss(operands):
        out, lse = call(operands)
        lse = jnp.where(jnp.isneginf(lse), 0, lse)
        return jnp.sum(out.astype(jnp.float32) * COTANGENT) + jnp.sum(lse * LSE_COTANGENT)

    return loss


def split_options(options):
    """(floating operands with q, k, v; the others)"""
    floating = {n: x for n, x in options.items() if n in ("bias", "sinks", "alibi_slopes")}
    return dict(query=QUERY, key=KEY, value=VALUE, **floating), {n: x for n, x in options.items() if n not in floating}


def ours(options):
    _, rest = split_options(options)
    return lambda operands: ta.attention(**operands, **rest, return_residual=True, implementation="xla")


@functools.cache
def gradient(name):
    """Compiled once for all tests: (floating operands by name) -> their gradients."""
    return jax.jit(jax.grad(weighted(ours(DENSE[name]))))


@pytest.mark.parametrize("name", DENSE)
def test_dense_gradients_match_the_plain_reference(name):
    operands, _ = split_options(DENSE[name])
    got = gradient(name)(operands)
    want = jax.jit(jax.grad(weighted(reference(DENSE[name]))))(operands)
    for which in operands:
        size = np.abs(want[which]).max() + 1e-3
        np.testing.assert_allclose(got[which], want[which], atol=3e-6 * size, rtol=2e-5, err_msg=which)


@pytest.mark.parametrize("name", ["causal_window", "soft_cap", "sinks_lengths", "segments", "everything"])
def test_dense_gradients_match_finite_differences_of_the_golden(name):
    operands, rest = split_options(DENSE[name])
    grads = gradient(name)(operands)

    def loss(operands):
        result = golden.attention(**operands, **rest)
        return np.sum(result.out * COTANGENT) + np.sum(np.where(np.isinf(result.lse), 0, result.lse) * LSE_COTANGENT)

    exact = {n: x.astype(np.float64) for n, x in operands.items()}
    for seed, which in enumerate(operands):
        direction = np.random.default_rng(seed).standard_normal(operands[which].shape)
        step = 1e-5
        high, low = (loss(exact | {which: exact[which] + sign * step * direction}) for sign in (1, -1))
        got = np.sum(np.asarray(grads[which], np.float64) * direction)
        assert abs(got - (high - low) / (2 * step)) < 2e-5 * (1 + np.abs(grads[which]).sum()), which


def ragged_offsets():
    q_offsets = np.array([2, 2, 9, 10, 17], np.int32)  # rows 0, 1, 17, 18 belong to nobody; one sequence is empty
    kv_offsets = np.array([1, 4, 15, 18, 21], np.int32)
    return q_offsets, kv_offsets


def ragged_as_mask(is_causal, window):
    """The same sequences as a mask [T, S] and distances."""
    seen, distance = np.zeros((T, S), bool), np.zeros((T, S))
    q_offsets, kv_offsets = ragged_offsets()
    for (lo, hi), (klo, khi) in zip(zip(q_offsets[:-1], q_offsets[1:]), zip(kv_offsets[:-1], kv_offsets[1:])):
        p = (khi - klo) - (hi - lo) + np.arange(hi - lo)[:, None]
        s = np.arange(khi - klo)[None]
        inside = np.ones(np.broadcast_shapes(p.shape, s.shape), bool)
        if is_causal:
            inside &= s <= p
        if window:
            inside &= (p - s <= window[0]) & (p - s >= -window[1])
        seen[lo:hi, klo:khi], distance[lo:hi, klo:khi] = inside, np.abs(p - s)
    return seen, distance


@pytest.mark.parametrize(
    "options",
    [
        dict(is_causal=True),
        dict(is_causal=False, local_window_size=(2, 1)),
        dict(is_causal=True, sinks=SINKS, alibi_slopes=SLOPES, logits_soft_cap=2.0, local_window_size=(5, 5)),
    ],
    ids=["causal", "window", "everything"],
)
def test_ragged_gradients_match_the_plain_reference(options):
    floating = {n: x for n, x in options.items() if n in ("sinks", "alibi_slopes")}
    rest = {n: x for n, x in options.items() if n not in floating}
    q_offsets, kv_offsets = ragged_offsets()
    operands = dict(query=QUERY[0], key=KEY[0], value=VALUE[0], **floating)
    seen, distance = ragged_as_mask(options["is_causal"], options.get("local_window_size"))
    owned = seen.any() & (np.arange(T) >= 2) & (np.arange(T) < 17)

    def call(operands):
        return ta.ragged_attention(
            **operands, q_offsets=q_offsets, kv_offsets=kv_offsets, **rest, return_residual=True, implementation="xla"
        )

    def plain(operands):
        q, k, v = (operands[n] for n in ("query", "key", "value"))
        x = jnp.einsum("thd,shd->hts", q, jnp.repeat(k, H // K, 1), precision="highest") * D**-0.5
        if "logits_soft_cap" in options:
            x = 2.0 * jnp.tanh(x / 2.0)
        if "alibi_slopes" in operands:
            x = x - operands["alibi_slopes"][:, None, None] * distance
        p = jnp.where(seen, jnp.exp(x), 0)
        total = p.sum(-1) + (jnp.exp(operands["sinks"])[:, None] if "sinks" in operands else 0)
        total = jnp.where(total == 0, 1, total)
        out = jnp.einsum("hts,shd->thd", p / total[..., None], jnp.repeat(v, H // K, 1), precision="highest")
        return out, jnp.where(owned, jnp.log(total), 0).T

    def loss(call):
        def scalar(operands):
            out, lse = call(operands)
            return jnp.sum(out * COTANGENT[0]) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse) * LSE_COTANGENT[0])

        return scalar

    got, want = (jax.jit(jax.grad(loss(f)))(operands) for f in (call, plain))
    for which in operands:
        size = np.abs(want[which]).max() + 1e-3
        np.testing.assert_allclose(got[which], want[which], atol=3e-6 * size, rtol=2e-5, err_msg=which)
    assert not np.any(np.asarray(got["query"])[~owned])


@functools.cache
def ragged_vjp():
    q_offsets, kv_offsets = ragged_offsets()
    call = lambda q, k, v: ta.ragged_attention(q, k, v, q_offsets, kv_offsets, implementation="xla")
    return jax.jit(lambda q, k, v, cotangent: jax.vjp(call, q, k, v)[1](cotangent))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_a_row_does_not_see_reaches_no_gradient(bad):
    """Rows of nobody, padding, other sequences: whatever they and their cotangents hold."""
    clean = ragged_vjp()(QUERY[0], KEY[0], VALUE[0], COTANGENT[0])

    query, key, value, cotangent = QUERY[0].copy(), KEY[0].copy(), VALUE[0].copy(), COTANGENT[0].copy()
    for x, rows in ((query, [0, 1, 17, 18]), (cotangent, [0, 1, 17, 18]), (key, [0, 21, 22]), (value, [0, 21, 22])):
        x[rows] = bad
    dirty = ragged_vjp()(query, key, value, cotangent)
    for got, want in zip(dirty, clean):
        np.testing.assert_array_equal(got, want)
    assert not np.any(np.asarray(dirty[0])[[0, 1, 17, 18]])

    query[3], key[5], value[16] = bad, bad, bad  # now sequence 1 (rows 2-8, keys 4-14), and a value of sequence 2
    dirty = ragged_vjp()(query, key, value, cotangent)
    np.testing.assert_array_equal(dirty[0][10:17], clean[0][10:17])  # sequence 3
    for got, want in zip(dirty[1:], clean[1:]):
        np.testing.assert_array_equal(got[18:21], want[18:21])
    assert np.isnan(dirty[0][2:9]).any() and np.isnan(dirty[1][4:15]).any()


def test_a_cotangent_of_a_row_that_sees_nothing_is_dropped():
    @jax.jit
    def pull(out_bar, lse_bar):
        call = functools.partial(
            ta.attention, is_causal=True, query_offset=-4, return_residual=True, implementation="xla"
        )
        return jax.vjp(call, QUERY, KEY, VALUE)[1]((out_bar, lse_bar))

    out_bar, lse_bar = COTANGENT.copy(), LSE_COTANGENT.copy()
    want = pull(out_bar, lse_bar)
    out_bar[:, :4], lse_bar[:, :4] = np.nan, np.nan
    for got, clean in zip(pull(out_bar, lse_bar), want):
        np.testing.assert_array_equal(got, clean)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_have_the_dtypes_of_their_operands(dtype):
    operands, _ = split_options(DENSE["sinks"])
    low = {n: jnp.asarray(x, dtype if n in ("query", "key", "value") else None) for n, x in operands.items()}
    got = jax.jit(jax.grad(weighted(ours(DENSE["sinks"]))))(low)
    want = gradient("sinks")({n: x.astype(jnp.float32) for n, x in low.items()})
    for which in operands:
        assert got[which].dtype == low[which].dtype
        np.testing.assert_allclose(
            np.asarray(got[which], np.float32), want[which], atol=0.03 * float(np.abs(want[which]).max())
        )


def test_transformations_agree():
    """vmap of grad, checkpoint and scan give what the gradient one by one gives."""
    loss = lambda q, k, v: ta.attention(q, k, v, is_causal=True, implementation="xla").sum()
    grad = jax.grad(loss, argnums=(0, 1, 2))
    batch = [np.stack([x, -2 * x]) for x in (QUERY, SELF_KEY, SELF_VALUE)]
    alone = jax.jit(grad)
    want = [np.stack(g) for g in zip(*(alone(*(x[i] for x in batch)) for i in range(2)))]
    found = dict(
        vmap=jax.jit(jax.vmap(grad))(*batch),
        scan=jax.jit(lambda *xs: jax.lax.scan(lambda carry, x: (carry, grad(*x)), 0, xs)[1])(*batch),
        checkpoint=jax.jit(jax.vmap(jax.grad(jax.checkpoint(loss), argnums=(0, 1, 2))))(*batch),
    )
    for name, got in found.items():
        for g, w in zip(got, want):
            np.testing.assert_allclose(g, w, atol=2e-6 * np.abs(w).max(), err_msg=name)


def test_gradients_repeat_bitwise():
    operands, _ = split_options(DENSE["everything"])
    for a, b in zip(*(jax.tree.leaves(gradient("everything")(operands)) for _ in range(2))):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("shape", [(0, 4, 4), (1, 0, 4), (1, 4, 0), (1, 1, 1)], ids=["B0", "T0", "S0", "one"])
def test_empty_and_tiny_shapes(shape):
    b, t, s = shape
    operands = [jnp.ones(shape, jnp.float32) for shape in ((b, t, H, D), (b, s, K, D), (b, s, K, D), (H,))]
    loss = lambda q, k, v, sinks: ta.attention(q, k, v, sinks=sinks, implementation="xla").sum()
    for got, x in zip(jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*operands), operands):
        assert got.shape == x.shape and np.isfinite(got).all()


def test_memory_is_linear(monkeypatch):
    """Doubling T and S doubles the temporaries at most; an array of [T, S] logits would quadruple them."""
    monkeypatch.setattr(attention_vjp, "MAX_BLOCK", 64)

    def temporaries(size):
        def backward(q, k, v, out, lse, dout, dlse):
            spec = ta.spec.AttnSpec(
                op="attention", operands=("query", "key", "value"), dtype="float32", out_dtype="float32",
                num_q_heads=H, num_kv_heads=K, head_dim=D, value_dim=D, is_causal=True, scale=1.0,
            )  # fmt: skip
            return attention_vjp.backward(spec, dict(query=q, key=k, value=v), out, lse, dout, dlse)

        shapes = [(1, size, n, D) for n in (H, K, K, H)] + [(1, size, H), (1, size, H, D), (1, size, H)]
        arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        return jax.jit(backward).lower(*arguments).compile().memory_analysis().temp_size_in_bytes

    small, large = temporaries(1024), temporaries(4096)
    assert large < 4.5 * small
    assert large < 4096 * 4096 * H  # bytes: a quarter of one float32 array of logits


def test_gradients_on_four_devices():
    program = pathlib.Path(__file__).with_name("grad_sharding_program.py")
    environment = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=4", JAX_PLATFORMS="cpu")
    ran = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
