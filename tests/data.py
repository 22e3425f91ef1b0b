"""Gradients that are hard to select from, by name, and the element types that tests run over."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}


def _nan(v, rng):
    v[rng.random(len(v)) < 0.05] = np.nan
    v[rng.random(len(v)) < 0.05] = -np.nan
    v[rng.random(len(v)) < 0.05] = np.inf
    return v


def _block(v, rng):
    out = np.zeros(len(v))
    start = rng.integers(0, max(1, len(v)))
    out[start : start + len(v) // 7 + 1] = v[start : start + len(v) // 7 + 1] * 1e3
    return out


KINDS = {
    "normal": lambda v, rng: v,
    "all equal": lambda v, rng: np.full(len(v), 1.5) * rng.choice([-1, 1], len(v)),
    "all zero": lambda v, rng: v * 0.0,
    "mostly zero": lambda v, rng: v * (rng.random(len(v)) < 0.01),
    "ascending": lambda v, rng: np.sort(v),
    "descending magnitudes": lambda v, rng: -np.sort(-np.abs(v)),
    "one huge block": _block,
    "few values": lambda v, rng: np.round(v),
    "denormals": lambda v, rng: v * 1e-41,
    "NaN and infinities": _nan,
    "only NaN": lambda v, rng: v * np.nan,
    "huge range": lambda v, rng: v * 10.0 ** rng.integers(-30, 30, len(v)),
    "scales by layer": lambda v, rng: v * np.repeat(10.0 ** rng.integers(-3, 3, len(v) // 97 + 1), 97)[: len(v)],
}


def gradient(kind: str, n: int, dtype: str, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng([seed, n])
    with np.errstate(all="ignore"):
        return KINDS[kind](rng.standard_normal(n), rng).astype(DTYPES[dtype])


def integers(n: int, dtype: str, seed: int, maximum: int = 8) -> np.ndarray:
    """Return integers whose sums are exact in every type."""
    return np.random.default_rng([seed, n]).integers(-maximum, maximum + 1, n).astype(DTYPES[dtype])


sizes = st.one_of(st.integers(0, 200), st.sampled_from([1000, 4095, 4096, 4097, 20_000, 70_001]))
kinds = st.sampled_from(sorted(KINDS))
seeds = st.integers(0, 2**32 - 1)


def counts(n: int) -> st.SearchStrategy[int]:
    """Return a strategy for the k of a vector of n elements."""
    return st.one_of(st.integers(1, n), st.sampled_from(sorted({1, max(1, n // 1000), max(1, n // 100), n})))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
