"""The C++ kernels on the host."""

from __future__ import annotations

import conformance
import pytest

from jax_turboattn.backends import ffi

if ffi.load("cpu").reason is not None:
    pytest.skip(f"cpu: {ffi.load('cpu').reason}", allow_module_level=True)


class TestCpu(conformance.Conformance):
    implementation = "cpu"
    unsupported = frozenset({"bias", "mask"})
