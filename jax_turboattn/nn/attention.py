"""`TurboAttention`: multi-head attention with its projections, over whole sequences or over a paged cache."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .. import PagedKVCache, RopeConfig, apply_rope, attention, paged_attention_step

_KERNEL_INIT = nnx.initializers.lecun_normal()


class TurboAttention(nnx.Module):
    """Grouped-query self-attention with q/k/v/o projections.

    One set of parameters, two ways to run it:
      * `layer(x[B, T, F])`: whole sequences, differentiable, for training.
      * `layer.paged(x[T, F], cache, ...)`: packed new tokens of many sequences over a paged cache, for serving.

    Parameters (in `param_dtype`): `q_kernel [F, H, D]`, `k_kernel [F, K, D]`, `v_kernel [F, K, D]`,
    `o_kernel [H, D, F_out]`; with `use_bias` also `q_bias [H, D]`, `k_bias [K, D]`, `v_bias [K, D]`, `o_bias [F_out]`;
    with `use_sinks` also `sinks [H]`.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        out_features: int | None = None,
        use_bias: bool = False,
        use_sinks: bool = False,
        rope: RopeConfig | None = None,
        is_causal: bool = True,
        scale: float | None = None,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        logits_soft_cap: float | None = None,
        implementation: str | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: nnx.Initializer = _KERNEL_INIT,
        rngs: nnx.Rngs,
    ):
        """Creates the projections.

        Args:
          in_features: F.
          num_heads: H, query heads.
          num_kv_heads: K, H a multiple of it; default H.
          head_dim: D; default F / H.
          out_features: F_out; default F.
          use_bias: biases on all four projections. Those of q, k and v are added in float32, before RoPE.
          use_sinks: a learned logit per query head that takes part in the softmax's denominator only.
          rope: rotary embedding of q and k, None for none.
          is_causal, scale, local_window_size, logits_soft_cap, implementation: as in `jax_turboattn.attention`.
          dtype: dtype of projections and attention; None takes `param_dtype`.
          param_dtype: dtype of the parameters.
          kernel_init: initializer of the four kernels; it is called with the two-dimensional shape.
          rngs: its `params` stream makes the parameters.
        Raises:
          ValueError: H is not a multiple of K, or F of H where head_dim is left out.
        """
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(
                f"TurboAttention: num_heads must be a positive multiple of num_kv_heads, got {num_heads} and {num_kv_heads}"
            )
        if head_dim is None:
            if in_features % num_heads:
                raise ValueError(
                    f"TurboAttention: in_features must be a multiple of num_heads = {num_heads}, got {in_features}; "
                    "or give head_dim"
                )
            head_dim = in_features // num_heads
        out_features = in_features if out_features is None else out_features
        self.rope = rope
        self.is_causal = is_causal
        self.scale = scale
        self.local_window_size = local_window_size
        self.logits_soft_cap = logits_soft_cap
        self.implementation = implementation
        self.dtype = param_dtype if dtype is None else dtype

        def kernel(*shape, num_inputs):
            flat = kernel_init(rngs.params(), (num_inputs, math.prod(shape) // num_inputs), param_dtype)
            return nnx.Param(flat.reshape(shape))

        def zeros(*shape):
            return nnx.Param(jnp.zeros(shape, param_dtype)) if use_bias else None

        self.q_kernel = kernel(in_features, num_heads, head_dim, num_inputs=in_features)
        self.k_kernel = kernel(in_features, num_kv_heads, head_dim, num_inputs=in_features)
        self.v_kernel = kernel(in_features, num_kv_heads, head_dim, num_inputs=in_features)
        self.o_kernel = kernel(num_heads, head_dim, out_features, num_inputs=num_heads * head_dim)
        self.q_bias = zeros(num_heads, head_dim)
        self.k_bias = zeros(num_kv_heads, head_dim)
        self.v_bias = zeros(num_kv_heads, head_dim)
        self.o_bias = zeros(out_features)
        self.sinks = nnx.Param(jnp.zeros((num_heads,), param_dtype)) if use_sinks else None

    def __call__(
        self,
        x: jax.Array,
        *,
        lengths: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        rope_base: jax.Array | None = None,
    ) -> jax.Array:
        """Attention over whole sequences; differentiable.

        Args:
          x: [B, T, F].
          lengths: int32[B], tokens of x in use; rows past them come out as the output bias. None: all T.
          segment_ids: int32[B, T]; tokens see their own segment only.
          positions: int32[T] or [B, T] (multimodal RoPE: and a last axis of 3), for RoPE only; default 0..T-1.
          rope_base: float32[B], base per sequence, for RoPE of kind "dynamic".
        Returns:
          [B, T, F_out] in `dtype`.
        """
        query, key, value = self._project(x)
        if positions is None:
            positions = jnp.arange(x.shape[1], dtype=jnp.int32)
            if self.rope is not None and self.rope.sections:
                positions = jnp.repeat(positions[:, None], 3, axis=1)

        def prologue(projected, bias, rotate):  # as the fused step: bias and RoPE in float32, one rounding at the end
            wide = projected.astype(jnp.float32)
            if bias is not None:
                wide = wide + bias[...].astype(jnp.float32)
            if rotate and self.rope is not None:
                wide = apply_rope(wide, positions, self.rope, rope_base=rope_base)
            return wide.astype(self.dtype)

        out = attention(
            prologue(query, self.q_bias, True),
            prologue(key, self.k_bias, True),
            prologue(value, self.v_bias, False),
            is_causal=self.is_causal,
            query_seq_lengths=lengths,
            key_value_seq_lengths=lengths,
            segment_ids=segment_ids,
            **self._common(),
        )
        return self._output(out)

    def paged(
        self,
        x: jax.Array,
        cache: PagedKVCache,
        page_table: jax.Array,
        kv_lens: jax.Array,
        q_offsets: jax.Array,
        *,
        layer: jax.Array | None = None,
        positions: jax.Array | None = None,
        rope_base: jax.Array | None = None,
        read_only_pages: jax.Array | None = None,
        max_q_len: int | None = None,
    ) -> tuple[jax.Array, PagedKVCache]:
        """Appends packed new tokens to the cache and lets them attend over it: any mix of prefill, chunks and decode.

        Args:
          x: [T, F], the new tokens of all sequences back to back.
          cache: heads, head dim and dtype as this layer's; donate it to the jitted caller.
          page_table: int32[B, M].
          kv_lens: int32[B], tokens of each sequence after this call.
          q_offsets: int32[B + 1]; sequence b owns rows q_offsets[b] .. q_offsets[b + 1] of x.
          layer: int32 scalar, for a stacked cache.
          positions, rope_base, read_only_pages, max_q_len: as in `jax_turboattn.paged_attention_step`.
        Returns:
          [T, F_out] in `dtype`, and the written cache.
        """
        query, key, value = self._project(x)
        biases = {
            name: None if bias is None else bias[...]
            for name, bias in (("query_bias", self.q_bias), ("key_bias", self.k_bias), ("value_bias", self.v_bias))
        }
        out, cache = paged_attention_step(
            query,
            key,
            value,
            cache,
            page_table,
            kv_lens,
            q_offsets,
            layer=layer,
            rope=self.rope,
            rope_base=rope_base,
            positions=positions,
            read_only_pages=read_only_pages,
            is_causal=self.is_causal,
            max_q_len=max_q_len,
            **biases,
            **self._common(),
        )
        return self._output(out), cache

    def _project(self, x):
        x = x.astype(self.dtype)
        kernels = (self.q_kernel, self.k_kernel, self.v_kernel)
        return tuple(jnp.einsum("...f,fhd->...hd", x, kernel[...].astype(self.dtype)) for kernel in kernels)

    def _output(self, out):
        out = jnp.einsum("...hd,hdf->...f", out, self.o_kernel[...].astype(self.dtype))
        return out if self.o_bias is None else out + self.o_bias[...].astype(self.dtype)

    def _common(self):
        return {
            "scale": self.scale,
            "local_window_size": self.local_window_size,
            "logits_soft_cap": self.logits_soft_cap,
            "sinks": None if self.sinks is None else self.sinks[...].astype(jnp.float32),
            "implementation": self.implementation,
        }
