"""paged_attention_step of few tokens, which appends inside the decode kernel: it leaves the bytes of append_kv, and where
nothing is done to the query, its results are the bits of paged_attention over them."""

import conformance
import jax
import numpy as np
import pytest

import jax_turboattn as ta
from jax_turboattn.testing import cases

pytestmark = pytest.mark.gpu
DRAWS = 12  # of each spec; the shapes are the same, so a spec is compiled once
STEPS = [s for s in cases.SPECS if s.op == "paged_attention_step" and s.T <= s.B]
SPECS = [s for s in STEPS if not s.prefix]  # append_kv knows no prefix
STORED = ("cache", "key", "value", "page_table", "kv_lens", "q_offsets", "layer", "cp_rank")
PROLOGUE = ("key_bias", "value_bias", "rope", "rope_base", "positions", "read_only_pages", "cp_size")
QUERY = ("query_bias", "rope", "logn")


def programs(spec: cases.Spec, implementation: str):
    """The step, and append_kv and paged_attention one after the other: arrays by name -> ((out, lse), cache)."""
    static = spec.options

    def apart(arrays):
        named = arrays | static
        appended = {n: x for n, x in named.items() if n in STORED + PROLOGUE}
        cache = ta.append_kv(**appended, implementation=implementation)
        new = ("key", "value", "query_bias", "logn", "logn_zero_based")
        kept = {n: x for n, x in named.items() if n not in new and (n not in PROLOGUE or n == "cp_size")}
        attention = kept | {"cache": cache} | dict(spec.hints)
        return ta.paged_attention(**attention, return_residual=True, implementation=implementation), cache

    return jax.jit(conformance.function(spec, implementation)), jax.jit(apart)


def same_bytes(left, right) -> bool:
    return all((a.view(np.uint8) == b.view(np.uint8)).all() for a, b in zip(left, right, strict=True))


def compare(spec: cases.Spec, implementation: str, draws: int = DRAWS) -> None:
    step, apart = programs(spec, implementation)
    rng = np.random.default_rng(len(spec.name))
    for i in range(draws):
        values = cases.random_values(rng, spec, f"draw{i}")
        arrays = {n: conformance.to_jax(x) for n, x in cases.build(cases.Case(spec, values)).arrays.items()}
        (fused, fused_cache), (plain, cache) = (conformance.to_numpy(f(arrays)) for f in (step, apart))
        assert same_bytes(conformance.leaves(fused_cache), conformance.leaves(cache)), f"cache: {values}"
        if not any(name in spec.arrays or name in spec.options for name in QUERY):
            assert same_bytes(fused, plain), f"out, lse: {values}"


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_the_same_as_append_and_attention(spec):
    reason = conformance.declined(spec, "cuda")
    if reason is not None:
        pytest.skip(reason)
    compare(spec, "cuda")
