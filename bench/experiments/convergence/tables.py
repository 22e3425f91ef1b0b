"""The tables: all settings, each method at its best, more steps, and the fewest bytes that are enough."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.table import Table

from bench.experiments.convergence.results import Outcome, Results, best, grouped
from bench.experiments.convergence.training import METHODS, Setting
from bench.experiments.tasks import TASKS
from sparsecomm.quantities import bytes_text, number_text, percent_text

ENOUGH = {"accuracy": 0.5, "loss": 0.01}  # tolerated difference to dense: percent, nats


def tables(results: Results) -> list[Table]:
    """Return the tables for which there are trainings."""
    outcomes = results.outcomes()
    table = [everything(outcomes), at_their_best(outcomes)]
    if any(len({o.setting.steps for o in of_model}) > 1 for of_model in grouped(outcomes, lambda s: s.model).values()):
        table.append(more_steps(outcomes))
    compared = [o for o in outcomes if o.pairs]
    if len({amount(o.setting) for o in compared if o.setting.method != "dense"}) > 1:
        table.append(enough(compared))
    return table


def everything(outcomes: Sequence[Outcome]) -> Table:
    """Return a row per setting; gaps are means over the seeds of differences to dense training."""
    table = _table(
        "Sparse gradients against dense ones",
        "score: mean over the seeds (least to most), of what was held out; accuracy in percent, loss in nats.\n"
        "gap: to dense with the same seed, mean; / range: that of dense over its seeds, ! if worse by more.\n"
        "sent: bytes of the rank that sends most; of dense: in all; later: per step once the warm-up is over.\n"
        "ms: of communication per step once the warm-up is over, 1 Gb/s and 50 us, with 25.6 million weights",
        left=("model", "P", "steps", "gradients", "density"),
        right=("seeds", "score", "gap", "/ range", "sent", "of dense", "later", "per step", "ms"),
    )
    last = None
    for outcome in outcomes:
        setting = outcome.setting
        if last not in (None, part := (setting.model, setting.steps, setting.ranks)):
            table.add_section()
        last = part
        compared = setting.method != "dense" and bool(outcome.pairs)
        table.add_row(
            *_where(setting),
            setting.name,
            density(setting),
            str(len(outcome.seeds)),
            score(outcome),
            gap(outcome),
            _times(outcome) if compared else "",
            bytes_text(outcome.mean(lambda t: t.curve.sent[-1])),
            percent(outcome.mean(lambda t: t.curve.sent[-1]), _of_dense(outcome, in_all=True)) if compared else "",
            percent(outcome.mean(lambda t: t.step_bytes), _of_dense(outcome)) if compared else "",
            *_per_step(outcome),
        )
    return table


def at_their_best(outcomes: Sequence[Outcome]) -> Table:
    """Return a row per method and amount of bytes with its best setting, the best methods first."""
    table = _table(
        "Each method at its best",
        "of all momenta, learning rates, wire formats, warm-ups and decays that were tried: how many, and the best one",
        left=("model", "P", "steps", "as many as", "gradients", "at its best with"),
        right=("of", "density", "seeds", "score", "gap", "/ range", "per step", "ms"),
    )
    sparse = [outcome for outcome in outcomes if outcome.setting.method != "dense"]
    parts = grouped(sparse, lambda s: (s.model, s.steps, s.ranks, amount(s)))
    for (model, steps, P, bytes_of), part in parts.items():
        rows = [(best(tried), str(len(tried))) for tried in grouped(part, lambda s: s.method).values()]
        rows += [(o, "") for o in outcomes if _dense(o.setting, model, steps, P)]
        for outcome, tried in sorted(rows, key=lambda row: row[0].badness):
            setting = outcome.setting
            table.add_row(
                *_where(setting),
                bytes_of,
                METHODS[setting.method][0],
                setting.unusual,
                tried,
                density(setting, alone=True),
                str(len(outcome.seeds)),
                score(outcome),
                gap(outcome),
                _times(outcome) if tried and outcome.pairs else "",
                *_per_step(outcome),
            )
        table.add_section()
    return table


def more_steps(outcomes: Sequence[Outcome]) -> Table:
    """Return the gaps to dense after more steps; a row per method and amount of bytes."""
    fewest = {model: min(o.setting.steps for o in of) for model, of in grouped(outcomes, lambda s: s.model).items()}
    factors = sorted({o.setting.steps / fewest[o.setting.model] for o in outcomes})
    table = _table(
        "More steps",
        "dense: the score; sparse: the gap to dense after as many steps, each method at its best for as many",
        left=("model", "P", "as many as", "gradients"),
        right=[f"steps x {number_text(factor)}" for factor in factors],
    )
    last = None
    rows = grouped(outcomes, lambda s: (s.model, s.ranks, amount(s), s.method))
    for (model, P, bytes_of, method), tried in rows.items():
        found = {o.setting.steps / fewest[model]: o for o in map(best, grouped(tried, lambda s: s.steps).values())}
        if last not in (None, part := (model, P, bytes_of)):
            table.add_section()
        last = part
        cells = [score(found[f], short=True) if method == "dense" else gap(found[f]) for f in factors if f in found]
        of_factor = dict(zip([f for f in factors if f in found], cells, strict=True))
        table.add_row(model, str(P), bytes_of, METHODS[method][0], *(of_factor.get(f, "") for f in factors))
    return table


def enough(outcomes: Sequence[Outcome]) -> Table:
    """Return the fewest bytes at which each method is as good as dense."""
    table = _table(
        "Bytes that are enough",
        f"the fewest bytes per step, once the warm-up is over, with a mean score at most {ENOUGH['loss']:g} nats or "
        f"{ENOUGH['accuracy']:g} % worse than dense; - where none is",
        left=("model", "P", "steps", "gradients", "with"),
        right=("per step", "of dense", "ms", "density", "gap"),
    )
    last = None
    for (model, steps, P, method), tried in grouped(outcomes, lambda s: (s.model, s.steps, s.ranks, s.method)).items():
        if last not in (None, part := (model, steps, P)):
            table.add_section()
        last = part
        good = [o for o in tried if o.sign * o.gap <= ENOUGH[TASKS[model].score]]
        cells = model, str(P), str(steps), METHODS[method][0]
        if not good:
            table.add_row(*cells, "", "-", "-", "-", "-", "-")
            continue
        smallest = min(good, key=lambda o: o.mean(lambda t: t.step_bytes))
        nbytes, milliseconds = _per_step(smallest)
        part_of_dense = percent(smallest.mean(lambda t: t.step_bytes), _of_dense(smallest))
        table.add_row(
            *cells,
            smallest.setting.unusual,
            nbytes,
            part_of_dense if method != "dense" else "",
            milliseconds,
            density(smallest.setting, alone=True),
            gap(smallest),
        )
    return table


# -- cells ------------------------------------------------------------------------------------------------------------


def _table(title: str, caption: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, caption=caption)
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _where(setting: Setting) -> tuple[str, str, str]:
    return setting.model, str(setting.ranks), str(setting.steps)


def _dense(setting: Setting, model: str, steps: int, P: int) -> bool:
    return (setting.method, setting.model, setting.steps, setting.ranks) == ("dense", model, steps, P)


def amount(setting: Setting) -> str:
    """Return the amount of bytes in words; methods with equal amounts are compared."""
    if setting.method == "dense":
        return ""
    return (
        f"Top-k at {number_text(setting.equal_to)}" if setting.equal_to else f"density {number_text(setting.density)}"
    )


def density(setting: Setting, *, alone: bool = False) -> str:
    """Return the density, and the density at which Top-k sends as many bytes."""
    found = f"{number_text(setting.density)}"
    return f"{found} (= {number_text(setting.equal_to)})" if setting.equal_to and not alone else found


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


def _of_dense(outcome: Outcome, *, in_all: bool = False) -> float:
    """Return the bytes of the dense trainings, in all or per step."""
    dense = Outcome(outcome.setting, outcome.dense, {})
    return dense.mean((lambda t: t.curve.sent[-1]) if in_all else (lambda t: t.step_bytes))


def _per_step(outcome: Outcome) -> tuple[str, str]:
    seconds = outcome.mean(lambda t: t.step_seconds)
    return bytes_text(outcome.mean(lambda t: t.step_bytes)), "" if math.isnan(seconds) else number_text(1e3 * seconds)


def percent(nbytes: float, of_all: float) -> str:
    return percent_text(nbytes / of_all, 2) if of_all else ""
