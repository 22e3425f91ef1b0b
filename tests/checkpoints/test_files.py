"""Checkpoint files that are damaged, foreign, or belong to another job."""

from __future__ import annotations

import errno
import gc
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.checkpoints import files, lock
from sparsecomm.checkpoints.lock import acquire
from sparsecomm.states.values import to_bytes
from sparsecomm.transport import simulated
from tests import interrupts
from tests.checkpoints.damage import Case
from tests.ranks import errors, run

MODULES = ["sparsecomm", "sparsecomm.torch"]


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> Any:
    if request.param != "sparsecomm":
        pytest.importorskip("torch.distributed")
    return import_module(request.param)


def suffix(module: Any) -> str:
    return ".npz" if module is sc else ".pt"


def save(module: Any, folder: Path, *steps: int, P: int = 2, keep: int = 1, own: bool = False) -> None:
    """Save checkpoints of these steps on P ranks, in a common folder or in one per rank."""

    def program(transport: simulated.SimulatedTransport) -> None:
        for step in steps:
            module.save(folder / str(transport.rank) if own else folder, step, {"x": step}, comm=transport, keep=keep)

    run(P, program)


def load(module: Any, folder: Path, *, P: int = 2, own: bool = False) -> list[int]:
    """Return the steps that the ranks load."""

    def program(transport: simulated.SimulatedTransport) -> int:
        checkpoint = module.load(folder / str(transport.rank) if own else folder, {"x": None}, comm=transport)
        assert checkpoint.values == {"x": checkpoint.step}
        return int(checkpoint.step)

    return run(P, program)


def test_damaged_files_are_skipped() -> None:
    outcomes = Counter(Case(1, number).play() for number in range(20))
    assert min(outcomes[outcome] for outcome in ("refused", "loaded the newest", "loaded an older one")) > 1, outcomes


def test_the_newest_common_checkpoint_is_found_behind_any_number_of_others(module: Any, tmp_path: Path) -> None:
    save(module, tmp_path, 1, 2, 3, own=True, keep=3)
    shutil.copytree(tmp_path / "1", tmp_path / "backup")
    save(module, tmp_path, *range(4, 20), own=True, keep=50)
    shutil.rmtree(tmp_path / "1")
    (tmp_path / "backup").rename(tmp_path / "1")
    assert load(module, tmp_path, own=True) == [3, 3]


LOST = {
    "folder": r"complete on all ranks. Steps that each rank sees: \[\[1\], \[\]\]. Restore",
    "all damaged": "step1-rank1-of2.* cannot be read: BadZipFile",
    "of an earlier version": "earlier version",
    "of another format": "cannot read. Load .npz files",
    "no folder": "NotADirectoryError",
}


@pytest.mark.parametrize("lost", LOST)
def test_all_ranks_raise_if_no_checkpoint_can_be_loaded(
    lost: str, module: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(module, tmp_path, 1, own=True)
    saved = [tmp_path / f"{rank}/step1-rank{rank}-of2{suffix(module)}" for rank in range(2)]
    if lost == "folder":
        shutil.rmtree(saved[1].parent)
    elif lost == "all damaged":
        saved[1].write_bytes(b"")
    for path in saved:
        if lost == "of another format":
            path.rename(path.with_suffix(".pt" if module is sc else ".npz"))
        elif lost == "of an earlier version" and module is sc:
            path.write_bytes(to_bytes({"x": 1}))
        elif lost == "of an earlier version":
            import_module("torch").save({"x": 1}, path)
        elif lost == "no folder":
            shutil.rmtree(path.parent)
            path.parent.touch()
    for error in errors(2, lambda transport: module.load(tmp_path / str(transport.rank), {"x": None}, comm=transport)):
        assert isinstance(error, sc.InvalidInputError)
        assert re.search(LOST[lost], str(error))
    assert lost != "all damaged" or saved[1].name in caplog.text


@pytest.mark.parametrize(
    ("planted", "refused"),
    [
        ("step999999999999999999-rank0-of2-run999999999999999999", False),  # is ignored
        ("step9-rank0-of2-run999999999999999", True),
        ("step9-rank0-of2-run999999999999998", False),
        ("step999999999999999999-rank0-of999999999", False),  # the world size must not size any set
        ("step1-rank0-of2-run0000000000000009", False),
        ("step1-rank0-of2-run\u0669", False),  # an Arabic nine
    ],
)
def test_numbers_in_names_of_planted_files_do_not_hide_checkpoints(
    planted: str, refused: bool, module: Any, tmp_path: Path
) -> None:
    save(module, tmp_path, 1)
    (tmp_path / f"{planted}{suffix(module)}").touch()
    if refused:
        for error in errors(2, lambda transport: module.save(tmp_path, 2, {"x": 2}, comm=transport)):
            assert isinstance(error, sc.InvalidInputError)
            assert re.search(r"a file of step 9 .* largest run number, 9{15}, .*; remove that file", str(error))
        assert load(module, tmp_path) == [1, 1]
        return
    for step in (3, 4, 5):
        save(module, tmp_path, step)
        assert load(module, tmp_path) == [step, step]


JOB = """
import sys, time
from pathlib import Path
from sparsecomm.checkpoints import lock
lock._TIMEOUT = 0.1
lock.acquire(Path(sys.argv[1]), "%s")
print("claimed", flush=True)
time.sleep(600)
"""


def test_a_second_job_in_a_folder_is_refused_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsecomm.checkpoints.lock._TIMEOUT", 0.1)
    job = subprocess.Popen([sys.executable, "-c", JOB % "another", str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "claimed\n"
        for error in errors(3, partial(_save_one, tmp_path)):
            assert isinstance(error, sc.InvalidInputError)
            assert f"another job saves checkpoints into {tmp_path} (process {job.pid} on " in str(error)
        assert not list(tmp_path.glob("step*"))
        job.send_signal(signal.SIGKILL)
        job.wait()
        assert errors(3, partial(_save_one, tmp_path)) == [None] * 3
        acquire(tmp_path, "another name")  # the same process under another ID
        assert errors(3, partial(_save_one, tmp_path)) == [None] * 3
    finally:
        job.kill()
        job.communicate()


def test_a_lost_lock_is_taken_again_and_all_locks_are_held(tmp_path: Path) -> None:
    """A process loses its POSIX lock when it opens and closes the file, for example to copy the folder."""
    second = JOB.replace("time.sleep(600)", "") % "second"
    save(sc, tmp_path / "c", 1)
    shutil.copytree(tmp_path / "c", tmp_path / "copy")
    save(sc, tmp_path / "c", 2)
    for i in range(20):
        (tmp_path / str(i)).mkdir()
        acquire(tmp_path / str(i), "first")
    shutil.rmtree(tmp_path / "0")
    acquire(tmp_path / "1", "first")
    assert str(tmp_path / "0") not in lock._locks
    for folder in ("c", "1"):
        job = subprocess.run([sys.executable, "-c", second, str(tmp_path / folder)], capture_output=True, text=True)
        assert "another job saves checkpoints" in job.stderr


def test_verified_files_take_little_memory(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file whose save ID was forgotten is read again before an older file is removed."""
    monkeypatch.setattr("sparsecomm.checkpoints.files._MAX_SAVE_IDS", 1)
    save(module, tmp_path, *range(6), keep=2)
    assert len(files._save_ids) == 1
    assert {path.name[:5] for path in tmp_path.glob("step*")} == {"step3", "step4", "step5"}


def _save_one(folder: Path, transport: simulated.SimulatedTransport) -> None:
    sc.save(folder, 1, {"x": 1}, comm=transport)


def test_a_state_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        weights = {"w": np.ones(20, np.float32)}
        optimizer = sc.SparseAdamW(weights, comm=transport)
        optimizer.step({"w": weights["w"] + transport.rank})
        sc.save(tmp_path, 1, {"sparse": optimizer}, comm=transport)
        if transport.rank == 0:  # the owner
            optimizer._adamw.moments["w"].squares[3] = np.inf
        with pytest.raises(sc.InvalidInputError, match="squares of w is not finite"):
            sc.save(tmp_path, 2, {"sparse": optimizer}, comm=transport)
        checkpoint = sc.load(tmp_path, {"sparse": optimizer}, comm=transport)
        assert checkpoint is not None
        assert checkpoint.step == 1
        optimizer.step({"w": weights["w"] + transport.rank})

    run(2, program)


def test_a_damaged_state_is_not_saved(tmp_path: Path) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        state = sc.Reducer({"w": np.ones(20, np.float32)}, comm=transport).state_dict()
        with pytest.raises(sc.InvalidInputError, match="step"):
            sc.save(tmp_path, 1, {"state": {**state, "step": -1}}, comm=transport)
        sc.save(tmp_path, 1, {"state": state}, comm=transport)

    run(2, program)


def test_torch_files_have_checksums_even_if_the_program_turned_them_off(tmp_path: Path) -> None:
    torch, module = pytest.importorskip("torch"), import_module("sparsecomm.torch")
    if not hasattr(torch.serialization, "set_crc32_options"):
        pytest.skip("this PyTorch always writes them")
    torch.serialization.set_crc32_options(False)
    try:
        save(module, tmp_path, 1)
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    with zipfile.ZipFile(tmp_path / "step1-rank0-of2.pt") as archive:
        assert archive.testzip() is None


@pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")
@pytest.mark.parametrize("names", [("opt.1", "1"), ("opt(1)", "opt[1]"), ("a-rank0-of2", "a"), ("ü %", ".")])
def test_stateful_finds_objects_of_any_name(names: tuple[str, ...], tmp_path: Path) -> None:
    torch, module = pytest.importorskip("torch"), import_module("sparsecomm.torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    reducers = {name: sc.Reducer({"x": np.zeros(3, np.float32)}, 0.5) for name in names}
    for i, reducer in enumerate(reducers.values()):
        for _ in range(i + 1):
            reducer.reduce({"x": np.arange(3, dtype=np.float32)})
    objects = {f"{i}.{name}": module.Stateful(reducers[name], name=name) for i, name in enumerate(names)}
    with torch.no_grad():
        dcp.save(objects, checkpoint_id=tmp_path / "c", no_dist=True)
        again = {name: sc.Reducer({"x": np.zeros(3, np.float32)}, 0.5) for name in names}
        folder = tmp_path / "c"
        wrappers = {f"{i}.{name}": module.Stateful(again[name], folder, name=name) for i, name in enumerate(names)}
        dcp.load(wrappers, checkpoint_id=folder, no_dist=True)
    assert [again[name].step for name in names] == [1, 2]
    with pytest.raises(sc.InvalidInputError, match="has no 'other'"):
        module.Stateful(reducers[names[0]], tmp_path / "c", name="other").state_dict()


def test_an_interrupted_save_ends_with_the_exception_of_the_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's writer finishes its file when it is destroyed, and would abort if that Python file were closed."""
    torch, checkpoints = pytest.importorskip("torch"), import_module("sparsecomm.torch.checkpoints")
    opener, written = torch.serialization._opener, []
    monkeypatch.setattr(opener, "__enter__", lambda self: interrupt_second(self.file_like))

    def interrupt_second(writer: Any) -> Any:
        if isinstance(writer, torch._C.PyTorchFileWriter):
            written.append(1)
            if len(written) == 2:  # the first file tests whether all types can be loaded
                signal.raise_signal(interrupts.SIGNAL)
        return writer

    class File(io.BytesIO):
        def write(self, data: Any) -> int:
            signal.raise_signal(interrupts.SIGNAL)
            return super().write(data)

    with interrupts.interrupted(), File() as file, pytest.raises(interrupts.InterruptError) as caught:
        checkpoints.TorchFormat().dump(file, {"x": torch.zeros(9)})
    assert len(written) == 2
    del caught
    gc.collect()


def load_one(folder: Path, transport: simulated.SimulatedTransport) -> None:
    sc.load(folder, {"x": None}, comm=transport)


def test_no_file_stays_open(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither after saves and loads, nor after a folder was removed, nor if another job has locked it."""
    monkeypatch.setattr("sparsecomm.checkpoints.lock._TIMEOUT", 0.0)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def work(name: str) -> None:
        save(module, tmp_path / name, 1, 2)
        for path in (tmp_path / name).glob(f"*{suffix(module)}"):
            path.write_bytes(path.read_bytes()[:-9])
        assert all(isinstance(error, sc.InvalidInputError) for error in errors(2, partial(load_one, tmp_path / name)))
        shutil.rmtree(tmp_path / name)

    work("first")  # also opens what stays open
    before = descriptors()
    for number in range(3):
        work(str(number))
    assert descriptors() <= before
    monkeypatch.setattr(lock, "_try_lock", lambda *_: False)
    (tmp_path / "locked").mkdir()
    counts = []
    for _ in range(2):  # the first one finds that other locks are lost
        with pytest.raises(sc.InvalidInputError, match="another job saves checkpoints"):
            acquire(tmp_path / "locked", "a job")
        counts.append(descriptors())
    assert counts[1] <= counts[0]


def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", unsupported)
    acquire(tmp_path, "a job")
    assert "this file system has no locks; a second job that saves there is not noticed" in caplog.text
