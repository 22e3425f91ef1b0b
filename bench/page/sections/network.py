"""Time and bytes against the number of ranks and the rate of the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.page import draw
from bench.page.html import Section, number
from bench.page.results import Result
from bench.page.sections.comparison import link_text
from sparsecomm.quantities import bytes_text, number_text, rate_text, time_text

__all__ = ["ranks", "rates", "sent"]


def _network(result: Result) -> str:
    header = result.data["header"]
    link = header["costs"]["link"]
    return f"{rate_text(8 / link['beta'])} and {time_text(link['alpha'])} per message"


def ranks(results: Sequence[Result]) -> Section | None:
    """Return time, bytes and messages against the number of ranks, as simulated."""
    its = [r for r in results if r.kind == "model"]
    if not its:
        return None
    section = Section("Time, bytes and messages against ranks")
    section.text(
        "Simulated ranks run the shipped algorithms in virtual time. A step is the exchange with selecting, merging "
        'and packing. Dotted: predicted by the algorithm\'s formula, not simulated. Rings: what "auto" takes.'
    )
    for result in its:
        figure, axes = draw.panels(3)
        for each, label, text, simulated, predicted in (
            (axes[0], "time of a step, last rank", time_text, "step_seconds", "formula_step_seconds"),
            (axes[1], "bytes of the busiest rank", bytes_text, "bytes", None),
            (axes[2], "messages of the busiest rank", number_text, "messages_per_rank", None),
        ):
            _by_ranks(each, result, simulated, predicted, text)
            each.set_title(label, fontsize="small")
            each.set_xlabel("ranks")
        draw.legend(figure, axes)
        header = result.data["header"]
        what = f"n = {header['n']:,}, k = {header['k']:,}; links of {_network(result)}"
        section.figure(figure, f"Simulated ranks, {what}.", result.path.name)
        counts = sorted({row["ranks"] for row in result.rows})
        names = list(dict.fromkeys(row["algorithm"] for row in result.rows))
        found = {(row["ranks"], row["algorithm"]): row for row in result.rows}

        def cell(name: str, of: dict[tuple[int, str], dict[str, Any]] = found) -> Any:
            return lambda P: _milliseconds(of.get((P, name)))

        columns: list[Any] = [("ranks", str), *((f"{name}, ms", cell(name)) for name in names)]
        section.table(counts, columns, f"Time of a step, {what}; ~ by the formula", result.path.name)
    return section


def _milliseconds(row: dict[str, Any] | None) -> str | None:
    if row is None:
        return None
    return f"{row['step_seconds'] * 1e3:.2f}" if row["simulated"] else f"~{row['formula_step_seconds'] * 1e3:.2f}"


def _by_ranks(axes: Any, result: Result, key: str, predicted: str | None, text: draw.Text) -> None:
    found = []
    for name in dict.fromkeys(row["algorithm"] for row in result.rows):
        its = [row for row in result.rows if row["algorithm"] == name and row["simulated"]]
        if key == "bytes":
            its = [{**row, key: max(row["sent_bytes_per_rank"], row["received_bytes_per_rank"])} for row in its]
        found.append((name, [row["ranks"] for row in its], [row[key] for row in its]))
        beyond = [row for row in result.rows if row["algorithm"] == name and not row["simulated"]]
        if predicted and beyond and name != "auto":
            points = [(row["ranks"], row[key]) for row in its[-1:]] + [(row["ranks"], row[predicted]) for row in beyond]
            axes.plot(*zip(*points, strict=True), color=draw.style(name)["color"], linestyle=":")
    draw.lines(axes, found, number_text, text)


def rates(results: Sequence[Result]) -> Section | None:
    """Return time against the rate of the network, of the best format of each algorithm."""
    its = [r for r in results if r.kind == "auto model"]
    if not its:
        return None
    section = Section("Time against the rate of the network")
    section.text(
        "Simulated ranks, one on each node; of each algorithm the faster wire format. An algorithm that its formula "
        "puts at four times the fastest or more was not simulated, and has no point."
    )
    for result in its:
        largest, max_ranks = max(row["n"] for row in result.rows), max(row["ranks"] for row in result.rows)
        its_rows = [r for r in result.rows if (r["n"], r["ranks"], r["per machine"]) == (largest, max_ranks, 1)]
        densities = sorted({row["density"] for row in its_rows})
        figure, axes = draw.panels(len(densities), sharey=True)
        for each, density in zip(axes, densities, strict=True):
            best: dict[str, dict[float, float]] = {}
            for row in its_rows:
                if row["density"] == density:
                    for candidate in row["candidates"]:
                        times = best.setdefault(candidate["name"].partition(",")[0], {})
                        times[row["rate"]] = min(candidate["seconds"], times.get(row["rate"], candidate["seconds"]))
            found = [(name, sorted(times), [times[rate] for rate in sorted(times)]) for name, times in best.items()]
            draw.lines(each, found, rate_text, x_base=10)
            each.set_title(f"density {number_text(density)}", fontsize="small")
            each.set_xlabel("rate of each node's link")
        axes[0].set_ylabel("time of a step, last rank")
        draw.legend(figure, axes)
        section.figure(figure, f"Time against rate: {max_ranks} ranks, n = {largest:,}.", result.path.name)
    return section


def sent(results: Sequence[Result]) -> Section | None:
    """Return the bytes that a rank sends in a step, as counted in runs."""
    its = [r for r in results if r.kind == "compare" and len(r.data["times"]) > 4]
    if not its:
        return None
    section = Section("Bytes of a step")
    section.text(
        "Payload that the rank sends that sends most, counted by the transport, without the headers of MPI and network."
    )
    figure, axes = draw.panels(len(its), width=4.9, height=3.9, across=2, beside=0)
    for each, result in zip(axes, its, strict=True):
        rows = sorted((row for row in result.data["times"] if row["sent"]), key=lambda row: row["sent"])
        own = {row["name"]: row["ours"] for row in rows}
        draw.bars(each, list(own), [row["sent"] for row in rows], bytes_text, own.__getitem__)
        data = result.data
        each.set_title(
            f"{result.name}: P = {data['P']}, n = {data['n'] / 1e6:g}M, "
            f"density {number_text(data['density'])}, {data['wire']}",
            fontsize="small",
        )
    section.figure(figure, "Bytes that the busiest rank sends in a step.", "python -m bench.compare")
    columns = [
        ("", lambda row: row["name"]),
        ("format", lambda row: row.get("format")),
        ("sent by the busiest rank, B", number("sent", ",.0f")),
        ("mean over ranks, B", number("sent_mean", ",.0f")),
        ("on the wire, B", number("wire", ",.0f")),
    ]
    for result in its:
        caption = f"Bytes, P = {result.data['P']}, {link_text(result.data)}, n = {result.data['n']:,}"
        section.table(result.data["times"], columns, caption, result.path.name)
    return section
