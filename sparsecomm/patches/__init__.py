"""Publish weights exactly, in few bits: `diff`, `apply`, `Publisher`, `Subscriber`."""

from sparsecomm.errors import PatchError
from sparsecomm.patches.codec import Patch, apply, diff, read_patch
from sparsecomm.patches.publisher import Published, Publisher
from sparsecomm.patches.ranks import Ranks
from sparsecomm.patches.sources import Folder, Http, Source
from sparsecomm.patches.subscriber import Subscriber

__all__ = [
    "Folder", "Http", "Patch", "PatchError", "Published", "Publisher", "Ranks", "Source", "Subscriber", "apply", "diff",
    "read_patch",
]  # fmt: skip
