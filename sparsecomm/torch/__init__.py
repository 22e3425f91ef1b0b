"""sparsecomm in PyTorch."""
