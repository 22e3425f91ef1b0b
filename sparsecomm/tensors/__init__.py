"""Import of other libraries' tensors through DLPack, and the sparse vectors that calls return."""
