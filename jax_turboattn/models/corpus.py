"""The byte corpus (standard-library sources of the running Python) and what other compressors make of it."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import numpy as np

SEPARATOR = 0  # stands before every file; the sources hold no zero byte

# Tests repeat each other and the code under test; encodings and pydoc_data are tables and generated text.
_LEFT_OUT = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}


def python_sources() -> tuple[list[bytes], list[bytes]]:
    """The files to train on and the held-out ones, in the order of their names.

    A file is held out when the SHA-256 of its path below the library's root, with slashes, is a multiple of 20: the
    same name is held out in every Python version.
    """
    root = Path(sysconfig.get_path("stdlib"))
    training, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _LEFT_OUT.isdisjoint(name.parts):
            digest = int.from_bytes(hashlib.sha256(name.as_posix().encode()).digest(), "big")
            (training if digest % 20 else held_out).append(path.read_bytes())
    return training, held_out


def join(files: Iterable[bytes]) -> np.ndarray:
    """uint8 stream: separator, file, separator, file, ..."""
    return np.frombuffer(b"".join(bytes([SEPARATOR]) + text for text in files), np.uint8)


def baselines(training: list[bytes], held_out: list[bytes]) -> dict[str, float]:
    """Bits per held-out byte of gzip, xz and an order-5 count model; the last one has read the training files."""
    text = b"".join(held_out)
    return {
        "gzip": 8 * len(gzip.compress(text, 9)) / len(text),
        "xz": 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text),
        "order-5 counts": count_model_bits(join(training), join(held_out), order=5),
    }


def count_model_bits(training: np.ndarray, held_out: np.ndarray, order: int) -> float:
    """Bits per byte of a count model over contexts of 0 to `order` bytes, interpolated as Witten and Bell do.

    P_k(c | h) = (n(h c) + t(h) P_{k-1}(c | h')) / (n(h) + t(h)): n counts occurrences in the training stream, t the
    distinct bytes seen after h, h' is h without its first byte, and P_{-1} = 1 / 256.
    Separators are context, not predicted.
    """
    probability = np.full(held_out.size, 1 / 256)
    for length in range(order + 1):
        seen, count = np.unique(_contexts(training, length + 1), return_counts=True)
        context, first, kinds = np.unique(seen >> np.uint64(8), return_index=True, return_counts=True)
        total = np.add.reduceat(count, first)

        here = _contexts(held_out, length + 1)
        n_h, t_h = (_lookup(context, column, here >> np.uint64(8)) for column in (total, kinds))
        interpolated = (_lookup(seen, count, here) + t_h * probability) / np.maximum(n_h + t_h, 1)
        probability = np.where(n_h > 0, interpolated, probability)
    return float(-np.log2(probability[held_out != SEPARATOR]).mean())


def _contexts(stream, length):
    """uint64 per position: the last `length` bytes up to and including it (zeros before the start)."""
    packed = np.zeros(stream.size, np.uint64)
    for back in range(length):
        packed[back:] |= stream[: stream.size - back].astype(np.uint64) << np.uint64(8 * back)
    return packed


def _lookup(keys, values, wanted):
    """values[i] where keys[i] == wanted, 0 where there is none; keys are sorted."""
    index = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
    return np.where(keys[index] == wanted, values[index], 0)
