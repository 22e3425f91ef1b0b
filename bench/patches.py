"""Measure the size, speed and delivery of patches of weights, and compare them with other formats and programs.

    python -m bench.patches bits                        simulated weights, 2 minutes
    python -m bench.patches trained                     a transformer of 11.6M weights that trains, 15 minutes
    python -m bench.patches files                       checkpoints as files, beside zstd and xdelta3
    python -m bench.patches speed --elements 100000000  beside comparing and reading with NumPy, on one core
    python -m bench.slow_network run --ranks 4 --rate 200mbit --rtt 80ms --launcher torchrun -- \\
        python -m bench.patches delivery

- ``bits``: bits per changed bfloat16 weight. Weights are updated as AdamW would, with float32 masters. "As others
  count" is the entropy of positions, as if all weights were equally likely to change, and of the distances of new
  values. "Given the exponent" is the entropy if the exponent of the old weight is known.
- ``trained``: the same for weights of a transformer, at three learning rates. "grail" is the layout of its
  ``sparse_codec`` (rows as differences of 8 bits, columns of 16 bits, new values, compressed by zstd, level 1).
  "Index, value" has 32 and 16 bits.
- ``files``: bytes and seconds to make and to apply a patch between files of safetensors, with each command's default
  number of threads: for checkpoints of the transformer, and for simulated weights. ``--levels``: of zstd.
- ``speed``: medians and quartiles of interleaved runs; with ``--device cuda`` on a GPU, beside PyTorch.
- ``delivery``: the time from ``publish`` on rank 0 until all other ranks have applied the version, over `Ranks`; the
  floor is the time of the bytes on rank 0's link and two round trips.

``--write STEM`` adds the results to STEM.json, where they replace earlier results of the same kind, and writes tables
of all results in this file to STEM.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from rich.table import Table
from torch.nn import functional

from bench import report
from bench.timing import seconds as seconds_of
from sparsecomm import patches
from sparsecomm.patches.codec import apply_to, diff_weights
from sparsecomm.patches.elements import weights_of
from sparsecomm.patches.safetensors import map_weights, write_file
from sparsecomm.tensors.arrays import Array

Row = dict[str, Any]
SIMULATED = [(3e-7, 1), (1e-6, 1), (3e-7, 8), (1e-6, 8)]  # learning rate, and steps per version
TRAINED = [1e-6, 1e-5, 1e-4]
COMPARE, READ = "compare: old != new", "read: the maximum"
VERSIONS, STEPS = 24, 8  # per learning rate, and steps per version in every second row


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("what", choices=list(KINDS))
    parser.add_argument("--elements", type=int, default=100_000_000, help="of speed, files and delivery (100,000,000)")
    parser.add_argument("--changed", type=float, default=0.01, help="share of them that changes (0.01)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="of speed (cpu)")
    parser.add_argument("--repeats", type=int, default=15, help="of speed and delivery (15)")
    parser.add_argument("--levels", type=int, nargs="+", default=[3, 19], help="of zstd (3 19)")
    parser.add_argument("--warmup", type=int, default=150, help="training steps before `trained` and `files` (150)")
    parser.add_argument("--rate", type=float, default=200e6, help="bits per second of the link, for the floor (200e6)")
    parser.add_argument("--round-trip", type=float, default=0.08, help="seconds, for the floor (0.08)")
    parser.add_argument("--write", type=Path, metavar="STEM", help="add to STEM.json and write STEM.txt")
    args = parser.parse_args()
    rows = KINDS[args.what][0](args)
    if rows is not None:
        publish(args, rows)


# -- bits -------------------------------------------------------------------------------------------------------------


def bits(args: argparse.Namespace) -> list[Row]:
    """Count the bits of patches of simulated weights."""
    return [{"rate": rate, "steps": steps} | counted(*simulated(rate, steps)) for rate, steps in SIMULATED]


def simulated(rate: float, steps: int, n: int = 2_000_000) -> tuple[Array, Array]:
    """Return the last two versions of weights that AdamW moves by noise and a drift."""
    rng = np.random.default_rng(0)
    masters, drift = (rng.standard_normal(n).astype(np.float32) * np.float32(scale) for scale in (0.02, 0.1))
    momentum, new = np.zeros(n, np.float32), bfloat16(masters)
    old = new
    for _ in range(VERSIONS):
        old = new
        for _ in range(steps):
            momentum = 0.9 * momentum + 0.1 * (rng.standard_normal(n).astype(np.float32) + drift)
            masters = masters - np.float32(rate) * momentum
        new = bfloat16(masters)
    return old, new


def bfloat16(x: Array) -> Array:
    """Return the bits of floats, rounded to nearest even."""
    u = x.view(np.uint32)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def counted(old: Array, new: Array) -> Row:
    """Return the share of changed weights, and bits per change."""
    changed = old != new
    ordered = [np.where(bits & 0x8000, -(bits & 0x7FFF).astype(int), bits & 0x7FFF) for bits in (old, new)]
    distances, exponents = (ordered[1] - ordered[0])[changed], (old >> 7 & 0xFF).astype(int)
    patch = patches.diff(torch.from_numpy(old).view(torch.bfloat16), torch.from_numpy(new).view(torch.bfloat16))
    return {
        "changed": changed.mean(),
        "others": entropy(changed, distances, np.zeros_like(exponents)),
        "floor": entropy(changed, distances, exponents),
        "patch": 8 * len(patch) / changed.sum(),
    }


def entropy(changed: Array, distances: Array, labels: Array) -> float:
    """Return the entropy of positions and distances per change, if the label of each weight is known."""
    count, hits = np.bincount(labels), np.bincount(labels, weights=changed)
    total = 0.0
    for p, size in zip(hits / np.maximum(count, 1), count, strict=True):
        if 0 < p < 1:
            total -= size * (p * np.log2(p) + (1 - p) * np.log2(1 - p))
    for label in np.unique(labels[changed]):
        _, sizes = np.unique(distances[labels[changed] == label], return_counts=True)
        total -= float((sizes * np.log2(sizes / sizes.sum())).sum())
    return total / len(distances)


# -- training ---------------------------------------------------------------------------------------------------------


class Training:
    """The training of the transformer of the reports, with float32 weights, on words of Python's sources."""

    def __init__(self, warmup: int) -> None:
        from bench.experiments.tasks import WORDS, Transformer, source_words

        torch.manual_seed(0)
        self.model, (self._samples, _) = Transformer(WORDS, 512, 3, 8, tied=True), source_words()
        options: Any = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
        self.optimizer, self._step = torch.optim.AdamW(self.model.parameters(), **options), 0
        for _ in range(warmup):
            self.step()

    def step(self) -> None:
        batch = self._samples.take(
            torch.randint(len(self._samples), (16,), generator=torch.Generator().manual_seed(self._step))
        )
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(batch.inputs).flatten(0, 1), batch.targets.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self._step += 1

    def versions(self, rate: float, count: int) -> list[dict[str, torch.Tensor]]:
        """Continue training with a learning rate; return ``count`` versions in bfloat16: now, and after each step."""
        self.optimizer.param_groups[0]["lr"] = rate
        versions = []
        for step in range(count):
            if step:
                self.step()
            versions.append({name: p.detach().bfloat16() for name, p in self.model.named_parameters()})
        return versions


def trained(args: argparse.Namespace) -> list[Row]:
    """Count the bits of patches of trained weights, after one step and after several."""
    rows, training = [], Training(args.warmup)
    for rate in TRAINED:
        versions = training.versions(rate, VERSIONS + 1)
        for steps in (1, STEPS):
            counts = [of_models(*pair) for pair in zip(versions[::steps], versions[steps::steps], strict=False)]
            rows.append({"rate": rate, "steps": steps} | {key: median(row[key] for row in counts) for key in counts[0]})
    return rows


def of_models(old: dict[str, torch.Tensor], new: dict[str, torch.Tensor]) -> Row:
    """Return the share of changed weights, and bits per change in some formats, of two versions of a model."""
    flat = [np.concatenate([t.view(torch.uint16).numpy().ravel() for t in weights.values()]) for weights in (old, new)]
    changes = int((flat[0] != flat[1]).sum())
    patch = patches.diff(old, new)
    for name, tensor in old.items():
        old[name] = tensor.clone()
    patches.apply(patch, old)
    assert all(torch.equal(old[name].view(torch.uint16), new[name].view(torch.uint16)) for name in new)
    return counted(*flat) | {"patch": 8 * len(patch) / changes, "grail": 8 * grail(flat, new) / changes, "pairs": 48.0}


def grail(flat: list[Array], shapes: dict[str, torch.Tensor]) -> int:
    """Return the bytes of grail's layout: differences of rows and of columns, and new values, compressed by zstd."""
    parts, begin = [], 0
    for tensor in shapes.values():
        old, new = (weights[begin : begin + tensor.numel()].reshape(-1, tensor.shape[-1]) for weights in flat)
        begin += tensor.numel()
        rows, columns = np.nonzero(old != new)
        same = np.diff(rows, prepend=-1) == 0
        parts += [
            np.diff(rows, prepend=0).astype(np.uint8),
            np.where(same, np.diff(columns, prepend=0), columns).astype(np.uint16),
            new[rows, columns],
        ]
    data = b"".join(part.tobytes() for part in parts)
    return len(subprocess.run(["zstd", "-1", "-c"], input=data, capture_output=True, check=True).stdout)


# -- files ------------------------------------------------------------------------------------------------------------


def files(args: argparse.Namespace) -> list[Row]:
    """Measure patches between files, beside other programs: checkpoints of the transformer, and larger files."""
    with TemporaryDirectory() as folder:
        old, new = Path(folder, "old.safetensors"), Path(folder, "new.safetensors")
        for path, version in zip((old, new), Training(args.warmup).versions(1e-5, 2), strict=True):
            write_file(path, weights_of(version))
        rows = of_files(old, new, args.levels, repeats=3)
        for path, weights in zip((old, new), versions_of(args.elements, args.changed), strict=True):
            write_file(path, weights_of({"weight": weights}))
        return rows + of_files(old, new, args.levels, repeats=1)


def of_files(old: Path, new: Path, levels: list[int], repeats: int) -> list[Row]:
    """Return the bytes and the times of patches between two files, made and applied in several ways."""
    patch, out = old.with_name("patch"), old.with_name("out")
    own = [sys.executable, "-m", "sparsecomm", "patch"]
    window = f"--long={max(27, old.stat().st_size.bit_length())}"
    zstd = ["zstd", "-q", "-f", window, f"--patch-from={old}"]
    xdelta = ["xdelta3", "-f", "-B", str(1 << 29), "-s", str(old)]
    commands: dict[str, tuple[list[Any], list[Any]]] = {
        "sparsecomm patch": ([*own, "diff", old, new, patch], [*own, "apply", old, patch, out]),
        **{
            f"zstd -{n} --patch-from": ([*zstd, f"-{n}", new, "-o", patch], [*zstd, "-d", patch, "-o", out])
            for n in levels
        },
        "xdelta3": ([*xdelta, "-e", new, patch], [*xdelta, "-d", patch, out]),
    }
    ways: dict[str, Sequence[Callable[[], object]]] = {
        "diff, apply in a program": (
            lambda: patch.write_bytes(diff_weights(map_weights(old), map_weights(new))),
            lambda: apply_file(old, patch, out),
        )
    }
    for name, pair in commands.items():
        if shutil.which(str(pair[0][0])) is not None:
            quiet = [partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL) for command in pair]
            ways[name] = quiet
    rows = []
    for name, steps in ways.items():
        made, applied = np.median([[seconds_of(step) for step in steps] for _ in range(repeats)], axis=0)
        assert out.read_bytes() == new.read_bytes()
        rows.append(
            {"way": name, "file": new.stat().st_size, "bytes": patch.stat().st_size, "made": made, "applied": applied}
        )
    for row in rows:
        row |= {f"{key}_ratio": row[key] / rows[1][key] for key in ("bytes", "made", "applied")}
    return rows


def apply_file(old: Path, patch: Path, out: Path) -> None:
    """Apply a patch to a file, and write the result to another one."""
    shutil.copyfile(old, out)
    apply_to(patch.read_bytes(), map_weights(out, writable=True))


# -- speed ------------------------------------------------------------------------------------------------------------


def versions_of(n: int, changed: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two versions of bfloat16 weights; as in training, small ones change more often, mostly by one place."""
    rng = np.random.default_rng(0)
    old = bfloat16(rng.standard_normal(n, np.float32) * np.float32(0.02))
    scale = np.exp2(121 - (old >> 7 & 0xFF).astype(np.float32))
    chosen = rng.random(n, np.float32) < np.minimum(1, scale * np.float32(0.16 * changed))
    steps = rng.choice(np.array([-2, -1, 1, 2]), int(chosen.sum()), p=[0.07, 0.43, 0.43, 0.07])
    new = old.copy()
    new[chosen] = (new[chosen].astype(int) + steps).astype(np.uint16)
    return torch.from_numpy(old).view(torch.bfloat16), torch.from_numpy(new).view(torch.bfloat16)


def speed(args: argparse.Namespace) -> list[Row]:
    """Time diff and apply beside comparing and reading: with NumPy on one core, or with PyTorch on a GPU."""
    os.environ["SPARSECOMM_THREADS"] = "1"
    old, new = (version.to(args.device) for version in versions_of(args.elements, args.changed))
    patch, back = patches.diff(old, new), patches.diff(new, old)
    target = old.clone()
    reading: dict[str, Callable[[], object]]
    if args.device == "cpu":
        bits_old, bits_new = old.view(torch.uint16).numpy(), new.view(torch.uint16).numpy()
        reading = {COMPARE: lambda: bits_old != bits_new, READ: lambda: bits_old.view(np.uint64).max()}
    else:
        reading = {
            COMPARE: lambda: (old != new, torch.cuda.synchronize()),
            READ: lambda: (old.view(torch.int32).max(), torch.cuda.synchronize()),
        }
    ways = {
        COMPARE: reading[COMPARE],
        "diff": lambda: patches.diff(old, new),
        READ: reading[READ],
        "apply": lambda: patches.apply(patch, target),
        "apply, back": lambda: patches.apply(back, target),
    }
    times = np.array([[seconds_of(way) for way in ways.values()] for _ in range(args.repeats + 1)][1:])
    middle = dict(zip(ways, np.median(times, axis=0), strict=True))
    rows = []
    for i, name in enumerate(ways):
        row: Row = {"way": name, "ms": report.quartiles(times[:, i], 1e3)}
        if name == "diff":
            row["ratio"] = middle[name] / middle[COMPARE]
        if name.startswith("apply"):
            row["ratio"] = middle[name] / middle[READ]
        rows.append(row)
    rows[1] |= {"bytes": len(patch), "changed": patches.read_patch(patch).changed / args.elements}
    return rows


# -- delivery ---------------------------------------------------------------------------------------------------------


def delivery(args: argparse.Namespace) -> list[Row] | None:
    """Time from `publish` until all ranks have applied a version."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, P = dist.get_rank(), dist.get_world_size()
    old, new = versions_of(args.elements, args.changed)
    target, nbytes = old.clone(), 0
    with TemporaryDirectory() as folder:
        publisher = patches.Publisher(target, folder) if rank == 0 else None
        if publisher is not None:
            publisher.publish(0)
        subscriber = patches.Subscriber(target if rank else old.clone(), patches.Ranks(folder))
        subscriber.update()
        rows: list[Row] = []
        times = []
        for step in range(1, args.repeats + 1):
            dist.barrier()
            time.sleep(0.5)  # the other ranks wait in `update` already, as receivers do
            begin = published = time.perf_counter()
            if publisher is not None:
                target.copy_(new if step % 2 else old)
                begin = time.perf_counter()
                nbytes = publisher.publish(step).patch_bytes
                published = time.perf_counter()
            subscriber.update()
            clocks: list[Any] = [None] * P  # hosts on one machine share its clock
            dist.all_gather_object(clocks, time.perf_counter())
            times.append((max(clocks[1:]) - begin, published - begin))
        if publisher is not None:
            floor = 8 * nbytes * (P - 1) / args.rate + 2 * args.round_trip
            seconds, publishing = np.median(np.array(times), axis=0)
            rows = [{"receivers": P - 1, "bytes": nbytes, "floor": floor, "seconds": seconds, "published": publishing}]
            rows[0]["ratio"] = seconds / floor
    dist.destroy_process_group()
    return rows or None


# -- results ----------------------------------------------------------------------------------------------------------

_BITS: list[report.Column] = [
    ("learning rate", lambda row: f"{row['rate']:g}"),
    ("steps per version", lambda row: row["steps"]),
    ("changed, %", report.number("changed", ".2f", 100)),
    ("entropy as others count", report.number("others", ".2f")),
    ("entropy given the exponent", report.number("floor", ".2f")),
    ("patch", report.number("patch", ".2f")),
    ("patch / as others count", lambda row: f"{row['patch'] / row['others']:.3f}"),
]
KINDS: dict[str, tuple[Callable[[argparse.Namespace], list[Row] | None], str, list[report.Column]]] = {
    "bits": (bits, "bits per changed weight, simulated", _BITS),
    "trained": (
        trained,
        "bits per changed weight, a transformer of 11.6M weights",
        [*_BITS, ("grail's layout", report.number("grail", ".1f")), ("index, value", report.number("pairs", ".0f"))],
    ),
    "files": (
        files,
        "patches between files of two checkpoints",
        [
            ("way", lambda row: row["way"]),
            ("file, MB", report.number("file", ".2f", 1e-6)),
            ("patch, MB", report.number("bytes", ".3f", 1e-6)),
            ("made in, s", report.number("made", ".2f")),
            ("applied in, s", report.number("applied", ".2f")),
            ("patch / ours", report.number("bytes_ratio", ".2f")),
            ("time to make / our command", report.number("made_ratio", ".1f")),
            ("time to apply / our command", report.number("applied_ratio", ".1f")),
        ],
    ),
    "speed": (
        speed,
        "milliseconds",
        [
            ("way", lambda row: row["way"]),
            ("quartiles, ms", report.interval("ms", ".1f")),
            ("/ compare or read", report.number("ratio", ".2f")),
            ("patch, bytes", lambda row: row.get("bytes")),
            ("changed, %", report.number("changed", ".2f", 100)),
        ],
    ),
    "delivery": (
        delivery,
        "from publish until applied on all ranks",
        [
            ("receivers", lambda row: row["receivers"]),
            ("patch, bytes", lambda row: row["bytes"]),
            ("floor, s", report.number("floor")),
            ("delivery, s", report.number("seconds")),
            ("publish alone, s", report.number("published")),
            ("/ floor", report.number("ratio", ".2f")),
        ],
    ),
}


def publish(args: argparse.Namespace, rows: list[Row]) -> None:
    """Print the results, and add them to the files."""
    stored: dict[str, Any] = {}
    if args.write is not None and (path := args.write.with_name(args.write.name + ".json")).exists():
        stored = json.loads(path.read_text())
    stored[args.what] = {"run": report.about("-m bench.patches", sys.argv[1:]), "rows": rows}
    lines, tables = list[str](), list[Table]()
    for what, results in stored.items():
        _, title, columns = KINDS[what]
        lines += report.head(results["run"])
        tables.append(report.table(results["rows"], columns, title=title, title_justify="left"))
    report.publish(args.write, lines, tables, stored)


if __name__ == "__main__":
    main()
