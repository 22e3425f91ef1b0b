import numpy as np
from numpy.typing import NDArray

class Import:
    """The tensor of a consumed capsule. The exporter's memory is released when this object dies."""

    pointer: int
    size: int
    shape: tuple[int, ...]
    code: int
    bits: int
    lanes: int
    device_type: int
    device_id: int
    contiguous: bool
    readonly: bool
    copied: bool
    def __init__(self, capsule: object) -> None: ...

def address(array: NDArray[np.generic]) -> int: ...
def view(pointer: int, size: int, dtype: np.dtype, readonly: bool, owner: object) -> NDArray[np.generic]: ...
