"""Floods of connections from a process that does not know the token, while ranks connect and afterwards.

A stranger sends nothing, a byte now and then, half a hello, a hello with a guessed ticket, or garbage, or it resets the
connection. Every call must be right, strangers must take fewer than 32 descriptors per rank, and connections must be
refused once all ranks are connected.
"""

from __future__ import annotations

import errno
import os
import random
import resource
import select
import socket
import struct
import subprocess
import time
from collections import deque
from contextlib import suppress

import numpy as np

import sparsecomm as sc
from tests.processes import LIMIT
from tests.stress.harness import ALGORITHMS, Attack, Ranks
from tests.waiting import until

OPEN_AT_ONCE = 4000  # simultaneous connections of strangers
MAX_DESCRIPTORS = 32
CALLS = 20  # calls between two agreements on whether to end
RESET = struct.pack("ii", 1, 0)


class Strangers(Attack):
    options = (
        ("connections", 40_000, "of strangers, half of them before all ranks are connected"),
        ("ranks", 3, ""),
        ("files", 256, "that a rank may have open"),
    )
    timeout = 60.0
    environment = {"SPARSECOMM_CONNECTIONS": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}  # noqa: RUF012

    def run(self) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(OPEN_AT_ONCE + 500, hard)), hard))
        self._random, self._held = random.Random(self.report.seed), deque[socket.socket]()
        self.start_ranks(self.arguments.ranks, LIMIT, "gloo")
        for connection in self._held:
            connection.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    # -- the strangers ------------------------------------------------------------------------------------------------

    def meanwhile(self, job: subprocess.Popen[bytes], lines: list[str]) -> None:
        """Flood the ranks, once all but the last listen and the last is ready to make its first call."""
        listening = [line.split() for line in lines if "listens" in line]
        ready = len(listening) >= self.arguments.ranks - 1 and any("waits" in line for line in lines)
        if self._exists("stop") or not ready:
            return
        time.sleep(0.5)  # the others wait in their first call
        processes, ports = zip(*((int(words[1]), int(words[-1])) for words in listening), strict=True)
        own = {process: descriptors(process) for process in processes}
        attempts, half, connected = 0, self.arguments.connections // 2, False
        while job.poll() is None and (not connected or attempts < self.arguments.connections):
            for port in ports:
                self._connect(port, "after all were connected" if connected else "before")
            attempts += len(ports)
            if attempts % 100 < len(ports):
                for process in processes:
                    self.report.measure("descriptors taken", descriptors(process) - own[process])
            if attempts >= half // 2:
                (self.folder / "go").touch()
            connected = connected or all(self._exists(f"connected{rank}") for rank in range(self.arguments.ranks))
        (self.folder / "stop").touch()
        after = self.counts["connections after all were connected"]
        if self.counts["connections after all were connected, refused"] != after:
            self.fail("a rank still listens after all were connected")
        if (taken := self.report.figures.get("descriptors taken", 0)) >= MAX_DESCRIPTORS:
            self.fail(f"strangers took {taken:g} descriptors")

    def _exists(self, name: str) -> bool:
        return (self.folder / name).exists()

    def _connect(self, port: int, when: str) -> None:
        """Open a connection without waiting for it, and send something over it or an older one."""
        other = socket.socket()
        other.setblocking(False)
        refused = other.connect_ex(("127.0.0.1", port)) not in (0, errno.EINPROGRESS)
        if not refused and when != "before":  # the answer may take a moment
            answer = select.poll()
            answer.register(other, select.POLLOUT)
            answer.poll(1000)
        refused = refused or other.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        self.counts[f"connections {when}"] += 1
        if refused:
            self.counts[f"connections {when}, refused"] += 1
            other.close()
            return
        if len(self._held) == OPEN_AT_ONCE:
            self._held.popleft().close()
        self._held.append(other)
        choose = self._random
        kind = choose.choice(["silent", "slow", "half", "guess", "garbage", "reset"])
        with suppress(OSError):
            if kind == "slow":
                choose.choice(self._held).send(b"s")
            elif kind == "half":
                other.send(b"sparsec2" + choose.randbytes(choose.randrange(24)))
            elif kind == "guess":
                other.send(b"sparsec2" + choose.randbytes(16) + struct.pack("<IHH", self.arguments.ranks - 1, 0, 1))
            elif kind == "garbage":
                other.send(choose.randbytes(choose.randrange(1, 5000)))
            elif kind == "reset":
                other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                self._held.pop().close()

    # -- a rank -------------------------------------------------------------------------------------------------------

    def on_rank(self, ranks: Ranks) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.arguments.files, self.arguments.files))
        from sparsecomm.transport.process_group import joining

        class Listening(joining.Connections):  # type: ignore[misc]
            def listen(self, address: str, token: bytes) -> int:
                port = super().listen(address, token)
                print(f"progress: {os.getpid()} listens on {port}", flush=True)
                return port

        joining.Connections = Listening  # type: ignore[misc]
        last = ranks.rank == ranks.size - 1
        if last:
            print("progress: the last rank waits for strangers", flush=True)
            until(lambda: self._exists("go"), "strangers", LIMIT)
        ended, number = False, 0
        while not ended:
            began = time.monotonic()
            x, out = np.full(64, 1 + ranks.rank + number % 9, np.float32), np.empty(64, np.float32)
            sc.sparse_allreduce(x, 64, algorithm=ALGORITHMS[number % len(ALGORITHMS)], out=out)
            total = sum(1 + rank + number % 9 for rank in range(ranks.size))
            assert (out == total).all(), f"rank {ranks.rank}, call {number}: a wrong result"
            if last or number:  # in the first call the others wait for the last rank
                name = "s, the slowest call" if number else "s, the first call of the last rank"
                self.report.measure(name, time.monotonic() - began)
            number += 1
            (self.folder / f"connected{ranks.rank}").touch()
            open(os.devnull).close()  # raises if no descriptor is left
            if number % CALLS == 0:
                ended = ranks.gather(self._exists("stop"))[0]
        self.counts["calls"] += number


def descriptors(process: int) -> int:
    """Return the number of open files of a process; 0 if it has ended."""
    with suppress(FileNotFoundError):
        return len(os.listdir(f"/proc/{process}/fd"))
    return 0
