"""The engine: takes a pipeline or a transformer and returns it parallel, for the length of a `with`.

It wires the modules together and owns all state of a run: transport, topology, strategy, trace, the count of steps and
guidance branches. Nothing is patched: attention goes in through `set_processor`, sharding through forward hooks,
and leaving the context puts everything back as it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from cocodiff.agreement import check_agreement
from cocodiff.assemble import build_strategy, mesh_of, state_sizes
from cocodiff.attention.strategy import LazyQKV, Site
from cocodiff.checks import called_often, check_no_deciding_cache, check_no_gradients, check_not_compiled
from cocodiff.comm.connect import connect
from cocodiff.comm.health import Limits, OnLoss
from cocodiff.comm.launch import Launch, detect
from cocodiff.comm.transport import Transport
from cocodiff.config import Config, load_machine
from cocodiff.decoding import shared_vae
from cocodiff.device import free_memory, rank_device, used_on_current_stream
from cocodiff.errors import PeerLost, UserError
from cocodiff.kernels import Kernels
from cocodiff.models import family_of
from cocodiff.models.adapter import Adapter, Arguments, Hook, replace_attention
from cocodiff.planning.memory import Load, check_fits, shape_of_config, size_run
from cocodiff.planning.placement import Work
from cocodiff.progress import StepCounter
from cocodiff.results import Results
from cocodiff.topology.layout import Segments, slices
from cocodiff.topology.machine import Topology
from cocodiff.trace import Trace
from cocodiff.wire.coding import Moment

COMPARED_CALLS = 3  # at the start of each run: into its second step, where guidance takes two calls


def parallelize(
    target: Any,
    preset: str = "tapa",
    *,
    config: Config | None = None,
    transport: Transport | None = None,
    **overrides: Any,
) -> Engine:
    """A diffusers pipeline or a bare transformer, parallel over all ranks inside `with parallelize(...) as engine:`.

    preset: the settings to start from; `overrides` (keys of Config) go on top. Or give a whole `config`.
    transport: an open one to use, and to leave open; by default the launch is recognised and one is opened.
    Raises UserError for unknown settings, models without an adapter, attention that has no parallel form, and ranks
    that do not fit machine or model.
    """
    settings = config.with_(**overrides) if config is not None else Config.preset(preset, **overrides)
    return Engine(target, settings, transport)


def open_transport(
    config: Config, launch: Launch | None = None, settings: dict[str, str] | None = None, on_loss: Sequence[OnLoss] = ()
) -> Transport:
    """The transport of this rank. `settings` are compared between ranks, the engine's own with them.

    on_loss: called at once when a rank is lost, also during the start."""
    launch = launch or detect()
    device = rank_device(config.device, launch.local_rank)
    alike = {name: str(value) for name, value in vars(config).items()}
    limits = Limits(config.timeout_s, config.start_timeout_s, config.stall_timeout_s)
    return connect(launch, config.transport, device, alike | (settings or {}), limits, on_loss)


class RankShard:
    """One rank's tokens of the current call, cut out of all tokens."""

    def __init__(self, topology: Topology, rank: int) -> None:
        self._topology, self._rank = topology, rank
        self.segments: Segments = ()

    def shares(self, segment: str) -> tuple[int, ...]:
        """Every rank's tokens of a segment."""
        return {one.name: one for one in self.segments}[segment].shares(self._topology)

    def cut(self, segment: str, whole: Tensor, dim: int = 1) -> Tensor:
        shares = self.shares(segment)
        if whole.shape[dim] != sum(shares):
            raise RuntimeError(f"{whole.shape[dim]} rows in dimension {dim} of {tuple(whole.shape)}, not {sum(shares)}")
        own = slices(shares)[self._rank]
        return whole.narrow(dim, own.start, own.stop - own.start).contiguous()


def _register(hook: Hook) -> Any:
    """Registers an adapter's hook; arguments are passed on by name."""
    if hook.output is not None:
        change_output = hook.output
        return hook.module.register_forward_hook(lambda _module, _arguments, output: change_output(output))
    signature, change = inspect.signature(hook.module.forward), hook.arguments
    assert change is not None, "a hook changes arguments or output"

    def rewrite(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], Arguments]:
        return (), change(signature.bind(*args, **kwargs).arguments)

    return hook.module.register_forward_pre_hook(rewrite, with_kwargs=True)


class Engine:
    """A parallel transformer. Use as a context manager; see `parallelize`."""

    def __init__(self, target: Any, config: Config, transport: Transport | None = None) -> None:
        model = target if isinstance(target, nn.Module) else getattr(target, "transformer", None)
        if not isinstance(model, nn.Module):
            raise UserError(f"a {type(target).__name__} has no transformer: give a DiT pipeline or its transformer")
        self.model: nn.Module = model
        self._pipe = target if target is not model else None
        self.config = config
        check_not_compiled(self.model.named_modules())
        self.family = family_of(self.model)
        self.adapter: Adapter = self.family.adapter
        self._signature = inspect.signature(self.model.forward)
        self._owns_transport = transport is None
        self.transport = transport if transport is not None else open_transport(config)
        self.rank, self.size = self.transport.rank, self.transport.size
        self._inside = False
        self._results: Results | None = None
        run = Topology.build(load_machine(config.machine), self.transport.run_size, _ranks_per_node())
        self.topology = run.part(self.transport.run_ranks)
        node = run.places[self.transport.run_ranks[self.rank]].node
        self._ranks_on_node = sum(place.node == node for place in run.places)
        self.trace = Trace(self.rank)
        self.counter = StepCounter()
        self._shard = RankShard(self.topology, self.rank)
        self._restore: list[Any] = []
        self._sized: set[Load] = set()
        self._kernels = Kernels(config.kernels, self.trace.note_kernel)
        shape: Any = self.model.config
        self.mesh = mesh_of(config, self.topology, Work(shape.num_attention_heads, shape.attention_head_dim))
        self._set_up_exchange()

    def _set_up_exchange(self) -> None:
        """What belongs to the transport: groups, lanes and the strategy over them."""
        self.strategy = build_strategy(self.config, self.mesh, self.transport, self.trace, self._kernels)

    # Entering and leaving -------------------------------------------------------------------------------------------

    def __enter__(self) -> Engine:
        if self._inside:
            raise UserError("this engine is in use: leave its `with` block before entering it again")
        if self.transport.closed:
            if not self._owns_transport:
                raise UserError("the transport of this engine is closed: open another one and parallelize again")
            self.transport = open_transport(self.config)
            self._set_up_exchange()
        self._check_model(self.model.named_modules())
        pipe: Any = self._pipe
        vae = getattr(pipe, "vae", None)
        if vae is not None:
            pipe.vae = shared_vae(vae, self.config.vae, self.transport)
            self._restore.append(lambda: setattr(pipe, "vae", vae))
        model: Any = self.model
        # One rank alone gives one process's bits: it is what others are compared with.
        kernels = self._kernels if self.size > 1 else Kernels("torch")
        self._restore.append(replace_attention(self.adapter, model, self, kernels))
        hooks = [self.model.register_forward_pre_hook(self._on_call, with_kwargs=True)]
        if self.size > 1:
            hooks += [_register(hook) for hook in self.adapter.hooks(model, self._shard)]
            layer, segment = self.adapter.exit(model)
            hooks.append(layer.register_forward_hook(lambda _, __, x_BLC: self._gather(x_BLC, segment)))
        self._restore += [hook.remove for hook in hooks]
        self.counter = StepCounter()
        self._inside = True
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._inside = False
        while self._restore:
            self._restore.pop()()
        self._sized.clear()
        self.strategy.coding.end()
        if error is not None and not isinstance(error, PeerLost):
            mistake = isinstance(error, UserError)
            self.transport.health.fail(str(error) if mistake else f"{type(error).__name__}: {error}", mistake)
        self._results = self._results_of_all_ranks() if error is None else None
        if self._owns_transport and error is None:
            self.transport.close()

    def new_run(self) -> None:
        """The next call of the transformer begins a new image: nothing of the last one is used for it, and its steps
        count from 0. A pipeline tells this by itself. A bare transformer is taken to begin anew where the timestep
        rises, or where it is the first one again with other noise; this says so in every case. Every rank calls it."""
        self.counter.new_run()

    # What happens during a model call -------------------------------------------------------------------------------

    def _check_model(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        found = list(modules)
        check_not_compiled(found)
        if self.size > 1:
            check_no_deciding_cache(found)

    def _on_call(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = self._signature.bind(*args, **kwargs).arguments
        self._check_model(called_often(self.model))
        self.adapter.check_call(arguments)
        if self.size > 1:
            check_no_gradients(self.model, arguments)
        self._shard.segments = self.adapter.segments(self.model, arguments)
        scheduler = getattr(self._pipe, "scheduler", None)
        sample, text = arguments["hidden_states"], arguments.get("encoder_hidden_states")
        self.counter.call(arguments.get("timestep"), sample, text, scheduler)
        if self.size > 1 and self.counter.calls <= COMPARED_CALLS:
            self._compare_with_others(arguments)
        self.strategy.coding.begin_step(Moment(self.counter.run, self.counter.step, self._steps()))
        if self.strategy.coding.keeps_state and self.size > 1:
            self._check_memory(arguments["hidden_states"])

    def _compare_with_others(self, arguments: Arguments) -> None:
        """Refuses a call whose inputs differ. The second tells who guides in two calls, the third what noise came."""
        facts = {
            "settings": repr(self.config),
            "number of steps": self._steps(),
            "guidance_scale": getattr(self._pipe, "guidance_scale", None),
            "step and branch": (self.counter.step, self.counter.branch),
        }
        device = arguments["hidden_states"].device
        check_agreement(facts | arguments, device, self.transport)

    def _check_memory(self, hidden: Tensor) -> None:
        """Refuses a run that keeps more between calls than fits, at its first call of each size and branch. No rank is
        far ahead of another then: the first exchange needs them all."""
        batch, branches = len(hidden), self.counter.branch + 1
        load = Load(self._shard.segments, batch, hidden.element_size(), branches, state_sizes(self.config))
        free = None
        if load not in self._sized:
            self._sized.add(load)
            free = free_memory(hidden.device, self._ranks_on_node)
        if free is None:
            return
        stored = [*self.model.parameters(), *self.model.buffers()]
        weights = sum(x.nbytes for x in stored if x.device == hidden.device)
        model: Any = self.model
        shape = shape_of_config(self.family, model.config, sum(x.numel() for x in stored))
        need = replace(size_run(shape, self.topology, load, self.mesh)[self.rank], weights=weights)
        check_fits(need, free + weights + self.strategy.coding.bytes_held(), f"rank {self.rank} on {hidden.device}")

    def _steps(self) -> int | None:
        """How many steps run, from the pipeline or the settings."""
        steps = getattr(self._pipe, "num_timesteps", None) or self.config.steps
        return None if steps is None else int(steps)

    @property
    def segments(self) -> Segments:
        """The segments of the model's current call, as its adapter says them."""
        return self._shard.segments

    def attend(self, qkv: LazyQKV, layer: str) -> Tensor:
        """Attention of this rank's rows to all rows, [B, L, H, D]: for the processors of the model's attention. layer:
        the name of the module that attends."""
        self.transport.health.arrive(f"attention {layer}")
        return self.strategy.attend(qkv, Site(layer, self.counter.branch))

    def _gather(self, x_BLC: Tensor, segment: str) -> Tensor:
        """All ranks' tokens of a segment [B, S, C] on every rank, so that all go on with the same bits."""
        self.transport.health.arrive("the gather of outputs")
        shares = self._shard.shares(segment)
        B, _L, C = x_BLC.shape

        def gather() -> Tensor:
            parts = [x_BLC.new_empty(B, share, C) for share in shares]
            with self.trace.span("gather", "gather"):
                self.transport.world.all_gather(x_BLC.contiguous(), parts).wait()
            for peer in range(self.size):
                self.trace.count(self.topology.link_class(self.rank, peer), x_BLC.nbytes, purpose="gather")
            return torch.cat(parts, dim=1)

        return used_on_current_stream(self.transport.control.submit_inline(gather).wait())

    # Results of all ranks -------------------------------------------------------------------------------------------

    def bytes(self) -> dict[str, int]:
        """Attention bytes per link class, summed over all ranks: on every rank, and of all blocks so far. Inside the
        `with` block it asks the others, so every rank calls it; afterwards it tells what was so at the block's end."""
        return dict(self._current_results().bytes)

    def drift_profile(self) -> list[dict[str, float | None]]:
        """Of every step so far: the mean relative change of v against its reference, and the fraction of image tokens
        that stayed, over all sites, runs and ranks; empty where everything travels. Every rank calls it inside the
        block, as `bytes`."""
        return list(self._current_results().drift)

    def forget_drift(self) -> None:
        """Starts the drift profile afresh, for the runs that follow. Every rank calls it."""
        self.strategy.coding.forget_report()
        if self._results is not None:
            self._results = replace(self._results, drift=[])

    def _current_results(self) -> Results:
        if self._inside:
            return self._results_of_all_ranks()
        return self._results or Results.merged([self._own_results()])

    def _own_results(self) -> tuple[dict[str, int], Any]:
        return self.trace.bytes(), self.strategy.coding.report()

    def _results_of_all_ranks(self) -> Results:
        """All ranks call it."""
        gathered = self.transport.gather_object(self._own_results())
        results: Results = self.transport.broadcast_object(Results.merged(gathered) if gathered else None)
        return results


def _ranks_per_node() -> int | None:
    return detect().local_size
