"""`Ranks` on simulated ranks: one reads, all get the newest version or an error, and no rank hangs."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any, BinaryIO

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.errors import InvalidInputError, PatchError
from sparsecomm.patches import Folder, Publisher, Ranks, Subscriber
from sparsecomm.patches.codec import MAGIC
from sparsecomm.transport.simulated import SimulatedTransport
from tests.ranks import errors, run

P = 4


@pytest.fixture
def versions(tmp_path: Path) -> list[np.ndarray]:
    x, arrays = np.random.default_rng(1).standard_normal(3000).astype(np.float32), []
    with Publisher({"x": x}, tmp_path, anchor_every=3) as publisher:
        for step in range(6):
            x[step::50] += 1
            publisher.publish(step)
            arrays.append(x.copy())
    return arrays


class Counting(Folder):
    """A folder that counts what is read, and whose files may fail."""

    def __init__(self, folder: Path, fault: Callable[[str, BinaryIO], BinaryIO] = lambda name, file: file) -> None:
        super().__init__(folder)
        self.names: list[str] = []
        self._fault = fault

    def fetch(self, name: str, max_bytes: int) -> BinaryIO:
        self.names.append(name)
        return self._fault(name, super().fetch(name, max_bytes))


@pytest.mark.parametrize("root", [0, 2])
def test_ranks_at_different_versions_get_the_newest(root: int, tmp_path: Path, versions: list[np.ndarray]) -> None:
    source = Counting(tmp_path)

    def program(transport: SimulatedTransport) -> Any:
        rank = transport.rank
        x = versions[rank + 1].copy() if rank else np.zeros(3000, np.float32)
        if rank == 3:
            x[5] = 0  # no version's weights
        own_source = source if rank == root else None
        subscriber = Subscriber({"x": x}, Ranks(own_source, comm=transport, root=root), in_place=rank != 1)
        steps = [subscriber.update() for _ in range(3)]
        return steps, subscriber.tensors["x"].tobytes(), subscriber.problems

    assert run(P, program) == [([5, 5, 5], versions[5].tobytes(), [])] * P
    assert len(source.names) < 12


def test_an_error_of_the_transport_ends_an_update(tmp_path: Path, versions: list[np.ndarray]) -> None:
    """A timeout is an OSError, but must not be treated as an error of a file."""

    def program(transport: SimulatedTransport) -> None:
        subscriber = Subscriber({"x": np.zeros(3000, np.float32)}, Ranks(tmp_path, comm=transport))
        if transport.rank != 1:
            subscriber.update()

    assert {type(error) for rank, error in enumerate(errors(P, program)) if rank != 1} <= {
        sc.TimeoutError,
        sc.RankFailedError,
        sc.TransportError,
    }


def shrunk(name: str, file: BinaryIO) -> BinaryIO:
    """Act as if the file were cut while it is read."""

    class Shrinking(BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            return super().read(size)[:50]

    with file:
        return Shrinking(file.read())


def broken(name: str, file: BinaryIO) -> BinaryIO:
    class Broken(BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError("/weights\udcff: the disk is broken")  # a path that is not UTF-8

    with file:
        return Broken(file.read())


def no_os_error(name: str, file: BinaryIO) -> BinaryIO:
    file.close()
    raise ZeroDivisionError("a fault of this source")


def lost(name: str, file: BinaryIO) -> BinaryIO:
    file.close()
    raise FileNotFoundError(name)


@pytest.mark.parametrize("fault", [shrunk, broken, no_os_error, lost])
@pytest.mark.parametrize("suffix", ["versions.json", ".gz", ".patch"])
def test_faults_of_the_source_reach_all_ranks(
    suffix: str, fault: Any, tmp_path: Path, versions: list[np.ndarray]
) -> None:
    def program(transport: SimulatedTransport) -> Any:
        source = Counting(tmp_path, lambda name, file: fault(name, file) if name.endswith(suffix) else file)
        x = versions[4].copy() if transport.rank else np.zeros(3000, np.float32)
        subscriber = Subscriber({"x": x}, Ranks(source, comm=transport))
        try:
            step = subscriber.update()
        except PatchError:
            step = subscriber.step
        return step, x

    for rank, (step, x) in enumerate(run(P, program)):
        expected = {".gz": 5 if rank else None, ".patch": 4 if rank else 3}.get(suffix)
        assert step == expected
        assert (x == (versions[step] if step is not None else versions[4] if rank else 0)).all()


def test_a_rank_without_room_for_a_file_does_not_stop_the_others(
    tmp_path: Path, versions: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Temporary(SpooledTemporaryFile[bytes]):
        def write(self, data: Any) -> int:
            rank = sys._getframe(1).f_locals["self"]._transport.rank
            if rank == 2 and bytes(data[:10]) == MAGIC[:10]:
                raise OSError("No space left on device")
            return super().write(data)

    monkeypatch.setattr(tempfile, "SpooledTemporaryFile", Temporary)

    def program(transport: SimulatedTransport) -> Any:
        subscriber = Subscriber({"x": np.zeros(3000, np.float32)}, Ranks(tmp_path, comm=transport))
        return subscriber.update(), len(subscriber.problems)

    (at_0, _), _, (at_2, problems), _ = run(P, program)
    assert (at_0, at_2) == (5, 3)
    assert problems


def test_a_rank_whose_tensors_differ_raises_and_the_others_go_on(tmp_path: Path, versions: list[np.ndarray]) -> None:
    got: dict[int, int | None] = {}

    def program(transport: SimulatedTransport) -> None:
        x = np.zeros(3000 if transport.rank != 1 else 7, np.float32)
        got[transport.rank] = Subscriber({"x": x}, Ranks(tmp_path, comm=transport)).update()

    raised = errors(P, program)
    assert [type(error) for error in raised] == [type(None), InvalidInputError, type(None), type(None)]
    assert got == {0: 5, 2: 5, 3: 5}


def test_arguments_are_checked() -> None:
    for options, match in (({"root": 4}, "root=4"), ({"root": "x"}, "root='x'"), ({"source": 5}, "source=5")):

        def program(transport: SimulatedTransport, options: Any = options) -> None:
            Ranks(**({"source": "folder"} | options), comm=transport)

        assert match in str(errors(P, program)[0])
