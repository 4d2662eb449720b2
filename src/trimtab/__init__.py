"""trimtab: Mixture-of-Experts for PyTorch with the right numbers, however the tokens fall."""

__version__ = "0.1.0"
