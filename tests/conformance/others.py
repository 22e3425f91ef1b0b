"""What else the packages ship: Lightning's demonstrations, and Accelerate's tests with torchdata and of schedulers."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import unittest
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.conformance import accelerate_scripts, fixture
from tests.conformance.outcomes import SKIPPED, Ended, Outcome, failed, outcome_of_runs, run_ranks

SECONDS = 300
LIGHTNING = f"Lightning {version('lightning')}, demonstrations in its wheel"
MODELS = ("BoringModel", "ManualOptimBoringModel", "DemoModel")
NO_TESTS = {
    f"Transformers {version('transformers')}": "its wheel has no tests, and its sdist none of models or of the Trainer",
    f"Lightning {version('lightning')}": "neither its wheel nor its sdist has tests",
}


def outcomes(*, quick: bool) -> Iterator[Outcome]:
    """Run nothing if ``quick``: some of this is downloaded."""
    if quick:
        return
    for name in MODELS:
        yield _demonstration(name)
    with tempfile.TemporaryDirectory() as folder:
        yield from _with_torchdata(folder)
        yield from _schedulers(folder)
    for name in ("lstm", "transformer"):
        yield Outcome(LIGHTNING, name, "not applicable", "downloads a data set from raw.githubusercontent.com")
    for suite, reason in NO_TESTS.items():
        yield Outcome(suite, "tests", "not applicable", reason)


def _demonstration(name: str) -> Outcome:
    """Train a model of `lightning.pytorch.demos` in DDP, without and with our hook: weights must be the same."""
    with tempfile.TemporaryDirectory() as folder:

        def program(rank: int, ours: bool) -> None:
            os.chdir(folder)
            if ours:
                fixture.install()
            trained = _train_demonstration(name)
            if rank == 0:
                torch.save(trained, f"{ours}.pt")
            print(f"exchanged {fixture.exchanged}")
            assert fixture.exchanged or not ours, "no gradient was exchanged"

        def run(ours: bool) -> Ended:
            return run_ranks(2, lambda rank: program(rank, ours), SECONDS)

        dense = run(False)
        outcome = outcome_of_runs(LIGHTNING, name, lambda ours: run(True) if ours else dense)
        if outcome.result == "passed" and not failed(dense):
            try:
                torch.testing.assert_close(*(torch.load(Path(folder) / f"{ours}.pt") for ours in (True, False)))
            except AssertionError as error:
                return Outcome(LIGHTNING, name, "failed", str(error))
        return outcome


def _train_demonstration(name: str) -> dict[str, torch.Tensor]:
    import lightning.pytorch as pl
    from lightning.pytorch.demos import boring_classes

    pl.seed_everything(1)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    limits: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 20, "limit_val_batches": 1}
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", **limits, **quiet)
    model: Any = getattr(boring_classes, name)()
    trainer.fit(model, *([boring_classes.BoringDataModule()] if name == "DemoModel" else []))
    return {key: value.clone() for key, value in model.state_dict().items()}


def _with_torchdata(folder: str) -> Iterator[Outcome]:
    """Run Accelerate's tests of torchdata's `StatefulDataLoader`, which are at the end of a script."""
    name = "test_distributed_data_loop"
    suite = f"{accelerate_scripts.SUITE}, with torchdata"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, "torchdata"]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        yield Outcome(suite, name, "not applicable", f"torchdata cannot be installed: {done.stderr[-200:]}")
        return
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    yield accelerate_scripts.outcome_of(name, suite)


def _schedulers(folder: str) -> Iterator[Outcome]:
    """Run the tests of schedulers in Accelerate's sdist, with `SparseAdamW` in place of AdamW."""
    package = f"accelerate=={version('accelerate')}"
    suite = f"Accelerate {version('accelerate')}, `tests/test_scheduler.py` of its sdist"
    options = ["--quiet", "--no-deps", "--no-binary", ":all:", "-d", folder]
    download = [sys.executable, "-m", "pip", "download", *options, package]
    done = subprocess.run(download, capture_output=True, text=True)
    found = list(Path(folder).glob("accelerate-*.tar.gz"))
    if not found:
        yield Outcome(suite, "all", "not applicable", f"the sdist cannot be downloaded: {done.stderr[-200:]}")
        return
    with tarfile.open(found[0]) as archive:
        archive.extractall(folder, filter="data")
    sys.path.insert(0, str(found[0].with_suffix("").with_suffix("") / "tests"))
    suites: Any = unittest.defaultTestLoader.loadTestsFromName("test_scheduler")
    for name in [test._testMethodName for tests in suites for test in tests]:

        def program(rank: int, name: str = name) -> None:
            for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
                del os.environ[variable]  # the test starts ranks itself
            fixture.install_adamw()
            module = importlib.import_module("test_scheduler")
            (case,) = (c for c in vars(module).values() if isinstance(c, type) and hasattr(c, name))
            try:
                case(name).debug()
            except unittest.SkipTest as skipped:
                print(f"{SKIPPED}{skipped}")

        statuses, outputs = run_ranks(1, program, SECONDS)
        if reason := re.search(f"{SKIPPED}(.*)", outputs[0]):
            yield Outcome(suite, name, "not applicable", f"Accelerate skips it: {reason[1]}")
        elif statuses == [0]:
            yield Outcome(suite, name, "passed")
        else:
            yield Outcome(suite, name, "failed", outputs[0])
