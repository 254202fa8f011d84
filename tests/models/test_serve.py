"""The continuous-batching server: its tokens are those of full recomputation, and its pages come back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import shipped_decoder, small_decoder

from jax_turboattn import PagedKVCache
from jax_turboattn.models.decoder import step
from jax_turboattn.models.serve import Server

nnx = pytest.importorskip("flax.nnx")

PROMPTS = [
    b"def read_lines(path):",
    b"import os\nimport sys\n\n\nclass Stack:\n    def __init__(self):\n        self.items = []\n",
    b"try:\n    ",
    b"    for key, value in self._data.items():\n        if",
]
NEW = 64


@functools.partial(jax.jit, static_argnames=("graph", "count"))
def _recompute(graph, params, tokens, lengths, count):
    def extend(_, carry):
        tokens, lengths = carry
        logits = nnx.merge(graph, params)(tokens)
        rows = jnp.arange(tokens.shape[0])
        new = jnp.argmax(logits[rows, lengths - 1], -1).astype(tokens.dtype)
        return tokens.at[rows, lengths].set(new), lengths + 1

    return jax.lax.fori_loop(0, count, extend, (tokens, lengths))[0]


def greedy_by_recomputation(decoder, prompts, count):
    """Each new token from the whole sequence so far, without a cache."""
    graph, params = nnx.split(decoder)
    tokens = np.zeros((len(prompts), max(map(len, prompts)) + count), np.int32)
    for row, prompt in zip(tokens, prompts):
        row[: len(prompt)] = list(prompt)
    lengths = np.array([len(p) for p in prompts], np.int32)
    done = np.asarray(_recompute(graph, params, jnp.asarray(tokens), jnp.asarray(lengths), count))
    return [row[n : n + count].tolist() for row, n in zip(done, lengths)]


def greedy_by_prefill(decoder, prompts, count, kv_dtype):
    """Each new token from one prefill of the whole sequence so far through an empty cache of `kv_dtype`."""
    graph, params = nnx.split(decoder)
    config = decoder.config
    sequences = [list(prompt) for prompt in prompts]
    columns = -(-(max(map(len, prompts)) + count) // 16)
    rows = sum(map(len, prompts)) + len(prompts) * count
    table = np.arange(len(prompts) * columns, dtype=np.int32).reshape(len(prompts), columns)
    for _ in range(count):
        cache = PagedKVCache.create(
            table.size,
            config.num_kv_heads,
            config.head_dim,
            page_size=16,
            num_layers=config.num_layers,
            dtype=kv_dtype,
            param_dtype=decoder.dtype,
        )
        packed = np.zeros(rows, np.int32)
        lengths = np.array([len(s) for s in sequences], np.int32)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        packed[: offsets[-1]] = np.concatenate(sequences)
        logits, _ = step(graph, params, cache, packed, table, lengths, offsets)
        for sequence, token in zip(sequences, np.asarray(jnp.argmax(logits, -1))):
            sequence.append(int(token))
    return [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts)]


def serve(decoder, prompts, count, **options):
    """All prompts through a server with fewer slots than prompts; the pages must all come back."""
    options = {"num_pages": 24, "page_size": 16, "max_batch": 3, "max_length": 160, "chunk": 24} | options
    server = Server(decoder, **options)
    ids = [server.submit(prompt, count) for prompt in prompts]
    done = server.run()
    assert server.num_free_pages == options["num_pages"]
    assert server.stats.new_tokens == len(prompts) * count
    return [done[i].tokens for i in ids]


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_greedy_tokens_equal_full_recomputation(implementation):
    decoder = shipped_decoder(implementation)
    assert serve(decoder, PROMPTS, NEW) == greedy_by_recomputation(decoder, PROMPTS, NEW)


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_int8_tokens_equal_recomputation_through_int8(implementation):
    decoder = shipped_decoder(implementation)
    expected = greedy_by_prefill(decoder, PROMPTS, NEW, "int8")
    assert serve(decoder, PROMPTS, NEW, kv_dtype="int8") == expected


def small_server(**options):
    options = {"num_pages": 12, "page_size": 8, "max_batch": 2, "max_length": 40, "chunk": 8} | options
    return Server(small_decoder(None), **options)


def test_batching_does_not_change_tokens():
    prompts = [list(range(1, 1 + n)) for n in (1, 7, 8, 9, 20)]
    alone = [serve(small_decoder(None), [p], 12, max_batch=1)[0] for p in prompts]
    together = serve(small_decoder(None), prompts, 12, page_size=8, num_pages=40, max_batch=4, chunk=8)
    assert together == alone


def test_waits_for_pages_in_order_of_submission():
    server = small_server(num_pages=5, max_batch=3)
    big = [server.submit(range(24), 8) for _ in range(2)]  # four pages each
    small = server.submit(range(3), 2)
    order = []
    while server.num_running or server.num_waiting:
        assert server.num_running <= 2
        order += server.step()
    assert order.index(small) > order.index(big[0])
    assert server.stats.peak_pages <= 5
    assert server.num_free_pages == 5


def test_whole_pages_of_a_common_prompt_are_shared():
    prompt = list(range(20))
    expected = serve(small_decoder(None), [prompt + [5], prompt + [6, 7]], 6, max_batch=1)
    server = small_server(num_pages=9)
    first = server.submit(prompt + [5], 6)
    for _ in range(3):
        server.step()  # 21 prompt tokens in chunks of 8
    second = server.submit(prompt + [6, 7], 6)
    done = server.run()
    assert server.stats.shared_tokens == 16  # two whole pages of 20 common tokens
    assert server.stats.prefill_tokens == 21 + 22 - 16
    assert [done[first].tokens, done[second].tokens] == expected
    assert server.num_free_pages == 9


def test_shared_pages_outlive_their_first_owner():
    prompt = list(range(20))
    server = small_server(num_pages=9, max_batch=2)
    server.submit(prompt, 2)
    for _ in range(3):
        server.step()
    late = server.submit(prompt, 12)
    done = server.run()
    assert server.stats.shared_tokens == 16
    assert done[late].tokens == serve(small_decoder(None), [prompt], 12, max_batch=1)[0]
    again = server.submit(prompt, 2)  # nobody holds the pages any more: all is computed again
    server.run()
    assert server.stats.shared_tokens == 16
    assert again == 2 and server.num_free_pages == 9


def test_stop_token_ends_a_completion():
    tokens = serve(small_decoder(None), [[3, 4]], 12, max_batch=1)[0]
    stop = tokens[5]
    server = small_server(stop_token=stop)
    request = server.submit([3, 4], 12)
    completion = server.run()[request]
    assert completion.reason == "stop"
    assert completion.tokens == tokens[: tokens.index(stop)]
    assert server.num_free_pages == 12


def test_sampling_depends_on_seed_and_own_tokens_only():
    def sample(seed, others):
        server = small_server()
        for other in range(others):
            server.submit([7, 8, other], 10, temperature=20.0, seed=99)
        request = server.submit([3, 4], 16, temperature=20.0, seed=seed)
        return server.run()[request].tokens

    assert sample(1, 0) == sample(1, 3)
    assert sample(1, 0) != sample(2, 0)


def test_temperature_zero_is_greedy_and_small_ones_nearly():
    server = small_server()
    ids = [server.submit([3, 4], 12, temperature=t, seed=5) for t in (0.0, 1e-6, 50.0)]
    done = server.run()
    assert done[ids[0]].tokens == done[ids[1]].tokens != done[ids[2]].tokens


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([], 4), "prompt must have at least one token"),
        (([61], 4), r"prompt must hold tokens of 0..60, got \[61\]"),
        (([1], 0), "max_tokens must be >= 1, got 0"),
        (([1] * 30, 11), r"must be <= max_length = 40 together, got 30 \+ 11"),
        (([1] * 30, 10), "must fit the pool of 4 pages of 8 tokens, got 30"),
    ],
)
def test_requests_that_cannot_be(arguments, message):
    with pytest.raises(ValueError, match=message):
        small_server(num_pages=4).submit(*arguments)
    with pytest.raises(ValueError, match="temperature must be finite and >= 0, got -1"):
        small_server().submit([1], 1, temperature=-1)


def test_sizes_that_cannot_be():
    for options, message in (
        ({"num_pages": 0}, "num_pages must be >= 1, got 0"),
        ({"chunk": 1}, "chunk must be >= max_batch = 2, got 1"),
        ({"page_size": 12}, "page_size must be a power of two"),
    ):
        with pytest.raises(ValueError, match=message):
            small_server(**options)
