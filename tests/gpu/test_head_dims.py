"""Every head dim with every query and cache dtype, for each of the functions that attend over pages.

The common cases mix these with other features and leave some pairs out. Hosts without a GPU run it too, on the CPU
kernels.
"""

import conformance
import jax
import pytest

from jax_turboattn import RopeConfig
from jax_turboattn.testing import cases

GPU = jax.default_backend() == "gpu"
IMPLEMENTATION = "cuda" if GPU else "cpu"
KV_DTYPES = (None, "int8", "int4", "float8_e4m3fn")
# paged_attention has a chunk for the prefill kernel ("one"), the step's few tokens are the decode kernel's alone.
LENS = dict(paged_attention=("mixed", "one"), paged_decode=("random", "full"), paged_attention_step=("few", "boundary"))


@pytest.mark.parametrize("op", LENS)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_head_dim(dim, dtype, kv_dtype, op):
    check(op, dim=dim, dtype=dtype, kv_dtype=kv_dtype)


@pytest.mark.parametrize("op", LENS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_value_dim(dtype, op):
    try:
        check(op, dim=192, value_dim=128, dtype=dtype)
    except NotImplementedError as error:  # on cards other than 9.0
        pytest.skip(str(error))


def check(op, **shape):
    few = dict(B=8, T=6, static=(("rope", RopeConfig(dim=shape["dim"])),)) if op == "paged_attention_step" else {}
    spec = cases.Spec(op, "-".join(map(str, shape.values())), heads=(8, 2), **shape, **few)
    for lens, data in zip(LENS[op], ("normal", "mixture"), strict=True):
        case = cases.Case(spec, cases.Values(lens, lens, data))
        call = cases.build(case)
        result = conformance.run(case, call, IMPLEMENTATION)
        conformance.check(case, call, result, IMPLEMENTATION, tensor_cores=GPU)
