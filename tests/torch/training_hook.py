"""Cases of the DDP hook, on every rank: see `test_hook.py`."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sparsecomm as sc
from sparsecomm.torch import SparseState, register, sparse_hook
from tests.torch.training_ranks import (
    EXACT,
    ODD,
    RANK,
    Chosen,
    Fails,
    Oracle,
    P,
    case,
    case_of_several,
    gradients,
    gradients_by_rank,
    same_everywhere,
    sgd,
    soon,
    timeout,
    train,
)

ALL = partial(dict.fromkeys, range(P))
SMALL = 0.0004  # MB in a bucket of DDP: several buckets


@case
def weights_are_the_oracles() -> None:
    """Also while DDP rebuilds its buckets, which are other ones than the state's."""
    find, static = {"find_unused_parameters": True}, {"static_graph": True}
    settings: list[tuple[str, bool, float, dict[str, Any], bool]] = [
        ("split", False, 25, {}, True),
        ("allgather", False, SMALL, {}, False),
        ("split", True, SMALL, {}, False),
        ("split", True, SMALL, find, True),
        ("allgather", False, SMALL, static, True),
        ("split", True, SMALL, static, False),
    ]
    for algorithm, view, cap, more, none in settings:
        model = Chosen()
        oracle = Oracle(model, algorithm)
        ddp = DistributedDataParallel(model, bucket_cap_mb=cap, gradient_as_bucket_view=view, **more)
        state, optimizer = register(ddp, algorithm=algorithm, **EXACT), sgd(model.parameters())
        buckets: list[int] = []
        reduce = state._reduce
        state._reduce = lambda bucket, to=buckets, go=reduce: to.append(bucket.index()) or go(bucket)  # type: ignore[method-assign]
        for step in range(4):
            train(ddp, gradients_by_rank(step)[RANK], optimizer, none)
            oracle.step(gradients_by_rank(step))
            oracle.check(model, state.state_dict())
        assert (max(buckets) > 0) == (cap == SMALL)
        same_everywhere(model)


@case
def every_type() -> None:
    half, brain, single, double = torch.float16, torch.bfloat16, torch.float32, torch.float64
    for dtypes in ([half], [brain], [double], [single, half], [brain, single, double, half]):
        model = Chosen(dtypes=dtypes)
        oracle = Oracle(model)
        ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL)
        state, optimizer = register(ddp, algorithm="split", **EXACT), sgd(model.parameters())
        for step in range(3):
            train(ddp, gradients_by_rank(step)[RANK], optimizer)
            oracle.step(gradients_by_rank(step))
            oracle.check(model, state.state_dict())


@case
def unused_parameters() -> None:
    """On some ranks or on all: they count as zeros, and what waits for them is applied, not lost."""
    steps: list[dict[int, str]] = [
        {},
        {ODD: "ad"},
        dict.fromkeys(range(P), "ad"),
        {0: "e"},
        dict.fromkeys(range(P), "bcde"),
    ]
    for view, none in product([False, True], [True, False]):
        model = Chosen()
        oracle = Oracle(model)
        ddp = DistributedDataParallel(
            model, find_unused_parameters=True, gradient_as_bucket_view=view, bucket_cap_mb=SMALL
        )
        state, optimizer = register(ddp, algorithm="split", **EXACT), sgd(model.parameters())
        for step, without in enumerate(steps):
            train(ddp, gradients_by_rank(step, without)[RANK], optimizer, none)
            oracle.step(gradients_by_rank(step, without))
            oracle.check(model, state.state_dict())
        same_everywhere(model)


@case
def means_are_copied_by_the_hook_only_where_ddp_writes_none() -> None:
    for find, without in ((False, ""), (True, ""), (True, "ad")):
        model = Chosen()
        ddp = DistributedDataParallel(model, find_unused_parameters=find, bucket_cap_mb=SMALL)
        state = register(ddp, **EXACT)
        copied: list[torch.Tensor] = []
        keep, copy_ = state._keep_unused, torch.Tensor.copy_

        def counted(before: Any, keep: Any = keep, copy_: Any = copy_, copied: Any = copied) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.Tensor, "copy_", lambda to, *more: copied.append(to) or copy_(to, *more))
                keep(before)

        state._keep_unused = counted  # type: ignore[method-assign]
        for step in range(3):
            model.zero_grad(set_to_none=False)
            ddp(gradients_by_rank(step, ALL(without))[RANK]).backward()
        named = dict(model.named_parameters())
        assert all(any(gradient is named[name].grad for name in without) for gradient in copied)
        assert len(copied) <= 3 * len(without)


@case
def a_parameter_that_nobody_ever_uses_has_no_gradient() -> None:
    model = Chosen()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    register(ddp, **EXACT)
    for step in range(2):
        ddp(gradients_by_rank(step, ALL("a"))[RANK]).backward()
        assert model.a.grad is None
        assert model.d.grad is not None


@case
def accumulation() -> None:
    for view in (False, True):
        model = Chosen()
        oracle = Oracle(model)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=view, bucket_cap_mb=SMALL)
        state, optimizer = register(ddp, algorithm="split", **EXACT), sgd(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            with ddp.no_sync():
                ddp(gradients(step, RANK)).backward()
            ddp(gradients(step + 9, RANK)).backward()
            optimizer.step()
            first, second = gradients_by_rank(step), gradients_by_rank(step + 9)
            oracle.step([{n: a[n] + b[n] for n in a} for a, b in zip(first, second, strict=True)])
            oracle.check(model, state.state_dict())


@case
def frozen_and_tied() -> None:
    model = Chosen()
    model.a.requires_grad_(False)
    model.tied = model.d  # one parameter of two names
    oracle = Oracle(model)
    ddp = DistributedDataParallel(model)
    state, optimizer = (
        register(ddp, algorithm="split", **EXACT),
        sgd([p for p in model.parameters() if p.requires_grad]),
    )
    assert "a" not in state.reducer.names
    for step in range(3):
        more = {**gradients(step, RANK), "tied": gradients(step + 7, RANK)["d"]}
        train(ddp, more, optimizer)
        sums = [{**g, "d": g["d"] + gradients(step + 7, r)["d"]} for r, g in enumerate(gradients_by_rank(step))]
        oracle.step(sums)
        oracle.check(model, state.state_dict())


# -- checkpoints ------------------------------------------------------------------------------------------------------


def network() -> nn.Module:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
    return nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 40), nn.ReLU(), nn.Linear(40, 10))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(100 * step + RANK)
    x = torch.randn(6, 3, 8, 8, generator=random).to(memory_format=torch.channels_last)
    return x, torch.randint(10, (6,), generator=random)


def trained(steps: int, stop: int | None, way: str, **of_ddp: Any) -> np.ndarray[Any, Any]:
    """The weights after ``steps``, with a stop after ``stop`` of them; ``way``: how the state gets over it."""
    options = {"dense_below": 50, "bucket_bytes": 4000, "momentum": 0.5 if way == "pickle" else 0.0}

    def parts(state: SparseState | None = None) -> Any:
        model = network()
        ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL, **of_ddp)
        if state is None:
            state = register(ddp, 0.02, **options)
        else:
            with pytest.raises(sc.InvalidInputError, match="bind"):
                state.reducer  # noqa: B018
            state.bind(model.named_parameters())
            ddp.register_comm_hook(state, sparse_hook)
        momentum = 0.0 if way == "pickle" else 0.5
        return model, ddp, state, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)

    model, ddp, state, optimizer = parts()
    for step in range(steps):
        if step == stop:
            saved = io.BytesIO()
            of_state = {} if way == "pickle" else state.state_dict()
            torch.save((model.state_dict(), optimizer.state_dict(), of_state), saved)
            saved.seek(0)
            weights, of_optimizer, of_state = torch.load(saved, weights_only=True)
            model, ddp, state, optimizer = parts(pickle.loads(pickle.dumps(state)) if way == "pickle" else None)
            model.load_state_dict(weights)
            optimizer.load_state_dict(of_optimizer)
            if way != "pickle":
                state.load_state_dict(of_state)
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
    return same_everywhere(model)


@case
def stops_change_nothing() -> None:
    for way, view in (("torch.save", False), ("torch.save", True), ("pickle", False)):
        whole = trained(5, None, way, gradient_as_bucket_view=view)
        for stop in range(5):
            assert np.array_equal(trained(5, stop, way, gradient_as_bucket_view=view), whole), (way, stop)


@case
def a_pickled_state_that_has_made_no_step() -> None:
    model = Chosen()
    state = pickle.loads(pickle.dumps(SparseState(model.named_parameters(), algorithm="split", **EXACT)))
    again = pickle.loads(pickle.dumps(state))
    for unbound in (state, again):
        for use in (
            lambda s=unbound: s.state_dict(),
            lambda s=unbound: s.load_state_dict({}),
            lambda s=unbound: s.reducer,
        ):
            with pytest.raises(sc.InvalidInputError, match=r"bind\(model.named_parameters"):
                use()
    again.bind(model.named_parameters())
    assert again.reducer.density == EXACT["density"]


# -- errors -----------------------------------------------------------------------------------------------------------


@case
def what_is_no_ddp_model() -> None:
    mesh = dist.init_device_mesh("cpu", (P,))
    sharded = fully_shard(nn.Linear(8 * P, 4), mesh=mesh)
    for model, match in (
        (nn.Linear(2, 2), "got Linear; expected torch.nn.parallel"),
        (sharded, "there is register_fsdp"),
        (3, "got int"),
    ):
        with pytest.raises(sc.InvalidInputError, match=match):
            register(model)  # type: ignore[arg-type]
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    register(ddp, **EXACT)
    with pytest.raises(sc.InvalidInputError, match=r"registered already, .* keep the state"):
        register(ddp)
    if P > 1:  # one rank has all shards
        with pytest.raises(sc.InvalidInputError, match="weight is a DTensor, sharded"):
            SparseState(sharded.named_parameters())


@case
def wrong_arguments() -> None:
    named = list(Chosen().named_parameters())
    frozen = [("a", nn.Parameter(torch.ones(3), requires_grad=False))]
    for parameters, options, match in (
        (named, {"density": 0.0}, "density"),
        (named, {"algorithm": "butterlfy"}, "butterfly"),
        (named, {"scope": "layer"}, "scope"),
        (named, {"tensors": {}}, "tensors is not an option"),
        (named, {"op": "sum"}, "DistributedDataParallel averages"),
        (named, {"nonsense": 1}, "nonsense"),
        ([*named, ("a", nn.Parameter(torch.ones(3)))], {}, "'a' is there twice"),
        (frozen, {}, "none requires a gradient"),
        ([], {}, "none requires a gradient"),
        ([p for _, p in named], {}, "expected pairs"),
    ):
        with pytest.raises((sc.InvalidInputError, TypeError), match=match):
            SparseState(parameters, **options)  # type: ignore[arg-type]
    ddp = DistributedDataParallel(Chosen())
    ddp.register_comm_hook(SparseState(Chosen().named_parameters(), **EXACT), sparse_hook)
    with pytest.raises(sc.InvalidInputError, match="none of the 5 that were named"):
        ddp(gradients(0, RANK)).backward()


@case
def a_group_that_was_destroyed() -> None:
    for steps in (0, 1):
        group = dist.new_group(backend="gloo")
        ddp = DistributedDataParallel(Chosen(), process_group=group)
        register(ddp, **EXACT)
        for step in range(steps):
            ddp(gradients(step, RANK)).backward()
        loss = ddp(gradients(9, RANK))
        dist.barrier()
        dist.destroy_process_group(group)
        with soon(), pytest.raises(sc.InvalidInputError, match="destroyed"):
            loss.backward()


@case_of_several
def a_backward_pass_that_fails() -> None:
    """It raises what it raised; the other ranks wait as long as they were told to, and no longer."""
    ddp = DistributedDataParallel(Chosen(), bucket_cap_mb=SMALL, process_group=dist.new_group(backend="gloo"))
    state = register(ddp, **EXACT)
    ddp(gradients(0, RANK)).backward()
    ddp.zero_grad()
    loss = ddp(gradients(1, RANK))
    with timeout(1), soon():
        if RANK == ODD:
            with pytest.raises(ValueError, match="planted"):
                Fails.apply(loss).backward()
        else:
            kept = {name: k.clone() for name, k in state.state_dict()["residuals"].items()}
            with pytest.raises(sc.TransportError):
                loss.backward()
            for name, now in state.state_dict()["residuals"].items():  # nothing of this rank is lost
                assert torch.equal(now, kept[name] + gradients(1, RANK)[name])
    dist.barrier()


@case
def a_backward_pass_that_does_not_reach_all() -> None:
    """DDP says so when it goes forward again; the state does, when another DDP goes on with it."""
    model = Chosen()
    ddp = DistributedDataParallel(model, bucket_cap_mb=SMALL)
    state = register(ddp, algorithm="split", **EXACT)
    ddp(gradients(0, RANK)).backward()
    ddp({name: g for name, g in gradients(1, RANK).items() if name != "a"}).backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        ddp(gradients(2, RANK))
    del ddp
    gc.collect()
    other = DistributedDataParallel(model)
    other.register_comm_hook(state, sparse_hook)
    loss = other(gradients(2, RANK))
    with pytest.raises(sc.InvalidInputError, match="backward pass before this one did not end"):
        loss.backward()
    state.reducer.wait()  # calls that had begun, on all ranks


@case
def what_is_dropped_is_freed() -> None:
    ddp = DistributedDataParallel(Chosen())
    state = register(ddp, **EXACT)
    ddp(gradients(0, RANK)).backward()
    watched = [weakref.ref(x) for x in (ddp, state, ddp.module, ddp.module.a)]
    del ddp, state
    gc.collect()
    assert [w() for w in watched] == [None] * 4


@case
def a_copy_of_the_model_exchanges_nothing() -> None:
    model = Chosen()
    register(DistributedDataParallel(model), **EXACT)
    if RANK == ODD:
        twin = copy.deepcopy(model)
        twin(gradients(0, RANK)).backward()
        assert torch.equal(twin.a.grad, gradients(0, RANK)["a"])
