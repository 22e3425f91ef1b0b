"""`save` and `load`: a checkpoint exists on all ranks or on none, and the newest one that all can read is loaded."""

from __future__ import annotations

import contextlib
import copy
import os
import pathlib
import pickle
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm import Checkpoint
from sparsecomm.transport import simulated
from tests import interrupts
from tests.interrupts import InterruptError, interrupted
from tests.ranks import errors, run
from tests.reducer.programs import total
from tests.states.subjects import adamw, digest, diloco, distributed, local_steps, of_torch, reducer, torch_adamw
from tests.thinning import exhaustive


@dataclass
class Saving:
    """A module with `save` and `load`, and the suffix of its files."""

    module: str
    suffix: str

    def __post_init__(self) -> None:
        module: Any = import_module(self.module)
        self.save, self.load = module.save, module.load


@pytest.fixture(params=[("sparsecomm", ".npz"), ("sparsecomm.torch", ".pt")], ids=lambda param: param[0])
def saving(request: pytest.FixtureRequest) -> Saving:
    if request.param[0] != "sparsecomm":
        pytest.importorskip("torch.distributed")
    return Saving(*request.param)


def files(folder: Path) -> set[str]:
    """Return the names of the checkpoint files in a folder."""
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def residuals(state: dict[str, Any]) -> dict[str, Any]:
    """Return the residuals and velocities in a state, by name, as arrays of full tensors without units."""
    arrays = {}
    for reducer_state in state.get("reducers", [state.get("sparsecomm", state)]):
        for i, kind in enumerate(("residuals", "velocities")):
            for name, array in reducer_state.get(kind, {}).items():
                slice_ = (reducer_state["slices"] or {}).get(name, {"units": reducer_state["units"].get(name)})
                own = np.asarray(array).ravel()
                if slice_["units"] is not None and i == 0:
                    own = own * np.exp2(np.asarray(slice_["units"]).ravel() - 127.0)
                full = np.zeros(slice_.get("shape", array.shape))
                full.reshape(-1)[slice(*slice_.get("part", [None]))] = own
                unsummed = reducer_state["unsummed"].get(name, [])[i : i + 1]
                arrays[f"{kind} {name}"] = sum(map(np.asarray, unsummed), full)
    return arrays


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("module", "build"),
    [
        *(("sparsecomm", build) for build in (reducer, local_steps, adamw)),
        *(("sparsecomm.torch", build) for build in (of_torch(torch_adamw), distributed("SGD"), diloco("SGD"))),
    ],
    ids=["Reducer", "LocalSteps", "SparseAdamW", "torch SparseAdamW", "DistributedOptimizer", "DiLoCo"],
)
@pytest.mark.parametrize(
    ("layout", "new"),
    [
        *(("0", "0"), ("000", "000"), ("000", "00"), ("00", "0001")),
        *(("0011", "0011"), ("0123", "0011"), ("0011", "0101"), ("0011", "0123"), ("0011", "010122")),
    ],
)
def test_a_training_that_resumes_is_bit_identical(
    module: str, build: Any, layout: str, new: str, tmp_path: Path
) -> None:
    """With another world size or other nodes, the sums of residuals and velocities are the same."""
    saving = import_module(module)

    def program(transport: simulated.SimulatedTransport) -> tuple[dict[str, Any], str, str]:
        obj, step, weights, model = build(transport)
        objects = {"sparse": obj, "weights": model or weights}
        checkpoint = saving.load(tmp_path, objects, comm=transport)
        for name, values in checkpoint.values.get("weights", {}).items() if checkpoint else ():
            weights[name][...] = values
        saved = residuals(obj.state_dict())
        for number in range(checkpoint.step if checkpoint else 1, 10):
            step(number)
            if number == 6:
                saving.save(tmp_path, 7, objects, comm=transport)
                saved = copy.deepcopy(residuals(obj.state_dict()))
        common = digest(obj.state_dict().get("global_parameters", weights))
        return saved, digest([residuals(obj.state_dict()), weights]), common

    old, now = (run(len(nodes), program, nodes=[*map(int, nodes)]) for nodes in (layout, new))
    before, after = (total(saved for saved, *_ in results) for results in (old, now))
    assert layout == "0" or any(array.any() for array in before.values())
    for name, array in before.items():
        np.testing.assert_allclose(after[name], array, rtol=1e-5, atol=1e-6)
    assert len({common for *_, common in now}) == 1
    if new == layout:
        assert [state for _, state, _ in now] == [state for _, state, _ in old]


def test_other_nodes_need_all_files(tmp_path: Path) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        obj, step, *_ = adamw(transport)
        folder = tmp_path / str(transport.rank // 2)  # one per machine
        if transport.num_nodes == 4:
            step(1)
            sc.save(folder, 1, {"sparse": obj}, comm=transport)
        else:
            with pytest.raises(
                sc.InvalidInputError, match=r"saved with other nodes.* cannot read a checkpoint|FileNot"
            ):
                sc.load(folder, {"sparse": obj}, comm=transport)

    run(4, program, nodes=range(4))
    run(4, program, nodes=[0, 0, 1, 1])


def test_the_checkpoint_saved_last_is_the_newest(tmp_path: Path, saving: Saving) -> None:
    """Even after a run goes back to an earlier step or starts again. Older checkpoints are removed."""
    for rank in (1, 2):  # left by ranks that died, at two world sizes
        (tmp_path / f"step0-rank1-of{1 + rank}{saving.suffix}.part").touch()

    def program(transport: simulated.SimulatedTransport) -> None:
        def save(step: int, value: str, keep: int) -> None:
            saving.save(tmp_path, step, {"x": value}, comm=transport, keep=keep)

        def load(step: int | None = None) -> Any:
            checkpoint = saving.load(tmp_path, {"x": None}, comm=transport, step=step)
            return checkpoint.step, checkpoint.values["x"]

        for step, value in ((1, "a"), (2, "b"), (3, "c")):
            save(step, value, 2)
        assert load(step=1) == (1, "a")
        for step, value in ((2, "d"), (3, "e")):  # the run goes back
            save(step, value, 3)
            assert load() == load(step=step) == (step, value)
        with pytest.raises(sc.InvalidInputError, match=r"no checkpoint of step 1 .* sees: \[\[3, 2"):
            load(step=1)
        (tmp_path / f"step0-rank7-of9{saving.suffix}").touch()  # of an earlier run
        save(1, "f", 1)  # the run starts again
        assert load() == (1, "f")

    run(2, program)
    assert files(tmp_path) == {
        f"{name}{saving.suffix}"
        for rank in range(2)
        for name in (
            *(f"step{step}-rank{rank}-of2{run}" for step in (2, 3) for run in ("", "-run2")),
            f"step1-rank{rank}-of2-run3",
        )
    }


def test_a_save_by_fewer_ranks_keeps_the_checkpoint_of_all(tmp_path: Path, saving: Saving) -> None:
    """Each node has its own folder, so fewer ranks do not see all files of the checkpoint of all ranks."""

    def program(transport: simulated.SimulatedTransport, step: int) -> Checkpoint | None:
        folder = tmp_path / str(transport.rank)
        if step:
            saving.save(folder, step, {"x": step}, comm=transport)
        checkpoint: Checkpoint | None = saving.load(folder, {"x": None}, comm=transport)
        return checkpoint

    assert run(3, partial(program, step=1)) == [Checkpoint(1, {"x": 1}, 3)] * 3
    assert run(2, partial(program, step=2)) == [Checkpoint(2, {"x": 2}, 2)] * 2
    assert run(3, partial(program, step=0)) == [Checkpoint(1, {"x": 1}, 3)] * 3


class Evil:
    """An object whose pickle runs code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["EVIL"],)


def test_no_file_runs_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saving: Saving) -> None:
    monkeypatch.setenv("EVIL", str(tmp_path / "evil"))

    def program(transport: simulated.SimulatedTransport) -> None:
        for step in (1, 2, 3):
            saving.save(tmp_path / "c", step, {"x": step}, comm=transport, keep=3)
        (tmp_path / f"c/step3-rank0-of1{saving.suffix}").write_bytes(pickle.dumps({"x": Evil()}))
        if saving.suffix == ".pt":  # in PyTorch's own format
            import_module("torch").save({"x": Evil()}, tmp_path / "c/step2-rank0-of1.pt")
        checkpoint = saving.load(tmp_path / "c", {"x": None}, comm=transport)
        assert checkpoint.step == (1 if saving.suffix == ".pt" else 2)

    run(1, program)
    assert not (tmp_path / "evil").exists()
    pickle.loads(pickle.dumps(Evil()))  # the pickle does run code
    assert (tmp_path / "evil").exists()


@pytest.mark.parametrize("fault", ["folder", "type", "state", "step", "name"])
def test_no_rank_saves_if_one_cannot(fault: str, tmp_path: Path, saving: Saving) -> None:
    class Refusing:
        def state_dict(self) -> Any:
            raise ValueError("not now")

    def program(transport: simulated.SimulatedTransport) -> None:
        saving.save(tmp_path / "c", 1, {"x": 1}, comm=transport)
        last = transport.rank == 2
        folder, step, objects = tmp_path / "c", 2, {"x": 2}
        if last and fault == "folder":
            folder = tmp_path / "file"
            folder.touch()
        elif last and fault == "type":
            objects = {"x": Path("a")}  # type: ignore[dict-item]
        elif last and fault == "state":
            objects = {"x": Refusing()}  # type: ignore[dict-item]
        elif last and fault == "step":
            step = 5
        elif last:
            objects = {"y": 2}
        try:
            saving.save(folder, step, objects, comm=transport)
        finally:
            assert saving.load(tmp_path / "c", {"x": None}, comm=transport) == Checkpoint(1, {"x": 1}, 3)

    kind = sc.CollectiveMismatchError if fault in ("step", "name") else sc.InvalidInputError
    said = {
        "step": "2 in save(step=5, keep=1) of 'x'",
        "name": "2 in save(step=2, keep=1) of 'y'",
        "folder": "file",
        "type": "PosixPath",
        "state": "not now",
    }
    for error in errors(3, program):
        assert isinstance(error, kind)
        assert said.get(fault, "same checkpoint") in str(error), error
    assert len(files(tmp_path / "c")) == 3


@pytest.mark.parametrize("other", [0, 1, "save"])
def test_ranks_that_make_different_calls_all_raise(other: Any, tmp_path: Path, saving: Saving) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        saving.save(tmp_path, 1, {"x": 1}, comm=transport)
        if transport.rank and other == "save":
            saving.save(tmp_path, 2, {"x": 1}, comm=transport)
        saving.load(tmp_path, {"x": None}, comm=transport, step=other if transport.rank else None)

    assert {type(error) for error in errors(2, program)} == {sc.CollectiveMismatchError}


def test_if_an_object_refuses_its_state_on_one_rank_all_ranks_raise(tmp_path: Path, saving: Saving) -> None:
    class Model:
        def __init__(self, rank: int) -> None:
            self.rank = rank

        def state_dict(self) -> Any:
            return {"w": 1}

        def load_state_dict(self, state: Any) -> None:
            if self.rank == 1:
                raise RuntimeError("size mismatch")

    def program(transport: simulated.SimulatedTransport) -> None:
        sparse = sc.Reducer({"w": np.ones(4, np.float32)}, 0.5, comm=transport)
        objects = {"model \ud800": Model(transport.rank), "sparse": sparse}
        saving.save(tmp_path, 1, objects, comm=transport)
        saving.load(tmp_path, objects, comm=transport)

    for rank, error in enumerate(errors(3, program)):
        assert isinstance(error, sc.InvalidInputError)
        assert "raised RuntimeError: size mismatch" in str(error)
        assert isinstance(error.__cause__, RuntimeError) == (rank == 1)


class DiedError(Exception):
    """Ends the process of a rank."""


class Deaths:
    """Kills a rank when it changes a file. From then on, the rank changes no file."""

    CHANGES = ("open", "replace", "unlink")

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.let(-1, 0, "open", after=False)
        for name in self.CHANGES:
            of = Path if name == "open" else os
            patch.setattr(of, name, self._dying(name, getattr(of, name)))

    def let(self, rank: int, saves: int, name: str, *, after: bool) -> None:
        """Kill ``rank`` after ``saves`` saves, before or after its next change called ``name``."""
        self.rank, self.saves, self.name, self.after, self.dead = rank, saves, name, after, False

    def _dying(self, name: str, change: Any) -> Any:
        def dying(path: Any, *args: Any, **options: Any) -> Any:
            if f"-rank{self.rank}-" not in Path(path).name:
                return change(path, *args, **options)
            self.saves -= name == "open"
            due = self.saves < 0 and name == self.name
            if not (self.dead or due):
                return change(path, *args, **options)
            if not self.dead and self.after and (file := change(path, *args, **options)):
                file.close()
            self.dead = True
            raise DiedError

        return dying


LIVES = st.tuples(
    st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from(Deaths.CHANGES), st.booleans()),
    st.booleans(),  # whether it starts again
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
)


@given(P=st.integers(1, 3), keep=st.integers(1, 2), lives=st.lists(LIVES, min_size=2, max_size=5))
@example(2, 1, [((1, 1, "replace", False), False, [1, 1]), ((1, 0, "replace", False), False, [2])])
@example(2, 1, [((1, 1, "replace", False), False, [1, 1]), ((0, 0, "replace", False), False, [1])])
@settings(deadline=None, max_examples=15)
def test_a_checkpoint_of_all_ranks_exists_whenever_any_rank_dies(
    P: int, keep: int, lives: list[tuple[tuple[int, int, str, bool], bool, list[int]]]
) -> None:
    complete = (-1, 0)  # life and step of the newest checkpoint whose `save` has returned on all ranks
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        deaths = Deaths(patch)
        for life, ((rank, saves, name, after), anew, strides) in enumerate([*lives, ((0, 0, "open", True), False, [])]):
            finds: list[Checkpoint | None] = []
            returned: Counter[int] = Counter()

            def program(transport: simulated.SimulatedTransport, life: int, anew: bool, strides: list[int]) -> None:
                mine = Path(folder) / str(transport.rank)  # each node has its own
                newest = sc.load(mine, {"life": None}, comm=transport)
                finds.append(newest)  # noqa: B023
                step = newest.step if newest and not anew else 0
                for stride in strides:
                    step += stride
                    sc.save(mine, step, {"life": life}, comm=transport, keep=keep)
                    returned[step] += 1  # noqa: B023

            deaths.let(rank % P, saves, name, after=after)
            errors(P, partial(program, life=life, anew=anew, strides=strides))
            assert len(finds) == P
            assert finds.count(finds[0]) == P, finds
            newest = finds[0]
            assert complete <= ((newest.values["life"], newest.step) if newest else (-1, 0)), finds
            complete = max([complete, *((life, step) for step, ranks in returned.items() if ranks == P)])


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # an interrupt between open() and the assignment
@pytest.mark.parametrize("stride", [29, exhaustive(1)])
def test_a_checkpoint_exists_after_an_interrupt_anywhere(
    stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the new checkpoint or the previous one. There is one rank, because interrupts reach one thread only."""
    monkeypatch.setattr(interrupts.Points, "roots", (*interrupts.Points.roots, contextlib.__file__, pathlib.__file__))
    outcomes: Counter[bool] = Counter()

    def program(transport: simulated.SimulatedTransport) -> None:
        step, before, raised = 0, 0, True
        while raised:
            raised = False
            with interrupted(step):
                try:
                    sc.save(tmp_path, step + 1, {"x": step + 1}, comm=transport)
                except InterruptError:
                    raised = True
            loaded = sc.load(tmp_path, {"x": None}, comm=transport)
            last = loaded.step if loaded else 0
            assert loaded is None or loaded.values == {"x": last}
            assert last in ((before, step + 1) if raised else (step + 1,))
            outcomes[last == step + 1] += 1
            if last <= step:  # save it for the next round
                sc.save(tmp_path, step + 1, {"x": step + 1}, comm=transport)
            before = step + 1
            step += stride

    run(1, program)
    assert outcomes[True] >= 1
    assert outcomes[False] > 2
    assert not list(tmp_path.glob("*.part"))


def test_wrong_arguments(tmp_path: Path, saving: Saving) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        *(({"step": step}, "step=") for step in (-1, 1.5, True, "a", None)),
        *(({"keep": keep}, "keep=") for keep in (0, "a")),
        *(({"objects": objects}, "objects") for objects in ([], {1: 2}, None)),
        *(({"folder": folder}, "folder=") for folder in (None, 3, b"a")),
    ]

    def program(transport: simulated.SimulatedTransport) -> None:
        arguments: dict[str, Any] = {"folder": tmp_path, "step": 1, "objects": {"x": 1}, "comm": transport}
        for wrong, why in refused:
            with pytest.raises(sc.InvalidInputError, match=why):
                saving.save(**arguments | wrong)
            if "keep" not in wrong and wrong != {"step": None}:
                with pytest.raises(sc.InvalidInputError, match=why):
                    saving.load(**arguments | wrong)
        assert saving.load(tmp_path / "none", {}, comm=transport) is None
        saving.save(**arguments)
        with pytest.raises(sc.InvalidInputError, match="has no 'y'; it has 'x'"):
            saving.load(tmp_path, {"x": None, "y": None}, comm=transport)

    run(2, program)
