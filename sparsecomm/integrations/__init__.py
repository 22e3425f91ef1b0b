"""Integrations with frameworks that own the training loop. Each module requires its framework.

- `sparsecomm.integrations.lightning`: a strategy.
- `sparsecomm.integrations.accelerate`, `sparsecomm.integrations.transformers`: ``register``, in one line.

`SparseAdamW` exchanges gradients itself. With other optimizers, a hook of DDP exchanges them
(`sparsecomm.torch.register`). Each rank's residuals are saved and loaded with the framework's checkpoints, also on
another number of ranks.
"""
