"""`sparsecomm patch`: its files, its output and its errors."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

from sparsecomm.cli import main
from sparsecomm.patches import PatchError, Publisher
from sparsecomm.patches.elements import host_view, weights_of
from sparsecomm.patches.safetensors import compressed, map_weights
from sparsecomm.tensors.arrays import Array


class Files:
    """A folder with two files of safetensors, and the command."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys = folder, capsys
        old = np.random.default_rng(0).normal(scale=0.02, size=(100, 100)).astype(np.float32)
        new = old.copy()
        new[:3] *= np.float32(1 + 1e-6)
        self.write("old", {"weight": old, "step": np.array(1), "empty": np.empty((0, 2), np.float16)}, of="old")
        self.write("new", {"weight": new, "step": np.array(2), "empty": np.empty((0, 2), np.float16)}, of="new")

    def write(self, name: str, tensors: dict[str, Array], **metadata: str) -> None:
        anchor = b"".join(compressed(weights_of(tensors), metadata))
        (self.folder / name).write_bytes(gzip.decompress(anchor))

    def __getitem__(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def command(self, *words: str) -> tuple[int, str]:
        """Run an action on files of the folder; return the exit status and the output."""
        action, *files = words
        status = main(["patch", action, *(str(self.folder / name) for name in files)])
        return status, "".join(self._capsys.readouterr()).replace(f"{self.folder}/", "")


@pytest.fixture
def files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Files:
    return Files(tmp_path, capsys)


def tensors(path: Path) -> dict[str, bytes]:
    return {name: bytes(host_view(weight.tensor)) for name, weight in map_weights(path).items()}


def test_applying_a_diff_gives_the_new_tensors_with_the_metadata_of_the_base(files: Files) -> None:
    status, said = files.command("diff", "old", "new", "patch")
    assert status == 0, said
    before = files["old"]
    assert files.command("apply", "old", "patch", "out")[0] == 0
    assert files["old"] == before
    assert tensors(files.folder / "out") == tensors(files.folder / "new")
    assert files["out"].replace(b'"of": "old"', b'"of": "new"') == files["new"]
    assert sorted(path.name for path in files.folder.iterdir()) == ["new", "old", "out", "patch"]


def test_headers_of_any_order(files: Files) -> None:
    """A tensor without elements may come after the tensor that begins where it does."""
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    header = json.dumps({"a": entry, "empty": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (files.folder / "file").write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    assert tensors(files.folder / "file") == {"a": b"abcd", "empty": b""}
    header = json.dumps({"a": entry | {"data_offsets": [0, 4.0]}}).encode()
    (files.folder / "file").write_bytes(len(header).to_bytes(8, "little") + header + b"abcd")
    with pytest.raises(PatchError, match="describes no tensor"):
        map_weights(files.folder / "file")


def test_the_output_may_be_the_base_and_keeps_its_mode(files: Files) -> None:
    files.command("diff", "old", "new", "patch")
    (files.folder / "old").chmod(0o600)
    assert files.command("apply", "old", "patch", "old")[0] == 0
    assert tensors(files.folder / "old") == tensors(files.folder / "new")
    assert (files.folder / "old").stat().st_mode & 0o777 == 0o600


def test_patches_and_folders_are_described(files: Files) -> None:
    status, said = files.command("diff", "old", "new", "patch")
    assert (status, files.command("info", "patch")) == (0, (0, said))
    assert "elements  301 of 10,001 changed (3.01 %)\n" in said
    weights = {"weight": np.random.default_rng(0).standard_normal(1000).astype(np.float32)}
    with Publisher(weights, files.folder / "published", anchor_every=3) as publisher:
        for step in range(6):
            weights["weight"][step] = 1
            last = publisher.publish(10 * step)
    status, said = files.command("info", "published")
    assert status == 0, said
    heading, *rows, empty, sentence = said.splitlines()
    assert heading.split() == ["version", "step", "patch", "anchor"]
    assert [row.split()[:2] for row in rows] == [[str(step + 1), str(10 * step)] for step in range(6)]
    assert rows[-1].split()[2:] == [str(last.patch_bytes), "B", "-"]
    assert not empty
    assert re.fullmatch(r"To join at version 6, a subscriber reads 4\.\d+ kB: an anchor and 2 patches\.", sentence)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("diff old none out", "none: cannot be read: No such file or directory"),
        ("diff old patch out", "patch: it looks like a patch; expected a file of safetensors"),
        ("diff old damaged out", "damaged is damaged: it has"),
        ("diff old other out", "old and other: new: missing 'step', 'weight'; not expected: 'bias'"),
        ("diff old new old", "old: is an input or not a regular file; name another output"),
        ("apply old none out", "none: cannot be read: No such file or directory"),
        ("apply old new out", "new: it looks like a file of safetensors; expected a patch, as `sparsecomm patch diff`"),
        ("apply old cut out", "cut: the patch is damaged"),
        ("apply old wrong out", "wrong for old: the patch is damaged: the changes of "),
        ("apply new patch out", "patch for new: the tensors hold other weights than those for which"),
        ("info .", "nothing has been published there, since it has no versions.json"),
        ("info published", "versions.json cannot be read"),
    ],
)
def test_refused(words: str, said: str, files: Files) -> None:
    """The error has one line, and nothing is written."""
    files.command("diff", "old", "new", "patch")
    files.write("other", {"bias": np.ones(3), "empty": np.empty((0, 2), np.float16)})
    (files.folder / "damaged").write_bytes(files["old"][:-1])
    (files.folder / "cut").write_bytes(files["patch"][:-1])
    (files.folder / "wrong").write_bytes(files["patch"][:-1] + b"?")
    (files.folder / "published").mkdir()
    (files.folder / "published" / "versions.json").write_text("{}")
    before = {path: path.read_bytes() for path in files.folder.iterdir() if path.is_file()}
    status, output = files.command(*words.split())
    assert (status, output.count("\n"), output[:12]) == (1, 1, "sparsecomm: ")
    assert said in output
    assert {path: path.read_bytes() for path in files.folder.iterdir() if path.is_file()} == before
