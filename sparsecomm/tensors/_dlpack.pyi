import numpy as np
from numpy.typing import NDArray

from sparsecomm.tensors.dtypes import DType
from sparsecomm.tensors.interop import Device

class Import:
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

class Tensor:
    pointer: int
    size: int
    shape: tuple[int, ...]
    dtype: DType
    device: Device
    readonly: bool
    owner: object
    stream: int | None
    def __init__(
        self,
        pointer: int,
        size: int,
        shape: tuple[int, ...],
        dtype: DType,
        device: Device,
        readonly: bool,
        owner: object,
        stream: int | None = None,
    ) -> None: ...
    @property
    def nbytes(self) -> int: ...
    def part(self, begin: int, end: int) -> Tensor: ...

def overlap(a: Tensor, b: Tensor) -> bool: ...
def plain(obj: object, writable: bool, cpu: Device, stream: int | None = None) -> Tensor | None: ...
def address(array: NDArray[np.generic]) -> int: ...
def view(pointer: int, size: int, dtype: np.dtype, readonly: bool, owner: object) -> NDArray[np.generic]: ...
