"""Optimizers that exchange gradients themselves: AdamW, with one core for arrays, PyTorch and JAX."""
