"""The CUDA kernels on this host's GPU. What the module says it has no kernel for must raise NotImplementedError."""

from __future__ import annotations

import conformance
import jax
import pytest

from jax_turboattn.backends import ffi
from jax_turboattn.testing import cases

pytestmark = pytest.mark.gpu
loaded = ffi.load("cuda")
reason = loaded.reason or loaded.module.device_error()
if reason is None and jax.default_backend() != "gpu":
    reason = f"jax runs on {jax.default_backend()}"
if reason is not None:
    pytest.skip(f"cuda: {reason}", allow_module_level=True)

ATTENTION = ("attention", "ragged_attention", "paged_attention", "paged_decode", "paged_attention_step")
IN_FAMILIES = [case for case in cases.CASES if case.spec.op in ATTENTION]


class TestCuda(conformance.Conformance):
    implementation = "cuda"
    tensor_cores = True
    draws = 6  # of some 210 specs: more than 1,000 random cases

    def refusal(self, spec):
        return conformance.declined(spec, self.implementation)


class TestSm80(TestCuda):
    """The mma kernels by their name, whatever the card has of its own: the values of the calls that come in families."""

    implementation = "cuda:sm80"
    draws = 1

    @pytest.mark.parametrize("case", IN_FAMILIES, ids=[case.name for case in IN_FAMILIES])
    def test_values(self, case, record_property):
        super().test_values(case, record_property)

    @conformance.ids([spec for spec in conformance.DRAWN_SPECS if spec.op in ATTENTION])
    def test_random_draws(self, spec, record_property):
        super().test_random_draws(spec, record_property)

    # How a call is wrapped, cut and written does not depend on the family: TestCuda has these.
    test_reruns_are_bitwise_equal = None
    test_vmap_is_a_loop = None
    test_vmap_over_queries_only = None
    test_context_parallel_ranks_merge_to_the_whole = None
    test_step_equals_append_then_attention = None
    test_minimum_of_both_zeros = None
    test_random_shapes = None
    test_offsets_beyond_int32 = None
