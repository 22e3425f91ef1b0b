"""A CUDA device made of fibers, which runs the kernels and the launch code of the library on the CPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparsecomm.backends.cuda.runtime import Launch, Moved

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FLAGS = ["-std=c++17", "-O1", "-g0", "-ffp-contract=off", "-fPIC", "-shared", "-w"]
POISON, CANARY = 0xA5, 0x5C
BEHIND = 64  # bytes of canary

_KERNEL = re.compile(r"^KERNEL\s+void\s+__launch_bounds__\((\w+)[^)]*\)\s*(\w+)\s*\(([^)]*)\)", re.MULTILINE)
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
_TRAILER = """
extern "C" int emulate_{name}(unsigned grid, unsigned block, unsigned resident, unsigned long long seed,
                              void** arguments, char* error, size_t room) {{
    return emulator::launch(&{name}, grid, block, resident, seed, arguments, error, room);
}}
extern "C" void sizes_{name}(unsigned* out) {{ emulator::sizes(&{name}, out); }}
extern "C" unsigned threads_{name}() {{ return {threads}; }}
"""


class EmulatorError(RuntimeError):
    """A fault that a GPU would not report."""


@dataclass
class Kernel:
    name: str
    run: Any
    sizes: dict[str, int]  # bytes of its parameters, by name
    threads: int


class Event:
    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


class EmulatedRuntime:
    """`sparsecomm.backends.cuda.runtime.Runtime` without a GPU, with NumPy arrays. Launches run at once.

    Attributes:
        crowded: all blocks of a grid are resident; otherwise blocks wait for resident ones to end.
        flags: more options of the compiler.
    """

    crowded = False
    flags: Sequence[str] = ()

    def __init__(
        self, *, sources: Path = ROOT / "kernels", multiprocessors: int = 3, seed: int = 0, flags: Sequence[str] = ()
    ):
        self.device = 0
        self.multiprocessors = multiprocessors
        self.seed = seed
        self.launches: list[str] = []  # names, since the list was last cleared
        self._sources, self._flags = sources, [*self.flags, *flags]
        self._kernels: dict[tuple[str, str, tuple[str, ...]], Kernel] = {}
        self._guarded: list[tuple[Any, np.ndarray]] = []  # memory, and the canary behind it

    def kernel(self, file: str, name: str, definitions: tuple[str, ...]) -> Kernel:
        key = file, name, definitions
        if key not in self._kernels:
            library = ctypes.CDLL(str(self._compiled(file, definitions)))
            parameters = next(parameters for _, kernel, parameters in self._declared(file) if kernel == name).split(",")
            table = (ctypes.c_uint * 64)()
            getattr(library, f"sizes_{name}")(table)
            sizes = list(table)[: list(table).index(0)]
            names = [parameter.split()[-1].lstrip("*") for parameter in parameters]
            threads = getattr(library, f"threads_{name}")()
            self._kernels[key] = Kernel(
                name, getattr(library, f"emulate_{name}"), dict(zip(names, sizes, strict=True)), threads
            )
        return self._kernels[key]

    def launcher(self, launches: Sequence[Launch]) -> Callable[[tuple[int, ...]], None]:
        def start(addresses: tuple[int, ...]) -> None:
            for kernel, blocks, threads, arguments in launches:
                scalars = {name: _scalar(argument, addresses) for name, argument in arguments.items()}
                self.launch(kernel, blocks, threads, scalars)

        return start

    def launch(self, kernel: Kernel, blocks: int, threads: int, arguments: Mapping[str, np.generic]) -> None:
        sizes = {name: argument.nbytes for name, argument in arguments.items()}
        if list(sizes.items()) != list(kernel.sizes.items()):
            raise TypeError(f"{kernel.name}: arguments of {sizes} bytes; expected {kernel.sizes}")
        if threads != kernel.threads or blocks < 1:
            raise ValueError(f"{kernel.name}: {blocks} blocks of {threads} threads; expected of {kernel.threads}")
        copies = [np.array(argument) for argument in arguments.values()]
        pointers = (ctypes.c_void_p * len(copies))(*[a.ctypes.data for a in copies])

        def run() -> None:
            assert copies  # the pointers are to them
            error = ctypes.create_string_buffer(500)
            self.seed += 1
            resident = blocks if self.crowded else min(blocks, (4, 2, 40, 1)[self.seed % 4])
            failed = kernel.run(blocks, threads, resident, ctypes.c_ulonglong(self.seed), pointers, error, len(error))
            if failed:
                raise EmulatorError(f"{kernel.name}: {error.value.decode()}")
            self.check()

        self.launches.append(kernel.name)
        self.start(run)

    def start(self, run: Callable[[], None]) -> None:
        """Run a launch at once; `tests.emulator.deferred` does it later."""
        run()

    def check(self) -> None:
        """Raise if anything was written behind the end of an array."""
        for _, canary in self._guarded:
            if (canary != CANARY).any():
                raise EmulatorError("a kernel wrote behind the end of an array")

    def empty(self, count: int, dtype: Any) -> np.ndarray:
        dtype = np.dtype(dtype)
        nbytes = count * dtype.itemsize
        memory = np.full(nbytes + BEHIND + 256, POISON, np.uint8)
        begin = -memory.ctypes.data % 256
        memory[begin + nbytes :] = CANARY
        self._guarded.append((memory, memory[begin + nbytes :]))
        del self._guarded[:-64]
        return memory[begin : begin + nbytes].view(dtype)

    def address(self, array: np.ndarray) -> int:
        return array.ctypes.data

    def view(self, address: int, count: int, dtype: Any, owner: object) -> np.ndarray:
        nbytes = count * np.dtype(dtype).itemsize
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        memory.owner = owner  # type: ignore[attr-defined]
        return np.frombuffer(memory, dtype)

    def clear(self, array: np.ndarray) -> None:
        array.view(np.uint8)[:] = 0

    def pinned(self, nbytes: int) -> np.ndarray:
        return np.full(nbytes, POISON, np.uint8)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        ctypes.memmove(to, source, nbytes)

    def record(self) -> Event:
        return Event()

    def new_stream(self) -> object:
        return object()

    def enter(self, stream: object) -> None:
        pass

    def leave(self, entered: None, follow: bool) -> None:
        pass

    def follow(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def capturing(self) -> bool:
        return False

    def stream(self) -> int:
        return 2

    def _texts(self) -> dict[str, str]:
        return {
            path.name: path.read_text() for path in [*self._sources.glob("cuda/*.cu*"), *self._sources.glob("*.hpp")]
        }

    def _declared(self, file: str) -> list[tuple[str, str, str]]:
        """Return the threads, name and parameters of each kernel of a module."""
        texts = self._texts()
        return [match for name in _reached(file, texts) for match in _KERNEL.findall(texts[name])]

    def _compiled(self, file: str, definitions: tuple[str, ...]) -> Path:
        """Return the module as a shared library."""
        texts = self._texts()
        program = f'#include "{file}"\n'
        program += "".join(_TRAILER.format(name=name, threads=threads) for threads, name, _ in self._declared(file))
        options = ['-DSPARSECOMM_EMULATED="emulator.hpp"', *(f"-D{d}" for d in definitions)]
        folders = [self._sources / "cuda", self._sources, HERE]
        depends = [(HERE / "emulator.hpp").read_text(), *(texts[name] for name in sorted(texts))]
        return self._library(Path(file).stem, program, options, folders, depends, [self._scheduler()])

    def _scheduler(self) -> Path:
        program = (HERE / "scheduler.cpp").read_text()
        return self._library("scheduler", program, ["-O2"], [HERE], [(HERE / "emulator.hpp").read_text()])

    def _library(
        self,
        name: str,
        program: str,
        options: Sequence[str],
        folders: Sequence[Path],
        depends: Sequence[str],
        libraries: Sequence[Path] = (),
    ) -> Path:
        """Compile a program as a shared library, which is cached in ``build/emulated``.

        ``depends``: the contents of the files that it includes.
        """
        every = [program, *FLAGS, *self._flags, *options, *depends, *map(str, libraries)]
        digest = hashlib.sha256("\0".join(every).encode()).hexdigest()[:20]
        library = ROOT / "build" / "emulated" / f"{name}-{digest}.so"
        if not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            temporary = library.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
            includes = (f"-I{folder}" for folder in folders)
            words = [*FLAGS, *self._flags, *options, *includes, "-x", "c++", "-", "-x", "none", *libraries]
            done = subprocess.run(
                [os.environ.get("CXX", "g++"), *words, "-o", str(temporary)],
                input=program,
                text=True,
                capture_output=True,
            )
            if done.returncode:
                raise EmulatorError(f"{name} {options} does not compile:\n{done.stderr[:3000]}")
            temporary.replace(library)
        return library


def _scalar(argument: Any, addresses: tuple[int, ...]) -> np.generic:
    """Return an argument of a `Launch` in the type in which it is passed."""
    if isinstance(argument, Moved):
        argument = addresses[argument.block] + argument.offset
    if isinstance(argument, bool):
        return np.bool_(argument)
    return np.uint64(argument) if isinstance(argument, int) else argument


def _reached(file: str, texts: dict[str, str]) -> list[str]:
    """Return the file and the files that it includes."""
    reached, new = [], [file]
    while new:
        name = new.pop()
        if name in texts and name not in reached:
            reached.append(name)
            new += _INCLUDE.findall(texts[name])
    return reached
