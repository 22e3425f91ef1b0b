"""Kill -9 at random moments of saving and loading: no checkpoint is lost, and none is a mixture.

Two or three processes over gloo load the newest checkpoint, and then save one after another. A random one of them, or
all, is killed at a random time. Then the next ones begin. All ranks must load the same checkpoint, with the values that
were saved in it, and it must not be older than the last one that all ranks have finished to save.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

import sparsecomm as sc
from tests.stress.harness import Attack

__all__ = ["Kills"]

_LIMIT = 60.0  # seconds for a life


class Kills(Attack):
    options = (("kills", 1000, "how many processes, or groups of them, are killed"),)

    def run(self) -> None:
        """Kill so many."""
        import sparsecomm.torch  # once, for all processes

        os.environ["SPARSECOMM_TIMEOUT"] = str(self.timeout)
        rng = random.Random(self.report.seed)
        while self.counts["kills"] < self.given.kills and len(self.report.failures) < 5:
            torch, shared = rng.random() < 0.5, rng.random() < 0.5
            with tempfile.TemporaryDirectory() as folder:
                self._job(Path(folder), sparsecomm.torch if torch else sc, shared, rng)

    def _job(self, root: Path, module: Any, shared: bool, rng: random.Random) -> None:
        """Let processes save in a folder, and kill them, about twenty times."""
        P, finished = rng.choice([2, 3]), 0  # the last step that all ranks have finished to save
        for life in range(20):
            folders = [root / ("all" if shared else str(rank)) for rank in range(P)]
            log = root / f"log{life}"
            log.mkdir()
            pids = [self._start(rank, P, folders[rank], log, module) for rank in range(P)]
            began = time.monotonic()
            early = rng.random() < 0.3  # while they load
            files = [log / str(rank) for rank in range(P)]
            while not all(map(_has_loaded, files)) and time.monotonic() - began < _LIMIT:
                time.sleep(0.002)
                if early and rng.random() < 0.01:
                    break
            time.sleep(rng.expovariate(20))
            victims = pids if rng.random() < 0.3 else [rng.choice(pids)]
            for pid in victims:
                os.kill(pid, signal.SIGKILL)
            self.counts["kills"] += 1
            time.sleep(rng.choice([0, 0.05]))
            for pid in pids:  # the others would wait for the timeout: their launcher ends them
                os.kill(pid, signal.SIGTERM)
            for pid in pids:
                os.waitpid(pid, 0)
            told = [file.read_text().splitlines() if file.exists() else [] for file in files]
            wrong = [line for lines in told for line in lines if line.startswith("wrong")]
            loaded = {int(lines[0].split()[1]) for lines in told if lines and lines[0].startswith("loaded")}
            if wrong or len(loaded) > 1 or any(step < finished for step in loaded):
                self.fail(f"life {life}, {finished} was finished, ranks have loaded {loaded}: {wrong}")
                return
            saved = [[int(line.split()[1]) for line in lines if line.startswith("saved")] for lines in told]
            finished = max(finished, min(max(its, default=0) for its in saved))
            self.counts["saves that all ranks finished"] += min(map(len, saved))
            self.counts["lives that loaded"] += bool(loaded - {0})
            self.progress(f"{self.counts['kills']} of {self.given.kills} kills")

    def _start(self, rank: int, P: int, folder: Path, log: Path, module: Any) -> int:
        """Start a process that loads and saves; return its number."""
        if pid := os.fork():
            return pid
        file = os.open(log / str(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            _live(rank, P, folder, log, module, lambda line: os.write(file, f"{line}\n".encode()))
        except BaseException:
            if not isinstance(sys.exc_info()[1], (sc.SparseCommError, RuntimeError)):
                os.write(file, f"wrong {traceback.format_exc()!r}\n".encode())
        finally:
            os._exit(0)


def _has_loaded(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def _live(rank: int, P: int, folder: Path, log: Path, module: Any, note: Any) -> None:
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(log / "store"), P), rank=rank, world_size=P)

    def objects(step: int) -> dict[str, Any]:
        array = np.random.default_rng([step, rank]).standard_normal(3000).astype(np.float32)
        return {"x": torch.from_numpy(array) if module is not sc else array, "step": step}

    try:
        found = module.load(folder, {"x": None, "step": None})
    except sc.InvalidInputError as error:
        note(f"wrong {error}")
        raise
    step = found.step if found else 0
    if found and not (found.values["step"] == step and np.array_equal(found.values["x"], objects(step)["x"])):
        note(f"wrong values of step {found.values['step']} in {step}")
    note(f"loaded {step}")
    while True:
        step += 1
        module.save(folder, step, objects(step))
        note(f"saved {step}")
