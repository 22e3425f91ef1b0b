"""`Publisher`: writes versions of weights to a folder, as patches and anchors."""

from __future__ import annotations

import os
import re
import secrets
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from sparsecomm.checks import check_choice, quote, to_int
from sparsecomm.errors import InvalidInputError, PatchError
from sparsecomm.patches.codec import diff_weights, read_patch, version_of_weights
from sparsecomm.patches.elements import Weight, same_kinds, updated, weights_of
from sparsecomm.patches.safetensors import check_names_and_dtypes, compressed
from sparsecomm.patches.sources import path_of
from sparsecomm.patches.versions import MANIFEST, File, Version, dump, parse
from sparsecomm.signals import deferred
from sparsecomm.tensors import interop

_KEPT_ANCHORS = 2  # the newest one and, in case it is damaged or still being read, the one before
_PATCH, _ANCHOR = ".patch", ".safetensors.gz"
_VERSION = r"v\d{9,}-[0-9a-f]{8}(\.patch|\.safetensors\.gz)"
_WRITTEN = re.compile(rf"{_VERSION}|\.({_VERSION}|versions\.json)-[0-9a-f]{{8}}\.part")  # by a publisher


class Published(NamedTuple):
    """What `Publisher.publish` has written.

    Attributes:
        version: number of the version.
        step: as passed to `publish`.
        patch_bytes: size of the patch; 0 if there is none.
        anchor_bytes: size of the anchor; 0 if there is none.
        changed: number of elements that differ from the previous version; -1 if it is unknown.
    """

    version: int
    step: int
    patch_bytes: int
    anchor_bytes: int
    changed: int


class _Publication(futures.Future[Published]):
    """The future of a background publication. ``asked``: its result or exception has been requested."""

    asked = False

    def result(self, timeout: float | None = None) -> Published:
        self.asked |= futures.wait([self], timeout).done == {self}
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.asked |= futures.wait([self], timeout).done == {self}
        return super().exception(0)


class Publisher:
    """Writes versions of weights to a folder, for every `Subscriber` that reads it.

        publisher = Publisher(model.state_dict(), "/shared/weights")
        for step in range(steps):
            train()
            publisher.publish(step)

    Most versions are patches, which apply to the previous version. The first one, and another every so often, also has
    an anchor: all weights, with which new subscribers begin. An anchor is a safetensors file, compressed by gzip. Files
    get their names, and appear in the list of versions (versions.json), only when they are complete. Only one publisher
    may write to a folder.
    """

    def __init__(
        self,
        tensors: object,
        folder: str | os.PathLike[str],
        *,
        anchor_every: int = 100,
        copy: Literal["device", "host"] = "device",
    ) -> None:
        """Prepare to publish tensors.

        If the tensors equal the newest version in the folder, for example when training resumes from it, the next
        version is a patch; otherwise it is an anchor.

        Args:
            tensors: an array, or a mapping of names to arrays, such as ``model.state_dict()``: contiguous, of any dtype
                of safetensors.
            folder: created if necessary.
            anchor_every: the maximum number of versions from an anchor to the next, at least 1. An anchor comes earlier
                if the patches since the last one add up to more bytes than it.
            copy: where to keep the previous version: on the device of the weights, or in host memory.

        Raises:
            InvalidInputError: an argument cannot be used.
            OSError: the folder cannot be created or read.
        """
        every = to_int(anchor_every, 1)
        if every is None:
            raise InvalidInputError(f"anchor_every={quote(anchor_every)}: expected a number of versions, at least 1")
        check_choice("copy", copy, ("device", "host"))
        self._folder = path_of(folder)
        if not isinstance(tensors, Mapping) and not interop.is_tensor(tensors):
            tensors = interop.named(tensors)  # read an iterator once
        self._tensors, self._every, self._on_host = tensors, every, copy == "host"
        self._running: _Publication | None = None
        self._last: dict[str, Weight] = {}  # copies of the last version
        self._spare: dict[str, Weight] = {}  # for the snapshot of a publication in the background
        weights = weights_of(tensors)
        check_names_and_dtypes(weights)
        self._folder.mkdir(parents=True, exist_ok=True)
        # Lists of versions that may be in the folder. After an error, it may be the old one or the new one.
        self._manifests = [self._read_manifest()]
        with suppress(PatchError):
            versions = parse(self._manifests[0])
            if versions and versions[-1].weights == version_of_weights(weights):
                self._last = updated({}, weights, on_host=self._on_host)

    def publish(self, step: int, tensors: object = None) -> Published:
        """Write the weights as the next version. When the call returns, subscribers can read it.

        Args:
            step: a number for subscribers, at least 0; need not increase.
            tensors: to publish instead of the constructor's, for programs that replace their arrays, as in JAX.

        Raises:
            InvalidInputError: an argument cannot be used, or another publisher has written to the folder.
            OSError: a file cannot be written. The version does not exist; the next one will contain its changes.
        """
        self.wait()
        step, weights = self._check(step, tensors)
        published = self._publish(step, weights)
        self._last = updated(self._last, weights, on_host=self._on_host)
        return published

    def publish_in_background(self, step: int, tensors: object = None) -> futures.Future[Published]:
        """Copy the weights, and write the version in another thread. You can change the weights meanwhile.

        This requires memory for a second copy. If the previous version is still being written, the call waits for it.

        Args:
            step, tensors: as in `publish`.

        Returns:
            a future, which cannot be cancelled. Its ``result()`` raises errors of writing. If you do not call
            ``result()`` or ``exception()``, the next method that you call on the publisher raises them.

        Raises:
            InvalidInputError: an argument cannot be used.
        """
        self.wait()
        step, weights = self._check(step, tensors)
        snapshot = self._spare = updated(self._spare, weights, on_host=self._on_host)
        future = _Publication()
        future.set_running_or_notify_cancel()  # it cannot be cancelled

        def run() -> None:
            try:
                published = self._publish(step, snapshot)
                self._last, self._spare = snapshot, self._last
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(published)

        self._start(threading.Thread(target=run, name="sparsecomm publisher"), future)
        return future

    @deferred
    def _start(self, thread: threading.Thread, future: _Publication) -> None:
        """Start a thread, and remember its future. Signal handlers run only afterwards."""
        thread.start()
        self._running = future

    def wait(self) -> None:
        """Wait for the background publication. Raise its error unless the future has already raised or returned it."""
        if self._running is not None:
            futures.wait([self._running])
            running, self._running = self._running, None
            if not running.asked:
                running.result()

    def close(self) -> None:
        """Wait as `wait` does, and free the copies."""
        try:
            self.wait()
        finally:
            if self._running is None:  # otherwise an interrupt ended the wait, and the thread still uses the copies
                self._last, self._spare = {}, {}

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self, step: object, tensors: object) -> tuple[int, dict[str, Weight]]:
        number = to_int(step)
        if number is None:
            raise InvalidInputError(f"step={quote(step)}: expected a number of at least 0")
        weights = weights_of(self._tensors if tensors is None else tensors)
        check_names_and_dtypes(weights)
        return number, weights

    def _publish(self, step: int, weights: dict[str, Weight]) -> Published:
        """Write the next version, and the list of versions."""
        versions = self._versions()
        last = versions[-1] if versions else Version(0, 0, "")
        patch, changed = b"", -1
        if self._last and same_kinds(self._last, weights):
            patch = diff_weights(self._last, weights)
            described = read_patch(patch)
            after, changed = described.after, described.changed
        if not patch or described.before != last.weights:  # there is no copy of the last version
            patch, after, changed = b"", version_of_weights(weights), -1
        name = f"v{last.number + 1:09}-{after[:8]}"
        patch_file = anchor_file = None
        if after != last.weights:
            if patch:
                patch_file = self._write(name + _PATCH, [patch])
            if not patch or self._needs_anchor(versions, len(patch)):
                anchor_file = self._write(name + _ANCHOR, compressed(weights, {"version": after}))
        before = last.weights if patch_file else ""
        versions.append(Version(last.number + 1, step, after, before, patch_file, anchor_file))
        with_anchor = [i for i, version in enumerate(versions) if version.anchor]
        self._keep(versions[with_anchor[-_KEPT_ANCHORS] if len(with_anchor) >= _KEPT_ANCHORS else 0 :])
        patch_bytes, anchor_bytes = (file.nbytes if file else 0 for file in (patch_file, anchor_file))
        return Published(last.number + 1, step, patch_bytes, anchor_bytes, changed)

    def _needs_anchor(self, versions: Sequence[Version], nbytes: int) -> bool:
        """Return whether a version with a patch of ``nbytes`` bytes needs an anchor, by count or size of patches."""
        for count, version in enumerate(reversed(versions), 1):
            if version.anchor:
                return count >= self._every or nbytes > version.anchor.nbytes
            nbytes += version.patch.nbytes if version.patch else 0
        return True

    def _versions(self) -> list[Version]:
        """Return the versions in the folder. Raise an error if another publisher has changed them."""
        data = self._read_manifest()
        if data not in self._manifests:
            raise InvalidInputError(
                f"another publisher has written to {self._folder} meanwhile; stop one of them, or use two folders"
            )
        self._manifests = [data]
        try:
            return parse(data) if data else []
        except PatchError:  # the new list replaces it
            return []

    def _read_manifest(self) -> bytes:
        try:
            return (self._folder / MANIFEST).read_bytes()
        except FileNotFoundError:
            return b""

    def _keep(self, versions: Sequence[Version]) -> None:
        """Write the list of versions, and delete files that it does not name."""
        manifest = dump(versions)
        self._manifests.append(manifest)
        self._write(MANIFEST, [manifest])
        self._manifests = [manifest]
        names = {file.name for version in versions for file in (version.patch, version.anchor) if file}
        with suppress(OSError):  # the version exists; the next publication tries again
            for path in self._folder.iterdir():
                if path.name not in names and _WRITTEN.fullmatch(path.name):
                    with suppress(OSError):
                        path.unlink()

    def _write(self, name: str, data: Iterable[bytes]) -> File:
        """Write a file, which appears when it is complete."""
        with replacing(self._folder / name) as part, part.open("xb") as file:
            return File(name, sum(file.write(piece) for piece in data))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path. At the end, make the file there durable, and rename it to ``path``."""
    part = path.with_name(f".{path.name}-{secrets.token_hex(4)}.part")
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
