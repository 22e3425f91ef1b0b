"""The time from the death of a worker under torchrun to the first step of those that torchrun starts again.

    python -m bench.restart --ranks 4 --parameters 25000000

A worker is killed by SIGKILL. torchrun ends the others and starts all again, which load the last checkpoint
(`sparsecomm.torch.load`) and continue. The table has the seconds from the kill to events of the last new worker, and
the same for PyTorch alone, with DDP, AdamW, `torch.save` and `torch.load`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from bench import report

EVENTS = {
    "started": "the first line of the last of the new workers",
    "connected": "their process group",
    "made": "model and optimizer",
    "loaded": "the checkpoint loaded",
    "stepped": "the first step",
}
WAYS = {"sparse": "SparseAdamW", "plain": "PyTorch alone"}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="(4)")
    parser.add_argument("--parameters", type=int, default=25_000_000, help="of the model (25M)")
    parser.add_argument("--kills", type=int, default=3, help="one after another, each with a torchrun of its own (3)")
    parser.add_argument("--write", type=Path, metavar="STEM", help="write STEM.txt and STEM.json")
    parser.add_argument("--worker", type=Path, help="be a worker, which notes what it does in this folder")
    parser.add_argument("--way", choices=WAYS, default="sparse", help="of a worker")
    choices = parser.parse_args()
    if choices.worker:
        return worker(choices.worker, choices.parameters, choices.way)
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(choices.kills):
        for way, times in runs.items():
            times.append(killed(choices.ranks, choices.parameters, way))

    def seconds(way: str, event: str) -> str:
        quartiles = report.quartiles(np.array([run[event] for run in runs[way]]))
        return "{1:.1f} ({0:.1f} - {2:.1f})".format(*quartiles)

    columns = [
        ("from the kill to", lambda event: EVENTS[event]),
        *((f"{name}: s (quartiles)", partial(seconds, way)) for way, name in WAYS.items()),
    ]
    title = f"a worker of {choices.ranks} dies under torchrun, {choices.parameters / 1e6:.0f}M parameters"
    about = report.about("-m bench.restart", sys.argv[1:], ranks=1, threads=1)
    table = report.table(EVENTS, columns, title=title)
    report.publish(choices.write, report.head(about), [table], {"run": about, "seconds": runs})


def killed(ranks: int, parameters: int, way: str) -> dict[str, float]:
    """Kill a worker once; return the seconds from then to each event, of the rank that is last."""
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "bench.restart"]
        command += ["--worker", folder, "--parameters", str(parameters), "--way", way]
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


def worker(folder: Path, parameters: int, way: str) -> None:
    life, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]

    def note(event: str) -> None:
        part = folder / f"{event}.{rank}.part"
        part.write_text(f"{time.time()} {os.getpid()}")
        part.rename(folder / f"life{life}-rank{rank}-{event}")

    note("started")
    import torch
    import torch.distributed as dist

    sparse = way == "sparse"
    if sparse:
        import sparsecomm.torch
    dist.init_process_group("gloo")
    note("connected")
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Linear(1000, parameters // 1000, bias=False)
    optimizer: torch.optim.Optimizer
    if sparse:
        optimizer = sparsecomm.torch.SparseAdamW(model.named_parameters(), lr=1e-3)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    note("made")
    objects, file, first = {"model": model, "optimizer": optimizer}, folder / "checkpoint.pt", 0
    if sparse:
        found = sparsecomm.torch.load(folder / "checkpoint", objects)
        first = found.step if found else 0
    elif file.exists():
        state = torch.load(file, weights_only=True, mmap=True)
        first = state["step"]
        for name, one in objects.items():
            one.load_state_dict(state[name])
    note("loaded")
    for step in range(first, 1000):
        optimizer.zero_grad()
        model(torch.randn(1, 1000)).square().mean().backward()
        optimizer.step()
        if not first and step == 1:
            if sparse:
                sparsecomm.torch.save(folder / "checkpoint", step + 1, objects)
            elif rank == "0":
                torch.save({"step": step + 1, **{name: one.state_dict() for name, one in objects.items()}}, file)
        note("stepped" if first else f"step{step}")


if __name__ == "__main__":
    main()
