"""Random histories of a publisher and its subscribers.

The publisher crashes, restarts, and publishes other weights. Files are lost, cut, damaged, or become visible late, and
programs write to the subscribers' tensors. After every update the tensors must equal the version whose step it
returned, or be untouched. The update must have reached the newest version to which intact files lead.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sparsecomm.errors import InvalidInputError, PatchError
from sparsecomm.patches import Folder, Publisher, Source, Subscriber
from tests.patches.faults import CrashError, failing

MANIFEST = "versions.json"
KINDS = (
    {"a": ((20, 17), np.float32), "b": ((9,), np.uint8), "c": ((), np.float64)},
    {"a": ((20, 17), np.float16), "c": ((3, 0), np.float64)},
)
Arrays = Mapping[str, np.ndarray]


def content(tensors: Arrays) -> tuple[Any, ...]:
    return tuple((name, x.shape, x.dtype.name, x.tobytes()) for name, x in sorted(tensors.items()))


def filled(kind: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {name: np.array(rng.normal(0, 50, shape)).astype(dtype) for name, (shape, dtype) in KINDS[kind].items()}


class View(Source):
    """A source that sees some files late, and may see an earlier list of versions."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.hidden = folder, set[str]()
        self.old_manifest: bytes | None = None
        self.meanwhile: Any = None  # called once, before the next file other than the list of versions is read
        self.files: list[BinaryIO] = []

    def read(self, name: str) -> bytes | None:
        if name == MANIFEST and self.old_manifest is not None:
            return self.old_manifest
        path = self.folder / name
        return None if name in self.hidden or not path.exists() else path.read_bytes()

    def fetch(self, name: str, max_bytes: int) -> BinaryIO:
        if self.meanwhile is not None and name != MANIFEST:
            call, self.meanwhile = self.meanwhile, None
            call()
        if name in self.hidden:
            raise FileNotFoundError(name)
        old = name == MANIFEST and self.old_manifest is not None
        file = BytesIO(self.old_manifest) if old else Folder(self.folder).fetch(name, max_bytes)
        self.files.append(file)
        return file

    def finish(self) -> None:
        assert all(file.closed for file in self.files)
        self.files.clear()


class Follower:
    """A subscriber, and what the test knows about it."""

    def __init__(self, folder: Path, kind: int, tensors: dict[str, np.ndarray], *, in_place: bool) -> None:
        self.view, self.kind, self.in_place = View(folder), kind, in_place
        self.subscriber = Subscriber(tensors, self.view, in_place=in_place)
        self.changed_behind = False
        self.returned: list[tuple[Arrays, tuple[Any, ...]]] = []  # dictionaries, and the contents that they must keep


class History:
    """One history, determined by a seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random, self.rng = random.Random(seed), np.random.default_rng(seed)
        self.folder, self.kind = folder, 0
        self.weights = filled(0, self.rng)
        self.steps: dict[int, tuple[Any, ...]] = {}  # what was published under each step
        self.of_id: dict[str, tuple[Any, ...]] = {}  # the weights of each version
        self.intact: dict[str, bytes] = {}  # files as they were published
        self.manifests = [b""]
        self.manifest_damaged = False
        self.publisher: Publisher | None = None
        self.followers = [self.follower() for _ in range(3)]

    def follower(self) -> Follower:
        tensors = filled(self.kind, self.rng)
        if self.random.random() < 0.5:
            for name, x in self.weights.items():
                tensors[name][...] = x
        return Follower(self.folder, self.kind, tensors, in_place=self.random.random() < 0.6)

    def play(self, length: int) -> None:
        actions = {
            self.publish: 8,
            self.update: 12,
            self.restart: 1,
            self.crash: 1.5,
            self.damage: 3,
            self.heal: 1.5,
            self.show_late: 1.5,
            self.write_behind: 0.7,
            self.join: 0.5,
        }
        try:
            for action in self.random.choices(list(actions), list(actions.values()), k=length):
                action()
            self.heal()
            for follower in self.followers:
                self.update(follower)
        finally:
            self.close()

    def close(self) -> None:
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None

    # The publisher.

    def train(self) -> None:
        """Change a few weights, all or none, or return to an earlier version."""
        choice = self.random.random()
        earlier = [weights for weights in self.steps.values() if self.fits(weights, self.kind)]
        if choice < 0.1 and earlier:
            for name, _, _, data in self.random.choice(earlier):
                self.weights[name][...] = np.frombuffer(data, self.weights[name].dtype).reshape(
                    self.weights[name].shape
                )
        elif choice < 0.15:
            for name, x in filled(self.kind, self.rng).items():
                self.weights[name][...] = x
        elif choice < 0.9:
            for x in self.weights.values():
                flat = x.reshape(-1)
                flat[self.rng.random(x.size) < self.random.choice([0.01, 0.05, 0.5])] = self.rng.integers(1, 99)

    @staticmethod
    def fits(weights: tuple[Any, ...], kind: int) -> bool:
        expected = [(name, shape, np.dtype(dtype).name) for name, (shape, dtype) in sorted(KINDS[kind].items())]
        return [part[:3] for part in weights] == expected

    def start(self) -> Publisher:
        if self.publisher is None:
            every = self.random.choice([1, 2, 5, 100])
            self.publisher = Publisher(self.weights, self.folder, anchor_every=every)
        return self.publisher

    def publish(self) -> None:
        publisher = self.start()
        self.train()
        step = self.random.choice([n for n in range(len(self.steps) + 9) if n not in self.steps])
        self.steps[step] = content(self.weights)
        try:
            if self.random.random() < 0.15:
                future = publisher.publish_in_background(step)
                self.train()
                future.result()
            else:
                publisher.publish(step)
        except InvalidInputError:
            assert self.manifest_damaged
            del self.steps[step]
            self.close()
        else:
            self.note()
            for version in json.loads(self.manifests[-1])["versions"]:
                for file in filter(None, version[4:6]):
                    assert file[0] in self.intact, "a version names a file that was never written"
            names = {path.name for path in self.folder.iterdir()}
            assert not [name for name in names if name.endswith(".part")]

    def manifest(self) -> bytes:
        path = self.folder / MANIFEST
        return path.read_bytes() if path.exists() else b""

    def note(self) -> None:
        """Remember the new list of versions, and the newest version's files."""
        manifest = self.manifest()
        self.manifests.append(manifest)
        self.manifest_damaged = False
        *_, newest = json.loads(manifest)["versions"]
        self.of_id[newest[2]] = self.steps[newest[1]]
        for file in filter(None, newest[4:6]):
            self.intact[file[0]] = (self.folder / file[0]).read_bytes()
            assert len(self.intact[file[0]]) == file[1]

    def restart(self) -> None:
        self.close()
        if self.random.random() < 0.2:
            self.kind = self.random.randrange(len(KINDS))
            self.weights = filled(self.kind, self.rng)
        elif self.random.random() < 0.3:
            self.train()

    def crash(self) -> None:
        publisher = self.start()
        self.train()
        step = len(self.steps) + 10
        self.steps[step] = content(self.weights)
        is_crash = self.random.random() < 0.7
        before = self.manifest()
        try:
            with failing(self.random.randrange(14), crash=is_crash, after=self.random.random() < 0.5):
                publisher.publish(step)
        except InvalidInputError:
            assert self.manifest_damaged
            is_crash = True
        except (CrashError, OSError):
            pass
        if self.manifest() != before:
            self.note()
        if is_crash:
            self.close()

    # Files.

    def damage(self) -> None:
        paths = [path for path in self.folder.iterdir() if not path.name.startswith(".")]
        if self.random.random() < 0.9:
            paths = [path for path in paths if path.name != MANIFEST]
        if not paths:
            return
        path = self.random.choice(sorted(paths))
        data = bytearray(path.read_bytes())
        self.manifest_damaged |= path.name == MANIFEST
        choice = self.random.random()
        if choice < 0.3:
            path.unlink()
        elif choice < 0.5:
            path.write_bytes(data[: self.random.randrange(len(data) + 1)])
        elif choice < 0.55:
            path.write_bytes(data + self.random.randbytes(3))
        elif choice < 0.65 and path.name != MANIFEST:  # another version's file
            path.write_bytes(
                self.random.choice([b"", *(self.intact[n] for n in self.intact if n[-3:] == path.name[-3:])])
            )
        elif data and path.name != MANIFEST:  # the list has no checksum
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
            path.write_bytes(data)

    def heal(self) -> None:
        if self.manifest_damaged:
            self.close()  # a running publisher would expect the damaged list
        if self.manifests[-1]:
            (self.folder / MANIFEST).write_bytes(self.manifests[-1])
            self.manifest_damaged = False
            for version in json.loads(self.manifests[-1])["versions"]:
                for file in filter(None, version[4:6]):
                    (self.folder / file[0]).write_bytes(self.intact[file[0]])
        for follower in self.followers:
            follower.view.hidden.clear()
            follower.view.old_manifest = None

    def show_late(self) -> None:
        view = self.random.choice(self.followers).view
        names = sorted(path.name for path in self.folder.glob("v0*"))
        view.hidden = {name for name in names[-6:] if self.random.random() < 0.4}
        view.old_manifest = self.random.choice([None, *filter(None, self.manifests[-5:])])

    # Subscribers.

    def join(self) -> None:
        self.followers[self.random.randrange(3)] = self.follower()

    def write_behind(self) -> None:
        follower = self.random.choice(self.followers)
        x = follower.subscriber.tensors["a"]
        if follower.in_place:
            x[self.random.randrange(len(x))] += 1
            follower.changed_behind = True

    def expected(self, view: View, at: tuple[Any, ...]) -> tuple[Any, set[Any]] | None:
        """Return the newest version that intact files lead to, and all weights they lead to; None without a list."""
        data = view.read(MANIFEST)
        try:
            versions = [] if data is None else json.loads(data)["versions"]
        except ValueError:
            return None
        reached: set[Any] = {at}
        more = True
        while more:
            more = False
            for _, _, weights, before, *files in versions:
                patch, anchor = (file and view.read(file[0]) == self.intact[file[0]] for file in files)
                after = self.of_id[weights]
                if after not in reached and (anchor or (patch and self.of_id[before] in reached)):
                    reached.add(after)
                    more = True
        return next((version for version in reversed(versions) if self.of_id[version[2]] in reached), None), reached

    def update(self, follower: Follower | None = None) -> None:
        follower = follower or self.random.choice(self.followers)
        subscriber, view = follower.subscriber, follower.view
        before = content(subscriber.tensors)
        expected = self.expected(view, before)
        races = self.random.random() < 0.05 and self.publisher is not None
        view.meanwhile = self.publish if races else None
        follower.returned.append((subscriber.tensors, before))
        error = None
        try:
            step = subscriber.update()
        except (PatchError, InvalidInputError) as raised:
            error, step = raised, subscriber.step
            view.files.clear()
        view.meanwhile = None
        after = content(subscriber.tensors)
        untouched = after == before and follower.changed_behind
        if step is None:
            assert after == before, "an update that returned no step has changed tensors"
        elif not untouched:
            follower.changed_behind = False
            assert after == self.steps[step], f"the tensors are not those of step {step}"
        if not follower.in_place:
            assert all(content(tensors) == as_before for tensors, as_before in follower.returned)
        else:
            follower.returned.clear()
        if races or untouched:
            return
        if isinstance(error, PatchError):
            assert expected is None, f"the list of versions is intact: {error}"
        elif isinstance(error, InvalidInputError):
            versions = json.loads(view.read(MANIFEST) or b"{}")["versions"]
            assert not all(self.fits(self.of_id[version[2]], follower.kind) for version in versions), error
        else:
            assert expected is not None
            versions = json.loads(view.read(MANIFEST) or b'{"versions": []}')["versions"]
            numbers = [version[0] for version in versions if self.of_id[version[2]] == after]
            if expected[0] is None or (numbers and numbers[-1] >= expected[0][0]):
                assert not numbers or step == dict(version[:2] for version in versions)[numbers[-1]], "an older step"
            else:  # weights that were published twice may lead to a damaged file
                again = self.expected(view, after)
                assert again is not None
                assert self.of_id[expected[0][2]] not in again[1], "a newer version can be reached"
                assert len(set(map(str, self.steps.values()))) < len(self.steps)


def play(seed: int, length: int = 30) -> None:
    """Play a history in a new folder, in memory if possible: disks are slow to make files durable."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        try:
            History(seed, Path(folder)).play(length)
        except Exception as error:
            raise AssertionError(f"play({seed}): {error}") from error
