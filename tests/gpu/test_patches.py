"""The codec of patches on a real CUDA device: the same bits as on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from sparsecomm.backends import _codec
from sparsecomm.patches import cuda as codec
from sparsecomm.patches.elements import bytes_of
from sparsecomm.tensors.interop import Device, Tensor
from tests.patches.elements import LAYOUTS, changed, check, elements, host_tensor, layout_of, tensor_of

pytestmark = pytest.mark.gpu

try:
    import cupy

    cupy.cuda.runtime.getDeviceCount()
except Exception as error:
    pytest.skip(f"no CUDA device: {type(error).__name__}: {error}", allow_module_level=True)


def put(array: np.ndarray, name: str, misaligned: int = 0) -> Tensor:
    there = cupy.zeros(len(array) + misaligned, array.dtype)[misaligned:]
    there[:] = cupy.asarray(array)
    stream = cupy.cuda.get_current_stream().ptr or 1
    return tensor_of(there.data.ptr, array.nbytes, name, Device("cuda", 0), there, stream)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("n", [0, 2, 1000, 70_002, 3 * _codec.PIECE + 2000, 20 * _codec.PIECE])
def test_the_same_bits_as_on_the_cpu(name: str, n: int) -> None:
    old = elements(name, n, 1)
    for density in (0, 0.01, 0.3, 1) if n < 10**6 else (0.01,):
        new = changed(name, old, density, 2)
        for misaligned in (0, 1):
            tensors = [put(array, name, misaligned) for array in (old, new)]
            check(codec, name, old, new, *tensors)
            assert bytes_of(tensors[0]).tobytes() == new.tobytes()


@pytest.mark.parametrize("on_host", [0, 1])
def test_one_version_is_in_host_memory(on_host: int) -> None:
    old = elements("float32", 20 * _codec.PIECE, 1)
    versions = [old, changed("float32", old, 0.01, 2)]
    tensors = [host_tensor(array, "float32") for array in versions]
    expected = _codec.diff(*tensors, layout_of("float32"))
    tensors[1 - on_host] = put(versions[1 - on_host], "float32")
    assert codec.diff(*tensors, layout_of("float32")) == expected


def test_samples_are_those_of_the_host() -> None:
    array = elements("bfloat16", 1_000_000, 1)
    np.testing.assert_array_equal(codec.sample(put(array, "bfloat16"), 2, 4096), array[:: 1_000_000 // 4096])
