"""The arithmetic of CUDA devices."""

from sparsecomm.backends.cuda.backend import CudaBackend, of

__all__ = ["CudaBackend", "of"]
