"""The first call on a process group, which connects its ranks: `of` and `existing`."""

from __future__ import annotations

import _thread
import atexit
import os
import socket
import threading
import time
import weakref
from contextlib import suppress
from functools import partial
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from sparsecomm import config
from sparsecomm.errors import InvalidInputError, SparseCommError, TimeoutError, TransportError
from sparsecomm.signals import acquire
from sparsecomm.transport import job
from sparsecomm.transport.control import format_ranks
from sparsecomm.transport.process_group import _connections
from sparsecomm.transport.process_group.rendezvous import rendezvous
from sparsecomm.transport.process_group.transport import Connections, ProcessGroupTransport, is_registered, timeout_of
from sparsecomm.transport.scheduling import be_prompt

_MIN_SILENCE = 120.0  # seconds without an answer after which a host is dead; the timeout, if it is longer
_PREFIX = "sparsecomm"  # of keys in the store
_VERSION = "4"  # of the record that each rank contributes to the rendezvous
_POLL = 0.05  # seconds between checks of signals and of the interpreter's exit
_EXIT_WAIT = 5.0  # seconds that an exiting interpreter waits for the store
_IPV6 = Path("/proc/net/if_inet6")
_ADVICE = (
    "Check that these addresses belong to the network between the machines; GLOO_SOCKET_IFNAME selects its interface. "
    "Check that the firewall allows TCP to any port. See docs/guides/launch.md"
)

_joinings: weakref.WeakKeyDictionary[dist.ProcessGroup, _Joining] = weakref.WeakKeyDictionary()  # the latest of each
_lock = threading.RLock()  # of `_joinings`; never held during a wait
_exiting = threading.Event()  # the interpreter exits


@atexit.register
def _end_joinings() -> None:
    """End joinings in progress; their callers were interrupted.

    A thread that returns from torch's C++ code after the interpreter has ended would abort the process.
    """
    _exiting.set()
    deadline = time.monotonic() + _EXIT_WAIT
    for joining in list(_joinings.values()):
        joining.end(deadline)


def existing(group: dist.ProcessGroup) -> ProcessGroupTransport | None:
    """Return the transport of a process group, or ``None`` if it has none yet."""
    joining = _joinings.get(group)
    return None if joining is None else joining.transport


def of(group: dist.ProcessGroup | int) -> ProcessGroupTransport:
    """Return the transport of a process group with any backend; see `sparsecomm.transport.transport_of`.

    The first call connects the ranks over the same network interface as gloo (``GLOO_SOCKET_IFNAME``). The connections
    end with the group or with the process.

    Raises:
        InvalidInputError: this process is not a member of the group, or the group was destroyed.
        TimeoutError: a rank did not make the first call within the group's timeout. Try again.
        TransportError: the ranks could not be connected.
    """
    if isinstance(group, int):  # torch's value for processes outside of the group
        raise InvalidInputError("this process is not a member of the group: ranks outside a group must not call")
    if not is_registered(group):
        raise InvalidInputError("group was destroyed: make it again, or pass another one")
    if (transport := existing(group)) is not None:
        return transport
    if group is dist.group.WORLD and group.size() == 1:
        job.check_alone(
            "the default process group of torch.distributed has one",
            "Let torch.distributed.init_process_group() read the world size from the environment.",
        )
    timeout, own = timeout_of(group), None
    while True:
        with _lock:
            joining = _joinings.get(group)
            if joining is None or joining.error is not None:
                joining = _joinings[group] = own = _Joining(group, timeout)
            joining.start()
        joining.wait()
        if joining.transport is not None:
            return joining.transport
        # Start another joining if this one began in an earlier call, which was interrupted, and has timed out.
        if joining is own or not isinstance(joining.error, TimeoutError):
            assert joining.error is not None
            try:
                raise joining.error
            finally:
                del joining, own  # the error refers to this frame


class _Joining:
    """The first call on a group: a thread connects the ranks, or times out if a rank does not make the call.

    An interrupt only ends the wait for the thread. The next call finds the transport, or waits again.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        """Prepare to connect the ranks within ``timeout`` seconds."""
        self.transport: ProcessGroupTransport | None = None
        self.error: BaseException | None = None  # why the ranks could not be connected
        self._group: dist.ProcessGroup | None = group  # until the thread has taken it
        self._timeout = timeout
        self._started = False
        self._running = threading.Lock()

    def start(self) -> None:
        """Start the thread unless it was started."""
        if not self._started:
            self._running.acquire()
            _thread.start_new_thread(self._run, ())
            self._started = True

    def wait(self) -> None:
        acquire(self._running)
        self._running.release()

    def end(self, deadline: float) -> None:
        """Wait for the end of the thread until ``deadline``."""
        if self._started and self._running.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            self._running.release()

    def _run(self) -> None:
        group, self._group = self._group, None
        assert group is not None
        try:
            self.transport = _connect(group, self._timeout)
        except BaseException as error:
            self.error = error.with_traceback(None)
        finally:
            self._running.release()


def _connect(group: dist.ProcessGroup, timeout: float) -> ProcessGroupTransport:
    rank, size = group.rank(), group.size()
    connections = Connections(rank, size, config.max_message_bytes(), config.connections())
    node_ids = [job.node_id()]
    try:
        if size > 1:
            members = _find_members(group, connections, node_ids[0], timeout)
            _join(connections, members, rank, timeout)
            node_ids = [member.node_id for member in members]
    except SparseCommError:
        raise
    except (RuntimeError, OSError, ValueError) as error:  # of the store or the system
        raise TransportError(f"rank {rank} cannot connect to the other ranks of its group: {error}") from error
    transport = ProcessGroupTransport(group, connections, job.number_nodes(node_ids))
    weakref.finalize(group, transport.close)  # also when the interpreter exits
    return transport


class _Member(NamedTuple):
    address: str
    port: int
    token: bytes
    node_id: bytes


def _find_members(group: dist.ProcessGroup, connections: Connections, node_id: bytes, timeout: float) -> list[_Member]:
    """Listen for connections, rendezvous with the other ranks, and return the members ordered by rank."""
    token, address = os.urandom(_connections.TOKEN_BYTES), own_address()
    port = connections.listen(address, token)
    store = dist.distributed_c10d._get_process_group_store(group)
    clone = partial(_clone, store) if hasattr(store, "clone") else None  # missing in older versions of torch
    record = f"{_VERSION} {address} {port} {token.hex()} {node_id.hex()}"
    records = rendezvous(
        PrefixStore(_PREFIX, store), group.rank(), group.size(), timeout, token.hex(), record, _exiting.is_set, clone
    )
    members = []
    for rank, line in enumerate(records):
        version, *fields = line.split()
        if version != _VERSION:
            raise ValueError(f"rank {rank} has another version of sparsecomm: install the same version on all ranks")
        address, number, token_text, node_text = fields
        members.append(_Member(address, int(number), bytes.fromhex(token_text), bytes.fromhex(node_text)))
    return members


def _clone(store: Any) -> Any:
    return PrefixStore(_PREFIX, store.clone())


def _join(connections: Connections, members: list[_Member], rank: int, timeout: float) -> None:
    others = [other for other in range(len(members)) if other != rank]
    for other in others:
        connections.set_peer(other, members[other].address, members[other].port, members[other].token)
    connections.start(max(timeout, _MIN_SILENCE))
    be_prompt(connections.thread_id)
    deadline = time.monotonic() + timeout
    while not _exiting.is_set():
        if connections.join(min(_POLL, deadline - time.monotonic())):
            return
        if time.monotonic() >= deadline or any(map(connections.failure, others)):
            break
    for other in others:
        if reason := connections.failure(other):
            raise TransportError(
                f"rank {rank} cannot connect to rank {other} at {members[other].address}, port {members[other].port}: "
                f"{reason}. {_ADVICE}"
            )
    missing = [other for other in others if not connections.is_connected(other)]
    raise TimeoutError(
        f"rank {rank} at {members[rank].address} waited {timeout:g} s for connections with {format_ranks(missing)}, at "
        f"{', '.join(members[other].address for other in missing[:8])}. {_ADVICE}"
    )


def own_address() -> str:
    """Return the address at which other ranks reach this machine, chosen as gloo does.

    This is the address of the interface ``GLOO_SOCKET_IFNAME`` if it is set, else an address of this host to which its
    host name resolves, else 127.0.0.1, which only ranks on this machine can reach.

    Raises:
        TransportError: there is no such interface, or it has no address.
    """
    if name := os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0].strip():
        return _address_of_interface(name)
    try:
        addresses = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        addresses = []
    for family, _, _, _, address in addresses:
        with socket.socket(family, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.bind((str(address[0]), 0))
            return str(address[0])
    return "127.0.0.1"


def _address_of_interface(name: str) -> str:
    if (address := job.ipv4_address(name)) is not None:
        return address
    for line in _IPV6.read_text().splitlines() if _IPV6.exists() else []:
        address, _, _, scope, _, interface = line.split()
        if interface == name:
            return str(IPv6Address(bytes.fromhex(address))) + (f"%{name}" if scope == "20" else "")
    known = ", ".join(sorted(interface for _, interface in socket.if_nameindex()))
    raise TransportError(
        f"GLOO_SOCKET_IFNAME={os.environ['GLOO_SOCKET_IFNAME']!r}: there is no network interface {name!r} with an "
        f"address on {socket.gethostname()}; expected one of {known}"
    )
