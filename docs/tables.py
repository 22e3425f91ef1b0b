"""Write the tables of the documentation that repeat what the code declares.

    python docs/tables.py            say which pages are out of date
    python docs/tables.py --write    bring them up to date

Tables are between ``<!-- table: NAME -->`` and ``<!-- end table -->``. The program also writes the types of options,
for type checkers, below ``# declared above: NAME(BASE) of CLASSES without OPTIONS`` in the library's files.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import math
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from sparsecomm import LocalSteps, Reducer, typing
from sparsecomm.algorithms import ALGORITHMS
from sparsecomm.cli import COMMANDS
from sparsecomm.primitives.costs import Link
from sparsecomm.quantities import number_text
from sparsecomm.tensors.kinds import EXACT
from sparsecomm.tuning import choice, profile
from sparsecomm.wire import WIRES, VectorType

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs"))
import reference  # noqa: E402

RESULTS = ROOT / "bench" / "results"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end table -->)", re.DOTALL)

SOURCES = sorted((ROOT / "sparsecomm").glob("*/*.py"))
TYPE = re.compile(
    r"^# declared above: (\w+)(?:\((\w+)\))? of ([\w, ]+?)(?: without ([\w, ]+))?\n(?:class.*\n(?:    .*\n)*)?",
    re.MULTILINE,
)

HIERARCHICAL = "hierarchical"
_LSTM = 196_743  # weights of the LSTM of bench/experiments/convergence
N, K = 25_600_000, 25_600  # for bytes per entry
_ROUNDED = {
    EXACT.name: "exact",
    "int8": "rounded to 8 bits",
    "int4": "rounded to 4 bits",
    "int2": "rounded to 2 bits",
    "sign": "rounded to 1 bit, the sign",
}


def algorithms() -> list[list[str]]:
    """Return the rows of the table of algorithms."""
    rows = [["`algorithm=`", "what it does", "result, the same bits on all ranks"]]
    for name, algorithm in ALGORITHMS.items():
        names = f'`"{name}"`' + (f', `"{name}:X"`' if name == HIERARCHICAL else "")
        rows.append([names, algorithm.summary, algorithm.result])
    chosen = "selects the algorithm with the lowest predicted time"
    return [*rows, ['`"auto"` (default)', chosen, "the result of that algorithm"]]


def algorithm_costs() -> list[list[str]]:
    """Return the rows of the table of costs, uses and sources of algorithms."""
    head = ["algorithm", "cost per rank", 'candidate of `"auto"`', '`op="mean_of_contributors"`']
    rows = [[*head, "as `hierarchical:X`", "source"]]
    for name, algorithm in ALGORITHMS.items():
        automatic = "yes" if algorithm.automatic else "on nodes with several ranks" if name == HIERARCHICAL else "no"
        uses = ["no" if algorithm.cannot_count_contributors else "yes", "yes" if algorithm.runs_between_nodes else "no"]
        rows.append([f"`{name}`", algorithm.cost, automatic, *uses, algorithm.source])
    return rows


def wires() -> list[list[str]]:
    """Return the rows of the table of wire formats."""
    rows = [["`wire=`", "bytes per entry at density 0.001, float32", "values"]]
    for name, wire in WIRES.items():
        nbytes = wire.bytes_per_entry(K, VectorType(N, np.dtype(np.int32), np.dtype(np.float32)))
        values = _ROUNDED.get(wire.kind.name, f"rounded to {wire.kind.name}")
        rows.append([f'`"{name}"`', f"{nbytes:.1f}".removesuffix(".0"), values])
    rows.append(
        [
            '`"auto"` (default)',
            "",
            "`plain` or `packed`, whichever costs less; `packed_int2` in training with the default algorithm",
        ]
    )
    return rows


def dense_is_shorter() -> list[list[str]]:
    """Return the rows of the table of densities above which a dense ring moves fewer bytes."""
    ranks = (2, 4, 8, 16, 32, 64)
    # What a rank moves of n elements of 4 bytes; and of n entries of 8 bytes, all of them.
    dense = {P: 2 * (P - 1) / P * 4 for P in ranks}
    sparse: dict[str, Callable[[int], float]] = {
        "split": lambda P: 2 * (P - 1) / P * 8,
        "butterfly": lambda P: math.log2(P) * 8,
        "tree": lambda P: 2 * math.log2(P) * 8,
        "allgather": lambda P: (P - 1) * 8,
    }
    rows = [["algorithm", *(f"P = {P}" for P in ranks)]]
    return rows + [[f"`{name}`", *(f"{dense[P] / moved(P):.2f}" for P in ranks)] for name, moved in sparse.items()]


def taken(gigabits: float, per_node: int) -> list[list[str]]:
    """Return the rows of the table of choices of "auto", by the links' rate and the ranks per node."""
    link = profile.DEFAULT.link
    link = Link(link.alpha / gigabits, link.beta / gigabits, link.gap / gigabits)
    costs = dataclasses.replace(profile.DEFAULT, link=link)
    ranks = [P for P in (2, 4, 8, 16, 32, 128, 1024) if per_node < P]
    rows = [["density", *(f"P = {P}" for P in ranks)]]
    for density in (0.0001, 0.001, 0.01, 0.1, 0.3):
        queries = [choice.CostQuery(P, P // per_node, N, int(N * density), 4) for P in ranks]
        choices = [choice.decide(query, costs) for query in queries]
        rows.append([number_text(density), *(each.algorithm.name + " *" * each.wire.needs_codec for each in choices)])
    return rows


def literals() -> list[list[str]]:
    """Return the rows of the table of option types that list names."""
    rows = [["type", "option that it annotates", "names that the option accepts"]]
    for name, of in (("AlgorithmName", "algorithm"), ("Op", "op"), ("WireName", "wire"), ("Scope", "scope")):
        alias = getattr(typing, name)
        names = (each for part in get_args(alias) for each in (get_args(part) or [part]))
        rows.append([f"`{name}`", f"`{of}`", ", ".join(f'`"{each}"`' for each in names)])
    return rows


def reducer_options() -> list[list[str]]:
    """Return the rows of the table of options that are passed on to a reducer, with their defaults."""
    rows = [["option", "type", "default", "default for local steps"]]
    locally = inspect.signature(LocalSteps).parameters
    for name, parameter in inspect.signature(Reducer).parameters.items():
        if name in typing.ReducerOptions.__annotations__:
            default, local = (f"`{p.default!r}`".replace("'", '"') for p in (parameter, locally[name]))
            rows.append([f"`{name}`", _cell(f"`{parameter.annotation}`"), default, local if local != default else ""])
    return rows


def commands() -> list[list[str]]:
    """Return the rows of the table of commands."""
    return [["command", "what it does"], *([f"[`{name}`](#{name})", c.HELP] for name, c in COMMANDS.items())]


def options(name: str) -> list[list[str]]:
    """Return the rows of the table of a command's options."""
    parser = argparse.ArgumentParser(add_help=False)
    COMMANDS[name].add_arguments(parser)
    rows = [["option", "meaning"]]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                words = [choice.dest, *(str(each.metavar) for each in action.choices[choice.dest]._actions[1:])]
                rows.append([f"`{' '.join(words)}`", _cell(choice.help or "")])
            continue
        value = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else "")
        value = "" if action.nargs == 0 else f" {value or action.dest.upper()}"
        names = ", ".join(f"`{option}{value}`" for option in action.option_strings) or f"`{value.strip()}`"
        rows.append([names, _cell((action.help or "") % {**vars(action), "prog": f"sparsecomm {name}"})])
    return rows


def measured(file: str, name: str) -> list[list[str]] | str:
    """Return the rows of a table of figures, as a benchmark wrote them, or nothing if there are no results yet."""
    pages = json.loads((RESULTS / f"{file}.json").read_text())["pages"] if (RESULTS / f"{file}.json").exists() else {}
    return pages.get(name, "")


def utilisation_maps() -> str:
    """Return the picture of utilisation, if it has been drawn."""
    drawn = (RESULTS / "utilisation.png").exists()
    return "![Utilisation, H against the rate of the links](../../bench/results/utilisation.png)\n" * drawn


def slow_links_losses() -> list[list[str]] | str:
    """Return the rows of the table of losses by H: of dense rounds, and of ours by algorithm, delay and alpha."""
    file = RESULTS / "slow-links.jsonl"
    losses_by_name: dict[str, dict[int, float]] = {}
    for entry in map(json.loads, file.read_text().splitlines() if file.exists() else []):
        s, name = entry["setting"], entry["setting"]["method"]
        name = name if name == "dense" else f"`{name}`"
        name += f", delay H/2, alpha {s['alpha']:g}" if s["delay"] else ""
        losses_by_name.setdefault(name, {})[s["sync_every"]] = entry["outcome"]["loss"]
    every = sorted({H for losses in losses_by_name.values() for H in losses})
    rows = [
        [name, *(f"{its[H]:.3f}" if H in its else "-" for H in every)] for name, its in sorted(losses_by_name.items())
    ]
    return [["exchange of pseudo-gradients", *(f"final loss, H = {H}" for H in every)], *rows] if rows else ""


def _adamw_runs() -> dict[tuple[str, float, int, str, str], tuple[float, dict[int, dict[str, float]]]]:
    """Return the runs of bench/experiments/adamw_rules.py at the best rate: its value, and the outcomes by seed.

    Keys are the model, beta2, P, the way and its settings. Rates with fewer seeds only served to find the best.
    """
    usual = {"optimizer": "adamw", "warmup": 0.02, "cap": 0, "weights": "float32"}
    matter = {
        "whole": ("density", "bits", "choose"),
        "sparse_adamw": ("density", "bits"),
        "powersgd": ("rank",),
        "gradients": ("density", "bits"),
        "updates": ("density", "bits"),
    }
    groups: dict[tuple[str, float, int, str, str], dict[float, dict[int, dict[str, float]]]] = {}
    for line in (RESULTS / "adamw.jsonl").read_text().splitlines():
        rule, outcome = (json.loads(line)[key] for key in ("rule", "outcome"))
        if rule["optimizer"] == "sgd" or rule["steps"]:  # is in another table, or was to find a rate
            continue
        settings = [f"{name}={rule[name]}" for name in matter.get(rule["way"], ())]
        settings += [f"{name}={rule[name]}" for name, value in usual.items() if rule.get(name, value) != value]
        key = rule["model"], rule.get("beta2", 0.95), rule["ranks"], rule["way"], ", ".join(settings)
        groups.setdefault(key, {}).setdefault(rule["rate"], {})[rule["seed"]] = outcome

    def order(by_seed: dict[int, dict[str, float]]) -> tuple[int, float]:
        return -len(by_seed), sum(outcome["loss"] for outcome in by_seed.values())

    return {key: min(by_rate.items(), key=lambda item: order(item[1])) for key, by_rate in groups.items()}


def _adamw_rows(*, betas: bool) -> list[list[str]]:
    """Return rows of runs: with ``betas`` of dense and SparseAdamW; else of all ways, P = 8, beta2 = 0.95."""
    best = _adamw_runs()
    dense = {key[:2] + key[4:]: outcomes for key, (_, outcomes) in best.items() if key[3] == "dense"}
    compared = {(model, beta2) for model, beta2, _, way, _ in best if way == "sparse_adamw"}
    rows = []
    for (model, beta2, P, way, settings), (rate, outcomes) in best.items():
        if betas and (way not in ("dense", "sparse_adamw") or "lion" in settings or (model, beta2) not in compared):
            continue
        if not betas and (model, beta2, P) != ("transformer", 0.95, 8):
            continue
        losses = [outcome["loss"] for outcome in outcomes.values()]
        spread = f" ({min(losses):.3f} - {max(losses):.3f})" if len(losses) > 1 else ""
        theirs = dense[model, beta2, "optimizer=lion" if "optimizer=lion" in settings else ""]
        above = np.mean([outcome["loss"] - theirs[seed]["loss"] for seed, outcome in outcomes.items()])
        outcome = next(iter(outcomes.values()))
        row = [f"`{way}`", settings, f"x {rate:g}", f"{np.mean(losses):.3f}{spread}"]
        row += [f"{above:+.3f}" if way != "dense" else "", number_text(outcome["bytes"]), f"{outcome['ring']:.0f}"]
        first = (model, f"{beta2:g}", str(P)) if betas else ()
        order = (model, beta2, way != "dense", -outcome["bytes"], P) if betas else (np.mean(losses),)
        rows.append((order, [*first, *row]))
    head = ["model", "beta2", "ranks"] * betas
    head += ["method", "settings", "learning rate", "final loss, nats", "loss above dense"]
    return [
        [*head, "bytes per weight and step", "bytes of a dense ring / bytes of this method"],
        *(row for _, row in sorted(rows, key=lambda each: each[0])),
    ]


def gpt2() -> list[list[str]]:
    """Return the runs of bench/gpt2.py: dense and SparseAdamW side by side, each at its best rate."""
    groups: dict[tuple[int, float, str], dict[float, dict[int, dict[str, float]]]] = {}
    for line in (RESULTS / "gpt2.jsonl").read_text().splitlines():
        setting, outcome = (json.loads(line)[key] for key in ("setting", "outcome"))
        way = setting["way"]
        settings = f"density={setting['density']}, wire={setting['wire']}" if way == "sparse" else ""
        key = setting["steps"], setting["beta2"], settings
        groups.setdefault(key, {}).setdefault(setting["rate"], {})[setting["seed"]] = outcome
    head = ["steps", "beta2", "settings", "learning rate", "seeds", "loss on held-out text", "training loss"]
    rows = [[*head, "held-out loss above dense", "bytes of a dense ring / bytes of this method"]]
    for (steps, beta2, settings), by_rate in sorted(groups.items()):
        for rate, outcomes in sorted(by_rate.items()):
            theirs = groups[steps, beta2, ""].get(rate, {})
            losses, training = ([o[name] for o in outcomes.values()] for name in ("loss", "training_loss"))
            above = [outcome["loss"] - theirs[seed]["loss"] for seed, outcome in outcomes.items() if seed in theirs]
            row = [str(steps), f"{beta2:g}", settings or "dense", f"{rate:g}", str(len(outcomes))]
            row += [f"{np.mean(losses):.3f}", f"{np.mean(training):.3f}"]
            row += [f"{np.mean(above):+.3f}" if settings and above else ""]
            rows.append([*row, f"{4 / next(iter(outcomes.values()))['bytes']:.0f}"])
    return rows


def few_bits() -> list[list[str]]:
    """Return the runs of the LSTM by bench/experiments/convergence with few bits, each at its best rate."""
    names = {"allgather": "Top-k (`allgather`)"}
    groups: dict[tuple[int, str, str, float, float], dict[tuple[float, float], dict[int, dict[str, Any]]]] = {}
    dense: dict[int, float] = {}
    for training in json.loads((RESULTS / "convergence.json").read_text())["trainings"]:
        s = training["setting"]
        if (s["model"], s["steps"]) != ("text", 900):
            continue
        if s["method"] == "dense":
            dense.setdefault(s["seed"], training["curve"]["loss"])  # the same batches, whatever P is
        elif s["wire"] in ("packed_sign", "packed_int2", "packed_int4"):
            key = s["ranks"], s["method"], s["wire"], s["density"], s["warmup"]
            groups.setdefault(key, {}).setdefault((s["momentum"], s["rate"]), {})[s["seed"]] = training
    rows = []
    for (P, method, wire, density, warmup), tried in groups.items():
        (momentum, rate), by_seed = min(tried.items(), key=lambda item: item[1][0]["curve"]["loss"])
        losses = [training["curve"]["loss"] for training in by_seed.values()]
        above = np.mean([training["curve"]["loss"] - dense[seed] for seed, training in by_seed.items()])
        curve, warm = by_seed[0]["curve"], round(900 * warmup)
        spread = f" ({min(losses):.3f} - {max(losses):.3f})" if len(losses) > 1 else ""
        each = (curve["sent"][-1] - curve["warm"]) / (900 - warm)
        row = [str(P), names.get(method, f"`{method}`"), number_text(density), f"`{wire}`", f"{warmup:.0%}"]
        row += [f"{momentum:g}, rate x {rate:g}", f"{np.mean(losses):.3f}{spread}", f"{above:+.3f}"]
        rows.append((P, each, [*row, number_text(each / 1e3), number_text(curve["sent"][-1] / 1e6)]))
    best: dict[tuple[int, int], tuple[dict[str, Any], dict[str, float]]] = {}
    for line in (RESULTS / "adamw.jsonl").read_text().splitlines():
        rule, outcome = (json.loads(line)[key] for key in ("rule", "outcome"))
        which = rule["ranks"], rule["rank"]
        if rule["model"] == "text" and (which not in best or outcome["loss"] < best[which][1]["loss"]):
            best[which] = rule, outcome
    for (P, rank), (rule, outcome) in best.items():
        each = outcome["bytes"] * _LSTM
        row = [str(P), f"PowerSGD, rank {rank}", "", "float32", f"{rule['warmup']:.0%}"]
        row += [f"0.9, rate x {rule['rate']:g}"]
        row += [f"{outcome['loss']:.3f}", f"{outcome['loss'] - dense[rule['seed']]:+.3f}"]
        rows.append((P, each, [*row, number_text(each / 1e3), number_text(each * 900 / 1e6)]))
    head = ["ranks", "method", "density", "format of values", "share of the steps in the warm-up"]
    head += ["momentum, learning rate", "final loss, nats", "loss above dense"]
    rows.sort(key=lambda row: row[:2])
    return [
        [*head, "kB sent per rank and step after the warm-up", "MB sent per rank in the whole run"],
        *(row for *_, row in rows),
    ]


def torch_versions() -> list[list[str]]:
    """Return the rows of the table of PyTorch versions that packaging/other_torch.py tested."""
    runs = json.loads((RESULTS / "torch-versions.json").read_text())
    rows = [["PyTorch", "Python", "tests passed", "tests left out, and why", "date"]]
    for version, run in runs.items():
        rows.append([version, run["versions"]["python"], str(run["passed"]), "; ".join(run["skipped"]), run["date"]])
    return rows


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


TABLES: dict[str, Callable[[], list[list[str]] | str]] = {
    "adamw": partial(_adamw_rows, betas=False),
    "adamw_betas": partial(_adamw_rows, betas=True),
    "algorithm_costs": algorithm_costs,
    "algorithms": algorithms,
    "commands": commands,
    "dense_is_shorter": dense_is_shorter,
    "few_bits": few_bits,
    "gpt2": gpt2,
    **{f"options_{name}": partial(options, name) for name in COMMANDS},
    "literals": literals,
    "reducer_options": reducer_options,
    **{f"reference_{name}": partial(reference.rows, name) for name in reference.ENTRIES},
    "slow_links_losses": slow_links_losses,
    "taken_at_1": partial(taken, 1, 1),
    "taken_at_1_nodes": partial(taken, 1, 4),
    "taken_at_25": partial(taken, 25, 1),
    "torch_versions": torch_versions,
    **{
        f"utilisation_{name}": partial(measured, "utilisation", f"utilisation_{name}")
        for name in ("local", "plan", "published", "steps")
    },
    "utilisation_maps": utilisation_maps,
    "wires": wires,
}


def updated(text: str) -> str:
    """Return a page with its tables up to date."""

    def table(match: re.Match[str]) -> str:
        made = TABLES[match[2]]()
        if isinstance(made, str):  # something else in its place
            return match[1] + made + match[3]
        head, *rows = made
        lines = [head, ["---"] * len(head), *rows]
        return match[1] + "".join(f"| {' | '.join(cells)} |\n" for cells in lines) + match[3]

    return TABLE.sub(table, text)


def options_types(path: Path) -> str:
    """Return a file of the library with the types of its options up to date."""
    text = path.read_text()
    if not TYPE.search(text):
        return text
    module = vars(importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)))

    def written(match: re.Match[str]) -> str:
        name, base, classes, without = match.groups()
        omitted = {*(without or "").split(", "), *(module[base].__annotations__ if base else ())}
        fields = [field for declared in classes.split(", ") for field in dataclasses.fields(module[declared])]
        lines = [match[0].splitlines()[0], f"class {name}({base or 'TypedDict'}, total=False):"]
        lines += [f"    {field.name}: {field.type}" for field in fields if field.name not in omitted]
        return "\n".join(lines) + "\n"

    return TYPE.sub(written, text)


def stale() -> dict[Path, str]:
    """Return the files that are out of date, with their new contents."""
    new = {page: updated(page.read_text()) for page in PAGES} | {file: options_types(file) for file in SOURCES}
    return {path: text for path, text in new.items() if text != path.read_text()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="bring the files up to date")
    write = parser.parse_args().write
    files = stale()
    for path, text in files.items():
        print(f"{path.relative_to(ROOT)}: {'written' if write else 'out of date: python docs/tables.py --write'}")
        if write:
            path.write_text(text)
    return 1 if files and not write else 0


if __name__ == "__main__":
    raise SystemExit(main())
