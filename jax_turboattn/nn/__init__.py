"""Flax layers: `TurboAttention` (NNX) and `attention_fn` for the multi-head attention of nnx and linen."""

from .attention import TurboAttention
from .hook import attention_fn

__all__ = ["TurboAttention", "attention_fn"]
