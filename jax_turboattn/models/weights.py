"""Decoder weights in safetensors files: our own names, and the Llama names of Hugging Face.

A safetensors file is an 8-byte little-endian length, that many bytes of JSON (name -> dtype, shape, byte range; strings
under `__metadata__`), and the arrays' bytes. Own files hold the decoder's parameter tree with "." between the levels
(`embedding`, `final_norm.scale`, `layers.attention.q_kernel`, ..., `head` if untied; everything under `layers` has the
layer on axis 0) and, as metadata, the `DecoderConfig` as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from ..rope import RopeConfig
from .decoder import Decoder, DecoderConfig

_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

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


def write_safetensors(path: os.PathLike | str, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes float32, float16 and bfloat16 arrays; the file appears whole or not at all."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    position = 0
    for name, array in arrays.items():
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        position += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the arrays start aligned
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).tobytes())
    partial.replace(path)


def read_safetensors(path: os.PathLike | str) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays (memory-mapped, read-only) and the metadata of a file.

    Raises:
      ValueError: the file is no safetensors file, is cut short, or holds a dtype other than F32, F16 and BF16.
    """

    def fail(reason):
        raise ValueError(f"read_safetensors: path must be a safetensors file, got {path}: {reason}")

    size = os.path.getsize(path)
    if size < 8:
        fail(f"{size} bytes")
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > size - 8:
            fail(f"a header of {length} bytes in a file of {size}")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            fail(f"the header is no JSON ({error})")
    if not isinstance(header, dict):
        fail("the header is no JSON object")
    metadata = header.pop("__metadata__", {})
    data = np.memmap(path, np.uint8, "r", offset=8 + length) if size > 8 + length else np.zeros(0, np.uint8)
    arrays = {}
    for name, entry in header.items():
        try:
            dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (TypeError, KeyError, ValueError):
            fail(f"entry {name!r} lacks dtype, shape or data_offsets")
        if dtype not in _DTYPES:
            fail(f"{name} has dtype {dtype}, known are {', '.join(_DTYPES)}")
        if not 0 <= begin <= end <= data.size or end - begin != math.prod(shape) * _DTYPES[dtype].itemsize:
            fail(f"{name} {list(shape)} {dtype} at bytes {begin}..{end} of {data.size}")
        arrays[name] = data[begin:end].view(_DTYPES[dtype]).reshape(shape)
    return arrays, metadata


def save(path: os.PathLike | str, decoder: Decoder, dtype: Any = jnp.bfloat16) -> None:
    """Writes the decoder's parameters, rounded to `dtype`, and its config."""
    tree = nnx.to_pure_dict(nnx.split(decoder)[1])
    arrays = {name: np.asarray(jnp.asarray(array, dtype)) for name, array in _flatten(tree).items()}
    write_safetensors(path, arrays, {"config": json.dumps(dataclasses.asdict(decoder.config))})


def load(path: os.PathLike | str, *, dtype: Any = None, implementation: str | None = None) -> Decoder:
    """Reads a decoder written by `save`.

    Args:
      dtype: of parameters and computation; None keeps the file's.
      implementation: of the attention.
    Raises:
      ValueError: no safetensors file, or names or shapes other than the config asks for.
    """
    arrays, metadata = read_safetensors(path)
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
        theirs |= read_safetensors(path)[0]
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
