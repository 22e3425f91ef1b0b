"""The tables: all settings, each method at its best, more steps, and the fewest bytes that are enough."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.table import Table

from bench.experiments.convergence.results import Outcome, Results, best, grouped
from bench.experiments.convergence.training import METHODS, Setting
from bench.experiments.tasks import TASKS
from sparsecomm.quantities import bytes_text, number_text, percent_text

ENOUGH = {"accuracy": 0.5, "loss": 0.01}  # tolerated difference to dense: percent, nats
Rows = Iterable[Sequence[str]]


def tables(results: Results) -> list[Table]:
    """Return the tables for which there are runs."""
    outcomes = results.outcomes()
    made = [everything(outcomes), at_their_best(outcomes)]
    if any(len({o.setting.steps for o in of_model}) > 1 for of_model in grouped(outcomes, lambda s: s.model).values()):
        made.append(more_steps(outcomes))
    compared = [o for o in outcomes if o.pairs]
    if len({amount(o.setting) for o in compared if o.setting.method != "dense"}) > 1:
        made.append(enough(compared))
    return made


def everything(outcomes: Sequence[Outcome]) -> Table:
    """Return a row per setting; gaps are means over the seeds of differences to dense training."""

    def row(outcome: Outcome) -> Sequence[str]:
        setting, sent = outcome.setting, outcome.mean(lambda t: t.curve.sent[-1])
        of_dense = ["", "", ""]
        if setting.method != "dense" and outcome.pairs:
            dense = Outcome(setting, outcome.dense, {}).mean(lambda t: t.curve.sent[-1])
            of_dense = [_times(outcome), percent_text(sent / dense, 2) if dense else "", _part_of_dense(outcome)]
        times, in_all, later = of_dense
        cells = *_where(setting), setting.name, density(setting), str(len(outcome.seeds)), score(outcome)
        return *cells, gap(outcome), times, bytes_text(sent), in_all, later, *_per_step(outcome)

    return _table(
        "Sparse gradients against dense ones",
        "score: mean over the seeds (minimum - maximum) on held-out samples; accuracy in percent, loss in nats.\n"
        "gap: mean difference to dense with the same seed; / range: the same / range of dense, ! if worse by more.\n"
        "sent: bytes of the rank that sends most; of dense: as a part of dense; later: per step after the warm-up.\n"
        "ms: communication per step after the warm-up, at 1 Gb/s and 50 us, with 25.6 million weights",
        ("model", "P", "steps", "gradients", "density"),
        ("seeds", "score", "gap", "/ range", "sent", "of dense", "later", "per step", "ms"),
        [map(row, part) for part in grouped(outcomes, lambda s: (s.model, s.steps, s.ranks)).values()],
    )


def at_their_best(outcomes: Sequence[Outcome]) -> Table:
    """Return a row per method and amount of bytes with its best setting, the best methods first."""

    def row(outcome: Outcome, tried: str, bytes_of: str) -> Sequence[str]:
        setting, times = outcome.setting, _times(outcome) if tried and outcome.pairs else ""
        cells = *_where(setting), bytes_of, METHODS[setting.method][0], setting.unusual, tried
        scores = density(setting, alone=True), str(len(outcome.seeds)), score(outcome), gap(outcome), times
        return *cells, *scores, *_per_step(outcome)

    sections = []
    sparse = [outcome for outcome in outcomes if outcome.setting.method != "dense"]
    for (*where, bytes_of), part in grouped(sparse, lambda s: (s.model, s.steps, s.ranks, amount(s))).items():
        rows = [(best(tried), str(len(tried))) for tried in grouped(part, lambda s: s.method).values()]
        for outcome in outcomes:
            s = outcome.setting
            rows += [(outcome, "")] if [s.method, s.model, s.steps, s.ranks] == ["dense", *where] else []
        rows.sort(key=lambda row: row[0].badness)
        sections.append([row(outcome, tried, bytes_of) for outcome, tried in rows])
    return _table(
        "Each method at its best",
        "of all momenta, learning rates, wire formats, warm-ups and decays that were tried: how many, and the best one",
        ("model", "P", "steps", "as many as", "gradients", "at its best with"),
        ("of", "density", "seeds", "score", "gap", "/ range", "per step", "ms"),
        sections,
    )


def more_steps(outcomes: Sequence[Outcome]) -> Table:
    """Return the gaps to dense after more steps; a row per method and amount of bytes."""
    fewest = {model: min(o.setting.steps for o in of) for model, of in grouped(outcomes, lambda s: s.model).items()}
    factors = sorted({o.setting.steps / fewest[o.setting.model] for o in outcomes})
    sections = []
    for (model, P, bytes_of), part in grouped(outcomes, lambda s: (s.model, s.ranks, amount(s))).items():
        rows = []
        for method, tried in grouped(part, lambda s: s.method).items():
            every = map(best, grouped(tried, lambda s: s.steps).values())
            by_factor = {o.setting.steps / fewest[model]: o for o in every}
            cells = {f: score(o, short=True) if method == "dense" else gap(o) for f, o in by_factor.items()}
            rows.append([model, str(P), bytes_of, METHODS[method][0], *(cells.get(f, "") for f in factors)])
        sections.append(rows)
    return _table(
        "More steps",
        "dense: the score; sparse: the gap to dense after as many steps, each method at its best for as many",
        ("model", "P", "as many as", "gradients"),
        [f"steps x {number_text(factor)}" for factor in factors],
        sections,
    )


def enough(outcomes: Sequence[Outcome]) -> Table:
    """Return the fewest bytes at which each method is as good as dense."""
    sections = []
    for (model, steps, P), part in grouped(outcomes, lambda s: (s.model, s.steps, s.ranks)).items():
        rows = []
        for method, tried in grouped(part, lambda s: s.method).items():
            good = [o for o in tried if o.sign * o.gap <= ENOUGH[TASKS[model].score]]
            cells = ["", "-", "-", "-", "-", "-"]
            if good:
                fewest = min(good, key=lambda o: o.mean(lambda t: t.step_bytes))
                nbytes, milliseconds = _per_step(fewest)
                of_dense = _part_of_dense(fewest) if method != "dense" else ""
                last = density(fewest.setting, alone=True), gap(fewest)
                cells = [fewest.setting.unusual, nbytes, of_dense, milliseconds, *last]
            rows.append([model, str(P), str(steps), METHODS[method][0], *cells])
        sections.append(rows)
    return _table(
        "Bytes that are enough",
        f"the fewest bytes per step, once the warm-up is over, with a mean score at most {ENOUGH['loss']:g} nats or "
        f"{ENOUGH['accuracy']:g} % worse than dense; - where none is",
        ("model", "P", "steps", "gradients", "with"),
        ("per step", "of dense", "ms", "density", "gap"),
        sections,
    )


def _table(title: str, caption: str, left: Sequence[str], right: Sequence[str], sections: Iterable[Rows]) -> Table:
    table = Table(title=title, caption=caption)
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    for rows in sections:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    return table


def _where(setting: Setting) -> tuple[str, str, str]:
    return setting.model, str(setting.ranks), str(setting.steps)


def amount(setting: Setting) -> str:
    """Return the amount of bytes in words; methods with equal amounts are compared."""
    if setting.method == "dense":
        return ""
    equal_to = number_text(setting.equal_to)
    return f"Top-k at {equal_to}" if setting.equal_to else f"density {number_text(setting.density)}"


def density(setting: Setting, *, alone: bool = False) -> str:
    """Return the density, and the density at which Top-k sends as many bytes."""
    text = f"{number_text(setting.density)}"
    return f"{text} (= {number_text(setting.equal_to)})" if setting.equal_to and not alone else text


def score(outcome: Outcome, *, short: bool = False) -> str:
    digits, unit = _digits(outcome)
    mean = f"{outcome.score:.{digits}f}{unit}"
    return mean if short else f"{mean} ({min(outcome.scores):.{digits}f} - {max(outcome.scores):.{digits}f})"


def gap(outcome: Outcome) -> str:
    digits, unit = _digits(outcome)
    return f"{outcome.gap:+.{digits}f}{unit}" if outcome.setting.method != "dense" and outcome.pairs else ""


def _digits(outcome: Outcome) -> tuple[int, str]:
    return (1, " %") if TASKS[outcome.setting.model].score == "accuracy" else (3, "")


def _times(outcome: Outcome) -> str:
    times = f"{abs(outcome.gap) / outcome.spread:.1f}" if outcome.spread else "-"
    return times + ("" if outcome.sign * outcome.gap <= outcome.spread else "!")


def _part_of_dense(outcome: Outcome) -> str:
    """Return the bytes of a step as a part of those of dense training."""
    dense = Outcome(outcome.setting, outcome.dense, {}).mean(lambda t: t.step_bytes)
    return percent_text(outcome.mean(lambda t: t.step_bytes) / dense, 2) if dense else ""


def _per_step(outcome: Outcome) -> tuple[str, str]:
    seconds = outcome.mean(lambda t: t.step_seconds)
    return bytes_text(outcome.mean(lambda t: t.step_bytes)), "" if math.isnan(seconds) else number_text(1e3 * seconds)
