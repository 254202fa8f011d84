"""What the Pallas kernel declines, how it lowers for a GPU, and what the conformance cases do not reach."""

from __future__ import annotations

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_turboattn as ta
from jax_turboattn import backends
from jax_turboattn.backends import pallas

if pallas.load()[2] is not None:
    pytest.skip(f"pallas: {pallas.load()[2]}", allow_module_level=True)

H, K, D, P, M, B = 8, 2, 64, 16, 5, 4
CALL = "__gpu$xla.gpu.triton"


def shape(*dims, dtype="int32"):
    return jax.ShapeDtypeStruct(dims, dtype)


def shapes(function="paged_decode", *, batch=B, heads=(H, K), dim=D, page=P, pages=64, columns=M, rows=None, **options):
    """Arguments of a paged function, as shapes; options are dtype, kv_dtype, num_layers and those of the cache."""
    dtype = options.pop("dtype", "bfloat16")
    create = functools.partial(
        ta.PagedKVCache.create,
        pages,
        heads[1],
        dim,
        page_size=page,
        dtype=options.pop("kv_dtype", dtype),
        param_dtype=dtype,
        **options,
    )
    found = dict(cache=jax.eval_shape(create), page_table=shape(batch, columns), kv_lens=shape(batch))
    if function == "paged_decode":
        rows = () if rows is None else (rows,)
        return dict(found, query=shape(batch, *rows, heads[0], dim, dtype=dtype))
    count = 40 if rows is None else rows
    found = dict(found, query=shape(count, heads[0], dim, dtype=dtype), q_offsets=shape(batch + 1))
    if function == "paged_attention_step":
        found |= dict.fromkeys(("key", "value"), shape(count, heads[1], dim, dtype=dtype))
    return found


def verdict(function, arguments, **static):
    """(what pallas says of the call on CUDA, whether it would be taken)."""
    found = ta.explain(functools.partial(getattr(ta, function), **static), platform="cuda", **arguments)
    (one,) = (c for c in found if c.implementation == "pallas")
    return one.reason, one.chosen


def lowered(function, arguments, implementation="pallas", **static):
    """Text of the program for CUDA, on any host."""
    call = functools.partial(getattr(ta, function), implementation=implementation, **static)
    return jax.jit(lambda a: call(**a)).trace(arguments).lower(lowering_platforms=("cuda",)).as_text()


# ---- what it takes


@pytest.mark.parametrize(
    "function, options, static, reason",
    [
        ("paged_decode", {}, {}, None),
        ("paged_decode", dict(dtype="float16", kv_dtype="int8"), {}, None),
        ("paged_attention", dict(num_layers=3), dict(layer=1, local_window_size=(5, 0), logits_soft_cap=2.0), None),
        ("paged_attention", {}, dict(batch_invariant=True, out_dtype="float32", is_causal=False, scale=0.0), None),
        ("paged_attention_step", {}, {}, None),
        ("paged_decode", dict(dtype="float32"), {}, "multiplies bfloat16 or float16, not float32"),
        ("paged_decode", dict(kv_dtype="int4"), {}, "not int4"),
        ("paged_decode", dict(kv_dtype="float8_e4m3fn"), {}, "not float8_e4m3fn"),
        ("paged_decode", dict(dim=264), {}, "head dims up to 256, got 264 and 264"),
        ("paged_decode", dict(heads=(8, 1), dim=72, shared_value=True, value_dim=64), dict(scale=1.0), "MLA"),
        ("paged_attention", {}, dict(cp_size=2, cp_rank=0), "context parallelism"),
        ("paged_attention_step", dict(kv_dtype="int4"), {}, "not int4"),
    ],
)
def test_what_is_taken(function, options, static, reason):
    found, chosen = verdict(function, shapes(function, **options), **static)
    assert (found is None) == (reason is None) and (reason or "") in (found or "")
    if backends.ffi.load("cuda").reason is not None:
        assert chosen == (reason is None)


@pytest.mark.parametrize(
    "argument, value",
    [
        ("alibi_slopes", shape(H, dtype="float32")),
        ("tree_mask", shape(40, 3, dtype="bool")),
        ("shared_prefix", (shape(2), shape())),
    ],
)
def test_arguments_that_are_declined(argument, value):
    arguments = shapes("paged_attention")
    assert argument in verdict("paged_attention", {**arguments, argument: value})[0]


def test_other_primitives_are_declined():
    arguments = shapes()
    reason, _ = verdict("gather_kv", {n: arguments[n] for n in ("cache", "page_table", "kv_lens")})
    assert "serves paged_attention, paged_decode and paged_attention_step, not gather_kv" in reason


def test_it_does_not_run_on_other_platforms():
    traced = jax.jit(lambda a: ta.paged_decode(**a, implementation="pallas")).trace(shapes())
    with pytest.raises(
        NotImplementedError, match="runs on platform cuda or cpu, and this program is lowered for another"
    ):
        traced.lower(lowering_platforms=("tpu",))


def test_pools_that_cannot_be_addressed():
    """uint8 pools between 2^31 and 2^32 elements: Pallas' offsets are signed and of 32 bits there."""
    pages = 2**31 // (K * P * D)
    sizes = {pages: True, pages + 1: False, 2 * pages: False, 2 * pages + 1: True}
    for n, taken in sizes.items():
        arguments = shapes(kv_dtype="int8", pages=n)
        assert (CALL in lowered("paged_decode", arguments, None)) == (
            taken and backends.ffi.load("cuda").reason is not None
        )
        if taken:
            assert CALL in lowered("paged_decode", arguments)
        else:
            with pytest.raises(NotImplementedError, match=r"int8 pool of more than 2\^31 and up to 2\^32 elements"):
                lowered("paged_decode", arguments)
    assert CALL in lowered("paged_decode", shapes(pages=pages + 1))
    with pytest.raises(NotImplementedError, match=r"up to 2\^30 keys a sequence"):
        lowered("paged_decode", shapes(columns=2**27))


# ---- the lowering


@pytest.fixture
def triton_modules(monkeypatch):
    """Verifies every Triton module that is lowered: a tensor whose size is no power of two does not pass."""
    from jax._src.pallas.triton import lowering

    lower, found = lowering.lower_jaxpr_to_triton_module, []

    def verified(*args, **kwargs):
        result = lower(*args, **kwargs)
        assert result.module.operation.verify()
        found.append(result.module.operation.get_asm())
        return result

    monkeypatch.setattr(lowering, "lower_jaxpr_to_triton_module", verified)
    return found


@pytest.mark.parametrize(
    "function, options, static",
    [
        ("paged_decode", dict(batch=64, heads=(32, 8), dim=128, page=64, columns=64, pages=4096), {}),
        ("paged_decode", dict(kv_dtype="int8", page=8, heads=(6, 2), dim=80), {}),
        ("paged_decode", dict(heads=(128, 1), rows=3), dict(logits_soft_cap=3.0, local_window_size=(7, 0))),
        ("paged_decode", dict(pages=70_000, num_layers=3, page=256), dict(layer=2)),
        ("paged_attention", dict(heads=(32, 8), dim=128, rows=4096), {}),
        ("paged_attention", dict(dtype="float16", kv_dtype="int8", dim=256, batch=7), dict(out_dtype="float32")),
        ("paged_attention", dict(dim=20, heads=(7, 7), page=32), dict(is_causal=False, local_window_size=(3, None))),
        ("paged_attention_step", dict(kv_dtype="int8"), {}),
    ],
)
def test_lowers_for_a_gpu(function, options, static, triton_modules):
    """On any host, with no warning; packed queries take a call for decode and one for prefill."""
    arguments = shapes(function, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = lowered(function, arguments, **static)
    calls = 1 if function == "paged_decode" else 2
    assert text.count(CALL) == len(triton_modules) == calls
    for module in triton_modules:
        assert ("xf16>" if options.get("dtype") == "float16" else "xbf16>") in module
        # Every matrix product is of 16-bit operands, with at least 16 rows, columns and steps.
        products = [line for line in module.splitlines() if "tt.dot " in line]
        assert products
        for line in products:
            sizes = [part.split(">")[0].split("x") for part in line.split("tensor<")[1:]]
            assert all(min(map(int, dims)) >= 16 for *dims, _ in sizes) and len(sizes) >= 3
            assert {t for *_, t in sizes[:2]} <= {"bf16", "f16"}, line


def test_the_gpu_to_lower_for():
    """The abstract device in force, if there is one; on a host without a GPU an H100."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA A100", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        assert pallas.target_mesh().abstract_device == device
    if jax.default_backend() != "gpu":
        assert pallas.target_mesh().abstract_device.device_kind == "NVIDIA H100"


def test_export_for_a_gpu():
    call = jax.jit(lambda *leaves: ta.paged_decode(**jax.tree.unflatten(structure, leaves), implementation="pallas"))
    leaves, structure = jax.tree.flatten(shapes())
    exported = jax.export.export(call, platforms=("cuda",), disabled_checks=ta.export_disabled_checks())(*leaves)
    assert CALL in exported.mlir_module()


def test_tiles_are_what_triton_multiplies():
    for dim in (1, 16, 20, 64, 80, 128, 192, 256):
        for heads in ((1, 1), (6, 2), (32, 1), (128, 1)):
            spec = pallas.AttnSpec(
                "paged_attention", (), "bfloat16", "bfloat16", *heads, dim, dim, True, 1.0, page_size=8
            )
            for tile in (pallas._short_tile(spec, 16), pallas._long_tile(spec)):
                for size in (tile.rows, tile.keys, pallas._padded(dim)):
                    assert size >= 16 and size & (size - 1) == 0


def test_only_its_own_deprecation_is_silenced():
    with pytest.warns(DeprecationWarning, match="another") as caught, pallas.quiet():
        warnings.warn("another thing is deprecated", DeprecationWarning)
        warnings.warn("The Pallas Triton backend is deprecated and will be removed", DeprecationWarning)
    assert len(caught) == 1


# ---- values


def arrays(seed, function="paged_attention", **options):
    """Random arguments: a sequence's pages in a row, every length its capacity."""
    rng = np.random.default_rng(seed)
    described = shapes(function, pages=B * M, **options)
    random = lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype)  # noqa: E731
    cache = jax.tree.map(random, described["cache"])
    table = np.arange(B * M, dtype=np.int32).reshape(B, M)
    return dict(cache=cache, query=random(described["query"]), page_table=table, kv_lens=np.full(B, M * P, np.int32))


def same(call, arguments, tolerance=2e-2):
    """pallas and xla agree, Inf and NaN included; returns both."""
    run = lambda name: jax.jit(lambda a: call(**a, return_residual=True, implementation=name))(arguments)  # noqa: E731
    got, want = run("pallas"), run("xla")
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(np.float32(g), np.float32(w), atol=tolerance, rtol=tolerance)
    return got, want


def test_infinite_values_reach_those_that_see_them():
    """Inf and -Inf in values that the later rows of a tile see and the earlier ones do not, and both in one column."""
    arguments = arrays(1) | dict(q_offsets=np.array([0, 20, 20, 21, 40], np.int32))
    value = np.array(arguments["cache"].value)
    for b in range(B):
        last = value[arguments["page_table"][b, -1]]
        last[:, -9, 3], last[:, -6, 4], last[:, -3, 4], last[:, -2, 5] = np.inf, -np.inf, np.inf, np.nan
    arguments["cache"] = dataclasses.replace(arguments["cache"], value=jnp.asarray(value))
    (out, _), _ = same(ta.paged_attention, arguments)
    assert np.isinf(np.float32(out)).any() and np.isnan(np.float32(out)).any() and np.isfinite(out[0]).all()


def test_sequences_that_overlap_leave_the_others_alone():
    """Rows that two sequences claim may hold anything; there are then more tiles than programs."""
    offsets = np.array([8, 40, 0, 30, 4], np.int32)  # [8, 40), none, [0, 30), none
    arguments = arrays(2) | dict(q_offsets=offsets)
    call = functools.partial(ta.paged_attention, return_residual=True, is_causal=False)
    got, want = (jax.jit(lambda a, name=name: call(**a, implementation=name))(arguments) for name in ("pallas", "xla"))
    for g, w in zip(got, want, strict=True):
        for rows in (slice(0, 8), slice(30, 40)):
            np.testing.assert_allclose(np.float32(g)[rows], np.float32(w)[rows], atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_a_long_context(kv_dtype):
    """Sizes that interpret mode has no time for: many blocks of keys, many tiles of rows."""
    rng = np.random.default_rng(3)
    lens = np.array([4096, 3001, 64, 1], np.int32)
    q_offsets = np.array([0, 700, 701, 765, 766], np.int32)
    table = rng.permutation(256).reshape(4, 64).astype(np.int32)
    cache = ta.PagedKVCache.create(256, 8, 128, dtype=kv_dtype)
    tokens = (jnp.asarray(rng.standard_normal((lens.sum(), 8, 128)), "bfloat16") for _ in range(2))
    offsets = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    cache = ta.append_kv(cache, *tokens, table, lens, offsets, implementation="xla")
    query = jnp.asarray(rng.standard_normal((766, 32, 128)), "bfloat16")
    same(ta.paged_attention, dict(query=query, cache=cache, page_table=table, kv_lens=lens, q_offsets=q_offsets))
    same(ta.paged_decode, dict(query=query[:4], cache=cache, page_table=table, kv_lens=lens))


@pytest.mark.gpu
@pytest.mark.nightly
@pytest.mark.parametrize("kv_dtype, size", [("bfloat16", 2**31), ("int8", 2**32)])
def test_offsets_beyond_32_bits(kv_dtype, size):
    """The last pages of a pool that 32 bits cannot address are read where they are."""
    page, dim = 256, 128
    pages = size // (page * dim) + 3
    arguments = dict(
        page_table=np.array([[pages - 1, pages - 3, pages - 2]], np.int32), kv_lens=np.array([600], np.int32)
    )
    rng = np.random.default_rng(4)
    key, value = (jnp.asarray(rng.standard_normal((600, 1, dim)), "bfloat16") for _ in range(2))
    create = functools.partial(ta.PagedKVCache.create, num_kv_heads=1, head_dim=dim, page_size=page, dtype=kv_dtype)
    append = jax.jit(functools.partial(ta.append_kv, implementation="xla"), donate_argnums=0)
    whole = np.array([0, 600], np.int32)
    query = jnp.asarray(rng.standard_normal((1, 2, dim)), "bfloat16")
    far = append(create(pages), key, value, *arguments.values(), whole)
    near = append(create(3), key, value, np.array([[2, 0, 1]], np.int32), arguments["kv_lens"], whole)
    got = ta.paged_decode(query, far, **arguments, implementation="pallas")
    want = ta.paged_decode(query, near, np.array([[2, 0, 1]], np.int32), arguments["kv_lens"], implementation="pallas")
    assert np.array_equal(np.asarray(got), np.asarray(want))
