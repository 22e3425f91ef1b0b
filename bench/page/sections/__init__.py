"""The sections of the page, in its order. Each is a function from all results to a section, or None without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.page.html import Section
from bench.page.results import Result
from bench.page.sections import (
    accuracy,
    algorithms,
    comparison,
    kernels,
    network,
    other,
    paper,
    sizes,
    slow_links,
    training,
)

__all__ = ["SECTIONS"]

SECTIONS: tuple[Callable[[Sequence[Result]], Section | None], ...] = (
    paper.paper,
    paper.beyond,
    comparison.others,
    comparison.dense_wins,
    sizes.sizes,
    sizes.breakdown,
    network.ranks,
    network.rates,
    network.sent,
    algorithms.choice,
    training.steps,
    accuracy.convergence,
    accuracy.local_steps,
    slow_links.slow_links,
    accuracy.recovery,
    kernels.kernels,
    kernels.gpu,
    kernels.benchmarks,
    other.rest,
    other.runs,
)
