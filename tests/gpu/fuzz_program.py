"""Index arrays that hold anything, many sets of them in one program: no wrong access, no write to a page not named.

    python tests/gpu/fuzz_program.py [--implementation NAME] [--sets S] [--calls N] [--only REGEX] [--part I/N]

Each program scans over `sets` sets of index arrays; the host sends `calls` times new ones. Pages 0 and N - 1 hold NaN
and are never named: what reads them shows NaN, what writes any page that was not named is seen by comparing bytes. Runs
under compute-sanitizer too, with few sets.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_turboattn as ta

H, K, D, P, N, M, B, T, L = 4, 2, 64, 16, 40, 6, 5, 40, 2
INT32 = np.iinfo(np.int32)
DTYPE = "bfloat16"
PLAN_WORDS = (16, 8)  # of a plan's 512 rows, as often as it takes
PLANNED = ("planned_decode", "planned_few")  # a plan that holds anything may give NaN, but names no page
PAGED = [(op, kv) for op in ("attention", "ranked", "decode", "step", "few", *PLANNED) for kv in (DTYPE, "int8")]
STORAGE = [(op, kv) for op in ("append", "gather", "copy") for kv in (DTYPE, "int8", "int4", "float8_e4m3fn")]
PROGRAMS = [*PAGED, *STORAGE, ("ragged", DTYPE), ("dense", DTYPE)]


# ---- values


def ints(rng: np.random.Generator, shape, low: int, high: int) -> np.ndarray:
    """int32 in the range that means something; in three sets of four a third of them wild: edges, or anything."""
    values = rng.integers(low, high, shape, np.int64, endpoint=True)
    edges = np.array([INT32.min, INT32.min + 1, -1, low - 1, high + 1, N, INT32.max - 1, INT32.max])
    wild = np.where(
        rng.random(shape) < 0.5, rng.choice(edges, shape), rng.integers(INT32.min, INT32.max, shape, np.int64)
    )
    chance = np.where(rng.random(shape[0]) < 0.75, 0.35, 0.0).reshape(-1, *[1] * (len(shape) - 1))
    return np.where(rng.random(shape) < chance, wild, values).astype(np.int32)


def page_ids(rng, shape):
    """Never the pages that hold NaN."""
    ids = ints(rng, shape, 1, N - 2)
    return np.where((ids == 0) | (ids == N - 1), np.int32(-1), ids)


def offsets(rng, sets, count, rows):
    """Boundaries of `count` sequences in `rows`: sorted in half of the sets."""
    anything = ints(rng, (sets, count + 1), 0, rows)
    ordered = np.sort(rng.integers(0, rows, (sets, count + 1), np.int32, endpoint=True))
    return np.where(rng.random((sets, 1)) < 0.5, ordered, anything)


def draw(rng: np.random.Generator, sets: int) -> dict[str, np.ndarray]:
    """`sets` of every index array, by argument name."""
    return dict(
        page_table=page_ids(rng, (sets, B, M)),
        kv_lens=ints(rng, (sets, B), 0, M * P),
        q_offsets=offsets(rng, sets, B, T),
        kv_offsets=offsets(rng, sets, B, T),
        layer=ints(rng, (sets,), 0, L - 1),
        positions=ints(rng, (sets, T), 0, 1000),
        read_only_pages=ints(rng, (sets, B), 0, M),
        local_window_size=ints(rng, (sets, 2), -1, 40),
        cp_rank=ints(rng, (sets,), 0, 1),
        source=page_ids(rng, (sets, 3)),
        destination=page_ids(rng, (sets, 3)),
        query_seq_lengths=ints(rng, (sets, B), 0, T),
        key_value_seq_lengths=ints(rng, (sets, B), 0, T),
        query_offset=ints(rng, (sets, B), -T, T),
        segment_ids=ints(rng, (sets, B, T), 0, 3),
        plan=ints(rng, (sets, *PLAN_WORDS), 0, T),
        plan_kept=rng.random((sets, *PLAN_WORDS)) < rng.random((sets, 1, PLAN_WORDS[1])),
    )


def make_cache(kv_dtype: str) -> ta.PagedKVCache:
    """Finite values everywhere but in pages 0 and N - 1 (codes are finite: there the parameters are NaN)."""
    empty = ta.PagedKVCache.create(N, K, D, page_size=P, num_layers=L, dtype=kv_dtype, param_dtype=DTYPE)
    rng = np.random.default_rng(0)

    def fill(array):
        if array is None or array.ndim == 2:  # fp8: one scale a head
            return array
        if array.dtype == jnp.uint8:
            return jnp.asarray(rng.integers(0, 256, array.shape), jnp.uint8)
        values = rng.standard_normal(array.shape, np.float32)
        values[:, [0, N - 1]] = np.nan
        return jnp.asarray(values, array.dtype)

    fields = ("key", "value", "key_params", "value_params")
    return dataclasses.replace(empty, **{n: fill(getattr(empty, n)) for n in fields})


# ---- programs


def calls(implementation: str) -> dict[str, Callable]:
    """name -> call(cache, index arrays by name) -> results: a cache that was written, or arrays."""
    rng = np.random.default_rng(1)
    query, key, value = (jnp.asarray(rng.standard_normal((T, n, D), np.float32), DTYPE) for n in (H, K, K))
    batched = tuple(jnp.asarray(rng.standard_normal((B, T, n, D), np.float32), DTYPE) for n in (H, K, K))
    common = dict(implementation=implementation)
    rope = ta.RopeConfig(dim=D)

    def take(index, *names):
        return {name: index[name] for name in names}

    paged = ("page_table", "kv_lens", "q_offsets", "layer")
    written = ("positions", "read_only_pages")

    def attention(cache, index):
        return ta.paged_attention(query, cache, **take(index, *paged, "local_window_size"), **common)

    def ranked(cache, index):
        return ta.paged_attention(query, cache, **take(index, *paged, "cp_rank"), cp_size=2, **common)

    def decode(cache, index):
        return ta.paged_decode(query[:B], cache, **take(index, "page_table", "kv_lens", "layer"), **common)

    def step(cache, index):
        return ta.paged_attention_step(query, key, value, cache, **take(index, *paged, *written), rope=rope, **common)

    def few(cache, index):
        """No more tokens than sequences: the decode kernel appends."""
        named = take(index, *paged, "read_only_pages", "local_window_size") | {"positions": index["positions"][:B]}
        return ta.paged_attention_step(query[:B], key[:B], value[:B], cache, **named, rope=rope, **common)

    def planned(function, cache, index, named):
        """With a plan of which some words are wild. Those that say what grid it is for stay: else nothing reads it."""
        arguments = dict(q_offsets=None) | {n: x for n, x in named.items() if n in paged}
        plan = ta.make_plan(query[:B], cache, **arguments, **common)
        parts = plan.data.reshape(-1, *PLAN_WORDS)
        kept = index["plan_kept"].at[:, 0].set(True)
        plan = dataclasses.replace(plan, data=jnp.where(kept, parts, index["plan"]).reshape(plan.data.shape))
        return function(cache=cache, **named, plan=plan, **common)

    def planned_decode(cache, index):
        named = take(index, "page_table", "kv_lens", "layer")
        return planned(functools.partial(ta.paged_decode, query[:B]), cache, index, named)

    def planned_few(cache, index):
        named = take(index, *paged, "read_only_pages") | {"positions": index["positions"][:B]}
        few = functools.partial(ta.paged_attention_step, query[:B], key[:B], value[:B], rope=rope)
        return planned(few, cache, index, named)

    def append(cache, index):
        return ta.append_kv(cache, key, value, **take(index, *paged, *written), rope=rope, **common)

    def gather(cache, index):
        return ta.gather_kv(cache, **take(index, "page_table", "kv_lens", "layer"), **common)

    def copy(cache, index):
        return ta.copy_pages(cache, **take(index, "source", "destination", "layer"))

    def ragged(cache, index):
        return ta.ragged_attention(
            query, key, value, **take(index, "q_offsets", "kv_offsets", "local_window_size"), **common
        )

    def dense(cache, index):
        names = ("query_seq_lengths", "key_value_seq_lengths", "query_offset", "segment_ids", "local_window_size")
        return ta.attention(*batched, is_causal=True, **take(index, *names), **common)

    functions = (attention, ranked, decode, step, few, planned_decode, planned_few, append, gather, copy, ragged, dense)
    return {f.__name__: f for f in functions}


def bits(x):
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def untouched(before: ta.PagedKVCache, after: ta.PagedKVCache, named: jax.Array) -> jax.Array:
    """Whether every page that is not among the ids `named` has the bytes it had; fp8 scales too."""
    free = jnp.ones(N, bool).at[jnp.where((named >= 0) & (named < N), named, N)].set(False, mode="drop")
    same = []
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after)):
        equal = bits(old) == bits(new)
        same.append(jnp.all(equal) if old.ndim == 2 else jnp.all(equal | ~free[:, None, None, None]))
    return jnp.all(jnp.array(same))


@functools.cache
def program(name: str, implementation: str):
    """(cache, sets of index arrays) -> for each set: 0 when all is well, 1 for NaN, 2 for a wrong page, 3 for both."""
    call = calls(implementation)[name]

    def one(cache, index):
        results = call(cache, index)
        results = results if isinstance(results, tuple) else (results,)
        arrays = [x for x in results if not isinstance(x, ta.PagedKVCache)]
        nan = jnp.any(jnp.array([jnp.any(jnp.isnan(x)) for x in arrays])) if arrays else jnp.bool_(False)
        bad = jnp.where(name in PLANNED, 0, nan.astype(jnp.int32))
        for after in (x for x in results if isinstance(x, ta.PagedKVCache)):
            named = index["destination" if name == "copy" else "page_table"].ravel()
            bad += 2 * (~untouched(cache, after, named)).astype(jnp.int32)
        return cache, bad

    return jax.jit(lambda cache, sets: jax.lax.scan(one, cache, sets)[1])


def fuzz(name: str, kv_dtype: str, implementation: str, sets: int, count: int, seed: int = 0) -> int:
    """Sends `count` times `sets` sets of index arrays through a program; returns how many there were.

    Raises:
      AssertionError: a set gave NaN, or changed a page that it does not name; the message holds it.
      NotImplementedError: the implementation has no kernel for it.
    """
    rng = np.random.default_rng(seed)
    cache = make_cache(kv_dtype)
    before = [np.asarray(bits(x)) for x in jax.tree.leaves(cache)]
    for _ in range(count):
        index = draw(rng, sets)
        bad = np.asarray(program(name, implementation)(cache, index))
        for i in np.flatnonzero(bad)[:1]:
            what = {1: "NaN", 2: "a page was written that is not named", 3: "NaN, and a wrong page"}[int(bad[i])]
            values = {n: x[i].tolist() for n, x in index.items()}
            raise AssertionError(f"{name} {kv_dtype}: {what}, in {np.count_nonzero(bad)} of {sets} sets: {values}")
    for old, x in zip(before, jax.tree.leaves(cache)):
        assert (old == np.asarray(bits(x))).all(), f"{name} {kv_dtype}: the cache that was given has changed"
    return count * sets


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--implementation", default="cuda")
    parser.add_argument("--sets", type=int, default=100)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--only", metavar="REGEX", default="", help="of `program dtype`")
    parser.add_argument("--part", default="0/1", help="I/N: of N processes that share the programs out, this is I")
    args = parser.parse_args()
    part, parts = map(int, args.part.split("/"))
    chosen = [(n, d) for n, d in PROGRAMS if re.search(args.only, f"{n} {d}")][part::parts]
    if not chosen:
        print(f"no program has {args.only!r} in its name")
        return 5
    failed = total = 0
    for name, kv_dtype in chosen:
        started = time.perf_counter()
        try:
            count = fuzz(name, kv_dtype, args.implementation, args.sets, args.calls)
            total += count
            result = f"{count} sets"
        except NotImplementedError as reason:
            result = f"declined: {reason}"
        except AssertionError as error:
            failed += 1
            result = f"FAILED: {str(error)[:400]}"
        print(f"{name:<10} {kv_dtype:<14} {time.perf_counter() - started:6.1f} s  {result}", flush=True)
    print(f"{len(chosen) - failed} of {len(chosen)} programs kept to their pages, in {total} calls")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
