"""The backend of CUDA devices, which needs CuPy."""

from sparsecomm.backends.cuda.backend import CudaBackend, of

__all__ = ["CudaBackend", "of"]
