"""The arithmetic of CUDA devices."""

from sparsecomm.ops.cuda.ops import CudaOps

__all__ = ["CudaOps"]
