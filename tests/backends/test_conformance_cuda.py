"""The CUDA kernels on this host's GPU. What the module says it has no kernel for must raise NotImplementedError."""

from __future__ import annotations

import conformance
import jax
import pytest

from jax_turboattn.backends import ffi

pytestmark = pytest.mark.gpu
loaded = ffi.load("cuda")
reason = loaded.reason or loaded.module.device_error()
if reason is None and jax.default_backend() != "gpu":
    reason = f"jax runs on {jax.default_backend()}"
if reason is not None:
    pytest.skip(f"cuda: {reason}", allow_module_level=True)


class TestCuda(conformance.Conformance):
    implementation = "cuda"
    folds_scales = True

    def refusal(self, spec):
        return conformance.declined(spec, self.implementation)
