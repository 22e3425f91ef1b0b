"""Kill -9 at random times while saving and loading: no checkpoint is lost, and none is a mixture of two.

Two or three processes over gloo load the newest checkpoint and then save new ones, until one or all of them are
killed. The next processes must all load the same checkpoint with its saved values, and none older than the last one
that all ranks have saved completely.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

import sparsecomm as sc
from tests.stress.harness import Attack

LIMIT = 60.0  # seconds in which all processes load
LIVES = 20  # starts of the processes per folder


class Kills(Attack):
    options = (("kills", 1000, "how many processes, or groups of them, are killed"),)

    def run(self) -> None:
        import sparsecomm.torch  # imported once for all forks

        os.environ["SPARSECOMM_TIMEOUT"] = str(self.timeout)
        rng = random.Random(self.report.seed)
        while self.counts["kills"] < self.arguments.kills and len(self.report.failures) < 5:
            torch, shared = rng.random() < 0.5, rng.random() < 0.5
            with tempfile.TemporaryDirectory() as folder:
                self._kill_in(Path(folder), sparsecomm.torch if torch else sc, shared, rng)

    def _kill_in(self, root: Path, module: Any, shared: bool, rng: random.Random) -> None:
        P, finished = rng.choice([2, 3]), 0  # last step that all ranks have saved
        for life in range(LIVES):
            logs = root / f"log{life}"
            logs.mkdir()
            files = [logs / str(rank) for rank in range(P)]
            pids = []
            for rank, file in enumerate(files):
                if not (pid := os.fork()):
                    live(rank, P, root / ("all" if shared else str(rank)), logs / "store", file, module)
                pids.append(pid)
            began = time.monotonic()
            early = rng.random() < 0.3  # while they load
            while not all(file.exists() for file in files) and time.monotonic() - began < LIMIT:
                time.sleep(0.002)
                if early and rng.random() < 0.01:
                    break
            time.sleep(rng.expovariate(20))
            for pid in pids if rng.random() < 0.3 else [rng.choice(pids)]:
                os.kill(pid, signal.SIGKILL)
            self.counts["kills"] += 1
            time.sleep(rng.choice([0, 0.05]))
            for pid in pids:  # like a launcher, since survivors would wait for the timeout
                os.kill(pid, signal.SIGTERM)
            for pid in pids:
                os.waitpid(pid, 0)
            words = [[line.split(" ", 1) for line in file.read_text().splitlines()] for file in files if file.exists()]
            wrong = [text for lines in words for kind, text in lines if kind == "wrong"]
            loaded = {int(text) for lines in words for kind, text in lines if kind == "loaded"}
            if wrong or len(loaded) > 1 or any(step < finished for step in loaded):
                self.fail(f"life {life}, {finished} was finished, ranks have loaded {loaded}: {wrong}")
                return
            saved = [[int(text) for kind, text in lines if kind == "saved"] for lines in words]
            if len(saved) == P:
                finished = max(finished, min(max(steps, default=0) for steps in saved))
                self.counts["saves that all ranks finished"] += min(map(len, saved))
            self.counts["lives that loaded"] += bool(loaded - {0})
            self.progress(f"{self.counts['kills']} of {self.arguments.kills} kills")


def live(rank: int, P: int, folder: Path, store: Path, log: Path, module: Any) -> None:
    def note(text: str) -> None:
        with log.open("a") as file:
            file.write(f"{text}\n")

    try:
        load_and_save(rank, P, folder, store, module, note)
    except (sc.SparseCommError, RuntimeError):  # another rank was killed
        pass
    except BaseException:
        note(f"wrong {traceback.format_exc()!r}")
    finally:
        os._exit(0)


def load_and_save(rank: int, P: int, folder: Path, store: Path, module: Any, note: Any) -> None:
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), P), rank=rank, world_size=P)

    def objects(step: int) -> dict[str, Any]:
        array = np.random.default_rng([step, rank]).standard_normal(3000).astype(np.float32)
        return {"x": torch.from_numpy(array) if module is not sc else array, "step": step}

    try:
        loaded = module.load(folder, {"x": None, "step": None})
    except sc.InvalidInputError as error:
        note(f"wrong {error}")
        raise
    step = loaded.step if loaded else 0
    if loaded and not (loaded.values["step"] == step and np.array_equal(loaded.values["x"], objects(step)["x"])):
        note(f"wrong values of step {loaded.values['step']} in {step}")
    note(f"loaded {step}")
    while True:
        step += 1
        module.save(folder, step, objects(step))
        note(f"saved {step}")
