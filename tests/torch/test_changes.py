"""`SparseAdamW` follows all changes to `optimizer.state`, groups, settings and weights, like PyTorch's AdamW."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from sparsecomm.errors import InvalidInputError
from sparsecomm.transport import simulated
from tests.torch.changes import WAYS, differences, trained


@pytest.mark.filterwarnings("ignore:.*")
@pytest.mark.parametrize(("P", "overlap"), [(2, False), (1, True)])
@pytest.mark.parametrize("name", WAYS)
def test_a_change_takes_effect_in_the_next_step(name: str, P: int, overlap: bool) -> None:
    """At density 1.0 it trains like dense AdamW. At 0.09 all ranks have the same weights."""
    oracle = trained(range(P), WAYS[name])
    for density in (1.0, 0.09):
        options = {"density": density, "overlap": overlap}
        results = simulated.run(P, lambda t, o=options: trained([t.rank], WAYS[name], comm=t, **o), catch=True)
        if any(isinstance(result.error, InvalidInputError) for result in results) and WAYS[name].refusable:
            assert all(isinstance(result.error, InvalidInputError) for result in results)
            continue
        assert [result.error for result in results] == [None] * P
        for result in results:
            assert all(p.isfinite().all() for p in result.value.parameters)
            pairs = zip(result.value.parameters, results[0].value.parameters, strict=True)
            assert all(mine.equal(theirs) for mine, theirs in pairs), "weights differ between ranks"
            assert density < 1 or not (wrong := differences(result.value, oracle)), wrong
