"""Checkpoints: one file per rank, saved on all ranks or on none, and loaded with any world size."""

from sparsecomm.checkpoints.checkpoints import Checkpoint, load, save
from sparsecomm.checkpoints.files import Folder

__all__ = ["Checkpoint", "Folder", "load", "save"]
