"""Measures how long GPU calls keep the host busy, without a GPU: stand-ins replace CuPy, PyTorch and the driver.

    python -m bench.gpu_host                 the table
    python -m bench.gpu_host --profile topk  where the time of one call goes

Everything of the library runs, except for the kernels. The device's memory is zero whatever is written to it, so
results have no entries. The time includes what the stand-ins take, but not what CuPy, PyTorch and the driver would
take; calls to these are counted instead. Needs the extra ``simulated``, and `cc`, which compiles stand-ins in C.
"""

from __future__ import annotations

import cProfile
import ctypes
import pstats
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from bench import report
from sparsecomm.tensors import _dlpack

SECONDS = 1.0  # for each call
STREAM = 0x5000  # PyTorch's current stream, which is not CuPy's
MB = 1 << 20
# Elements of the 292 tensors of GPT-2 medium.
LAYER = [1024, 1024, 3 * MB, 3072, MB, 1024, 1024, 1024, 4 * MB, 4096, 4 * MB, 1024]
GPT2 = [50257 * 1024, MB, *24 * LAYER, 1024, 1024]
DRIVER = """
int cuLaunchKernel(void) { return 0; }
// The third word of an object that ctypes has made is the address of its structure.
int from_object(void** object, void** out) { *out = object[2]; return 0; }
int current_stream(int type, int device, void** out) { *out = (void*)0x5000; return 0; }
"""
Call = Callable[[], object]
counts: Counter[str] = Counter()  # calls of stand-ins
zeros = np.zeros(1 << 32, np.uint8)  # the memory of all arrays of the device


def compiled() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/driver.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", path], input=DRIVER.encode(), check=True)
        return ctypes.CDLL(path)


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
        return super().__new__(cls, shape, dtype, zeros)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=_dlpack.address(self))

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0

    def get(self) -> Any:
        return np.array(self)


class Device(nullcontext[None]):
    attributes = MappingProxyType({"MultiProcessorCount": 132})


class Event:
    done = True
    synchronize = staticmethod(counted("wait"))

    def __init__(self, **_: object) -> None:
        counts["event"] += 1


class Stream:
    def __init__(self, ptr: int = 0, **_: object) -> None:
        self.ptr = ptr

    @classmethod
    def from_external(cls, stream: Any) -> Stream:
        return cls(stream.__cuda_stream__()[1])

    def __enter__(self) -> None:
        current.append(self)

    def __exit__(self, *error: object) -> None:
        current.pop()

    def record(self, event: Event | None = None) -> Event:
        counts["record"] += 1
        return event or Event()

    is_capturing = staticmethod(counted("is_capturing", False))
    wait_event = staticmethod(counted("wait_event"))
    synchronize = staticmethod(counted("wait"))


current = [Stream()]  # the last one is CuPy's current stream


def function(name: str) -> Any:
    """Return a function of CuPy, which is NumPy's."""
    original = getattr(np, name)

    def call(*arguments: Any, **options: Any) -> Any:
        counts["function of arrays"] += 1
        made = original(*arguments, **options)
        return made.view(Array) if isinstance(made, np.ndarray) else made

    return original if isinstance(original, type) else call


def replace_cupy(driver: ctypes.CDLL) -> None:
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    vars(cupy).update(cuda=cuda, ndarray=Array, __getattr__=function, __spec__=SimpleNamespace(), __version__="14")
    runtime = {"memsetAsync": counted("clear"), "memcpyAsync": counted("copy"), "setDevice": counted("setDevice")}
    vars(cuda).update(
        compiler=None,
        Device=Device,
        Event=Event,
        Stream=Stream,
        UnownedMemory=lambda *arguments: arguments,
        MemoryPointer=lambda *arguments: arguments,
        alloc_pinned_memory=lambda nbytes: (counted("pinned memory")(), bytearray(nbytes))[1],
        get_current_stream=lambda: current[-1],
        runtime=SimpleNamespace(
            CUDARuntimeError=RuntimeError, getDevice=lambda: 0, getDeviceCount=lambda: 1, **runtime
        ),
    )
    sys.modules |= {"cupy": cupy, "cupy.cuda": cuda}
    from sparsecomm.backends.cuda import cupy_runtime

    vars(cupy_runtime)["ctypes"] = SimpleNamespace(CDLL=lambda name: driver, cast=ctypes.cast, c_void_p=ctypes.c_void_p)
    cupy_runtime.CupyRuntime.kernel = lambda *_: SimpleNamespace(ptr=1)  # type: ignore[method-assign]


# -- PyTorch -----------------------------------------------------------------------------------------------------------


class Exchange(ctypes.Structure):
    """``DLPackExchangeAPI``."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("major", "minor")),
        *((name, ctypes.c_void_p) for name in ("previous", "allocate", "from_object", "to_object", "view", "stream")),
    )


class Tensor(ctypes.Structure):
    """A flat float32 `torch.Tensor` of the device: ``DLManagedTensorVersioned``."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("major", "minor")),
        *((name, ctypes.c_uint64) for name in ("context", "deleter", "flags", "pointer")),
        *((name, ctypes.c_int32) for name in ("device_type", "device", "ndim")),
        *(("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)),
        *(("lengths", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.c_uint64), ("offset", ctypes.c_uint64)),
    )
    requires_grad = False

    def __init__(self, size: int, number: int) -> None:
        """Make tensor ``number`` of those at the same time."""
        pointer = (1 << 42) + (number << 34)
        super().__init__(1, 0, 0, 0, 0, pointer, 2, 0, 1, 2, 32, 1, (ctypes.c_int64 * 1)(size))

    def __dlpack__(self, **_: object) -> Any:
        counts["__dlpack__"] += 1
        return capsule(ctypes.addressof(self), b"dltensor_versioned", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


EXCHANGE = b"dlpack_exchange_api"  # here, because a capsule does not keep its name alive
capsule = ctypes.pythonapi.PyCapsule_New
capsule.restype, capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


def replace_torch(driver: ctypes.CDLL) -> Exchange:
    """Return the structure of the stand-in's C functions; keep a reference to it."""
    from_object, stream = (ctypes.cast(f, ctypes.c_void_p) for f in (driver.from_object, driver.current_stream))
    exchange = Exchange(1, 0, from_object=from_object, stream=stream)
    Tensor.__dlpack_c_exchange_api__ = capsule(ctypes.addressof(exchange), EXCHANGE, None)  # type: ignore[attr-defined]
    torch = ModuleType("torch")
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        is_current_stream_capturing=lambda: False,
        current_stream=lambda index: SimpleNamespace(cuda_stream=STREAM),
        caching_allocator_alloc=counted("memory of PyTorch", MB),
        caching_allocator_delete=lambda address: None,
    )
    vars(torch).update(cuda=cuda, Tensor=Tensor, __spec__=SimpleNamespace())
    sys.modules["torch"] = torch
    return exchange


# -- measuring ---------------------------------------------------------------------------------------------------------


def calls(comm: Any) -> dict[str, Call]:
    import sparsecomm as sc
    from sparsecomm import backends
    from sparsecomm.tensors import interop
    from sparsecomm.tensors.kinds import INT4

    n, k = 25_600_000, 25_600
    x, residual, small = Tensor(n, 0), Tensor(n, 1), Tensor(60_000, 2)
    entries = sc.SparseVector.trusted(Array(k, np.int32), Array(k, np.float32), n, (n,))
    backend = backends.of(interop.Device("cuda", 0))
    weights, gradients = ({str(i): Tensor(size, first + i) for i, size in enumerate(GPT2)} for first in (3, 1000))
    optimizer = sc.SparseAdamW(weights, comm=comm, check_weights_every=None)

    def quantize() -> None:
        with backend.on_stream(None):
            backend.quantize(entries, INT4)

    return {
        "topk": lambda: sc.topk(x, k),
        "topk with a residual": lambda: sc.topk(x, k, residual=residual),
        "topk of 60,000 elements": lambda: sc.topk(small, 600),
        "topk by chunk": lambda: sc.topk(x, 4, residual=residual, chunk=4096),
        "merge_topk": lambda: sc.merge_topk(entries, entries, k),
        "quantize to int4": quantize,
        "sparse_allreduce": lambda: sc.sparse_allreduce(x, k, comm=comm, residual=residual),
        "SparseAdamW.step": lambda: optimizer.step(gradients),
    }


def measure(profiled: str | None, comm: Any) -> None:
    """Print the table, or the profile of one call."""
    table = calls(comm)
    if profiled not in (None, *table):
        raise SystemExit(f"--profile {profiled}: expected one of {', '.join(table)}")
    print(f"{'':24}{'median':>10}{'fastest 5 %':>13}   calls to CUDA, CuPy and PyTorch")
    for name, call in table.items():
        if profiled not in (None, name):
            continue
        for _ in range(5):
            call()
        counts.clear()
        call()
        seen = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
        with cProfile.Profile() if profiled else nullcontext() as profile:
            times, end = list[float](), time.thread_time() + SECONDS
            while (begin := time.thread_time()) < end or not times:
                call()
                times.append((time.thread_time() - begin) * 1e6)
        fastest, median = np.percentile(times, [5, 50])
        print(f"{name:24}{median:7,.0f} us{fastest:10,.0f} us   {seen}")
        if profile:
            pstats.Stats(profile).sort_stats("tottime").print_stats(40)


def main() -> None:
    parser = report.parser(__doc__, prog="python -m bench.gpu_host")
    parser.add_argument("--profile", metavar="CALL", help="profile one call")
    options = parser.parse_args()
    driver = compiled()
    replace_cupy(driver)
    kept = replace_torch(driver)
    from sparsecomm.transport import simulated

    simulated.run(1, lambda comm: measure(options.profile, comm))
    del kept


if __name__ == "__main__":
    main()
