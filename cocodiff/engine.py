"""The engine: takes a pipeline or a transformer and returns it parallel, for the length of a `with`.

It wires the modules together and owns all state of a run: transport, topology, strategy, trace, the count of steps and
guidance branches. Nothing is patched: attention goes in through `set_processor`, or is seen where torch computes it,
sharding through forward hooks, and leaving the context puts everything back as it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from cocodiff import checks
from cocodiff.agreement import check_agreement, weights_digest
from cocodiff.assemble import Work
from cocodiff.attention.strategy import LazyQKV, Site
from cocodiff.attention.ulysses import Ulysses
from cocodiff.comm.connect import connect, place_rank
from cocodiff.comm.health import Limits, OnLoss
from cocodiff.comm.launch import Launch, detect
from cocodiff.comm.transport import Transport
from cocodiff.config import Config, load_machine
from cocodiff.decoding import shared_vae
from cocodiff.errors import PeerLost, UserError
from cocodiff.guidance import Call, Guidance, Parts, Way, parts_fit
from cocodiff.kernels import Kernels
from cocodiff.models import family_of
from cocodiff.models.adapter import Arguments, replace_forward
from cocodiff.progress import StepCounter
from cocodiff.registry import PLANNER, load
from cocodiff.results import Results
from cocodiff.sequence import SequenceRanks
from cocodiff.topology.axes import Mesh
from cocodiff.topology.layout import Segments
from cocodiff.topology.machine import Topology
from cocodiff.trace import LINK_CLASSES, PURPOSES, Trace
from cocodiff.wire.coding import Moment

COMPARED_CALLS = 3  # at the start of each run: into its second step, where guidance takes two calls


def parallelize(
    target: Any,
    preset: str = "tapa",
    *,
    config: Config | None = None,
    transport: Transport | None = None,
    plan: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Engine:
    """A diffusers pipeline or a bare transformer, parallel over all ranks inside `with parallelize(...) as engine:`.

    preset: the settings to start from; `overrides` (keys of Config) go on top. Or give a whole `config`.
    transport: an open one to use, and to leave open; by default the launch is recognised and one is opened.
    plan: where tokens are cut and gathered (`cocodiff.models.plan`), by default what is known of the class.
    Raises UserError for unknown settings, models without an adapter, attention that has no parallel form, and ranks
    that do not fit machine or model.
    """
    settings = config.with_(**overrides) if config is not None else Config.preset(preset, **overrides)
    return Engine(target, settings, transport, plan)


def open_transport(
    config: Config, launch: Launch | None = None, settings: dict[str, str] | None = None, on_loss: Sequence[OnLoss] = ()
) -> Transport:
    """The transport of this rank. `settings` are compared between ranks, the engine's own with them.

    on_loss: called at once when a rank is lost, also during the start."""
    launch = launch or detect()
    device, name = place_rank(launch, config.device, config.transport)
    alike = {name: str(value) for name, value in vars(config).items()} | (settings or {})
    limits = Limits(config.timeout_s, config.start_timeout_s, config.stall_timeout_s)
    return connect(launch, name, device, alike, limits, on_loss, config.check_messages)


class Engine:
    """A parallel transformer. Use as a context manager; see `parallelize`."""

    def __init__(self, target: Any, config: Config, transport: Transport | None = None, plan: Any = None) -> None:
        model = target if isinstance(target, nn.Module) else getattr(target, "transformer", None)
        if not isinstance(model, nn.Module):
            raise UserError(f"a {type(target).__name__} has no transformer: give a DiT pipeline or its transformer")
        self.model: nn.Module = model
        self._pipe = target if target is not model else None
        self.config = config
        checks.check_not_compiled(self.model.named_modules())
        self.family = family_of(self.model, plan)
        self.adapter = self.family.adapter
        self._signature = inspect.signature(self.model.forward)
        self._owns_transport = transport is None
        self.transport = transport or open_transport(config)
        self.rank, self.size = self.transport.rank, self.transport.size
        self._inside = False
        self._results: Results | None = None
        run = Topology.build(load_machine(config.machine), self.transport.run_size, detect().local_size)
        self.topology = run.part(self.transport.run_ranks)
        node = run.places[self.transport.run_ranks[self.rank]].node
        self._ranks_on_node = sum(place.node == node for place in run.places)
        self.trace = Trace(self.rank)
        self.counter = StepCounter()
        self._restore: list[Any] = []
        self._sized: set[tuple[Any, ...]] = set()
        self._kernels = Kernels(config.kernels, self.trace.note_kernel)
        family, guidance = self.family, config.guidance_parallel
        # A bare transformer's calls have to be told that they guide; and half of the ranks must allow the settings.
        if guidance == "auto" and (self._pipe is None or not parts_fit(self.topology, self._mesh_on)):
            guidance = 1
        self._guidance = Guidance(guidance, self.size, family.rows_per_image > 1, family.branches)
        self._set_up_exchange()

    def _set_up_exchange(self) -> None:
        """What belongs to the transport: groups, lanes and strategies over them. Of guidance's two ways, the one that
        the settings do not ask for is set up when a call needs it."""
        # Where guidance is split, calls that all ranks compute together are counted apart.
        self._trace_together = self.trace.counted_as("unsplit" if self._guidance.pinned else "attention")
        self._together = self._sequence_of(self.topology, self.transport, trace=self._trace_together)
        self._parts: Parts | None = None
        self.sequence = self._split().sequence if self._guidance.pinned else self._together
        self._call = Call()
        _ = self.strategy

    def _split(self) -> Parts:
        """The two parts of the ranks; all ranks make them together."""
        if self._parts is None:
            self._trace_together.purpose = "unsplit"
            sequence_of = partial(self._sequence_of, trace=self.trace)
            self._parts = Parts(self.topology, self.transport, self.trace, sequence_of)
        return self._parts

    def _sequence_of(self, topology: Topology, transport: Transport, trace: Trace) -> SequenceRanks:
        work = Work(*self.adapter.heads(self.model))
        return SequenceRanks(self.config, topology, transport, work, trace, self._kernels)

    def _mesh_on(self, topology: Topology) -> Mesh:
        """Raises UserError for ranks that cannot have the mesh that the settings ask for."""
        return self._sequence_of(topology, self.transport, self.trace).mesh

    @property
    def mesh(self) -> Mesh:
        """Of Ulysses and Ring, over the ranks that share the current call's sequence."""
        return self.sequence.mesh

    @property
    def strategy(self) -> Ulysses:
        """The attention of the current call."""
        return self.sequence.strategy

    @property
    def chosen(self) -> str | None:
        """In words, what `codec: auto` is for the ranks of the current call; None for settings that name a codec."""
        return self.sequence.chosen

    # Entering and leaving -------------------------------------------------------------------------------------------

    def __enter__(self) -> Engine:
        if self._inside:
            raise UserError("this engine is in use: leave its `with` block before entering it again")
        if self.transport.closed:
            if not self._owns_transport:
                raise UserError("the transport of this engine is closed: open another one and parallelize again")
            self.transport = open_transport(self.config)
            self._set_up_exchange()
        self._guidance.begin()
        self._check_model(self.model.named_modules())
        pipe: Any = self._pipe
        vae = getattr(pipe, "vae", None)
        shared = None if vae is None else shared_vae(vae, self.config.vae, self.transport)
        # One rank alone gives one process's bits: it is what others are compared with.
        kernels = self._kernels if self.size > 1 else Kernels("torch")
        self._restore.append(self.adapter.attach(self.model, self, kernels))
        hooks = [self.model.register_forward_pre_hook(self._on_call, with_kwargs=True)]
        if self.size > 1:
            hooks += [hook.register() for hook in self.adapter.all_hooks(self.model, self)]
        self._restore += [hook.remove for hook in hooks]
        if self._guidance.possible:
            self._restore.append(replace_forward(self.model, self._compute))
        if vae is not None:
            pipe.vae = shared
            self._restore.append(lambda: setattr(pipe, "vae", vae))
        self.counter = StepCounter()
        self._inside = True
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._inside = False
        while self._restore:
            self._restore.pop()()
        self._sized.clear()
        if error is None and self._parts is not None:
            self._parts.drain()
        for ranks in self._sequences:
            ranks.strategy.coding.end(drain=error is None)
        if error is not None and not isinstance(error, PeerLost):
            mistake = isinstance(error, UserError)
            self.transport.health.fail(str(error) if mistake else f"{type(error).__name__}: {error}", mistake)
        self._results = self._results_of_all_ranks() if error is None else None
        if self._owns_transport and error is None:
            self.transport.close()

    def __reduce__(self) -> Any:
        """Raises UserError: a pipeline inside the block holds its engine, with the connections of a running job."""
        name = type(self._pipe or self.model).__name__
        raise UserError(
            f"this {name} is parallel and can be neither copied nor pickled: do that outside of its `with` block"
        )

    def new_run(self) -> None:
        """The next call of the transformer begins a new image: nothing of the last one is used for it, and its steps
        count from 0. A pipeline tells this by itself. A bare transformer is taken to begin anew where the timestep
        rises, or where it is the first one again with other noise; this says so in every case. Every rank calls it."""
        self.counter.new_run()

    # What happens during a model call -------------------------------------------------------------------------------

    def _check_model(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        found = list(modules)
        checks.check_not_compiled(found)
        if self.size > 1:
            checks.check_no_deciding_cache(found)
            if cache := checks.cache_on(found):
                # It counts the calls that a part of the ranks computes, and would miss those of the other part.
                self._guidance.stay_together(f"the cache hook {cache}")

    def _on_call(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], Arguments] | None:
        """Before each call of the model. Returns the arguments where this rank computes some rows of the batch."""
        arguments = self._signature.bind(*args, **kwargs).arguments
        self._check_model(checks.called_often(self.model))
        self.adapter.check_call(arguments)
        if self.size > 1:
            checks.check_no_gradients(self.model, arguments)
        sample, timestep, text = self.adapter.called_with(arguments)
        self.counter.call(timestep, sample, text, getattr(self._pipe, "scheduler", None))
        ranks, call = self._begin_call(sample, arguments.get("return_dict"))
        ranks.segments = self.adapter.segments(self.model, arguments)
        if self.size > 1 and self.counter.calls <= COMPARED_CALLS:
            self._compare_with_others(arguments)
        changed = None
        if call.way is Way.ROWS:
            changed = arguments = self._split().own_rows(arguments, len(sample))
        moment = Moment(self.counter.run, self.counter.step, self._steps(), self.counter.sigma)
        ranks.strategy.coding.begin_step(moment)
        if ranks.strategy.coding.keeps_state and self.size > 1 and ranks.segments:
            self._check_memory(sample)
        return None if changed is None else ((), changed)

    def _begin_call(self, sample: Tensor, return_dict: Any) -> tuple[SequenceRanks, Call]:
        """Decides who computes this call, alike on all ranks, and makes these the current ones."""
        form = tuple(sample.shape), sample.dtype, return_dict
        guided = getattr(self._pipe, "do_classifier_free_guidance", None)
        way = self._guidance.way(self.counter, len(sample), form, guided)
        if way is Way.TOGETHER and self.rank == 0:
            self._guidance.warn_together(self.counter.step)
        parts = self._parts if way is Way.TOGETHER else self._split()
        if parts is not None and self.counter.branch == 0:
            parts.begin_step(self._guidance.expected)
        if parts is None or way is Way.TOGETHER:
            self.sequence, self._call = self._together, Call(way, True, form)
        else:
            own = way is Way.ROWS or parts.keeps(self.counter.branch)
            self.sequence, self._call = parts.sequence, Call(way, own, form)
        return self.sequence, self._call

    def _compute(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The model's forward, or what stands in its place on ranks that do not compute this call."""
        call = self._call
        parts = self._split() if call.way in (Way.ROWS, Way.CALLS) else None
        like = self._guidance.outputs.get(call.form)
        if parts is not None and not call.own:
            return parts.awaited(like)
        try:
            output = forward(*args, **kwargs)
        except Exception as error:
            if parts is not None and not isinstance(error, PeerLost):
                parts.fail(call.way, like)
            raise
        self._guidance.note(call, output)
        if parts is None:
            return output
        if call.way is Way.ROWS:
            return parts.all_rows(output)
        parts.send(output)
        return output

    def _compare_with_others(self, arguments: Arguments) -> None:
        """Refuses a call whose inputs differ. The second tells who guides in two calls, the third what noise came."""
        facts: dict[str, Any] = {
            "settings": repr(self.config),
            "number of steps": self._steps(),
            "guidance_scale": getattr(self._pipe, "guidance_scale", None),
            "step and branch": (self.counter.step, self.counter.branch),
        }
        if self.counter.calls == 1:
            facts["digest of weights"] = weights_digest(self.model)
        device = self.adapter.called_with(arguments)[0].device
        # A part that does not compute a call does not wait for the one that does: each compares its own.
        apart = self._call.way is Way.CALLS and self.counter.branch > 0
        if self._call.own or not apart:
            check_agreement(facts | arguments, device, self.sequence.transport if apart else self.transport)

    def _check_memory(self, hidden: Tensor) -> None:
        """Refuses a run that keeps more between calls than fits, at its first call of each size and branch. No rank is
        far ahead of another then: the first exchange needs them all."""
        ranks, branches = self.sequence, self.counter.branch + 1
        if self._call.way in (Way.ALIKE, Way.CALLS):  # a part keeps something for its own branches alone
            branches = (branches + 1) // 2
        call = len(hidden), hidden.element_size(), branches
        if (ranks, ranks.segments, call) not in self._sized:
            self._sized.add((ranks, ranks.segments, call))
            load(PLANNER, "room")(self.model, self.family, ranks, call, hidden.device, self._ranks_on_node)

    def _steps(self) -> int | None:
        """How many steps run, from the pipeline or the settings."""
        steps = getattr(self._pipe, "num_timesteps", None) or self.config.steps
        return None if steps is None else int(steps)

    @property
    def segments(self) -> Segments:
        """The segments of the model's current call, as its adapter says them."""
        return self.sequence.segments

    def cut(self, segment: str, whole: Tensor, dim: int = 1) -> Tensor:
        """This rank's tokens of a segment of the current call, out of all of them: for the adapter's hooks."""
        return self.sequence.cut(segment, whole, dim)

    def attend(self, qkv: LazyQKV, layer: str) -> Tensor:
        """Attention of this rank's rows to all rows, [B, L, H, D]: for the processors of the model's attention. layer:
        the name of the module that attends."""
        site = Site(layer, self.counter.branch)
        self.sequence.transport.health.arrive(f"attention {layer}")
        out_BLHD = self.strategy.attend(qkv, site)
        if not self._call.own:
            self.strategy.coding.forget(site)
        return out_BLHD

    # Results of all ranks -------------------------------------------------------------------------------------------

    def bytes(self, purpose: str = "attention") -> dict[str, int]:
        """Attention bytes per link class, summed over all ranks: on every rank, and of all blocks so far. Inside the
        `with` block it asks the others, so every rank calls it; afterwards it tells what was so at the block's end.

        purpose: "attention" for all of these, "unsplit" for the part of them that all ranks sent while computing a
        guidance branch together, though guidance is parallel; "guidance" for what its two parts sent each other, and
        "gather" for the model's output within a part, "notes" for what the residual codec decides by, "whole" for
        what attention's tensors would have been without V-Major or a codec, along the same routes, and "late" for the
        part of "attention" that no call waited for."""
        of = self._current_results().bytes
        return {
            link: of[purpose][link] + (of["unsplit"][link] if purpose == "attention" else 0) for link in LINK_CLASSES
        }

    def drift_profile(self) -> list[dict[str, Any]]:
        """Of every step so far, over all sites, runs and ranks: with V-Major the mean relative change of v against its
        reference and the fraction of image tokens that stayed; with a codec or displacement `CodedStep.merged`. Empty
        where everything travels as it is and is waited for. Every rank calls it inside the block, as `bytes`."""
        return list(self._current_results().drift)

    def forget_drift(self) -> None:
        """Starts the drift profile afresh, for the runs that follow. Every rank calls it."""
        for ranks in self._sequences:
            ranks.strategy.coding.forget_report()
        if self._results is not None:
            self._results = replace(self._results, drift=[])

    def _current_results(self) -> Results:
        if self._inside:
            return self._results_of_all_ranks()
        return self._results or Results.merged([self._own_results()])

    @property
    def _sequences(self) -> list[SequenceRanks]:
        """The ranks that this one has shared a sequence with."""
        found = [self._together, *([] if self._parts is None else [self._parts.sequence])]
        return [ranks for ranks in found if ranks.connected]

    def _own_results(self) -> tuple[dict[str, dict[str, int]], list[Any]]:
        reports = [ranks.strategy.coding.report() for ranks in self._sequences]
        return {purpose: self.trace.bytes(purpose) for purpose in PURPOSES}, reports

    def _results_of_all_ranks(self) -> Results:
        """All ranks call it."""
        gathered = self.transport.gather_object(self._own_results())
        results: Results = self.transport.broadcast_object(Results.merged(gathered) if gathered else None)
        return results
