"""What the CPU handlers promise beside values: errors instead of crashes, and memory that does not grow with the context."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_turboattn.backends import ffi

if ffi.load("cpu").reason is not None:
    pytest.skip(f"cpu: {ffi.load('cpu').reason}", allow_module_level=True)


def call(op, results, *operands, **attributes):
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    return jax.ffi.ffi_call(ffi.target(op), shapes)(*operands, **attributes)


OUT_LSE = [((5, 4, 8), jnp.float32), ((5, 4), jnp.float32)]
OUTS, LSES = jnp.zeros((3, 5, 4, 8)), jnp.zeros((3, 5, 4))


@pytest.mark.parametrize(
    ("operands", "names", "results", "text"),
    [
        (
            (OUTS, LSES[:2]),
            "outs,lses",
            OUT_LSE,
            r"merge_partials: lses must have shape \[R=3,T=5,H=4\], got \[2,5,4\]",
        ),
        ((OUTS, LSES[..., None]), "outs,lses", OUT_LSE, r"lses must have shape \[R=3,T=5,H=4\], got \[3,5,4,1\]"),
        ((OUTS, LSES.astype(jnp.int32)), "outs,lses", OUT_LSE, "lses must be float32, got int32"),
        ((OUTS.astype(jnp.int8), LSES), "outs,lses", OUT_LSE, "outs must be float32, bfloat16 or float16, got XLA type"),
        ((OUTS,), "outs", OUT_LSE, "merge_partials: lses must be given"),
        ((OUTS, LSES), "outs", OUT_LSE, "operands must name all 2 arrays, got outs"),
        ((OUTS, LSES), "outs,lses,sinks", OUT_LSE, "operands must name all 2 arrays, got outs,lses,sinks"),
        ((OUTS, LSES), "outs,lses", OUT_LSE[:1], "lse must be a result of the call"),
        ((OUTS, LSES), "outs,lses", OUT_LSE[::-1], r"out must have shape \[T=5,H=4,E=8\], got \[5,4\]"),
    ],
)
def test_buffers_that_do_not_fit_are_refused(operands, names, results, text):
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        call("merge_partials", results, *operands, operands=names)


def test_attributes_are_strict():
    with pytest.raises(Exception, match="attribute"):
        call("merge_partials", OUT_LSE, OUTS, LSES, operands="outs,lses", scale=np.float32(1))


def test_unsupported_operands_are_refused():
    q = jnp.zeros((1, 4, 2, 8))
    attributes = {"family": "", "is_causal": np.bool_(False), "scale": np.float32(1), "logits_soft_cap": np.float32(0)}
    results = [((1, 4, 2, 8), jnp.float32), ((1, 4, 2), jnp.float32)]
    with pytest.raises(jax.errors.JaxRuntimeError, match="attention: bias has no kernel in this module"):
        call("attention", results, q, q, q, jnp.zeros((1, 1, 4, 4)), operands="query,key,value,bias", **attributes)


MEMORY_PROBE = """
import resource, jax, jax.numpy as jnp, numpy as np, jax_turboattn as ta
K, D, P, M = 1, 64, 64, 8192  # half a million tokens of context over 16 pages
cache = ta.PagedKVCache.create(16, K, D, page_size=P, dtype=jnp.float32)
table = jnp.asarray(np.arange(2 * M).reshape(2, M) % 16, jnp.int32)
def attend(tokens):
    q = jnp.ones((tokens, 2, D))
    offsets = jnp.asarray([0, tokens // 2, tokens], jnp.int32)
    f = jax.jit(lambda q, lens: ta.paged_attention(q, cache, table, lens, offsets, implementation="cpu"))
    def run(length):
        jax.block_until_ready(f(q, jnp.full(2, length, jnp.int32)))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    run(100), run(2000)
    return run(8000), run(M * P)
for tokens in (2, 64):
    short, long = attend(tokens)
    assert long - short <= 8, (tokens, short, long)
"""


def test_memory_is_flat_in_the_context():
    """8 MB for 65 times the context; a copy of the keys alone would be 256 MB."""
    result = subprocess.run([sys.executable, "-P", "-c", MEMORY_PROBE], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
