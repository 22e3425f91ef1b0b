"""Tensors of other libraries: read without a copy, kept alive, released once, and refused with a reason."""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors.dtypes import BFLOAT16, DTYPES, FLOAT32, FLOAT64, DType
from sparsecomm.tensors.interop import CPU, Device, Tensor, as_numpy, as_out, as_residual, content, overlap, tensor
from sparsecomm.tensors.sparse import SparseVector
from tests.tensors.capsules import DELETER, DLTensor, Unversioned, Versioned, is_capsule, new_capsule

VALUES = np.array([0.5, -1.0, 2.0, 0.0, -0.25, 96.0])  # exact in all four dtypes


def bits(dtype: DType) -> np.ndarray:
    """`VALUES` as `as_numpy` shows them."""
    if dtype is BFLOAT16:
        return (VALUES.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return VALUES.astype(dtype.name)


class Library(NamedTuple):
    """How a library makes an array of `VALUES`, and the address of its elements."""

    make: Callable[[DType], Any]
    pointer: Callable[[Any], int]


def numpy_library() -> Library:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is not installed")
    types = {name: np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name) for name in DTYPES}
    return Library(lambda d: VALUES.astype(types[d.name]), lambda a: a.__array_interface__["data"][0])


def torch_library() -> Library:
    return Library(lambda d: torch().tensor(VALUES, dtype=getattr(torch(), d.name)), lambda a: a.data_ptr())


def jax_library() -> Library:
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    jax.config.update("jax_enable_x64", True)
    return Library(lambda d: jax.numpy.array(VALUES, dtype=d.name), lambda a: a.unsafe_buffer_pointer())


LIBRARIES = {"numpy": numpy_library, "torch": torch_library, "jax": jax_library}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Library:
    return LIBRARIES[request.param]()


@pytest.fixture(params=DTYPES.values(), ids=str)
def dtype(request: pytest.FixtureRequest) -> DType:
    return request.param


def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is not installed")


# --- accepted arrays -------------------------------------------------------------------------------------------------


def test_reads_without_a_copy_and_keeps_the_array(library: Library, dtype: DType) -> None:
    array = library.make(dtype)
    t, address = tensor(array, "x"), library.pointer(array)
    assert (t.pointer, t.size, t.shape, t.nbytes) == (address, 6, (6,), 6 * dtype.itemsize)
    assert (t.dtype, t.device) == (dtype, CPU)
    del array
    gc.collect()
    others = [library.make(dtype) * 0 for _ in range(100)]
    np.testing.assert_array_equal(as_numpy(t), bits(dtype), strict=True)
    del others


@pytest.mark.parametrize("shape", [(), (0,), (2, 3), (3, 1, 2), (0, 5)])
def test_shapes(library: Library, shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape))
    t = tensor(library.make(FLOAT32)[:size].reshape(shape), "x")
    assert (t.shape, t.size) == (shape, size)


def test_strides_of_dimensions_of_one_element_do_not_matter() -> None:
    assert tensor(np.lib.stride_tricks.as_strided(np.ones(4, np.float32), (1, 4, 1), (400, 4, 12)), "x").size == 4
    assert tensor(torch().ones(4).as_strided((1, 4, 1), (99, 1, 7)), "x").size == 4
    assert tensor(torch().ones(4).as_strided((3, 0), (7, 5)), "x").size == 0


def test_memory_that_may_not_be_written_may_be_read() -> None:
    array = np.ones(3, np.float32)
    array.flags.writeable = False
    for readonly in (array, jax_library().make(FLOAT32)):
        t = tensor(readonly, "x")
        assert t.readonly
        assert not as_numpy(t).flags.writeable


# --- refused arrays --------------------------------------------------------------------------------------------------


def torch_view(offset: int) -> Any:
    raw = torch().zeros(64, dtype=torch().uint8)
    return np.frombuffer(raw.numpy(), np.uint8)[offset : offset + 16].view(np.float32)


def torch_freed() -> Any:
    freed = torch().ones(1000)
    freed.untyped_storage().resize_(0)
    return freed


def jax_tracer() -> Any:
    jax, seen = pytest.importorskip("jax", reason="JAX is not installed"), []
    jax.make_jaxpr(seen.append)(1.0)
    return seen[0]


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "list": (lambda: [1.0, 2.0], r"got list; expected an array of float16.*np\.asarray"),
    "numpy scalar": (lambda: np.float32(1), r"got numpy\.float32; expected"),
    "int": (lambda: np.ones(3, np.int32), r"type int32; expected float16, bfloat16, float32 or float64; convert"),
    "structured": (lambda: np.zeros(3, [("re", "f4"), ("im", "f4")]), r"type void64; expected"),
    "float128": (lambda: np.ones(3, np.longdouble), r"type (float128|longdouble); expected"),
    "float8": (lambda: np.ones(3, pytest.importorskip("ml_dtypes").float8_e4m3fn), r"type float8_e4m3fn; expected"),
    "byte-swapped": (lambda: np.ones(3, ">f4"), r"byte-swapped float32; expected this machine's byte order; pass"),
    "strided": (lambda: np.ones(6, np.float32)[::2], r"shape \(3,\) that is not contiguous; .*ascontiguousarray"),
    "misaligned": (lambda: torch_view(1), r"float32 at address 0x[0-9a-f]+; expected a multiple of 4 bytes; pass"),
    "torch float8": (lambda: torch().ones(3).to(torch().float8_e4m3fn), r"got elements of type float8_e4m3fn;"),
    "torch transposed": (lambda: torch().ones(2, 3).t(), r"shape \(3, 2\) that is not contiguous; .*x\.contiguous"),
    "torch grad": (lambda: torch().ones(3, requires_grad=True), r"requires grad; expected .*x\.detach\(\), or p\.grad"),
    "torch sparse": (lambda: torch().eye(3).to_sparse(), r"torch\.Tensor does not export its memory"),
    "torch freed": (torch_freed, r"got a tensor of shape \(1000,\) without memory; expected"),
    "torch implicit zero": (lambda: torch()._efficientzerotensor((5,)), r"\(5,\) without memory; .*torch\.zeros"),
    "jax tracer": (jax_tracer, r"got a JAX tracer.*inside jax\.jit .* sparsecomm\.jax\.sparse_allreduce"),
    "other object": (lambda: Exporter(lambda: "capsule"), r"which is not a fresh DLPack capsule"),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case: str) -> None:
    make, pattern = BAD[case]
    with pytest.raises(InvalidInputError, match=rf"^gradient: .*{pattern}"):
        tensor(make(), "gradient")


# --- hand-owner capsules ---------------------------------------------------------------------------------------------


class Exporter:
    """An object with ``__dlpack__``, with or without the arguments of DLPack 1.0."""

    def __init__(self, capsule: Callable[[], object]) -> None:
        self.capsule = capsule

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        assert max_version == (1, 0)
        assert copy is False
        return self.capsule()


class OldExporter(Exporter):
    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        self.stream = stream
        return self.capsule()


class HandMade:
    """A capsule over 8 float32 numbers, which counts calls of its deleter."""

    def __init__(
        self,
        *,
        version: Any = (1, 0),
        flags: int = 0,
        shape: tuple[int, ...] = (8,),
        strides: Any = None,
        **fields: int,
    ) -> None:
        self.memory = np.arange(8, dtype=np.float32)
        self.deleted = 0
        self.shape = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        self.strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        t = DLTensor(data=self.memory.ctypes.data, device_type=1, ndim=len(shape), code=2, bits=32, lanes=1)
        t.shape, t.strides = self.shape, self.strides
        for field, value in fields.items():
            setattr(t, field, value)
        self.deleter = DELETER(self.delete)
        if version is None:
            self.managed: Any = Unversioned(t, None, self.deleter)
        else:
            self.managed = Versioned(*version, None, self.deleter, flags, t)
        self.name = b"dltensor" if version is None else b"dltensor_versioned"
        self.capsule = new_capsule(ctypes.addressof(self.managed), self.name, None)
        self.exporter = (OldExporter if version is None else Exporter)(lambda: self.capsule)

    def delete(self, managed: int) -> None:
        assert managed == ctypes.addressof(self.managed)
        self.deleted += 1

    @property
    def consumed(self) -> bool:
        assert is_capsule(self.capsule, self.name) != is_capsule(self.capsule, b"used_" + self.name)
        return bool(is_capsule(self.capsule, b"used_" + self.name))


@pytest.mark.parametrize("version", [None, (1, 0), (1, 7)])
def test_capsule_is_consumed_and_released_once(version: tuple[int, int] | None) -> None:
    owner = HandMade(version=version)
    t = tensor(owner.exporter, "x", writable=True)
    assert owner.consumed
    assert not t.readonly
    view = as_numpy(t)
    np.testing.assert_array_equal(view, owner.memory)
    assert view.flags.writeable
    del t
    part = view[2:]
    del view
    assert owner.deleted == 0, "a view of a view keeps the memory alive"
    del part
    with pytest.raises(InvalidInputError, match="not a fresh DLPack capsule"):
        tensor(owner.exporter, "x")
    assert owner.deleted == 1


def test_capsules_without_a_deleter_with_an_offset_and_with_strides() -> None:
    owner = HandMade()
    owner.managed.deleter = DELETER()
    tensor(owner.exporter, "x")
    assert owner.consumed
    assert as_numpy(tensor(HandMade(byte_offset=12, shape=(5,)).exporter, "x")).tolist() == [3, 4, 5, 6, 7]
    assert tensor(HandMade(shape=(2, 1, 4), strides=(4, -9, 1)).exporter, "x").size == 8
    assert tensor(HandMade(shape=(0, 4), strides=(1, 2), data=0).exporter, "x").size == 0
    assert tensor(HandMade(shape=()).exporter, "x").shape == ()


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"lanes": 4}, r"type DLPack dtype code 2 with 32 bits in vectors of 4; expected"),
        ({"strides": (1, 2), "shape": (2, 4)}, r"not contiguous"),
        ({"strides": (-1,)}, r"not contiguous"),
        ({"byte_offset": 2, "shape": (4,)}, r"expected a multiple of 4 bytes"),
        ({"device_type": 8}, r"on Metal; expected CPU or CUDA memory; move it"),
        ({"device_type": 77}, r"on DLPack device type 77; expected"),
        ({"ndim": -1}, r"-1 dimensions without a shape"),
        ({"shapeless": True}, r"1 dimensions without a shape"),
        ({"shape": (3, -2)}, r"shape \(3, -2\) is invalid"),
        ({"shape": (2**32, 2**32)}, r"shape \(4294967296, 4294967296\) is invalid"),
        ({"data": 0, "byte_offset": 4}, r"shape \(8,\) without memory; expected"),
    ],
)
def test_refused_capsules_are_released(fields: dict[str, Any], pattern: str) -> None:
    shapeless = fields.pop("shapeless", False)
    owner = HandMade(**fields)
    if shapeless:
        owner.managed.tensor.shape = None
    with pytest.raises(InvalidInputError, match=rf"^x: .*{pattern}"):
        tensor(owner.exporter, "x")
    gc.collect()
    assert owner.deleted == 1


def test_devices_and_streams() -> None:
    positions = [(1, CPU), (2, Device("cuda", 3)), (3, CPU), (13, Device("cuda", 3))]
    for code, device in positions:
        assert tensor(HandMade(device_type=code, device_id=3).exporter, "x").device == device
    assert [str(d) for _, d in positions] == ["cpu", "cuda:3", "cpu", "cuda:3"]
    owner = HandMade(version=None)
    tensor(owner.exporter, "x", stream=2)
    assert owner.exporter.stream == 2  # type: ignore[attr-defined]


class Exchanged:
    """An array that DLPack's C functions export as GPU memory, and ``__dlpack__`` only if they do not suffice."""

    owner: Any
    asked: int | None = None  # stream that `__dlpack__` was asked for
    current = 0x50  # stream

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.owner.managed.tensor.device_type, self.owner.managed.tensor.device_id

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        self.asked = stream
        return self.owner.capsule


def test_streams_of_c_functions() -> None:
    """A tensor is ready on its library's current stream. For another stream, `__dlpack__` must make it wait."""
    word = ctypes.POINTER(ctypes.c_void_p)

    @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, word)
    def export(array: Exchanged, out: Any) -> int:
        out[0] = ctypes.addressof(array.owner.managed)
        return 0

    @ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, word)
    def current(kind: int, index: int, out: Any) -> int:
        assert (kind, index) == (2, 3)
        out[0] = Exchanged.current
        return 0

    functions = (ctypes.cast(f, ctypes.c_void_p).value for f in (export, current))
    first, last = functions
    table = (ctypes.c_void_p * 7)(1, None, None, first, None, None, last)
    Exchanged.__dlpack_c_exchange_api__ = new_capsule(ctypes.addressof(table), b"dlpack_exchange_api", None)  # type: ignore[attr-defined]
    for stream, asked, ready, exported in (
        (0x50, None, 0x50, False),
        (0x50, 0x50, 0x50, False),
        (0, None, 1, False),  # the legacy default stream
        (0, 1, 1, False),
        (0x50, 7, 7, True),
    ):
        array = Exchanged()
        array.owner, Exchanged.current = HandMade(device_type=2, device_id=3), stream
        result = tensor(array, "x", writable=True, stream=asked)
        assert (result.pointer, result.size) == (array.owner.memory.ctypes.data, 8)
        assert (result.device, result.stream, result.dtype) == (Device("cuda", 3), ready, FLOAT32)
        assert array.asked == (asked if exported else None)
        del result
        gc.collect()
        assert array.owner.deleted == 1 + exported


@pytest.mark.parametrize("flags", [1, 2], ids=["read-only", "copied"])
def test_flags_that_forbid_writing(flags: int) -> None:
    assert tensor(HandMade(flags=flags).exporter, "x").readonly is (flags == 1)
    with pytest.raises(InvalidInputError, match=r"^out: got a read-only array"):
        tensor(HandMade(flags=flags).exporter, "out", writable=True)


def test_a_future_version_is_left_to_its_exporter() -> None:
    owner = HandMade(version=(2, 0))
    with pytest.raises(InvalidInputError, match=r"DLPack version 2\.0 is not supported"):
        tensor(owner.exporter, "x")
    assert not owner.consumed
    assert owner.deleted == 0


# --- lifetime --------------------------------------------------------------------------------------------------------


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_imports_do_not_leak(library: Library) -> None:
    array = library.make(FLOAT32)
    flipped = library.make(FLOAT32).reshape(2, 3).T
    for repeat in (2_000, 50_000):
        before = peak()
        for _ in range(repeat):
            as_numpy(tensor(array, "x"))
        if library.pointer(flipped) and not hasattr(flipped, "unsafe_buffer_pointer"):  # JAX has no strides
            for _ in range(repeat // 10):
                with pytest.raises(InvalidInputError):
                    tensor(flipped, "x")
    assert peak() - before < 2**21  # 50,000 leaked capsules would be 5 MB


# --- residual and out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", [as_residual, as_out])
@pytest.mark.parametrize("x", DTYPES.values(), ids=str)
def test_types_of_residual_and_out(accept: Callable[..., Tensor], x: DType, dtype: DType) -> None:
    make = torch_library().make
    t = tensor(make(x), "x")
    if dtype in (x, FLOAT64 if x is FLOAT64 else FLOAT32):
        assert accept(make(dtype), t).dtype is dtype
    else:
        with pytest.raises(InvalidInputError, match=rf"got {dtype}; expected {x}.*, because x is {x}; allocate"):
            accept(make(dtype), t)


@pytest.mark.parametrize(("accept", "name"), [(as_residual, "residual"), (as_out, "out")])
def test_shape_device_and_writability(accept: Callable[..., Tensor], name: str) -> None:
    x = tensor(np.ones((2, 3), np.float32), "x")
    with pytest.raises(InvalidInputError, match=rf"^{name}: got shape \(6,\); expected \(2, 3\), the shape of x"):
        accept(np.ones(6, np.float32), x)
    with pytest.raises(InvalidInputError, match=rf"^{name}: got a tensor on cuda:0; expected cpu, the device of x"):
        accept(HandMade(device_type=2, shape=(2, 3)).exporter, x)
    advice = r"; .*np\.zeros_like\(x\)" if name == "residual" else r"; .*np\.empty_like\(x\)"  # no copy of x
    with pytest.raises(InvalidInputError, match=rf"^{name}: got a read-only array.*{advice}"):
        accept(np.frombuffer(bytes(24), np.float32).reshape(2, 3), x)
    with pytest.raises(InvalidInputError, match=rf"^{name}: got a JAX array.*{advice}"):
        accept(jax_library().make(FLOAT32), x)


def test_overlaps() -> None:
    memory = np.zeros(12, np.float32)
    x = tensor(memory[:6], "x")
    residual = as_residual(memory[6:], x)
    assert not overlap(x, residual)
    assert as_out(memory[:6], x, residual=residual).pointer == x.pointer
    with pytest.raises(InvalidInputError, match=r"^residual: its memory overlaps x; expected separate memory"):
        as_residual(memory[:6], x)
    with pytest.raises(InvalidInputError, match=r"^residual: its memory overlaps x"):
        as_residual(memory[5:11], x)
    with pytest.raises(InvalidInputError, match=r"^out: its memory partly overlaps x; expected x itself or"):
        as_out(memory[1:7], x)
    with pytest.raises(InvalidInputError, match=r"^out: its memory overlaps residual; expected separate memory"):
        as_out(memory[6:], x, residual=residual)
    half = tensor(memory.view(np.float16)[:6], "x")
    with pytest.raises(InvalidInputError, match=r"^out: its memory partly overlaps x"):
        as_out(memory[:6], half)
    empty = tensor(memory[3:3], "x")
    assert not overlap(empty, empty)


# --- arrays whose memory does not hold their values ------------------------------------------------------------------


def negated() -> Any:
    """Return a PyTorch tensor whose memory holds ones but whose values are -1."""
    view = torch()._neg_view(torch().ones(4))
    assert view.is_neg()
    return view


def test_a_negation_that_is_pending_is_read() -> None:
    x = negated()
    np.testing.assert_array_equal(as_numpy(tensor(x, "x")), -np.ones(4, np.float32))
    assert x.is_neg()
    z = torch().tensor([1 + 2j, 3 - 4j]).conj()
    np.testing.assert_array_equal(as_numpy(tensor(z.imag, "x")), np.array([-2, 4], np.float32))
    kind, data = content(x, "x")
    assert (kind, data.view(np.float32).tolist()) == ("float32 (4,)", [-1] * 4)
    assert content(z, "z")[1].tobytes() == np.array([1 - 2j, 3 + 4j], np.complex64).tobytes()


def test_a_negation_that_is_pending_is_not_written() -> None:
    x, like = negated(), tensor(np.ones(4, np.float32), "x")
    for write in (lambda: tensor(x, "x", writable=True), lambda: as_residual(x, like), lambda: as_out(x, like)):
        with pytest.raises(
            InvalidInputError, match=r"got a tensor whose negation is pending.*pass .*\.resolve_neg\(\)"
        ):
            write()
    assert x.tolist() == [-1] * 4


def test_the_mask_of_an_array_is_not_ignored() -> None:
    masked = np.ma.masked_array(np.ones(4, np.float32), mask=[0, 1, 0, 0])
    like = tensor(np.ones(4, np.float32), "x")
    for read in (
        lambda: tensor(masked, "x"),
        lambda: as_residual(masked, like),
        lambda: as_out(masked, like),
        lambda: content(masked, "x"),
        lambda: SparseVector(np.arange(4), masked, 9),
        lambda: SparseVector(np.ma.masked_array(np.arange(4)), np.ones(4), 9),
    ):
        with pytest.raises(InvalidInputError, match=r"got a masked array.*x\.filled\(0\)"):
            read()  # type: ignore[no-untyped-call]
