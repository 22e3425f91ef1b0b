"""One job per folder: a job that saves into a folder holds a lock there until it ends.

The lock is a POSIX lock of a small file, which names the job. All ranks of the job share it. The kernel releases it
when a process dies, and child processes do not inherit it, so a job that was killed never blocks its successor.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

from sparsecomm.errors import InvalidInputError

__all__ = ["FILE", "claim", "job_of"]

FILE = ".sparsecomm-job"  # in the folder; its first line is the job's token
_MAX_CLAIMS = 16  # of the folders saved into last: each takes a file descriptor
_PATIENCE = 5.0  # seconds for processes of an earlier job to end
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

_log = logging.getLogger("sparsecomm")
_lock = threading.Lock()
_claims: OrderedDict[str, tuple[int, str]] = OrderedDict()  # by folder: the descriptor and the job's token


def job_of(folder: Path) -> str:
    """Return the token with which this process has claimed a folder, or an empty string."""
    with _lock:
        return _claims.get(_key(folder), (0, ""))[1]


def claim(folder: Path, job: str) -> None:
    """Claim a folder for a job, until this process ends.

    Args:
        folder: that exists.
        job: the job's token, the same on all its ranks: a single word.

    Raises:
        InvalidInputError: another job has claimed the folder.
    """
    with _lock:
        key = _key(folder)
        if key in _claims and not _is_held(folder, *_claims[key]):
            os.close(_claims.pop(key)[0])
        if key in _claims:
            handle, before = _claims[key]
            if before != job:
                _write(handle, job)
            _claims[key] = handle, job
            _claims.move_to_end(key)
            return
        handle = os.open(folder / FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            _acquire(handle, job, folder)
        except BaseException:
            os.close(handle)
            raise
        _claims[key] = handle, job
        if len(_claims) > _MAX_CLAIMS:
            os.close(_claims.popitem(last=False)[1][0])


def _acquire(handle: int, job: str, folder: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            if _locked(handle, fcntl.LOCK_EX):
                _write(handle, job)
                fcntl.lockf(handle, fcntl.LOCK_SH)  # atomic
                return
            if _locked(handle, fcntl.LOCK_SH):
                if _read(handle)[:1] == [job]:
                    return
                fcntl.lockf(handle, fcntl.LOCK_UN)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            _log.warning("%s: this file system has no locks, so a second job in this folder is not noticed", folder)
            return
        if time.monotonic() > deadline:
            _, *holder = [*_read(handle), ""]
            raise InvalidInputError(
                f"another job saves checkpoints into {folder} ({holder[0] or 'unknown process'}); stop that job, or "
                "save into another folder"
            )
        time.sleep(0.05)


def _is_held(folder: Path, handle: int, job: str) -> bool:
    """Return whether this process still holds the lock. It loses it when anything in it opens and closes the file."""
    try:
        there = os.path.samestat(os.fstat(handle), os.stat(folder / FILE))
        return there and _locked(handle, fcntl.LOCK_SH) and _read(handle)[:1] == [job]
    except OSError as error:
        return error.errno in _UNSUPPORTED


def _locked(handle: int, how: int) -> bool:
    """Try to take a lock; return whether it was taken."""
    with suppress(BlockingIOError, PermissionError):
        fcntl.lockf(handle, how | fcntl.LOCK_NB)
        return True
    return False


def _write(handle: int, job: str) -> None:
    text = f"{job}\nprocess {os.getpid()} on {socket.gethostname()}\n".encode()
    os.ftruncate(handle, 0)
    os.pwrite(handle, text, 0)


def _read(handle: int) -> list[str]:
    return os.pread(handle, 4096, 0).decode("utf-8", "replace").splitlines()


def _key(folder: Path) -> str:
    return os.path.realpath(folder)
