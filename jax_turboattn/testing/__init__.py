"""What tests and benchmarks share: the float64 golden, numpy codecs, named cases, tolerances. Imports no jax."""
