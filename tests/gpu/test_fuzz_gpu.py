"""10,000 sets of fuzzed index arrays through every primitive on the GPU."""

import importlib.util
import pathlib

import pytest

pytestmark = pytest.mark.gpu
_spec = importlib.util.spec_from_file_location("fuzz_program", pathlib.Path(__file__).with_name("fuzz_program.py"))
fuzz_program = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fuzz_program)

SETS, CALLS = 100, 100


@pytest.mark.parametrize("implementation", ["cuda", "pallas"])
@pytest.mark.parametrize("name, kv_dtype", fuzz_program.PROGRAMS)
def test_ten_thousand_sets_of_index_arrays(name, kv_dtype, implementation, monkeypatch):
    monkeypatch.setenv("JAX_TURBOATTN_IMPLEMENTATION", implementation)  # for copy_pages, which has no such argument
    try:
        assert fuzz_program.fuzz(name, kv_dtype, implementation, SETS, CALLS) == SETS * CALLS
    except NotImplementedError as reason:
        pytest.skip(str(reason))
