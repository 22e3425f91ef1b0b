"""The table of trainings with local steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from local_steps_costs import RATES, cost_of
from local_steps_training import CHUNK, Setting
from rich.console import Console
from rich.table import Table

from sparsecomm.quantities import number_text

__all__ = ["Seeds", "cost", "name", "write"]

Outcome = dict[str, Any]
Seeds = dict[int, Outcome]
METHODS = ("dense", "allgather", "split")


def name(setting: Setting) -> str:
    """Return a method's name, with what is not the usual."""
    usual = Setting()
    parts = [setting.method]
    if setting.method != "dense":
        parts.append(f"{setting.bits} bits")
        parts += [f"k = {setting.k}"] if setting.k != usual.k else []
        parts += ["mean of contributors"] if setting.op == "mean_of_contributors" else []
        parts += [f"decay {setting.decay:g}"]
    if setting.momentum or setting.outer != 1:
        parts.append(f"outer {setting.outer:g}" + (f", Nesterov {setting.momentum:g}" if setting.momentum else ""))
    parts += [f"delay {setting.delay}"] if setting.delay else []
    parts += [f"{setting.steps:,} steps"] if setting.steps != usual.steps else []
    return ", ".join(parts)


def grouped(done: dict[Setting, Outcome]) -> dict[Setting, Seeds]:
    """Return the outcomes by setting and seed; settings have seed 0."""
    found: dict[Setting, Seeds] = {}
    for setting, outcome in sorted(done.items(), key=lambda item: sort_key(item[0])):
        found.setdefault(replace(setting, seed=0), {})[setting.seed] = outcome
    return found


def sort_key(s: Setting) -> tuple[Any, ...]:
    """Return the key by which rows are sorted."""
    return (
        s.ranks,
        s.sync_every,
        METHODS.index(s.method.partition(":")[0]),
        s.method,
        -s.bits,
        s.op,
        -s.k,
        -s.decay,
        s.outer,
        s.momentum,
        s.delay,
        s.steps,
        s.seed,
    )


def cost(setting: Setting) -> Any:
    """Return what a round of it costs the large model."""
    k = 1.0 if setting.method == "dense" else setting.k
    return cost_of(setting.ranks, k, tuple(sorted(setting.options.items())))


def table(groups: dict[Setting, Seeds]) -> Table:
    """Return a row for each setting: the loss at the end, and what a round and the training cost."""
    made = Table(title="Training with local steps: an LSTM on English text; bytes and seconds of 25.6M weights")
    headings = [
        "P",
        "H",
        "pseudo-gradients",
        "nats (seeds)",
        "above dense",
        "rounds",
        "MB a round",
        "of dense",
        "MB in all",
    ]
    for heading in [*headings, *(f"s a round, {rate}" for rate in RATES)]:
        made.add_column(heading, justify="left" if heading == "pseudo-gradients" else "right")
    dense = {(s.ranks, s.sync_every, s.steps): s for s in groups if s.method == "dense"}
    before = None
    for setting, seeds in groups.items():
        if before not in (None, (setting.ranks, setting.sync_every)):
            made.add_section()
        before = setting.ranks, setting.sync_every
        losses = [outcome["loss"] for outcome in seeds.values()]
        score = f"{np.mean(losses):.3f}"
        if len(losses) > 1:
            score += f" ({min(losses):.3f} - {max(losses):.3f})"
        paid, rounds = cost(setting), setting.steps // setting.sync_every
        moved = paid.sent + paid.received
        other = dense.get((setting.ranks, setting.sync_every, setting.steps))
        gap = fraction = ""
        if other is not None and other != setting:
            common = sorted(seeds.keys() & groups[other].keys())
            if common:
                gap = f"{np.mean([seeds[i]['loss'] - groups[other][i]['loss'] for i in common]):+.3f}"
            its = cost(other)
            fraction = f"1/{(its.sent + its.received) / moved:.0f}"
        made.add_row(
            str(setting.ranks),
            str(setting.sync_every),
            name(setting),
            score,
            gap,
            str(rounds),
            number_text(moved / 1e6),
            fraction,
            number_text(rounds * moved / 1e6, 4),
            *(number_text(seconds) for seconds in paid.seconds),
        )
    return made


def write(done: dict[Setting, Outcome], out: Path) -> None:
    """Print the table, and write it and the plots."""
    from local_steps_plots import plot_choices, plot_course

    groups = grouped(done)
    made = table(groups)
    Console(width=230).print(made)
    with out.with_suffix(".txt").open("w") as file:
        file.write(
            f"# python examples/local_steps_training.py --report {out.with_suffix('.jsonl')}; chunks of {CHUNK}\n"
        )
        Console(file=file, width=230).print(made)
    for ranks, sync_every in dict.fromkeys((s.ranks, s.sync_every) for s in groups):
        compared = [s for s in groups if (s.ranks, s.sync_every) == (ranks, sync_every)]
        if len(compared) > 3:
            plot_course(groups, ranks, sync_every, out.with_name(f"{out.name}-{ranks}-{sync_every}.png"))
    for ranks in dict.fromkeys(s.ranks for s in groups):
        if len({s.sync_every for s in groups if s.ranks == ranks}) > 2:
            plot_choices(groups, ranks, out.with_name(f"{out.name}-{ranks}-bytes.png"))
