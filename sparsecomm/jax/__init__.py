"""sparsecomm in JAX."""
