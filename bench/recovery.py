"""The share of the true global top-k that the algorithms find, on gradients of a training.

    python -m bench.recovery [--ranks 4,8,16,32] [--density 0.001,0.01] [--write bench/results]

P simulated ranks train a network (64-512-256-10) on scikit-learn's handwritten digits, each on its own samples, from
the same weights. Before the exchange every rank has its residual plus its gradient, and their dense sum is what
a dense allreduce would give. The tables show means over the last 40 of 50 steps:

    found    part of the k largest of the dense sum that is among the result's indices
    applied  L1 of the result, as a part of the L1 of the k largest of the dense sum
    exact    part of the result's entries whose value is that of the dense sum, to 5 digits
    KB       that the busiest rank sends or receives per step
    loss     on all samples, after the last step

"On the same gradients": at every step of a training by Top-k (allgather), all algorithms run on its gradients. "In a
training of its own": each algorithm applies its result and updates its residuals.
"""

from __future__ import annotations

import sys
from itertools import pairwise, product
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits

import sparsecomm as sc
from bench import report
from sparsecomm.quantities import number_text
from sparsecomm.tools import options as types
from sparsecomm.transport import simulated

Vector = NDArray[np.float32]

LAYERS = (64, 512, 256, 10)
BATCH = 16  # of a rank
RATE, MOMENTUM, STEPS, WARM = 0.02, 0.5, 40, 10
WAYS: dict[str, dict[str, Any]] = {
    "tree": {"algorithm": "tree"},
    "butterfly": {"algorithm": "butterfly"},
    "split": {"algorithm": "split"},
    "hierarchical, 4 a machine": {"algorithm": "hierarchical"},
    "split, bfloat16": {"algorithm": "split", "wire": "packed_bfloat16"},
    "split, int8": {"algorithm": "split", "wire": "packed_int8"},
}


class Network:
    """Layers of ReLU and a softmax, whose weights are views of one flat vector."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        shapes = [s for fan_in, fan_out in pairwise(LAYERS) for s in ((fan_in, fan_out), (fan_out,))]
        self.bounds = np.cumsum([0, *(int(np.prod(s)) for s in shapes)])
        self.shapes = shapes
        self.weights = np.zeros(self.bounds[-1], np.float32)
        for matrix in self._layers(self.weights)[::2]:
            matrix[:] = rng.standard_normal(matrix.shape) * np.sqrt(2 / len(matrix))

    def gradient(self, x: Vector, labels: NDArray[np.int64]) -> tuple[Vector, float]:
        """Return the gradient of the mean cross-entropy, and the cross-entropy."""
        gradient = np.empty_like(self.weights)
        layers, into = self._layers(self.weights), self._layers(gradient)
        values = [x]
        for matrix, bias in zip(layers[::2], layers[1::2], strict=True):
            values.append(values[-1] @ matrix + bias)
            if len(values) < len(LAYERS):
                values[-1] = np.maximum(values[-1], 0)
        scores = values[-1] - values[-1].max(1, keepdims=True)
        logs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
        delta = np.exp(logs)
        delta[np.arange(len(labels)), labels] -= 1
        delta /= len(labels)
        for i in reversed(range(len(layers) // 2)):
            into[2 * i][:] = values[i].T @ delta
            into[2 * i + 1][:] = delta.sum(0)
            delta = (delta @ layers[2 * i].T) * (values[i] > 0)
        return gradient, -float(logs[np.arange(len(labels)), labels].mean())

    def _layers(self, flat: Vector) -> list[Vector]:
        return [flat[a:b].reshape(s) for (a, b), s in zip(pairwise(self.bounds), self.shapes, strict=True)]


class Training:
    """P ranks, their residuals and the weights that they share."""

    def __init__(self, P: int, density: float, data: tuple[Vector, NDArray[np.int64]]) -> None:
        self.network, self._rng, self._data, self._P = Network(), np.random.default_rng(1), data, P
        n = len(self.network.weights)
        self._k = max(1, round(density * n))
        self._residuals, self._velocity = [np.zeros(n, np.float32) for _ in range(P)], np.zeros(n, np.float32)
        self._gradients: list[Vector] = []

    def draw(self) -> None:
        """Draw samples and compute the next gradients."""
        samples = self._rng.integers(0, len(self._data[1]), (self._P, BATCH))
        self._gradients = [self.network.gradient(self._data[0][mine], self._data[1][mine])[0] for mine in samples]

    def ask(self, way: dict[str, Any], *, follow: bool) -> dict[str, float]:
        """Run an algorithm on the gradients, and measure its result; ``follow``: also update residuals and weights."""
        residuals = self._residuals if follow else [residual.copy() for residual in self._residuals]
        total = np.sum([*residuals, *self._gradients], axis=0, dtype=np.float64)

        def exchange(transport: simulated.SimulatedTransport) -> sc.SparseVector:
            mine, residual = self._gradients[transport.rank], residuals[transport.rank]
            return sc.sparse_allreduce(mine, self._k, comm=transport, residual=residual, **way)

        ranks = simulated.run(self._P, exchange, node_of_rank=[rank // 4 for rank in range(self._P)])
        result = ranks[0].value
        assert result is not None
        if follow:
            self._velocity = MOMENTUM * self._velocity + result.to_dense() / self._P
            self.network.weights -= RATE * self._velocity
        best = np.argpartition(-np.abs(total), self._k)[: self._k]
        return {
            "found": len(np.intersect1d(best, result.indices)) / self._k,
            "applied": float(np.abs(result.values).sum() / np.abs(total[best]).sum()),
            "exact": float(np.isclose(result.values, total[result.indices], rtol=1e-5, atol=0).mean()),
            "KB": max(max(r.counters.bytes_sent, r.counters.bytes_received) for r in ranks) / 1000,
        }

    def loss(self) -> float:
        return self.network.gradient(*self._data)[1]


def means(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: float(np.mean([row[name] for row in rows[WARM:]])) for name in rows[0]}


def on_the_same(P: int, density: float, data: tuple[Vector, NDArray[np.int64]]) -> list[dict[str, Any]]:
    training, rows = Training(P, density, data), {name: [] for name in WAYS}  # type: ignore[var-annotated]
    for _ in range(WARM + STEPS):
        training.draw()
        for name, way in WAYS.items():
            rows[name].append(training.ask(way, follow=False))
        training.ask({"algorithm": "allgather"}, follow=True)
    return [{"way": name} | means(steps) for name, steps in rows.items()]


def on_its_own(P: int, density: float, data: tuple[Vector, NDArray[np.int64]]) -> list[dict[str, Any]]:
    results = []
    for name, way in (WAYS | {"allgather (more than k)": {"algorithm": "allgather"}}).items():
        training, rows = Training(P, density, data), []
        for _ in range(WARM + STEPS):
            training.draw()
            rows.append(training.ask(way, follow=True))
        results.append({"way": name} | means(rows) | {"loss": training.loss()})
    return results


EXPERIMENTS = {"on the same gradients": on_the_same, "in a training of its own": on_its_own}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=types.listed(types.count), default="4,8,16,32", help="(%(default)s)")
    parser.add_argument("--density", type=types.listed(types.density), default="0.001,0.01", help="(%(default)s)")
    parser.add_argument("--write", type=Path, help="a folder for recovery.txt and recovery.json")
    options = parser.parse_args()
    digits = load_digits()
    data = (digits.data / 16).astype(np.float32), digits.target

    run, results = report.about("-m bench.recovery", sys.argv[1:], threads=1), list[dict[str, Any]]()
    cases = list(product(EXPERIMENTS, options.density, options.ranks))
    for title, k, P in track(cases, description="training"):
        shared = {"experiment": title, "density": k, "ranks": P}
        results += [shared | row for row in EXPERIMENTS[title](P, k, data)]
    tables = [table(results, *case) for case in product(EXPERIMENTS, options.density)]
    stem = options.write and options.write / "recovery"
    report.publish(stem, report.head(run), tables, run | {"rows": results})


def table(results: list[dict[str, Any]], title: str, density: float) -> Table:
    rows = [row for row in results if (row["experiment"], row["density"]) == (title, density)]
    columns: list[report.Column] = [("algorithm", itemgetter("way")), ("ranks", itemgetter("ranks"))]
    columns += [(name, report.number(name)) for name in ("found", "applied", "exact", "loss", "KB") if name in rows[0]]
    ways = list(dict.fromkeys(row["way"] for row in rows))
    rows.sort(key=lambda row: ways.index(row["way"]))
    return report.table(rows, columns, title=f"{title}, density {number_text(density)}", title_justify="left")


if __name__ == "__main__":
    main()
