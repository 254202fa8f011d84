"""On the GPU too a donated pool is never copied: the optimised HLO holds no pool-sized copy, pointers stay."""

import donation
import pytest

pytestmark = pytest.mark.gpu
# The keys of one layer are 64 MiB in 16 bits and 16 MiB in 4: larger than any workspace, whose size depends on B and T.
WORKSPACE = 12 << 20
SHAPES = donation.Shapes(H=8, K=2, D=128, P=16, N=8192, M=4)
IMPLEMENTATIONS = ["cuda", "pallas"]
DTYPES = ["bfloat16", "float16", "int8", "int4", "float8_e4m3fn"]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request, monkeypatch):
    monkeypatch.setenv("JAX_TURBOATTN_IMPLEMENTATION", request.param)
    return request.param


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("program", donation.Programs.STACKED)
def test_donated_pool_is_updated_in_place(program, kv_dtype, implementation):
    dtype = "float16" if kv_dtype == "float16" else "bfloat16"
    try:
        proof = donation.prove(program, SHAPES, kv_dtype, dtype)
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    for copy in proof.copies:
        print(copy)
    proof.check(WORKSPACE)


def test_the_detector_sees_a_copy(monkeypatch):
    monkeypatch.setenv("JAX_TURBOATTN_IMPLEMENTATION", "cuda")
    _, cache, hlo = donation.undonated_append(SHAPES, "bfloat16")
    assert donation.pool_sized_copies(hlo, cache)
