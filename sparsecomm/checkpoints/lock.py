"""One job per folder: a job that saves into a folder holds a lock there until its processes end.

The lock is a POSIX lock on a small file, which names the job. All ranks of the job share it. The kernel releases it
when a process dies, so a job that was killed never blocks the next one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sparsecomm.errors import InvalidInputError, log

_FILE = ".sparsecomm-job"  # in the folder; its first line is the job ID
_TIMEOUT = 5.0  # seconds to wait until the processes of an earlier job have ended
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class _Lock(NamedTuple):
    file: int  # the descriptor of the lock file
    job_id: str


_mutex = threading.Lock()
_locks: dict[str, _Lock] = {}  # by the path of the folder


def job_id_of(folder: Path) -> str:
    """Return the job ID of this process's lock on a folder, or "" if this process has not locked the folder."""
    with _mutex:
        lock = _locks.get(os.path.realpath(folder))
        return "" if lock is None else lock.job_id


def acquire(folder: Path, job_id: str) -> None:
    """Lock a folder for a job, until this process ends or the folder is removed."""
    with _mutex:
        for path in [path for path, lock in _locks.items() if not _is_held(path, lock)]:
            os.close(_locks.pop(path).file)
        path = os.path.realpath(folder)
        if path in _locks:
            if _locks[path].job_id != job_id:
                _write(_locks[path].file, job_id)
                _locks[path] = _Lock(_locks[path].file, job_id)
            return
        file = os.open(folder / _FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            _lock(file, job_id, folder)
        except BaseException:
            os.close(file)
            raise
        _locks[path] = _Lock(file, job_id)


def _lock(file: int, job_id: str, folder: Path) -> None:
    deadline = time.monotonic() + _TIMEOUT
    while True:
        try:
            if _try_lock(file, fcntl.LOCK_EX):
                _write(file, job_id)
                fcntl.lockf(file, fcntl.LOCK_SH)  # converts the lock atomically
                return
            if _try_lock(file, fcntl.LOCK_SH):
                if _read(file)[:1] == [job_id]:
                    return
                fcntl.lockf(file, fcntl.LOCK_UN)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            log.warning("%s: this file system has no locks; a second job that saves there is not noticed", folder)
            return
        if time.monotonic() > deadline:
            holder = "".join(_read(file)[1:2]) or "unknown process"
            raise InvalidInputError(
                f"another job saves checkpoints into {folder} ({holder}); stop that job, or save into another folder"
            )
        time.sleep(0.05)


def _is_held(path: str, lock: _Lock) -> bool:
    """Return whether this process still holds a lock that it acquired earlier.

    The kernel releases a POSIX lock as soon as the process closes any descriptor of the file. The file may also have
    been deleted, replaced, or locked by another job.
    """
    try:
        same_file = os.path.samestat(os.fstat(lock.file), os.stat(os.path.join(path, _FILE)))
        return same_file and _try_lock(lock.file, fcntl.LOCK_SH) and _read(lock.file)[:1] == [lock.job_id]
    except OSError as error:
        return error.errno in _UNSUPPORTED


def _try_lock(file: int, kind: int) -> bool:
    with suppress(BlockingIOError, PermissionError):
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
        return True
    return False


def _write(file: int, job_id: str) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, f"{job_id}\nprocess {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _read(file: int) -> list[str]:
    return os.pread(file, 4096, 0).decode("utf-8", "replace").splitlines()
