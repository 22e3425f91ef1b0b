"""Where a `Subscriber` reads published files: `Folder`, `Http`, or any other `Source`."""

from __future__ import annotations

import http.client
import os
import tempfile
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from pathlib import Path
from typing import BinaryIO, cast

from sparsecomm.checks import quote, to_float, to_int
from sparsecomm.errors import InvalidInputError, log
from sparsecomm.patches.versions import MANIFEST

_IN_MEMORY = 1 << 26  # bytes; the rest of a longer file is on the disk
_CHUNK = 1 << 18
_MISSING = (403, 404, 410)  # HTTP status codes of files that do not exist; buckets send 403 if listing is not allowed


class Source(ABC):
    """A place from which to read published files. For other storage, derive a class that defines `fetch`."""

    @abstractmethod
    def fetch(self, name: str, max_bytes: int) -> BinaryIO:
        """Return a file, open for reading.

        Raises:
            OSError: the file cannot be read, or has more than ``max_bytes`` bytes.
        """

    def begin(self, weights: str) -> None:  # noqa: B027
        """Called at the beginning of an update, with the identity of the weights in the tensors."""

    def finish(self) -> None:  # noqa: B027
        """Called at the end of an update, unless an interrupt or a `TransportError` has ended it."""


class Folder(Source):
    """A folder, which may be shared between machines, or a mounted bucket."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Read from a folder.

        Raises:
            InvalidInputError: ``folder`` is not a path.
        """
        self._folder = path_of(folder)

    def fetch(self, name: str, max_bytes: int) -> BinaryIO:
        """See `Source.fetch`."""
        file = cast(BinaryIO, open(self._folder / name, "rb"))  # noqa: SIM115  # the caller closes it
        if (size := os.fstat(file.fileno()).st_size) > max_bytes:
            file.close()
            raise OSError(f"{self._folder / name} has {size} bytes; expected at most {max_bytes}")
        return file


class Http(Source):
    """A folder behind a static file server, over HTTP or HTTPS. An interrupted download continues where it stopped."""

    def __init__(self, url: str, *, timeout: float = 30.0, retries: int = 5) -> None:
        """Read from a URL.

        Args:
            url: of the folder.
            timeout: seconds to wait for the server's next bytes.
            retries: number of attempts after the first, with growing pauses of up to 5 seconds.

        Raises:
            InvalidInputError: an argument is invalid.
        """
        if not isinstance(url, str) or not url.startswith(("http://", "https://")):
            raise InvalidInputError(f"url={quote(url)}: expected http://... or https://...")
        if not 0 < to_float(timeout) < 1e6:
            raise InvalidInputError(f"timeout={quote(timeout)}: expected seconds, above 0")
        if (count := to_int(retries)) is None:
            raise InvalidInputError(f"retries={quote(retries)}: expected a number, at least 0")
        self._url, self._timeout, self._retries = url.rstrip("/"), float(timeout), count

    def fetch(self, name: str, max_bytes: int) -> BinaryIO:
        """See `Source.fetch`."""
        file = temporary_file()  # the caller closes it
        for attempt in range(self._retries + 1):
            try:
                self._download(f"{self._url}/{name}", file, max_bytes)
                file.seek(0)
                return file
            except (OSError, ValueError, http.client.HTTPException) as failure:  # ValueError: redirected to a non-URL
                error, status = failure, None
            if isinstance(error, urllib.error.HTTPError):
                status = error.code
                error.close()
            if status == 416 or name == MANIFEST:  # no bytes are left to download, or the list may change: begin again
                file.truncate(0)
            if status in _MISSING or isinstance(error, _TooLongError) or attempt == self._retries:
                break
            log.info("%s/%s: %s; trying again", self._url, name, error)
            time.sleep(min(0.1 * 2**attempt, 5.0))
        file.close()
        raise (FileNotFoundError if status in _MISSING else OSError)(f"{self._url}/{name}: {error}")

    def _download(self, url: str, file: BinaryIO, max_bytes: int) -> None:
        """Download the rest of a file, or all of it if the server does not send parts."""
        begin = file.seek(0, os.SEEK_END)
        request = urllib.request.Request(url, headers={"Range": f"bytes={begin}-"} if begin else {})
        with urllib.request.urlopen(request, timeout=self._timeout) as response:
            content_range = response.headers["Content-Range"] or ""
            is_part = response.status == 206 and content_range.startswith(f"bytes {begin}-")
            if not is_part:
                begin = file.seek(0)
                file.truncate()
                if response.status == 206:
                    raise OSError(f"the server sent bytes that were not requested: {content_range}")
            at, length = begin, response.length
            while chunk := response.read(_CHUNK):
                at += file.write(chunk)
                if at > max_bytes:
                    raise _TooLongError(f"more than the expected {max_bytes} bytes")
            if length is not None and at != begin + length:
                raise OSError(f"the connection broke after {at} of {begin + length} bytes")


class _TooLongError(OSError):
    pass


def temporary_file() -> BinaryIO:
    """Return a new temporary file, which stays in memory while it is short."""
    return cast(BinaryIO, tempfile.SpooledTemporaryFile(_IN_MEMORY))


def path_of(folder: object) -> Path:
    """Return the path of a folder that a user has passed."""
    try:
        path = Path(folder)  # type: ignore[arg-type]
        os.fsencode(path)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"folder={quote(folder)}: expected a path") from error
    if "://" in str(folder):
        raise InvalidInputError(f"folder={quote(folder)}: expected a path, not a URL; mount the bucket as a folder")
    return path


def source_of(source: object) -> Source:
    """Return the source that a user has passed."""
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return Http(source)
    if isinstance(source, (str, os.PathLike)):
        return Folder(source)
    if isinstance(source, Source):
        return source
    raise InvalidInputError(
        f"source={quote(source)}: expected the folder with {MANIFEST}, its URL (http:// or https://), or a Source"
    )
