"""`attention_fn`: this library's attention inside `nnx.MultiHeadAttention` and `linen.MultiHeadDotProductAttention`."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from .. import attention

_EXACT_PRECISIONS = (None, jax.lax.Precision.DEFAULT, "default")


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Any = None,
    qk_attn_weights_einsum: Any = None,
    attn_weights_value_einsum: Any = None,
    is_causal: bool = False,
    **kwargs: Any,
) -> jax.Array:
    """Attention with the signature Flax expects of an `attention_fn`; differentiable.

    Pass it as `nnx.MultiHeadAttention(..., attention_fn=attention_fn)` or
    `linen.MultiHeadDotProductAttention(attention_fn=attention_fn)`.

    Every keyword is spelled out because linen hands over only those that it finds by name in the signature: a bare
    `**kwargs` would lose the mask. `**kwargs` is there for nnx, which hands over whatever it has, and must be empty of
    values.

    Args:
      query: [..., T, H, D]. Leading axes are batch axes, none is allowed.
      key: [..., S, K, D], H a multiple of K.
      value: [..., S, K, Dv].
      bias: broadcastable to [..., H, T, S], added to the scaled logits.
      mask: broadcastable to [..., H, T, S], True (or non-zero) keeps. A query that sees no key gives zeros.
      dtype: compute dtype; None takes the promoted dtype of query, key and value.
      is_causal: query i sees keys 0..i (indices as they stand, also when T != S).
      force_fp32_for_softmax: the softmax is float32 either way.
    Returns:
      [..., T, H, Dv] in the compute dtype.
    Raises:
      NotImplementedError: dropout (`dropout_rate` > 0 and not `deterministic`), sown weights (`module`), a custom
        einsum, a `precision` above the default: the kernels keep no weights and fix their own arithmetic.
      TypeError: a keyword that is not known here and has a value.
    """
    if dropout_rate > 0.0 and not deterministic:
        raise NotImplementedError(
            f"attention_fn: dropout_rate must be 0 unless deterministic, got {dropout_rate}; "
            "put the dropout after the attention"
        )
    if module is not None:
        raise NotImplementedError(
            f"attention_fn: module must be None, got {type(module).__name__}; attention weights are never formed, "
            "so sow_weights cannot record them"
        )
    einsums = {
        "einsum_dot_general": einsum_dot_general,
        "qk_attn_weights_einsum": qk_attn_weights_einsum,
        "attn_weights_value_einsum": attn_weights_value_einsum,
    }
    for name, einsum in einsums.items():
        if einsum is not None:
            raise NotImplementedError(f"attention_fn: {name} must be None, got {einsum!r}")
    if precision not in _EXACT_PRECISIONS:
        raise NotImplementedError(f"attention_fn: precision must be None or DEFAULT, got {precision}")
    for name, extra in kwargs.items():
        if extra is not None:
            raise TypeError(f"attention_fn: {name} must be left out, got {type(extra).__name__}; it has no effect here")

    dtype = jnp.promote_types(query.dtype, jnp.promote_types(key.dtype, value.dtype)) if dtype is None else dtype
    batch = query.shape[:-3]

    def flat(x):
        return x.astype(dtype).reshape(math.prod(x.shape[:-3]), *x.shape[-3:])

    def flat_scores(x):  # [..., 1|H, 1|T, 1|S] -> [B, 1|H, 1|T, 1|S]; a batch that is 1 throughout stays 1
        x = x.reshape((1,) * (len(batch) + 3 - x.ndim) + x.shape)
        if math.prod(x.shape[:-3]) != 1:
            x = jnp.broadcast_to(x, batch + x.shape[-3:])
        return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])

    out = attention(
        flat(query),
        flat(key),
        flat(value),
        None if bias is None else flat_scores(bias),
        None if mask is None else flat_scores(mask) != 0,
        is_causal=is_causal,
        query_offset=0,
    )
    return out.reshape(*batch, *out.shape[1:])
