"""A Llama-family decoder on the paged primitives, its weights, and a continuous-batching server."""
