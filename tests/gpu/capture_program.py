"""A decode step of several layers, run many times: prints one JSON line for test_capture.py.

XLA_FLAGS="--xla_gpu_graph_min_graph_size=1 --xla_cmd_buffer_trace_cache_size=256" \\
    python tests/gpu/capture_program.py IMPLEMENTATION
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

import jax_turboattn as ta
from jax_turboattn.backends import ffi


@dataclasses.dataclass(frozen=True)
class Sizes:
    """L layers, B sequences."""

    L: int = 32
    B: int = 8
    H: int = 32
    K: int = 8
    D: int = 128
    P: int = 64
    M: int = 4
    warm: int = (
        24  # steps before anything is counted: results may take turns between a few addresses, each captured once
    )
    steps: int = 50


def handler_calls() -> int | None:
    """How often XLA has called handlers of the CUDA module so far; None where it is not loaded."""
    module = ffi.load("cuda").module
    return None if module is None else module.handler_calls()


def run(implementation: str, sizes: Sizes = Sizes()) -> dict:
    """Runs the steps; the same sequence of values however XLA executes it."""
    s = sizes
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

    cache = ta.PagedKVCache.create(s.B * s.M, s.K, s.D, page_size=s.P, num_layers=s.L)
    cache = dataclasses.replace(cache, key=normal(*cache.key.shape), value=normal(*cache.value.shape))
    table = jnp.asarray(rng.permutation(s.B * s.M).reshape(s.B, s.M), jnp.int32)
    lens = jnp.asarray(rng.integers(1, s.M * s.P - s.warm - s.steps, s.B), jnp.int32)
    key, value = normal(s.L, s.B, s.K, s.D), normal(s.L, s.B, s.K, s.D)
    offsets = jnp.arange(s.B + 1, dtype=jnp.int32)
    rope = ta.RopeConfig(dim=s.D)

    def layer(carry, inputs):
        x, cache, lens = carry
        index, key, value = inputs
        out, cache = ta.paged_attention_step(
            x,
            key,
            value,
            cache,
            table,
            lens,
            offsets,
            rope=rope,
            layer=index,
            max_q_len=1,
            implementation=implementation,
        )
        return (x + out, cache, lens), None

    def step(cache, lens, x):
        indices = jnp.arange(s.L, dtype=jnp.int32)
        (x, cache, _), _ = jax.lax.scan(layer, (x, cache, lens), (indices, key, value))
        return cache, lens + 1, x

    query = normal(s.B, s.H, s.D)
    step = jax.jit(step, donate_argnums=(0, 1))
    digest = hashlib.sha256()
    for _ in range(s.warm):
        cache, lens, out = step(cache, lens, query)
        digest.update(np.asarray(out).tobytes())
    before = handler_calls()
    start = time.perf_counter()
    for _ in range(s.steps):
        cache, lens, out = step(cache, lens, query)
    jax.block_until_ready(out)
    seconds = time.perf_counter() - start
    calls = None if before is None else handler_calls() - before
    for array in (out, *jax.tree.leaves(cache)):
        digest.update(np.asarray(array).tobytes())
    return dict(
        sha256=digest.hexdigest(),
        finite=bool(np.isfinite(np.asarray(out, np.float32)).all()),
        step_us=seconds / s.steps * 1e6,
        handler_calls=calls,
        steps=s.steps,
        layers=s.L,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("implementation")
    print(json.dumps(run(parser.parse_args().implementation)))


if __name__ == "__main__":
    main()
