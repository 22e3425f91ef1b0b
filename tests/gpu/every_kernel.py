"""Every kernel on small vectors of some types, with results checked: a program for compute-sanitizer.

compute-sanitizer --tool memcheck python -m tests.gpu.every_kernel

CuPy's memory pool is off, so that no other array lies next to the one that a kernel works on.
"""

from __future__ import annotations

import sys

import cupy
import numpy as np

import sparsecomm as sc
from sparsecomm.backends import CpuBackend, cuda
from sparsecomm.backends.adamw import AdamWPart, Moments, unit_exponents
from sparsecomm.backends.base import Addend, Segment
from sparsecomm.patches import cuda as patch_codec
from sparsecomm.tensors import interop
from sparsecomm.tensors.kinds import BFLOAT16, INT4, INT8, ValueKind
from tests import data
from tests.patches import elements as weights

PAIRS = [("float32", None), ("float32", "float32"), ("float16", "float32"), ("float64", "float64"), ("float16", None)]


def same(what: str, actual: sc.SparseVector, expected: sc.SparseVector) -> None:
    same_arrays(f"{what}: indices", actual.indices, np.asarray(expected.indices))
    same_arrays(f"{what}: values", actual.values, np.asarray(expected.values))


def same_arrays(what: str, actual: cupy.ndarray, expected: np.ndarray) -> None:
    if actual.get().tobytes() != expected.tobytes():
        raise SystemExit(f"{what} are wrong")


def select(n: int, dtype: str, residual_dtype: str | None) -> None:
    """Run topk.cu or radix.cu, threshold.cu, chunks.cu and warp_chunks.cu."""
    x = data.gradient("normal", n, dtype, 1)
    x[::7] = 0
    for what, (k, options) in {
        "top-k": (n // 50, {}),
        "many": (n // 3, {}),
        "short chunks": (3, {"chunk": 200}),
        "chunks": (9, {"chunk": 1000}),
        "chunks of a tile": (200, {"chunk": 4096}),
        "long chunks": (40, {"chunk": 9000}),
    }.items():
        device_residual = host_residual = None
        if residual_dtype:
            host_residual = data.gradient("normal", n, residual_dtype, 2)
            device_residual = cupy.asarray(host_residual)
        entries = sc.topk(cupy.asarray(x), k, residual=device_residual, **options)
        same(f"{what} of {dtype}", entries, sc.topk(x, k, residual=host_residual, **options))
        if device_residual is not None:
            same_arrays(f"{what} of {dtype}: the residual's elements", device_residual, host_residual)
    same(f"threshold of {dtype}", sc.threshold(cupy.asarray(x), 0.5), sc.threshold(x, 0.5))


def merge(n: int, dtype: str) -> None:
    """Run merge.cu and dense.cu."""
    x, y = (data.gradient("normal", n, dtype, seed) for seed in (1, 2))
    on_device, on_host = ([sc.topk(put(v), n // 20) for v in (x, y)] for put in (cupy.asarray, np.array))
    same(f"merging {dtype}", sc.merge_topk(*on_device, n // 20), sc.merge_topk(*on_host, n // 20))
    device, host, dense = cuda.of(0), CpuBackend(1), []
    for backend, entries, put in ((device, on_device, cupy.asarray), (host, on_host, np.array)):
        out = put(x)
        t = interop.tensor(out, "out", writable=True)
        backend.densify(t, entries[0])
        backend.scatter_add(t, entries[1])
        for present in (False, True):
            backend.scatter_add_where(t, *entries, present)
        quotients = backend.divide(entries[0], 3)
        assert backend.well_formed(quotients)
        total = backend.accumulate(t, None)
        backend.add(total, backend.accumulate(interop.tensor(put(y), "y"), None))
        backend.cast_into(total, t)
        dense.append((out, quotients.values))
    for device_array, host_array in zip(*dense, strict=True):
        same_arrays(f"dense {dtype}", device_array, host_array)


def bucket(n: int, dtype: str) -> None:
    """Run bucket.cu for some of the weights of two tensors, and for all."""
    real = np.float64 if dtype == "float64" else np.float32
    xs = [data.gradient("normal", n, dtype, 3), data.gradient("normal", n + 5, real.__name__, 4)]
    gs = [data.gradient("normal", len(x), dtype, 5) for x in xs]
    table, total = np.random.default_rng(5).random((4, 6)).astype(real), 2 * n + 5
    for k in (n // 10, total):
        results = []
        for backend, put in ((cuda.of(0), cupy.asarray), (CpuBackend(1), np.array)):
            weights, residual, ones = [put(x) for x in xs], put(np.zeros(total, real)), np.ones(total, real)
            exponents = put(unit_exponents(np, ones, real(1e-8)))
            tensors = [interop.tensor(array, "x", writable=True) for array in weights]
            begins = 0, n
            bounds = [slice(begin, begin + t.size) for begin, t in zip(begins, tensors, strict=True)]
            addends = [
                Addend(part.start, interop.tensor(put(g), "x"), 0.5, exponents[part])
                for part, g in zip(bounds, gs, strict=True)
            ]
            while addends:
                count, flags = backend.add_first(addends, residual, None, 1.0, 0.0, True)
                assert not backend.wait_for((), flags)
                del addends[:count]
            squares = backend.sums_of_squares(tensors)
            sums = backend.topk(backend.as_tensor(residual, (total,)), k, None)
            state = [put(array) for array in (ones * 0, ones, np.zeros(total, np.int32), ones / 64)]
            parts = [
                AdamWPart(part.start, t, Moments(*(array[part] for array in state)), table, 1e-8, 1e-8, 3)
                for part, t in zip(bounds, tensors, strict=True)
            ]
            step = backend.adamw(parts, exponents, sums, 4, True)
            assert not step.overflows
            backend.store_adamw(parts, exponents, step, True)
            dense = put(ones)
            backend.store_adamw(parts, None, backend.adamw_dense(parts, exponents, dense, 0), True)
            backend.change_units(backend.as_tensor(residual, (total,)), exponents, sums)
            segments = [Segment(begin, t) for begin, t in zip(begins, tensors, strict=True)]
            backend.add_entries(segments, sums)
            backend.write(segments[:1], sums)
            arrays = *weights, residual, exponents, *state, step.changes, step.jumps, dense
            results.append((*arrays, np.array(squares)))
        for device_array, host_array in zip(*results, strict=True):
            same_arrays(f"bucket of {dtype}", device_array, host_array)


def pack(n: int, kind: ValueKind) -> None:
    """Run packed.cu."""
    on_host = sc.topk(data.gradient("normal", n, "float32"), n // 20)
    on_device = sc.SparseVector.trusted(cupy.asarray(on_host.indices), cupy.asarray(on_host.values), n, (n,))
    device, host = cuda.of(0), CpuBackend(1)
    (narrow, lost), (expected, expected_lost) = device.quantize(on_device, kind), host.quantize(on_host, kind)
    same(f"{kind.name}: rounded", narrow, expected)
    same(f"{kind.name}: lost", lost, expected_lost)
    message, bytes_ = device.pack(narrow, kind), host.pack(expected, kind)
    same_arrays(f"{kind.name}: bytes", message, bytes_)
    entries = device.unpack(message, bytes_[:16].tobytes(), expected.nnz, n, kind, False)
    for a, b in zip(entries, (expected.indices, expected.values), strict=True):
        same_arrays(f"{kind.name}: entries", a, b)


def patch(n: int, name: str) -> None:
    """Run patches.cu."""
    old = weights.elements(name, n, 1)
    new = weights.changed(name, old, 0.05, 2)
    tensors = []
    for array in (old, new):
        there = cupy.asarray(array)
        tensors.append(weights.tensor_of(there.data.ptr, array.nbytes, name, interop.Device("cuda", 0), there, 1))
    weights.check(patch_codec, name, old, new, *tensors)
    same_arrays(f"patched {name}", tensors[0].owner, new)


def main() -> int:
    cupy.cuda.set_allocator(None)
    sizes = [int(word) for word in sys.argv[1:]] or [5000, 80_000]
    for n in sizes:
        for pair in PAIRS:
            select(n, *pair)
        for dtype in ("float32", "float64", "float16"):
            merge(n, dtype)
            bucket(n, dtype)
        for kind in (BFLOAT16, INT8, INT4):
            pack(n, kind)
        for name in ("float8_e4m3", "bfloat16", "float32", "float64"):
            patch(n, name)
    print("all results are those of the CPU")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
