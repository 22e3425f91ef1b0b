"""The host's time of calls on a GPU, measured without one: a stand-in for CuPy and PyTorch, whose driver does nothing.

    python -m bench.gpu_host                 the table
    python -m bench.gpu_host --profile topk  where the time goes

Everything of the library runs, except for the kernels. Memory of the device is zero whatever is written to it, so
results have no entries. The time includes what the stand-ins take, but not what CuPy, PyTorch and the driver take. The
calls to them are counted instead.
"""

from __future__ import annotations

import argparse
import cProfile
import ctypes
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from sparsecomm.tensors import _dlpack

CALLS, REPEATS = 200, 15
STREAM = 0x5000  # PyTorch's current stream, which is not CuPy's
counts: Counter[str] = Counter()  # calls to the stand-ins
_zeros = np.zeros(1 << 27, np.uint8)  # the memory of all arrays of the device


def counted(name: str, result: Any = None) -> Callable[..., Any]:
    """Return a function that only counts its calls."""

    def call(*_: object, **__: object) -> Any:
        counts[name] += 1
        return result

    return call


# -- CuPy --------------------------------------------------------------------------------------------------------------


class Array(np.ndarray):
    """A `cupy.ndarray`."""

    __module__ = "cupy"

    def __new__(cls, shape: Any, dtype: Any = float, memory: Any = None) -> Any:
        counts["array"] += 1
        return super().__new__(cls, shape, dtype, _zeros)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=_dlpack.address(self))

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def get(self) -> Any:
        return np.array(self)


class Device:
    compute_capability = "90"

    def __init__(self, index: int = 0) -> None:
        self.id, self.attributes = index, {"MultiProcessorCount": 132}

    def __enter__(self) -> Device:
        counts["enter a device"] += 1
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Event:
    done = True
    synchronize = staticmethod(counted("wait"))

    def __init__(self, **_: object) -> None:
        counts["create an event"] += 1


class Stream:
    def __init__(self, ptr: int = 0, **_: object) -> None:
        self.ptr = ptr

    @classmethod
    def from_external(cls, stream: Any) -> Stream:
        counts["wrap a stream"] += 1
        return cls(stream.__cuda_stream__()[1])

    def __enter__(self) -> None:
        current.append(self)

    def __exit__(self, *error: object) -> None:
        current.pop()

    def record(self, event: Event | None = None) -> Event:
        counts["record an event"] += 1
        return event or Event()

    is_capturing = staticmethod(counted("ask whether a stream is captured", False))
    wait_event = staticmethod(counted("follow an event"))
    synchronize = staticmethod(counted("wait"))


current: list[Stream] = []  # the last one is CuPy's current stream


class Kernel:
    """A `cupy.cuda.Function`."""

    ptr = 1


def cupy() -> ModuleType:
    """Return the stand-in for CuPy. Functions on arrays are NumPy's."""
    module, cuda, compiler = ModuleType("cupy"), ModuleType("cupy.cuda"), ModuleType("cupy.cuda.compiler")
    vars(compiler).update(_get_nvrtc_version=lambda: (13, 0), compile_using_nvrtc=lambda *_: (b"", None))
    Stream.null, Stream.ptds = Stream(), Stream(2)
    current.append(Stream.null)
    loaded = SimpleNamespace(load=lambda binary: None, get_function=lambda name: Kernel())
    names = {"memsetAsync": "clear", "memcpyAsync": "copy"}
    runtime = {name: counted(what) for name, what in names.items()} | {"CUDARuntimeError": RuntimeError}
    vars(cuda).update(
        compiler=compiler,
        Device=Device,
        Event=Event,
        Stream=Stream,
        UnownedMemory=lambda *arguments: arguments,
        MemoryPointer=lambda *arguments: arguments,
        alloc_pinned_memory=lambda nbytes: (counted("pinned memory")(), bytearray(nbytes))[1],
        function=SimpleNamespace(Module=lambda: loaded),
        get_current_stream=lambda: current[-1],
        runtime=SimpleNamespace(
            **runtime, getDeviceCount=lambda: 1, getDevice=lambda: 0, setDevice=counted("set the device")
        ),
    )

    def function(name: str) -> Any:
        made = getattr(np, name)

        def call(*arguments: Any, **named: Any) -> Any:
            counts["function of arrays"] += 1
            found = made(*arguments, **named)
            return found.view(Array) if isinstance(found, np.ndarray) else found

        return made if isinstance(made, type) else call

    vars(module).update(cuda=cuda, ndarray=Array, __version__="14", __getattr__=function)
    # A C function that returns 0 at once starts kernels.
    driver = SimpleNamespace(cuLaunchKernel=ctypes.CDLL("libm.so.6").fegetround)
    ctypes.CDLL = lambda name: driver  # type: ignore[assignment, misc]
    for each in (module, cuda, compiler):
        each.__spec__ = ModuleSpec(each.__name__, None)
        sys.modules[each.__name__] = each
    return module


# -- PyTorch -----------------------------------------------------------------------------------------------------------


class Versioned(ctypes.Structure):
    """``DLManagedTensorVersioned`` of DLPack."""

    _fields_ = [(name, ctypes.c_uint32) for name in ("major", "minor")]
    _fields_ += [(name, ctypes.c_uint64) for name in ("context", "deleter", "flags", "data")]
    _fields_ += [(name, ctypes.c_int32) for name in ("device_type", "device_id", "ndim")]
    _fields_ += [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]
    _fields_ += [(name, ctypes.c_uint64) for name in ("shape", "strides", "byte_offset")]


class Exchange(ctypes.Structure):
    """``DLPackExchangeAPI``."""

    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]
    _fields_ += [(name, ctypes.c_void_p) for name in ("previous", "allocate", "export", "make", "view", "stream")]


Word = ctypes.POINTER(ctypes.c_void_p)
capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, Word)
def export(tensor: Tensor, out: Any) -> int:
    out[0] = tensor.address
    return 0


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, Word)
def current_stream(kind: int, index: int, out: Any) -> int:
    out[0] = STREAM
    return 0


functions = [ctypes.cast(function, ctypes.c_void_p).value for function in (export, current_stream)]
exchange = Exchange(1, 0, export=functions[0], stream=functions[1])


class Tensor:
    """A flat float32 `torch.Tensor` on the device."""

    requires_grad = False
    __dlpack_c_exchange_api__ = capsule(ctypes.addressof(exchange), b"dlpack_exchange_api", None)

    def __init__(self, size: int, pointer: int) -> None:
        self.shape = (ctypes.c_int64 * 1)(size)
        self.exported = Versioned(1, 0, 0, 0, 0, pointer, 2, 0, 1, 2, 32, 1, ctypes.addressof(self.shape))
        self.address = ctypes.addressof(self.exported)

    def is_neg(self) -> bool:
        return False

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def __dlpack__(self, **_: object) -> Any:
        counts["export by Python"] += 1
        return capsule(self.address, b"dltensor_versioned", None)


def torch() -> ModuleType:
    """Return the stand-in for PyTorch."""
    module = ModuleType("torch")
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        is_current_stream_capturing=lambda: False,
        current_stream=lambda index: SimpleNamespace(cuda_stream=STREAM),
        caching_allocator_alloc=counted("memory of PyTorch", 0x100000),
        caching_allocator_delete=lambda address: None,
    )
    vars(module).update(cuda=cuda, Tensor=Tensor, __spec__=ModuleSpec("torch", None))
    sys.modules["torch"] = module
    return module


# -- measuring ---------------------------------------------------------------------------------------------------------


def calls(comm: Any) -> dict[str, Callable[[], object]]:
    import sparsecomm as sc
    from sparsecomm import backends
    from sparsecomm.tensors import interop
    from sparsecomm.tensors.kinds import INT4

    n, k = 25_600_000, 25_600
    x, residual, small = Tensor(n, 1 << 40), Tensor(n, 1 << 41), Tensor(60_000, 1 << 40)
    entries = sc.SparseVector.trusted(Array(4 * k, np.int32), Array(4 * k, np.float32), n, (n,))
    backend = backends.of(interop.Device("cuda", 0))
    return {
        "topk": lambda: sc.topk(x, k),
        "topk with a residual": lambda: sc.topk(x, k, residual=residual),
        "topk of 60,000 elements": lambda: sc.topk(small, 600),
        "topk by chunk": lambda: sc.topk(x, 4, residual=residual, chunk=4096),
        "sparse_allreduce": lambda: sc.sparse_allreduce(x, k, comm=comm, residual=residual),
        "merge_topk": lambda: sc.merge_topk(entries, entries, k),
        "quantize to int4": lambda: backend.quantize(entries, INT4),
        "pack as int4": lambda: backend.pack(entries, INT4),
    }


def median_us(call: Callable[[], object]) -> float:
    """Return the median of the mean time of a call, in microseconds of this thread."""
    means = []
    for _ in range(REPEATS):
        begin = time.thread_time()
        for _ in range(CALLS):
            call()
        means.append((time.thread_time() - begin) / CALLS * 1e6)
    return float(np.median(means))


def measure(profiled: str | None, comm: Any) -> None:
    """Print the table, or the profile of one call."""
    for name, call in calls(comm).items():
        for _ in range(20):
            call()
        if profiled == name:
            with cProfile.Profile() as profile:
                for _ in range(2000):
                    call()
            pstats.Stats(profile).sort_stats("tottime").print_stats(35)
        elif not profiled:
            counts.clear()
            call()
            seen = ", ".join(f"{count} {what}" for what, count in counts.items())
            print(f"{name:26}{median_us(call):8.1f} us   {seen}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", metavar="CALL", help="profile this call")
    options = parser.parse_args()
    cupy()
    torch()
    from sparsecomm.transport import simulated

    simulated.run(1, lambda comm: measure(options.profile, comm))


if __name__ == "__main__":
    main()
