from collections.abc import Sequence

class Launcher:
    """Kernels that are started one after another, with arguments that are converted once."""

    def __init__(self, launch: int, kernels: list[tuple[int, int, int, Sequence[object]]]) -> None: ...
    def start(self, stream: int, addresses: tuple[int, ...]) -> int: ...
