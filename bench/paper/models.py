"""The models of the gTop-k paper, and its published measurements.

Source: Shi et al., "A distributed synchronous SGD algorithm with global Top-k sparsification for low bandwidth
networks", ICDCS 2019 (arXiv 1901.04359), Section IV; the batch sizes of its breakdown (Figure 11) are in the program
published with it, ``scripts/icdcs2019/communication.py`` of hclhkbu/gtopkssgd. The batch of LSTM-PTB is in neither:
100 is what makes its dense step as long, per parameter, as those of VGG-16, AlexNet and ResNet-50.
"""

from __future__ import annotations

from dataclasses import dataclass, field

RANKS = (4, 8, 16, 32)
RATE = 1e9  # bits per second, of the paper's Ethernet


@dataclass(frozen=True)
class Model:
    """A model, and the paper's measurements."""

    name: str  # of the row
    n: int  # parameters
    batch: int  # samples per worker and step
    alone: float  # samples per second of one worker
    # samples per second and worker at `RANKS`, by method: dense, topk, gtopk
    published: dict[str, tuple[float, ...]] = field(hash=False)
    density: float = 0.001  # k/n
    own_dense: bool = True  # whether its dense steps differ from those of a model of the same size

    @property
    def k(self) -> int:
        """Number of entries that a rank selects."""
        return round(self.density * self.n)

    @property
    def compute(self) -> float:
        """Seconds of a step of a single worker."""
        return self.batch / self.alone


def _models() -> list[Model]:
    lstm = {"dense": (12.657, 8.7, 4.1, 2.1), "topk": (19.9, 18.6, 14.8, 5.4), "gtopk": (17.8, 17.6, 15.1, 10.8)}
    # fmt: off
    return [
        Model("VGG-16", 14_700_000, 128, 1317.333,
              {"dense": (104.2, 92.56, 39.48, 12.6), "topk": (110.576, 109.9, 97.865, 63.002),
               "gtopk": (131.06, 130.551, 126.434, 123.2)}),
        Model("ResNet-20", 270_000, 128, 920.632,
              {"dense": (821.7, 705.2, 520.4, 287.9), "topk": (908.837, 752.985, 737.594, 696.029),
               "gtopk": (916.26, 868.73, 808.5, 789.3)}),
        Model("AlexNet", 61_100_000, 64, 173.469,
              {"dense": (14.01, 12.118, 4.936, 1.234), "topk": (14.238, 13.865, 13.352, 9.236),
               "gtopk": (16.536, 16.446, 16.359, 15.777)}),
        Model("ResNet-50", 25_600_000, 256, 52.873,
              {"dense": (39.002, 36.989, 23.176, 10.721), "topk": (37.729, 35.703, 34.495, 30.583),
               "gtopk": (39.795, 39.713, 39.06, 39.119)}),
        Model("LSTM-PTB", 66_000_000, 100, 392.0, lstm),
        Model("LSTM-PTB, density 0.005", 66_000_000, 100, 392.0, lstm, density=0.005, own_dense=False),
    ]
    # fmt: on


MODELS = {model.name: model for model in _models()}
