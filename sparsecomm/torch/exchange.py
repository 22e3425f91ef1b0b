"""`GradientExchange`: averages gradients of named parameters by a `Reducer`. `SparseState` does so in DDP's hook."""

# Without `from __future__ import annotations`: DDP reads the annotations of `sparse_hook`, and requires types.

import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from functools import partial
from itertools import groupby
from types import FrameType
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined] # torch does not list it

from sparsecomm.calls.label import Label, Pairs, by_name
from sparsecomm.checks import to_float
from sparsecomm.errors import InvalidInputError
from sparsecomm.optimizers.state import STATE_FIELDS
from sparsecomm.options import Unpack, check_options, with_options
from sparsecomm.reducer import Rebuilt, Reducer, Step
from sparsecomm.reducer.options import DENSITY, ReducerOptions, ReducerSettings, Schedule
from sparsecomm.reducer.reducer import PreparedState
from sparsecomm.reducer.state import REDUCER
from sparsecomm.signals import deferred
from sparsecomm.states.loading import Prepared, Undo
from sparsecomm.states.schema import State, StateDict, common
from sparsecomm.states.weights import check_every
from sparsecomm.tensors import interop
from sparsecomm.tensors.dtypes import FLOAT32, FLOAT64
from sparsecomm.tensors.interop import TensorSpec
from sparsecomm.torch.optimizer_state import mapped
from sparsecomm.torch.parameters import NamedParameters, TrainedParameters, buffers_of, gradient_of, local, overlaps
from sparsecomm.transport import Comm, transport_of

Future: TypeAlias = torch.futures.Future[torch.Tensor]


def _is_scale(value: object, _: object) -> bool:
    return value is None or (type(value) in (int, float) and 0 < to_float(value) < math.inf)


_MAY_DIFFER = {"params", "param_names", "foreach", "fused", "capturable", "differentiable"}  # in an optimizer's groups
SCHEMA = REDUCER.extended("SparseState", {"loss_scale": common("a number above 0, or None", _is_scale), **STATE_FIELDS})


class Scaler(Protocol):
    """The method of `torch.amp.GradScaler` that an exchange calls."""

    def get_scale(self) -> float: ...


class ExchangeOptions(ReducerOptions, total=False):
    """Keyword arguments that functions pass on to `GradientExchange`, which documents them."""

    comm: Comm
    scaler: Scaler | None
    check_weights_every: int | None


@deferred
class GradientExchange(TrainedParameters):
    """Exchanges the gradients of named parameters by a `Reducer`, and replaces them by means.

    The reducer lays out its buckets at the first use, because frameworks may move parameters to another device before.
    """

    always_skips_nonfinite = False  # whether a step with NaN is skipped even without a scaler
    compared: Collection[str] | None = None  # keys in an optimizer's state that all ranks share; ``None``: all

    @with_options(ReducerOptions, ReducerSettings)
    def __init__(
        self,
        named: NamedParameters,
        density: Schedule,
        *,
        comm: Comm = None,
        scaler: Scaler | None = None,
        check_weights_every: int | None = 0,
        **options: "Unpack[ReducerOptions]",
    ) -> None:
        """Check the arguments. Nothing is sent.

        Args:
            named: ``model.named_parameters()``.
            comm: as in `sparsecomm.sparse_allreduce`.
            scaler: the `torch.amp.GradScaler` in use. Residuals then follow the loss scale, and all ranks skip a step
                in which one rank's gradient overflows.
            check_weights_every: call `sparsecomm.check_weights` for the parameters, also frozen ones, before each step
                whose number is a multiple of this; 0: only before the first step and the first step after
                `load_state_dict`; ``None``: never. It must be the same on all ranks.
        """
        self._check_every = check_every(check_weights_every)
        super().__init__(named, comm, options.get("clip"))
        self.names = {id(p): name for name, p in {**self._frozen, **self.named}.items()}  # also of frozen parameters
        self._scaler = scaler
        self._scale: float | None = None  # the loss scale of the residuals and velocities
        skips = scaler is not None or self.always_skips_nonfinite
        specs = {  # in host memory: parameters may still move to their device
            name: TensorSpec(name, tuple(p.shape), FLOAT64 if p.dtype is torch.float64 else FLOAT32, interop.CPU)
            for name, p in self.named.items()
        }
        self._reducer = Reducer(specs, density, skip_nonfinite=skips, **options)
        self.connected = self._warned = False  # `connected`: `reducer` was used, and is on the parameters' devices
        self._outs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}  # gradients, and contiguous memory for means
        self._new: dict[str, torch.Tensor] = {}  # for the means of parameters without a gradient on this rank
        self.exchanged = False  # whether gradients are means that no optimizer step has used yet
        self.step_failed = False  # an optimizer step that used means has raised: weights may have changed in part
        self.num_steps = 0  # of the optimizer, the same on all ranks; counted anew after `load_with` and `rebuild`
        self._shared: tuple[list[dict[str, object]], Label] = [], Label.of()  # settings of the latest step

    @property
    def reducer(self) -> Reducer:
        """The reducer. Its first use is collective."""
        if not self.connected:
            if not self.named:
                raise InvalidInputError(
                    "this SparseState was unpickled and has no parameters yet; call "
                    "state.bind(model.named_parameters())"
                )
            self._reducer.replace_tensors(self._contiguous(), self.connect())
            self._reducer.buffers = partial(buffers_of, self.model)
            self.connected = True
        return self._reducer

    def __repr__(self) -> str:
        return repr(self._reducer)

    def _local(self, tensor: torch.Tensor) -> torch.Tensor:
        return local(tensor) if self.sharded else tensor.detach()

    def _contiguous(self) -> dict[str, torch.Tensor]:
        """Return the parameters, or this rank's shards, as contiguous tensors that share their memory if possible."""
        return {name: self._local(parameter).contiguous() for name, parameter in self.named.items()}

    def _gradient_of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return gradient_of(parameter) if self.sharded else parameter.grad

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the name of a parameter, or raise an error if it is unknown."""
        name = self.names.get(id(parameter))
        if name is None:
            raise InvalidInputError(
                f"a gradient belongs to a parameter of shape {tuple(parameter.shape)} that is none of the "
                f"{len(self.names)} that were named; pass named_parameters() of this model"
            )
        return name

    # -- a step -------------------------------------------------------------------------------------------------------

    def check_consistent(self) -> None:
        if self.step_failed:
            raise InvalidInputError(
                "the previous optimizer step failed, or was interrupted, while it changed weights, which may now "
                "differ between ranks; load a checkpoint on all ranks, by load_state_dict()"
            )

    def push(self, name: str, gradient: torch.Tensor, *, absent: bool = False) -> None:
        """Push a parameter's gradient, which the mean replaces: see `Reducer.push`.

        With ``absent``, this rank has no gradient, and the mean replaces ``gradient`` if another rank has one.
        """
        target = self._local_gradient(name, gradient)
        if not self._reducer.pending:
            self.check_unchanged()  # before this rank waits for others
        reducer = self.reducer
        if not reducer.pending:
            reducer.check_weights(self._check_every, lambda: self.with_frozen(self.named))
            reducer.label = self._label()
            if self._scaler is not None:
                scale = float(self._scaler.get_scale())
                if self._scale is not None and scale != self._scale:
                    reducer.scale(scale / self._scale)
                self._scale = scale
            self._outs = {}
        mean = target.contiguous()  # the same tensor, if it is contiguous
        if not reducer.pushed(name):  # otherwise the push is refused
            self._outs[name] = target, mean
        reducer.push(name, None if absent else mean, mean)

    def _label(self) -> Label:
        """Return what the ranks must share: the optimizer's steps, and the numbers in its groups (lr, momentum ...)."""
        owners = [reference() for reference in self._owners]
        groups = [g for owner in owners if isinstance(owner, torch.optim.Optimizer) for g in owner.param_groups]
        settings = [{k: _number(value) for k, value in g.items() if k not in _MAY_DIFFER} for g in groups]
        if settings != self._shared[0]:
            group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
            used = {name: group_of[id(p)] for name, p in self.named.items()}
            order = {i: n for n, i in enumerate(dict.fromkeys(used.values()))}  # of groups with exchanged parameters
            compared = [order[i] for i in used.values()], [sorted(settings[i].items()) for i in order]

            def pairs() -> Pairs:
                options = {option for i in order for option in settings[i]}
                for option in sorted(options, key=lambda option: (option != "lr", option)):
                    yield from by_name(option, {name: settings[i].get(option) for name, i in used.items()})

            self._shared = settings, Label(compared, pairs)
        return Label.of(("optimizer steps", self.num_steps)) + self._shared[1]

    def _local_gradient(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a gradient. Refuse sparse tensors."""
        if gradient.layout is not torch.strided:
            raise InvalidInputError(
                f"the gradient of {name} is sparse ({gradient.layout}), which is not supported; make the layer with "
                "sparse=False (zeros cost nothing here)"
            )
        return self._local(gradient)

    def synchronize(self) -> Step:
        """Replace all gradients by means. Collective; raises the errors of `Reducer.wait`.

        A parameter without a gradient on this rank gets the mean if another rank has a gradient; otherwise ``p.grad``
        stays as it is. A frozen parameter counts as one without a gradient. After an interrupt, call it again to
        continue.
        """
        self.check_consistent()
        seen: set[int] = set()
        gradients = {
            name: self._unshare_gradient(parameter, seen) if parameter.requires_grad else None
            for name, parameter in self.named.items()
            if not self.reducer.pushed(name)
        }
        dense = {n: self._local(g) for n, g in gradients.items() if g is not None and g.layout is torch.strided}
        zero = dict(zip(dense, _zeros_among(list(dense.values())), strict=True))
        for name, gradient in gradients.items():
            if gradient is None:
                gradient = self._new[name] = torch.empty_like(self.named[name])
                zero[name] = True
            self.push(name, gradient, absent=zero.get(name, False))
        return self.wait()

    def _unshare_gradient(self, parameter: torch.Tensor, seen: set[int]) -> torch.Tensor | None:
        """Return a parameter's gradient, after replacing it by a copy if it shares memory.

        The elements of a gradient of `torch.autograd.grad` may share memory, and programs may assign one tensor to two
        parameters. ``seen`` collects the addresses of the gradients.
        """
        gradient = self._gradient_of(parameter)
        if gradient is None or gradient.layout is not torch.strided:
            return gradient
        shard = self._local(gradient)
        if overlaps(shard) or (shard.numel() and shard.data_ptr() in seen):
            copied = torch.zeros_like(parameter)
            self._local(copied).copy_(shard)
            parameter.grad = gradient = copied
        seen.add(self._local(gradient).data_ptr())
        return gradient

    def wait(self) -> Step:
        """Wait until means have replaced the gradients. After an interrupt, call it again."""
        done = self.ending_step(self.reducer.wait)
        if done.nonfinite and not self._warned:
            self._warned = True
            warnings.warn(
                f"step {done.number}: {done.cause}. Entries that are not finite were dropped from the residuals. If "
                "you use a torch.amp.GradScaler, pass it as scaler=: residuals then follow the loss scale, and no "
                "gradient of a skipped step is lost",
                stacklevel=2,
            )
        return done

    def ending_step(self, wait: Callable[[], Step]) -> Step:
        """Call ``wait``. When the reducer's step has ended, even by an error, write the means to the gradients."""
        number = self.reducer.step
        try:
            return wait()
        finally:
            if self.reducer.step != number:
                self._end_step(self.reducer.last)

    def _end_step(self, last: Step | None) -> None:
        """Write the means of the reducer's ``last`` step to the gradients; ``None``: that step has failed."""
        outs, self._outs, new, self._new = self._outs, {}, self._new, {}
        for name, (target, mean) in outs.items():
            if last is not None and name in last.without_gradient:
                continue
            if last is not None and not last.usable:  # a scaler may serve several optimizers: each must see a NaN
                mean.view(-1)[:1] = torch.nan
            if mean is not target:
                target.copy_(mean)
        skipped = self.reducer.unsummed if last is None else last.without_gradient
        for name, gradient in new.items():
            if name not in skipped and self._local(gradient).numel():
                self.named[name].grad = gradient
        self._reset(exchanged=last is not None)

    def _reset(self, *, exchanged: bool) -> None:
        self._outs, self._new, self.exchanged = {}, {}, exchanged

    def discard(self, names: Iterable[str] | None = None) -> None:
        """Set residuals and velocities to zero: see `Reducer.discard`. Call it on all ranks, between steps."""
        if self.connected or not self.named:
            self.reducer.discard(names)

    # -- other ranks, and state ---------------------------------------------------------------------------------------

    def rebuild(self, comm: Comm, *, joining: bool = False) -> Rebuilt:
        """Continue with other ranks: see `Reducer.rebuild`.

        If the last step failed, gradients that it has summed are means, and others are set to zero.
        """
        self.check_comm(comm)
        transport, self.comm = transport_of(comm), comm
        if self.connected:
            self.connect()
        rebuilt, self.num_steps = self.reducer.rebuild(transport, joining=joining), 0
        for name in self.reducer.unsummed:
            if self.named[name].requires_grad:
                self.named[name].grad = torch.zeros_like(self.named[name])
        self._reset(exchanged=self.exchanged or bool(self.reducer.unsummed))
        return rebuilt

    def state_dict(self) -> StateDict:
        """Return the reducer's state, with arrays as tensors in host memory, and the loss scale."""
        state: StateDict = mapped(self.reducer.state_dict(), np.ndarray, torch.from_numpy)
        return {**state, "format": SCHEMA.format, "loss_scale": self._scale, "moments": {}}

    def load_state_dict(self, state: State) -> None:
        """Load a state that `state_dict` returned: see `Reducer.load_state_dict`. Collective."""
        self.load_with(lambda _: self.prepare_state(state))

    def load_with(self, prepare: Callable[[Undo], Prepared], keys: Iterable[str] = ()) -> None:
        """Load a state that has more fields, ``keys``: see `Reducer.load_with`. Collective."""
        self.reducer.load_with(prepare, ["loss_scale", *keys])

    def prepare_state(self, state: State) -> PreparedState:
        """Convert and check a state for `load_with`. Nothing is sent, and nothing changes."""
        prepared = self.reducer.prepare_state(state, SCHEMA)
        scale = None if prepared.fields["loss_scale"] is None else float(prepared.fields["loss_scale"])

        def commit() -> None:
            prepared.commit()
            self._scale, self.step_failed = scale, False
            self._reset(exchanged=False)
            self.on_state_loaded()

        return replace(prepared, common={**prepared.common, "loss_scale": scale or 0.0}, commit=commit)

    def on_state_loaded(self) -> None:
        """Let the next step compare the weights again."""
        self._reducer.weights_checked, self.num_steps = None, 0


@deferred
class SparseState(GradientExchange):
    """The state of `sparse_hook`: residuals by parameter, options, counters.

        state = SparseState(model.named_parameters())
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(state, sparse_hook)

    A gradient of zeros counts as absent, because DDP passes zeros for parameters that the rank did not use.

    DDP's ``join()`` is supported: a rank that has no more batches contributes nothing, and means divide by the number
    of all ranks. Its weights are out of date until ``join()`` ends, so leave ``check_weights_every`` at 0.

    A pickled state contains its options and what ``state_dict`` returns; `bind` the parameters afterwards.

    Args:
        named_parameters: of the model, before or after DDP wraps it, without parameters that DDP ignores.
        options: those of `GradientExchange` except ``op="sum"``: DDP averages.

    Raises:
        InvalidInputError: an argument is not supported.
    """

    @with_options(ExchangeOptions, GradientExchange.__init__)
    def __init__(
        self, named_parameters: NamedParameters, density: Schedule = DENSITY, **options: "Unpack[ExchangeOptions]"
    ) -> None:
        check_options(SparseState, options)
        if options.get("op") == "sum":
            raise InvalidInputError("op='sum': DistributedDataParallel averages; expected mean or mean_of_contributors")
        comm, scaler = options.pop("comm", None), options.pop("scaler", None)  # not pickled
        self._settings: dict[str, Any] = {**options, "density": density}
        self._saved: State | None = None
        self._reset_pass()
        self.bind(named_parameters, comm=comm, scaler=scaler)

    def bind(self, named_parameters: NamedParameters, *, comm: Comm = None, scaler: Scaler | None = None) -> None:
        """Set the parameters of an unpickled state. Collective if the state has made a step."""
        super().__init__(named_parameters, comm=comm, scaler=scaler, **self._settings)
        self.model = lambda: None  # its buffers need no comparison, because DDP broadcasts them
        if self._saved is not None:
            super().load_state_dict(self._saved)
        self._saved = None

    def rebuild(self, comm: Comm, *, joining: bool = False) -> Rebuilt:
        """Continue with other ranks: see `SparseOptimizer.rebuild`. Collective over them.

        A DDP model cannot be used after one of its ranks has died. Wrap the module in a new one, on a process group of
        the remaining ranks, and register this state with it. DDP then broadcasts the weights.
        """
        means = dict(self._means)
        rebuilt = super().rebuild(comm, joining=joining)
        if unsummed := self.reducer.unsummed:
            for name, parameter in self.named.items():
                if name not in unsummed:
                    parameter.grad = means[parameter].clone() if parameter in means else torch.zeros_like(parameter)
        self._reset_pass()
        return rebuilt

    def on_state_loaded(self) -> None:
        super().on_state_loaded()
        self._reset_pass()

    def __repr__(self) -> str:
        return f"SparseState({super().__repr__() if self.named else 'unpickled, without parameters'})"

    def __getstate__(self) -> StateDict:
        return {"options": self._settings, "saved": self.state_dict() if self.named and self.connected else self._saved}

    def __setstate__(self, state: StateDict) -> None:
        self._settings, self._saved = state["options"], state["saved"]
        self.named, self.connected = {}, False
        self._reset_pass()

    # -- a backward pass ----------------------------------------------------------------------------------------------

    def _reset_pass(self) -> None:
        self._futures: list[tuple[Future, torch.Tensor]] = []
        self._means: list[tuple[torch.Tensor, torch.Tensor]] = []  # parameters, and the tensors for their means
        self._in_pass = False  # a backward pass has begun, and DDP has not written all gradients yet

    def run_hook(self, bucket: GradBucket) -> Future:
        """Push the gradients of a bucket of DDP. With the last one, wait for the means."""
        if not hasattr(bucket, "is_last"):
            raise InvalidInputError(
                'torch._dynamo.config.optimize_ddp="python_reducer" is not supported, because DDP then has no buckets; '
                'leave it at "ddp_optimizer", and torch._dynamo.config.compiled_autograd at False'
            )
        if bucket.index() == 0:
            self._means = []
            if self._in_pass:
                raise InvalidInputError(
                    "the backward pass before this one did not end, and its step cannot be repeated: wrap the model in "
                    "a new DistributedDataParallel, with a new state, and load a checkpoint on all ranks"
                )
            self._in_pass = True
        future, gradients = new_future(bucket.buffer()), bucket.gradients()
        self._futures.append((future, bucket.buffer()))
        try:
            for parameter, gradient, zero in zip(bucket.parameters(), gradients, _zeros_among(gradients), strict=True):
                gradient = _restore_strides(gradient, parameter)
                self.push(self.name_of(parameter), gradient, absent=zero or not parameter.requires_grad)
                self._means.append((parameter, gradient))
            if bucket.is_last():
                self.wait()
        except BaseException as error:
            self._complete_futures(error)
            raise
        if not bucket.is_last():
            return future
        self._complete_futures(None)
        if not in_backward_pass():  # DDP's join() calls the hook with zeros on a rank that has no more batches
            self._means, self._in_pass = [], False
            return future
        # When this returns, DDP queues a callback that writes gradients. `_write_unused` must run after it.
        before = [(p.grad, p.grad._version if p.grad is not None else 0) for p, _ in self._means]
        queue_callback(partial(queue_callback, partial(self._write_unused, before)))
        return future

    @deferred
    def _write_unused(self, before: list[tuple[torch.Tensor | None, int]]) -> None:
        """Write the means of parameters that no rank used in this pass, because DDP does not write them.

        Such a parameter may have a gradient of an earlier pass. This pass has exchanged it again, and the residual
        holds part of it. ``before`` holds the gradients and their versions before DDP wrote some of them.
        """
        last = self.reducer.last
        for (parameter, mean), (gradient, version) in zip(self._means, before, strict=True):
            if last is None or self.name_of(parameter) in last.without_gradient or not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = mean.clone()
            elif parameter.grad is gradient and gradient._version == version and gradient.data_ptr() != mean.data_ptr():
                gradient.copy_(mean)
        self._means, self._in_pass = [], False  # last, because an interrupted pass has not ended

    def _complete_futures(self, error: BaseException | None) -> None:
        futures, self._futures = self._futures, []
        for future, buffer in futures:
            if isinstance(error, Exception):
                future.set_exception(error)  # type: ignore[arg-type] # torch declares only its own errors
            else:
                future.set_result(buffer)


@deferred
def sparse_hook(state: SparseState, bucket: GradBucket) -> Future:
    """Replace gradients by the mean over all ranks of their largest entries, for ``DDP.register_comm_hook``.

    The exchange of a bucket of ``state`` begins when its gradients are complete, and overlaps with the backward pass.
    The hook of DDP's last bucket waits for all exchanges.
    """
    return state.run_hook(bucket)


def _number(value: Any) -> object:
    """Return a setting of an optimizer in a form that has the same ``repr`` on all ranks; NaN if it is no number."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_number, value))
    value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    return value if value is None or isinstance(value, bool) else to_float(value)


def is_only_making_state() -> bool:
    """Return whether PyTorch's ``get_state_dict`` makes this step, with zeros, only to create the optimizer's state.

    It may do so on one rank alone, and entries of residuals would be lost: do not exchange.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != "torch.distributed.checkpoint.state_dict":
        frame = frame.f_back
    return frame is not None


def is_zero(gradient: torch.Tensor) -> bool:
    """Return whether all elements of a gradient in host memory are zero. Stop at the first block that is not."""
    if not gradient.is_contiguous():
        return not gradient.any()
    flat = gradient.view(-1)
    begin, length = 0, 16
    while begin < flat.numel():
        if flat[begin : begin + length].any():
            return False
        begin, length = begin + length, 8 * length
    return True


def in_backward_pass() -> bool:
    """Return whether this thread is in a backward pass, as `queue_callback` requires."""
    return torch._C._current_graph_task_id() >= 0


def in_compiled_autograd() -> bool:
    """Return whether compiled autograd runs this backward pass. It drops the callbacks of `queue_callback`."""
    return getattr(sys.modules.get("torch._dynamo.compiled_autograd"), "in_compiled_autograd_region", False)


def queue_callback(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of this backward pass, after callbacks queued earlier."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _zeros_among(gradients: list[torch.Tensor]) -> list[bool]:
    """Return for each gradient whether it is zero. Synchronize only once per GPU."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # type: ignore[no-untyped-call]
        raise InvalidInputError(
            "the current stream is being captured into a CUDA graph, which cannot contain an exchange of gradients: "
            "exchange them after the graph, with synchronize() of DistributedOptimizer"
        )
    zeros = [gradient.is_cpu and is_zero(gradient) for gradient in gradients]
    for device in {gradient.device for gradient in gradients if not gradient.is_cpu}:
        there = [i for i, gradient in enumerate(gradients) if gradient.device == device]
        there.sort(key=lambda i: str(gradients[i].dtype))  # PyTorch sums tensors of one dtype in few launches
        groups = [[gradients[i] for i in group] for _, group in groupby(there, lambda i: gradients[i].dtype)]
        sums = [torch.stack(torch._foreach_norm(group, 1)) for group in groups]  # of magnitudes
        for i, is_zero_sum in zip(there, torch.cat([group == 0 for group in sums]).tolist(), strict=True):
            zeros[i] = is_zero_sum
    return zeros


def new_future(buffer: torch.Tensor) -> Future:
    """Return a future for a bucket's values, which synchronizes with their stream."""
    return torch.futures.Future(devices=None if buffer.device.type == "cpu" else [buffer.device])


def _restore_strides(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of a gradient with its parameter's strides, as DDP stores it; the hook gets contiguous views."""
    if parameter.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride())
