"""One small call for every kernel row of the CUDA module: what compute-sanitizer watches.

    compute-sanitizer --tool memcheck python tests/gpu/sanitizer_cases.py [--only REGEX]

A sanitizer slows every kernel and every allocation down, so this is one process without pytest: inputs are made by
numpy and copied over, and a call is one compiled program of nothing but itself. Results come back to the host, which is
a read that initcheck sees; NaN in them is an error here.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import re
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import jax_turboattn as ta

H, K, P, M, N = 4, 2, 16, 5, 24  # query heads, kv heads, tokens a page, columns of the page table, pages
KV_LENS = np.array([1, 37, 80, 0], np.int32)  # one token, a ragged tail, full, empty
B = len(KV_LENS)


def dims(row: dict) -> tuple[int, int]:
    """D and Dv; kernels that take any run with 64."""
    head_dim = row["head_dim"] or 64
    return head_dim, row["value_dim"] or head_dim


def normal(rng: np.random.Generator, dtype, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def page_table(rng: np.random.Generator) -> np.ndarray:
    table = rng.permutation(N)[: B * M].reshape(B, M).astype(np.int32)
    table[np.arange(M) * P >= KV_LENS[:, None]] = 2**31 - 1  # never dereferenced
    return table


def cache(rng: np.random.Generator, row: dict) -> ta.PagedKVCache:
    """A pool full of finite values."""
    (head_dim, value_dim), dtype, kv_dtype = dims(row), row["dtype"], row["kv_dtype"]
    with jax.default_device(jax.devices("cpu")[0]):
        empty = ta.PagedKVCache.create(
            N, K, head_dim, value_dim=value_dim, page_size=P, dtype=kv_dtype, param_dtype=dtype
        )

    def fill(array, params):
        if params:
            return rng.uniform(0.01, 0.1, array.shape).astype(array.dtype)
        if array.dtype == jnp.uint8:
            return rng.integers(0, 256, array.shape).astype(np.uint8)
        return normal(rng, array.dtype, *array.shape)

    fields = {n: getattr(empty, n) for n in ("key", "value", "key_params", "value_params")}
    filled = {n: None if x is None else fill(x, "params" in n) for n, x in fields.items()}
    return dataclasses.replace(empty, **filled)


def append(rng, row):
    (head_dim, value_dim), dtype = dims(row), row["dtype"]
    offsets = np.array([0, 1, 30, 60, 60], np.int32)
    rope = ta.RopeConfig(dim=head_dim)
    new = [normal(rng, dtype, 64, K, d) for d in (head_dim, value_dim)]
    return functools.partial(ta.append_kv, rope=rope), (cache(rng, row), *new, page_table(rng), KV_LENS, offsets)


def gather(rng, row):
    return functools.partial(ta.gather_kv, out_dtype=row["dtype"]), (cache(rng, row), page_table(rng), KV_LENS)


def attention(rng, row):
    (head_dim, value_dim), dtype = dims(row), row["dtype"]
    shapes = ((70, H, head_dim), (130, K, head_dim), (130, K, value_dim))
    offsets = np.array([0, 1, 1, 64, 68], np.int32), np.array([0, 37, 50, 120, 128], np.int32)
    return ta.ragged_attention, (*(normal(rng, dtype, *shape) for shape in shapes), *offsets)


def prefill(rng, row):
    offsets = np.array([0, 1, 30, 70, 70], np.int32)
    query = normal(rng, row["dtype"], 72, H, dims(row)[0])
    return ta.paged_attention, (query, cache(rng, row), page_table(rng), KV_LENS, offsets)


def decode(rng, row):
    """A fused step: paged_decode and more, since a call with no more tokens than sequences appends as it goes."""
    head_dim, value_dim = dims(row)
    new = [normal(rng, row["dtype"], B, heads, d) for heads, d in ((H, head_dim), (K, head_dim), (K, value_dim))]
    offsets = np.array([0, 1, 3, 4, 4], np.int32)
    step = functools.partial(ta.paged_attention_step, rope=ta.RopeConfig(dim=head_dim))
    return step, (*new, cache(rng, row), page_table(rng), KV_LENS, offsets)


def planned(rng, row):
    """The same step with a plan, which the row's launch makes."""
    step, arguments = decode(rng, row)

    def call(query, key, value, *rest):
        plan = ta.make_plan(query, *rest)
        return step(query, key, value, *rest, plan=plan)

    return call, arguments


def merge(rng, row):
    outs, lses = normal(rng, row["dtype"], 3, 9, H, dims(row)[1]), normal(rng, "float32", 3, 9, H)
    lses[1, ::2] = -np.inf
    return ta.merge_partials, (outs, lses)


def copy_pages(rng, row):
    pages = np.array([0, 1, -1, 5], np.int32), np.array([7, 8, 9, N], np.int32)
    return ta.copy_pages, (cache(rng, row), *pages)


def many_tiles(rng, row):
    """A causal call whose blocks go from tile to tile in the sm90 prefill kernels: more tiles than a card of 132 SMs has
    blocks, an odd number of a sequence and kv head, over 1,024 keys.
    """
    (head_dim, value_dim), dtype = dims(row), row["dtype"]
    if row["phase"] == "attention":
        causal = functools.partial(ta.attention, is_causal=True)
        return causal, tuple(normal(rng, dtype, 1290, 13, d) for d in (head_dim, head_dim, value_dim))
    tokens, group = 1064, 16
    query = normal(rng, dtype, tokens, group, head_dim)
    pages = -(-tokens // 64)
    pool = ta.PagedKVCache.create(pages, 1, head_dim, value_dim=value_dim, page_size=64, dtype=dtype)
    table = rng.permutation(pages).astype(np.int32)[None]
    offsets, lens = np.array([0, tokens], np.int32), np.array([tokens], np.int32)
    whole_keys = functools.partial(ta.paged_attention, batch_invariant=True)  # not in parts
    return whole_keys, (query, pool, table, lens, offsets)


def long_tile(rng, row):
    """A short piece of a long sequence among others, in a packed call of the sm90 prefill kernels: its tiles are cut, and
    decode, which the first sequence is for, begins while they run.
    """
    head_dim, value_dim = dims(row)
    q_lens, lens = np.array([1, 40, 24, 30]), np.array([300, 40, 1700, 0], np.int32)
    pages = np.cumsum([0, *-(-lens // 64)])
    table = np.full((len(lens), 40), -1, np.int32)
    for b, (first, last) in enumerate(zip(pages, pages[1:])):
        table[b, : last - first] = np.arange(first, last)
    empty = ta.PagedKVCache.create(int(pages[-1]), K, head_dim, value_dim=value_dim, page_size=64, dtype=row["dtype"])
    query = normal(rng, row["dtype"], int(q_lens.sum()) + 3, H, head_dim)
    return ta.paged_attention, (query, empty, table, lens, np.array([0, *np.cumsum(q_lens)], np.int32))


def one_sequence(rng, row):
    """A call whose units are clusters' in the decode kernels: of so many kv heads that 16 blocks each fill a card."""
    kv_heads = 8
    pool = ta.PagedKVCache.create(N, kv_heads, dims(row)[0], page_size=P, dtype=row["dtype"])
    query = normal(rng, row["dtype"], 1, H * kv_heads, dims(row)[0])
    return ta.paged_decode, (query, pool, page_table(rng)[1:2], KV_LENS[1:2])


def wide_groups(rng, row):
    """Units of 16 rows in the decode kernels, one sequence with several steps of their rings."""
    query = normal(rng, row["dtype"], 2, 16 * K, dims(row)[0])
    table = rng.permutation(N).astype(np.int32)
    lens = np.array([N * P - 5, 37], np.int32)
    return ta.paged_decode, (query, cache(rng, row), np.stack([table, table[::-1]]), lens)


def many_units(rng, row):
    """As many units as blocks, of ragged lengths: blocks merge those that are cut."""
    kv_heads, batch = 8, 80
    pool = ta.PagedKVCache.create(N, kv_heads, dims(row)[0], page_size=P, dtype=row["dtype"])
    query = normal(rng, row["dtype"], batch, H * kv_heads, dims(row)[0])
    table, lens = rng.integers(0, N, (batch, 9)), rng.integers(0, 9 * P, batch)
    return ta.paged_decode, (query, pool, table.astype(np.int32), lens.astype(np.int32))


CALLS = dict(
    append=append,
    gather=gather,
    attention=attention,
    prefill=prefill,
    decode=decode,
    merge=merge,
    copy_pages=copy_pages,
)


def run(row: dict, seed: int = 0) -> None:
    """Runs the calls of a kernel row twice.

    Raises:
      ValueError: the row has a phase without a call here, or NaN came out.
    """
    if row["phase"] not in CALLS:
        raise ValueError(f"no call for phase {row['phase']}: add it to {__file__}")
    makers = [CALLS[row["phase"]]]
    # One dtype and head dim stand for all: under a sanitizer a call of this size takes seconds.
    if row["family"] == "sm90" and (row["head_dim"], row["dtype"], row["kv_dtype"]) == (128, "bfloat16", "bfloat16"):
        makers.append(many_tiles)
        makers += [long_tile] if row["phase"] == "prefill" else []
    if row["phase"] == "decode" and row["dtype"] == row["kv_dtype"]:
        makers += [one_sequence, many_units, planned]
    if row["phase"] == "decode" and (row["head_dim"], row["dtype"], row["kv_dtype"]) == (128, "bfloat16", "int4"):
        makers.append(wide_groups)
    os.environ["JAX_TURBOATTN_IMPLEMENTATION"] = implementation(row)
    for make in makers:
        function, arguments = make(np.random.default_rng(seed), row)
        arguments = jax.device_put(arguments)
        compiled = jax.jit(function).lower(*arguments).compile()
        for _ in range(2):
            for array in jax.tree.leaves(compiled(*arguments)):
                result = np.asarray(array)
                if result.dtype != np.uint8 and np.isnan(result.astype(np.float32)).any():
                    raise ValueError("NaN in a result")


def implementation(row: dict) -> str:
    """The row's own module, and its own family where another would take the call."""
    if row["module"] == "_cpu":
        return "cpu"
    same = ("phase", "head_dim", "value_dim", "dtype", "kv_dtype")
    families = {r["family"] for r in rows("_cuda") if all(r[n] == row[n] for n in same)}
    return f"cuda:{row['family']}" if len(families) > 1 else "cuda"


@functools.cache
def _all_rows() -> list[dict]:
    from jax_turboattn import inspection

    return inspection.kernels()


def rows(module: str) -> list[dict]:
    """Kernel rows of `_cuda` or `_cpu`. A row whose dtypes are taken at run time runs with the first of each."""
    found = []
    for row in _all_rows():
        if row["module"] == module:
            dtype = row["dtype"] or "bfloat16"
            found.append(row | {"dtype": dtype, "kv_dtype": row["kv_dtype"] or dtype})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", metavar="REGEX", default="", help="of kernel names")
    only = parser.parse_args().only
    chosen = [row for row in rows("_cuda") if re.search(only, row["name"])]
    if not chosen:
        print(f"no kernel row has {only!r} in its name")
        return 5
    failed = []
    for row in chosen:
        started = time.perf_counter()
        try:
            run(row)
            result = "ran"
        except Exception as error:  # every row is tried; the sanitizer reports its own findings besides
            failed.append(row["name"])
            result = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
        print(f"{row['name']:<50} {time.perf_counter() - started:6.1f} s  {result}", flush=True)
    print(f"{len(chosen) - len(failed)} of {len(chosen)} kernel rows ran")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
