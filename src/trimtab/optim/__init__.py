"""Optimizers that know which matrices a model's parameters are made of."""
