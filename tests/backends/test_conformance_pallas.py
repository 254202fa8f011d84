"""The Pallas kernel: everything it takes on a GPU; in interpret mode, on other hosts, one executable a feature.

What it declines, and why, is in test_pallas.py.
"""

from __future__ import annotations

import conformance
import jax
import pytest

from jax_turboattn.backends import pallas

if pallas.load()[2] is not None:
    pytest.skip(f"pallas: {pallas.load()[2]}", allow_module_level=True)

# Interpret mode: a case takes milliseconds, its executable seconds to compile, so that cases go by executables.
INTERPRETED = {
    "paged_attention": "group9 plain plain_float16 page8 int8 value_dim window_int8 window_traced soft_cap sinks_window "
    "scale_zero dim_odd many_sequences long_chunk no_batch no_rows no_pages",
    "paged_decode": "group32 plain three_tokens window_sinks layer_int8",
    "paged_attention_step": "int8_everything",
}
SPECS = [f"{op}/{name}" for op, names in INTERPRETED.items() for name in names.split()]


class OnGpu(conformance.Conformance):
    implementation = "pallas"
    append_implementation = "xla"
    tensor_cores = True
    # These need append_kv, gather_kv or context parallelism, which it has not.
    test_minimum_of_both_zeros = None
    test_context_parallel_ranks_merge_to_the_whole = None
    test_offsets_beyond_int32 = None

    def refusal(self, spec):
        return conformance.declined(spec, self.implementation)


class Interpreted(OnGpu):
    @conformance.ids(SPECS)
    def test_values(self, spec):
        for case in conformance.GROUPED[spec]:
            call = conformance.cases.build(case)
            result = conformance.run(case, call, self.implementation)
            conformance.check(case, call, result, self.implementation)
        again = conformance.run(case, call, self.implementation)
        assert [x.tobytes() for x in conformance.leaves(again)] == [x.tobytes() for x in conformance.leaves(result)]

    @conformance.ids([s for s in conformance.VMAP_SPECS if s.label == "paged_decode/plain"])
    def test_vmap_is_a_loop(self, spec):
        super().test_vmap_is_a_loop(spec)

    @pytest.mark.parametrize("kv_dtype", ["int8"])
    def test_batch_invariant(self, kv_dtype):
        super().test_batch_invariant(kv_dtype)

    test_reruns_are_bitwise_equal = None
    test_vmap_over_queries_only = None
    test_random_draws = None
    test_random_shapes = None


if jax.default_backend() == "gpu":
    TestPallas = OnGpu
else:
    TestPallas = Interpreted
