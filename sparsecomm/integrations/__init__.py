"""Integrations with frameworks that own the training loop. Each module requires its framework.

- `sparsecomm.integrations.lightning`: a strategy.
- `sparsecomm.integrations.accelerate`, `sparsecomm.integrations.transformers`: ``register``, in one line.

`SparseAdamW` exchanges gradients itself; for other optimizers `sparsecomm.torch.register` does. Residuals of each rank
are saved and loaded with the framework's checkpoints, on any number of ranks.
"""
