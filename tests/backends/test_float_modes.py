"""A thread's floating-point mode and NumPy's error mode change no bit of a result, and raise nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.backends import CpuBackend, _cpu, default_float_mode
from sparsecomm.backends.adamw import AdamWPart, Moments, unit_exponents
from sparsecomm.backends.base import Addend
from sparsecomm.backends.keys import split_by_key
from sparsecomm.tensors import interop, kinds
from sparsecomm.transport import simulated
from sparsecomm.wire import EXACT, WIRES
from tests import data
from tests.float_modes import MODES, in_mode

every_mode = pytest.mark.parametrize("mode", MODES)
every_dtype = pytest.mark.parametrize("dtype", data.DTYPES)
TINY = {"float16": 2.0**-22, "bfloat16": 2.0**-128, "float32": 2.0**-140, "float64": 2.0**-1060}
TAU = {dtype: 3 * tiny for dtype, tiny in TINY.items()}


def small(n: int, dtype: str, seed: int) -> np.ndarray:
    """Return a new array of small denormals and a few larger numbers, which is the same in every mode."""
    array: np.ndarray = _small(n, dtype, seed).copy()
    return array


@cache
def _small(n: int, dtype: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    v = rng.standard_normal(n) * rng.choice([1.0, 4.0, 2.0**8], n) * TINY[dtype]
    v[rng.random(n) < 0.05] *= 2.0**12
    with np.errstate(all="ignore"):
        array: np.ndarray = v.astype(data.DTYPES[dtype])
        return array


def everything(dtype: str, n: int) -> list[Any]:
    """Return the outputs of every kernel for such numbers."""
    backend = CpuBackend(4)
    x, y = small(n, dtype, 1), small(n, dtype, 2)
    t, outputs = interop.tensor(x, "x"), list[Any]()

    def residual() -> np.ndarray:
        return small(n, dtype, 3)

    for r in (None, residual(), residual()):
        outputs += [sc.topk(x, n // 3, residual=r), r, sc.threshold(x, TAU[dtype], residual=r), r]
        outputs += [sc.topk(x, 3, chunk=16, residual=r), r]
    r = residual()
    target = interop.tensor(r, "r", writable=True)
    outputs += [backend.topk_by_chunk(t, 3, 16, target, 0.3), r]
    a, b = sc.topk(x, n // 2), sc.topk(y, n // 2)
    outputs += [backend.merge(a, b), *backend.merge_topk(a, b, n // 3), backend.well_formed(a), backend.finite(t)]
    backend.scatter_add(target, a)
    backend.scatter_add_where(target, a, b, True)
    backend.add_into(t, target)
    backend.scale(target, 0.3)
    widened = backend.accumulate(t, None)
    sums = backend.accumulate(target, None)
    outputs += [backend.mixed(t, widened, 0.3), sums]
    mixed = x.copy()
    backend.mix_into(interop.tensor(mixed, "mixed", writable=True), widened, 0.3)
    outputs.append(mixed)
    magnitudes = np.copysign(widened, 1)
    exponents = unit_exponents(np, magnitudes, magnitudes.dtype.type(1e-8))
    ways: list[dict[str, Any]] = [
        {"minuend": widened[::-1].copy()},
        {"scale": 1 / 3, "exponents": exponents},
        {"scale": 1 / 3},
    ]
    for how in ways:
        default_float_mode(backend.add_first)([Addend(0, t, **how)], sums, None, 0.3, 0.0, True)
    outputs.append(default_float_mode(backend.sums_of_squares)([t]))
    arrays = widened.copy(), magnitudes.copy(), np.arange(n, dtype=np.int32), sums.copy()
    moments, updated = Moments(*arrays), interop.tensor(x.copy(), "updated", writable=True)
    table = (np.arange(60) / 64).astype(widened.dtype).reshape(10, 6)
    parts = [AdamWPart(0, updated, moments, table, 1e-8, 1e-8, n)]
    step = backend.adamw(parts, exponents, a, 4, True)
    backend.store_adamw(parts, exponents, step, True)
    outputs += [step.changes, step.jumps, *moments, exponents, backend.memory_of(updated).copy()]
    total = backend.accumulate(t, target)
    backend.add(total, backend.accumulate(target, None))
    out = np.empty_like(x)
    backend.cast_into(total, interop.tensor(out, "out", writable=True))
    outputs += [r, total, out, a.to_dense(np.empty_like(x)), backend.nonzeros(total, (n,))]
    for kind in kinds.KINDS if dtype != "float64" else kinds.KINDS[:1]:
        narrow = a
        if kind is not kinds.EXACT:
            large = split_by_key(a, 1 << 20 if dtype == "float32" else 0, None)[1]  # no value rounds to zero
            rounded, errors, zeros = backend.quantize_values(large.values, kind)
            narrow = sc.SparseVector.trusted(large.indices, rounded, n, (n,))
            outputs += [errors, zeros]
        outputs += [narrow, backend.pack(narrow, kind)]
        indices, values = backend.unpack(outputs[-1], b"", narrow.nnz, n, kind, dtype == "float64")
        outputs += [indices, values]
    return outputs


def bits(outputs: list[Any]) -> list[bytes]:
    arrays = [(v.indices, v.values) if isinstance(v, sc.SparseVector) else (v,) for v in outputs]
    return [np.asarray(array).tobytes() for pair in arrays for array in pair]


@every_mode
@every_dtype
@pytest.mark.parametrize("simd", ["avx512", "avx2", "portable"])
def test_every_kernel(mode: str, dtype: str, simd: str) -> None:
    best = _cpu.simd()
    if not _cpu.use_simd(simd):
        pytest.skip(f"this processor has no {simd}")
    try:
        for n in (200, 70_001):  # the second on several threads
            expected = bits(everything(dtype, n))
            with in_mode(mode):
                outputs = everything(dtype, n)
            assert bits(outputs) == expected
    finally:
        _cpu.use_simd(best)


def same_in_every_mode(mode: str, program: Callable[[simulated.SimulatedTransport, Any], list[Any]]) -> None:
    """Run a program on three ranks; ``program(transport, mode)`` makes calls with ``mode()`` as context manager."""

    def run(odd: tuple[int, ...]) -> list[Any]:
        def on_rank(transport: simulated.SimulatedTransport) -> list[bytes]:
            return bits(program(transport, partial(in_mode, mode) if transport.rank in odd else nullcontext))

        return [result.value for result in simulated.run(3, on_rank)]

    assert run((0, 2)) == run(())


@pytest.mark.covering(2)
@every_mode
@every_dtype
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("op", ["sum", "mean", "mean_of_contributors"])
@pytest.mark.parametrize("algorithm", [*sc.algorithms()])
def test_a_call(mode: str, dtype: str, wire: str, op: str, algorithm: str) -> None:
    uncounted = op == "mean_of_contributors" and sc.algorithms()[algorithm].cannot_count_contributors
    if uncounted or (dtype == "float64" and WIRES[wire].kind is not EXACT):
        pytest.skip("the library refuses it")
    options: dict[str, Any] = {"algorithm": algorithm, "op": op, "wire": wire}
    options["decay"] = 1.0 if algorithm == "dense" else 0.4

    def program(transport: simulated.SimulatedTransport, in_mode: Any) -> list[Any]:
        x, residual = small(300, dtype, transport.rank), np.zeros(300, data.DTYPES[dtype])
        out, outputs = np.empty_like(x), list[Any]()
        with in_mode():
            for _ in range(3):
                result = sc.sparse_allreduce(x, 40, comm=transport, residual=residual, out=out, **options)
                outputs += [result, out.copy(), residual.copy()]
        return outputs

    same_in_every_mode(mode, program)


def huge(n: int, dtype: str, seed: int) -> np.ndarray:
    """Return some zeros, numbers whose sums and squares overflow, and numbers whose quotients are denormals."""
    rng = np.random.default_rng(seed)
    array: np.ndarray = (rng.standard_normal(n) * rng.choice([0.0, 1e38, 1e30, 1e-38], n)).clip(-3e38, 3e38)
    return array.astype(dtype)


@pytest.mark.parametrize("numbers", [small, huge])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["queue", "dense", "momentum", "clip", "skip", "adamw", "local", "outer"])
def test_training_steps(way: str, mode: str, numbers: Callable[[int, str, int], np.ndarray]) -> None:
    options: dict[str, Any] = {
        "momentum": {"momentum": 0.9, "decay": 0.7},
        "clip": {"clip": 1e-3, "op": "mean_of_contributors"},
        "skip": {"skip_nonfinite": True, "momentum": 0.5},
    }.get(way, {})

    def program(transport: simulated.SimulatedTransport, in_mode: Any) -> list[Any]:
        weights, residual, outputs = np.ones(100, np.float32), np.zeros(100, np.float32), list[Any]()
        with in_mode():
            if way == "adamw":
                adamw = sc.SparseAdamW({"w": weights}, density=0.3, comm=transport, dense_steps=0, betas=(0.9, 0.99))
            elif way in ("local", "outer"):
                rule: dict[str, Any] = (
                    {"outer": sc.NesterovSGD(0.4), "wire": "packed"} if way == "outer" else {"chunk": 16}
                )
                rule |= {"fragment_update_alpha": 0.3, "dense_below": 0}
                local = sc.LocalSteps({"w": weights}, 0.3, sync_every=2, comm=transport, **rule)
            elif options:
                reducer = sc.Reducer({"w": weights}, 0.3, comm=transport, dense_below=0, **options)
        for step in range(6):
            x = numbers(100, "float32", 10 * step + transport.rank)
            if way in ("local", "outer"):
                with np.errstate(over="ignore"):
                    weights += x
            with in_mode():
                if way == "adamw":
                    adamw.step({"w": x})
                elif way in ("local", "outer"):
                    local.step({"w": weights})
                elif options:
                    reducer.reduce({"w": x})
                    residual = reducer.residual("w").copy()
                elif way == "queue":
                    sc.isparse_allreduce(x, 30, comm=transport, residual=residual, op="mean", out=x).wait()
                else:
                    sc.sparse_allreduce(x, 1.0, comm=transport, residual=residual, algorithm="dense", op="mean", out=x)
            outputs += [weights.copy(), residual.copy(), x]
        return outputs

    same_in_every_mode(mode, program)


def test_user_code_runs_under_its_own_errstate() -> None:
    """It may be a schedule, an observer of steps or an outer optimizer."""
    seen = []

    def density(step: int) -> float:
        seen.append(("density", *np.geterr().values()))
        return 0.5

    class Outer(sc.NesterovSGD):
        def step(self, name: str, parameter: np.ndarray, gradient: np.ndarray) -> None:
            seen.append(("step", *np.geterr().values()))
            super().step(name, parameter, gradient)

    def program(transport: simulated.SimulatedTransport) -> None:
        weights = {"w": np.ones(10, np.float32)}
        with np.errstate(all="raise", under="print"):
            on_step = lambda *_: seen.append(("on_step", *np.geterr().values()))  # noqa: E731
            sc.Reducer(weights, density, comm=transport, on_step=on_step).reduce(weights)
            local = sc.LocalSteps(weights, density, sync_every=1, comm=transport, outer=Outer(), on_step=on_step)
            weights["w"] += 1
            local.step(weights)
            adamw = sc.SparseAdamW(weights, density=density, comm=transport, on_step=on_step)
            adamw.step({"w": weights["w"] + transport.rank})

    simulated.run(2, program)
    assert {name for name, *_ in seen} == {"density", "on_step", "step"}
    assert {tuple(modes) for _, *modes in seen} == {("raise", "raise", "print", "raise")}
