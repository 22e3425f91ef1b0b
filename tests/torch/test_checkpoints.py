"""Checkpoints in one call: whole or not there, the newest that all can read, for any number of ranks."""

from __future__ import annotations

import copy
import logging
import tempfile
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

from torch import nn  # noqa: E402

import sparsecomm as sc  # noqa: E402
from sparsecomm.torch import Checkpoint, DiLoCo, DistributedOptimizer, SparseAdamW, load, save  # noqa: E402
from sparsecomm.transport import simulated  # noqa: E402
from tests.ranks import errors, run  # noqa: E402

WAYS = ("SparseAdamW", "DistributedOptimizer", "DiLoCo", "Reducer", "LocalSteps", "arrays")


def network() -> nn.Module:
    return copy.deepcopy(_network())


@cache  # simulated ranks share torch's random numbers
def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 20))


class Training:
    """Any of the objects that are saved, with a step that differs between ranks."""

    def __init__(self, way: str, ranks: simulated.SimulatedTransport) -> None:
        self.way, self.ranks, self.model = way, ranks, network()
        self.arrays = {name: p.detach().numpy() for name, p in self.model.named_parameters()}
        self.objects: dict[str, Any] = {"model": self.model}
        named = list(self.model.named_parameters())
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        options: dict[str, Any] = {"comm": ranks, "check_weights_every": None}
        if way == "SparseAdamW":
            self.optimizer = SparseAdamW(named, lr=1e-2, **options)
        elif way == "DistributedOptimizer":
            self.optimizer = DistributedOptimizer(self.optimizer, named, 0.05, **options)
        elif way == "DiLoCo":
            self.objects["sparse"] = DiLoCo(self.model, self.optimizer, sync_every=3, comm=ranks)
        elif way == "Reducer":
            self.objects["sparse"] = sc.Reducer(self.arrays, 0.05, comm=ranks, momentum=0.9)
        elif way == "LocalSteps":
            self.objects["sparse"] = sc.LocalSteps(self.arrays, comm=ranks, sync_every=2)
        else:
            self.objects["sparse"] = sc.SparseAdamW(self.arrays, lr=1e-2, comm=ranks)
        self.objects["optimizer"] = self.optimizer
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.objects["scheduler"] = self.scheduler

    def step(self, number: int) -> None:
        random = torch.Generator().manual_seed(1000 * number + self.ranks.rank)
        gradients = {name: torch.randn(p.shape, generator=random) for name, p in self.model.named_parameters()}
        if self.way in ("Reducer", "arrays", "LocalSteps"):
            of_arrays, sparse = {name: g.numpy() for name, g in gradients.items()}, self.objects["sparse"]
            if self.way == "Reducer":
                sparse.reduce(of_arrays)
            if self.way == "arrays":
                sparse.step(of_arrays)
            else:
                for name, array in self.arrays.items():
                    array -= 0.1 * of_arrays[name]
            if self.way == "LocalSteps":
                sparse.step(self.arrays)
            self.optimizer.step()  # without gradients
        else:
            for name, p in self.model.named_parameters():
                p.grad = gradients[name]
            self.optimizer.step()
        self.scheduler.step()

    def bits(self) -> list[bytes]:
        return [p.detach().numpy().tobytes() for p in self.model.parameters()]

    def waiting(self) -> np.ndarray:
        """What this rank's residuals hold."""
        sparse = self.objects.get("sparse", self.optimizer)
        reducers = sparse.reducers if hasattr(sparse, "reducers") else [getattr(sparse, "reducer", sparse)]
        names = [name for reducer in reducers for name in self.arrays if name in reducer.names]
        of_name = {name: r for r in reducers for name in r.names}
        return np.concatenate([of_name[name].residual(name).reshape(-1) for name in sorted(names)])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("P", [1, 2, 3])
def test_a_training_goes_on_as_if_it_had_not_stopped(way: str, P: int, tmp_path: Path) -> None:
    def whole(ranks: simulated.SimulatedTransport) -> list[bytes]:
        training = Training(way, ranks)
        assert load(tmp_path, {**training.objects, "note": None}, comm=ranks) is None
        for step in range(8):
            training.step(step)
            if step == 3:
                save(tmp_path, step + 1, {**training.objects, "note": [step, "text", torch.ones(2)]}, comm=ranks)
        return training.bits()

    def resumed(ranks: simulated.SimulatedTransport) -> list[bytes]:
        training = Training(way, ranks)
        found = load(tmp_path, {**training.objects, "note": None}, comm=ranks)
        assert found is not None
        assert (found.step, found.ranks) == (4, P)
        assert found.values["note"][:2] == [3, "text"]
        assert training.scheduler.last_epoch == 4
        for step in range(found.step, 8):
            training.step(step)
        return training.bits()

    expected = run(P, whole)
    assert len(list(tmp_path.iterdir())) == P
    assert run(P, resumed) == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("P", "new"), [(3, 2), (2, 4), (2, 1)])
def test_residuals_are_shared_out_among_other_ranks(way: str, P: int, new: int, tmp_path: Path) -> None:
    def before(ranks: simulated.SimulatedTransport) -> tuple[list[bytes], np.ndarray]:
        training = Training(way, ranks)
        for step in range(4):
            training.step(step)
        save(tmp_path, 4, training.objects, comm=ranks)
        return training.bits(), training.waiting()

    def after(ranks: simulated.SimulatedTransport) -> tuple[list[bytes], np.ndarray]:
        training = Training(way, ranks)
        found = load(tmp_path, training.objects, comm=ranks)
        assert found == Checkpoint(4, {}, P)
        kept = training.bits(), training.waiting()
        for step in range(4, 7):
            training.step(step)
        return kept

    old, made = run(P, before), run(new, after)
    np.testing.assert_allclose(sum(r for _, r in made), sum(r for _, r in old), rtol=1e-4, atol=1e-5)
    assert all(weights == made[0][0] for weights, _ in made)
    if way != "DiLoCo":  # in the middle of a round ranks' weights differ, and global ones are taken
        assert made[0][0] == old[0][0]


def test_older_ones_go_and_the_last_but_one_stays(tmp_path: Path) -> None:
    for name in ("step7-rank1-of4.part", "step8-rank2-of4.part"):
        (tmp_path / name).touch()  # left over: of a rank that is there, and of none

    def program(ranks: simulated.SimulatedTransport) -> None:
        for step in (1, 2, 30, 4):  # one that goes back
            save(tmp_path, step, {"x": step}, comm=ranks)
        (tmp_path / "step2-rank7-of9.pt").touch()  # left over
        save(tmp_path, 31, {"x": 31}, comm=ranks, keep=2)
        assert load(tmp_path, {"x": None}, comm=ranks) == Checkpoint(31, {"x": 31}, 2)
        assert load(tmp_path, {"x": None}, comm=ranks, step=4) == Checkpoint(4, {"x": 4}, 2)
        assert load(tmp_path, {"x": None}, comm=ranks, step=5) is None

    run(2, program)
    assert {path.name for path in tmp_path.iterdir()} == {
        *(f"step{step}-rank{rank}-of2.pt" for step in (4, 30, 31) for rank in range(2)),
        "step8-rank2-of4.part",
    }


def test_a_training_that_went_back_saves_a_step_once_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def program(ranks: simulated.SimulatedTransport) -> None:
        for step, value in ((1, "a"), (2, "b"), (3, "c")):
            save(tmp_path, step, {"x": value}, comm=ranks, keep=2)
        assert load(tmp_path, {"x": None}, comm=ranks, step=1) == Checkpoint(1, {"x": "a"}, 2)
        for value in ("d", "e"):
            save(tmp_path, 2, {"x": value}, comm=ranks, keep=2)
            assert load(tmp_path, {"x": None}, comm=ranks, step=2) == Checkpoint(2, {"x": value}, 2)
        assert load(tmp_path, {"x": None}, comm=ranks) == Checkpoint(3, {"x": "c"}, 2)

    with caplog.at_level(logging.WARNING, "sparsecomm"):
        run(2, program)
    assert [message.split(": ")[1] for message in caplog.messages] == [
        "checkpoint 2 is saved beside one of step 3, which load takes for the newest; remove that one"
    ] * 2
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{name}.pt"
        for rank in range(2)
        for name in (f"step3-rank{rank}-of2", *(f"step2-rank{rank}-of2{again}" for again in ("", "-try2", "-try3")))
    }


def test_what_is_not_whole_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def program(ranks: simulated.SimulatedTransport) -> Checkpoint | None:
        for step in (1, 2, 3):
            save(tmp_path, step, {"x": torch.arange(1000) + step}, comm=ranks, keep=9)
        if ranks.rank == 1:
            (tmp_path / "step3-rank1-of3.pt").rename(tmp_path / "step3-rank1-of3.part")  # a rank died before
            path = tmp_path / "step2-rank1-of3.pt"
            path.write_bytes(path.read_bytes()[:1000])
        save(tmp_path, 0, {}, comm=ranks)  # all have come so far
        return load(tmp_path, {"x": None}, comm=ranks)

    with caplog.at_level(logging.WARNING, "sparsecomm"):
        for found in run(3, program):
            assert found is not None
            assert found.step == 1
            assert found.values["x"][0] == 1
    assert "step 2" in caplog.text
    assert "step2-rank1-of3.pt" in caplog.text


@pytest.mark.parametrize("fault", ["folder", "type", "state", "step", "name"])
def test_no_rank_saves_where_one_cannot(fault: str, tmp_path: Path) -> None:
    class Refusing:
        def state_dict(self) -> Any:
            raise ValueError("not now")

    def program(ranks: simulated.SimulatedTransport) -> None:
        save(tmp_path / "c", 1, {"x": 1}, comm=ranks)
        last = ranks.rank == 2
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
            save(folder, step, objects, comm=ranks)
        finally:
            assert load(tmp_path / "c", {"x": None}, comm=ranks) == Checkpoint(1, {"x": 1}, 3)

    kind = sc.CollectiveMismatchError if fault in ("step", "name") else sc.InvalidInputError
    said = {"folder": "file", "type": "pathlib", "state": "not now"}
    for error in errors(3, program):
        assert isinstance(error, kind)
        assert said.get(fault, "same checkpoint") in str(error), error
    assert len(list((tmp_path / "c").iterdir())) == 3


class DiedError(Exception):
    """A rank's process is gone."""


class Deaths:
    """Lets a rank die at one of the changes that it makes to files: nothing of that rank is done from then on."""

    CHANGES = ("open", "replace", "unlink")

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.let(-1, 0, "open", after=False)
        for name in self.CHANGES:
            patch.setattr(Path, name, self._dying(name, getattr(Path, name)))

    def let(self, rank: int, saves: int, name: str, *, after: bool) -> None:
        """Let ``rank`` die when it has saved so often, in the next change of that name, before it or after it."""
        self.rank, self.saves, self.name, self.after, self.dead = rank, saves, name, after, False

    def _dying(self, name: str, change: Any) -> Any:
        def dying(path: Path, *args: Any, **options: Any) -> Any:
            if f"-rank{self.rank}-" not in path.name:
                return change(path, *args, **options)
            self.saves -= name == "open"
            due = self.saves < 0 and name == self.name
            if not (self.dead or due):
                return change(path, *args, **options)
            if not self.dead and self.after and (file := change(path, *args, **options)) is not path:
                getattr(file, "close", int)()
            self.dead = True
            raise DiedError

        return dying


LIVES = st.tuples(
    st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from(Deaths.CHANGES)),
    st.booleans(),
    st.lists(st.integers(1, 3), min_size=1, max_size=4),
)


@given(P=st.integers(1, 3), keep=st.integers(1, 2), lives=st.lists(LIVES, min_size=2, max_size=5))
@example(P=2, keep=1, lives=[((1, 1, "replace"), False, [1, 1]), ((1, 0, "replace"), False, [2])])
@example(P=2, keep=1, lives=[((1, 1, "replace"), False, [1, 1]), ((0, 0, "replace"), False, [1])])
@settings(deadline=None)
def test_whichever_rank_dies_and_whenever_a_checkpoint_is_there_that_all_have_saved_together(
    P: int, keep: int, lives: list[tuple[tuple[int, int, str], bool, list[int]]]
) -> None:
    complete = 0  # the last step of which all ranks have been told that it is saved
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        deaths = Deaths(patch)
        for life, ((rank, saves, name), after, strides) in enumerate([*lives, ((0, 0, "open"), False, [])]):
            finds: list[Checkpoint | None] = []
            told: Counter[int] = Counter()

            def program(ranks: simulated.SimulatedTransport, life: int, strides: list[int]) -> None:
                mine = Path(folder) / str(ranks.rank)  # each node has its own
                found = load(mine, {"life": None}, comm=ranks)
                finds.append(found)  # noqa: B023
                step = found.step if found else 0
                for stride in strides:
                    step += stride
                    save(mine, step, {"life": life}, comm=ranks, keep=keep)
                    told[step] += 1  # noqa: B023

            deaths.let(rank % P, saves, name, after=after)
            errors(P, partial(program, life=life, strides=strides))
            assert len(finds) == P
            assert finds.count(finds[0]) == P, finds
            assert (finds[0].step if finds[0] else 0) >= complete, (finds, complete)
            complete = max([complete, *(step for step, ranks in told.items() if ranks == P)])


def test_wrong_arguments(tmp_path: Path) -> None:
    def program(ranks: simulated.SimulatedTransport) -> None:
        for step in (-1, 1.5, True, "a", None):
            with pytest.raises(sc.InvalidInputError, match="step="):
                save(tmp_path, step, {}, comm=ranks)  # type: ignore[arg-type]
        for keep in (0, "a"):
            with pytest.raises(sc.InvalidInputError, match="keep="):
                save(tmp_path, 1, {}, comm=ranks, keep=keep)  # type: ignore[arg-type]
        for objects in ([], {1: 2}, None):
            with pytest.raises(sc.InvalidInputError, match="objects"):
                save(tmp_path, 1, objects, comm=ranks)  # type: ignore[arg-type]
            with pytest.raises(sc.InvalidInputError, match="objects"):
                load(tmp_path, objects, comm=ranks)  # type: ignore[arg-type]
        for folder in (None, 3, b"a"):
            with pytest.raises(sc.InvalidInputError, match="folder="):
                save(folder, 1, {}, comm=ranks)  # type: ignore[arg-type]
            with pytest.raises(sc.InvalidInputError, match="folder="):
                load(folder, {}, comm=ranks)  # type: ignore[arg-type]
        with pytest.raises(sc.InvalidInputError, match="step='3'"):
            load(tmp_path, {}, comm=ranks, step="3")  # type: ignore[arg-type]
        assert load(tmp_path / "none", {}, comm=ranks) is None
        save(tmp_path, 1, {"x": 1}, comm=ranks)
        with pytest.raises(sc.InvalidInputError, match="has no 'y'; it has 'x'"):
            load(tmp_path, {"x": None, "y": None}, comm=ranks)

    run(2, program)
