"""`Ranks`: one rank of a job reads published files, and sends them to the others."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from typing import BinaryIO

import numpy as np

from sparsecomm.calls.collectives import WordsGather
from sparsecomm.calls.label import Label
from sparsecomm.calls.queue import queue_of
from sparsecomm.checks import quote, to_int
from sparsecomm.errors import InvalidInputError, PatchError, describe, log
from sparsecomm.patches.sources import Source, source_of, temporary_file
from sparsecomm.patches.versions import MANIFEST, parse, way
from sparsecomm.transport import Comm, transport_of

_QUESTION = struct.Struct("<Q16s256s")  # maximum size, the version that the rank holds, and the file's name or ""
_CHUNK = 1 << 24


class Ranks(Source):
    """A `Source` for all ranks of a job: one rank reads the files, and sends them to the others.

    `Subscriber.update` is then collective: all ranks call it together. They may hold different versions. No other call
    on the communicator may be in flight meanwhile.
    """

    def __init__(self, source: object, *, comm: Comm = None, root: int = 0) -> None:
        """Read from a source on one rank.

        Args:
            source: as in `Subscriber`; ignored on all ranks except ``root``.
            comm: as in `sparsecomm.sparse_allreduce`.
            root: the rank that reads.

        Raises:
            InvalidInputError: an argument is invalid.
        """
        transport = transport_of(comm)
        number = to_int(root, 0, transport.size - 1)
        if number is None:
            raise InvalidInputError(f"root={quote(root)}: expected a rank from 0 to {transport.size - 1}")
        self._transport, self._root = transport, number
        self._source: Source | None = source_of(source) if transport.rank == number else None
        self._ahead: dict[str, BinaryIO | OSError] = {}  # files that were sent before this rank asked
        self.begin("")

    def begin(self, weights: str) -> None:
        """See `Source.begin`."""
        self._holds = bytes.fromhex(weights)
        self._has_list = False  # the list of versions was sent in this update
        for file in self._ahead.values():
            _close(file)
        self._ahead.clear()

    def fetch(self, name: str, max_bytes: int) -> BinaryIO:
        """See `Source.fetch`."""
        file = self._ahead.pop(name, None) or self._round(name, max_bytes)[name]
        if isinstance(file, OSError):
            raise file
        return file

    def finish(self) -> None:
        """Help to distribute files until all ranks have finished."""
        while self._round("", 0):
            pass
        self.begin("")

    def _round(self, name: str, max_bytes: int) -> dict[str, BinaryIO | OSError]:
        """Distribute the files that ranks ask for, and return them by name. All except ``name`` are closed.

        After the list of versions, the root also sends the files that the ranks will need next, to save a round trip.
        """
        words = np.frombuffer(_QUESTION.pack(max_bytes, self._holds, name.encode()), "<u8").tolist()
        gather = WordsGather(self._transport, words, Label.of(("call", "files of a version")))
        queue_of(self._transport).call(gather)
        answers = _QUESTION.iter_unpack(np.array(gather.words, "<u8").tobytes())
        questions = [(limit, weights, asked.rstrip(b"\0").decode()) for limit, weights, asked in answers]
        files = {}
        for other, limit in {asked: limit for limit, _, asked in questions if asked}.items():
            files[other] = file = self._distribute(other, limit)
            if other == MANIFEST and not isinstance(file, OSError) and not self._has_list:
                self._has_list = True
                self._send_ahead(file, [weights.hex() for _, weights, asked in questions if asked])
            if other != name:
                _close(file)
        return files

    def _send_ahead(self, manifest: BinaryIO, weights_by_rank: list[str]) -> None:
        """Distribute the files that lead the ranks to the newest version."""
        links: dict[str, int] = {}
        with suppress(PatchError):  # the ranks find the same error in the list of versions
            versions = parse(manifest.read())
            for weights in weights_by_rank:
                links |= {link.file.name: link.file.nbytes for link in way(versions, weights, ())[1]}
        manifest.seek(0)
        for name, nbytes in links.items():
            self._ahead[name] = self._distribute(name, nbytes)

    def _distribute(self, name: str, max_bytes: int) -> BinaryIO | OSError:
        """Send a file, or the error, from the root to all ranks. Errors on one rank must not stop it: others wait."""
        file: BinaryIO | None = None
        size, problem, is_missing = 0, b"", False
        if self._source is not None:
            try:
                file = self._source.fetch(name, max_bytes)
                size = file.seek(0, os.SEEK_END)
                file.seek(0)
            except Exception as error:
                problem, is_missing = describe(error).encode(errors="replace"), isinstance(error, FileNotFoundError)
        header = self._broadcast(np.array([size, len(problem), is_missing], "<u8").tobytes())
        size, length, is_missing = np.frombuffer(header, "<u8").tolist()
        if length:
            _close(file)
            return (FileNotFoundError if is_missing else OSError)(self._broadcast(problem.ljust(length)).decode())
        # The root also returns the bytes that it sent, so that all ranks see the same list of versions.
        received, failure = temporary_file(), None
        for begin in range(0, size, _CHUNK):
            chunk = self._broadcast(_read(file, min(_CHUNK, size - begin)))
            try:
                received.write(chunk)
                received.flush()
            except OSError as error:  # the disk is full
                failure = error
        _close(file)
        if failure is not None:
            _close(received)
            return failure
        received.seek(0)
        return received

    def _broadcast(self, data: bytes) -> bytes:
        shared = np.frombuffer(data, np.uint8).copy()
        self._transport.broadcast(shared, self._root)
        return bytes(shared)


def _read(file: BinaryIO | None, count: int) -> bytes:
    """Return the next bytes of a file, or zeros if reading fails: the ranks detect them as damage."""
    try:
        data = b"" if file is None else file.read(count)
    except Exception as error:
        log.warning("a published file cannot be read: %s", describe(error))
        data = b""
    return data.ljust(count, b"\0")


def _close(file: BinaryIO | OSError | None) -> None:
    if not isinstance(file, OSError | None):
        with suppress(OSError):
            file.close()
