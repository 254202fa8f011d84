"""Every number of query heads a kv head, for each of the functions that attend, plain and quantised.

Hosts without a GPU run it too, on the CPU kernels.
"""

import conformance
import jax
import numpy as np
import pytest

from jax_turboattn.testing import cases

GPU = jax.default_backend() == "gpu"
IMPLEMENTATION = "cuda" if GPU else "cpu"
GROUPS = (1, 2, 3, 5, 6, 7, 8, 9, 12, 16, 32, 71, 128)
# T is the longest chunk: paged_attention's make several tiles of the prefill kernel at most groups; the step's tokens
# are no more than its sequences, which the decode kernel takes alone.
SHAPES = dict(
    attention=dict(B=2, T=17, S=33, static=(("is_causal", True), ("query_offset", 16))),
    paged_attention=dict(B=3, T=48, M=5),
    paged_decode=dict(B=4),
    paged_attention_step=dict(B=8, T=6),
)
CALLS = [(op, kv_dtype) for op in SHAPES for kv_dtype in (None, "int8") if (op, kv_dtype) != ("attention", "int8")]
CALLS += [(op, "int4") for op in ("paged_decode", "paged_attention_step")]  # decode on sm90 has units of 16 rows of it


@pytest.mark.parametrize("op, kv_dtype", CALLS)
@pytest.mark.parametrize("group", GROUPS)
def test_group(group, op, kv_dtype):
    kv_heads = 2 if group < 10 else 1
    heads = (group * kv_heads, kv_heads)
    dim = 128 if kv_dtype == "int4" else 64
    spec = cases.Spec(op, f"group{group}-{kv_dtype}", heads=heads, dim=dim, kv_dtype=kv_dtype, **SHAPES[op])
    packed = ("mixed", "one", "boundary") if op in ("paged_attention", "paged_attention_step") else ("random", "full")
    for lens in packed:
        case = cases.Case(spec, cases.Values(lens, lens, "mixture" if lens == "boundary" else "normal"))
        call = cases.build(case)
        if lens == "one":  # the chunk is there: its tokens would go to the decode kernel otherwise
            assert np.diff(call.arrays["q_offsets"]).max() == spec.T
        result = conformance.run(case, call, IMPLEMENTATION)
        conformance.check(case, call, result, IMPLEMENTATION, tensor_cores=GPU)
