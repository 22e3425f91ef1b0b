"""Settings from the environment."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm import config
from sparsecomm.backends import CpuBackend, _cpu

INVALID = {
    config.timeout: ("SPARSECOMM_TIMEOUT", ["soon", "-1", "nan", "inf", "1e300", "1000001"]),
    config.threads: ("SPARSECOMM_THREADS", ["inf", "many"]),
    config.max_message_bytes: ("SPARSECOMM_MAX_MESSAGE_BYTES", ["1", str(2**31)]),
    config.connections: ("SPARSECOMM_CONNECTIONS", ["0", "65", "some"]),
    config.simd: ("SPARSECOMM_SIMD", ["sse"]),
    partial(config.voting, False): ("SPARSECOMM_VOTING", ["inf"]),
}


def test_invalid_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for read, (name, values) in INVALID.items():
        for value in values:
            monkeypatch.setenv(name, value)
            with pytest.raises(sc.InvalidInputError, match=f"{name}='{value}': expected"):
                read()


def test_defaults_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, _ in INVALID.values():
        monkeypatch.delenv(name, raising=False)
    assert (config.timeout(), config.max_message_bytes(), config.simd()) == (300.0, 2**22, None)
    assert 1 <= config.threads() <= 8
    for value, read in (("", 0), (" auto ", 0), ("1", 1), ("64", 64)):
        monkeypatch.setenv("SPARSECOMM_CONNECTIONS", value)
        assert config.connections() == read


def test_ranks_share_the_cores_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARSECOMM_THREADS", raising=False)
    monkeypatch.setattr(config, "_share_of_cores", config._share_of_cores.__wrapped__)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "3")
    assert config.threads() == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 2, 3}, raising=False)  # bound to cores of its own
    assert config.threads() == 3
    monkeypatch.setenv("SPARSECOMM_THREADS", "5")
    assert config.threads() == CpuBackend().threads == 5


def test_ranks_with_too_few_cores(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def having(own: set[int], launcher: set[int], quota: str = "max 100000", ranks: int = 4) -> bool:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: own if pid == 0 else launcher, raising=False)
        monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", str(ranks))
        (tmp_path / "cpu.max").write_text(quota)
        return config.oversubscribed()

    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(config, "_QUOTA", tmp_path / "cpu.max")
    everything = set(range(64))
    assert not having(everything, everything)
    assert not having({3}, everything), "bound to a core of its own"
    assert not having({3, 4}, everything, ranks=64)
    assert having({3, 4}, everything, ranks=65)
    assert having({3, 4}, {3, 4}), "as under taskset, or in a container of two cores"
    assert not having({3, 4}, {3, 4}, ranks=2)
    assert having(everything, everything, "200000 100000"), "a container with as much time as two cores have"
    assert not having(everything, everything, "400000 100000")
    assert not having(everything, everything, "what?")
    monkeypatch.setattr(config, "_QUOTA", tmp_path / "there is none")
    assert not having(everything, everything)
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "65")
    assert config.oversubscribed()


def test_the_instruction_set_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    best = _cpu.simd()
    try:
        monkeypatch.setenv("SPARSECOMM_SIMD", "portable")
        assert sc.topk(np.arange(5.0), 1).indices.tolist() == [4]
        assert _cpu.simd() == "portable"
    finally:
        _cpu.use_simd(best)
