"""CUDA gradients over MPI on an emulated device: through host memory, and with device addresses."""

from __future__ import annotations

import gc
import threading
import weakref
import zlib

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.backends.cuda import memory
from sparsecomm.calls.queue import queue_of
from sparsecomm.transport import abi, simulated, transport_of
from sparsecomm.transport.base import MessageMemory, TrafficCounters
from tests import data
from tests.emulator.deferred import DeferredRuntime
from tests.emulator.devices import use
from tests.mpi.ranks import MPI, RANK, WORLD, barrier
from tests.thinning import exhaustive

FIRST = 65_536  # bytes of a message's first piece; if it is full, another follows


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> DeferredRuntime:
    """Rank 0 compiles the kernels for all ranks. Each rank's device runs work in a different order."""
    runtime = DeferredRuntime(seed=zlib.crc32(f"{request.node.nodeid} {RANK}".encode()))
    use(runtime, monkeypatch, radix_max_size=50, spare_candidates=100, filter_rounds=1)
    if RANK == 0:
        for algorithm in ("tree", "dense"):
            simulated.run(2, lambda transport, a=algorithm: step(transport, a, runtime))
    barrier()
    return runtime


def step(comm, algorithm, device):
    put, wait = (device.put, device.synchronize) if device else (lambda array: array, lambda: None)
    x = data.gradient("normal", 900, "float32", seed=RANK)
    residual, out = np.zeros_like(x), np.empty_like(x)
    result = sc.sparse_allreduce(
        put(x), 45, comm=comm, algorithm=algorithm, residual=put(residual), out=put(out), op="mean"
    )
    entries = np.array(result.indices), np.array(result.values)
    wait()
    return *entries, residual, out


@pytest.mark.parametrize(
    ("aware", "every", "chunk"), [exhaustive("0", 1, 64), ("0", 2, 1 << 22), ("1", 1, 64), exhaustive("1", 2, 64)]
)
def test_collectives(
    aware: str, every: int, chunk: int, device: DeferredRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long messages overlap copies with sends and receives."""
    monkeypatch.setenv("SPARSECOMM_CUDA_AWARE", aware)
    monkeypatch.setenv("SPARSECOMM_MAX_MESSAGE_BYTES", "200")
    monkeypatch.setattr(memory, "CHUNK", chunk)
    comm = WORLD.Dup()
    assert transport_of(comm).device_memory == (aware == "1")
    for algorithm in sc.algorithms():
        ours = step(comm, algorithm, device if RANK % every == 0 else None)
        on_cpu = step(comm, algorithm, None)
        assert all(data.same_bits(a, b) for a, b in zip(ours, on_cpu, strict=True)), algorithm
    comm.Free()


class Occupied:
    """A call that runs until the test sets `end`."""

    def __init__(self) -> None:
        self.end = threading.Event()

    def run(self) -> sc.SparseVector:
        self.end.wait()
        return sc.SparseVector([], np.empty(0, np.float32), 1)

    def leave(self, error: BaseException) -> None:
        pass


@pytest.mark.skipif(MPI.Query_thread() < MPI.THREAD_MULTIPLE, reason="calls are made by the thread that waits")
def test_a_call_that_had_to_wait_works_on_the_callers_stream(device: DeferredRuntime) -> None:
    """The queue's thread makes the call, while the caller's stream has yet to write x and reads the result."""
    comm, occupied = WORLD.Dup(), Occupied()
    queue_of(transport_of(comm)).submit(occupied)
    before = device.make_current(device.new_stream())
    threading.Timer(0.1, occupied.end.set).start()
    ours = step(comm, "butterfly", device)
    device.make_current(before)
    for a, b in zip(ours, step(comm, "butterfly", None), strict=True):
        assert data.same_bits(a, b)
    comm.Free()


class DeviceBytes:
    """Memory with an address but no buffer protocol, like a CUDA array's."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.nbytes = array, array.nbytes

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, where: slice) -> DeviceBytes:
        return DeviceBytes(self.array[where])

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {"data": (self.array.ctypes.data, False), "shape": self.array.shape, "typestr": "|u1", "version": 3}


class Addresses(MessageMemory):
    def empty(self, nbytes: int) -> DeviceBytes:
        return DeviceBytes(np.zeros(nbytes, np.uint8))


@pytest.mark.parametrize("end", ["detached", "collected"])
def test_memory_of_a_message_under_way_is_never_freed(end: str) -> None:
    """MPI still reads the memory after the library has abandoned the transfer."""
    comm, memory, freed = WORLD.Dup(), Addresses(), list[str]()
    endpoint = abi.load().Endpoint(MPI._addressof(comm), 2**20 * 100, 0.0)
    endpoint.tag, endpoint.timeout, endpoint.counters = 1, 60.0, TrafficCounters()
    sent = {name: DeviceBytes(np.full(n, 7, np.uint8)) for name, n in {"complete": 10, "under way": 3_000_000}.items()}
    for name, bytes_ in sent.items():
        weakref.finalize(bytes_, freed.append, name).atexit = False
    assert len(endpoint.exchange(sent["complete"], RANK, RANK, memory)) == 10
    request = endpoint.isend(sent["under way"], RANK, memory)
    if end == "detached":
        endpoint.detach()
    del endpoint, request, bytes_
    sent.clear()
    gc.collect()
    assert freed == ["complete"]
    received = np.empty(3_000_000, np.uint8)
    for piece in (received[:FIRST], received[FIRST:]):
        comm.Recv(piece, RANK, 1)
    assert (received == 7).all()
    comm.Free()
