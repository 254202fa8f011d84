"""Llama-family decoder in Flax NNX: RMSNorm, grouped-query attention with RoPE, SwiGLU, tied or untied head.

The layers are one stacked module (every parameter has the layer on axis 0) run by `lax.scan`. Serving carries one
stacked cache through that scan: as a scan input and output it would be copied whole (three pool-sized copies in the
HLO), as the carry it is updated in place.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .. import PagedKVCache, RopeConfig
from ..nn import TurboAttention


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder. Frozen and hashable: a static argument under `jit`.

    Args:
      vocab_size: V, tokens.
      hidden_size: F, width of the residual stream.
      num_layers: L.
      num_heads: H, query heads.
      num_kv_heads: K, H a multiple of it.
      head_dim: D.
      mlp_size: inner width of the SwiGLU.
      rope: rotary embedding.
      norm_eps: added to the mean square in RMSNorm.
      tied: the head is the transposed embedding.
      attention_bias: biases on the attention's four projections.
      local_window_size: (left, right) neighbours that a token sees, None for all.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    rope: RopeConfig
    norm_eps: float = 1e-5
    tied: bool = True
    attention_bias: bool = False
    local_window_size: tuple[int, int] | None = None

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
        """Reads the dict of a Hugging Face `config.json` of model type llama or mistral.

        Raises:
          ValueError: another model type, another activation than silu, or MLP biases.
        """
        rules = {
            "model_type": (config.get("model_type"), ("llama", "mistral")),
            "hidden_act": (config.get("hidden_act", "silu"), ("silu",)),
            "mlp_bias": (config.get("mlp_bias", False), (False,)),
        }
        for name, (value, allowed) in rules.items():
            if value not in allowed:
                raise ValueError(f"DecoderConfig.from_hf: {name} must be one of {allowed}, got {value!r}")
        num_heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
        window = config.get("sliding_window")  # counts the token itself
        return DecoderConfig(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            num_layers=config["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=head_dim,
            mlp_size=config["intermediate_size"],
            rope=RopeConfig.from_hf(config, head_dim),
            norm_eps=config.get("rms_norm_eps", 1e-6),
            tied=config.get("tie_word_embeddings", False),
            attention_bias=config.get("attention_bias", False),
            local_window_size=None if window is None else (window - 1, 0),
        )


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32; the result has x's dtype."""

    def __init__(self, size: int, eps: float, param_dtype: Any):
        self.scale = nnx.Param(jnp.ones((size,), param_dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)); kernels [F, mlp_size], [F, mlp_size], [mlp_size, F]."""

    def __init__(self, config: DecoderConfig, dtype: Any, param_dtype: Any, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        self.gate = nnx.Param(init(rngs.params(), (config.hidden_size, config.mlp_size), param_dtype))
        self.up = nnx.Param(init(rngs.params(), (config.hidden_size, config.mlp_size), param_dtype))
        self.down = nnx.Param(init(rngs.params(), (config.mlp_size, config.hidden_size), param_dtype))
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up, down = (kernel[...].astype(self.dtype) for kernel in (self.gate, self.up, self.down))
        return (jax.nn.silu(x @ gate) * (x @ up)) @ down


class DecoderLayer(nnx.Module):
    """x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, implementation: str | None, dtype: Any, param_dtype: Any, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, param_dtype)
        self.attention = TurboAttention(
            config.hidden_size,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            use_bias=config.attention_bias,
            rope=config.rope,
            local_window_size=config.local_window_size,
            implementation=implementation,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, param_dtype)
        self.mlp = SwiGLU(config, dtype, param_dtype, rngs)

    def __call__(self, x: jax.Array, drop: Callable[[jax.Array, int], jax.Array]) -> jax.Array:
        x = x + drop(self.attention(self.attention_norm(x)), 0)
        return x + drop(self.mlp(self.mlp_norm(x)), 1)

    def paged(self, x, cache, *args, **kwargs) -> tuple[jax.Array, PagedKVCache]:
        attended, cache = self.attention.paged(self.attention_norm(x), cache, *args, **kwargs)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), cache


class Decoder(nnx.Module):
    """The decoder; `nnx.split(decoder)` gives the graph definition and the parameters that `make_step` works on."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        implementation: str | None = None,
        dtype: Any = jnp.float32,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Random parameters in `param_dtype`; activations, attention and (unquantised) cache are in `dtype`."""
        self.config = config
        self.dtype = dtype
        self.embedding = nnx.Param(
            nnx.initializers.normal(0.02)(rngs.params(), (config.vocab_size, config.hidden_size), param_dtype)
        )

        def layer(key):
            return DecoderLayer(config, implementation, dtype, param_dtype, nnx.Rngs(params=key))

        keys = jax.random.split(rngs.params(), config.num_layers)
        graph = nnx.split(nnx.eval_shape(lambda: layer(keys[0])))[0]
        self.layers = nnx.merge(graph, jax.vmap(lambda key: nnx.split(layer(key))[1])(keys))
        self.final_norm = RMSNorm(config.hidden_size, config.norm_eps, param_dtype)
        if not config.tied:
            init = nnx.initializers.lecun_normal()
            self.head = nnx.Param(init(rngs.params(), (config.hidden_size, config.vocab_size), param_dtype))

    def __call__(
        self, tokens: jax.Array, *, dropout_rate: float = 0.0, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        """Logits after every token by full computation, without a cache; differentiable.

        Args:
          tokens: int[B, T].
          dropout_rate: share of the attention's and the MLP's outputs that is zeroed; needs `dropout_key`.
        Returns:
          float32 [B, T, V].
        """
        graph, stacked = nnx.split(self.layers)

        def body(x, inputs):
            params, index = inputs

            def drop(branch, place):
                if not dropout_rate:
                    return branch
                key = jax.random.fold_in(dropout_key, 2 * index + place)
                keep = jax.random.bernoulli(key, 1.0 - dropout_rate, branch.shape)
                return jnp.where(keep, branch / (1.0 - dropout_rate), 0).astype(branch.dtype)

            return nnx.merge(graph, params)(x, drop), None

        x, _ = jax.lax.scan(body, self._embed(tokens), (stacked, jnp.arange(self.config.num_layers, dtype=jnp.int32)))
        return self._logits(x)

    def paged(
        self,
        tokens: jax.Array,
        cache: PagedKVCache,
        page_table: jax.Array,
        kv_lens: jax.Array,
        q_offsets: jax.Array,
        *,
        read_only_pages: jax.Array | None = None,
        max_q_len: int | None = None,
    ) -> tuple[jax.Array, PagedKVCache]:
        """Logits after each sequence's last new token, for any mix of prefill chunks and decoding sequences.

        Args:
          tokens: int32[T], the new tokens of all sequences back to back.
          cache: stacked over the L layers.
          page_table: int32[B, M].   kv_lens: int32[B], lengths after this step.   q_offsets: int32[B + 1].
          read_only_pages: int32[B], leading pages of a sequence that others share and that are never written.
          max_q_len: static bound of the new tokens of one sequence.
        Returns:
          float32 [B, V] (rows of sequences without new tokens mean nothing), and the written cache.
        """
        graph, stacked = nnx.split(self.layers)

        def body(carry, inputs):
            x, cache = carry
            params, index = inputs
            x, cache = nnx.merge(graph, params).paged(
                x,
                cache,
                page_table,
                kv_lens,
                q_offsets,
                layer=index,
                read_only_pages=read_only_pages,
                max_q_len=max_q_len,
            )
            return (x, cache), None

        layers = (stacked, jnp.arange(self.config.num_layers, dtype=jnp.int32))
        (x, cache), _ = jax.lax.scan(body, (self._embed(tokens), cache), layers)
        last = jnp.clip(q_offsets[1:] - 1, 0, tokens.shape[0] - 1)
        return self._logits(x[last]), cache

    def _embed(self, tokens):
        return self.embedding[...][tokens].astype(self.dtype)

    def _logits(self, x):
        head = self.embedding[...].T if self.config.tied else self.head[...]
        return jnp.matmul(self.final_norm(x), head.astype(self.dtype), preferred_element_type=jnp.float32)


@functools.partial(jax.jit, static_argnames=("graph", "max_q_len"), donate_argnames=("cache",))
def step(graph, params, cache, tokens, page_table, kv_lens, q_offsets, *, read_only_pages=None, max_q_len=None):
    """`Decoder.paged` as one jitted call that donates `cache`; `graph, params = nnx.split(decoder)`."""
    return nnx.merge(graph, params).paged(
        tokens, cache, page_table, kv_lens, q_offsets, read_only_pages=read_only_pages, max_q_len=max_q_len
    )
