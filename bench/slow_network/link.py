"""Measures the links with plain TCP: round trips, single streams, and streams of all hosts at once.

`measure` starts a program on every host, `python link.py`, which reads commands from standard input and writes answers
to standard output as lines of JSON, so that only the measured traffic is on the links.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.slow_network.network import Links

PORT = 5077
BLOCK = 1 << 18
SECONDS = 0.25  # for each size of message
STREAMS = 8
HEAD = "!BQ?"  # the head of a connection: its kind, the size of its messages, and whether to poll for them
STREAM, ECHO, RING = range(3)

# ------------------------------------------------------------------------------------------------------ on every host


class Host:
    """The commands: each public method is one."""

    def __init__(self) -> None:
        self._received = [0] * 1024  # by connection
        self._out: list[socket.socket] = []
        self._streams = 0  # how often they have begun
        self._previous: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._server = socket.create_server(("", PORT), backlog=64)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        for number in range(len(self._received)):
            connection, _ = self._server.accept()
            threading.Thread(target=self._answer, args=(connection, number), daemon=True).start()

    def _answer(self, connection: socket.socket, number: int) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = bytearray(struct.calcsize(HEAD))
        try:
            _receive_into(connection, memoryview(head))
            kind, size, poll = struct.unpack(HEAD, head)
            if kind == RING:
                self._previous.put(connection)
                return
            data = memoryview(bytearray(size))
            while kind == ECHO:
                _receive_into(connection, data, poll)
                connection.sendall(data)
            while count := connection.recv_into(data):
                self._received[number] += count
        except OSError:
            pass  # the sender has finished
        connection.close()

    def connect(self, host: str, times: int) -> list[float]:
        """Return the seconds that it takes to connect, which is one round trip."""
        took = []
        for _ in range(times):
            begin = time.perf_counter()
            socket.create_connection((host, PORT)).close()
            took.append(time.perf_counter() - begin)
        return took

    def ping_pong(self, host: str, size: int, seconds: float, rounds: tuple[int, int], poll: bool) -> list[float]:
        """Return the seconds of half a round trip of messages of `size` bytes; the first one is not counted.

        It sends messages for so many `seconds`, but at least `rounds[0]` and at most `rounds[1]` messages.
        """
        data, took = memoryview(bytearray(size)), []
        with socket.create_connection((host, PORT)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(struct.pack(HEAD, ECHO, size, poll))
            end = time.perf_counter() + seconds
            while len(took) <= rounds[0] or (time.perf_counter() < end and len(took) <= rounds[1]):
                begin = time.perf_counter()
                connection.sendall(data)
                _receive_into(connection, data, poll)
                took.append((time.perf_counter() - begin) / 2)
        return took[1:]

    def shift(self, host: str, rounds: int, poll: bool) -> float:
        """Return the seconds of a round in which every host sends 8 bytes to the next."""
        data = memoryview(bytearray(8))
        with socket.create_connection((host, PORT)) as following:
            following.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            following.sendall(struct.pack(HEAD, RING, 8, poll))
            with self._previous.get() as previous:
                for timed in range(-1, rounds):
                    if timed == 0:
                        begin = time.perf_counter()
                    following.sendall(data)
                    _receive_into(previous, data, poll)
                return (time.perf_counter() - begin) / rounds

    def stream(self, host: str, connections: int) -> None:
        """Begin to send as fast as possible over this many connections."""
        for _ in range(connections):
            threading.Thread(target=self._send, args=(host, self._streams), daemon=True).start()

    def _send(self, host: str, streams: int) -> None:
        block = bytes(BLOCK)
        try:
            connection = socket.create_connection((host, PORT))
            self._out.append(connection)
            if streams != self._streams:
                connection.close()  # it came too late
            connection.sendall(struct.pack(HEAD, STREAM, BLOCK, False))
            while True:
                connection.sendall(block)
        except OSError:
            pass  # `stop` has closed it

    def received(self) -> tuple[int, float]:
        """Return the bytes of all streams so far, and the time."""
        return sum(self._received), time.monotonic()

    def stop(self) -> tuple[int, int]:
        """End the streams; return the packets that they sent again, and all."""
        again = sent = 0
        self._streams += 1
        for connection in self._out:
            # struct tcp_info of <linux/tcp.h>: tcpi_total_retrans, tcpi_segs_out
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            again += struct.unpack_from("=I", info, 100)[0]
            sent += struct.unpack_from("=I", info, 136)[0]
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        self._out.clear()
        return again, sent


def _receive_into(connection: socket.socket, data: memoryview, poll: bool = False) -> None:
    """Receive all of `data`. `poll`: busy-wait, as MPI does, so that no time is lost in waking up."""
    got = 0
    while got < len(data):
        try:
            count = connection.recv_into(data[got:], 0, socket.MSG_DONTWAIT if poll else 0)
        except BlockingIOError:
            os.sched_yield()
            continue
        if not count:
            raise ConnectionError("the other end has closed the connection")
        got += count


def main() -> None:
    host = Host()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(host, name)(*arguments)), flush=True)


# ------------------------------------------------------------------------------------------------------- from the hub


class Hosts:
    """The program on all hosts."""

    def __init__(self, enter: list[list[str]]) -> None:
        self._processes = [
            subprocess.Popen(
                [*prefix, sys.executable, "-IS", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for prefix in enter
        ]
        for process in self._processes:
            _answer_of(process)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def ask(self, hosts: list[int], *command: Any, to: list[str] | None = None) -> list[Any]:
        """Give a command to hosts, which work on it side by side. `to`: their first arguments."""
        name, *arguments = command
        for i, host in enumerate(hosts):
            process = self._processes[host]
            assert process.stdin is not None
            process.stdin.write(json.dumps([name, *([to[i]] if to else []), *arguments]) + "\n")
            process.stdin.flush()
        return [_answer_of(self._processes[host]) for host in hosts]


def _answer_of(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError("a host ended while its links were measured: see its message above")
    return json.loads(line)


def measure(enter: list[list[str]], names: list[str], links: Links) -> dict[str, Any]:
    """Measure the links between hosts, in seconds, bytes, and bits per second.

    It measures one pair of hosts, while the other hosts sleep, and then all hosts at once. `enter` has the command
    prefix that starts a program on each host, and `names` has the names of the hosts.
    """
    hosts = Hosts(enter)
    try:
        return _measure(hosts, names, links)
    finally:
        hosts.close()


def _measure(hosts: Hosts, names: list[str], links: Links) -> dict[str, Any]:
    rate, rtt = links.rate, links.rtt
    here = len(names) // links.sites if links.sites else 1  # hosts that share a link
    everyone = list(range(len(names)))
    other = [(i + here) % len(names) for i in everyone]
    following = [names[i] for i in other]

    def streams(who: list[int], connections: int) -> tuple[list[float], float]:
        """Return the rates of the receivers, and the share of packets that were sent again."""
        to = [other[i] for i in who]
        hosts.ask(who, "stream", connections, to=following)
        # TCP takes some 15 round trips to find the rate.
        time.sleep(min(2.5, 0.3 + 15 * rtt))
        begin = hosts.ask(to, "received")
        time.sleep(min(2.0, 0.7 + 4 * rtt))
        end = hosts.ask(to, "received")
        counts = hosts.ask(who, "stop")
        rates = [8 * (b[0] - a[0]) / (b[1] - a[1]) for a, b in zip(begin, end, strict=True)]
        return rates, sum(again for again, _ in counts) / max(1, sum(sent for _, sent in counts))

    results: dict[str, Any] = {"asked": rate} | {f"asked_{name}": value for name, value in vars(links).items()}
    results["connect"] = median(hosts.ask([0], "connect", 3, to=following)[0])
    results["alpha"] = median(hosts.ask([0], "ping_pong", 8, 0.2, (3, 1000), links.only_rate, to=following)[0])
    if not links.only_rate:
        (results["rate"],), results["again"] = streams([0], 1)
        (results["rate_8"],), results["again_8"] = streams([0], STREAMS)
        results["beta"] = 8 / max(results["rate"], results["rate_8"])
    else:
        large = int(min(4 << 20, max(1 << 18, rate / 8 * 0.1)))  # 4 MB at 1 Gb/s; at lower rates what takes 0.1 s
        results["points"] = []
        for size in [large >> halvings for halvings in (4, 3, 2, 1, 0)]:
            took = hosts.ask([0], "ping_pong", size, SECONDS, (3, 50), False, to=following)[0]
            results["points"].append((size, median(took)))
        (less, short), *_, (large, long) = results["points"]
        results["beta"] = (long - short) / (large - less)
        results["rate"] = 8 / results["beta"]
    rounds = int(min(500, max(3, 1 / rtt))) if rtt else 500
    results["alpha_all"] = max(hosts.ask(everyone, "shift", rounds, links.only_rate, to=following))
    rates, results["again_all"] = streams(everyone, 1)
    # The hosts of a site share its link. Those of `rates` are in the order of their senders.
    results["rate_all"] = min(sum(rates[i : i + here]) for i in range(0, len(rates), here))
    return results


if __name__ == "__main__":
    main()
