"""Links with delay, loss, queues and sites: their effect on real packets, and the commands for `tc`."""

from __future__ import annotations

import ast
import math
import re
import sys
import tempfile

from tests.slow_network.runs import call, needs_network
from tests.waiting import until

HEADERS = 14 + 20 + 8  # Ethernet, IP, UDP

PRELUDE = """
import os, socket, time
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # in one piece, beside those of other ranks
def connect(host, port):
    while True:
        try:
            return socket.create_connection((host, port))
        except ConnectionRefusedError:  # it has not begun
            time.sleep(0.05)
"""

# Rank 1 sends numbered datagrams to rank 0, which prints the numbers that arrive. No other packets may precede them on
# the link, because each changes which datagrams are lost: a file tells rank 1 that rank 0 receives.
DATAGRAMS = """
count, begun = {count}, {begun!r}
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
if os.environ["RANK"] == "0":
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
    end.bind(("", 5000))
    end.settimeout(60)
    open(begun, "w")
    came = []
    while (number := int.from_bytes(end.recv(2000)[:4], "big")) < count:
        came.append(number)
    say("came", came)
else:
    while not os.path.exists(begun):
        time.sleep(0.01)
    begin = time.perf_counter()
    for number in range(count):
        end.sendto(number.to_bytes(4, "big") + bytes({size} - 4), ("sn0", 5000))
    say("sent in", time.perf_counter() - begin)
    time.sleep(0.1)
    for _ in range(20):
        end.sendto(count.to_bytes(4, "big"), ("sn0", 5000))
        time.sleep(0.005)
"""


def run(program: str, *options: str) -> str:
    words = ["run", "--launcher", "torchrun", "--no-measure", *options, "--", sys.executable, "-c", PRELUDE + program]
    done = call(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def datagrams(*options: str, count: int, size: int = 100) -> tuple[list[int], float]:
    """Return the numbers of the datagrams that arrived, and the seconds in which they were sent."""
    with tempfile.TemporaryDirectory() as folder:
        program = DATAGRAMS.format(count=count, size=size, begun=f"{folder}/begun")
        printed = run(program, "--ranks", "2", *options)
    came, sent_in = (re.search(rf"^{name} (.*)$", printed, re.MULTILINE) for name in ("came", "sent in"))
    assert came, printed
    assert sent_in, printed
    return ast.literal_eval(came[1]), float(sent_in[1])


@needs_network
def test_the_same_packets_are_lost_in_every_run() -> None:
    options, count, loss = ["--rate", "100mbit", "--loss", "10%"], 500, 0.1
    came, _ = datagrams(*options, count=count)
    assert came == sorted(set(came))
    assert abs(count - len(came) - count * loss) < 5 * math.sqrt(count * loss * (1 - loss))
    assert datagrams(*options, count=count)[0] == came


@needs_network
def test_a_full_queue_drops_the_last() -> None:
    size, rate, queue = 1400, 10e6, 0.05
    per_packet = 8 * (size + HEADERS) / rate
    capacity = queue / per_packet

    def drops_the_last() -> bool:
        came, sent_in = datagrams("--rate", "10mbit", "--queue", "50ms", count=300, size=size)
        assert came[: int(capacity)] == list(range(int(capacity)))
        # Packets that leave the queue meanwhile make room, also while another program holds up the relay.
        return len(came) <= capacity + sent_in / per_packet + 2

    until(drops_the_last)


@needs_network
def test_round_trips_between_sites_and_within() -> None:
    program = """
rank, rounds = int(os.environ["RANK"]), 100
if rank == 0:
    for other, enough in (("sn1", 0.03), ("sn2", 0.08), ("sn3", 0.08)):
        took = [connect(other, 5000).close() or 9.0]
        while len(took) < rounds and (len(took) < 5 or min(took) >= enough):  # one that no other program holds up
            begin, connection = time.perf_counter(), None  # that before is closed
            connection = socket.create_connection((other, 5000))
            took.append(time.perf_counter() - begin)
        say("trip", other, min(took), connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16))
        connection.sendall(b"x")
else:
    server = socket.create_server(("", 5000))
    while server.accept()[0].recv(1) != b"x":
        pass
say(rank, os.environ["WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"], os.environ["MASTER_ADDR"])
"""
    options = ["--ranks", "4", "--sites", "2", "--rate", "1gbit", "--rtt", "60ms", "--congestion", "reno"]
    printed = run(program, *options)
    matches = re.findall(r"^trip (\S+) (\S+) b'reno", printed, re.MULTILINE)
    trips = {host: float(seconds) for host, seconds in matches}
    assert set(trips) == {"sn1", "sn2", "sn3"}, printed
    assert trips["sn1"] < 0.03
    assert all(0.06 <= trips[host] < 0.08 for host in ("sn2", "sn3")), trips
    assert all(f"{rank} 4 1 sn0" in printed for rank in range(4))


@needs_network
def test_trains_are_cut_without_harm() -> None:
    """TCP delivers all bytes although the link loses and drops packets."""
    program = """
import hashlib, random
data = random.Random(0).randbytes(3 << 20)
if os.environ["RANK"] == "0":
    server = socket.create_server(("", 5000))
    connection, _ = server.accept()
    came = hashlib.sha256()
    while block := connection.recv(1 << 16):
        came.update(block)
    say("alike", came.digest() == hashlib.sha256(data).digest())
else:
    connection = connect("sn0", 5000)
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
"""
    options = ["--rate", "500mbit", "--rtt", "4ms", "--jitter", "1ms", "--loss", "1%", "--queue", "5ms"]
    printed = run(program, "--ranks", "2", *options)
    assert "alike True" in printed
    did = re.search(r"([\d,]+) packets carried, .*?; ([\d.]+)% lost", printed)
    assert did, printed
    count, loss = int(did[1].replace(",", "")), 0.01
    assert count > (3 << 20) / 1500  # counted as they are on the wire
    assert abs(float(did[2]) / 100 - loss) < 5 * math.sqrt(loss / count)
