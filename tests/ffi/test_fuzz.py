"""Index arrays that hold anything: no access outside the buffers, no write to a page that was not named."""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_turboattn
from jax_turboattn.backends import ffi

ROOT = pathlib.Path(__file__).resolve().parents[2]
INT32 = np.iinfo(np.int32)

# --- standalone drivers (fuzz_*.cc), built with sanitizers ----------------------------------------------------------------------------

SOURCES = {
    "fuzz_cpu": [
        ROOT / "tests/ffi/fuzz_cpu.cc",
        ROOT / "ffi/core/desc.cc",
        *(p for p in sorted((ROOT / "ffi/kernels/cpu").glob("*.cc")) if p.name != "registry_table.cc"),
    ],
    "fuzz_new_rows": [ROOT / "tests/ffi/fuzz_new_rows.cc"],
    "fuzz_work_list": [ROOT / "tests/ffi/fuzz_work_list.cc"],
    "fuzz_pieces": [ROOT / "tests/ffi/fuzz_pieces.cc"],
    "fuzz_divisor": [ROOT / "tests/ffi/fuzz_divisor.cc"],
}
SANITIZE = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@functools.cache
def driver(name: str, *flags: str) -> pathlib.Path:
    """Builds a driver, once for each state of the sources: the objects are kept under build/."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler: set CXX")
    command = [
        compiler,
        "-std=c++17",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",  # nvcc's, in headers that a GPU's code shares
        "-pthread",
        f"-I{ROOT / 'ffi'}",
        *flags,
    ]
    state = hashlib.sha256(" ".join(command).encode())
    headers = (path for end in ("h", "inl", "cuh") for path in sorted((ROOT / "ffi").rglob(f"*.{end}")))
    for path in [*SOURCES[name], *headers]:
        state.update(path.read_bytes())
    folder = ROOT / "build" / "fuzz" / state.hexdigest()[:16]
    program = folder / name
    if program.exists():
        return program
    folder.mkdir(parents=True, exist_ok=True)
    objects = [folder / f"{path.stem}.{os.getpid()}.o" for path in SOURCES[name]]
    compiles = [
        subprocess.Popen([*command, "-c", str(path), "-o", str(out)], stderr=subprocess.PIPE)
        for path, out in zip(SOURCES[name], objects)
    ]
    failed = [process.stderr.read().decode() for process in compiles if process.wait() != 0]
    assert not failed, failed[0]
    linked = folder / f"{name}.{os.getpid()}"
    subprocess.run([*command, *map(str, objects), "-o", str(linked)], check=True)
    for path in objects:
        path.unlink()
    linked.rename(program)
    return program


def run_driver(program: pathlib.Path, count: int, seed: int) -> None:
    result = subprocess.run([program, str(count), str(seed)], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]


def test_kernels_under_sanitizers():
    run_driver(driver("fuzz_cpu", *SANITIZE), 500, 1)


def test_new_rows_of_a_fused_step():
    """The decode kernel's choice of who stores what, on the host."""
    run_driver(driver("fuzz_new_rows", *SANITIZE), 20_000, 1)


def test_list_of_decode_work():
    """How the decode kernel cuts its work over the grid, on the host."""
    run_driver(driver("fuzz_work_list", *SANITIZE), 20_000, 1)


def test_pieces_of_long_prefill_tiles():
    """How the prefill kernel cuts the keys of long tiles, on the host."""
    run_driver(driver("fuzz_pieces", *SANITIZE), 20_000, 1)


def test_quotients_without_a_division():
    """The divisors that the host hands to kernels."""
    run_driver(driver("fuzz_divisor", *SANITIZE), 100_000, 1)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(2, 6))
def test_kernels_under_sanitizers_long(seed):
    run_driver(driver("fuzz_cpu", *SANITIZE), 10_000, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("bits", [128, 256])
def test_kernels_with_narrow_vectors(bits):
    """The versions that this machine would not choose agree with the double-precision loops too."""
    run_driver(driver("fuzz_cpu", *SANITIZE, f"-DTURBOATTN_WIDEST_VECTOR={bits}"), 3_000, 1)


# --- the handlers, through JAX ---------------------------------------------------------------------------------------------------------------

# Pages 0 and N - 1 are never named: a read of theirs shows as NaN in a result, a write as a changed byte.
B, T, H, K, D, N, M = 4, 9, 4, 2, 32, 10, 5
CASES = {
    # name: (query dtype, cache dtype, page size, stacked layers or None)
    "float32": (jnp.float32, jnp.float32, 16, None),
    "bfloat16": (jnp.bfloat16, jnp.bfloat16, 8, 2),
    "int8": (jnp.float32, "int8", 8, 2),
    "int4": (jnp.bfloat16, "int4", 16, None),
    "float8_e4m3fn": (jnp.bfloat16, "float8_e4m3fn", 16, 2),
}


def ints(rng: np.random.Generator, shape, low: int, high: int) -> np.ndarray:
    """int32 in [low, high]; in about a third of the arrays, a third of the values are anything at all."""
    values = rng.integers(low, high, shape, np.int64, endpoint=True)
    if rng.random() < 0.35:
        edges = np.array([INT32.min, INT32.min + 1, -1, low - 1, high + 1, N, INT32.max - 1, INT32.max])
        wild = np.where(
            rng.random(shape) < 0.5, rng.choice(edges, shape), rng.integers(INT32.min, INT32.max, shape, np.int64)
        )
        values = np.where(rng.random(shape) < 0.35, wild, values)
    return values.astype(np.int32)


def page_ids(rng: np.random.Generator, shape) -> np.ndarray:
    """Pages 1 .. N - 2 and wild values, but never 0 or N - 1."""
    ids = ints(rng, shape, 1, N - 2)
    return np.where((ids == 0) | (ids == N - 1), np.int32(-1), ids)


def make_cache(name: str):
    dtype, kv_dtype, page_size, layers = CASES[name]
    cache = jax_turboattn.PagedKVCache.create(
        N, K, D, page_size=page_size, num_layers=layers, dtype=kv_dtype, param_dtype=dtype
    )
    rng = np.random.default_rng(0)

    def fill(array, page_axis, code):
        if array is None:
            return None
        array = np.array(array)
        array[...] = rng.integers(0, 0x70, array.shape) if code else rng.standard_normal(array.shape)
        if array.dtype != np.uint8:
            np.moveaxis(array, page_axis, 0)[[0, N - 1]] = np.nan
        return jnp.asarray(array)

    axis = 0 if layers is None else 1
    quantised = isinstance(kv_dtype, str)
    arrays = {field: fill(getattr(cache, field), axis, quantised) for field in ("key", "value")}
    if cache.key_params is not None:
        per_row = kv_dtype in ("int8", "int4")
        for field in ("key_params", "value_params"):
            values = np.array(getattr(cache, field))
            values[...] = rng.uniform(0.01, 0.1, values.shape)
            if per_row:
                np.moveaxis(values, axis, 0)[[0, N - 1]] = np.nan
            arrays[field] = jnp.asarray(values)
    return jax_turboattn.PagedKVCache(**{**{f: getattr(cache, f) for f in cache.__dataclass_fields__}, **arrays})


def pages_of(cache, ids, layers):
    """Bytes of pages `ids` in every paged array."""
    arrays = [
        x for x in (cache.key, cache.value, cache.key_params, cache.value_params) if x is not None and N in x.shape[:2]
    ]
    axis = 0 if layers is None else 1
    return b"".join(np.moveaxis(np.asarray(x), axis, 0)[ids].tobytes() for x in arrays)


def draw(rng: np.random.Generator, name: str):
    page_size, layers = CASES[name][2:]
    offsets = np.sort(rng.integers(0, T, B + 1, endpoint=True))
    return {
        "page_table": page_ids(rng, (B, M)),
        "kv_lens": ints(rng, B, 0, M * page_size),
        "q_offsets": offsets.astype(np.int32) if rng.random() < 0.5 else ints(rng, B + 1, 0, T),
        "layer": None if layers is None else ints(rng, (), 0, layers - 1),
    }


@functools.cache
def functions(name: str):
    """The calls under test, compiled once; every argument but the cache is an index array."""
    dtype = CASES[name][0]
    rng = np.random.default_rng(1)
    query, key, value = (jnp.asarray(rng.standard_normal((T, heads, D)), dtype) for heads in (H, K, K))
    call = {"implementation": "cpu"}
    rope = jax_turboattn.RopeConfig("default", D)

    def attention(cache, window, **index):
        return jax_turboattn.paged_attention(query, cache, local_window_size=window, **index, **call)

    def append(cache, positions, read_only_pages, **index):
        return jax_turboattn.append_kv(
            cache, key, value, rope=rope, positions=positions, read_only_pages=read_only_pages, **index, **call
        )

    def step(cache, positions, read_only_pages, **index):
        return jax_turboattn.paged_attention_step(
            query, key, value, cache, rope=rope, positions=positions, read_only_pages=read_only_pages, **index, **call
        )

    def gather(cache, page_table, kv_lens, layer, **_):
        return jax_turboattn.gather_kv(cache, page_table, kv_lens, layer=layer, **call)

    def copy(cache, source, destination, layer):
        return jax_turboattn.copy_pages(cache, source, destination, layer=layer)

    def ranked(cache, cp_rank, **index):
        return jax_turboattn.paged_attention(query, cache, cp_rank=cp_rank, cp_size=2, **index, **call)

    return {f.__name__: jax.jit(f) for f in (attention, append, step, gather, copy, ranked)}


def fuzz(name: str, count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cache, layers = make_cache(name), CASES[name][3]
    run = functions(name)
    canaries = pages_of(cache, [0, N - 1], layers)
    everything = pages_of(cache, list(range(N)), layers)

    def finite(results, what, index):
        for x in jax.tree.leaves(results):
            assert not np.isnan(np.asarray(x, np.float32)).any(), f"{what}: NaN from a page that was not named, {index}"

    for i in range(count):
        index = draw(rng, name)
        positions, read_only = ints(rng, T, 0, 1000), ints(rng, B, 0, M)
        finite(run["attention"](cache, ints(rng, 2, -1, 40), **index), "paged_attention", index)
        finite(run["ranked"](cache, ints(rng, (), 0, 1), **index), "paged_attention cp", index)
        finite(run["gather"](cache, **index), "gather_kv", index)
        written = run["append"](cache, positions, read_only, **index)
        named = index["page_table"].ravel()
        untouched = [n for n in range(N) if n not in named]
        assert pages_of(written, untouched, layers) == pages_of(cache, untouched, layers), f"append_kv: {index}"
        out, written = run["step"](cache, positions, read_only, **index)
        finite(out, "paged_attention_step", index)
        assert pages_of(written, untouched, layers) == pages_of(cache, untouched, layers), (
            f"paged_attention_step: {index}"
        )
        destination = page_ids(rng, 3)
        copied = run["copy"](cache, page_ids(rng, 3), destination, index["layer"])
        untouched = [n for n in range(N) if n not in destination]
        assert pages_of(copied, untouched, layers) == pages_of(cache, untouched, layers), f"copy_pages: {index}"
        assert pages_of(copied, [0, N - 1], layers) == canaries
    assert pages_of(cache, list(range(N)), layers) == everything, "a call changed the cache that it was given"


needs_module = pytest.mark.skipif(ffi.load("cpu").reason is not None, reason=str(ffi.load("cpu").reason))


@needs_module
@pytest.mark.parametrize("name", CASES)
def test_handlers_with_any_index(name):
    fuzz(name, 100, 0)


@needs_module
@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_handlers_with_any_index_long(name):
    fuzz(name, 2_000, 1)
