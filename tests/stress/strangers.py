"""Floods of connections from a process that does not know the token, while ranks connect and afterwards.

The ranks of a process group may have few open files each. All but the last one make their first call, and listen.
Strangers open half of their connections then, and while the last rank connects; the other half while calls are made.
A stranger sends nothing, a byte now and then, half a hello, a hello with a guessed ticket, or garbage, or it resets the
connection. What must hold: every call is right, strangers take fewer than 32 descriptors of each rank, and nobody can
connect to a rank once all ranks are connected.
"""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.processes import ENVIRONMENT, LIMIT, ROOT
from tests.stress.harness import Attack
from tests.stress.one_call import ALGORITHMS, Call, integers

__all__ = ["Strangers"]

OPEN_AT_ONCE = 4000  # connections that strangers hold
DESCRIPTORS = 32  # fewer may be taken
TOGETHER = 20  # calls until the ranks agree whether to end
RESET = struct.pack("ii", 1, 0)


class Strangers(Attack):
    options = (
        ("connections", 40_000, "of strangers, half of them before all ranks are connected"),
        ("ranks", 3, ""),
        ("files", 256, "that a rank may have open"),
    )
    timeout = 60.0

    def run(self) -> None:
        """Start the ranks, and flood them."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(OPEN_AT_ONCE + 500, hard)), hard))
        self._random, self._held = random.Random(self.report.seed), deque[socket.socket]()
        environment = ENVIRONMENT | {
            "SPARSECOMM_TIMEOUT": str(self.timeout),
            "SPARSECOMM_CONNECTIONS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        with tempfile.TemporaryDirectory() as folder:
            self._folder = Path(folder)
            jobs = []
            for rank in range(self.given.ranks):
                command = [sys.executable, "-m", "tests.stress", *self.words(), "--on-ranks", folder, str(rank)]
                with (self._folder / f"said{rank}").open("w") as said:
                    jobs.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said))
            try:
                self._flood(jobs)
                for job in jobs:
                    job.wait(LIMIT)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                self.fail(str(error))
            finally:
                for job in jobs:
                    job.kill()
                    job.wait()
                for other in self._held:
                    other.close()
            for rank, job in enumerate(jobs):
                found = self._folder / f"found{rank}"
                if found.exists():
                    self.report.add(json.loads(found.read_text()))
                else:
                    said = (self._folder / f"said{rank}").read_text()
                    self.fail(f"rank {rank} ended with status {job.returncode}: {said[-3000:]}")
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def _flood(self, jobs: list[subprocess.Popen[bytes]]) -> None:
        last, half = len(jobs) - 1, self.given.connections // 2
        self._wait(lambda: all(self._is_there(f"port{rank}") for rank in range(last)), "all ranks but the last listen")
        self._wait(lambda: self._is_there(f"ready{last}"), "the last rank is ready")
        time.sleep(0.5)  # the others wait in their first call
        ports = [int((self._folder / f"port{rank}").read_text()) for rank in range(last)]
        own = {job.pid: descriptors(job.pid) for job in jobs}
        made, connected = 0, False
        while not connected or made < self.given.connections:
            for port in ports:
                self._connect(port, "after all were connected" if connected else "before")
            made += len(ports)
            if made % 100 < len(ports):
                for job in jobs[:last]:
                    self.report.measure("descriptors taken", descriptors(job.pid) - own[job.pid])
            if made >= half // 2:
                (self._folder / "go").touch()
            connected = connected or all(self._is_there(f"connected{rank}") for rank in range(len(jobs)))
            if made >= half and not connected:
                self._check(jobs)
        (self._folder / "stop").touch()
        after = self.counts["connections after all were connected"]
        if self.counts["connections after all were connected, refused"] != after:
            self.fail("a rank still listens after all were connected")
        if self.report.figures["descriptors taken"] >= DESCRIPTORS:
            self.fail(f"strangers took {self.report.figures['descriptors taken']:g} descriptors")

    def _is_there(self, name: str) -> bool:
        return (self._folder / name).exists()

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT
        while not done():
            assert time.monotonic() < deadline, f"waited {LIMIT} s until {what}"
            time.sleep(0.01)

    def _check(self, jobs: list[subprocess.Popen[bytes]]) -> None:
        for rank, job in enumerate(jobs):
            assert job.poll() is None, f"rank {rank} has ended with status {job.returncode}"
        assert self.report.seconds < LIMIT, "the ranks are not connected"

    def _connect(self, port: int, when: str) -> None:
        """Open a connection, without waiting for it, and let it, or an older one, send something."""
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
                other.send(b"sparsec2" + choose.randbytes(16) + struct.pack("<IHH", self.given.ranks - 1, 0, 1))
            elif kind == "garbage":
                other.send(choose.randbytes(choose.randrange(1, 5000)))
            elif kind == "reset":
                other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                self._held.pop().close()

    # -- a rank -------------------------------------------------------------------------------------------------------

    def be_rank(self, folder: str, number: str) -> None:
        """Be a rank, and write what was found."""
        resource.setrlimit(resource.RLIMIT_NOFILE, (self.given.files, self.given.files))
        import torch
        import torch.distributed as dist

        from sparsecomm.transport.process_group import joining as module

        self._folder, rank = Path(folder), int(number)

        class Listening(module.Connections):  # type: ignore[misc, valid-type]
            def listen(self, address: str, token: bytes) -> int:
                port = super().listen(address, token)
                (Path(folder) / f"new{rank}").write_text(str(port))
                (Path(folder) / f"new{rank}").rename(Path(folder) / f"port{rank}")
                return port

        module.Connections = Listening  # type: ignore[misc]
        store = dist.FileStore(f"{folder}/store", self.given.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self.given.ranks)
        (self._folder / f"ready{rank}").touch()
        if rank == self.given.ranks - 1:
            self._wait(lambda: self._is_there("go"), "the strangers have come")
        ended, call = False, 0
        while not ended:
            began = time.monotonic()
            self._call(call, rank)
            took = time.monotonic() - began
            if rank == self.given.ranks - 1 or call:  # others wait for it in the first call
                self.report.measure("s, the slowest call" if call else "s, the first call of the last rank", took)
            call += 1
            (self._folder / f"connected{rank}").touch()
            open(os.devnull).close()  # there are descriptors left
            if call % TOGETHER == 0:
                stop = torch.tensor([self._is_there("stop")])
                dist.broadcast(stop, 0)
                ended = bool(stop)
        self.counts["calls"] += call
        dist.barrier()
        (self._folder / f"found{rank}").write_text(json.dumps(self.report.as_json()))
        dist.destroy_process_group()

    def _call(self, number: int, rank: int) -> None:
        P = self.given.ranks
        seeds = [self.report.seed + 2 * (number * P + other) for other in range(P)]
        inputs = [(integers(seed), integers(seed, 1)) for seed in seeds]
        everyones = [x + residual for x, residual in inputs]
        call = Call(ALGORITHMS[number % len(ALGORITHMS)], *inputs[rank])
        call.make(None)
        if call.error is not None:
            raise call.error
        assert call.committed(everyones), f"rank {rank}, call {number}: a wrong result"


def descriptors(process: int) -> int:
    """Return the number of open files of a process; 0: it has ended."""
    try:
        return len(os.listdir(f"/proc/{process}/fd"))
    except FileNotFoundError:
        return 0
