"""Tensors: what the library takes in (DLPack), and the sparse vectors that it gives back."""
