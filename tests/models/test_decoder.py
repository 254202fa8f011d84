"""The decoder: its paged step equals full computation, whatever the batch is made of, and never copies the cache."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import SMALL, full, small_decoder

from jax_turboattn import PagedKVCache
from jax_turboattn.models.decoder import Decoder, DecoderConfig, step

nnx = pytest.importorskip("flax.nnx")


def tokens_of(*shape):
    return jax.random.randint(jax.random.key(3), shape, 0, SMALL.vocab_size, jnp.int32)


def cache_for(decoder, num_pages=32, page_size=8, dtype=jnp.float32):
    config = decoder.config
    return PagedKVCache.create(
        num_pages,
        config.num_kv_heads,
        config.head_dim,
        page_size=page_size,
        num_layers=config.num_layers,
        dtype=dtype,
        param_dtype=jnp.float32,
    )


def run_plan(decoder, tokens, plan, max_q_len=None):
    """Feeds `plan` (new tokens of each sequence in each step) and returns the logits after each sequence's last token."""
    batch, length = tokens.shape
    columns = -(-length // 8)
    table = np.random.default_rng(0).permutation(32)[: batch * columns].reshape(batch, columns).astype(np.int32)
    graph, params = nnx.split(decoder)
    cache = cache_for(decoder)
    done = np.zeros(batch, np.int64)
    rows = max(sum(counts) for counts in plan) + 2  # two rows that belong to nobody
    logits = None
    for counts in plan:
        packed = np.zeros(rows, np.int32)
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        for b, count in enumerate(counts):
            packed[offsets[b] : offsets[b + 1]] = tokens[b, done[b] : done[b] + count]
        done += counts
        logits, cache = step(graph, params, cache, packed, table, done.astype(np.int32), offsets, max_q_len=max_q_len)
    return logits


MIXED = [[5, 0, 9], [1, 8, 1], [1, 1, 3], [9, 7, 3]]  # totals 16, chunks and decoding side by side, one comes later


@pytest.mark.parametrize("changes", [{}, {"tied": False, "attention_bias": True, "local_window_size": (5, 0)}], ids=str)
@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_paged_equals_full(implementation, changes):
    decoder = small_decoder(implementation, **changes)
    tokens = tokens_of(3, 16)
    expected = full(decoder, tokens)[:, -1]
    np.testing.assert_allclose(run_plan(decoder, tokens, MIXED), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(run_plan(decoder, tokens, [[16, 16, 16]]), expected, rtol=1e-4, atol=1e-4)


def test_logits_depend_on_earlier_tokens_only():
    decoder = small_decoder()
    tokens = tokens_of(2, 16)
    changed = tokens.at[:, 10:].set(0)
    np.testing.assert_array_equal(full(decoder, tokens)[:, :10], full(decoder, changed)[:, :10])
    assert jnp.abs(full(decoder, tokens)[:, 10:] - full(decoder, changed)[:, 10:]).max() > 0.1


def test_dropout_only_when_asked_for():
    decoder = small_decoder()
    tokens = tokens_of(2, 16)
    dropped = [full(decoder, tokens, dropout_rate=0.5, dropout_key=jax.random.key(i)) for i in (0, 0, 1)]
    np.testing.assert_array_equal(dropped[0], dropped[1])
    assert jnp.abs(dropped[0] - dropped[2]).max() > 0.1
    assert jnp.abs(dropped[0] - full(decoder, tokens)).max() > 0.1


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_cache_is_updated_in_place(implementation):
    decoder = small_decoder(implementation)
    graph, params = nnx.split(decoder)
    cache = cache_for(decoder, num_pages=16)
    pool = "f32[" + ",".join(map(str, cache.key.shape)) + "]"
    layer = "f32[" + ",".join(map(str, cache.key.shape[1:])) + "]"
    table, lens, offsets = jnp.zeros((2, 2), jnp.int32), jnp.ones(2, jnp.int32), jnp.arange(3, dtype=jnp.int32)
    arguments = (params, cache, jnp.zeros(2, jnp.int32), table, lens, offsets)
    compiled = step.lower(graph, *arguments).compile()
    pointers = cache.key.unsafe_buffer_pointer(), cache.value.unsafe_buffer_pointer()
    _, cache = step(graph, *arguments)
    assert (cache.key.unsafe_buffer_pointer(), cache.value.unsafe_buffer_pointer()) == pointers
    assert arguments[1].key.is_deleted()
    assert compiled.memory_analysis().alias_size_in_bytes >= cache.key.nbytes + cache.value.nbytes
    for shape in (pool, layer):
        assert not re.search(re.escape(shape) + r"\S* copy\(", compiled.as_text()), shape


def test_config_of_hugging_face():
    config = DecoderConfig.from_hf(
        {
            "model_type": "mistral",
            "vocab_size": 100,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 96,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5000.0,
            "sliding_window": 9,
        }
    )
    assert (config.head_dim, config.num_kv_heads, config.norm_eps) == (16, 2, 1e-6)
    assert config.local_window_size == (8, 0)  # nine keys, the token itself among them
    assert (config.rope.dim, config.rope.base, config.tied) == (16, 5000.0, False)
    with pytest.raises(ValueError, match="model_type must be one of .*llama.*, got 'gpt2'"):
        DecoderConfig.from_hf({"model_type": "gpt2"})


def test_parameters_are_stacked_over_layers():
    decoder = small_decoder()
    assert isinstance(decoder, Decoder)
    for leaf in jax.tree.leaves(nnx.split(decoder.layers)[1]):
        assert leaf.shape[0] == SMALL.num_layers
