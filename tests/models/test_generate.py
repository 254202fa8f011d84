"""`python -m jax_turboattn generate`: what it prints, and one line for each error."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("flax")

from jax_turboattn.__main__ import main


def generate(*arguments):
    return main(["generate", "--max-tokens", "12", *arguments])


@pytest.mark.parametrize("kv_dtype, implementation", [("bfloat16", "cpu"), ("int8", "xla"), ("int4", "cpu")])
def test_completes_prompts_of_different_lengths(capsys, kv_dtype, implementation):
    arguments = ["--prompt", "def read_lines(path):", "--prompt", "x", "--stats"]
    arguments += ["--kv-dtype", kv_dtype, "--implementation", implementation]
    assert generate(*arguments) == 0
    printed, progress = capsys.readouterr()
    assert "--- 1: 21 bytes and" in printed and "\ndef read_lines(path):" in printed
    assert "--- 2: 1 bytes and" in printed
    assert "tokens/s" in progress
    assert f"paged_attention_step: {implementation} on " in progress
    assert f"{kv_dtype}, " in printed and "new tokens" in printed
    assert f"implementation  {implementation}\n" in printed
    assert generate(*arguments) == 0
    again, _ = capsys.readouterr()
    assert again.split("--- statistics")[0] == printed.split("--- statistics")[0]


def test_graph_flag_keeps_what_is_set(monkeypatch):
    from jax_turboattn.models import generate as command

    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    command._set_graph_flag()
    assert os.environ["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false --xla_gpu_graph_min_graph_size=1"
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_graph_min_graph_size=9")
    command._set_graph_flag()
    assert os.environ["XLA_FLAGS"] == "--xla_gpu_graph_min_graph_size=9"


def test_seed_and_temperature(capsys):
    def text(*arguments):
        assert generate("--prompt", "import ", *arguments) == 0
        return capsys.readouterr().out

    assert text("--temperature", "1.5", "--seed", "1") == text("--temperature", "1.5", "--seed", "1")
    assert text("--temperature", "1.5", "--seed", "1") != text("--temperature", "1.5", "--seed", "2")
    assert text("--temperature", "0", "--seed", "1") == text("--temperature", "0", "--seed", "2")


ERRORS = [
    (["--prompt", ""], "--prompt must not be empty"),
    (["--max-tokens", "0"], "--max-tokens must be >= 1, got 0"),
    (["--max-tokens", "5000"], "max_length = 1024"),
    (["--temperature", "-1"], "temperature must be finite and >= 0, got -1.0"),
    (["--implementation", "magic"], "implementation must be one of"),
    (["--implementation", "pallas", "--kv-dtype", "int4"], "no kernel"),
    (["--kv-dtype", "int3"], "invalid choice: 'int3'"),
    (["--seed", "x"], "invalid int value: 'x'"),
]


@pytest.mark.parametrize("arguments, message", ERRORS)
def test_errors_are_one_line_and_status_2(capsys, arguments, message):
    try:
        status = main(["generate", *arguments])
    except SystemExit as exit:  # argparse
        status = exit.code
    printed, error = capsys.readouterr()
    assert (status, printed) == (2, "")
    assert error.count("\n") == 1 and message in error


def test_unknown_command():
    command = [sys.executable, "-m", "jax_turboattn", "fly"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "invalid choice: 'fly'" in done.stderr
