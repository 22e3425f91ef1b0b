"""Accuracy against bytes: convergence, local steps, and what algorithms find of the true top-k."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from bench.page import draw
from bench.page.html import Section, number
from bench.page.results import Result
from sparsecomm.quantities import bytes_text, number_text

__all__ = ["convergence", "local_steps", "recovery"]


def convergence(results: Sequence[Result]) -> Section | None:
    """Return the score after training against the bytes that a rank has sent, by model, ranks and steps."""
    its = [r for r in results if r.kind == "convergence"]
    if not its:
        return None
    section = Section("Accuracy against bytes")
    section.text(
        "Each mark is a setting, the mean over its seeds: the accuracy after training, against the bytes that the "
        "busiest rank has sent. Left is cheaper, up is better. The dashed line is dense training. Marks of one method "
        "differ in density, momentum or learning rate, which the table tells."
    )
    for result in its:
        groups: dict[tuple[Any, ...], dict[tuple[Any, ...], list[Any]]] = defaultdict(lambda: defaultdict(list))
        for training in result.data["trainings"]:
            s = training["setting"]
            where = s["model"], s["ranks"], s["steps"]
            groups[where][s["method"], s["density"], s["momentum"], s["rate"], s["warmup"]].append(training["curve"])
        shown = {where: its for where, its in groups.items() if len(its) > 2}
        figure, axes = draw.panels(len(shown))
        rows = []
        for each, (where, settings) in zip(axes, shown.items(), strict=True):
            for (method, density, momentum, rate, _), curves in settings.items():
                sent, score = fmean(c["sent"][-1] for c in curves), fmean(c["accuracy"] for c in curves)
                look = {**draw.style(method), "linestyle": ""}
                each.plot(sent, score, label=method, **look)
                if method == "dense":
                    each.axhline(score, color="#4d4d4d", linewidth=1, linestyle="--")
                rows.append(
                    {
                        "model": where[0],
                        "ranks": where[1],
                        "steps": where[2],
                        "method": method,
                        "density": density,
                        "momentum": momentum,
                        "rate": rate,
                        "seeds": len(curves),
                        "sent": sent,
                        "accuracy": score,
                        "loss": fmean(c["loss"] for c in curves),
                    }
                )
            draw.log_axis(each.xaxis, bytes_text)
            each.xaxis.set_minor_formatter(draw.no_labels())
            each.grid(True, alpha=0.35)
            each.set_title(f"{where[0]}, P = {where[1]}, {where[2]:,} steps", fontsize="small")
            each.set_xlabel("bytes sent in all")
        axes[0].set_ylabel("accuracy, %")
        draw.legend(figure, axes)
        section.figure(figure, "Accuracy after training against bytes.", "python examples/convergence.py")
        columns = [
            *((name, lambda row, name=name: row[name]) for name in ("model", "ranks", "steps", "method")),
            ("density", number("density")),
            ("momentum", number("momentum", "g")),
            ("rate", number("rate", "g")),
            ("seeds", number("seeds", "d")),
            ("sent", lambda row: bytes_text(row["sent"])),
            ("accuracy, %", number("accuracy", ".2f")),
            ("loss", number("loss", ".3f")),
        ]
        section.table(rows, columns, "Trainings, means over seeds", result.path.name)
    return section


def local_steps(results: Sequence[Result]) -> Section | None:
    """Return bytes of a round, its time, and the loss by method and number of local steps."""
    its = [r for r in results if r.kind.startswith(("local-steps", "local steps"))]
    if not its:
        return None
    section = Section("Local steps")
    section.text(
        "Ranks take steps of their own, and exchange the change of their weights once a round, as in DiLoCo and "
        "SparseLoCo."
    )
    for result in its:
        if result.kind == "local-steps round":
            data = result.data["round"]
            figure, (axes,) = draw.panels(1, width=7, height=0.5 * len(data["ms"]) + 0.9)
            order = sorted(data["ms"].items(), key=lambda item: item[1][1])
            names = [name for name, _ in order]
            draw.bars(axes, names, [q[1] / 1e3 for _, q in order], draw.time_text, lambda name: "gloo" not in name)
            section.figure(figure, f"Exchange of a round, n = {data['n']:,}.", result.about["command"])
        elif result.kind == "local-steps bytes":
            columns = [
                ("ranks", number("ranks", "d")),
                ("way", lambda row: row["way"]),
                ("sent", lambda row: bytes_text(row["sent"])),
                ("received", lambda row: bytes_text(row["received"])),
                *((f"s at {name}", number(name)) for name in result.rows[0] if name.endswith("b/s")),
            ]
            section.table(result.rows, columns, "Bytes of a round, of the busiest rank", result.path.name)
        else:
            _losses(section, result)
    return section


def _losses(section: Section, result: Result) -> None:
    best: dict[tuple[int, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    ((steps, _),) = Counter(row["setting"]["steps"] for row in result.rows).most_common(1)
    for row in result.rows:
        s = row["setting"]
        if s["steps"] == steps:
            best[s["ranks"], s["method"]][s["sync_every"]].append(row["outcome"]["loss"])
    counts = sorted({ranks for ranks, _ in best})
    figure, axes = draw.panels(len(counts), sharey=True)
    for each, ranks in zip(axes, counts, strict=True):
        for (its, method), losses in best.items():
            if its == ranks:
                every = sorted(losses)
                each.plot(every, [min(losses[sync]) for sync in every], label=method, **draw.style(method))
        draw.size_axis(
            each, sorted({sync for (its, _), losses in best.items() if its == ranks for sync in losses}), number_text
        )
        each.set_title(f"P = {ranks}", fontsize="small")
        each.set_xlabel("local steps of a round")
        each.grid(True, alpha=0.35)
    axes[0].set_ylabel(f"loss after {steps} steps, the best setting")
    draw.legend(figure, axes)
    section.figure(figure, "Loss against the number of local steps; fewer rounds send fewer bytes.", result.path.name)


def recovery(results: Sequence[Result]) -> Section | None:
    """Return the part of the true top-k that each algorithm finds, against ranks."""
    its = [r for r in results if r.kind == "recovery"]
    if not its:
        return None
    section = Section("Entries found of the true top-k")
    section.text(
        "Of the k largest entries of the sum of all gradients, the part that an algorithm finds; and the magnitude "
        "that it applies, as a part of theirs. All algorithms see the same gradients of one training."
    )
    for result in its:
        rows = [row for row in result.rows if row["experiment"] == "on the same gradients"]
        densities = sorted({row["density"] for row in rows})
        for density in densities:
            figure, axes = draw.panels(2)
            for each, key in zip(axes, ("found", "applied"), strict=True):
                for way in dict.fromkeys(
                    row["way"] for row in rows if "int8" not in row["way"] and "float" not in row["way"]
                ):
                    line = [row for row in rows if (row["way"], row["density"]) == (way, density)]
                    look = draw.style(way.partition(" ")[0].rstrip(","))
                    if " " in way:
                        look |= {"markerfacecolor": "white", "linestyle": "--"}
                    each.plot([row["ranks"] for row in line], [row[key] for row in line], label=way, **look)
                draw.size_axis(each, sorted({row["ranks"] for row in rows}), number_text)
                each.set_title(key, fontsize="small")
                each.set_xlabel("ranks")
            draw.legend(figure, axes)
            section.figure(
                figure, f"Part of the true top-k, density {number_text(density)}.", result.about.get("command", "")
            )
        columns = [
            ("algorithm", lambda row: row["way"]),
            ("ranks", number("ranks", "d")),
            ("density", number("density", "g")),
            *((name, number(name, ".3f")) for name in ("found", "applied", "exact")),
            ("sent, kB", number("KB", ".1f")),
        ]
        section.table(rows, columns, "Part of the true top-k; narrow wire formats are in no picture", result.path.name)
    return section
