"""Lightning: a strategy that exchanges gradients sparsely, and saves residuals beside Lightning's checkpoints."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

from sparsecomm.errors import InvalidInputError, pip_install

try:
    import lightning
    from fsspec import AbstractFileSystem
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem
    from lightning.pytorch.strategies import DDPStrategy
except ImportError as error:
    raise ImportError(
        f"sparsecomm.integrations.lightning needs Lightning ({error}): {pip_install('lightning')}"
    ) from error

from sparsecomm.integrations.attach import KEY, Attached, attach
from sparsecomm.reducer.options import DENSITY, Schedule

__all__ = ["SparseDDPStrategy"]

_log = logging.getLogger("sparsecomm")


class SparseDDPStrategy(DDPStrategy):
    """Lightning's `DDPStrategy` with a sparse exchange of gradients.

        trainer = lightning.Trainer(strategy=SparseDDPStrategy(), devices=2, accelerator="gpu")

    If ``configure_optimizers`` returns a `sparsecomm.torch.SparseAdamW`, the optimizer exchanges gradients itself. With
    any other optimizer a hook of DDP does. Each rank's residuals are saved beside Lightning's checkpoint, in a folder
    with its name and ``.ranks``, on local and remote file systems.

    Args:
        density: as in `sparsecomm.torch.register`.
        options: options of `sparsecomm.torch.register`, with Lightning's scaler by default.
        ddp: options of `DDPStrategy`.

    Attributes:
        sparse: the exchange, whose ``reducers`` have counters; ``None`` before a training begins.
    """

    sparse: Attached | None = None

    def __init__(self, density: Schedule = DENSITY, options: dict[str, Any] | None = None, **ddp: Any) -> None:
        super().__init__(**ddp)
        self._density, self._options = density, dict(options or {})
        self._loaded_from: Any = None

    def setup(self, trainer: lightning.Trainer) -> None:
        """Attach to the model, which DDP has wrapped, if a training is about to begin."""
        super().setup(trainer)
        if trainer.training:
            options = {"scaler": getattr(self.precision_plugin, "scaler", None), **self._options}
            self.sparse = attach(self.model, self.optimizers, self._density, options)

    def setup_optimizers(self, trainer: lightning.Trainer) -> None:
        """Make the optimizers of a ``fit``; those of the last one, and its residuals, are no longer used."""
        if self.sparse is not None:
            if self.sparse.step and not trainer.ckpt_path and self.is_global_zero:
                _log.warning(
                    "fit() makes new optimizers, and begins with empty residuals: gradient entries that were not sent "
                    "in the last fit() are lost; to keep both, pass ckpt_path"
                )
            self.sparse.release()
        super().setup_optimizers(trainer)

    def teardown(self) -> None:
        """Let the next ``fit``, also of another Trainer, make optimizers for the same model."""
        if self.sparse is not None:
            self.sparse.release()
        super().teardown()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint and each rank's residuals, on all ranks; no residuals where it has no optimizers' state."""
        if self.sparse is None or "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        place = _Place(filepath)
        saved = f"{self.sparse.run}-{checkpoint['global_step']}"
        try:
            if place.local:
                self.sparse.save(Path(place.residuals), saved)
            else:
                self._upload(self.sparse, place, saved)
            checkpoint[KEY] = saved
        finally:  # an error of ours does not cost Lightning's checkpoint
            super().save_checkpoint(checkpoint, filepath, storage_options)
        if place.local:
            self.sparse.prune(Path(place.residuals), keep=1)
        elif self.is_global_zero:
            place.remove(keep=saved)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Load a checkpoint, and note where it is."""
        self._loaded_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states, and the residuals of the same checkpoint. Collective."""
        super().load_optimizer_state_dict(checkpoint)
        if self.sparse is not None:
            saved, place = checkpoint.get(KEY), _Place(self._loaded_from)
            with place.folder_with(saved, self.global_rank, self.world_size) as folder:
                self.sparse.load(folder, saved, self._loaded_from)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint and its residuals, on all ranks."""
        super().remove_checkpoint(filepath)
        if self.sparse is None:
            return
        place = _Place(filepath)
        if place.local:
            self.sparse.prune(Path(place.residuals), keep=0)
            self.barrier()
            with suppress(OSError):  # it was not there, or has other files
                Path(place.residuals).rmdir()
        elif self.is_global_zero:
            place.remove()

    def _upload(self, sparse: Attached, place: _Place, saved: str) -> None:
        """Save residuals on a remote file system.

        Raises:
            InvalidInputError: a rank cannot write there.
        """
        error: Exception | None = None
        with tempfile.TemporaryDirectory() as folder:
            sparse.save(Path(folder), saved)
            try:
                place.upload(Path(folder, saved))
            except Exception as raised:  # of any file system's client
                error = raised
        if not self.reduce_boolean_decision(error is None):
            raise InvalidInputError(
                f"{place.residuals}: residuals could not be written: {error or 'another rank failed'}"
            ) from error


class _Place:
    """The place of a checkpoint's residuals: a folder beside the checkpoint, on any file system of fsspec.

    Attributes:
        local: it is a path of this machine.
        residuals: the folder.
    """

    def __init__(self, checkpoint: Any) -> None:
        self._files: AbstractFileSystem
        self._files, self._checkpoint = url_to_fs(str(checkpoint))
        self.local = isinstance(self._files, LocalFileSystem)
        self.residuals = f"{self._checkpoint}.ranks"

    @contextmanager
    def folder_with(self, saved: object, rank: int, size: int) -> Iterator[Path]:
        """Provide a local folder that contains the folder ``saved``, if that is found for this rank.

        A checkpoint may be a link or a copy of another one in the same folder, whose residuals are named after that.
        """
        checkpoints = [self._checkpoint, *([os.path.realpath(self._checkpoint)] if self.local else [])]
        self._files.invalidate_cache()
        folders = [self.residuals]
        if isinstance(saved, str):
            for each in checkpoints:
                pattern = f"{escape(each.rpartition('/')[0])}/*.ranks/{escape(saved)}"
                folders += [found.rpartition("/")[0] for found in self._files.glob(pattern)]
        found = next((each for each in folders if self._files.isdir(f"{each}/{saved}")), self.residuals)
        if self.local:
            yield Path(found)
            return
        with tempfile.TemporaryDirectory() as folder:
            try:
                self._download(f"{found}/{saved}", Path(folder, str(saved)), rank, size)
            except Exception as error:  # of any file system's client; the ranks agree that there are no residuals
                _log.warning("%s: %s: %s", found, type(error).__name__, error)
            yield Path(folder)

    def _download(self, folder: str, to: Path, rank: int, size: int) -> None:
        names = [name.rpartition("/")[2] for name in self._files.ls(folder, detail=False)]
        own = [name for name in names if f"-rank{rank}-of{size}." in name or f"-rank{rank}-of{size}-" in name]
        to.mkdir()
        for name in own or names:
            self._files.get_file(f"{folder}/{name}", str(to / name))

    def upload(self, folder: Path) -> None:
        """Copy a folder's files."""
        self._files.makedirs(f"{self.residuals}/{folder.name}", exist_ok=True)
        for path in folder.iterdir():
            self._files.put_file(str(path), f"{self.residuals}/{folder.name}/{path.name}")

    def remove(self, keep: str | None = None) -> None:
        """Remove all residuals of the checkpoint, except those in the folder ``keep``."""
        self._files.invalidate_cache()
        if self._files.isdir(self.residuals):
            found = self._files.ls(self.residuals, detail=False) if keep else [self.residuals]
            for each in found:
                if each.rstrip("/").rpartition("/")[2] != keep:
                    self._files.rm(each, recursive=True)
