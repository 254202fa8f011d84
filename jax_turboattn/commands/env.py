"""`env`: what this installation has, and why not the rest."""

from __future__ import annotations

from ..inspection import environment


def add_arguments(parser) -> None:
    """No arguments."""


def run(args) -> int:
    facts = environment()
    width = max(map(len, facts))
    for name, fact in facts.items():
        print(f"{name:<{width}}  {fact}")
    return 0
