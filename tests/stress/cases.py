"""One call of many ranks, drawn at random: its arguments, and what it must give."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

import sparsecomm as sc
from sparsecomm.algorithms import inner_algorithms
from sparsecomm.cli.oracles import contributors, oracle
from sparsecomm.wire import EXACT, MEAN_OF_CONTRIBUTORS, WIRES
from tests import data
from tests.reference import canonical, widened

__all__ = ["FAULTS", "Case", "Vector"]

Vector = NDArray[Any]

FAULTS = ("none", "interrupt", "error", "crash", "refused", "mismatch")
_SIZES = (1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 8, 9, 11, 13, 16, 17, 33)
_CONTENTS = ("integers", "integers", "integers", "special", *data.KINDS)
_EXACT_UP_TO = {"float16": 2048, "bfloat16": 256, "float32": 2**24, "float64": 2**53}


class Case:
    """A call on P ranks, and the fault that meets it: case ``number``.

    Attributes:
        content: of the gradients: "integers", "special", or one of `tests.data.KINDS`.
        amplitude: of integers.
        residual: its dtype, or "" for none.
        out: "" for none, "x", or a dtype.
        nodes: of each rank.
        fault, victim: one of `FAULTS`, and the rank that it meets.
        when: at which part of its steps, from 0 to 1.
        waits: the call is made by `isparse_allreduce`.
    """

    def __init__(self, seed: int, number: int, max_ranks: int) -> None:
        rng = np.random.default_rng([seed, number])

        def pick(values: Any) -> Any:
            return values[int(rng.integers(len(values)))]

        P = self.P = pick([size for size in _SIZES if size <= max_ranks])
        self.algorithm = pick(["auto", *sc.algorithms(), *(f"hierarchical:{inner}" for inner in inner_algorithms())])
        dtype = self.dtype = pick(list(data.DTYPES))
        self.wire = pick(["auto", *(w for w in WIRES if dtype != "float64" or WIRES[w].kind is EXACT)])
        n = self.n = int(pick([1, 2, 7, 64, 97, 300, int(rng.integers(1, 1000)), 5000]))
        self.k = int(pick([1, min(n, 3), max(1, n // 50), max(1, n // 4), n, int(rng.integers(1, n + 1))]))
        self.residual = pick(["", dtype, dtype, "float32" if dtype in ("float16", "bfloat16") else dtype])
        self.out = pick(["", "x", dtype, "float32" if dtype != "float64" else dtype])
        per_node = int(rng.integers(1, P + 1))
        nodes = rng.permutation(P) // per_node if rng.random() < 0.3 else np.arange(P) // per_node
        first = {int(node): i for i, node in enumerate(dict.fromkeys(nodes.tolist()))}  # numbered in order of rank
        self.nodes = tuple(first[int(node)] for node in nodes)
        knowing = {"auto", *(name for name, a in sc.algorithms().items() if not a.contributors_unknown)}
        counts = self.algorithm in knowing and (self.wire == "auto" or WIRES[self.wire].kind is EXACT)
        self.op = pick(["sum", "sum", "mean", MEAN_OF_CONTRIBUTORS if counts else "mean"])
        self.content, self.amplitude = pick(_CONTENTS), int(pick([1, 3, 8, 60]))
        self.fault, self.victim, self.when = pick(FAULTS), int(rng.integers(P)), float(rng.random())
        self.waits, self.seed = rng.random() < 0.15, int(rng.integers(2**31))

    def __repr__(self) -> str:
        drawn = (f"{name}={value!r}" for name, value in vars(self).items() if not isinstance(value, (list, np.ndarray)))
        return f"Case({', '.join(drawn)})"

    # -- inputs -------------------------------------------------------------------------------------------------------

    def gradients(self, step: int) -> list[Vector]:
        """Return every rank's gradient."""
        return [self._vector(self.dtype, self.seed + 1000 * step + rank) for rank in range(self.P)]

    @cached_property
    def residuals(self) -> list[Vector | None]:
        """Every rank's residual before the first step."""
        seeds = range(self.seed + 500_000, self.seed + 500_000 + self.P)
        return [self._vector(self.residual, seed) if self.residual else None for seed in seeds]

    def _vector(self, dtype: str, seed: int) -> Vector:
        if self.content == "integers":
            return data.integers(self.n, dtype, seed, self.amplitude)
        if self.content == "special":
            rng = np.random.default_rng([seed, self.n])
            special = rng.choice([np.nan, -np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-42, 6e-8, 1.5, -1.5], self.n)
            with np.errstate(all="ignore"):
                v = np.where(rng.random(self.n) < 0.2, special, rng.standard_normal(self.n))
                return v.astype(data.DTYPES[dtype])
        return data.gradient(self.content, self.n, dtype, seed)

    # -- what it must give --------------------------------------------------------------------------------------------

    @property
    def finite(self) -> bool:
        """Whether no value, and no sum of values, is NaN or infinite."""
        return self.content not in ("special", "NaN and infinities", "only NaN", "huge range")

    @property
    def few_bits(self) -> bool:
        """Whether values of a block share magnitudes, which are no whole numbers, and larger than some values."""
        return self.wire in WIRES and bool(WIRES[self.wire].kind.planes)

    def rounds_by_history(self, name: str) -> bool:
        """Whether an algorithm of that name rounds by what it has kept from the calls before."""
        return "split" in name and self.wire in WIRES and WIRES[self.wire].kind is not EXACT

    def exact(self, ranks: int) -> bool:
        """Whether all sums over so many ranks are exact, in the residual's type too."""
        limit = _EXACT_UP_TO[self.residual or self.dtype]
        return not self.few_bits and self.content == "integers" and 2 * ranks * self.amplitude <= limit

    @cached_property
    def stored(self) -> list[Vector]:
        """Residual + x of every rank in the first step, as a residual holds it; x where there is none."""
        xs = self.gradients(0)
        if not self.residual:
            return xs
        with np.errstate(all="ignore"):
            sums = [widened(r) + widened(x) for r, x in zip(self.residuals, xs, strict=True)]
            return [canonical(v).astype(data.DTYPES[self.residual]) for v in sums]

    @cached_property
    def accumulated(self) -> list[Vector]:
        """What every rank brings into the call, in the accumulator's type."""
        return [widened(v) for v in self.stored]

    @cached_property
    def divisor(self) -> Any:
        """What sums are divided by."""
        if self.op == MEAN_OF_CONTRIBUTORS:
            return contributors(self.accumulated, self.k)
        return self.P if self.op == "mean" else 1

    def total(self, name: str) -> Vector | None:
        """Return the dense sum by the oracle of ``name``; None if values are rounded on their way."""
        if self.wire.removeprefix("packed_") != self.wire and not name.startswith("dense"):
            return None
        with np.errstate(all="ignore"):
            return canonical(oracle(name)(self.accumulated, self.k, self.nodes))
