"""The commands env, kernels and explain, and what they report; one-line errors with exit status 2."""

import functools
import re
import subprocess
import sys

import conformance
import jax
import numpy as np
import pytest

import jax_turboattn as ta
from jax_turboattn import __main__ as command_line
from jax_turboattn.backends import ffi
from jax_turboattn.commands import explain as explain_command
from jax_turboattn.testing import cases


def test_the_cpu_module_is_here():
    """Elsewhere a missing module skips tests; here it is a failure, so that a suite without it cannot pass."""
    assert ffi.load("cpu").reason is None
    assert ffi.load("cpu").targets == {ffi.target(op) for op in ffi.OPS}


def run(capsys, *arguments):
    status = command_line.main(list(arguments))
    return status, capsys.readouterr()


def test_env_names_every_implementation(capsys):
    status, printed = run(capsys, "env")
    assert status == 0
    facts = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in printed.out.splitlines())
    assert facts["jax"] == jax.__version__
    assert facts["cpu"].startswith("loaded: 9 primitives, built against XLA FFI")
    assert facts["cuda"].startswith(("loaded", "not available: the extension module _cuda was not built"))
    assert facts["pallas"].startswith("available: ")
    assert facts["JAX_TURBOATTN_IMPLEMENTATION"] == "not set"


@pytest.mark.parametrize(
    "name, fact", [("", "not set"), ("xla", "xla"), ("gpu", "gpu: calls that name none raise, since")]
)
def test_env_says_what_is_forced(capsys, monkeypatch, name, fact):
    monkeypatch.setenv("JAX_TURBOATTN_IMPLEMENTATION", name)
    lines = run(capsys, "env")[1].out.splitlines()
    (line,) = (line for line in lines if line.startswith("JAX_TURBOATTN_IMPLEMENTATION"))
    assert line.split(maxsplit=1)[1].startswith(fact)


def test_kernels_lists_the_registry(capsys):
    status, printed = run(capsys, "kernels")
    assert status == 0
    names = [line.split()[0] for line in printed.out.splitlines()[1:]]
    assert names[: len(ffi.load("cpu").module.kernels())] == [k["name"] for k in ffi.load("cpu").module.kernels()]
    assert any(name.startswith("prefill_cpu_bfloat16_kvint8") for name in names)
    status, printed = run(capsys, "kernels", "--markdown")
    assert status == 0 and "| `gather_kv` | gather | `cpu` | any |" in printed.out


@pytest.mark.parametrize("function", explain_command.FUNCTIONS)
def test_explain(capsys, function):
    options = [] if function in ("attention", "ragged_attention", "merge_partials") else ["--kv-dtype", "int8"]
    status, printed = run(capsys, "explain", function, *options, "--platform", "cpu")
    assert status == 0
    chosen = [line for line in printed.out.splitlines() if "<- chosen" in line]
    assert len(chosen) == 1 and chosen[0].split()[1] == "cpu"
    kernels = {
        "append_kv": "append_cpu_bfloat16",
        "gather_kv": "gather_cpu_bfloat16",
        "attention": "attention_cpu_bfloat16",
        "ragged_attention": "attention_cpu_bfloat16",
        "merge_partials": "merge_cpu_bfloat16",
        "copy_pages": "copy_pages_cpu",
        "make_plan": "takes it",  # it gives zeros there, which nothing reads
    }
    assert kernels.get(function, "prefill_cpu_bfloat16") in chosen[0]


def test_explain_gives_the_reason_of_each_refusal(capsys):
    options = ("--head-dim", "80", "--value-dim", "48")  # no CUDA kernel has these
    status, printed = run(capsys, "explain", "paged_decode", "--platform", "cuda", *options)
    assert status == 0
    rows = {line.split()[1]: line for line in printed.out.splitlines()[1:]}
    assert list(rows) == ["cuda", "pallas", "xla"]
    assert "<- chosen" in rows["pallas"]
    assert re.search("was not built|no decode kernel for head_dim 80, value_dim 48", rows["cuda"])


@pytest.mark.parametrize("function", [ta.paged_attention, ta.paged_attention_step])
def test_explain_names_the_kernels(function):
    """By the names that `kernels` lists, on each platform whose module was built."""
    ints = functools.partial(jax.ShapeDtypeStruct, dtype=np.int32)
    cache = jax.eval_shape(lambda: ta.PagedKVCache.create(4, 2, 64, dtype="int8"))
    rows = [jax.ShapeDtypeStruct((3, heads, 64), jax.numpy.bfloat16) for heads in (8, 2, 2)]
    arrays = rows[:1] if function is ta.paged_attention else rows
    phases = {"cpu": ["prefill"], "cuda": ["decode", "prefill"]}
    for platform in phases:
        if ffi.load(platform).reason is not None:
            continue
        found = ta.explain(function, *arrays, cache, ints((2, 4)), ints((2,)), ints((3,)), platform=platform)
        names = {k["name"]: k["phase"] for k in ffi.load(platform).module.kernels()}
        expected = phases[platform] if function is ta.paged_attention else ["append", *phases[platform]]
        taken = dict.fromkeys(names[kernel] for kernel in found[0].kernels)  # of prefill there may be several families
        assert found[0].chosen and list(taken) == expected
        assert all(kernel.endswith("bfloat16_kvint8") for kernel in found[0].kernels)
        assert [c.kernels for c in found[1:]] == [()] * (len(found) - 1)


def test_families_by_name():
    """`cuda:sm80` is a name for every function; a family without attention kernels has the rest alone."""
    if ffi.load("cuda").reason is not None:
        pytest.skip(ffi.load("cuda").reason)
    built = {kernel["family"] for kernel in ffi.load("cuda").module.kernels()}
    for family in ("sm75", "sm80", "sm90"):
        for spec in (s for s in cases.SPECS if s.name in ("plain", "bfloat16", "few")):
            reason = conformance.declined(spec, f"cuda:{family}")
            attends = spec.op not in ("append_kv", "gather_kv", "copy_pages", "merge_partials")
            if attends and family not in built:
                assert f"no {family} " in reason
            elif family == "sm80" or not attends:
                assert reason is None


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["explain", "paged_decode", "--heads", "7"], "H must be a multiple of K, got H = 7"),
        (["explain", "paged_decode", "--page-size", "48"], "page_size must be a power of two from 8 to 256, got 48"),
        (["explain", "gather_kv", "--window", "5"], "--window must come with a function that reads it, got gather_kv"),
        (["explain", "attention", "--kv-dtype", "int8"], "--kv-dtype must come with a function that reads it"),
        (["explain", "paged_decode", "--value-dim", "0"], "value_dim must be >= 1, got 0"),
        (["explain", "paged_decode", "--implementation", "tpu"], "implementation must be one of"),
        (["explain", "gather_kv", "--implementation", "pallas"], "implementation='pallas' has no kernel for this call"),
    ],
)
def test_errors_are_one_line(capsys, arguments, text):
    status, printed = run(capsys, *arguments)
    assert status == 2
    assert text in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["env", "extra"], ["explain", "paged_decode", "--heads", "x"]])
def test_usage_errors_are_one_line(arguments):
    ran = subprocess.run([sys.executable, "-P", "-m", "jax_turboattn", *arguments], capture_output=True, text=True)
    assert ran.returncode == 2
    assert ran.stderr.startswith("python -m jax_turboattn") and ran.stderr.count("\n") == 1


def test_a_module_that_is_too_new_is_refused():
    assert ffi.version_mismatch((0, 3), (0, 5)) is None
    assert ffi.version_mismatch((0, 5), (0, 5)) is None
    assert re.match(r"it was built against XLA FFI 0\.5 and this jaxlib has 0\.4; reinstall", ffi.version_mismatch((0, 5), (0, 4)))
    assert ffi.version_mismatch((1, 0), (0, 5)) is not None


def test_a_module_that_is_too_new_falls_back(monkeypatch):
    """Nothing is registered, and calls take plain jnp: XLA itself never sees the module."""
    monkeypatch.setattr(ffi, "runtime_ffi_version", lambda: (0, 0))
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *_, **__: pytest.fail("registered"))
    ffi.load.cache_clear()
    try:
        assert "not usable: it was built against XLA FFI" in ffi.load("cpu").reason
        arguments = jax.eval_shape(lambda: (jax.numpy.zeros((1, 3, 2, 8)),) * 3)
        found = ta.explain(lambda *qkv: ta.attention(*qkv), *arguments, platform="cpu")
        assert [(c.implementation, c.chosen) for c in found] == [("cpu", False), ("xla", True)]
    finally:
        monkeypatch.undo()
        ffi.load.cache_clear()


def test_import_needs_neither_flax_nor_a_gpu():
    code = "import sys, jax_turboattn; print([m for m in ('flax', 'hypothesis', 'torch') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-P", "-c", code], text=True).strip() == "[]"
