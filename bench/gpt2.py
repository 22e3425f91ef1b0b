"""Train GPT-2 with the Trainer of Transformers, by dense AdamW and by SparseAdamW, and compare losses and bytes.

    torchrun --nproc_per_node 2 -m bench.gpt2 --steps 240 --seeds 0 1 2 --out bench/results/gpt2.jsonl

The model is built from a config and has 109,000 weights. It predicts the next character of the source of Python's
`argparse`; its last tenth is held out. By default AdamW has PyTorch's betas, 0.9 and 0.999, and the Trainer
clips gradients to a norm of 1. Both ways share the initial weights, the batches and the learning rate's schedule.
Rank 0 adds a line of JSON per training to the file OUT, and a training that is already there is skipped.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores
os.environ.setdefault("SPARSECOMM_THREADS", "1")

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments

import sparsecomm.torch
from sparsecomm.integrations.transformers import register

LENGTH = 48  # characters of a sample
BATCH = 8  # samples per rank and step
LAST = 40  # steps whose training losses are averaged
Setting = dict[str, Any]

torch.set_num_threads(1)


def samples() -> tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """Return the training samples and the held-out samples."""
    text = Path(argparse.__file__).read_text()
    numbers = torch.tensor([min(max(ord(character) - 32, 0), 95) for character in text])
    rows = numbers[: len(numbers) // LENGTH * LENGTH].reshape(-1, LENGTH)
    samples = [{"input_ids": row, "labels": row} for row in rows]
    split = len(samples) * 9 // 10
    return samples[:split], samples[split:]


def train(setting: Setting, folder: str) -> dict[str, float]:
    """Train once, and return the losses in nats per character and the bytes that a rank sends per weight and step."""
    torch.manual_seed(setting["seed"])
    config = GPT2Config(vocab_size=96, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0)
    config.update({"eos_token_id": 0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0})
    model = GPT2LMHeadModel(config)
    options: Any = {"lr": setting["rate"], "betas": (0.9, setting["beta2"]), "weight_decay": 0.01}
    optimizer: Any
    if setting["way"] == "dense":
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    else:
        options |= {"density": setting["density"], "wire": setting["wire"]}
        optimizer = sparsecomm.torch.SparseAdamW(model.named_parameters(), **options)
    training, held_out = samples()
    arguments = TrainingArguments(
        folder,
        max_steps=setting["steps"],
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=64,
        warmup_steps=10,
        max_grad_norm=setting["clip"],
        logging_steps=1,
        seed=setting["seed"],
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, arguments, train_dataset=training, eval_dataset=held_out, optimizers=(optimizer, None))
    trainer.remove_callback(PrinterCallback)
    callback = None if setting["way"] == "dense" else register(trainer)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    ranks = trainer.args.world_size
    sent = 8.0 * (ranks - 1) / ranks  # by a dense ring
    if callback:
        counters = callback.sparse.reducers[0].counters
        sent = counters.bytes_sent / counters.steps / sum(p.numel() for p in model.parameters())
    return {"loss": trainer.evaluate()["eval_loss"], "training_loss": fmean(losses[-LAST:]), "bytes": sent}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[240])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-3], help="learning rates")
    parser.add_argument("--ways", nargs="+", default=["dense", "sparse"], choices=["dense", "sparse"])
    parser.add_argument("--clip", type=float, default=1.0, help="norm to which the Trainer clips gradients; 0: none")
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--density", type=float, default=0.09)
    parser.add_argument("--wire", default="packed_int2")
    parser.add_argument("--out", type=Path, default=Path("gpt2.jsonl"))
    choices = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    lines = choices.out.read_text().splitlines() if choices.out.exists() else []
    done = [json.loads(line)["setting"] for line in lines]
    sparse = {"density": choices.density, "wire": choices.wire}
    for steps, rate, seed, way in product(choices.steps, choices.rates, choices.seeds, choices.ways):
        setting = {"way": way, "steps": steps, "seed": seed, "rate": rate, "beta2": choices.beta2, "clip": choices.clip}
        setting |= sparse if way == "sparse" else {}
        if setting in done:
            continue
        with TemporaryDirectory() as folder:
            outcome = train(setting, folder)
        if int(os.environ["RANK"]) == 0:
            print(setting, outcome, flush=True)
            with choices.out.open("a") as file:
                file.write(json.dumps({"setting": setting, "outcome": outcome}) + "\n")


if __name__ == "__main__":
    main()
