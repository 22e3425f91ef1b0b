"""The tasks: models, and data that come with packages.

- "digits": a convolutional network on handwritten digits (Alpaydin and Kaynak, Optical Recognition of Handwritten
  Digits, UCI Machine Learning Repository, CC BY 4.0), as scikit-learn ships them: 1,797 images of 8 x 8, a third of
  them held out.
- "text": an LSTM that predicts the next character of the English documentation of Python (`pydoc_data.topics` of the
  standard library, PSF licence). Its topics repeat one another; each paragraph is taken once. A tenth is held out.
- "transformer": a decoder on the same text, for AdamW.
- "transformer-2m": a larger one, on the sources of Python's standard library. Some files are held out.
- "transformer-10m": a larger one, on the words of the same sources.
"""

from __future__ import annotations

import math
import re
import sysconfig
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Samples:
    """Inputs and targets, one row per sample."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, which: Tensor) -> Samples:
        return Samples(self.inputs[which], self.targets[which])


@dataclass(frozen=True)
class Task:
    """A model, its data and its hyper-parameters, the same for dense and for sparse gradients."""

    build: Callable[[], nn.Module]  # returns a model with random weights
    data: Callable[[], tuple[Samples, Samples]]  # returns the training samples and the held-out samples
    batch: int  # samples per step of all ranks
    steps: int  # default number of steps
    rate: float  # initial learning rate; it falls to zero along half a cosine
    clip: float | None  # maximum norm of gradients, or ``None``
    masking: bool  # of `sparsecomm.Reducer`
    some: int  # number of held-out samples for a point of a curve; the end is evaluated on all
    score: str  # "accuracy" in percent or "loss" in nats, on held-out samples

    def rate_at(self, step: int, steps: int) -> float:
        return self.rate * (0.5 + 0.5 * math.cos(math.pi * step / steps))


def evaluate(model: nn.Module, samples: Samples) -> tuple[float, float]:
    """Return the mean cross-entropy in nats, and the accuracy in percent."""
    loss, right = 0.0, 0
    with torch.no_grad():
        for inputs, targets in zip(samples.inputs.split(256), samples.targets.split(256), strict=True):
            scores, expected = model(inputs).flatten(0, -2), targets.flatten()
            loss += float(functional.cross_entropy(scores, expected, reduction="sum"))
            right += int((scores.argmax(1) == expected).sum())
    return loss / samples.targets.numel(), 100 * right / samples.targets.numel()


# -- digits -----------------------------------------------------------------------------------------------------------


class Convolutional(nn.Module):
    """Two convolutions and two dense layers: 53,002 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 64, 3, padding=1)
        self.hidden = nn.Linear(64 * 2 * 2, 128)
        self.scores = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.first(images)), 2)
        x = functional.max_pool2d(functional.relu(self.second(x)), 2)
        x = functional.relu(self.hidden(x.flatten(1)))
        return self.scores(x)  # type: ignore[no-any-return]


@cache
def digits() -> tuple[Samples, Samples]:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    parts = train_test_split(images, torch.tensor(labels), test_size=1 / 3, random_state=0, stratify=labels)
    return Samples(parts[0], parts[2]), Samples(parts[1], parts[3])


# -- text -------------------------------------------------------------------------------------------------------------

LENGTH = 64  # characters of a sample
HELD_OUT = 10  # every 10th block of the text is held out


class Characters(nn.Module):
    """An LSTM over characters."""

    def __init__(self, size: int, embedded: int = 32, hidden: int = 192) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size, embedded)
        self.lstm = nn.LSTM(embedded, hidden, batch_first=True)
        self.scores = nn.Linear(hidden, size)

    def forward(self, characters: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(characters))
        return self.scores(states)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Causal attention and two dense layers, each with layer normalization and a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_dense = nn.LayerNorm(width), nn.LayerNorm(width)
        self.projections, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        projected = self.projections(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = projected.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attended(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.second(functional.gelu(self.first(self.before_dense(x))))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """A decoder over characters or words; ``tied``: the scores use the weights of the embedding."""

    def __init__(
        self, size: int, width: int, blocks: int, heads: int, *, tied: bool = False, length: int = 64, bias: bool = True
    ) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(size, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(blocks)])
        self.last, self.scores = nn.LayerNorm(width), nn.Linear(width, size, bias=bias)
        if tied:
            self.scores.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.4 / math.sqrt(width))

    def forward(self, characters: Tensor) -> Tensor:
        x = self.embedding(characters) + self.positions.weight[: characters.shape[1]]
        return self.scores(self.last(self.blocks(x)))  # type: ignore[no-any-return]


@cache
def text() -> str:
    from pydoc_data.topics import topics

    paragraphs = (paragraph.strip("\n") for name in sorted(topics) for paragraph in topics[name].split("\n\n"))
    return "\n\n".join(dict.fromkeys(paragraphs))


@cache
def characters() -> tuple[Samples, Samples]:
    samples = _encoded(text())
    blocks = torch.arange(len(samples)) // 64  # of 4 kB
    held_out = blocks % HELD_OUT == HELD_OUT - 1
    return samples.take(~held_out), samples.take(held_out)


def _encoded(everything: str) -> Samples:
    numbers = {character: number for number, character in enumerate(sorted(set(everything)))}
    return _rows(torch.tensor([numbers[character] for character in everything]))


def _rows(encoded: Tensor) -> Samples:
    rows = encoded[: (len(encoded) - 1) // LENGTH * LENGTH].reshape(-1, LENGTH)
    return Samples(rows, encoded[1:][: rows.numel()].reshape(-1, LENGTH))


# -- sources ----------------------------------------------------------------------------------------------------------

NOT_SOURCES = {"site-packages", "dist-packages", "test", "tests", "idlelib", "pydoc_data", "encodings", "lib2to3"}


@cache
def sources() -> tuple[str, str]:
    """Return the modules of Python's standard library (PSF licence) as training text and held-out text."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in sorted(folder.rglob("*.py")) if not NOT_SOURCES & set(path.relative_to(folder).parts))
    read = [re.sub(r"[^\n -~]", "", path.read_text("utf-8", "ignore")) for path in files]
    held_out = read[HELD_OUT - 1 :: HELD_OUT]
    del read[HELD_OUT - 1 :: HELD_OUT]
    return "".join(read), "".join(held_out)


@cache
def source_characters() -> tuple[Samples, Samples]:
    training, held_out = sources()
    samples = _encoded(training + held_out)
    ends = len(training) // LENGTH
    number = torch.arange(len(samples))
    return samples.take(number < ends), samples.take((number > ends) & (number % 5 == 0))


WORDS = 4096  # in the vocabulary; rarer words are spelled


@cache
def source_words() -> tuple[Samples, Samples]:
    """Return the same sources as words, digits, signs, and line ends with their indentation."""
    texts = [re.findall(r"[A-Za-z_]+|\n *| +|.", part) for part in sources()]
    characters = sorted(set("".join(sources())))
    counts = Counter(word for word in texts[0] if len(word) > 1)
    words = sorted(counts, key=lambda word: (-counts[word], word))[: WORDS - len(characters)]
    numbers = {word: number for number, word in enumerate(characters + words)}
    spelled = ([word] if word in numbers else word for part in texts for word in part)
    encoded = torch.tensor([numbers[part] for parts in spelled for part in parts])
    held_out = sum(1 if word in numbers else len(word) for word in texts[1])
    samples = _rows(encoded)
    ends = (len(encoded) - held_out) // LENGTH
    number = torch.arange(len(samples))
    return samples.take(number < ends), samples.take((number > ends) & (number % 5 == 0))


# By name: build, data, batch, steps, rate, clip, masking, some, score.
TASKS = {
    "digits": Task(Convolutional, digits, 64, 2000, 0.1, None, True, 599, "accuracy"),
    "text": Task(lambda: Characters(len(set(text()))), *(characters, 32, 900, 8.0, 0.25, True, 128, "loss")),
}
TRANSFORMERS = {  # for AdamW
    "transformer": Task(
        lambda: Transformer(len(set(text())), 64, 3, 4), *(characters, 32, 900, 0.006, 1.0, False, 128, "loss")
    ),
    "transformer-2m": Task(
        lambda: Transformer(len(set("".join(sources()))), 192, 5, 6),
        *(source_characters, 32, 3000, 0.002, 1.0, False, 128, "loss"),
    ),
    "transformer-10m": Task(
        lambda: Transformer(WORDS, 512, 3, 8, tied=True), *(source_words, 4, 2000, 0.001, 1.0, False, 128, "loss")
    ),
}


@cache
def weights_of(model: str) -> int:
    """Return the number of a model's weights."""
    return sum(parameter.numel() for parameter in {**TASKS, **TRANSFORMERS}[model].build().parameters())
