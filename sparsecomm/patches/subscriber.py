"""`Subscriber`: brings tensors to the newest published version."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from sparsecomm.checks import to_bool
from sparsecomm.errors import InvalidInputError, PatchError, TransportError, log
from sparsecomm.patches import codec
from sparsecomm.patches.elements import Weight, weights_of
from sparsecomm.patches.safetensors import read_compressed
from sparsecomm.patches.sources import source_of
from sparsecomm.patches.versions import MANIFEST, MAX_MANIFEST_BYTES, Link, Version, parse, way
from sparsecomm.tensors import interop

_ATTEMPTS = 4  # meanwhile, the publisher may delete files, or the program may change tensors


class Subscriber:
    """Follows the versions that a `Publisher` writes.

        weights = Subscriber(model.state_dict(), "https://example.com/weights")
        while serving:
            step = weights.update()

    Attributes:
        tensors: the tensors by name. With ``in_place=False``, `update` replaces the dictionary, and changes neither the
            old one nor the tensors in it.
        step: of the version that the tensors hold; ``None`` if they hold none, or if it is unknown after an interrupt.
        problems: what went wrong in the last `update`, as texts: files that it could not use, a newest version that it
            could not reach, or a missing list of versions.
    """

    def __init__(self, tensors: object, source: object, *, in_place: bool = True) -> None:
        """Prepare to follow a publisher. Files are read by `update`.

        Args:
            tensors: an array, or a mapping of names to arrays, such as ``model.state_dict()``, with the names, shapes
                and dtypes of the publisher; contiguous and writable. Arrays of unsigned integers may stand for any
                dtype of the same size, such as uint16 for bfloat16. They may hold any values.
            source: the folder of the `Publisher`; its URL (http:// or https://); or a `Source`, such as `Ranks`.
            in_place: write into the tensors. Otherwise they remain as they are, and `tensors` becomes a dictionary with
                copies of changed tensors.

        Raises:
            InvalidInputError: an argument cannot be used.
        """
        self._in_place = to_bool("in_place", in_place)
        pairs = [("", tensors)] if interop.is_tensor(tensors) else interop.named(tensors)
        weights_of(pairs, writable=True)
        self.tensors: Mapping[str, Any] = dict(pairs)
        self.step: int | None = None
        self.problems: list[str] = []
        self._source = source_of(source)
        self._weights = ""  # the version that the tensors hold; "" if unknown

    def update(self) -> int | None:
        """Bring the tensors to the newest version, and return its step.

        It reads as few bytes as possible: patches, or an anchor and patches. If a file is missing, damaged or
        made for other weights, it tries other files, and `problems` says why. If the newest version cannot be reached,
        it goes as far as possible. After an error, the tensors hold one complete version, or the values from before.

        Returns:
            the step of the version that the tensors now hold; ``None`` if there is none.

        Raises:
            PatchError: the list of versions cannot be read.
            InvalidInputError: the tensors have other names, shapes or dtypes than the published ones.
            TransportError: with `Ranks`, another rank cannot be reached.
        """
        self.problems = []
        tensors = dict(self.tensors)
        try:
            self._update(tensors)
        except TransportError:  # the ranks cannot finish together
            raise
        except Exception:
            self._source.finish()
            raise
        else:
            self._source.finish()
        finally:
            self.tensors = tensors
        return self.step

    def _update(self, tensors: dict[str, Any]) -> None:
        unusable: set[str] = set()
        if not self._weights:
            self._weights = codec.version_of_weights(weights_of(tensors))
        self._source.begin(self._weights)
        versions = self._versions()
        attempts = 1
        while True:
            reached, links = way(versions, self._weights, unusable)
            if not links:
                break
            try:
                self._follow(links[0], tensors)
                self._weights, self.step = links[0].version.weights, links[0].version.step
            except (InvalidInputError, TransportError):
                raise
            except (PatchError, OSError) as error:
                believed, self._weights = self._weights, codec.version_of_weights(weights_of(tensors))
                if self._weights != believed:  # the program has changed the tensors
                    self.step = None
                if self._weights == believed or attempts == _ATTEMPTS:
                    unusable.add(links[0].file.name)
                self._note(f"{links[0].file.name}: {error}")
                if attempts < _ATTEMPTS:
                    versions, attempts = self._versions(), attempts + 1
            except BaseException:
                self._weights, self.step = "", None
                raise
        if versions and reached != versions[-1]:
            self._note(f"version {versions[-1].number} of step {versions[-1].step} cannot be reached")
        if reached is not None:
            self.step = reached.step

    def _versions(self) -> list[Version]:
        """Return the published versions."""
        try:
            with self._source.fetch(MANIFEST, MAX_MANIFEST_BYTES) as file:
                return parse(file.read())
        except FileNotFoundError as error:
            self.problems.append(f"nothing has been published yet, or the folder or URL is wrong: {error}")
            return []
        except TransportError:
            raise
        except OSError as error:
            raise PatchError(f"the list of versions cannot be read: {error}") from error

    def _note(self, problem: str) -> None:
        self.problems.append(problem)
        log.warning("update of weights: %s", problem)

    def _follow(self, link: Link, tensors: dict[str, Any]) -> None:
        """Read a file, and bring the tensors to its version."""
        name, nbytes = link.file
        weights = weights_of(tensors)
        limit = 2 * sum(weight.tensor.nbytes for weight in weights.values()) + codec.MAX_HEADER_BYTES
        if nbytes > limit:
            raise PatchError(f"the file has {nbytes} bytes; expected at most {limit} for these tensors")
        with self._source.fetch(name, nbytes) as file:
            if (size := file.seek(0, os.SEEK_END)) != nbytes:
                raise PatchError(f"the file has {size} bytes; expected {nbytes}, as in the list of versions")
            file.seek(0)
            data = read_compressed(file, weights, name) if link.is_anchor else file.read()
        if isinstance(data, bytes):
            patch = codec.read_patch(data)
            if patch.after != link.version.weights:
                raise PatchError("the patch leads to other weights than the list of versions says")
            changed = [name for name, tensor in patch.tensors.items() if tensor.changed]
            codec.apply_to(data, self._targets(changed, tensors))
        else:
            weights = self._targets(data, tensors)
            new = {name: codec.replacement(content, weights[name].tensor) for name, content in data.items()}
            codec.write_all(new, weights, link.version.weights)

    def _targets(self, names: Iterable[str], tensors: dict[str, Any]) -> dict[str, Weight]:
        """Return the tensors as writable weights. Unless in place, first replace those called ``names`` by copies."""
        for name in () if self._in_place else names:
            if (obj := tensors[name]) is self.tensors[name]:
                tensors[name] = obj.detach().clone() if hasattr(obj, "detach") else obj.copy()
        return weights_of(tensors, writable=True)
