"""Kernel families: which kernels a call may take, and what a family by name forces. A made-up module: any host will do."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import pytest

import jax_turboattn as ta
from jax_turboattn import inspection
from jax_turboattn.backends import ffi

KERNELS = [
    *(("attention", family, "bfloat16") for family in ("sm90", "sm80")),
    ("decode", "sm80", "bfloat16"),
    ("decode", "sm80", "int8"),
    *(("prefill", family, "bfloat16") for family in ("sm90", "sm80")),
    ("prefill", "sm80", "int8"),
]


@pytest.fixture(autouse=True)
def module(monkeypatch):
    rows = [
        dict(name=f"{phase}_{family}_{kv}", phase=phase, family=family, head_dim=64, value_dim=64, dtype="bfloat16")
        | dict(kv_dtype=kv)
        for phase, family, kv in KERNELS
    ]
    fake = ffi.Module("cuda", types.SimpleNamespace(kernels=lambda: rows), targets=frozenset(map(ffi.target, ffi.OPS)))
    monkeypatch.setattr(ffi, "load", lambda name: fake)


def paged(kv_dtype: str, implementation: str | None):
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    cache = jax.eval_shape(lambda: ta.PagedKVCache.create(4, 2, 64, dtype=kv_dtype))
    query = jax.ShapeDtypeStruct((3, 8, 64), jnp.bfloat16)
    call = functools.partial(ta.paged_attention, implementation=implementation)
    return ta.explain(call, query, cache, ints((2, 4)), ints((2,)), ints((3,)), platform="cuda")[0]


@pytest.mark.parametrize(
    "implementation, kernels",
    [
        (None, ["decode_sm80", "prefill_sm90", "prefill_sm80"]),
        ("cuda:sm80", ["decode_sm80", "prefill_sm80"]),
        ("cuda:sm90", ["decode_sm80", "prefill_sm90"]),  # a family forces the phases that it has
    ],
)
def test_kernels_of_a_paged_call(implementation, kernels):
    found = paged("bfloat16", implementation)
    assert found.chosen and list(found.kernels) == [f"{name}_bfloat16" for name in kernels]


def test_a_family_without_a_kernel_is_refused():
    assert list(paged("int8", None).kernels) == ["decode_sm80_int8", "prefill_sm80_int8"]
    with pytest.raises(NotImplementedError, match="no sm90 kernel for phase prefill, head_dim 64.*kv_dtype int8"):
        paged("int8", "cuda:sm90")


@pytest.mark.parametrize("implementation, family", [(None, ""), ("cuda", ""), ("cuda:sm80", "sm80"), ("cuda:sm90", "sm90")])
def test_the_handler_is_told_the_family(implementation, family):
    array = jax.ShapeDtypeStruct((1, 8, 4, 64), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(functools.partial(ta.attention, implementation=implementation))(array, array, array)
    (spec,) = inspection._specs(jaxpr.jaxpr)
    assert ffi.attributes(spec)["family"] == family
