"""Train GPT-2 with 124 million weights by dense AdamW and by SparseAdamW, with all ranks on one GPU.

    python -m bench.gpu_training --out bench/results/gpu-training.jsonl
    python -m bench.gpu_training --minutes 4 --out gpu-training.jsonl     # repeat it until both runs are complete
    python -m bench.gpu_training --report gpu-training.jsonl
    python -m bench.gpu_training --tiny --device cpu

Ranks are simulated in one process and take turns on the GPU. Each has its own weights, gradients and residuals. A dense
step adds up the gradients of all ranks in one model, and makes one step of PyTorch's fused AdamW. Both ways share the
initial weights, the batches and the learning rates, and use PyTorch's default betas and bfloat16 autocast.

The text is the Python source on this machine: the standard library and the installed packages. A token is a word with
the space before it, a digit, another character, or a line end with the indentation that follows. The vocabulary holds
50,304 tokens; rarer words are split into characters. One file in 20 is held out.

Every few steps, the program adds a line of JSON to the file OUT, with losses, bytes and times. With ``--minutes``, it
stops in time and writes a checkpoint to FOLDER. Repeat the command to continue.

- ``loss``: on held-out text, in nats per token. ``training_loss``: the mean since the last line.
- ``bytes``: bytes that a rank has sent per weight and step, counted by the library; for dense, computed for a ring.
- ``ms``: medians of the steps since the last line. ``backward`` is the forward and backward pass of one rank, with
  clipping. ``step`` is the optimizer's own work on one rank: it includes encoding and decoding messages, and copying
  them between device and host. ``messages`` is the time for moving the messages of one rank within this process, which
  ``step`` does not include. ``whole`` is the total time of a step on all ranks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

import sparsecomm.torch
from bench import report
from bench.clock import Clock
from bench.experiments.tasks import Transformer
from sparsecomm.optimizers.options import DENSITY
from sparsecomm.quantities import number_text
from sparsecomm.transport import simulated

HELD_OUT = 20  # one file in 20 is held out
MAX_FILE = 500_000  # bytes; longer files are mostly tables
NOT_SOURCES = {"site-packages", "dist-packages", "__pycache__"}
TOKEN = re.compile(r" ?[A-Za-z_]+|\n *| +|.")
Tokens = NDArray[np.uint16]
Row = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """The settings of a training. They identify its lines in OUT and its checkpoint."""

    way: str = "dense"  # or "sparse"
    ranks: int = 4
    batch: int = 2  # samples per rank and step
    steps: int = 2000
    seed: int = 0
    rate: float = 6e-4  # the largest learning rate
    clip: float = 1.0  # largest norm of the mean gradient; a rank clips its own gradient at sqrt(P) times this
    density: float = 0.0  # 0: dense
    layers: int = 12
    width: int = 768
    heads: int = 12
    length: int = 1024  # tokens of a sample
    words: int = 50_304  # size of the vocabulary
    text_bytes: int = 64_000_000
    held_out: int = 64  # samples

    def rate_at(self, step: int) -> float:
        """Return the learning rate: a linear warm-up over a twentieth of the steps, then a cosine to a twentieth."""
        cosine = 0.525 + 0.475 * math.cos(math.pi * step / self.steps)
        return self.rate * min(1, 20 * (step + 1) / self.steps) * cosine


TINY = {"layers": 2, "width": 32, "heads": 2, "length": 32, "words": 512, "text_bytes": 600_000, "held_out": 16}
TINY |= {"steps": 12, "rate": 6e-3}


# -- the text ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """Tokens of training and held-out files, and a description of where they come from."""

    training: Tokens
    held_out: Tokens
    about: dict[str, Any]


def sources(limit: int, *, packages: bool) -> Iterator[tuple[str, str]]:
    """Yield names and ASCII texts of modules, at most ``limit`` bytes of text, in an order that mixes the packages."""
    paths = sysconfig.get_paths()
    folders = [Path(paths["stdlib"]), *(Path(paths[name]) for name in ("purelib", "platlib") if packages)]
    files = {}
    for folder in dict.fromkeys(folders):
        for path in folder.rglob("*.py"):
            name = path.relative_to(folder).as_posix()
            if not NOT_SOURCES & set(path.relative_to(folder).parts) and path.stat().st_size <= MAX_FILE:
                files[name] = path
    seen = set()
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        text = re.sub(r"[^\n -~]", "", files[name].read_text("utf-8", "ignore"))
        if text in seen or not text:
            continue
        seen.add(text)
        limit -= len(text)
        if limit < 0:
            return
        yield name, text


def tokens_of(setting: Setting, *, packages: bool) -> Text:
    """Read sources and split them into tokens. Words enter the vocabulary by their frequency in the training files."""
    number: dict[str, int] = {}
    parts: list[list[NDArray[np.int32]]] = [[], []]
    sizes, digest = Counter[str](), hashlib.sha256()
    for i, (name, text) in enumerate(sources(setting.text_bytes, packages=packages)):
        tokens = TOKEN.findall(text)
        parts[i % HELD_OUT == HELD_OUT - 1].append(
            np.fromiter((number.setdefault(word, len(number)) for word in tokens), np.int32, len(tokens))
        )
        sizes[name.partition("/")[0] if "/" in name else "single modules"] += len(text)
        digest.update(text.encode())
    words = list(number)
    counts = np.bincount(np.concatenate(parts[0]), minlength=len(words))
    characters = sorted(set("".join(words)))
    order = sorted((i for i, word in enumerate(words) if len(word) > 1), key=lambda i: (-counts[i], words[i]))
    known = characters + [words[i] for i in order[: setting.words - len(characters)]]
    code = {word: i for i, word in enumerate(known)}
    spelled = [[code[word]] if word in code else [code[character] for character in word] for word in words]
    lengths = np.array(list(map(len, spelled)))
    starts, table = np.cumsum(lengths) - lengths, np.concatenate(spelled).astype(np.uint16)

    def encoded(numbers: NDArray[np.int32]) -> Tokens:
        sizes = lengths[numbers]
        shift = starts[numbers] - (np.cumsum(sizes) - sizes)  # from a position in the result to the one in the table
        result: Tokens = table[np.repeat(shift, sizes) + np.arange(sizes.sum())]
        return result

    training, held_out = (encoded(np.concatenate(part)) for part in parts)
    largest = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.most_common(8))
    about = {
        "source": f"Python {sysconfig.get_python_version()}'s standard library" + " and installed packages" * packages,
        "largest": largest,
        "packages": len(sizes),
        "files": sum(map(len, parts)),
        "bytes": sizes.total(),
        "tokens": len(training),
        "held_out_tokens": len(held_out),
        "words": len(known),
        "sha256": digest.hexdigest(),
    }
    return Text(training, held_out, about)


def text_of(setting: Setting, folder: Path, *, packages: bool) -> Text:
    """Return the text. It is stored in ``folder``, so that the next part of a training uses the same text."""
    file = folder / f"text-{setting.text_bytes}-{setting.words}.npz"
    if not file.exists():
        text = tokens_of(setting, packages=packages)
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(file, training=text.training, held_out=text.held_out, about=json.dumps(text.about))
        return text
    with np.load(file) as saved:
        return Text(saved["training"], saved["held_out"], json.loads(str(saved["about"])))


# -- the model --------------------------------------------------------------------------------------------------------


def model_of(setting: Setting) -> Transformer:
    """Return the model of Radford et al. (2019), without dropout. The embedding is also the output layer."""
    shape = setting.words, setting.width, setting.layers, setting.heads
    return Transformer(*shape, tied=True, length=setting.length, bias=False)


def loss_of(model: nn.Module, samples: Tensor) -> Tensor:
    """Return the mean cross-entropy of samples, which have one token more than the model reads."""
    with torch.autocast(samples.device.type, torch.bfloat16):
        scores = model(samples[:, :-1])
    return functional.cross_entropy(scores.float().flatten(0, 1), samples[:, 1:].flatten())


def groups_of(model: nn.Module, *, named: bool) -> list[dict[str, Any]]:
    """Return groups of parameters for AdamW: weight decay applies to matrices."""
    groups: dict[bool, list[Any]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[parameter.ndim > 1].append((name, parameter) if named else parameter)
    return [{"params": groups[True], "weight_decay": 0.1}, {"params": groups[False], "weight_decay": 0.0}]


# -- a training -------------------------------------------------------------------------------------------------------


@dataclass
class Progress:
    """Results of the ranks that have ended a step. Other simulated ranks may still be in it."""

    losses: list[Tensor] = field(default_factory=list)
    sent: list[float] = field(default_factory=list)  # bytes of each rank per weight, in all steps


class Training:
    """All ranks of a training, from a checkpoint or from the beginning."""

    def __init__(self, setting: Setting, text: Text, device: str, every: int, emit: Callable[[Row], None]) -> None:
        self.setting, self.text, self.device, self.every, self.emit = setting, text, device, every, emit
        self.first, self.saved = 0, dict[str, Any]()
        self.end, self.latest = setting.steps, -1
        self.deadline = math.inf
        self.states: dict[int, dict[str, Any]] = {}
        self.progress: dict[int, Progress] = {}
        self.losses: list[float] = []  # of the steps since the last line
        self.backward = self.paused = 0.0  # seconds in passes, and in evaluations
        self.clock = Clock(self._wait)
        self.marks: list[tuple[float, ...]] = []  # after each step: seconds without pauses, in passes, for messages

    def ends_before(self, step: int) -> bool:
        """Return whether to stop before a step. The first rank that asks decides for all."""
        if step > self.latest:
            self.latest = step
            if time.monotonic() > self.deadline:
                self.end = step
        return step >= self.end

    def run(self) -> dict[str, Any] | None:
        """Train, and return a checkpoint, or ``None`` if the training is complete."""
        self._mark()
        if self.setting.way == "dense":
            self.rank(None)
        else:
            simulated.run(self.setting.ranks, self.rank)
        models = [state["model"] for state in self.states.values()]
        for name, weight in models[0].items():
            if not all(torch.equal(weight, model[name]) for model in models):
                raise SystemExit(f"{name} differs between ranks")
        if self.end == self.setting.steps:
            return None
        optimizers = {rank: state["optimizer"] for rank, state in self.states.items()}
        sent = {rank: state["sent"] for rank, state in self.states.items()}
        return {"step": self.end, "model": models[0], "optimizers": optimizers, "sent": sent, "losses": self.losses}

    def rank(self, transport: simulated.SimulatedTransport | None) -> None:
        """Train one simulated rank; without a transport, do the work of all ranks."""
        setting, saved = self.setting, self.saved
        number = 0 if transport is None else transport.rank
        mine = range(setting.ranks) if transport is None else range(number, number + 1)
        torch.manual_seed(setting.seed)
        model = model_of(setting).to(self.device)
        limit = setting.clip * math.sqrt(setting.ranks / len(mine))
        optimizer: Any
        if transport is None:
            optimizer = torch.optim.AdamW(groups_of(model, named=False), fused=True)
        else:
            self.clock.watch(transport)
            groups = groups_of(model, named=True)
            optimizer = sparsecomm.torch.SparseAdamW(groups, density=setting.density, comm=transport)
        sent, size = 0, sum(parameter.numel() for parameter in model.parameters())
        if saved:
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizers"][number])
            sent = saved["sent"][number]
        for step in range(self.first, setting.steps):
            if self.ends_before(step):
                break
            for group in optimizer.param_groups:
                group["lr"] = setting.rate_at(step)
            losses = self._backward(model, step, mine, limit)
            before = 0 if transport is None else optimizer.reducer.counters.bytes_sent
            optimizer.step()
            if transport is None:
                sent += round(8 * (setting.ranks - 1) / setting.ranks * size)
            else:
                sent += optimizer.reducer.counters.bytes_sent - before
            self._ended(step, model, losses, sent / size)
        self.states[number] = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "sent": sent}

    def _backward(self, model: nn.Module, step: int, ranks: range, limit: float) -> list[Tensor]:
        """Set the gradients to the clipped mean over ``ranks``, and return the loss of each of these ranks."""
        setting, started, losses = self.setting, self._wait(), []
        random = np.random.default_rng([setting.seed, step])
        starts = random.integers(len(self.text.training) - setting.length - 1, size=(setting.ranks, setting.batch))
        model.zero_grad()
        for rank in ranks:
            loss = loss_of(model, self._samples(self.text.training, starts[rank]))
            (loss / len(ranks)).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        self.backward += self._wait() - started
        return losses

    def _samples(self, tokens: Tokens, starts: NDArray[np.int64]) -> Tensor:
        rows = np.stack([tokens[start : start + self.setting.length + 1] for start in starts])
        return torch.from_numpy(rows.astype(np.int64)).to(self.device)

    def _ended(self, step: int, model: nn.Module, losses: list[Tensor], sent: float) -> None:
        """Note the end of a step on a rank. The last rank evaluates the model if it is time."""
        setting, progress = self.setting, self.progress.setdefault(step, Progress())
        progress.losses += losses
        progress.sent.append(sent)
        if len(progress.losses) < setting.ranks:
            return
        del self.progress[step]
        self._mark()
        started = time.perf_counter()
        self.losses += torch.stack(progress.losses).tolist()
        if (step + 1) % self.every and step + 1 < setting.steps:
            return
        row = {
            "step": step + 1,
            "loss": self._held_out_loss(model),
            "training_loss": fmean(self.losses),
            "bytes": fmean(progress.sent) / (step + 1),
            "ms": self._times(),
        }
        if self.device == "cuda":
            free, total = torch.cuda.mem_get_info()
            row["memory_bytes"] = total - free
        self.emit(row)
        self.losses, self.marks = [], []
        self.paused += time.perf_counter() - started
        self._mark()

    @torch.no_grad()
    def _held_out_loss(self, model: nn.Module) -> float:
        setting, tokens = self.setting, self.text.held_out
        starts = np.linspace(0, len(tokens) - setting.length - 2, setting.held_out).astype(np.int64)
        parts = np.array_split(starts, max(1, setting.held_out // 4))
        losses = [loss_of(model, self._samples(tokens, part)).item() * len(part) for part in parts]
        return math.fsum(losses) / setting.held_out

    # -- times --

    def _wait(self) -> float:
        """Wait for the device, and return the time."""
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _mark(self) -> None:
        self.marks.append((self._wait() - self.paused, self.backward, self.clock.messages))

    def _times(self) -> dict[str, float]:
        """Return medians in ms: of one rank, and for "whole" of all ranks."""
        whole, backward, messages = np.diff(np.array(self.marks).T * 1e3)
        ranks, steps = self.setting.ranks, 1 if self.setting.way == "dense" else self.setting.ranks
        parts = {"backward": backward / ranks, "step": (whole - backward - messages) / steps}
        parts |= {"messages": messages / steps, "whole": whole}
        return {name: median(times.tolist()) for name, times in parts.items()}


# -- results ----------------------------------------------------------------------------------------------------------


def read(file: Path) -> dict[Setting, dict[int, Row]]:
    """Return the lines of a file by setting and step. A later line replaces an earlier one."""
    rows: dict[Setting, dict[int, Row]] = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        row = json.loads(line)
        rows.setdefault(Setting(**row["setting"]), {})[row["step"]] = row
    return rows


def show(file: Path) -> None:
    """Print the tables of a file: how each training ended, and its losses on the way."""
    results = read(file)
    if not results:
        raise SystemExit(f"{file}: no results")
    last = {setting: rows[max(rows)] for setting, rows in results.items()}
    lines = []
    for about in {json.dumps(row["about"]): row["about"] for row in last.values()}.values():
        text = about["text"]
        lines += [
            *report.head(about),
            f"# {about['card']}; {text['source']}; largest: {text['largest']}",
            f"# {text['files']:,} files, {text['bytes'] / 1e6:.1f} MB, {text['tokens']:,} tokens to train on",
        ]

    def samples(setting: Setting) -> Setting:
        return replace(setting, way="dense", density=0.0, ranks=1, batch=setting.ranks * setting.batch)

    dense = {samples(setting): rows for setting, rows in results.items() if setting.way == "dense"}

    def above(setting: Setting) -> str | None:
        """Return how much the loss is above that of a dense training with the same samples in each step."""
        row = dense.get(samples(setting), {}).get(last[setting]["step"])
        return None if row is None or setting.way == "dense" else f"{last[setting]['loss'] - row['loss']:+.4f}"

    def ms(name: str) -> Callable[[Setting], str]:
        return lambda setting: f"{last[setting]['ms'][name]:.1f}"

    ring = lambda setting: 8 * (setting.ranks - 1) / setting.ranks / last[setting]["bytes"]  # noqa: E731
    columns: list[report.Column] = [
        ("way", lambda setting: setting.way + (f", density {setting.density:g}" if setting.density else "")),
        ("ranks", lambda setting: setting.ranks),
        ("steps", lambda setting: f"{last[setting]['step']} of {setting.steps}"),
        ("held-out loss", lambda setting: f"{last[setting]['loss']:.4f}"),
        ("above dense", above),
        ("training loss", lambda setting: f"{last[setting]['training_loss']:.4f}"),
        ("bytes per weight and step", lambda setting: number_text(last[setting]["bytes"])),
        ("ring / this", lambda setting: f"{ring(setting):.1f}"),
        ("backward, ms", ms("backward")),
        ("step, ms", ms("step")),
        ("step / both", lambda s: f"{last[s]['ms']['step'] / (last[s]['ms']['step'] + last[s]['ms']['backward']):.1%}"),
    ]
    tables = [report.table(results, columns, title="at the end; times of one rank, medians", title_justify="left")]
    steps = sorted({step for rows in results.values() for step in rows})
    some = [step for i, step in enumerate(steps) if i % max(1, len(steps) // 20) == 0 or step == steps[-1]]
    by_setting: list[report.Column] = [
        (
            f"{setting.way}, {setting.ranks} ranks",
            lambda step, rows=rows: f"{rows[step]['loss']:.4f}" if step in rows else None,
        )
        for setting, rows in results.items()
    ]
    tables.append(report.table(some, [("step", str), *by_setting], title="held-out loss", title_justify="left"))
    report.show(lines, tables)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = report.parser(__doc__, prog="python -m bench.gpu_training")
    default = Setting()
    parser.add_argument("--ways", nargs="+", default=["dense", "sparse"], choices=["dense", "sparse"])
    for name, kind in {"ranks": int, "batch": int, "steps": int, "seed": int, "rate": float, "clip": float}.items():
        parser.add_argument(f"--{name}", type=kind, metavar="N", help=f"({getattr(default, name)})")
    parser.add_argument("--density", type=float, default=DENSITY, metavar="N", help=f"of SparseAdamW ({DENSITY})")
    parser.add_argument("--every", type=int, metavar="N", help="add a line every N steps (a fortieth)")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="N", help="start no step after N minutes")
    parser.add_argument("--part", type=int, metavar="N", help="stop each training after N more steps")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-training.jsonl"), help="the file of results (%(default)s)"
    )
    parser.add_argument("--folder", type=Path, default=Path("build/gpu_training"), help="of checkpoints (%(default)s)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on the standard library alone")
    parser.add_argument("--report", type=Path, metavar="FILE", help="train nothing: print the tables of this file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    started, options = time.monotonic(), parsed(argv)
    if options.report:
        show(options.report)
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "bench.gpu_training: PyTorch finds no CUDA device; --tiny --device cpu trains on the CPU", file=sys.stderr
        )
        return 1
    arguments = {name: getattr(options, name) for name in ("ranks", "batch", "steps", "seed", "rate", "clip")}
    changes = {**(TINY if options.tiny else {}), **{name: n for name, n in arguments.items() if n is not None}}
    common = Setting(**changes)
    text = text_of(common, options.folder, packages=not options.tiny)
    about = report.about("-m bench.gpu_training", list(argv or sys.argv[1:])) | {
        "card": card(options.device),
        "text": text.about,
    }
    if options.tiny:
        torch.set_num_threads(1)
    complete = True
    for way in options.ways:
        setting = replace(common, way=way, density=options.density if way == "sparse" else 0.0)
        complete &= trained(setting, text, options, about, started + 60 * options.minutes)
    return 0 if complete else 3


def card(device: str) -> str:
    if device == "cpu":
        return "CPU"
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"


def trained(setting: Setting, text: Text, options: argparse.Namespace, about: Row, deadline: float) -> bool:
    """Train until the deadline, unless the training is complete. Return whether it is complete now."""
    if setting.steps in read(options.out).get(setting, {}):
        return True
    if time.monotonic() > deadline:
        return False
    name = hashlib.sha256(json.dumps([asdict(setting), text.about["sha256"]]).encode()).hexdigest()[:12]
    checkpoint = options.folder / f"{setting.way}-{name}.pt"

    def emit(row: Row) -> None:
        with options.out.open("a") as file:
            file.write(json.dumps({"setting": asdict(setting), **row, "about": about}) + "\n")
        times = ", ".join(f"{name} {ms:.1f} ms" for name, ms in row["ms"].items())
        print(
            f"{setting.way} {row['step']}: loss {row['loss']:.4f}, {number_text(row['bytes'])} bytes; {times}",
            flush=True,
        )

    training = Training(setting, text, options.device, options.every or max(1, setting.steps // 40), emit)
    training.deadline = deadline
    if checkpoint.exists():
        training.saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
        training.first, training.losses = training.saved["step"], training.saved["losses"]
    if options.part:
        training.end = min(setting.steps, training.first + options.part)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    saved = training.run()
    if options.device == "cuda":
        torch.cuda.empty_cache()  # CuPy, which has a pool of its own, needs the memory
    if saved is None:
        checkpoint.unlink(missing_ok=True)
        return True
    unfinished = checkpoint.with_suffix(".new")
    torch.save(saved, unfinished)
    unfinished.replace(checkpoint)
    print(f"{setting.way}: stopped before step {saved['step'] + 1}, saved {checkpoint}; repeat to continue", flush=True)
    return False


if __name__ == "__main__":
    raise SystemExit(main())
