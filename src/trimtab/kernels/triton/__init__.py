WORDS = ("swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu_squared")
"""Activations that the kernels between grouped GEMMs know; the first `GATED` have a gate."""
GATED = 3
