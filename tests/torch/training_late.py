"""Cases of ranks that are late for exchanges of local steps, on every rank of a process group."""

from __future__ import annotations

import logging
from logging.handlers import BufferingHandler
from typing import Any

import torch.distributed as dist

from tests.local_steps.programs import comes_late, nothing_is_lost
from tests.torch.training_ranks import RANK, P, all_gather, case_of_several


def late(name: str, **options: Any) -> list[dict[str, Any]]:
    """Return all ranks' outcomes, after checks that do not depend on options."""
    store, said, logger = (
        dist.distributed_c10d._get_default_store(),
        BufferingHandler(10**6),
        logging.getLogger("sparsecomm"),
    )

    def rendezvous() -> None:
        if RANK > 0:
            store.set(f"{name} {RANK}", "")
        else:
            store.wait([f"{name} {rank}" for rank in range(1, P)])

    logger.addHandler(said)
    _, mine = comes_late(RANK, rendezvous, **options)
    logger.removeHandler(said)
    warnings = [record.getMessage() for record in said.buffer if record.levelno == logging.WARNING]
    assert any("rank 0 is late for the exchange" in text for text in warnings) == (RANK == 0), warnings
    outcomes = all_gather(mine)
    assert len({outcome["held"].tobytes() for outcome in outcomes}) == 1
    assert all(0 in outcome["seen"] for outcome in outcomes)
    return outcomes


@case_of_several
def one_that_is_late_is_left_out_and_nothing_is_lost() -> None:

    def fast_ranks_make_more_steps(attempt: int) -> bool:
        outcomes = late(f"attempt {attempt}", by_speed=True)
        nothing_is_lost(outcomes)
        return any(steps[0] > steps[1] for outcome in outcomes for steps in outcome["divisions"])

    assert any(map(fast_ranks_make_more_steps, range(20)))  # other programs may hold up the fast rank
