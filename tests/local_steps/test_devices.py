"""Local steps of parameters on a CUDA device give the same bits as on the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.emulator.deferred import DeferredRuntime
from tests.local_steps.programs import initial, made, move, some_frozen
from tests.ranks import run
from tests.reducer.programs import bits


def trained(P: int, cuda: DeferredRuntime | None) -> list[Any]:
    """Two rounds, on the device if there is one, each rank on a stream of its own."""

    def program(transport: simulated.SimulatedTransport) -> Any:
        with cuda.on_stream(cuda.new_stream()) if cuda else nullcontext():
            return steps(transport)

    def steps(transport: simulated.SimulatedTransport) -> Any:
        mine = initial()
        put, wait = (cuda.put, cuda.synchronize) if cuda else (lambda array: array, lambda: None)
        options = {"sync_every": 3, "fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.25}
        local = made(transport, {name: put(values) for name, values in mine.items()}, outer=sc.NesterovSGD(), **options)
        for step in range(1, 8):
            wait()
            move(mine, transport.rank, step, some_frozen)
            local.step({name: put(values) for name, values in mine.items()})
            if step == 4:
                state = local.state_dict()
                local.finish({name: put(values.copy()) for name, values in mine.items()})
                local.load_state_dict(state)
        wait()
        return bits(mine), bits(local.state_dict()["global_parameters"])

    return run(P, program)


def test_the_same_bits_on_every_device(cuda: DeferredRuntime) -> None:
    found = trained(2, cuda)
    assert cuda.launches
    assert found == trained(2, None)
