from collections.abc import Callable
from typing import Any, TypeVar

from numpy.typing import NDArray

_Array = NDArray[Any]
_F = TypeVar("_F", bound=Callable[..., Any])
_Done = list[Any] | None

def topk(
    x: int,
    code: int,
    size: int,
    residual: int,
    residual_code: int,
    k: int,
    int64_indices: bool,
    threads: int,
    entries: object = None,
    done: _Done = None,
) -> tuple[_Array, _Array]: ...
def topk_by_chunk(
    x: int,
    code: int,
    size: int,
    residual: int,
    residual_code: int,
    k: int,
    chunk: int,
    decay: float,
    int64_indices: bool,
    threads: int,
    entries: object = None,
    done: _Done = None,
) -> tuple[_Array, _Array]: ...
def threshold(
    x: int,
    code: int,
    size: int,
    residual: int,
    residual_code: int,
    tau: float,
    int64_indices: bool,
    threads: int,
    entries: object = None,
    done: _Done = None,
) -> tuple[_Array, _Array]: ...
def merge(
    a_indices: _Array, a_values: _Array, b_indices: _Array, b_values: _Array, int64_indices: bool, float64_values: bool
) -> tuple[_Array, _Array]: ...
def merge_topk(
    a_indices: _Array,
    a_values: _Array,
    b_indices: _Array,
    b_values: _Array,
    k: int,
    int64_indices: bool,
    float64_values: bool,
) -> tuple[_Array, _Array, _Array, _Array]: ...
def scatter_add(
    data: int, code: int, size: int, indices: _Array, values: _Array, int64_indices: bool, done: _Done = None
) -> None: ...
def scatter_add_where(
    data: int,
    code: int,
    size: int,
    indices: _Array,
    values: _Array,
    others: _Array,
    int64_indices: bool,
    present: bool,
    done: _Done = None,
) -> None: ...
def densify(
    data: int, code: int, size: int, indices: _Array, values: _Array, int64_indices: bool, threads: int
) -> None: ...
def widen(x: int, code: int, size: int, residual: int, residual_code: int, threads: int) -> _Array: ...
def add_into(
    x: int, code: int, size: int, residual: int, residual_code: int, threads: int, done: _Done = None
) -> None: ...
def add(total: _Array, addend: _Array, float64_values: bool, threads: int) -> None: ...
def narrow(values: _Array, data: int, code: int, size: int, threads: int, done: _Done = None) -> None: ...
def well_formed(indices: _Array, values: _Array, size: int, int64_indices: bool, float64_values: bool) -> bool: ...
def pack(indices: _Array, values: _Array, kind: int, int64_indices: bool, float64_values: bool) -> _Array: ...
def unpack(
    data: _Array, count: int, n: int, kind: int, int64_indices: bool, float64_values: bool
) -> tuple[_Array, _Array]: ...
def quantize_values(values: _Array, kind: int) -> tuple[_Array, _Array, int]: ...
def simd() -> str: ...
def use_simd(name: str) -> bool: ...
def release_scratch() -> None: ...
def default_float_mode(function: _F) -> _F: ...
