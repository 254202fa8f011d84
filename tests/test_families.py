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
    *(("decode", family, "int4") for family in ("sm90", "sm80")),
    ("prefill", "sm80", "int4"),
]
WIDE_KERNELS = ("attention", "prefill")  # of head dim 192, values of 128: sm90 alone


@pytest.fixture(autouse=True)
def module(monkeypatch):
    rows = [
        dict(name=f"{phase}_{family}_{kv}", phase=phase, family=family, head_dim=64, value_dim=64, dtype="bfloat16")
        | dict(kv_dtype=kv)
        for phase, family, kv in KERNELS
    ]
    wide = dict(family="sm90", head_dim=192, value_dim=128, dtype="bfloat16", kv_dtype="bfloat16")
    rows += [dict(name=f"{phase}_sm90_d192v128", phase=phase) | wide for phase in WIDE_KERNELS]
    fake = ffi.Module("cuda", types.SimpleNamespace(kernels=lambda: rows), targets=frozenset(map(ffi.target, ffi.OPS)))
    monkeypatch.setattr(ffi, "load", lambda name: fake)
    monkeypatch.setattr(ffi, "_cards", set)


def paged(kv_dtype: str, implementation: str | None, dims: tuple[int, int] = (64, 64)):
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    cache = jax.eval_shape(lambda: ta.PagedKVCache.create(4, 2, dims[0], value_dim=dims[1], dtype=kv_dtype))
    query = jax.ShapeDtypeStruct((3, 8, dims[0]), jnp.bfloat16)
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


@pytest.mark.parametrize(
    "implementation, decode", [(None, ["sm90", "sm80"]), ("cuda:sm80", ["sm80"]), ("cuda:sm90", ["sm90"])]
)
def test_decode_kernels_of_a_cache(implementation, decode):
    """A decode family of some caches alone, beside a prefill family that it has not."""
    names = [f"decode_{family}_int4" for family in decode] + ["prefill_sm80_int4"]
    assert list(paged("int4", implementation).kernels) == names


def test_a_family_without_a_kernel_is_refused():
    assert list(paged("int8", None).kernels) == ["decode_sm80_int8", "prefill_sm80_int8"]
    with pytest.raises(NotImplementedError, match="no sm90 kernel for phase prefill, head_dim 64.*kv_dtype int8"):
        paged("int8", "cuda:sm90")


def test_without_a_decode_kernel_prefill_takes_it_all():
    assert list(paged("bfloat16", None, (192, 128)).kernels) == ["prefill_sm90_d192v128"]
    assert "no decode kernel for head_dim 192, value_dim 128" in paged("int8", None, (192, 128)).reason
    with pytest.raises(NotImplementedError, match="no sm80 kernel for phase prefill, head_dim 192"):
        paged("bfloat16", "cuda:sm80", (192, 128))


@pytest.mark.parametrize("cards, families", [({"8.0"}, ["sm80"]), ({"9.0"}, ["sm90", "sm80"]), (set(), ["sm90", "sm80"])])
def test_kernels_of_other_cards_are_not_offered(monkeypatch, cards, families):
    monkeypatch.setattr(ffi, "_cards", lambda: cards)
    assert [name.split("_")[1] for name in paged("bfloat16", None).kernels[1:]] == families
    wide = paged("bfloat16", None, (192, 128))
    assert wide.chosen == ("sm90" in families)
    assert wide.chosen or wide.reason.endswith("kv_dtype bfloat16 on compute capability 8.0")


@pytest.mark.parametrize("implementation, family", [(None, ""), ("cuda", ""), ("cuda:sm80", "sm80"), ("cuda:sm90", "sm90")])
def test_the_handler_is_told_the_family(implementation, family):
    array = jax.ShapeDtypeStruct((1, 8, 4, 64), jnp.bfloat16)
    jaxpr = jax.make_jaxpr(functools.partial(ta.attention, implementation=implementation))(array, array, array)
    (spec,) = inspection._specs(jaxpr.jaxpr)
    assert ffi.attributes(spec)["family"] == family


@pytest.mark.parametrize(
    "how, kernels",
    [
        (dict(), ["decode_sm80_bfloat16"]),
        (dict(implementation="cuda:sm90"), ["decode_sm80_bfloat16"]),
        (dict(batch_invariant=True), []),  # these calls do not read it
        (dict(local_window_size=(8, 0)), []),
    ],
)
def test_a_plan_is_made_beside_its_kernel(how, kernels):
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    cache = jax.eval_shape(lambda: ta.PagedKVCache.create(4, 2, 64))
    query = jax.ShapeDtypeStruct((3, 8, 64), jnp.bfloat16)
    call = functools.partial(ta.make_plan, **how)
    found = ta.explain(call, query, cache, ints((2, 4)), ints((2,)), ints((3,)), platform="cuda")[0]
    assert found.op == "make_plan" and found.chosen and list(found.kernels) == kernels
