"""Tensors of other libraries, imported by DLPack, and the sparse vectors that calls return."""
