"""The time from the death of a worker under torchrun to the first step of those that torchrun starts again.

    python -m bench.restart --ranks 4 --parameters 25000000

A worker is killed by SIGKILL. torchrun ends the others and starts all again, which load the checkpoint of a step before
(`sparsecomm.torch.load`) and go on. Written are the seconds from the kill to what the last of the new ones does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench import report

EVENTS = ("started", "connected", "loaded", "stepped")


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="(4)")
    parser.add_argument("--parameters", type=int, default=25_000_000, help="of the model (25M)")
    parser.add_argument("--kills", type=int, default=3, help="one after another, each with a torchrun of its own (3)")
    parser.add_argument("--write", type=Path, metavar="STEM", help="write STEM.txt and STEM.json")
    parser.add_argument("--worker", type=Path, help="be a worker, which notes what it does in this folder")
    given = parser.parse_args()
    if given.worker:
        return worker(given.worker, given.parameters)
    runs = [killed(given.ranks, given.parameters) for _ in range(given.kills)]
    quartiles = {event: report.quartiles(np.array([run[event] for run in runs])) for event in EVENTS}
    columns = [
        ("from the kill to", lambda event: EVENTS_IN_WORDS[event]),
        ("s (quartiles)", lambda event: "{1:.1f} ({0:.1f} - {2:.1f})".format(*quartiles[event])),
    ]
    title = f"a worker of {given.ranks} dies under torchrun, {given.parameters / 1e6:.0f}M parameters"
    about = report.about("-m bench.restart", sys.argv[1:], given.ranks)
    table = report.table(EVENTS, columns, title=title)
    report.publish(given.write, report.head(about), [table], {"run": about, "seconds": runs})


EVENTS_IN_WORDS = {
    "started": "the first line of the last of the new workers",
    "connected": "their process group",
    "loaded": "the checkpoint loaded",
    "stepped": "the first step",
}


def killed(ranks: int, parameters: int) -> dict[str, float]:
    """Kill a worker once; return the seconds from then to each event, of the rank that is last."""
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "bench.restart"]
        command += ["--worker", folder, "--parameters", str(parameters)]
        variables = os.environ | {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        with (at / "said").open("w") as said:
            job = subprocess.Popen(command, env=variables, stdout=said, stderr=subprocess.STDOUT)
            try:
                while len(list(at.glob("life0-rank*-step3"))) < ranks:
                    _still_runs(job, at)
                victim = int((at / f"life0-rank{ranks - 1}-started").read_text().split()[1])
                os.kill(victim, signal.SIGKILL)
                then = time.time()
                while len(list(at.glob("life1-rank*-stepped"))) < ranks:
                    _still_runs(job, at)
            finally:
                job.terminate()
                job.wait()
        return {event: max(_times(at, event)) - then for event in EVENTS}


def _times(at: Path, event: str) -> list[float]:
    return [float(path.read_text().split()[0]) for path in at.glob(f"life1-rank*-{event}")]


def _still_runs(job: subprocess.Popen[bytes], at: Path) -> None:
    time.sleep(0.01)
    if job.poll() is not None:
        sys.exit(f"torchrun has ended:\n{(at / 'said').read_text()}")


def worker(folder: Path, parameters: int) -> None:
    life, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]

    def note(event: str) -> None:
        part = folder / f"{event}.{rank}.part"
        part.write_text(f"{time.time()} {os.getpid()}")
        part.rename(folder / f"life{life}-rank{rank}-{event}")

    note("started")
    import torch
    import torch.distributed as dist

    import sparsecomm.torch

    dist.init_process_group("gloo")
    note("connected")
    torch.manual_seed(0)
    model = torch.nn.Linear(1000, parameters // 1000, bias=False)
    optimizer = sparsecomm.torch.SparseAdamW(model.named_parameters(), lr=1e-3)
    objects = {"model": model, "optimizer": optimizer}
    found = sparsecomm.torch.load(folder / "checkpoint", objects)
    note("loaded")
    for step in range(found.step if found else 0, 1000):
        optimizer.zero_grad()
        model(torch.randn(1, 1000)).square().mean().backward()
        optimizer.step()
        if not found and step == 1:
            sparsecomm.torch.save(folder / "checkpoint", step + 1, objects)
        note("stepped" if found else f"step{step}")


if __name__ == "__main__":
    main()
