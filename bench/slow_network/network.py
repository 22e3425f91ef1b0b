"""P hosts on one machine, each behind a link of a given rate, and of a given delay, loss and queue.

Everything lives in Linux namespaces (network, mount, process, host name) of one process tree, without names on the
machine: when the first process of that tree ends, however it ends, the kernel kills the others and removes the links.
All that a killed run can leave is an empty folder, which the next run removes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_HOSTS = 128
NET = "10.77.0.0/24"  # within namespaces, so the machine may use the same addresses
_HUB_NUMBER = 254
_HUB = f"10.77.0.{_HUB_NUMBER}"
_SEED = 1
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SLOWEST, _FASTEST = 1e6, 40e9
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
CONGESTION = ("cubic", "reno", "bbr")
_SPACE = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
_PREFIX = "slow_network."


class CannotError(Exception):
    """The network cannot be created. The message says why and what to do."""


def parse_rate(text: str) -> float:
    """Bits per second, from a rate as ``tc`` writes it."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?bit)(?:/s|ps)?", text.strip().lower())
    rate = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not _SLOWEST <= rate <= _FASTEST:
        raise CannotError(f"rate {text!r}: expected a number and a unit from 1mbit to 40gbit, such as 1gbit or 100mbit")
    return rate


def parse_time(text: str, longest: float = 10.0) -> float:
    """Seconds, from a time as ``tc`` writes it."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)|0", text.strip().lower())
    if not match or (seconds := float(match[1] or 0) * _TIMES[match[2] or "s"]) > longest:
        raise CannotError(f"time {text!r}: expected a number and a unit from 0 to {longest:.0f}s, such as 80ms")
    return seconds


def parse_stall(text: str) -> tuple[float, float]:
    """Parse a duration and an average interval, as seconds."""
    length, slash, every = text.partition("/")
    try:
        stall = parse_time(length), parse_time(every, longest=3600.0)
    except CannotError:
        slash = ""
    if not slash or (stall[0] > 0) != (stall[1] > 0):
        raise CannotError(f"stall {text!r}: expected how long, and after how long on average, such as 3s/60s")
    return stall


def parse_loss(text: str) -> float:
    """A fraction, from a loss as ``tc`` writes it."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%|0", text.strip())
    if not match or (loss := float(match[1] or 0) / 100) > 0.5:
        raise CannotError(f"loss {text!r}: expected a percentage from 0% to 50%, such as 0.1%")
    return loss


@dataclasses.dataclass(frozen=True)
class Links:
    """Properties of every link: `rate` in bits per second; `rtt`, `jitter`, `queue` in seconds; `loss` from 0 to 1."""

    rate: float
    rtt: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    queue: float = 0.0
    stall: tuple[float, float] = (0.0, 0.0)  # duration and average interval of stalls
    congestion: str = "cubic"
    sites: int = 0  # each with as many hosts, which share its link; 0: every host has a link of its own

    @property
    def only_rate(self) -> bool:
        """Whether the kernel's `tbf` is enough."""
        return not (self.rtt or self.jitter or self.loss or self.queue or self.stall[0] or self.sites)

    @property
    def longest_queue(self) -> float:
        """Return the seconds that a packet waits in a full queue."""
        return self.queue or max(self.rtt, 0.032)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the links."""
    add = parser.add_argument
    add("--rate", required=True, help="of every link, both ways: 1gbit, 100mbit, ...")
    add("--rtt", default="0", metavar="TIME", help="round trip between two hosts: 80ms (0)")
    add("--jitter", default="0", metavar="TIME", help="a packet takes rtt/2 more or less this: 5ms (0)")
    add("--loss", default="0", metavar="PERCENT", help="of the packets from one host to another: 0.1%% (0)")
    add("--queue", default="0", metavar="TIME", help="at each end of a link, in time at its rate (rtt, at least 32ms)")
    add(
        "--stall",
        default="0/0",
        metavar="TIME/EVERY",
        help="duration and average interval of stalls of a link: 3s/60s (never)",
    )
    add("--sites", default="0", metavar="S", help="as many links: hosts of a site share one, and are near each other")
    add("--congestion", default="cubic", choices=CONGESTION, help="TCP's congestion control (cubic)")


def links(args: argparse.Namespace) -> Links:
    """Return the links that a command line asks for."""
    asked = Links(
        parse_rate(args.rate),
        parse_time(args.rtt),
        parse_time(args.jitter),
        parse_loss(args.loss),
        parse_time(args.queue),
        parse_stall(args.stall),
        args.congestion,
        int(args.sites) if args.sites.isdigit() else -1,
    )
    if asked.jitter > asked.rtt / 2:
        raise CannotError(f"jitter {args.jitter}: expected at most half of the round trip, {args.rtt}")
    if asked.sites and not (1 < asked.sites <= args.ranks and args.ranks % asked.sites == 0):
        raise CannotError(f"{args.sites} sites of {args.ranks} hosts: expected 2 or more, with as many hosts each")
    return asked


def names(hosts: int) -> list[str]:
    return [f"sn{i}" for i in range(hosts)]


# ------------------------------------------------------------------------------------------ what the machine must have


def entry(hosts: int) -> list[str]:
    """Return the command prefix that starts a program in its own namespaces; raise if the machine cannot do it."""
    if not 1 <= hosts <= MAX_HOSTS:
        raise CannotError(f"{hosts} ranks: expected 1 to {MAX_HOSTS}")
    if not sys.platform.startswith("linux"):
        raise CannotError(
            f"a slow network is made of Linux namespaces, and this is {sys.platform}: use a Linux machine"
        )
    for tool, package in [("ip", "iproute2"), ("tc", "iproute2"), *[(t, "util-linux") for t in _TOOLS]]:
        if not _which(tool):
            raise CannotError(f"`{tool}` is missing: install {package} (Debian, Ubuntu: apt-get install {package})")
    # Many systems let users be root in their own namespaces.
    command = ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), *_SPACE]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if tried.returncode:
        what = "run as root (sudo)" if os.geteuid() else "in a container, start it with --privileged"
        raise CannotError(f"namespaces cannot be made here: {tried.stderr.strip()}; {what}")
    return ["setpriv", "--pdeathsig", "KILL", *command]


_TOOLS = ("unshare", "nsenter", "setpriv", "mount")


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")


# --------------------------------------------------------------------------------------------- a folder, and leftovers


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """Create an empty folder that is locked while its run is alive, which marks live runs."""
    clean()
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        lock = os.open(path, os.O_RDONLY)
        with contextlib.suppress(BlockingIOError):  # another run takes it for a leftover, right now
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists():
                break
        os.close(lock)
    try:
        yield path
    finally:
        _remove(path)
        os.close(lock)


def clean() -> list[Path]:
    """Remove the folders of killed runs, but not of live ones."""
    removed = []
    for path in sorted(Path(tempfile.gettempdir()).glob(_PREFIX + "*")):
        if path.is_symlink() or not path.is_dir() or path.stat().st_uid != os.geteuid():
            continue
        try:
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _remove(path):
                removed.append(path)
        except BlockingIOError:
            pass  # its run lives
        finally:
            os.close(lock)
    return removed


def _remove(path: Path) -> bool:
    with contextlib.suppress(OSError):  # only if empty: what a run writes there lies in a file system of its own
        path.rmdir()
        return True
    return False


# ------------------------------------------------------------------------------------------------ inside the namespaces


# A host: a process that keeps its namespaces alive, with the same TCP settings everywhere.
_HOST = """
import json, signal, socket, sys
socket.sethostname(sys.argv[1])
for name, value in json.loads(sys.argv[2]).items():
    try:
        with open("/proc/sys/net/" + name, "w") as file:
            file.write(value)
    except FileNotFoundError:
        pass  # a kernel without it
    except OSError as error:
        print(name, "=", value, ":", error.strerror, file=sys.stderr)
print(flush=True)
signal.pause()
"""


def tcp_settings(links: Links) -> dict[str, str]:
    """Return the TCP settings of the hosts, as files under /proc/sys/net.

    Send buffers may grow to twice the bytes in flight when the sender's queue is full, because bytes may have to be
    sent again. Receive buffers may grow to four times as many, because the kernel uses half of them itself. The limits
    are never below Linux's defaults.
    """
    under_way = links.rate / 8 * (links.rtt + links.longest_queue)
    int_max = 2**31 - 1
    return {
        "ipv4/tcp_rmem": f"4096 131072 {min(int_max, max(33_554_432, 4 * under_way)):.0f}",
        "ipv4/tcp_wmem": f"4096 16384 {min(int_max, max(4_194_304, 2 * under_way)):.0f}",
        "ipv6/conf/default/disable_ipv6": "1",  # otherwise the kernel would send packets to probe addresses
    }


def build(hosts: int, links: Links, folder: Path) -> Relay | None:
    """Create the hosts and their links, within the namespaces of `entry`. Write the hosts' process ids to `folder`."""
    os.environ["PATH"] = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    _do(["mount", "-t", "tmpfs", "slow_network", str(folder)])
    table = [f"10.77.0.{i + 1} {name}" for i, name in enumerate(names(hosts))]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", f"{_HUB} snhub", *table, ""]))
    if not Path("/etc/hosts").exists():
        raise CannotError(
            "/etc/hosts is missing: make an empty one, so that the names of the hosts can be laid over it"
        )
    _do(["mount", "--bind", str(folder / "hosts"), "/etc/hosts"])
    socket.sethostname("snhub")
    (folder / "pids").mkdir()
    holders = [
        subprocess.Popen(
            ["unshare", "--net", "--uts", sys.executable, "-ISc", _HOST, name, json.dumps(tcp_settings(links))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        for name in names(hosts)
    ]
    for name, holder in zip(names(hosts), holders, strict=True):
        assert holder.stdout is not None
        if not holder.stdout.readline():
            raise CannotError(f"host {name} could not be made: see the message of `unshare` above")
        (folder / "pids" / name).write_text(str(holder.pid))
    pids = [holder.pid for holder in holders]
    relay = None
    if links.only_rate:
        _shaped(pids, links)
    else:
        relay = _relayed(pids, links)

    agent = folder / "agent"  # what mpirun takes for ssh: AGENT [OPTIONS] HOST COMMAND...
    agent.write_text(
        "#!/bin/sh\n"
        'while [ "${1#-}" != "$1" ]; do shift; done\n'
        "host=$1; shift\n"
        f'exec nsenter -t "$(cat {folder}/pids/"$host")" --net --uts -- sh -c "$*"\n'
    )
    agent.chmod(0o755)
    return relay


def enter(folder: Path, name: str) -> list[str]:
    """Return the command prefix that starts a program on a host."""
    return ["nsenter", "-t", (folder / "pids" / name).read_text(), "--net", "--uts", "--"]


def forget(folder: Path, names: list[str]) -> None:
    """Clear the hosts' TCP metrics, so that later connections start like the first one."""
    for name in names:
        _do([*enter(folder, name), "ip", "tcp_metrics", "flush", "all"])


def _shaped(pids: list[int], links: Links) -> None:
    """Create links that the kernel shapes: a bridge is the switch, and both ends of every link are limited."""
    hosts = len(pids)
    segment, limit = shaping(links)
    hub, limits = ["link add br0 type bridge", *_device("br0", _HUB_NUMBER - 1, "", hosts, links)], []
    for i, pid in enumerate(pids):
        hub += [f"link add v{i} type veth peer name eth0 netns {pid}", f"link set v{i} {segment} master br0 up"]
        limits += [f"qdisc add dev v{i} root {limit}"]
    _batch("ip", [], hub)
    _batch("tc", [], limits)
    for i, pid in enumerate(pids):
        enter = ["nsenter", "-t", str(pid), "--net"]
        _batch("ip", enter, _device("eth0", i, segment, hosts, links))
        _batch("tc", enter, [f"qdisc add dev eth0 root {limit}"])


def _relayed(pids: list[int], links: Links) -> Relay:
    """Create links to a relay. The hub's link has no limits, so starting programs does not affect measurements.

    Behind each link is a host, or a site: a bridge, to which the hosts of the site are connected without limits.
    """
    hosts, own = len(pids), os.getpid()
    if links.sites:
        here = hosts // links.sites
        ends = [(own, f"site{s}", range(s * here, (s + 1) * here)) for s in range(links.sites)]
    else:
        ends = [(pid, "eth0", range(i, i + 1)) for i, pid in enumerate(pids)]
    arguments = [f"{pid}:{device}:{','.join(str(host + 1) for host in behind)}" for pid, device, behind in ends]
    relay = Relay(links, [*arguments, f"={own}:hub0:{_HUB_NUMBER}"])
    segment, _ = shaping(links)
    near = []
    for s in range(links.sites):
        near += [f"link add br{s} type bridge", f"link set br{s} up"]
        near += [f"link set site{s} {segment} txqueuelen 10000 master br{s} up"]
        for i in ends[s][2]:
            near += [
                f"link add v{i} type veth peer name eth0 netns {pids[i]}",
                f"link set v{i} {segment} master br{s} up",
            ]
    # The relay is the queue: it takes every packet at once.
    _batch("ip", [], [*near, *_device("hub0", _HUB_NUMBER - 1, f"{segment} txqueuelen 10000", hosts, links)])
    for i, pid in enumerate(pids):
        up = _device("eth0", i, f"{segment} txqueuelen 10000", hosts, links)
        _batch("ip", ["nsenter", "-t", str(pid), "--net"], up)
    return relay


def _device(device: str, host: int, how: str, hosts: int, links: Links) -> list[str]:
    """Return the commands that give a host, or the hub, its end of a link."""
    return [
        f"addr add 10.77.0.{host + 1}/24 dev {device}",
        "link set lo up",
        f"link set {device} address {_hardware(host)} {how} up",
        *_neighbours(device, host, hosts),
        # Only the first namespace may set the default of TCP's congestion control freely.
        f"route replace {NET} dev {device} src 10.77.0.{host + 1} congctl {links.congestion}",
    ]


class Relay:
    """The program that carries packets between the hosts: see relay.cpp. It ends with this process."""

    def __init__(self, links: Links, ends: list[str]) -> None:
        numbers = [links.rate, links.rtt * 1e9, links.jitter * 1e9, links.loss, links.longest_queue * 1e9]
        numbers += [links.stall[0] * 1e9, links.stall[1] * 1e9, _SEED]
        self._process = subprocess.Popen(
            [str(relay_program()), *(repr(float(number)) for number in numbers), *ends],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._devices = [tuple(end.lstrip("=").split(":")[:2]) for end in ends]
        if self._read() != "ready":
            raise CannotError("the relay could not be started: see its message above")

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def counters(self) -> dict[str, Any]:
        """Return its counters."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        answer = self._read()
        if not answer:
            raise CannotError("the relay ended: see its message above")
        counts = dict(json.loads(answer))
        counts["overrun"] = counts.pop("refused") + sum(_dropped(*end) for end in self._devices)
        return counts


def _dropped(pid: str, device: str) -> int:
    """Return the number of packets that a device in a process's network namespace dropped when sending."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, numbers = line.strip().partition(":")
        if name == device:
            return int(numbers.split()[11])
    return 0


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the difference of two readings of the relay's counters.

    `late` are the seconds by which 1 % of the packets were later than due, `cpu` is the share of a core that the relay
    used, and `overrun` counts packets that the machine lost. `lost`, `dropped_up` and `dropped_down` are shares.
    """
    did = {name: after[name] - before[name] for name in after if name != "late"}
    packets = did["packets"] + did["lost"] + did["dropped_up"] + did["dropped_down"]
    fractions = {name: did[name] / max(1, packets) for name in ("lost", "dropped_up", "dropped_down")}
    late_counts = [b - a for a, b in zip(before["late"], after["late"], strict=True)]
    bound = next(i for i in range(len(late_counts)) if sum(late_counts[: i + 1]) >= 0.99 * sum(late_counts))
    late, cpu = 1e-6 * 2**bound, did["cpu"] / max(1e-9, did["time"])
    counts = {name: did[name] for name in ("packets", "bytes", "overrun")}
    return {**counts, **fractions, "late": late, "cpu": cpu}


def relay_program() -> Path:
    """Return the relay, compiled if need be."""
    source = Path(__file__).with_name("relay.cpp")
    if not Path("/dev/net/tun").exists():
        raise CannotError("/dev/net/tun is missing: modprobe tun; in a container, start it with --device /dev/net/tun")
    text = source.read_bytes()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsecomm"
    program = folder / f"{source.stem}-{hashlib.sha256(text).hexdigest()[:16]}"
    if program.exists():
        return program
    compiler = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    if not compiler:
        raise CannotError("a C++ compiler is missing: install g++ (Debian, Ubuntu: apt-get install g++), or set CXX")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            call = [*compiler.split(), "-std=c++17", "-O2", "-x", "c++", "-", "-o", f"{temporary}/relay"]
            done = subprocess.run(call, input=text, capture_output=True)
            if done.returncode:
                raise CannotError(f"`{' '.join(call)}` failed: {done.stderr.decode(errors='replace').strip()}")
            os.replace(f"{temporary}/relay", program)
    except OSError as error:
        raise CannotError(f"the relay cannot be compiled to {folder}: {error}; set XDG_CACHE_HOME, or CXX") from None
    return program


def _hardware(host: int) -> str:
    return f"02:00:00:00:00:{host + 1:02x}"


def _neighbours(device: str, host: int, hosts: int) -> list[str]:
    """Return the commands that give a host the hardware addresses of the other hosts and the hub.

    Otherwise each host would ask for every other one. The kernel keeps 1,024 answers for all namespaces together, so
    32 hosts that all talk to each other would lose connections. The relay also carries no broadcasts.
    """
    others = (other for other in [*range(hosts), _HUB_NUMBER - 1] if other != host)
    return [f"neigh replace 10.77.0.{i + 1} lladdr {_hardware(i)} dev {device} nud permanent" for i in others]


def shaping(links: Links) -> tuple[str, str]:
    """Return arguments of `ip` and `tc`: the longest segment that TCP passes to a link, and the limit of its rate.

    After a pause, tbf lets `burst` bytes pass at full speed. `burst` must be at least a segment, and small beside the
    messages that are timed. Long segments take less CPU time, so they are longer where round trips are long.
    """
    lasts = min(1e-3, max(262e-6, links.rtt / 20))
    segment = int(min(65_536, max(6_144, links.rate / 8 * lasts)))  # 32 KB at 1 Gb/s
    burst = int(max(1.125 * segment, links.rate / 8 * 262e-6))
    tbf = f"tbf rate {links.rate:.0f}bit burst {burst} limit {max(4e6, links.rate / 8 * 32e-3):.0f}"
    return f"gso_max_size {segment}" + " gso_max_segs 1" * bool(links.loss), tbf


def _do(command: list[str], text: str | None = None) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise CannotError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def _batch(tool: str, enter: list[str], lines: list[str]) -> None:
    try:
        _do([*enter, tool, "-batch", "-"], "\n".join([*lines, ""]))
    except CannotError as error:
        message = str(error).lower()
        if "qdisc" in message or "unknown" in message or "not supported" in message:
            raise CannotError(
                f"{error}: the kernel needs bridge, veth and tbf (modprobe bridge veth sch_tbf)"
            ) from None
        raise
