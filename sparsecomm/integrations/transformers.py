"""The Trainer of Hugging Face Transformers: exchange gradients sparsely, and save residuals with its checkpoints."""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

from sparsecomm.errors import InvalidInputError, needing

with needing("Transformers", __name__, "transformers[torch]"):
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

from sparsecomm.integrations.attach import FOLDER, KEY, Attached, attach, unwrapped
from sparsecomm.reducer.options import DENSITY, Schedule
from sparsecomm.torch import SparseOptimizer


def register(trainer: Trainer, density: Schedule = DENSITY, **options: Any) -> SparseCallback:
    """Exchange gradients sparsely, and save and load residuals with the Trainer's checkpoints.

        adamw = sparsecomm.torch.SparseAdamW(model.named_parameters(), lr=1e-3)
        trainer = Trainer(model, arguments, train_dataset=data, optimizers=(adamw, None))
        sparsecomm.integrations.transformers.register(trainer)
        trainer.train()

    With an optimizer other than `SparseAdamW`, do not let the Trainer clip the averaged gradient: pass
    ``max_grad_norm=0`` to `TrainingArguments`, and ``clip=1.0`` here. Residuals are in each checkpoint's folder
    ``sparsecomm``, unless ``save_only_model`` is set.

    Args:
        trainer: the Trainer, before ``train()``.
        density, options: as in `sparsecomm.torch.register`, with the Trainer's scaler by default. They are ignored for
            `SparseAdamW`, which exchanges gradients itself.

    Returns:
        The callback; its ``sparse.reducers`` have counters once the training has begun.

    Raises:
        InvalidInputError: the Trainer was registered already.
    """
    if any(isinstance(callback, SparseCallback) for callback in trainer.callback_handler.callbacks):
        raise InvalidInputError("trainer: it was registered already; register each Trainer once")
    callback = SparseCallback(trainer, density, options)
    trainer.add_callback(callback)
    return callback


class SparseCallback(TrainerCallback):
    """The callback that `register` adds to a Trainer.

    It wraps two methods of the Trainer: ``train``, to learn the checkpoint to resume from, and ``create_optimizer``,
    to keep residuals out of the optimizer's state before the Trainer loads it.

    Attributes:
        sparse: the exchange; ``None`` before the training begins.
    """

    sparse: Attached | None = None

    def __init__(self, trainer: Trainer, density: Schedule, options: dict[str, Any]) -> None:
        self._trainer, self._density, self._options = trainer, density, options
        self._resumed: Path | None = None  # the checkpoint that train() resumes from
        train, create_optimizer = trainer.train, trainer.create_optimizer

        @wraps(train)
        def train_from(resume_from_checkpoint: Any = None, *args: Any, **others: Any) -> Any:
            if resume_from_checkpoint is True:
                last: str | None = get_last_checkpoint(str(trainer.args.output_dir))  # type: ignore[no-untyped-call]
                resume_from_checkpoint = last or True  # True makes the Trainer raise an error
            resumes = not isinstance(resume_from_checkpoint, bool) and resume_from_checkpoint is not None
            self._resumed = Path(resume_from_checkpoint) if resumes else None
            return train(resume_from_checkpoint, *args, **others)

        @wraps(create_optimizer)
        def create_apart(*args: Any, **others: Any) -> Any:
            if trainer.optimizer is None and self.sparse is not None:
                self.sparse.release()  # the Trainer makes a new optimizer for the same model
            created = create_optimizer(*args, **others)
            if isinstance(optimizer := unwrapped(trainer.optimizer), SparseOptimizer):
                optimizer.residuals_apart()
            return created

        vars(trainer).update(train=train_from, create_optimizer=create_apart)

    def on_train_begin(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """Attach to the model, which DDP has wrapped by now, and load residuals if the Trainer resumes."""
        trainer = self._trainer
        options = {"scaler": getattr(trainer.accelerator, "scaler", None), **self._options}
        self.sparse = attach(trainer.model_wrapped, [unwrapped(trainer.optimizer)], self._density, options, self.sparse)
        if self._resumed is not None:
            saved = f"{state.stateful_callbacks.get(KEY)}-{state.global_step}"
            self.sparse.load(self._resumed / FOLDER, saved if KEY in state.stateful_callbacks else None, self._resumed)
        self.sparse.begin_run()
        state.stateful_callbacks[KEY] = self.sparse.run  # the Trainer saves it in its checkpoints

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        """Save this rank's residuals in the folder of the Trainer's checkpoint."""
        trainer = self._trainer
        if self.sparse is not None and not args.save_only_model:
            run_folder = trainer._get_output_dir(getattr(trainer, "_trial", None))  # of a trial in a search
            folder = Path(run_folder, f"checkpoint-{state.global_step}", FOLDER)
            self.sparse.save(folder, f"{self.sparse.run}-{state.global_step}")
            self.sparse.prune(folder, keep=1)
