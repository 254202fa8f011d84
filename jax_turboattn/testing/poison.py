"""Hostile surroundings for a paged cache: whatever no visible key occupies is filled with what must not be read.

Used the same way by tests and by anyone who writes a kernel: `lay_out` gives disjoint, permuted page tables; `poison`
overwrites every slot that no sequence uses; `wild_entries` replaces the dead entries of a table.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from . import codecs
from .golden import Cache

Array = np.ndarray[Any, Any]

WILD = (-1, -(2**31), 2**31 - 1, -7, 1 << 20)  # page ids that no pool has; the pool's own size is added per call
KINDS = ("nan", "inf", "negative_inf")


def lay_out(rng: np.random.Generator, batch: int, columns: int, num_pages: int) -> Array:
    """Page table int32 [batch, columns]: disjoint pages in random order. Needs num_pages >= batch * columns."""
    if num_pages < batch * columns:
        raise ValueError(f"lay_out: num_pages must be >= {batch} * {columns}, got {num_pages}")
    return rng.permutation(num_pages)[: batch * columns].reshape(batch, columns).astype(np.int32)


def wild_entries(rng: np.random.Generator, table: Array, live: Array, num_pages: int) -> Array:
    """The table with every entry outside `live` (bool [B, M]) replaced by ids that are wild, or by other pages' ids."""
    choices = np.array((*WILD, num_pages, *range(num_pages)), np.int64)
    wild = rng.choice(choices, table.shape)
    return np.where(live, table, wild).astype(np.int32)


def used_slots(
    table: Array, kv_lens: Array, num_pages: int, page_size: int, cp_rank: int = 0, cp_size: int = 1
) -> Array:
    """Which slots of the pool hold a token of some sequence: bool [N, P]."""
    used = np.zeros((num_pages, page_size), bool)
    for row, kv_len in zip(table, kv_lens):
        for column, page in enumerate(row):
            if 0 <= page < num_pages:
                s = (column * page_size + np.arange(page_size)) * cp_size + cp_rank
                used[page] |= s < int(kv_len)
    return used


def poison(cache: Cache, used: Array, kind: str, rng: np.random.Generator) -> Cache:
    """The cache with all slots outside `used` [N, P] (same for all layers) and all heads overwritten.

    Float slots become NaN or Inf; fp8 slots NaN (it has no Inf); integer codes become random bytes and their parameters
    NaN or Inf.
    """
    bad = {"nan": np.nan, "inf": np.inf, "negative_inf": -np.inf}[kind]
    unused = np.broadcast_to(~used[:, None, :], cache.key.shape[:-1])

    def spoil(array: Array | None) -> Array | None:
        if array is None:
            return None
        array = array.copy()
        if array.dtype == np.uint8:
            array[unused] = rng.integers(0, 256, array[unused].shape, np.uint8)
        else:
            array[unused] = np.nan if array.dtype == codecs.FP8 else bad
        return array

    per_token = cache.dtype in codecs.BITS
    return dataclasses.replace(
        cache,
        key=spoil(cache.key),
        value=spoil(cache.value),
        key_params=spoil(cache.key_params) if per_token else cache.key_params,
        value_params=spoil(cache.value_params) if per_token else cache.value_params,
    )


def poison_rows(x: Array, used: Array, kind: str) -> Array:
    """x with every index outside `used` (bool over x's leading axes) set to NaN or Inf."""
    x = x.copy()
    x[~used] = {"nan": np.nan, "inf": np.inf, "negative_inf": -np.inf}[kind]
    return x
