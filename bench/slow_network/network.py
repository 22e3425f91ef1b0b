"""P hosts on one machine, each behind a link of a given rate.

Everything lives in Linux namespaces (network, mount, process, host name) of one process tree, without names on the
machine: when the first process of that tree ends, however it ends, the kernel kills the others and removes the links.
All that a killed run can leave is an empty folder, which the next run removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

MAX_HOSTS = 128
NET = "10.77.0.0/24"  # in namespaces of our own: the machine may use the same
_HUB = "10.77.0.254"
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SLOWEST, _FASTEST = 1e6, 40e9
_SPACE = ["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts"]
_PREFIX = "slow_network."


class CannotError(Exception):
    """The network cannot be made: the message says why and what to do."""


def parse_rate(text: str) -> float:
    """Bits per second, from a rate as ``tc`` writes it."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?bit)(?:/s|ps)?", text.strip().lower())
    rate = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not _SLOWEST <= rate <= _FASTEST:
        raise CannotError(f"rate {text!r}: expected a number and a unit from 1mbit to 40gbit, such as 1gbit or 100mbit")
    return rate


def names(hosts: int) -> list[str]:
    return [f"sn{i}" for i in range(hosts)]


# ------------------------------------------------------------------------------------------ what the machine must have


def entry(hosts: int) -> list[str]:
    """The command prefix that starts a program in namespaces of its own, after a look at whether that can be done."""
    if not 1 <= hosts <= MAX_HOSTS:
        raise CannotError(f"{hosts} ranks: expected 1 to {MAX_HOSTS}")
    if not sys.platform.startswith("linux"):
        raise CannotError(
            f"a slow network is made of Linux namespaces, and this is {sys.platform}: use a Linux machine"
        )
    for tool, package in [("ip", "iproute2"), ("tc", "iproute2"), *[(t, "util-linux") for t in _TOOLS]]:
        if not _which(tool):
            raise CannotError(f"`{tool}` is missing: install {package} (Debian, Ubuntu: apt-get install {package})")
    # A user who is not root may be root in a namespace of his own, where the machine allows it.
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
    """An empty folder, locked while its run lives: that is how a live run is told from a dead one."""
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
    """Remove what killed runs left, and nothing of those that live."""
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


# A host: a process that keeps its namespaces alive. The same TCP everywhere, as far as the kernel has it.
_HOST = """
import os, signal, socket, sys
socket.sethostname(sys.argv[1])
for kind in sys.argv[2:]:
    file = os.open("/proc/sys/net/ipv4/tcp_congestion_control", os.O_WRONLY)
    try:
        os.write(file, kind.encode())
        break
    except OSError:
        pass
print(flush=True)
signal.pause()
"""
_CONGESTION = ("cubic", "reno")


def build(hosts: int, rate: float, folder: Path) -> None:
    """Make the hosts and their links, from within the namespaces of `entry`. Writes host -> process id to `folder`."""
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
    _batch("ip", [], ["link add br0 type bridge", f"addr add {_HUB}/24 dev br0", "link set lo up", "link set br0 up"])

    holders = [
        subprocess.Popen(
            ["unshare", "--net", "--uts", sys.executable, "-ISc", _HOST, name, *_CONGESTION],
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

    segment, limit = shaping(rate)
    hub, limits = [], []
    for i, holder in enumerate(holders):
        hub += [
            f"link add v{i} type veth peer name eth0 address {_hardware(i)} netns {holder.pid}",
            f"link set v{i} gso_max_size {segment} master br0 up",
        ]
        limits += [f"qdisc add dev v{i} root {limit}"]
    _batch("ip", [], hub)
    _batch("tc", [], limits)
    for i, holder in enumerate(holders):
        enter = ["nsenter", "-t", str(holder.pid), "--net"]
        up = [f"addr add 10.77.0.{i + 1}/24 dev eth0", "link set lo up", f"link set eth0 gso_max_size {segment} up"]
        _batch("ip", enter, [*up, *_neighbours(i, hosts)])
        _batch("tc", enter, [f"qdisc add dev eth0 root {limit}"])

    agent = folder / "agent"  # what mpirun takes for ssh: AGENT [OPTIONS] HOST COMMAND...
    agent.write_text(
        "#!/bin/sh\n"
        'while [ "${1#-}" != "$1" ]; do shift; done\n'
        "host=$1; shift\n"
        f'exec nsenter -t "$(cat {folder}/pids/"$host")" --net --uts -- sh -c "$*"\n'
    )
    agent.chmod(0o755)


def _hardware(host: int) -> str:
    """Return the address of a host's link."""
    return f"02:00:00:00:00:{host + 1:02x}"


def _neighbours(host: int, hosts: int) -> list[str]:
    """Return the commands that tell a host where the others are.

    Else each would ask for every other one. The kernel keeps 1,024 answers, of all namespaces together, so that 32
    hosts of which each talks to each would lose connections.
    """
    others = (other for other in range(hosts) if other != host)
    return [f"neigh replace 10.77.0.{i + 1} lladdr {_hardware(i)} dev eth0 nud permanent" for i in others]


def shaping(rate: float) -> tuple[int, str]:
    """The longest segment that TCP hands to a link, and the arguments of `tc` that limit the link.

    After a pause, tbf lets `burst` bytes pass at full speed: it must be small beside the messages that are timed, and
    no smaller than a segment. Short segments cost time of the processors.
    """
    segment = int(min(65_536, max(6_144, rate / 8 * 262e-6)))  # 32 KB at 1 Gb/s
    burst = int(max(1.125 * segment, rate / 8 * 262e-6))
    return segment, f"tbf rate {rate:.0f}bit burst {burst} limit {max(4e6, rate / 8 * 32e-3):.0f}"


def _do(command: list[str], text: str | None = None) -> None:
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise CannotError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def _batch(tool: str, enter: list[str], lines: list[str]) -> None:
    try:
        _do([*enter, tool, "-batch", "-"], "\n".join([*lines, ""]))
    except CannotError as error:
        said = str(error).lower()
        if "qdisc" in said or "unknown" in said or "not supported" in said:
            raise CannotError(
                f"{error}: the kernel needs bridge, veth and tbf (modprobe bridge veth sch_tbf)"
            ) from None
        raise
