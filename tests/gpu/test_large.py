"""Sizes past the usual limits: pools of more than 2^31 and 2^32 elements, 70,000 sequences, a million tokens.

Hosts without a GPU run the same code at small sizes, on the CPU kernels.
"""

from __future__ import annotations

import dataclasses
import functools

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_turboattn as ta
from jax_turboattn.testing import codecs, golden, tolerances

GPU = jax.default_backend() == "gpu"
IMPLEMENTATION = "cuda" if GPU else "cpu"
BF16 = np.dtype(jnp.bfloat16)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(BF16)


def jit(name: str, donate: str | None = None, **options):
    """A public function with its options, called by keywords; the argument `donate` is updated in place."""
    if name != "copy_pages":
        options["implementation"] = IMPLEMENTATION
    function = functools.partial(getattr(ta, name), **options)
    return jax.jit(function, donate_argnames=donate) if donate else jax.jit(function)


# ---- pools past 2^31 elements


class Pool:
    """A pool whose pages hold NaN but for a few, and a numpy pool of those few that the golden works on.

    Half of the few are the pool's last pages, the others lie at random below. Offsets that lost their upper bits end in
    pages of NaN, or nowhere.
    """

    K, D, P = 2, 128, 64
    PAGE = K * P * D  # elements

    def __init__(self, kv_dtype: str, few: int):
        self.kv_dtype = kv_dtype
        limit = {"bfloat16": 2**31, "int8": 2**32}[kv_dtype]  # more than 4 GB for the keys, and for the values
        pages = limit // self.PAGE + few if GPU else 4 * few
        rng = np.random.default_rng(0)
        last = np.arange(pages - few // 2, pages)
        self.ids = np.concatenate([last, few + rng.choice(pages - 2 * few, few - len(last), replace=False)])
        rng.shuffle(self.ids)
        self.cache = self.empty(pages)
        self.small = conformance.to_numpy(self.empty(few))
        assert not GPU or self.cache.key.size > 2**31

    def empty(self, pages: int) -> ta.PagedKVCache:
        create = functools.partial(ta.PagedKVCache.create, pages, self.K, self.D, page_size=self.P, dtype=self.kv_dtype)
        fill = {jnp.dtype(jnp.bfloat16): jnp.nan, jnp.dtype(jnp.uint8): 255}
        return jax.jit(lambda: jax.tree.map(lambda x: jnp.full_like(x, fill[x.dtype]), create()))()

    def compare(self, what: str) -> None:
        """The few pages, read by XLA, have the bytes that the golden wrote."""
        few = jax.jit(lambda cache, ids: jax.tree.map(lambda x: x[ids], cache))(self.cache, self.ids.astype(np.int32))
        few = conformance.to_numpy(few)
        for got, want in zip(conformance.leaves(few), conformance.leaves(self.small), strict=True):
            tolerances.same_values(what, got, want)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_pool_beyond_int32(kv_dtype):
    """append_kv, paged_attention, paged_decode, a fused step, gather_kv and copy_pages on pages at its far end."""
    H, B, M = 4, 3, 5
    pool = Pool(kv_dtype, few=B * M + 5)
    rng = np.random.default_rng(1)
    small_table = rng.permutation(B * M).reshape(B, M).astype(np.int32)
    table = pool.ids[small_table].astype(np.int32)
    lens = np.array([M * pool.P - 1, 200, 70], np.int32)

    def new(tokens):
        heads = dict(query=H, key=pool.K, value=pool.K)
        return {name: normal(rng, tokens, n, pool.D) for name, n in heads.items()}

    def pair(**arrays):
        """Arguments for the pool and for the small one."""
        ours, theirs = dict(cache=pool.cache, page_table=table), dict(cache=pool.small, page_table=small_table)
        return ours | arrays, theirs | arrays

    offsets = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    rows = new(int(lens.sum()))
    ours, theirs = pair(key=rows["key"], value=rows["value"], kv_lens=lens, q_offsets=offsets)
    pool.cache = jit("append_kv", donate="cache")(**ours)
    pool.small = golden.append_kv(**theirs)
    pool.compare("append_kv")

    chunks = np.array([0, 40, 41, 71], np.int32)  # one decode row among chunks
    ours, theirs = pair(query=new(75)["query"], kv_lens=lens, q_offsets=chunks)
    check("paged_attention", jit("paged_attention", return_residual=True)(**ours), theirs)
    ours, theirs = pair(query=new(B)["query"], kv_lens=lens)
    check("paged_decode", jit("paged_decode", return_residual=True)(**ours), theirs)
    ours, theirs = pair(kv_lens=lens)
    gathered, wanted = jit("gather_kv")(**ours), golden.gather_kv(**theirs)
    for got, want in zip(conformance.to_numpy(gathered), wanted, strict=True):
        tolerances.same_values("gather_kv", got, want)

    ours, theirs = pair(**new(B), kv_lens=lens + 1, q_offsets=np.arange(B + 1, dtype=np.int32))
    result, pool.cache = jit("paged_attention_step", donate="cache", return_residual=True)(**ours)
    check("paged_attention_step", result, theirs)
    pool.small = golden.paged_attention_step(**theirs)[1]
    pool.compare("paged_attention_step")

    moves = np.arange(5), B * M + np.arange(5)  # among the few
    source, destination = (pool.ids[m].astype(np.int32) for m in moves)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_TURBOATTN_IMPLEMENTATION", IMPLEMENTATION)
        pool.cache = jit("copy_pages", donate="cache")(cache=pool.cache, source=source, destination=destination)
    pool.small = golden.copy_pages(pool.small, *moves)
    pool.compare("copy_pages")


def check(name: str, result, arguments: dict) -> None:
    """out and lse within the budget of the golden, or row by row of the one that folds scales."""
    out, lse = (np.asarray(x) for x in result)
    reference = functools.partial(getattr(golden, name), **arguments)

    def both(folded: bool) -> tuple[golden.Result, ...]:
        found = (reference(folded=folded, baseline=baseline) for baseline in (False, True))
        return tuple(x if isinstance(x, golden.Result) else x[0] for x in found)

    tolerances.check_attention(name, out, lse, *tolerances.nearer(lse, both(False), both(True)))


# ---- 70,000 sequences


def test_seventy_thousand_sequences():
    """paged_decode and a fused step of one token each, then both kernels of paged_attention, over int8 pages."""
    B, H, K, D, P = (70_000 if GPU else 700), 2, 1, 64, 16
    rng = np.random.default_rng(2)
    offsets = np.arange(B + 1, dtype=np.int32)
    lens = rng.integers(1, P + 1, B).astype(np.int32)
    table = rng.permutation(B).reshape(B, 1).astype(np.int32)
    query, key, value = (normal(rng, B, n, D) for n in (H, K, K))
    codes = rng.integers(0, 256, (2, B, K, P, D), np.uint8)
    params = np.stack([rng.uniform(0.01, 0.02, (2, B, K, P)), rng.uniform(-2, -1, (2, B, K, P))], -1).astype(BF16)
    empty = ta.PagedKVCache.create(1, K, D, page_size=P, dtype="int8")
    named = dict(zip(("key", "value", "key_params", "value_params"), map(jnp.asarray, (*codes, *params))))
    cache = dataclasses.replace(empty, **named)

    def check_all(what: str, result) -> None:
        """All rows by a vectorised float64 softmax, those around 65,536 and the last ones by the golden's budget."""
        out, lse = (np.asarray(x) for x in result)
        pages = table[:, 0]
        k, v = (codecs.decode_int(c[pages, 0], p[pages, 0], "int8").astype(np.float64) for c, p in zip(codes, params))
        scores = np.einsum("bhd,bsd->bhs", query.astype(np.float64), k) / np.sqrt(D)
        scores[np.broadcast_to((np.arange(P) >= lens[:, None])[:, None], scores.shape)] = -np.inf
        weights = np.exp(scores)
        total = weights.sum(-1, keepdims=True)
        assert np.abs(lse - np.log(total[..., 0])).max() < 0.02
        assert np.abs(out.astype(np.float64) - np.einsum("bhs,bsd->bhd", weights / total, v)).max() < 0.04
        some = np.unique(np.concatenate([np.arange(20), B - 1 - np.arange(20), rng.integers(0, B, 100)]))
        some = np.unique(np.concatenate([some, np.arange(65_500, 65_600)])) if GPU else some
        own = golden.Cache(codes[0], codes[1], params[0], params[1], "int8", D)
        arguments = dict(query=query[some], cache=own, page_table=table[some], kv_lens=lens[some])
        check("paged_decode", (out[some], lse[some]), arguments)

    paged = dict(page_table=table, kv_lens=lens)
    check_all("paged_decode", jit("paged_decode", return_residual=True)(query=query, cache=cache, **paged))

    # The step writes each sequence's last slot: here too, as the codec of the tests has it.
    step = jit("paged_attention_step", return_residual=True)
    result, written = step(query=query, key=key, value=value, cache=cache, q_offsets=offsets, **paged)
    for i, rows in enumerate((key, value)):
        codes[i, table[:, 0], :, lens - 1], params[i, table[:, 0], :, lens - 1] = codecs.encode_int(rows, "int8")
    for got, want in zip(conformance.leaves(conformance.to_numpy(written)), (*codes, *params), strict=True):
        tolerances.same_values("paged_attention_step: cache", got, want)
    check_all("paged_attention_step", result)

    # One row more than sequences, so that there is a prefill kernel: the row is nobody's.
    padded = np.concatenate([query, query[:1]])
    out, lse = jit("paged_attention", return_residual=True)(query=padded, cache=written, q_offsets=offsets, **paged)
    assert not np.asarray(out[B]).any() and np.isneginf(np.asarray(lse[B])).all()
    check_all("paged_attention", (out[:B], lse[:B]))


# ---- a million tokens


class Haystack:
    """Contexts of M full int8 pages, each with a needle: a key that draws about as much weight as all others together.

    Pages are copies of PATTERNS ones, so that the exact result is a sum over these, times how often a row sees them.
    Scales are powers of two and codes times scale fit bfloat16, so that nothing depends on where a value is rounded.
    """

    H, K, D, P, PATTERNS = 8, 2, 128, 64, 16
    M = 16_384 if GPU else 512
    SCALE, ZERO = 2.0**-6, -2.0  # values in [-2, 2)

    def __init__(self, needles: list[int]):
        """needles: positions, one a sequence."""
        rng, B = np.random.default_rng(3), len(needles)
        self.needles, self.rng = np.array(needles), rng
        base = rng.integers(0, 256, (2, self.PATTERNS + B, self.K, self.P, self.D), np.uint8)
        self.signs = rng.integers(0, 2, (B, self.K, self.D))
        for b, needle in enumerate(needles):  # page PATTERNS + b holds the needle of sequence b
            base[0, self.PATTERNS + b, :, needle % self.P] = 255 * self.signs[b]
        self.base = base * self.SCALE + self.ZERO
        contents = np.concatenate([rng.integers(0, self.PATTERNS, self.M), self.PATTERNS + np.arange(B)])
        pages = rng.permutation(self.M + B)  # page id of each of the contents
        self.table = np.stack([rng.permutation(self.M) for _ in needles])
        self.table[np.arange(B), self.needles // self.P] = self.M + np.arange(B)
        self.contents = contents[self.table]
        self.table = pages[self.table].astype(np.int32)
        order = contents[np.argsort(pages)]

        def spread(codes):
            filled = codes[order]
            params = jnp.broadcast_to(jnp.array([self.SCALE, self.ZERO], jnp.bfloat16), (*filled.shape[:-1], 2))
            return filled, params

        (key, key_params), (value, value_params) = (jax.jit(spread)(jnp.asarray(x)) for x in base)
        empty = ta.PagedKVCache.create(1, self.K, self.D, page_size=self.P, dtype="int8")
        self.cache = dataclasses.replace(empty, key=key, value=value, key_params=key_params, value_params=value_params)

    def queries(self, tokens: int) -> np.ndarray:
        """[B, tokens, H, D]: along the needle of the sequence, as long as log(keys) asks for, no two rows the same."""
        size = np.log(1.3 * self.M * self.P) / (2 * np.sqrt(self.D))
        size = size * self.rng.uniform(0.98, 1.02, (len(self.needles), tokens, self.H, 1))
        along = np.repeat(2 * self.signs - 1, self.H // self.K, axis=1)
        return (along[:, None] * size).astype(BF16)

    def check(self, what: str, result, query: np.ndarray, lens: np.ndarray) -> None:
        """result (out, lse) of query [B, Q, H, D], whose last row sees lens[b] keys, the one before it a key less."""
        out, lse = (np.asarray(x).reshape(*query.shape[:3], -1).astype(np.float64) for x in result)
        tokens = query.shape[1]
        for b, i in np.ndindex(query.shape[:2]):
            keys = int(lens[b]) - (tokens - 1 - i)
            full, rest = divmod(keys, self.P)
            times = np.zeros((self.base.shape[1], self.P))  # how often the row sees each slot of each pattern
            times += np.bincount(self.contents[b, :full], minlength=len(times))[:, None]
            if rest:
                times[self.contents[b, full], :rest] += 1
            for h in range(self.H):
                k, v = self.base[:, :, h // (self.H // self.K)]
                scores = k @ query[b, i, h].astype(np.float64) / np.sqrt(self.D)
                weights = times * np.exp(scores)
                total = weights.sum()
                want, spread = (np.tensordot(weights / total, x, 2) for x in (v, np.abs(v)))
                seen = self.needles[b] < keys
                share = np.exp(scores[self.PATTERNS + b, self.needles[b] % self.P]) / total if seen else 0.0
                assert not seen or 0.3 < share < 0.7  # else it would be no test
                limit = tolerances.ulp(np.abs(want).max(), BF16) + 2.0**-8 * spread
                tolerances.within(f"{what} {b, i, h}: out", out[b, i, h], want, limit)
                floor = tolerances.float32_floor(np.array(keys), np.abs(scores).max())
                tolerances.within(f"{what} {b, i, h}: lse", lse[b, i, h, 0], np.log(total), floor)


def test_a_needle_in_a_million_tokens():
    tokens = Haystack.M * Haystack.P
    if GPU:
        assert tokens == 1_048_576
    needles = [0, tokens - 1, tokens // 2 - 1, tokens // 2, 65_536 % tokens, tokens - 70, tokens // 3]
    stack = Haystack(needles)
    B = len(needles)
    lens = np.full(B, tokens, np.int32)
    lens[-1] -= 37  # its last page is no full one
    paged = dict(cache=stack.cache, page_table=stack.table, kv_lens=lens)

    query = stack.queries(1)
    decode = jit("paged_decode", return_residual=True)
    stack.check("paged_decode", decode(query=query[:, 0], **paged), query, lens)

    chunk = 24  # tokens: more than a decode unit takes
    query, offsets = stack.queries(chunk), chunk * np.arange(B + 1, dtype=np.int32)
    packed = query.reshape(-1, *query.shape[2:])
    attention = jit("paged_attention", return_residual=True)
    stack.check("paged_attention", attention(query=packed, q_offsets=offsets, **paged), query, lens)


def test_a_new_token_is_the_needle_of_a_million():
    """A fused step at position 1,048,575: what it appends is what it attends to."""
    tokens = Haystack.M * Haystack.P
    stack = Haystack([tokens - 1] * 3)
    lens, offsets = np.full(3, tokens, np.int32), np.arange(4, dtype=np.int32)
    own = stack.PATTERNS + np.arange(3)  # each sequence's last page
    key, value = stack.base[:, own][..., -1, :].astype(BF16)
    for rows in (key, value):  # rows that the codec gives the scale and zero of all others
        rows[:, :, 0], rows[:, :, 1] = stack.ZERO, stack.ZERO + 255 * stack.SCALE
    stack.base[0][own, :, -1], stack.base[1][own, :, -1] = key, value
    query = stack.queries(1)
    blank = dataclasses.replace(stack.cache, key=stack.cache.key.at[stack.table[:, -1], :, -1].set(7))
    step = jit("paged_attention_step", return_residual=True)
    arrays = dict(query=query[:, 0], key=key, value=value, q_offsets=offsets)
    result, _ = step(**arrays, cache=blank, page_table=stack.table, kv_lens=lens)
    stack.check("paged_attention_step", result, query, lens)
