"""Train a small GPT with sparse gradients, on CPUs over gloo or on GPUs over NCCL; no MPI is needed.

    torchrun --nproc_per_node 2 examples/transformer.py
    torchrun --nproc_per_node 2 examples/transformer.py --dense    # torch.optim.AdamW and DistributedDataParallel

The same over an emulated slow link, in a checkout and as root (see docs/guides/compare-with-dense.md):

    python -m bench.slow_network run --ranks 2 --rate 100mbit --launcher torchrun -- python examples/transformer.py

It learns Python's help texts in bfloat16, with gradient accumulation. A run continues from the last checkpoint, bit for
bit as if it had never stopped. Comments with ``# sparsecomm:`` mark the lines that use sparsecomm.
"""

import argparse
import hashlib
import math
import os
import time
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import sparsecomm.torch

TEXT = torch.tensor(list("".join(topics.values()).encode("ascii", "ignore")))
LENGTH, BATCH, ACCUMULATED = 64, 8, 2  # characters, samples, batches of a step

parser = argparse.ArgumentParser()
parser.add_argument("--dense", action="store_true", help="exchange dense gradients, to compare")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save-every", type=int, default=50, metavar="STEPS", help="(50)")
parser.add_argument("--folder", type=Path, help="of checkpoints; defaults to checkpoints/transformer-sparse or -dense")
arguments = parser.parse_args()
folder = arguments.folder or Path("checkpoints", f"transformer-{'dense' if arguments.dense else 'sparse'}")

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


class GPT(nn.Module):
    def __init__(self, width: int = 128, layers: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(128, width), nn.Embedding(LENGTH, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.scores = nn.Linear(width, 128)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        past = nn.Transformer.generate_square_subsequent_mask(LENGTH, device=text.device)
        return self.scores(self.blocks(self.characters(text) + self.positions.weight, past, is_causal=True))


torch.manual_seed(0)  # the same weights on all ranks
model = GPT().to(device)
if arguments.dense:
    dense_bytes = 8 * sum(p.numel() for p in model.parameters()) * (ranks - 1) / ranks  # of a ring
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
else:  # sparsecomm: the optimizer exchanges gradients, so the model is not wrapped
    optimizer = sparsecomm.torch.SparseAdamW(model.named_parameters(), lr=2e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(  # a warm-up of 20 steps, then a cosine down to a tenth
    optimizer, lambda step: min((step + 1) / 20, 0.55 + 0.45 * math.cos(math.pi * step / arguments.steps))
)
# sparsecomm: every rank saves and loads its own file, because residuals differ.
objects = {"model": model, "optimizer": optimizer, "schedule": schedule}
checkpoint = sparsecomm.torch.load(folder, objects)
losses, start = [], time.perf_counter()
for step in range(checkpoint.step if checkpoint else 0, arguments.steps):
    data = torch.Generator().manual_seed(step * ranks + rank)  # after a restart, the step has the same data
    optimizer.zero_grad()
    for batch in range(ACCUMULATED):
        starts = torch.randint(len(TEXT) - LENGTH, (BATCH, 1), generator=data)
        window = TEXT[starts + torch.arange(LENGTH + 1)].to(device)
        model.require_backward_grad_sync = batch == ACCUMULATED - 1  # for DistributedDataParallel
        with torch.autocast(device, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        (loss / ACCUMULATED).backward()
    optimizer.step()
    schedule.step()
    losses.append(loss.detach())
    if (step + 1) % 10 == 0:
        mean, milliseconds = torch.stack(losses).mean(), 1e3 * (time.perf_counter() - start) / len(losses)
        counters = None if arguments.dense else optimizer.reducer.counters
        sent = counters.bytes_sent / counters.steps if counters else dense_bytes
        if rank == 0:
            print(f"step {step + 1}: loss {mean:.3f}, {milliseconds:.0f} ms and {sent / 1e3:.0f} kB per step")
        losses, start = [], time.perf_counter()
    if (step + 1) % arguments.save_every == 0:
        sparsecomm.torch.save(folder, step + 1, objects)

weights = nn.utils.parameters_to_vector(model.parameters()).detach().cpu().numpy()
print(f"rank {rank}: weights {hashlib.sha256(weights).hexdigest()[:8]}\n", end="")
dist.destroy_process_group()
