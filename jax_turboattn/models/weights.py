"""Decoder weights in safetensors files: our own names, and the Llama names of Hugging Face.

Own files hold the decoder's parameter tree with "." between the levels
(`embedding`, `final_norm.scale`, `layers.attention.q_kernel`, ..., `head` if untied; everything under `layers` has the
layer on axis 0) and, as metadata, the `DecoderConfig` as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from ..rope import RopeConfig
from .decoder import Decoder, DecoderConfig

# Hugging Face name after "model.layers.<i>." -> our path under "layers"; their linear weights are [out, in].
_HF_LAYER = {
    "input_layernorm.weight": "attention_norm.scale",
    "self_attn.q_proj.weight": "attention.q_kernel",
    "self_attn.k_proj.weight": "attention.k_kernel",
    "self_attn.v_proj.weight": "attention.v_kernel",
    "self_attn.o_proj.weight": "attention.o_kernel",
    "self_attn.q_proj.bias": "attention.q_bias",
    "self_attn.k_proj.bias": "attention.k_bias",
    "self_attn.v_proj.bias": "attention.v_bias",
    "self_attn.o_proj.bias": "attention.o_bias",
    "post_attention_layernorm.weight": "mlp_norm.scale",
    "mlp.gate_proj.weight": "mlp.gate",
    "mlp.up_proj.weight": "mlp.up",
    "mlp.down_proj.weight": "mlp.down",
}
_HF_TOP = {
    "model.embed_tokens.weight": "embedding",
    "model.norm.weight": "final_norm.scale",
    "lm_head.weight": "head",
}


def shipped() -> Path:
    """The byte-level model of Python source that comes with the package."""
    return Path(__file__).parent / "data" / "python_bytes.safetensors"


def _read(path: os.PathLike | str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays and metadata of a safetensors file."""
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"load: path must be a safetensors file, got {path}: {error}") from error


def save(path: os.PathLike | str, decoder: Decoder, dtype: Any = jnp.bfloat16) -> None:
    """Writes the decoder's parameters, rounded to `dtype`, and its config."""
    tree = nnx.to_pure_dict(nnx.split(decoder)[1])
    arrays = {name: np.asarray(jnp.asarray(array, dtype)) for name, array in _flatten(tree).items()}
    save_file(arrays, path, {"config": json.dumps(dataclasses.asdict(decoder.config))})


def load(path: os.PathLike | str, *, dtype: Any = None, implementation: str | None = None) -> Decoder:
    """Reads a decoder written by `save`.

    Args:
      dtype: of parameters and computation; None keeps the file's.
      implementation: of the attention.
    Raises:
      ValueError: no safetensors file, or names or shapes other than the config asks for.
    """
    arrays, metadata = _read(path)
    try:
        fields = json.loads(metadata["config"])
        config = DecoderConfig(**{**fields, "rope": RopeConfig(**fields["rope"])})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"load: path must hold a decoder's config, got {path}: {error!r}") from error
    if config.local_window_size is not None:
        config = dataclasses.replace(config, local_window_size=tuple(config.local_window_size))
    return _decoder(config, arrays, dtype, implementation)


def load_hf(directory: os.PathLike | str, *, dtype: Any = None, implementation: str | None = None) -> Decoder:
    """Reads a Llama-family model as Hugging Face stores it: `config.json` and one or more `*.safetensors`.

    Args and errors as `load`; weights without a place in the decoder are an error too, never dropped.
    """
    directory = Path(directory)
    config = DecoderConfig.from_hf(json.loads((directory / "config.json").read_text()))
    theirs = {}
    for path in sorted(directory.glob("*.safetensors")):
        theirs |= _read(path)[0]
    if config.tied:
        theirs.pop("lm_head.weight", None)  # a copy of the embedding that some exporters write
    layers: dict[str, dict[int, np.ndarray]] = {}
    arrays = {}
    for name, array in theirs.items():
        if name in _HF_TOP:
            arrays[_HF_TOP[name]] = array.T if name == "lm_head.weight" else array
            continue
        index, _, rest = name.removeprefix("model.layers.").partition(".")
        if not (name.startswith("model.layers.") and index.isdigit() and rest in _HF_LAYER):
            raise ValueError(f"load_hf: weights must be those of a Llama decoder, got {name!r} in {directory}")
        layers.setdefault("layers." + _HF_LAYER[rest], {})[int(index)] = array.T if array.ndim == 2 else array
    for name, by_index in layers.items():
        if sorted(by_index) != list(range(config.num_layers)):
            raise ValueError(f"load_hf: {name} must come for layers 0..{config.num_layers - 1}, got {sorted(by_index)}")
        arrays[name] = np.stack([by_index[i] for i in range(config.num_layers)])
    heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
    for letter, count in heads.items():  # the transposed weights are [L, F, heads * D]
        for part in ("kernel", "bias"):
            name = f"layers.attention.{letter}_{part}"
            if name in arrays:
                arrays[name] = arrays[name].reshape(*arrays[name].shape[:-1], count, config.head_dim)
    name = "layers.attention.o_kernel"
    if name in arrays:
        arrays[name] = arrays[name].reshape(config.num_layers, config.num_heads, config.head_dim, -1)
    return _decoder(config, arrays, dtype, implementation)


def _decoder(config, arrays, dtype, implementation):
    if dtype is None:
        dtype = arrays["embedding"].dtype if "embedding" in arrays else jnp.float32
    decoder = nnx.eval_shape(
        lambda: Decoder(config, implementation=implementation, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    )
    graph, state = nnx.split(decoder)
    expected = _flatten(nnx.to_pure_dict(state))
    if sorted(expected) != sorted(arrays):
        missing, extra = sorted(set(expected) - set(arrays)), sorted(set(arrays) - set(expected))
        raise ValueError(f"load: names must be those of the decoder, missing {missing}, superfluous {extra}")
    for name, array in expected.items():
        if array.shape != arrays[name].shape:
            raise ValueError(f"load: {name} must have shape {array.shape}, got {arrays[name].shape}")
    leaves = [
        (path, variable.replace(jnp.asarray(arrays[".".join(path)], dtype)))
        for path, variable in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def _flatten(tree):
    """{"a": {"b": x}} -> {"a.b": x}."""
    return {".".join(step.key for step in path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
