"""The files that a call, or a step of training, runs through, in the order in which they are first entered.

    mpirun -n 2 python -m tests.docs.files_run call
    mpirun -n 2 python -m tests.docs.files_run step      DDP's hook, over gloo: mpirun only starts the ranks
    mpirun -n 2 python -m tests.docs.files_run adamw     PyTorch's SparseAdamW, over MPI
    mpirun -n 2 python -m tests.docs.files_run round     of DiLoCo, over gloo

It prints them for the first call on a communicator, which plans, and for the second, which finds its plan. A file
counts if at least one of its functions is called, on any thread of rank 0; what an import runs does not count. Of
compiled modules, the functions and methods that Python code calls are seen; what they call in C is not.
"""

from __future__ import annotations

import _thread
import argparse
import ctypes
import functools
import gc
import inspect
import os
import sys
import threading
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = "sparsecomm"
N, K = 65_536, 256
SHAPES = ((256, 256), (256,))  # of the parameters of the model
COMPILED = ("cython_function_or_method", "builtin_function_or_method", "method_descriptor")  # types of functions
entered: dict[str, None] = {}  # files, in order


def watch_compiled(module: ModuleType) -> None:
    """Note the calls of a compiled module's functions, and of its classes' methods."""
    file = str(Path(module.__file__ or "").relative_to(ROOT)).partition(".")[0]

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            entered.setdefault(f"{file} (compiled)")
            return function(*arguments, **options)

        return call

    for holder in [module, *(member for member in vars(module).values() if inspect.isclass(member))]:
        if getattr(holder, "__module__", holder.__name__) != module.__name__:
            continue
        attributes = vars(holder) if holder is module else gc.get_referents(holder.__dict__)[0]
        for name, function in list(attributes.items()):
            if type(function).__name__ in COMPILED:
                attributes[name] = noting(function)
        if holder is not module:
            ctypes.pythonapi.PyType_Modified(ctypes.py_object(holder))


def watch() -> None:
    """Record the entered files, on all threads that start from now on. Call it before importing the package."""
    assert PACKAGE not in sys.modules
    execute = ExtensionFileLoader.exec_module

    def executed(loader: ExtensionFileLoader, module: ModuleType) -> None:
        execute(loader, module)
        if module.__name__.startswith(f"{PACKAGE}."):
            watch_compiled(module)

    ExtensionFileLoader.exec_module = executed  # type: ignore[method-assign]
    seen: dict[CodeType, str] = {}
    package = str(ROOT / PACKAGE) + os.sep

    def profile(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED:  # no module, and no body of a class
            file = seen.get(code)
            if file is None:
                name = code.co_filename
                file = seen[code] = os.path.relpath(name, ROOT) if name.startswith(package) else ""
            if file:
                entered.setdefault(file)

    start = _thread.start_new_thread

    def started(function: Callable[..., Any], *arguments: Any) -> int:
        def run(*args: Any, **options: Any) -> None:
            sys.setprofile(profile)
            function(*args, **options)

        return start(run, *arguments)

    _thread.start_new_thread = started  # the library's own, besides those of `threading`
    threading.setprofile(profile)
    sys.setprofile(profile)


def call() -> Callable[[], None]:
    """Return a function that makes a call over MPI."""
    import numpy as np

    import sparsecomm as sc

    x, residual = np.random.default_rng(0).standard_normal(N).astype(np.float32), np.zeros(N, np.float32)
    return lambda: sc.sparse_allreduce(x, K, residual=residual) and None


def step() -> Callable[[], None]:
    """Return a function that makes a step with DDP's hook, over gloo."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from sparsecomm.torch import register

    start_gloo()
    model = DistributedDataParallel(torch.nn.Linear(*SHAPES[0]))
    register(model, 0.01)
    x = torch.ones(4, SHAPES[0][0])
    return lambda: model(x).sum().backward()


def diloco_round() -> Callable[[], None]:
    """Return a function that makes a round of DiLoCo, over gloo."""
    import torch

    from sparsecomm.torch import DiLoCo

    start_gloo()
    model = torch.nn.Linear(*SHAPES[0])
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    DiLoCo(model, inner, sync_every=2)
    x = torch.ones(4, SHAPES[0][0])

    def act() -> None:
        for _ in range(2):
            inner.zero_grad()
            model(x).sum().backward()
            inner.step()

    return act


def start_gloo() -> None:
    """Start a process group of the ranks that mpirun has started."""
    import torch
    from mpi4py import MPI

    from bench.compare import baselines

    baselines.start_gloo(MPI.COMM_WORLD)
    torch.set_num_threads(1)


def adamw() -> Callable[[], None]:
    """Return a function that makes a step of PyTorch's `SparseAdamW`, over MPI."""
    import torch

    from sparsecomm.torch import SparseAdamW

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(*SHAPES[0])
    optimizer = SparseAdamW(model.named_parameters())
    x = torch.ones(4, SHAPES[0][0])

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step


WHAT = {"call": call, "step": step, "adamw": adamw, "round": diloco_round}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WHAT)
    what = parser.parse_args().what
    watch()
    act = WHAT[what]()
    for number in ("first", "second"):
        entered.clear()
        act()
        files = list(entered)
        if int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK", "0")) == 0:
            print(f"{number} {what}: {len(files)} files", *files, sep="\n  ", flush=True)
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]
    if what in ("step", "round"):
        import torch.distributed as dist

        dist.destroy_process_group()


if __name__ == "__main__":
    main()
