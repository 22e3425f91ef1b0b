"""The arithmetic of CUDA devices."""

from sparsecomm.backends.cuda.backend import CudaBackend

__all__ = ["CudaBackend"]
