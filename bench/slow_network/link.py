"""alpha and beta of the links, by ping-pong, and what is left of them when all hosts send: run under mpirun.

Usage: link.py RATE RTT FILE, in bits per second and seconds.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from mpi4py import MPI

SECONDS = 0.25  # for each size of message


def ping_pong(comm: Any, size: int, rounds: int) -> list[float]:
    """Return seconds of half a round trip, by round."""
    data = np.zeros(size, np.uint8)
    other, first = 1 - comm.rank, comm.rank == 0
    times = []
    for _ in range(rounds):
        begin = MPI.Wtime()
        if first:
            comm.Send(data, other)
            comm.Recv(data, other)
        else:
            comm.Recv(data, other)
            comm.Send(data, other)
        times.append((MPI.Wtime() - begin) / 2)
    return times


def shift(comm: Any, size: int, rounds: int) -> float:
    """Return seconds of a round in which every rank sends to the next and receives from the one before."""
    data, got = np.zeros(size, np.uint8), np.empty(size, np.uint8)
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    comm.Barrier()
    begin = MPI.Wtime()
    for _ in range(rounds):
        comm.Sendrecv(data, to, recvbuf=got, source=source)
    return (comm.allreduce(MPI.Wtime(), MPI.MAX) - begin) / rounds


def stream(comm: Any) -> float:
    """Return bits per second of plain TCP streams from every host to the next, all at once: of the slowest."""
    with socket.create_server(("", 0), backlog=1) as server:
        addresses = comm.allgather((socket.gethostname(), server.getsockname()[1]))
        out = socket.create_connection(addresses[(comm.rank + 1) % comm.size])
        came, _ = server.accept()
    done = threading.Event()

    def send() -> None:
        while not done.is_set():
            out.sendall(bytes(1 << 16))
        out.shutdown(socket.SHUT_WR)

    def receive(seconds: float) -> float:
        count, begin = 0, time.perf_counter()
        while (now := time.perf_counter()) < begin + seconds:
            count += len(came.recv(1 << 16))
        return 8 * count / (now - begin)

    thread = threading.Thread(target=send)
    thread.start()
    receive(0.5)  # what the buffers take in, and the time in which TCP finds the rate
    rate = receive(1.0)
    await_all(comm, lambda: came.recv(1 << 16))
    done.set()
    while came.recv(1 << 16):
        pass
    thread.join()
    out.close()
    came.close()
    return float(comm.allreduce(rate, MPI.MIN))


def await_all(comm: Any, meanwhile: Callable[[], object] = lambda: time.sleep(0.02)) -> None:
    """Wait for all ranks, leaving the processors to the ranks that are still at work."""
    request = comm.Ibarrier()
    while not request.Test():
        meanwhile()


def rounds_of(many: int, rtt: float, seconds: float) -> int:
    """Return how many round trips there is time for."""
    return int(min(many, max(3, seconds / rtt))) if rtt else many


def measure(comm: Any, rate: float, rtt: float) -> dict[str, Any]:
    """Measure the links, in seconds, bytes, and bits per second.

    Ranks 0 and 1 are first, while the others sleep; then come all at once.
    """
    large = int(min(4 << 20, max(1 << 18, rate / 8 * 0.1)))  # 4 MB at 1 Gb/s; at lower rates what takes 0.1 s
    found: dict[str, Any] = {"asked": rate}
    if comm.rank < 2:
        ping_pong(comm, 8, rounds_of(50, rtt, 0.2))
        found["alpha"] = median(ping_pong(comm, 8, rounds_of(500, rtt, 1.0)))
        ping_pong(comm, large, 2)
        found["points"] = []
        for size in [large >> halvings for halvings in (4, 3, 2, 1, 0)]:
            rounds = int(min(50, max(3, SECONDS / (2 * size * 8 / rate + rtt))))
            found["points"].append((size, median(ping_pong(comm, size, rounds))))
        (small, short), *_, (large, long) = found["points"]
        found["beta"] = (long - short) / (large - small)
        found["rate"] = 8 / found["beta"]
    await_all(comm)
    found["alpha_all"] = shift(comm, 8, rounds_of(500, rtt, 1.0))
    found["rate_all"] = stream(comm)
    return found


if __name__ == "__main__":
    result = measure(MPI.COMM_WORLD, float(sys.argv[1]), float(sys.argv[2]))
    if MPI.COMM_WORLD.rank == 0:
        with open(sys.argv[3], "w") as file:
            json.dump(result, file, indent=1)
