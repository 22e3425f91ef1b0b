"""Compilation, launches, streams and memory through CuPy, which is a fake here; `tests/gpu` uses the real one."""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparsecomm.backends.cuda.modules import OPTIONS
from sparsecomm.backends.cuda.runtime import Launch, Moved

NAME = "sparsecomm.backends.cuda.cupy_runtime"
MADE = b"a module"


words, pointers = [ctypes.c_uint] * 7, [ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p]
launched: list[Any] = []  # per launch: function, sizes, stream, values of the parameters, extra


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, *words, *pointers)
def launch(function: int, *arguments: Any) -> int:
    *sizes, stream, parameters, extra = arguments
    types = KERNELS[function]
    values = [ctypes.cast(parameters[i], ctypes.POINTER(kind))[0] for i, kind in enumerate(types)]
    launched.append((function, sizes, stream, values, extra))
    return 700 if function == FAILS else 0


FAILS = 9
KERNELS: dict[int, list[Any]] = {
    5: [ctypes.c_uint64, ctypes.c_bool, ctypes.c_float, ctypes.c_uint64, ctypes.c_int32, ctypes.c_double],
    6: [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int8, ctypes.c_uint32],
    FAILS: [],
}


class Module:
    def load(self, binary: bytes) -> None:
        assert binary == MADE

    def get_function(self, name: str) -> str:
        return name


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Replace CuPy, and return a list that gets the options of each compilation."""
    seen: list[tuple[str, ...]] = []

    def compile_using_nvrtc(source: str, options: tuple[str, ...]) -> tuple[bytes, None]:
        assert "KERNEL" in source
        seen.append(options)
        return MADE, None

    cupy, cuda, compiler = (ModuleType(name) for name in ("cupy", "cupy.cuda", "cupy.cuda.compiler"))
    vars(compiler).update(compile_using_nvrtc=compile_using_nvrtc, _get_nvrtc_version=lambda: (13, 0))
    vars(cuda).update(compiler=compiler, Device=device, function=SimpleNamespace(Module=Module))
    vars(cupy).update(cuda=cuda, __version__="14")
    try:
        importlib.import_module(NAME)
    except ImportError:  # no CuPy
        for module in (cupy, cuda, compiler):
            monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(importlib.import_module(NAME), "cupy", cupy)
    monkeypatch.setattr(importlib.import_module(NAME), "compiler", compiler)
    monkeypatch.setattr(
        importlib.import_module(NAME).ctypes, "CDLL", lambda name: SimpleNamespace(cuLaunchKernel=launch)
    )
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path))
    return seen


entered_devices = [0]  # the last one is the current device


def device(index: int = 0) -> Any:
    """Return a device that can be made current."""
    methods = {"__enter__": lambda self: entered_devices.append(index), "__exit__": lambda *_: entered_devices.pop()}
    fake = type("Device", (SimpleNamespace,), methods)
    return fake(attributes={"MultiProcessorCount": 3}, compute_capability="90")


def kernel(definitions: tuple[str, ...] = ("A=1",)) -> Callable[..., Any]:
    """Return a kernel as a new process gets it."""
    return importlib.import_module(NAME).CupyRuntime(0).kernel("dense.cu", "add", definitions)


def test_arguments_of_launches(compiled: list[tuple[str, ...]]) -> None:
    """Arguments are converted once; later launches change only addresses. The first error ends the launches."""
    module, devices = importlib.import_module(NAME), list[int]()
    driver = SimpleNamespace(CUDADriverError=type("CUDADriverError", (RuntimeError,), {}))
    runtime = SimpleNamespace(setDevice=devices.append)
    stream = SimpleNamespace(ptr=7)
    vars(module.cupy.cuda).update(driver=driver, runtime=runtime, get_current_stream=lambda: stream)

    def launch(handle: int, **arguments: Any) -> Launch:
        return Launch(SimpleNamespace(ptr=handle), 3 * handle, 32 * handle, arguments)

    values = {"n": 2**64 - 1, "aligned": True, "scale": np.float32(-0.75), "x": Moved(1, 16), "step": np.int32(-2)}
    first = launch(5, **values, margin=np.float64(0.1))
    second = launch(6, x=Moved(0, 0), again=Moved(1, 0), write=np.int8(-1), bits=np.uint32(2**32 - 1))
    start = module.CupyRuntime(1).launcher([first, second])
    for addresses in ((0x1000, 0x2000), (0x3000, 2**63)):
        launched.clear()
        start(addresses)
        for number, parameters in (
            (5, [2**64 - 1, True, -0.75, addresses[1] + 16, -2, 0.1]),
            (6, [*addresses, -1, 2**32 - 1]),
        ):
            sizes = [3 * number, 1, 1, 32 * number, 1, 1, 0]
            assert launched.pop(0) == (number, sizes, 7, parameters, None)
        assert not launched
    with pytest.raises(driver.CUDADriverError, match="700"):
        module.CupyRuntime(1).launcher([second, launch(FAILS), second])((0, 0))
    assert [handle for handle, *_ in launched] == [6, FAILS]
    assert devices == [1, 1, 1]
    for wrong in (-1, 2**64, 0.5, "x"):
        with pytest.raises((OverflowError, TypeError)):
            module.CupyRuntime(1).launcher([launch(5, n=wrong)])


def test_a_module_is_compiled_once_on_a_machine(
    compiled: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "new"))
    for definitions in (("A=1",), ("A=1",), ("A=2",), ("A=1",)):
        assert kernel(definitions) == "add"
    assert len(compiled) == 2
    assert {path.read_bytes() for path in (tmp_path / "new").iterdir()} == {MADE}
    assert compiled[0][: len(OPTIONS)] == OPTIONS
    assert "--ftz=false" in OPTIONS  # subnormal floats do not become zero
    (tmp_path / "file").touch()
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file"))  # no folder
    assert kernel() == kernel() == "add"
    assert len(compiled) == 4
