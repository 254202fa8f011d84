"""Weights files: round trips, Hugging Face names, broken files, and the shipped model's size."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import SMALL, full, small_decoder

from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jax_turboattn.models import weights
from jax_turboattn.models.decoder import Decoder

nnx = pytest.importorskip("flax.nnx")

TOKENS = np.arange(12, dtype=np.int32)[None]


@pytest.mark.parametrize("changes", [{}, {"tied": False, "attention_bias": True, "local_window_size": (5, 0)}], ids=str)
def test_round_trip(tmp_path, changes):
    decoder = small_decoder(**changes)
    weights.save(tmp_path / "w.safetensors", decoder, jnp.float32)
    again = weights.load(tmp_path / "w.safetensors", implementation="xla")
    assert again.config == decoder.config
    np.testing.assert_array_equal(full(again, TOKENS), full(decoder, TOKENS))
    weights.save(tmp_path / "w.safetensors", decoder)
    again = weights.load(tmp_path / "w.safetensors", implementation="xla")
    assert again.dtype == jnp.bfloat16
    np.testing.assert_allclose(full(again, TOKENS), full(decoder, TOKENS), atol=0.2)


def hugging_face_files(decoder, directory, head=True):
    """The decoder in two files with Llama's names, and its config.json."""
    config = decoder.config
    tree = nnx.to_pure_dict(nnx.split(decoder)[1])
    layers, attention, mlp = tree["layers"], tree["layers"]["attention"], tree["layers"]["mlp"]
    arrays = {"model.embed_tokens.weight": tree["embedding"], "model.norm.weight": tree["final_norm"]["scale"]}
    if head:
        arrays["lm_head.weight"] = tree["head"].T if "head" in tree else tree["embedding"]
    for i in range(config.num_layers):
        named = {
            "input_layernorm.weight": layers["attention_norm"]["scale"][i],
            "post_attention_layernorm.weight": layers["mlp_norm"]["scale"][i],
            "self_attn.o_proj.weight": attention["o_kernel"][i].reshape(-1, config.hidden_size).T,
        }
        for letter in "qkv":
            named[f"self_attn.{letter}_proj.weight"] = (
                attention[f"{letter}_kernel"][i].reshape(config.hidden_size, -1).T
            )
        for part in ("gate", "up", "down"):
            named[f"mlp.{part}_proj.weight"] = mlp[part][i].T
        if config.attention_bias:
            for letter in "qkvo":
                named[f"self_attn.{letter}_proj.bias"] = attention[f"{letter}_bias"][i].reshape(-1)
        arrays |= {f"model.layers.{i}.{name}": array for name, array in named.items()}
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    names = sorted(arrays)
    for number, part in enumerate((names[::2], names[1::2])):
        path = directory / f"model-{number}.safetensors"
        save_file({name: arrays[name] for name in part}, path, {"format": "pt"})
    description = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.base,
        "tie_word_embeddings": config.tied,
        "attention_bias": config.attention_bias,
    }
    (directory / "config.json").write_text(json.dumps(description))
    return arrays


@pytest.mark.parametrize("changes", [{}, {"tied": False, "attention_bias": True}], ids=str)
def test_hugging_face_names(tmp_path, changes):
    decoder = small_decoder(**changes)
    hugging_face_files(decoder, tmp_path)
    again = weights.load_hf(tmp_path, implementation="xla")
    assert again.config == decoder.config
    np.testing.assert_allclose(full(again, TOKENS), full(decoder, TOKENS), rtol=1e-6, atol=1e-6)


def llama_by_hand(arrays, config, tokens):
    """Logits [T, V] of a Llama with Hugging Face's names, numpy float64, written from the model's definition."""
    arrays = {name: array.astype(np.float64) for name, array in arrays.items()}
    count, dim = len(tokens), config.head_dim

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * arrays[name]

    def linear(x, name):
        return x @ arrays[name + ".weight"].T + arrays.get(name + ".bias", 0.0)

    frequency = config.rope.base ** (-np.arange(0, dim, 2) / dim)
    angle = np.tile(np.arange(count)[:, None] * frequency, 2)[:, None]  # [T, 1, D]

    def rotate(x):
        turned = np.concatenate([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
        return x * np.cos(angle) + turned * np.sin(angle)

    x = arrays["model.embed_tokens.weight"][tokens]
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        y = norm(x, layer + "input_layernorm.weight")
        q, k, v = (linear(y, f"{layer}self_attn.{n}_proj").reshape(count, -1, dim) for n in "qkv")
        q, k = rotate(q), rotate(k)
        k, v = (np.repeat(z, config.num_heads // config.num_kv_heads, axis=1) for z in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(dim)
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        out = np.einsum("hts,shd->thd", p, v).reshape(count, -1)
        x = x + linear(out, layer + "self_attn.o_proj")
        y = norm(x, layer + "post_attention_layernorm.weight")
        gate = linear(y, layer + "mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, layer + "mlp.up_proj"), layer + "mlp.down_proj")
    return norm(x, "model.norm.weight") @ arrays["lm_head.weight"].T


@pytest.mark.parametrize("changes", [{}, {"tied": False, "attention_bias": True}], ids=str)
def test_decoder_is_a_llama(tmp_path, changes):
    decoder = small_decoder(**changes)
    arrays = hugging_face_files(decoder, tmp_path)
    expected = llama_by_hand(arrays, decoder.config, TOKENS[0])
    np.testing.assert_allclose(full(weights.load_hf(tmp_path), TOKENS)[0], expected, rtol=1e-4, atol=1e-4)


def test_hugging_face_files_that_do_not_fit(tmp_path):
    arrays = hugging_face_files(small_decoder(), tmp_path)
    extra = tmp_path / "model-9.safetensors"
    save_file({"model.layers.0.self_attn.rotary.weight": np.zeros(1, np.float32)}, extra)
    with pytest.raises(
        ValueError, match="weights must be those of a Llama decoder, got 'model.layers.0.self_attn.rotary"
    ):
        weights.load_hf(tmp_path)
    save_file({"model.layers.3.mlp.up_proj.weight": arrays["model.layers.0.mlp.up_proj.weight"]}, extra)
    with pytest.raises(ValueError, match=r"layers.mlp.up must come for layers 0..2, got \[0, 1, 2, 3\]"):
        weights.load_hf(tmp_path)


def test_wrong_names_and_shapes(tmp_path):
    weights.save(tmp_path / "w.safetensors", small_decoder(), jnp.float32)
    arrays = load_file(tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", framework="numpy") as file:
        metadata = file.metadata()
    broken = dict(arrays, embedding=np.zeros((3, 3), np.float32))
    save_file(broken, tmp_path / "b.safetensors", metadata)
    with pytest.raises(ValueError, match=r"embedding must have shape \(61, 32\), got \(3, 3\)"):
        weights.load(tmp_path / "b.safetensors")
    del arrays["embedding"]
    save_file(arrays, tmp_path / "b.safetensors", metadata)
    with pytest.raises(ValueError, match=r"missing \['embedding'\], superfluous \[\]"):
        weights.load(tmp_path / "b.safetensors")
    save_file(arrays, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="path must hold a decoder's config"):
        weights.load(tmp_path / "b.safetensors")


@pytest.mark.parametrize("content", [b"abc", b"not a safetensors file at all", (1 << 60).to_bytes(8, "little") + b"{}"])
def test_broken_files(tmp_path, content):
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="path must be a safetensors file, got .*broken"):
        weights.load(path)


def test_shipped_model_is_small():
    path = weights.shipped()
    assert path.stat().st_size <= 6_000_000
    arrays = load_file(path)
    assert 1_000_000 <= sum(array.size for array in arrays.values()) <= 3_000_000
    assert {str(array.dtype) for array in arrays.values()} == {"bfloat16"}
    decoder = weights.load(path)
    assert isinstance(decoder, Decoder) and decoder.config.head_dim == 64
    assert SMALL.head_dim != 64


def test_shipped_model_knows_python():
    """Far below the 8 bits of a guess on a text that it has not seen."""
    decoder = weights.load(weights.shipped(), implementation="xla")
    text = b"def word_lengths(names):\n    result = {}\n    for name in names:\n        result[name] = len(name)\n"
    tokens = jnp.asarray(np.frombuffer(text, np.uint8))[None]
    logp = jax.nn.log_softmax(full(decoder, tokens[:, :-1]))
    bits = -jnp.take_along_axis(logp, tokens[:, 1:, None].astype(jnp.int32), -1).mean() / jnp.log(2)
    assert bits < 2.5
