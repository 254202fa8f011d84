"""The PEP 517 build backend: scikit-build-core, plus the CUDA compiler wheels where they are needed.

They are when the CUDA module is built and no nvcc works here.
"""

from __future__ import annotations

import cuda_choice
from scikit_build_core import build as _skbuild
from scikit_build_core.build import *  # the hooks that need no change


def _compiler_wheels() -> list[str]:
    choice = cuda_choice.choose()
    return cuda_choice.COMPILER_WHEELS if choice.cuda and choice.nvcc is None else []


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    return [*_skbuild.get_requires_for_build_wheel(config_settings), *_compiler_wheels()]


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    return [*_skbuild.get_requires_for_build_editable(config_settings), *_compiler_wheels()]
