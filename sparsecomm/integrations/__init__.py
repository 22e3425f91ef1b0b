"""sparsecomm in frameworks that make the training loop: a module for each, which needs that framework.

- `sparsecomm.integrations.lightning`: a strategy.
- `sparsecomm.integrations.accelerate`, `sparsecomm.integrations.transformers`: ``register``, in one line.

Under `SparseAdamW` gradients are exchanged by the optimizer, and else by `sparsecomm.torch.register`. Residuals are
saved with the framework's checkpoints, each rank's own, and loaded with them, also by another number of ranks.
"""
