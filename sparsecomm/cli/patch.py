"""Make and apply patches of files of safetensors, and describe patches and folders of published weights.

  sparsecomm patch diff OLD.safetensors NEW.safetensors OUT      OUT turns the tensors of OLD into those of NEW
  sparsecomm patch apply BASE.safetensors PATCH OUT.safetensors  BASE stays as it is, unless it is also OUT
  sparsecomm patch info PATCH                                    what has changed, and the bits per change
  sparsecomm patch info FOLDER                                   the versions that a Publisher has written

OLD and NEW must have tensors of the same names, shapes and dtypes. A patch contains tensors only: OUT has the metadata
of BASE. OUT is replaced when it is complete. Instead of FOLDER, you can pass its URL (http:// or https://).
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

from sparsecomm.errors import InvalidInputError, PatchError
from sparsecomm.patches.codec import MAGIC, Patch, apply_to, diff_weights, read_patch
from sparsecomm.patches.elements import DTYPES, Weight
from sparsecomm.patches.publisher import replacing
from sparsecomm.patches.safetensors import map_weights
from sparsecomm.patches.sources import source_of
from sparsecomm.patches.versions import MANIFEST, MAX_MANIFEST_BYTES, parse, way
from sparsecomm.quantities import bytes_text, number_text, percent_text
from sparsecomm.tools import options

HELP = "make, apply and describe patches of safetensors files and published weights"
_SAFETENSORS, _PATCH = "a file of safetensors", "a patch"
_KINDS = {MAGIC: _PATCH, b"PK\3\4": "a zip archive, as torch.save and numpy.savez write", b"\x1f\x8b": "a gzip file"}
_ADVICE = {
    _SAFETENSORS: ": save tensors with safetensors.torch.save_file, and decompress an anchor with gunzip",
    _PATCH: ", as `sparsecomm patch diff` or a Publisher writes",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    for name, action, help_text, arguments in (
        ("diff", _diff, "write a patch that turns one file of safetensors into another", ("OLD", "NEW", "OUT")),
        ("apply", _apply, "apply a patch to a file of safetensors", ("BASE", "PATCH", "OUT")),
        ("info", _info, "describe a patch, or the versions in a folder", ("PATCH_OR_FOLDER",)),
    ):
        subparser = actions.add_parser(name, help=help_text, description=f"{help_text.capitalize()}.")
        for argument in arguments:
            subparser.add_argument("files", action="append", metavar=argument)
        subparser.set_defaults(action=action)


def run(arguments: argparse.Namespace) -> int:
    """Run an action; return 0."""
    arguments.action(*arguments.files)
    return 0


def _diff(old: str, new: str, out: str) -> None:
    with _replacing(Path(out), old, new) as part:
        olds, news = _weights(old), _weights(new)
        with _naming(f"{old} and {new}"):
            patch = diff_weights(_Progress(olds), news)
        part.write_bytes(patch)
    _describe(read_patch(patch))


def _apply(base: str, file: str, out: str) -> None:
    with _replacing(Path(out), file) as part:
        patch = _patch(file)
        _weights(base)
        shutil.copyfile(base, part)
        with _naming(f"{file} for {base}"):
            description = apply_to(patch, _Progress(map_weights(part, writable=True)))
        shutil.copymode(base, part)
    print(f"{out} has the weights {description.after}")


def _info(place: str) -> None:
    if not place.startswith(("http://", "https://")) and not Path(place).is_dir():
        _describe(read_patch(_patch(place)))
        return
    with _naming(place):
        try:
            with source_of(place).fetch(MANIFEST, MAX_MANIFEST_BYTES) as manifest:
                versions = parse(manifest.read())
        except FileNotFoundError:
            raise InvalidInputError(f"nothing has been published there, since it has no {MANIFEST}") from None
    print(f"{'version':>8} {'step':>10} {'patch':>10} {'anchor':>10}")
    for number, step, *_, patch, anchor in versions:
        sizes = (bytes_text(file.nbytes) if file else "-" for file in (patch, anchor))
        print(f"{number:>8} {step:>10}", *(f"{size:>10}" for size in sizes))
    reached, links = way(versions, "", ())
    if reached is not None:
        patches, nbytes = len(links) - 1, bytes_text(sum(link.file.nbytes for link in links))
        print(f"\nTo join at version {reached.number}, a subscriber reads {nbytes}: an anchor and {patches} patches.")


def _describe(patch: Patch) -> None:
    tensors, changed = patch.tensors.values(), patch.changed
    nbytes = sum(tensor.size * DTYPES[tensor.dtype].itemsize for tensor in tensors)
    percentage = percent_text(changed / max(1, patch.size))
    bits = f"; {number_text(8 * patch.nbytes / changed)} bits per changed element" if changed else ""
    print(f"tensors   {sum(tensor.changed > 0 for tensor in tensors):,} of {len(tensors):,} changed")
    print(f"elements  {changed:,} of {patch.size:,} changed ({percentage})")
    print(f"size      {bytes_text(patch.nbytes)} for {bytes_text(nbytes)} of weights{bits}")
    print(f"before    {patch.before}")
    print(f"after     {patch.after}")


class _Progress(dict[str, Weight]):
    """Weights that print on a terminal, at most once per second, how much the codec has read.

    It relies on the codec getting one tensor after another.
    """

    def __init__(self, weights: Mapping[str, Weight]) -> None:
        super().__init__(weights)
        sizes = [weight.tensor.nbytes for weight in weights.values()]
        self._before, self._total = dict(zip(weights, accumulate([0, *sizes]), strict=False)), sum(sizes)
        self._next = time.monotonic() + 1 if sys.stderr and sys.stderr.isatty() else math.inf

    def __getitem__(self, name: str) -> Weight:
        if (now := time.monotonic()) >= self._next:
            self._next = now + 1
            done = percent_text(self._before[name] / max(1, self._total))
            print(f"{done} of {bytes_text(self._total)}", file=sys.stderr, flush=True)
        return super().__getitem__(name)


def _weights(path: str) -> dict[str, Weight]:
    with _naming(path):
        _check_kind(path, _SAFETENSORS)
        return map_weights(path)


def _patch(path: str) -> bytes:
    with _naming(path):
        _check_kind(path, _PATCH)
        patch = Path(path).read_bytes()
        read_patch(patch)
        return patch


def _check_kind(path: str, expected: str) -> None:
    """Raise `InvalidInputError` if a file begins like one of another kind."""
    with open(path, "rb") as file:
        beginning = file.read(len(MAGIC))
    kinds = (kind for magic, kind in _KINDS.items() if beginning.startswith(magic))
    kind = _SAFETENSORS if beginning[8:9] == b"{" else next(kinds, expected)
    if kind != expected:
        raise InvalidInputError(f"it looks like {kind}; expected {expected}{_ADVICE[expected]}")


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Prefix errors with a file's name if they do not begin with it."""
    try:
        yield
    except OSError as error:
        raise InvalidInputError(f"{name}: cannot be read: {error.strerror or error}") from error
    except (InvalidInputError, PatchError) as error:
        raise type(error)(str(error) if str(error).startswith(name) else f"{name}: {error}") from error


@contextmanager
def _replacing(path: Path, *inputs: str) -> Iterator[Path]:
    """Yield a temporary path, whose file replaces ``path`` at the end. Raise an error if ``path`` is an input."""
    with options.writing(path):
        if path.exists() and (not path.is_file() or any(os.path.exists(i) and path.samefile(i) for i in inputs)):
            raise InvalidInputError(f"{path}: is an input or not a regular file; name another output")
        with replacing(path) as part:
            yield part
