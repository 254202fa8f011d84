"""The paged key/value cache: one pool of pages, shared by all sequences through their page tables."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import checks
from .spec import INTEGER_KV_DTYPES, KV_DTYPES, QUERY_DTYPES


@dataclasses.dataclass(frozen=True)
class PagedKVCache:
    """Pool of N pages of P tokens for K kv heads, optionally stacked over L layers.

    A pytree: donate it to a jitted step (`donate_argnums`) and the pool is updated in place.
    A (page, head) tile is contiguous: `[P, D]`.

    Attributes:
      key: [L?, N, K, P, D] in the cache dtype; int4: uint8 [L?, N, K, P, D / 2], int8: uint8.
      value: [L?, N, K, P, Dv] likewise; None with `shared_value`.
      key_params, value_params: int8 and int4: [L?, N, K, P, 2] (scale, zero) in the query dtype, written by append_kv;
        fp8: float32 [L?, K], one scale a kv head, chosen by the caller (1.0 at creation); else None.
      dtype: "float32", "bfloat16", "float16", "int8", "int4" or "float8_e4m3fn".
      value_dim: Dv.
      shared_value: MLA: V is the first `value_dim` columns of K, nothing else is stored.
    """

    key: Any
    value: Any
    key_params: Any
    value_params: Any
    dtype: str
    value_dim: int
    shared_value: bool = False

    @staticmethod
    def create(
        num_pages: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        page_size: int = 64,
        num_layers: int | None = None,
        dtype: Any = jnp.bfloat16,
        param_dtype: Any = jnp.bfloat16,
        shared_value: bool = False,
    ) -> "PagedKVCache":
        """An empty cache (zeros).

        Args:
          num_pages: N, the capacity of the pool in pages.
          num_kv_heads: K.
          head_dim: D; for int4 a multiple of 8.
          value_dim: Dv, default D. With `shared_value` the leading columns of K that are V.
          page_size: P, tokens a page: a power of two from 8 to 256.
          num_layers: L; None gives a cache without the layer axis.
          dtype: a float dtype, or "int8", "int4", "float8_e4m3fn".
          param_dtype: dtype of (scale, zero) of an int8 or int4 cache: must be the dtype of the queries.
          shared_value: one array for K and V (MLA).
        Raises:
          ValueError: a size or dtype outside these rules.
        """
        name = "PagedKVCache.create"
        num_pages = checks.static_int(name, "num_pages", num_pages, 0)
        num_kv_heads = checks.static_int(name, "num_kv_heads", num_kv_heads, 1)
        head_dim = checks.static_int(name, "head_dim", head_dim, 1)
        value_dim = head_dim if value_dim is None else checks.static_int(name, "value_dim", value_dim, 1)
        check_page_size(name, page_size)
        dtype = kv_dtype_name(name, dtype)
        shared_value = checks.static_bool(name, "shared_value", shared_value)
        if shared_value and value_dim > head_dim:
            raise checks.value_error(name, "value_dim", f"be <= head_dim = {head_dim} with shared_value", value_dim)
        layers = () if num_layers is None else (checks.static_int(name, "num_layers", num_layers, 1),)
        param_dtype = checks.dtype_of(name, "param_dtype", param_dtype)
        checks.one_of(name, "param_dtype", param_dtype.name, QUERY_DTYPES)

        def data(dim, what):
            if dtype == "int4" and dim % 8:
                raise checks.value_error(name, what, "be a multiple of 8 for an int4 cache", dim)
            stored = {"int8": jnp.uint8, "int4": jnp.uint8}.get(dtype, dtype)
            columns = dim // 2 if dtype == "int4" else dim
            return jnp.zeros((*layers, num_pages, num_kv_heads, page_size, columns), stored)

        def params():
            if dtype in INTEGER_KV_DTYPES:
                return jnp.zeros((*layers, num_pages, num_kv_heads, page_size, 2), param_dtype)
            if dtype == "float8_e4m3fn":
                return jnp.ones((*layers, num_kv_heads), jnp.float32)
            return None

        return PagedKVCache(
            key=data(head_dim, "head_dim"),
            value=None if shared_value else data(value_dim, "value_dim"),
            key_params=params(),
            value_params=None if shared_value else params(),
            dtype=dtype,
            value_dim=value_dim,
            shared_value=shared_value,
        )

    @property
    def stacked(self) -> bool:
        """Whether the arrays carry a leading layer axis."""
        return self.key.ndim == 5

    @property
    def num_layers(self) -> int | None:
        return self.key.shape[0] if self.stacked else None

    @property
    def num_pages(self) -> int:
        return self.key.shape[-4]

    @property
    def num_kv_heads(self) -> int:
        return self.key.shape[-3]

    @property
    def page_size(self) -> int:
        return self.key.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.key.shape[-1] * (2 if self.dtype == "int4" else 1)

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays that exist, by operand name."""
        named = dict(
            key_cache=self.key, value_cache=self.value, key_params=self.key_params, value_params=self.value_params
        )
        return {name: array for name, array in named.items() if array is not None}

    @property
    def nbytes_per_token(self) -> int:
        """Bytes that one token takes in the pool: K, V and their (scale, zero), all heads, all layers."""
        per_layer = 0
        for name, array in self.arrays.items():
            if name.endswith("_cache") or self.dtype in INTEGER_KV_DTYPES:
                per_layer += self.num_kv_heads * array.shape[-1] * jnp.dtype(array.dtype).itemsize
        return per_layer * (self.num_layers or 1)

    def with_sharding(self, mesh: jax.sharding.Mesh, *, heads: str | None = None) -> "PagedKVCache":
        """The cache placed on `mesh`, its kv heads split over the mesh axis `heads` (None: replicated).

        Raises:
          ValueError: K is not a multiple of the axis size.
        """
        if heads is not None:
            checks.one_of("PagedKVCache.with_sharding", "heads", heads, tuple(mesh.shape))
        if heads is not None and self.num_kv_heads % mesh.shape[heads]:
            rule = f"have a size that divides the {self.num_kv_heads} kv heads"
            raise checks.value_error("PagedKVCache.with_sharding", "heads", rule, f"{heads!r} of {mesh.shape[heads]}")
        P = jax.sharding.PartitionSpec

        def place(array):
            if array is None:
                return None
            trailing = 0 if array.ndim <= 2 else 2  # fp8 scales end with the head axis, pages with [K, P, D]
            spec = [None] * array.ndim
            spec[array.ndim - 1 - trailing] = heads
            return jax.device_put(array, jax.sharding.NamedSharding(mesh, P(*spec)))

        return dataclasses.replace(
            self,
            key=place(self.key),
            value=place(self.value),
            key_params=place(self.key_params),
            value_params=place(self.value_params),
        )


jax.tree_util.register_dataclass(
    PagedKVCache,
    data_fields=["key", "value", "key_params", "value_params"],
    meta_fields=["dtype", "value_dim", "shared_value"],
)


def check_page_size(function: str, page_size: Any) -> None:
    page_size = checks.static_int(function, "page_size", page_size, 1)
    if page_size & (page_size - 1) or not 8 <= page_size <= 256:
        raise checks.value_error(function, "page_size", "be a power of two from 8 to 256", page_size)


def kv_dtype_name(function: str, dtype: Any) -> str:
    """The canonical name of a cache dtype; ValueError for any other."""
    try:
        name = dtype if dtype in KV_DTYPES else np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    checks.one_of(function, "dtype", name, tuple(KV_DTYPES))
    return name


def check_cache(function: str, cache: Any, dtype: Any, layer: Any) -> None:
    """Raises unless `cache` is consistent, fits queries of `dtype`, and `layer` is given exactly when it is stacked."""
    if not isinstance(cache, PagedKVCache):
        raise checks.type_error(function, "cache", "be a PagedKVCache", type(cache).__name__)
    if not hasattr(cache.key, "ndim"):
        raise checks.type_error(function, "cache.key", "be an array", type(cache.key).__name__)
    if cache.key.ndim not in (4, 5):
        raise checks.value_error(function, "cache.key", "have 4 axes (N, K, P, D), or 5 with layers", cache.key.shape)
    check_page_size(function, cache.page_size)
    if layer is None and cache.stacked:
        raise checks.value_error(function, "layer", f"be given for a cache of {cache.num_layers} layers", None)
    if layer is not None and not cache.stacked:
        raise checks.value_error(function, "layer", "be None for a cache without a layer axis", layer)
    dims = checks.Dims(function)
    lead = "L " if cache.stacked else ""
    dims.check("cache.key", cache.key, lead + "N K P columns")
    stored = {"int8": "uint8", "int4": "uint8"}.get(cache.dtype, cache.dtype)
    scale_dtype = None
    if dtype is not None:
        dtype = jnp.dtype(dtype)
        if cache.dtype in QUERY_DTYPES and cache.dtype != dtype.name:
            hint = f"create the cache with dtype={dtype.name!r}, or cast the query"
            raise checks.value_error(function, "cache", f"have the query's dtype {dtype.name}", cache.dtype, hint)
        scale_dtype = dtype if cache.dtype in INTEGER_KV_DTYPES else None
    if cache.dtype == "float8_e4m3fn":
        scale_dtype = jnp.dtype(jnp.float32)
    checks.one_of(function, "cache.dtype", cache.dtype, tuple(KV_DTYPES))
    checks.static_int(function, "cache.value_dim", cache.value_dim, 1)
    if cache.shared_value:
        if cache.value is not None:
            raise checks.value_error(function, "cache.value", "be None with shared_value", "an array")
        if cache.value_dim > cache.head_dim:
            rule = f"be <= head_dim = {cache.head_dim} with shared_value"
            raise checks.value_error(function, "cache.value_dim", rule, cache.value_dim)
    value_columns = cache.value_dim // (2 if cache.dtype == "int4" else 1)
    for name, array in (("key", cache.key), ("value", cache.value)):
        if array is None:
            if name == "value" and cache.shared_value:
                continue
            raise checks.value_error(function, f"cache.{name}", "be an array", None)
        if jnp.dtype(array.dtype).name != stored:
            raise checks.value_error(function, f"cache.{name}", f"have dtype {stored}", jnp.dtype(array.dtype).name)
        dims.check(f"cache.{name}", array, lead + f"N K P {array.shape[-1] if name == 'key' else value_columns}")
        params = getattr(cache, f"{name}_params")
        if cache.dtype in QUERY_DTYPES:
            if params is not None:
                raise checks.value_error(function, f"cache.{name}_params", f"be None for {cache.dtype}", "an array")
            continue
        if params is None:
            raise checks.value_error(function, f"cache.{name}_params", f"be an array for {cache.dtype}", None)
        axes = lead + ("K" if cache.dtype == "float8_e4m3fn" else "N K P 2")
        dims.check(f"cache.{name}_params", params, axes)
        if scale_dtype is not None and params.dtype != scale_dtype:
            source = "float32 scales" if cache.dtype == "float8_e4m3fn" else f"the query's dtype {scale_dtype.name}"
            hint = "" if cache.dtype == "float8_e4m3fn" else f"create the cache with param_dtype={scale_dtype.name!r}"
            raise checks.value_error(
                function, f"cache.{name}_params", f"have {source}", jnp.dtype(params.dtype).name, hint
            )
