"""Option types: accepted values, and errors."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sparsecomm as sc
from sparsecomm.cli import bench as sweep
from sparsecomm.tools import options
from sparsecomm.wire import WIRES


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        (options.count, "25.6M", 25_600_000),
        (options.count, "4ki", 4096),
        (options.nbytes, "64K", 64_000),
        (options.nbytes, "64KiB", 65_536),
        (options.nbytes, "1.5 M", 1_500_000),
        (options.rate, "2.5Gbit", 2.5e9),
        (options.rate, "100mbit/s", 100e6),
        (options.seconds, "20us", 20e-6),
        (options.seconds, "20 \N{MICRO SIGN}s", 20e-6),
        (options.listed(options.density), "0.01, 0.5,1e-9,0.5", (0.01, 0.5, 1e-9)),
        (options.algorithms, "hierarchical:split,split:2", ("hierarchical:split", "split:2")),
        (options.algorithms, "all", tuple(sc.algorithms())),
        (options.wires, "packed_int8, auto", ("packed_int8", "auto")),
        (options.wires, "all", tuple(WIRES)),
    ],
)
def test_taken(type_: Callable[[str], Any], text: str, value: Any) -> None:
    assert type_(text) == pytest.approx(value) if isinstance(value, float) else type_(text) == value


@pytest.mark.parametrize(
    ("type_", "texts", "expected"),
    [
        (options.count, "0 1.5X -5", "expected a number of at least 1, such as 4096, 64K"),
        (options.nbytes, ["", "K", "64X", "-5", "64KK", "64 i", "1e400", "nan"], "expected bytes, such as"),
        (options.rate, "fast 0gbit 10", "expected a number above 0 and a unit, such as 1gbit"),
        (options.seconds, "5 soon", "expected a number and a unit, such as 100us"),
        (options.listed(options.density), "0 0.1,1.5 nan 0.1,", "expected a number above 0 and up to 1"),
        (
            options.algorithms,
            ["tree,ring", "", "hierarchical:dense", "all,tree"],
            "expected one of auto, fastest, butterfly",
        ),
        (options.wires, "zip plain,zip", "zip: expected one of auto, plain, packed"),
        (options._plot, "a.docx png", "ends in .png, .pdf, .svg"),
    ],
)
def test_refused(type_: Callable[[str], Any], texts: str | list[str], expected: str) -> None:
    for text in texts.split() if isinstance(texts, str) else texts:
        with pytest.raises(argparse.ArgumentTypeError) as error:
            type_(text)
        assert expected in str(error.value)


def test_checking_a_file_leaves_it(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_text("kept")
    options.check_writable(old, new, None)
    assert old.read_text() == "kept"
    assert not new.exists()
    for path, why in ((tmp_path / "no" / "a.json", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(sc.InvalidInputError, match=re.escape(f"{path}: cannot be written: {why}")):
            options.check_writable(path)


def test_sizes_and_formats_of_bench() -> None:
    parser = argparse.ArgumentParser()
    sweep.add_arguments(parser)

    def parsed(text: str) -> argparse.Namespace:
        return sweep.parse(parser.parse_args(text.split()))

    for text, counts in {
        "-b 64Ki -e 1MiB": (16384, 65536, 262144),
        "-b 64K -e 1023K": (16000, 64000),
        "-b 4096 -e 4096": (1024,),
        "-b 1.5ki -e 6KiB -f 2": (384, 768, 1536),
        "-b 4 -e 8 -f 1.1": (1, 2),
        "-b 2GB -e 8Gi --dtype float64": (250 * 10**6, 10**9),
        "-b 10 -e 10 --dtype float16": (5,),
    }.items():
        assert parsed(text).counts == counts
    assert parsed("").wires == ("auto",)
    assert parsed("--wire all").wires == tuple(WIRES)
    assert parsed("--wire all --dtype float64").wires == ("plain", "packed")
