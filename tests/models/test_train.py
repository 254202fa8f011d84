"""The trainer's parts: the split of the corpus, the count model, the held-out windows, and a loss that falls."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import small_decoder

from jax_turboattn.models import corpus, train

nnx = pytest.importorskip("flax.nnx")


def test_split_is_by_name_and_leaves_tests_out():
    training, held_out = corpus.python_sources()
    assert len(training) > 10 * len(held_out) > 0
    assert not set(held_out) & {text for text in training if len(text) > 2000}
    assert not any(bytes([corpus.SEPARATOR]) in text for text in training)


def test_count_model_by_hand():
    """Order 1 on "abab" after "ab": every probability written out."""
    training, held_out = (np.frombuffer(text, np.uint8) for text in (b"ababa", b"ab"))
    base = 1 / 256
    p_a = (3 + 2 * base) / (5 + 2)  # order 0: a 3 times, b 2 times, two kinds
    p_b = (2 + 2 * base) / (5 + 2)
    first_b = (0 + 1 * p_a) / (1 + 1)  # at the start the context is a zero byte, after which one a was seen
    expected_a = (1 + 1 * p_a) / (1 + 1)
    expected_b = (2 + 1 * p_b) / (2 + 1)  # after a: b twice, one kind
    bits = corpus.count_model_bits(training, held_out, order=1)
    assert first_b < expected_a
    assert bits == pytest.approx(-(math.log2(expected_a) + math.log2(expected_b)) / 2)


def test_windows_score_every_byte_once():
    files = [b"abc", b"", bytes(range(1, 60)), b"x" * 16]
    tokens, scored = train.windows(files, context=8, batch=4)
    targets = tokens[..., 1:][scored]
    assert targets.tobytes() == b"".join(files)
    inputs = scored.argmax(-1)[scored.any(-1)]
    assert set(inputs.tolist()) <= {0, 4, 5, 6, 7}  # the start of a file, or at least half a window of context


def test_held_out_bits_of_a_uniform_model_are_eight():
    graph, params = nnx.split(small_decoder(vocab_size=256))
    zero = jax.tree.map(jnp.zeros_like, params)
    bits = train.held_out_bits(graph, zero, [b"hello world", b"x"], context=8, batch=2)
    assert bits == pytest.approx(8.0)


def test_loss_falls():
    graph, params = nnx.split(small_decoder(vocab_size=256))
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = {
        "params": jax.tree.map(jnp.copy, params),
        "first": zeros,
        "second": jax.tree.map(jnp.copy, zeros),
        "average": jax.tree.map(jnp.copy, params),
        "count": jnp.int32(0),
    }
    data = jnp.asarray(np.frombuffer(b"the quick brown fox " * 40, np.uint8))
    losses = []
    for i in range(3):
        state, loss = train.train_steps(
            graph,
            state,
            data,
            jnp.full(20, 3e-3),
            jax.random.key(i, impl="rbg"),
            batch=8,
            context=32,
            dropout=0.1,
            decay=0.1,
        )
        losses.append(float(loss))
    assert losses[0] > losses[1] > losses[2] and losses[2] < 3.0
    assert int(state["count"]) == 60
    before = train.held_out_bits(graph, params, [b"the quick brown fox"], context=32, batch=1)
    after = train.held_out_bits(graph, state["average"], [b"the quick brown fox"], context=32, batch=1)
    assert after < before
