"""The codec of patches on an emulated CUDA device: the same bits as on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from sparsecomm.backends import _codec
from sparsecomm.patches import cuda as codec
from sparsecomm.patches.elements import bytes_of, copy_tensor
from sparsecomm.tensors.interop import Device, Tensor
from tests.emulator import devices
from tests.emulator.deferred import DeferredRuntime
from tests.patches.elements import LAYOUTS, changed, check, elements, host_tensor, layout_of, tensor_of
from tests.thinning import exhaustive


@pytest.fixture
def device(cuda: DeferredRuntime, monkeypatch: pytest.MonkeyPatch) -> DeferredRuntime:
    """The emulated device, with tiles of two blocks."""
    devices.use(cuda, monkeypatch, patch_threads=64)
    return cuda


def put(device: DeferredRuntime, array: np.ndarray, name: str) -> Tensor:
    """Lend an array to the device; its current stream has yet to write the elements."""
    on_device = device.put(array)
    return tensor_of(array.ctypes.data, array.nbytes, name, Device("cuda", device.device), on_device, device.stream())


def check_lent(device: DeferredRuntime, name: str, old: np.ndarray, new: np.ndarray) -> None:
    """Check tensors whose memory ends with their last element, or is misaligned."""
    for misaligned in (0, 1):
        rooms = [np.zeros(len(old) + misaligned, old.dtype) for _ in "12"]
        lent = [room[misaligned:] for room in rooms]
        lent[0][:], lent[1][:] = old, new
        check(codec, name, old, new, *(put(device, array, name) for array in lent))
        device.synchronize()
        np.testing.assert_array_equal(lent[0], new)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_same_bits_as_on_the_cpu(device: DeferredRuntime, name: str) -> None:
    block = _codec.BLOCK // LAYOUTS[name][0]
    check_lent(device, name, elements(name, 0, 0), elements(name, 0, 0))
    for n in (2, 30, block - 2, block, block + 2, 9 * block - 6):
        for density in (0, 0.01, 0.3, 1):
            old = elements(name, n, n)
            check_lent(device, name, old, changed(name, old, density, n + 1))


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [exhaustive(1), 2])
def test_several_pieces(cuda: DeferredRuntime, monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    """Includes blocks without changes. ``pieces``: the number of pieces in a part."""
    monkeypatch.setattr(codec, "_PIECES", pieces)
    name, piece = "float8_e4m3", _codec.PIECE
    old, layout = elements(name, piece + 3000, 1), layout_of(name)
    new = changed(name, old, 0.01, 2)
    new[piece - 2000 : piece + 1500] = old[piece - 2000 : piece + 1500]
    before, after = (put(cuda, array.copy(), name) for array in (old, new))
    coded, count, *digests = codec.diff(before, after, layout)
    assert (coded, count, *digests) == _codec.diff(host_tensor(old, name), host_tensor(new, name), layout)
    located = codec.locate(before, layout, coded)
    assert located is not None
    assert [located.before, located.after] == digests
    located.write(before)
    assert bytes_of(before).tobytes() == new.tobytes()


def test_versions_on_different_streams(device: DeferredRuntime) -> None:
    old = elements("float32", 3000, 1)
    new = changed("float32", old, 0.1, 2)
    tensors = []
    for array in (old, new):
        with device.on_stream(device.new_stream()):
            # The stream writes the elements later; a codec that does not wait for it misses them.
            tensors.append(put(device, array.copy(), "float32"))
    check(codec, "float32", old, new, *tensors)


def test_damaged_bytes_are_refused_or_decoded_as_on_the_cpu(device: DeferredRuntime) -> None:
    name, refused = "bfloat16", 0
    old, layout = elements(name, 2000, 1), layout_of(name)
    coded = np.frombuffer(
        _codec.diff(host_tensor(old, name), host_tensor(changed(name, old, 0.05, 2), name), layout)[0], np.uint8
    )
    tensor = put(device, old.copy(), name)
    rng = np.random.default_rng(3)
    for trial in range(60):
        bad = coded.copy()
        bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
        bad = bad[: rng.integers(len(bad))] if trial % 5 == 0 else bad
        ours, theirs = codec.locate(tensor, layout, bad), _codec.locate(host_tensor(old, name), layout, bad)
        refused += theirs is None
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert (ours.before, ours.after) == (theirs.before, theirs.after)
    assert 5 < refused < 60


def test_copies(device: DeferredRuntime) -> None:
    array = elements("float32", 9000, 1)
    tensor = put(device, array.copy(), "float32")
    assert bytes_of(tensor).tobytes() == array.tobytes()
    there = codec.empty_like(tensor)
    copy_tensor(tensor, there)
    assert bytes_of(there).tobytes() == array.tobytes()
    back = np.zeros_like(array)
    copy_tensor(there, host_tensor(back, "float32"))
    np.testing.assert_array_equal(back, array)
    copy_tensor(host_tensor(array[::-1].copy(), "float32"), there)
    assert bytes_of(there).tobytes() == array[::-1].tobytes()


@pytest.mark.parametrize("name", ["uint8", "float16", "complex128"])
def test_samples_equal_those_taken_on_the_host(device: DeferredRuntime, name: str) -> None:
    for n in (0, 2, 5000):
        array = elements(name, n, 1)
        sample = codec.sample(put(device, array.copy(), name), LAYOUTS[name][0], 1000)
        np.testing.assert_array_equal(sample, array[:: max(1, n // 1000)].astype(np.int64))
        assert sample.dtype == np.int64
