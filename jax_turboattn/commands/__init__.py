"""The commands of `python -m jax_turboattn`, one file each: add_arguments(parser) and run(args) -> exit status."""
