"""The shipped model on the GPU: logits of prefill and decode agree with the CPU kernels' on the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import nnx

import jax_turboattn as ta
from jax_turboattn.__main__ import main
from jax_turboattn.models import weights

pytestmark = pytest.mark.gpu
PROMPTS = (b"def read_lines(path):\n    with open(path) as file:\n", b"import os\n", b'class LineReader:\n    """')
NEW = 6  # tokens that are decoded after the prompts, the same ones on both
P = 16


def logits(device, implementation, kv_dtype: str, dtype: str) -> np.ndarray:
    """Logits after the prompts and after each of NEW further tokens, [1 + NEW, B, V] in float32."""
    with jax.default_device(device):
        decoder = weights.load(weights.shipped(), dtype=jnp.dtype(dtype), implementation=implementation)
        graph, params = nnx.split(decoder)
        config = decoder.config
        batch, columns = len(PROMPTS), -(-(max(map(len, PROMPTS)) + NEW) // P)
        cache = ta.PagedKVCache.create(
            batch * columns,
            config.num_kv_heads,
            config.head_dim,
            page_size=P,
            num_layers=config.num_layers,
            dtype=dtype if kv_dtype == "unquantised" else kv_dtype,
            param_dtype=dtype,
        )
        params, cache = jax.device_put((params, cache), device)
        table = np.arange(batch * columns, dtype=np.int32).reshape(batch, columns)

        @jax.jit
        def step(params, cache, tokens, lens, offsets):
            return nnx.merge(graph, params).paged(tokens, cache, table, lens, offsets)

        tokens = np.frombuffer(b"".join(PROMPTS), np.uint8).astype(np.int32)
        lens = np.array([len(p) for p in PROMPTS], np.int32)
        offsets = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
        found, cache = step(params, cache, tokens, lens, offsets)
        rows = [found]
        for i in range(NEW):
            tokens = np.array([b" self"[i % 5]] * batch, np.int32)
            lens = lens + 1
            found, cache = step(params, cache, tokens, lens, np.arange(batch + 1, dtype=np.int32))
            rows.append(found)
        assert found.devices() == {device}
        return np.stack([np.asarray(row, np.float32) for row in rows])


def check(kv_dtype: str, device, implementation) -> None:
    """The device's error is at most twice that of the CPU kernels in the same dtypes, both against float32."""
    cpu = jax.devices("cpu")[0]
    exact = logits(cpu, "cpu", kv_dtype, "float32")
    theirs, ours = logits(cpu, "cpu", kv_dtype, "bfloat16"), logits(device, implementation, kv_dtype, "bfloat16")
    errors = {}
    for name, norm in (("largest", lambda x: np.abs(x).max()), ("norm", np.linalg.norm)):
        errors[name] = [norm(x - exact) / norm(exact) for x in (ours, theirs)] + [norm(ours - theirs) / norm(exact)]
    print(f"{kv_dtype}: errors of GPU and CPU, and the difference between them: {errors}")
    assert np.isfinite(ours).all()
    for own, baseline, _ in errors.values():
        assert own <= 2 * baseline + 2**-8, errors


@pytest.mark.parametrize("kv_dtype", ["unquantised", "int8", "int4"])
def test_logits_agree_with_the_cpu(kv_dtype):
    check(kv_dtype, jax.devices("gpu")[0], None)


def test_generate_says_what_runs(capsys):
    assert main(["generate", "--max-tokens", "16", "--temperature", "0"]) == 0
    printed, progress = capsys.readouterr()
    assert "paged_attention_step: cuda on NVIDIA" in progress and "tokens/s" in progress
    print(progress)
    assert printed.count("--- ") == 3
