"""Checkpoints: one file per rank, written on all ranks or on none, for any world size."""

from sparsecomm.checkpoints.checkpoints import Checkpoint, load, save
from sparsecomm.checkpoints.formats import Folder

__all__ = ["Checkpoint", "Folder", "load", "save"]
