"""Two receivers follow weights while they are trained: PyTorch, NumPy, and a static file server.

    python examples/patches.py

A trainer updates a model in bfloat16, as reinforcement learning does: AdamW updates float32 masters with a small
learning rate, and most of the rounded weights stay the same. It publishes the weights to a folder after each step. One
receiver answers requests with the PyTorch model and swaps in new weights; another one joins late over HTTP, with NumPy
alone. The threads share only the folder. Comments with ``# sparsecomm:`` mark the lines that use sparsecomm.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import sys
import tempfile
import threading

try:
    import numpy as np
    import torch
    from torch import nn
except ImportError as error:
    sys.exit(f"This example needs {error.name}: pip install torch")

from sparsecomm import patches

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--lr", type=float, default=1e-6)
arguments = parser.parse_args()


def new_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)).to(torch.bfloat16)


def train(model: nn.Module, teacher: nn.Module, publisher: patches.Publisher) -> list[patches.Published]:
    """Train; publish the weights before the first step and after each one."""
    weights = dict(model.named_parameters())
    masters = {name: weight.detach().float().requires_grad_() for name, weight in weights.items()}
    optimizer = torch.optim.AdamW(masters.values(), lr=arguments.lr)
    publisher.publish(0)
    running = []
    for step in range(1, arguments.steps + 1):
        x = torch.randn(64, 512, dtype=torch.bfloat16)
        nn.functional.mse_loss(model(x).float(), teacher(x).detach().float()).backward()
        for name, weight in weights.items():
            masters[name].grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        for name, weight in weights.items():
            weight.data.copy_(masters[name].data)  # rounds to bfloat16
        # sparsecomm: the next step runs while another thread writes the patch.
        running.append(publisher.publish_in_background(step))
    return [future.result() for future in running]


def serve(model: nn.Module, folder: str) -> None:
    """Answer requests. All weights of an answer are of one version."""
    # sparsecomm: changed tensors are replaced by copies in a new dictionary, `tensors`.
    subscriber = patches.Subscriber(model.state_dict(), folder, in_place=False)
    answers = 0
    while subscriber.step != arguments.steps:
        subscriber.update()
        model.load_state_dict(subscriber.tensors, assign=True)
        model(torch.ones(1, 512, dtype=torch.bfloat16))
        answers += 1
    print(f"The PyTorch receiver has answered {answers} requests")


class Quiet(http.server.SimpleHTTPRequestHandler):
    log_message = staticmethod(lambda *_: None)


trained, served, teacher = (new_model(seed) for seed in range(3))
with tempfile.TemporaryDirectory() as folder:
    receiver = threading.Thread(target=serve, args=(served, folder), daemon=True)
    receiver.start()
    with patches.Publisher(trained.state_dict(), folder) as publisher:
        published = train(trained, teacher, publisher)
    receiver.join()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        # sparsecomm: NumPy has no bfloat16; arrays of uint16 hold the same bits.
        late = {name: np.zeros(tuple(weight.shape), np.uint16) for name, weight in trained.state_dict().items()}
        step = patches.Subscriber(late, f"http://127.0.0.1:{server.server_port}").update()
        server.shutdown()

for name, weight in trained.state_dict().items():
    assert torch.equal(weight.view(torch.int16), served.state_dict()[name].view(torch.int16)), name
    assert np.array_equal(weight.view(torch.uint16).numpy(), late[name]), name
print(f"Both receivers have the weights of step {step}, bit for bit")
nbytes = sum(weight.nbytes for weight in late.values())
changed = sum(version.changed for version in published) / len(published)
patched = sum(version.patch_bytes for version in published) / len(published)
print(f"model: {nbytes:,} bytes; patch: {patched:,.0f} bytes per step, 1/{nbytes / patched:.0f} of it")
print(f"{changed / (nbytes / 2):.2%} of the weights change per step, in {8 * patched / changed:.2f} bits each")
