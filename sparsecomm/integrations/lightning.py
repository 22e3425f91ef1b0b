"""Lightning: a strategy that exchanges gradients sparsely, and saves residuals beside Lightning's checkpoints."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

from sparsecomm.errors import InvalidInputError, log, needing

with needing("Lightning", __name__, "lightning"):
    import lightning
    from fsspec import AbstractFileSystem
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem
    from lightning.pytorch.strategies import DDPStrategy

from sparsecomm.integrations.attach import KEY, Attached, attach
from sparsecomm.reducer.options import DENSITY, Schedule


class SparseDDPStrategy(DDPStrategy):
    """Lightning's `DDPStrategy` with a sparse exchange of gradients.

        trainer = lightning.Trainer(strategy=SparseDDPStrategy(), devices=2, accelerator="gpu")

    If ``configure_optimizers`` returns a `sparsecomm.torch.SparseAdamW`, the optimizer exchanges gradients itself. With
    any other optimizer, a hook of DDP does. Each rank's residuals are saved beside Lightning's checkpoint, in
    ``<checkpoint>.ranks``, on local and remote file systems.

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
        """Attach to the wrapped model if a training is about to begin."""
        super().setup(trainer)
        if trainer.training:
            options = {"scaler": getattr(self.precision_plugin, "scaler", None), **self._options}
            self.sparse = attach(self.model, self.optimizers, self._density, options)

    def setup_optimizers(self, trainer: lightning.Trainer) -> None:
        """Release the optimizers of the previous ``fit``, and make new ones."""
        if self.sparse is not None:
            if self.sparse.step and not trainer.ckpt_path and self.is_global_zero:
                log.warning(
                    "fit() makes new optimizers, and begins with empty residuals: gradient entries that were not sent "
                    "in the last fit() are lost; to continue with its optimizers and residuals, pass ckpt_path"
                )
            self.sparse.release()
        super().setup_optimizers(trainer)

    def teardown(self) -> None:
        """Release the optimizers, so that the next ``fit`` can make new ones, also in another Trainer."""
        if self.sparse is not None:
            self.sparse.release()
        super().teardown()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint, and each rank's residuals if it contains the optimizers' states. Collective."""
        if self.sparse is None or "optimizer_states" not in checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        files, residuals = _residuals_of(filepath)
        saved = f"{self.sparse.run}-{checkpoint['global_step']}"
        try:
            if isinstance(files, LocalFileSystem):
                self.sparse.save(Path(residuals), saved)
            else:
                self._upload(self.sparse, files, residuals, saved)
            checkpoint[KEY] = saved
        finally:  # save Lightning's checkpoint even if the residuals cannot be saved
            super().save_checkpoint(checkpoint, filepath, storage_options)
        self._remove(self.sparse, files, residuals, keep=saved)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Load a checkpoint, and remember its path for the residuals."""
        self._loaded_from = checkpoint_path
        return super().load_checkpoint(checkpoint_path, *args, **options)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers' states, and the residuals of the same checkpoint. Collective."""
        super().load_optimizer_state_dict(checkpoint)
        if self.sparse is not None:
            saved = checkpoint.get(KEY)
            with self._folder_with(saved) as folder:
                self.sparse.load(folder, saved, self._loaded_from)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint and its residuals, on all ranks."""
        super().remove_checkpoint(filepath)
        if self.sparse is not None:
            self._remove(self.sparse, *_residuals_of(filepath))

    def _remove(self, sparse: Attached, files: AbstractFileSystem, residuals: str, keep: str | None = None) -> None:
        """Remove the residuals of a checkpoint, except those in the folder ``keep``."""
        if isinstance(files, LocalFileSystem):  # each node may have its own
            sparse.prune(Path(residuals), keep=0 if keep is None else 1)
            if keep is None:
                self.barrier()
                with suppress(OSError):  # it was not there, or has other files
                    Path(residuals).rmdir()
        elif self.is_global_zero:
            files.invalidate_cache()
            for path in files.ls(residuals, detail=False) if files.isdir(residuals) else []:
                if _name(path) != keep:
                    files.rm(path, recursive=True)
            if keep is None and files.isdir(residuals):
                files.rm(residuals, recursive=True)

    def _upload(self, sparse: Attached, files: AbstractFileSystem, residuals: str, saved: str) -> None:
        """Save residuals on a remote file system, or raise an error on all ranks."""
        error: Exception | None = None
        with tempfile.TemporaryDirectory() as folder:
            sparse.save(Path(folder), saved)
            try:
                files.makedirs(f"{residuals}/{saved}", exist_ok=True)
                for path in Path(folder, saved).iterdir():
                    files.put_file(str(path), f"{residuals}/{saved}/{path.name}")
            except Exception as raised:  # of any file system's client
                error = raised
        if not self.reduce_boolean_decision(error is None):
            raise InvalidInputError(
                f"{residuals}: residuals could not be written: {error or 'another rank failed'}"
            ) from error

    @contextmanager
    def _folder_with(self, saved: object) -> Iterator[Path]:
        """Provide a local folder with this rank's residuals in its folder ``saved``, if they are found.

        A checkpoint may be a link to, or a copy of, another one in the same folder, and then shares its residuals.
        """
        files, residuals = _residuals_of(self._loaded_from)
        local = isinstance(files, LocalFileSystem)
        files.invalidate_cache()
        folders = [residuals]
        if isinstance(saved, str):
            for neighbour in (residuals, *([os.path.realpath(residuals.removesuffix(".ranks"))] if local else [])):
                pattern = f"{escape(neighbour.rpartition('/')[0])}/*.ranks/{escape(saved)}"
                folders += [path.rpartition("/")[0] for path in files.glob(pattern)]
        source = next((folder for folder in folders if files.isdir(f"{folder}/{saved}")), residuals)
        if local:
            yield Path(source)
            return
        own = re.compile(rf"-rank{self.global_rank}-of{self.world_size}\b")
        with tempfile.TemporaryDirectory() as downloads:
            try:
                paths = files.ls(f"{source}/{saved}", detail=False)
                Path(downloads, str(saved)).mkdir()
                for path in [path for path in paths if own.search(_name(path))] or paths:
                    files.get_file(path, str(Path(downloads, str(saved), _name(path))))
            except Exception as error:  # of any file system's client; then `load` finds no residuals
                log.warning("%s: %s: %s", source, type(error).__name__, error)
            yield Path(downloads)


def _residuals_of(checkpoint: Any) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a checkpoint, and the path of its residuals there."""
    files, path = url_to_fs(str(checkpoint))
    return files, f"{path}.ranks"


def _name(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]
