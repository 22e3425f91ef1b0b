from collections.abc import Callable, Iterable
from typing import TypeVar

_T = TypeVar("_T")

def persevere(step: Callable[[BaseException | None], object]) -> None: ...
def run_all(calls: Iterable[Callable[[], object]], done: list[_T] | None, item: _T) -> None: ...
