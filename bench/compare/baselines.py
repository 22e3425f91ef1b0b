"""The baselines: methods of other projects, implemented from publications. docs/reports/speed.md lists their costs.

A step has four phases, so that the exchange can be timed alone:

    select(x, residual, k)                  take the entries that this rank sends out of residual + x
    exchange(selected)                      messages between ranks, with the sums that they need
    put_back(residual, selected, result)    return entries to the residual that the result does not contain
    densify(result, out)                    write the sum over ranks as a dense array

Gradients are flat float32 arrays. ``sent`` counts the payload bytes of a rank: each message exactly, and of a
collective of MPI or gloo the minimum that it must deliver. NaN: only MPI knows.
"""

from __future__ import annotations

import fcntl
import math
import os
import socket
import struct
from datetime import timedelta
from functools import cache
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from mpi4py import MPI

from sparsecomm import config

Array = np.ndarray[Any, Any]
Entries = tuple[Array, Array]  # indices and values


class Baseline:
    """One way to sum gradients over the ranks of ``comm``; raises ValueError if it does not work on so many."""

    name: ClassVar[str]
    slow: ClassVar[bool] = False  # takes seconds per step of long gradients
    exchange_only: ClassVar[bool] = False  # whether a step consists of the exchange only

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self.sent: float = 0

    def select(self, x: Array, residual: Array | None, k: int) -> Any:
        return x

    def exchange(self, selected: Any) -> Any:
        raise NotImplementedError

    def put_back(self, residual: Array | None, selected: Any, result: Any) -> None:
        """Put nothing back."""

    def densify(self, result: Any, out: Array) -> None:
        raise NotImplementedError

    def step(self, x: Array, residual: Array | None, k: int, out: Array | None = None) -> Array:
        """Return the sum over ranks, in ``out`` if given."""
        out = np.empty_like(x) if out is None else out
        selected = self.select(x, residual, k)
        result = self.exchange(selected)
        self.put_back(residual, selected, result)
        self.densify(result, out)
        return out

    def close(self) -> None:
        """Release resources."""

    def _gathered(self, nbytes: int) -> None:
        """Count an allgather: a block of each rank for every other one."""
        self.sent += (self.size - 1) * nbytes


# -- dense -------------------------------------------------------------------------------------------------------------


class _Dense(Baseline):
    """The sum of x; there is no residual, so none is read or written, and k is not used. Nothing is lost."""

    exchange_only = True

    def step(self, x: Array, residual: Array | None, k: int, out: Array | None = None) -> Array:
        out = np.empty_like(x) if out is None else out
        self._sum(x, out)
        return out

    def exchange(self, selected: Array) -> Array:
        out = np.empty_like(selected)
        self._sum(selected, out)
        return out

    def densify(self, result: Array, out: Array) -> None:
        out[:] = result

    def _sum(self, x: Array, out: Array) -> None:
        raise NotImplementedError


class DenseMpi(_Dense):
    """Dense allreduce by the algorithm that MPI chooses."""

    name = "dense-mpi"

    def _sum(self, x: Array, out: Array) -> None:
        self.comm.Allreduce(x, out, MPI.SUM)
        self.sent = math.nan


class DenseRing(_Dense):
    """Dense allreduce along a ring, in NumPy and mpi4py, under any launch.

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
    """

    name = "dense-ring"

    def _sum(self, x: Array, out: Array) -> None:
        rank, P = self.rank, self.size
        cut = [slice(*ends) for ends in pairwise(x.size * i // P for i in range(P + 1))]
        to, source = (rank + 1) % P, (rank - 1) % P
        passed_on = x[cut[rank]]  # a segment of the gradient; later ones are partial sums
        if P == 1:
            out[:] = x
            return
        for step in range(P - 1):
            segment = cut[(rank - 1 - step) % P]
            self._pass_on(passed_on, to, out[segment], source)
            np.add(out[segment], x[segment], out=out[segment])
            passed_on = out[segment]
        for step in range(P - 1):
            segment = cut[(rank - step) % P]
            self._pass_on(passed_on, to, out[segment], source)
            passed_on = out[segment]

    def _pass_on(self, passed_on: Array, to: int, into: Array, source: int) -> None:
        self.comm.Sendrecv(passed_on, to, recvbuf=into, source=source)
        self.sent += passed_on.nbytes


BLOCK = 2048  # elements that share a scale
_CHUNK = 512 * BLOCK  # elements quantised at once, so that temporaries stay small


class Int8(Baseline):
    """Dense allreduce in 8 bits: every rank sums one segment in float32, and rounds the sum once more.

    Source: the exchange is the compressed allreduce of Tang et al., "1-bit Adam", ICML 2021 (all-to-all, sum, gather);
    the quantiser is linear with a scale per block, block-wise as in Dettmers et al., "8-bit Optimizers via Block-wise
    Quantization", ICLR 2022.

    Loses half a step of 1/127 of the block's largest |x| per rank, and the same of the sum; there is no residual.
    """

    name = "int8"
    slow = True

    def select(self, x: Array, residual: Array | None, k: int) -> tuple[Array, Array]:
        return quantise(x, math.ceil(x.size / (self.size * BLOCK)) * self.size * BLOCK)

    def exchange(self, selected: tuple[Array, Array]) -> tuple[Array, Array]:
        levels, scales = selected
        P = self.size
        others, their_scales = np.empty_like(levels), np.empty_like(scales)
        for mine, theirs in ((levels, others), (scales, their_scales)):
            self.comm.Alltoall(mine, theirs)
            self.sent += mine.nbytes * (P - 1) / P
        total = np.zeros(levels.size // P, np.float32)
        for part, scale in zip(others.reshape(P, -1), their_scales.reshape(P, -1), strict=True):
            for begin in range(0, total.size, _CHUNK):
                blocks = slice(begin // BLOCK, (begin + _CHUNK) // BLOCK)
                chunk = total[begin : begin + _CHUNK].reshape(-1, BLOCK)
                chunk += part[begin : begin + _CHUNK].reshape(-1, BLOCK) * scale[blocks, None]
        for mine, every in zip(quantise(total, total.size), (others, their_scales), strict=True):
            self.comm.Allgather(mine, every)
            self._gathered(mine.nbytes)
        return others, their_scales

    def densify(self, result: tuple[Array, Array], out: Array) -> None:
        levels, scales = result
        for begin in range(0, out.size, _CHUNK):
            chunk = out[begin : begin + _CHUNK]
            some = levels[begin : begin + _CHUNK].reshape(-1, BLOCK)
            chunk[:] = (some * scales[begin // BLOCK :][: len(some), None]).reshape(-1)[: chunk.size]


def quantise(x: Array, padded: int) -> tuple[Array, Array]:
    """Return x in int8, and the scale of every block of `BLOCK` elements; zeros follow up to ``padded`` elements."""
    levels, scales = np.zeros(padded, np.int8), np.zeros(padded // BLOCK, np.float32)
    for begin in range(0, x.size, _CHUNK):
        part = x[begin : begin + _CHUNK]
        if part.size % BLOCK:
            part = np.concatenate([part, np.zeros(-part.size % BLOCK, x.dtype)])
        blocks = part.reshape(-1, BLOCK)
        scale = np.maximum(blocks.max(axis=1), -blocks.min(axis=1)) / np.float32(127)
        scales[begin // BLOCK :][: len(scale)] = scale
        steps = np.rint(blocks / np.where(scale > 0, scale, 1)[:, None])
        levels[begin : begin + part.size] = steps.astype(np.int8).reshape(-1)
    return levels, scales


# -- sparse ------------------------------------------------------------------------------------------------------------


class _Sparse(Baseline):
    """Selects k entries of residual + x, and leaves the others in the residual."""

    slow = True
    index: ClassVar[type[np.signedinteger[Any]]] = np.int32

    def select(self, x: Array, residual: Array | None, k: int) -> Entries:
        total = x if residual is None else np.add(residual, x, out=residual)
        indices = self._largest(total, k)
        entries = indices.astype(self.index), total[indices]
        if residual is not None:
            residual[indices] = 0
        return entries

    def _largest(self, total: Array, k: int) -> Array:
        return _largest_numpy(total, k)


def _largest_numpy(total: Array, k: int) -> Array:
    magnitudes = np.abs(total)
    return np.argpartition(magnitudes, len(total) - k)[len(total) - k :].copy()  # not a view of all n


@cache
def _torch() -> Any:
    """Return PyTorch, with as many threads as sparsecomm has."""
    import torch

    torch.set_num_threads(config.threads())
    return torch


def _largest_torch(total: Array, k: int) -> Array:
    torch = _torch()
    indices = torch.topk(torch.from_numpy(total).abs(), k, sorted=False).indices
    return np.asarray(indices.numpy())


class TopkNumpy(_Sparse):
    """Top-k by allgather, in plain NumPy and mpi4py.

    Source: Lin et al., "Deep Gradient Compression", ICLR 2018, without its momentum correction; called Top-k S-SGD
    by Shi et al., ICDCS 2019. Loses nothing. Ties are broken arbitrarily.
    """

    name = "topk-numpy"

    def exchange(self, selected: Entries) -> Entries:
        counts = np.empty(self.size, np.int64)
        self.comm.Allgather(np.array([len(selected[0])], np.int64), counts)
        everyone = []
        for mine in selected:
            all_of_them = np.empty(int(counts.sum()), mine.dtype)
            self.comm.Allgatherv(mine, (all_of_them, counts))
            self._gathered(mine.nbytes)
            everyone.append(all_of_them)
        self._gathered(8)
        return everyone[0], everyone[1]

    def densify(self, result: Entries, out: Array) -> None:
        out.fill(0)
        np.add.at(out, result[0], result[1])


class GtopkPaper(_Sparse):
    """gTop-k as its authors' program does it, in NumPy and mpi4py.

    Source: Shi et al., "A distributed synchronous SGD algorithm with global Top-k sparsification for low bandwidth
    networks", ICDCS 2019, Algorithms 2 and 3, and the program published with it: 64-bit indices and float32 values
    joined into one array, which makes both float64, so 16 bytes per entry; a barrier in every round; a broadcast.
    Selection is by `torch.topk`, if torch is installed. The result is the sum (theirs is divided by P).

    Loses an entry that a merge rejected if its index came into the result by another rank. Only for P = 2^j.
    """

    name = "gtopk-paper"
    index = np.int64

    def __init__(self, comm: MPI.Intracomm) -> None:
        super().__init__(comm)
        if self.size & (self.size - 1):
            raise ValueError(f"{self.name}: on {self.size} ranks; expected 1, 2, 4, 8, ...: it pairs all ranks")

    def _largest(self, total: Array, k: int) -> Array:
        try:
            return _largest_torch(total, k)
        except ImportError:
            return _largest_numpy(total, k)

    def exchange(self, selected: Entries) -> Entries:
        k = len(selected[0])
        merged = np.concatenate(selected)  # int64 and float32 make float64
        theirs = np.empty_like(merged)
        stride = 1
        while stride < self.size:
            position = self.rank % (2 * stride)
            if position == 0:
                self.comm.Recv(theirs, self.rank + stride)
                merged = np.concatenate(_merge((merged[:k], merged[k:]), (theirs[:k], theirs[k:]), k))
            elif position == stride:
                self.comm.Send(merged, self.rank - stride)
                self.sent += merged.nbytes
            self.comm.Barrier()
            stride *= 2
        self.comm.Bcast(merged, 0)
        self.sent += merged.nbytes * (self.size - 1) / self.size
        return merged[:k].astype(np.int64), merged[k:]

    def put_back(self, residual: Array | None, selected: Entries, result: Entries) -> None:
        if residual is not None:
            missing = np.isin(selected[0], result[0], invert=True)
            residual[selected[0][missing]] += selected[1][missing]

    def densify(self, result: Entries, out: Array) -> None:
        out.fill(0)
        out[result[0]] = result[1]


def _merge(a: Entries, b: Entries, k: int) -> Entries:
    """Return the k largest entries of the sum. Ties are broken arbitrarily."""
    _, in_a, in_b = np.intersect1d(a[0], b[0], assume_unique=True, return_indices=True)
    values = a[1].copy()
    values[in_a] += b[1][in_b]
    indices = np.concatenate([a[0], np.delete(b[0], in_b)])
    values = np.concatenate([values, np.delete(b[1], in_b)])
    best = np.argpartition(np.abs(values), len(values) - k)[len(values) - k :]
    return indices[best], values[best]


class TopkGloo(_Sparse):
    """Top-k by allgather in PyTorch: `torch.topk` and `all_gather` over gloo, TCP between processes.

    Source: Lin et al., ICLR 2018, in the manner of compressors for PyTorch such as GRACE (Xu et al., ICDCS 2021).
    Indices travel as int32, half of what `torch.topk` returns. Loses nothing.
    """

    name = "topk-gloo"

    def __init__(self, comm: MPI.Intracomm) -> None:
        super().__init__(comm)
        try:
            _torch()
        except ImportError as error:
            raise ValueError(f"{self.name}: there is no PyTorch here; pip install torch") from error
        start_gloo(comm)

    def _largest(self, total: Array, k: int) -> Array:
        return _largest_torch(total, k)

    def exchange(self, selected: Entries) -> list[Any]:
        torch, everyone = _torch(), []
        for mine in map(torch.from_numpy, selected):
            all_of_them = [torch.empty_like(mine) for _ in range(self.size)]
            torch.distributed.all_gather(all_of_them, mine)
            self._gathered(mine.nbytes)
            everyone.append(all_of_them)
        return everyone

    def densify(self, result: list[Any], out: Array) -> None:
        dense = _torch().from_numpy(out).zero_()
        for indices, values in zip(*result, strict=True):
            dense.index_add_(0, indices, values)

    def close(self) -> None:
        _torch().distributed.destroy_process_group()


def start_gloo(comm: MPI.Intracomm, minutes: int = 5) -> None:
    """Start gloo beside MPI, on the interface ``GLOO_SOCKET_IFNAME`` or, if all ranks share a host, the loopback."""
    import torch.distributed as dist

    if len(set(comm.allgather(socket.gethostname()))) == 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(minutes=minutes)
    host = comm.bcast(_address(os.environ.get("GLOO_SOCKET_IFNAME")) if comm.rank == 0 else None)
    store = dist.TCPStore(host, 0, comm.size, True, limit, False) if comm.rank == 0 else None
    port = comm.bcast(store.port if store is not None else None)
    store = store or dist.TCPStore(host, port, comm.size, False, limit)
    dist.init_process_group("gloo", timeout=limit, store=store, rank=comm.rank, world_size=comm.size)


def _address(interface: str | None) -> str:
    """Return this host's IPv4 address on ``interface``, or that of its name."""
    if not interface:
        return socket.gethostbyname(socket.gethostname())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        name = struct.pack("256s", interface.split(",")[0].encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(s.fileno(), 0x8915, name)[20:24])  # SIOCGIFADDR
