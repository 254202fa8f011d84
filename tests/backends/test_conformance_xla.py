"""The plain jnp implementation takes everything."""

from __future__ import annotations

import conformance
import pytest


class TestXla(conformance.Conformance):
    implementation = "xla"


JAX_NN = conformance.jax_nn_cases()


@pytest.mark.parametrize("case", JAX_NN, ids=[case.name for case in JAX_NN])
def test_jax_nn_agrees_with_the_golden(case):
    conformance.check_jax_nn(case)
