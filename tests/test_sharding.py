"""Heads and batch shard without a gather, on four fake CPU devices (a process of its own: the count is set at start)."""

import os
import pathlib
import subprocess
import sys

import pytest

PROGRAM = pathlib.Path(__file__).with_name("sharding_program.py")


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
def test_on_four_devices(implementation):
    environment = dict(os.environ, XLA_FLAGS="--xla_force_host_platform_device_count=4", JAX_PLATFORMS="cpu")
    environment["JAX_TURBOATTN_IMPLEMENTATION"] = implementation
    ran = subprocess.run([sys.executable, PROGRAM], env=environment, capture_output=True, text=True)
    if ran.returncode == 77:  # the program's word for: this implementation is not in this installation
        pytest.skip(ran.stdout.strip())
    assert ran.returncode == 0, ran.stdout + ran.stderr
