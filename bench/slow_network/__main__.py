"""Run a command on P hosts that share this machine, each behind a link of a given rate, round trip, loss and queue.

python -m bench.slow_network run --ranks 4 --rate 100mbit --rtt 80ms --loss 0.1% -- python script.py
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from bench.slow_network import network
from bench.slow_network.link import measure

REFUSED = 2
PATIENCE = 8.0  # seconds for MPI to end its job before everything is killed
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> int:
    args = _parser().parse_args()
    try:
        if args.what == "clean":
            for path in network.clean():
                print(f"removed {path}")
            return 0
        if args.what == "_inside":
            return _inside(args)
        return _outside(args)
    except network.CannotError as error:
        print(f"slow_network: {error}", file=sys.stderr)
        return REFUSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.slow_network", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="what", required=True, metavar="{run,measure,clean}")
    for what, about in [
        ("run", "make the hosts, measure a link, run a command on them, remove them"),
        ("measure", "make the hosts, measure a link, remove them"),
        ("_inside", ""),
    ]:
        sub = commands.add_parser(what, **({"help": about, "description": about} if about else {}))
        sub.add_argument("--ranks", type=int, required=True, metavar="P", help="hosts, with a rank on each")
        network.add_options(sub)
        sub.add_argument("--link-json", type=Path, metavar="FILE", help="write the measured links there")
        if what == "measure":
            continue
        sub.add_argument("--per-host", type=int, default=1, metavar="M", help="ranks of the command on each host (1)")
        sub.add_argument(
            "--launcher",
            default="mpirun",
            choices=("mpirun", "torchrun"),
            help="what starts the command: mpirun, or the variables of torchrun (RANK, MASTER_ADDR, ...) without MPI",
        )
        sub.add_argument("--no-measure", action="store_true", help="do not measure the link before the command")
        sub.add_argument(
            "--mca", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="passed to mpirun"
        )
        if what == "_inside":
            sub.add_argument("--folder", type=Path, required=True)
        sub.add_argument("command", nargs=argparse.REMAINDER, metavar="[--] COMMAND ...")
    commands.add_parser("clean", help="remove what killed runs left; `run` does so by itself")
    return parser


# ------------------------------------------------------------------------------------------------- outside: the user's


def _outside(args: argparse.Namespace) -> int:
    asked = network.links(args)
    command = getattr(args, "command", [])
    if command[:1] == ["--"]:
        command = command[1:]
    if args.what == "run":
        if not command:
            raise network.CannotError("no command: say what to run, after --")
        if not shutil.which(command[0]):
            raise network.CannotError(f"{command[0]!r} is neither a program on PATH nor an executable file")
        if args.per_host < 1:
            raise network.CannotError(f"{args.per_host} ranks per host: expected at least 1")
        if args.no_measure and args.link_json:
            raise network.CannotError("--link-json needs the measurement: leave --no-measure out")
    if args.ranks == 1 and (args.what == "measure" or args.link_json):
        raise network.CannotError("1 rank has no link to measure: expected 2 or more")
    enter = network.entry(args.ranks)
    if not asked.only_rate:
        network.relay_program()
    if args.what == "run" and args.launcher == "mpirun":
        _check_mpirun()
    if args.link_json:
        existed = args.link_json.exists()
        try:
            args.link_json.open("a").close()
            if not existed:
                args.link_json.unlink()
        except OSError as error:
            raise network.CannotError(f"--link-json {args.link_json}: {error.strerror}") from None

    got: list[int] = []
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: got.append(number))
    with network.folder() as folder:
        call = [*enter, sys.executable, "-m", "bench.slow_network", "_inside", "--folder", str(folder), *sys.argv[2:]]
        # In a session of its own, so that Ctrl-C reaches it once, from here.
        inside = subprocess.Popen(call, start_new_session=True)
        forwarded, deadline = 0, 0.0
        while inside.poll() is None:
            if len(got) > forwarded:
                os.killpg(inside.pid, got[-1])
                deadline = deadline or time.monotonic() + PATIENCE + 2
                if forwarded:
                    deadline = 0.1  # asked twice
                forwarded = len(got)
            if deadline and time.monotonic() > deadline:
                inside.kill()
            time.sleep(0.02)
    if got:
        return 128 + got[0]
    return inside.returncode if inside.returncode >= 0 else 128 - inside.returncode


def _check_mpirun() -> None:
    if not shutil.which("mpirun"):
        raise network.CannotError("`mpirun` is not on PATH: activate the environment that has Open MPI 5")
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    if "(Open MPI) 5" not in version:
        raise network.CannotError(f"`mpirun` is {version.strip().splitlines()[:1]}: expected Open MPI 5")


# ------------------------------------------------------------------------- inside: the first process of the namespaces


class _Asked(BaseException):
    """A signal asked us to end."""


def _inside(args: argparse.Namespace) -> int:
    def asked(number: int, _: FrameType | None) -> None:
        for ignored in _SIGNALS:
            signal.signal(ignored, signal.SIG_IGN)
        raise _Asked(number)

    for number in _SIGNALS:
        signal.signal(number, asked)
    try:
        links = network.links(args)
        relay = network.build(args.ranks, links, args.folder)
        if not args.no_measure and args.ranks > 1:
            _measure(args, links, relay)
        command = args.command[1:] if args.command[:1] == ["--"] else args.command
        if not command:
            return 0
        before = relay.counters() if relay else None
        launch = _mpirun if args.launcher == "mpirun" else _torchrun
        status = launch(args, args.ranks, command, args.per_host)
        if relay and before:
            _say_relay(network.difference(before, relay.counters()), links)
        return status
    except _Asked as signalled:
        return 128 + int(signalled.args[0])


def _measure(args: argparse.Namespace, links: network.Links, relay: network.Relay | None) -> None:
    from sparsecomm.quantities import number_text, rate_text  # the library takes long to import

    others, hosts = _others(), network.names(args.ranks)
    before = relay.counters() if relay else None
    try:
        measured = measure([network.enter(args.folder, host) for host in hosts], hosts, links)
    except RuntimeError as error:
        raise network.CannotError(f"{error}; --no-measure goes without") from None
    link: dict[str, Any] = {"hosts": args.ranks, "cores": os.cpu_count(), "other_processes": others, **measured}
    network.forget(args.folder, hosts)
    if relay and before:
        link["relay"] = network.difference(before, relay.counters())
    (args.folder / "link.json").write_text(json.dumps(link, indent=1) + "\n")
    if args.link_json:
        args.link_json.write_text((args.folder / "link.json").read_text())

    asked = f"{args.ranks} hosts on {os.cpu_count()} cores, {args.rate} each way"
    if links.sites:
        asked += f", {links.sites} sites"
    alone = f"alpha {number_text(link['alpha'] * 1e6)} us, "
    if links.only_rate:
        alone += f"beta {number_text(link['beta'] * 1e9)} ns/B ({link['rate'] / links.rate:.2f} of the rate)"
    else:
        asked += f", rtt {args.rtt} +- {args.jitter}, loss {args.loss}, queue {links.longest_queue * 1e3:.0f}ms"
        asked += f", stalls {args.stall}, {links.congestion}" if links.stall[0] else f", {links.congestion}"
        alone += f"round trip {link['connect'] * 1e3:.1f} ms, one stream {rate_text(link['rate'])}"
        alone += f", eight {rate_text(link['rate_8'])}"
    together = f"alpha {number_text(link['alpha_all'] * 1e6)} us, TCP "
    if links.only_rate:
        together += f"{link['rate_all'] / links.rate:.2f} of the rate"
    else:
        together += f"{rate_text(link['rate_all'])}, {link['again_all']:.2%} sent again"
    _say(f"{asked}; one pair: {alone}; all at once: {together}")
    if "relay" in link:
        _say_relay(link["relay"], links)
    elif links.only_rate and min(link["rate"], link["rate_all"]) < 0.85 * links.rate:
        _say("the processors, not the links, are the limit: take a lower rate")
    if others >= 1:
        _say(f"the machine is busy with {others} other processes: expect worse figures")


def _say(text: str) -> None:
    print(f"# slow network: {text}", flush=True)


def _say_relay(did: dict[str, Any], links: network.Links) -> None:
    _say(
        f"{did['packets']:,} packets carried, {did['bytes'] / 1e6:,.0f} MB; {did['lost']:.3%} lost, "
        f"{did['dropped_up']:.3%} and {did['dropped_down']:.3%} dropped by full queues up and down; "
        f"1 % more than {did['late'] * 1e6:,.0f} us late; {did['cpu']:.2f} of a core used"
    )
    if did["late"] > max(2e-3, 0.05 * links.rtt) or did["cpu"] > 0.9 or did["overrun"]:
        _say("the processors, not the links, are the limit: take a lower rate, or fewer hosts")


def _others() -> int:
    """Return the number of other running processes on the machine."""
    counts = []
    for _ in range(9):
        counts.append(int(Path("/proc/loadavg").read_text().split()[3].split("/")[0]) - 1)
        time.sleep(0.01)
    return sorted(counts)[len(counts) // 2]


def _environment(args: argparse.Namespace) -> dict[str, str]:
    environment = {
        "SPARSECOMM_THREADS": "1",  # every rank believes that it has the machine to itself
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    environment.pop("SLOW_NETWORK_LINK", None)
    if (args.folder / "link.json").exists():
        environment["SLOW_NETWORK_LINK"] = str(args.folder / "link.json")
    return environment


def _torchrun(args: argparse.Namespace, hosts: int, command: list[str], per_host: int) -> int:
    """Start the command on the hosts with the variables that torchrun sets. The first that fails ends all."""
    processes = []
    for rank in range(hosts * per_host):
        host = network.names(hosts)[rank // per_host]
        variables = {
            "RANK": rank,
            "WORLD_SIZE": hosts * per_host,
            "LOCAL_RANK": rank % per_host,
            "LOCAL_WORLD_SIZE": per_host,
            "GROUP_RANK": rank // per_host,
            "MASTER_ADDR": network.names(hosts)[0],
            "MASTER_PORT": 29500,
        }
        environment = _environment(args) | {name: str(value) for name, value in variables.items()}
        processes.append(
            subprocess.Popen([*network.enter(args.folder, host), *command], env=environment, start_new_session=True)
        )
    try:
        while any(process.poll() is None for process in processes) and not any(process.poll() for process in processes):
            time.sleep(0.02)
        failed = [process.returncode for process in processes if process.poll()]
        return next((status if status > 0 else 128 - status for status in failed), 0)
    finally:
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + PATIENCE / 4
        while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in processes:
            process.kill()


def _mpirun(args: argparse.Namespace, hosts: int, command: list[str], per_host: int = 1) -> int:
    environment = _environment(args)
    # fmt: off
    call = [
        "mpirun",
        "--prtemca", "plm_ssh_agent", str(args.folder / "agent"),
        "--prtemca", "prte_if_include", network.NET,
        "--prtemca", "prte_tmpdir_base", str(args.folder),
        "--prtemca", "routed_radix", str(network.MAX_HOSTS),  # daemons speak with the hub, whose link has no delay
        "--mca", "pml", "ob1",
        "--mca", "btl", "tcp,self" + ",sm" * (per_host > 1),
        "--mca", "btl_tcp_if_include", network.NET,
        "--host", ",".join(f"{name}:{per_host}" for name in network.names(hosts)),
        "--bind-to", "none", "-n", str(hosts * per_host),
    ]
    # fmt: on
    for name, value in args.mca:
        call += ["--mca", name, value]
    process = subprocess.Popen([*call, *command], env=environment, start_new_session=True)
    try:
        status = process.wait()
    except _Asked:
        process.terminate()
        try:
            process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
