"""`python -m jax_turboattn <command>`."""

from __future__ import annotations

import argparse
import importlib
import sys

# command -> (module with add_arguments(parser) and run(args) -> exit status, one line of help). The modules are
# imported when their command is asked for: `env` must work where flax is missing.
COMMANDS = {
    "env": ("jax_turboattn.commands.env", "versions, devices, and which implementations loaded or why not"),
    "kernels": ("jax_turboattn.commands.kernels", "the compiled kernels"),
    "explain": ("jax_turboattn.commands.explain", "which implementation a call would take, and why not the others"),
    "generate": ("jax_turboattn.models.generate", "complete text with the shipped model"),
}


class _Parser(argparse.ArgumentParser):
    """Errors are one line, without the usage."""

    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(argv: list[str] | None = None) -> int:
    """Runs one command; 2 after an error that is the user's to mend, with one line on stderr."""
    argv = sys.argv[1:] if argv is None else argv
    parser = _Parser(prog="python -m jax_turboattn", description="Paged attention for JAX.")
    parsers = parser.add_subparsers(dest="command", required=True, metavar="command")
    subparsers = {name: parsers.add_parser(name, help=text, description=text) for name, (_, text) in COMMANDS.items()}
    module = None
    try:
        if argv and argv[0] in COMMANDS:
            module = importlib.import_module(COMMANDS[argv[0]][0])
            module.add_arguments(subparsers[argv[0]])
        args = parser.parse_args(argv)
        return module.run(args)
    except (ImportError, NotImplementedError, OSError, TypeError, ValueError) as error:
        hint = ""
        if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in ("flax", "safetensors"):
            hint = "; pip install '.[models]' in the clone brings it"
        print(f"{parser.prog} {argv[0]}: error: {' '.join(str(error).split())}{hint}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
