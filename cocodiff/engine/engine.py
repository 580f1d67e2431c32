"""The engine: it makes a pipeline or a transformer parallel for the length of a `with` block.

It connects the modules and owns all state of a run: transport, topology, the ranks that compute a call, trace, the
count of steps and guidance branches. Nothing is patched. Attention is replaced by `set_processor`, or intercepted where
torch computes it; sharding uses forward hooks. Leaving the block restores everything.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, starmap
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from cocodiff.attention.strategy import LayerKey, LazyQKV
from cocodiff.comm.connect import connect, place_rank
from cocodiff.comm.health import Limits, OnLoss
from cocodiff.comm.launch import Launch, detect
from cocodiff.comm.trace import LINK_CLASSES, PURPOSES, Trace
from cocodiff.comm.transport import RankContext, Transport
from cocodiff.config.config import Config, load_machine
from cocodiff.config.errors import PeerLost, UserError
from cocodiff.config.registry import STEP_CACHES, load, planner
from cocodiff.engine.agreement import check_agreement, components_of, weights_digest
from cocodiff.engine.assemble import AttentionWork
from cocodiff.engine.guidance import PARTS
from cocodiff.engine.guidance.ranks import GuidanceRule, GuidedRanks
from cocodiff.engine.progress import StepCounter
from cocodiff.engine.sequence import SequenceRanks
from cocodiff.exchange.codec import StepInfo, merge_notes
from cocodiff.kernels import Kernels
from cocodiff.kernels.device import set_repeatable
from cocodiff.models import checks, experts_of, family_of
from cocodiff.models.adapter import Arguments
from cocodiff.models.checks import replace, replace_forward, signature_of
from cocodiff.models.family import EXPERTS
from cocodiff.topology import Topology
from cocodiff.topology.axes import Axes
from cocodiff.topology.layout import Segments

if TYPE_CHECKING:
    from cocodiff.attention.trial import DeviceTrial
    from cocodiff.engine.compiling import Compiler
    from cocodiff.engine.step_cache import FirstBlockCache
    from cocodiff.engine.weights import SplitBlock, SplitWeights

UNKNOWN_TOKENS = 1031  # tokens at which a device is tried if segments are not known before attention is reached
COMPARED_CALLS = 3  # calls at the start of each run that ranks compare: with two guidance calls a step, into its second


def parallelize(
    target: Any,
    preset: str = "tapa",
    *,
    config: Config | None = None,
    transport: Transport | None = None,
    plan: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Engine:
    """Return an engine, in whose `with` block a pipeline or a transformer is parallel over all ranks.

    Parameters
    ----------
    target : diffusers pipeline or transformer
    preset : str
        Name of the settings to start from.
    config : Config, optional
        All settings, in place of a preset.
    transport : Transport, optional
        An open transport, which stays open. By default one is opened for the launch that is detected.
    plan : dict, optional
        Places where tokens are cut and gathered (`cocodiff.models.plan`). By default the class's known plan.
    **overrides
        Settings (fields of `Config`) that replace those of the preset or `config`.

    Raises
    ------
    UserError
        For unknown settings, models without an adapter, attention without a parallel form, and ranks that do not fit
        the machine or model; some of them when the block is entered or the model is called.
    """
    settings = config.with_(**overrides) if config is not None else Config.preset(preset, **overrides)
    return Engine(target, settings, transport, plan).warn_until_entered()


def open_transport(
    config: Config, launch: Launch | None = None, settings: dict[str, str] | None = None, on_loss: Sequence[OnLoss] = ()
) -> Transport:
    """Open and return this rank's transport: its connections to all other ranks. All ranks call it.

    Args:
        config: the engine's settings, which are compared between ranks.
        launch: how the ranks were started; None to detect it.
        settings: further settings that are compared between ranks, by name.
        on_loss: functions that are called at once when a rank is lost, also during the start.
    """
    launch = launch or detect()
    device, name = place_rank(launch, config.device, config.transport)
    alike = {name: str(value) for name, value in vars(config).items()} | (settings or {})
    limits = Limits(config.timeout_s, config.start_timeout_s, config.stall_timeout_s)
    return connect(launch, name, device, alike, limits, on_loss, config.check_messages)


# One rank's results: bytes sent, by purpose and link class; the reports of its codecs and step caches, each by step.
OwnResults = tuple[dict[str, dict[str, int]], list[Any]]


@dataclass(frozen=True)
class Results:
    """The results of all ranks together: the bytes that they have sent, and the drift profile."""

    bytes: dict[str, dict[str, int]]  # bytes sent, by purpose and link class, see `Engine.bytes`
    drift: list[dict[str, Any]]  # drift profile: one row for each step, see `Engine.drift_profile`

    @classmethod
    def merged(cls, of_ranks: Sequence[OwnResults]) -> Results:
        """Return the sum of all ranks' bytes, and their reports merged into one row a step.

        Args:
            of_ranks: the results of each rank.
        """
        sums = {
            purpose: {link: sum(sent[purpose][link] for sent, _ in of_ranks) for link in links}
            for purpose, links in of_ranks[0][0].items()
        }
        return cls(sums, merge_notes([report for _, reports in of_ranks for report in reports]))


class Engine:
    """A pipeline or transformer that runs in parallel on many ranks inside a `with` block. `parallelize` makes it.

    A pipeline may have several transformers. Calls of one of them in a row are then a run of their own: codecs start
    again with it, and keep nothing of the transformer before.
    """

    def __init__(
        self, target: Any, config: Config, transport: Transport | None = None, plan: Any = None, weights: Any = None
    ) -> None:
        """Make an engine; nothing is changed in the models before the `with` block is entered.

        Args:
            target: a diffusers pipeline or transformer.
            config: the settings.
            transport: an open transport; None to open one.
            plan: places where tokens are cut and gathered, see `parallelize`; None for the class's known plan.
            weights: for each model its weights that stay split between engines, as `split_for_good` returns them; None
                for none.
        """
        self._models = experts_of(target)
        self.model = self._models[0]  # the model of the current call
        self._pipe: Any = target if target is not self.model else None
        self.config = config
        for model in self._models:
            checks.check_not_compiled(model.named_modules())
        self.family = family_of(self.model, plan)
        self.adapter = self.family.adapter
        self._caches: list[FirstBlockCache] = []  # one for each model; none if the setting is off
        if config.step_cache != "none":
            self._caches = [load(STEP_CACHES, config.step_cache)(model, config) for model in self._models]
        self._signature = signature_of(self.model)
        self._owns_transport = transport is None
        self.transport = transport if transport is not None else open_transport(config)
        self.rank, self.size = self.transport.rank, self.transport.size
        run = Topology.build(load_machine(config.machine), self.transport.run_size, detect().local_size)
        self.topology = run.part(self.transport.run_ranks)
        self._ranks_on_node = len(run.on_node[run.places[self.transport.run_ranks[self.rank]].node])
        self.trace = Trace(self.rank)
        self.counter = StepCounter()
        self.compiler = self._new_compiler()
        self._kernels = self._new_kernels(config.kernels, self.trace.note_kernel)
        self._rule = self._guidance_rule()
        self._weights: Mapping[nn.Module, SplitWeights] = weights or {}
        self._split: dict[nn.Module, list[SplitBlock]] = {}  # the blocks whose weights ranks share, by model
        self._parts = PARTS if self._rule.possible else 1  # number of parts of the ranks that share weights
        self._guided = GuidedRanks(self._context, self._rule, self._sequence_of)
        self._inside = False
        self._results: Results | None = None  # the results of all ranks at the end of the last block
        self._undo = ExitStack()  # functions that undo what entering (before it: the warning) has changed
        self._sized: set[tuple[Any, ...]] = set()  # calls for which memory was found to suffice
        self._tried: set[tuple[Any, ...]] = set()  # shapes at which the device was tried
        self.device_trial: DeviceTrial | None = None  # the last trial, of all ranks' devices

    def _new_compiler(self) -> Compiler | None:
        """Return the object that compiles blocks; None with `compile: false`, whose modules are then not imported."""
        if not self.config.compile:
            return None
        from cocodiff.engine.compiling import Compiler

        return Compiler(self.trace, lambda: self.counter.run > 0 or self.counter.step > 0)

    def _new_kernels(self, path: str, note: Any = None) -> Kernels:
        """Return the kernels to use, compiled by torch.compile if blocks are.

        Args:
            path: "auto", "sycl" or "torch".
            note: called with the name of each operation that runs, and "sycl" or "torch"; None for nothing.
        """
        return Kernels(path, note) if self.compiler is None else Kernels(path, note, self.compiler.compiled)

    def _guidance_rule(self) -> GuidanceRule:
        """Return the rule that decides, for each call of the model, if guidance's branches are divided between two
        parts of the ranks."""
        setting = self.config.guidance_parallel
        # "auto" needs a pipeline, which says if it uses guidance, and settings that fit half of the ranks.
        if setting == "auto" and (self._pipe is None or not self._parts_fit()):
            setting = 1
        return GuidanceRule(setting, self.size, self.family.rows_per_image > 1, self.family.branches)

    def _parts_fit(self) -> bool:
        """Return True if the ranks can be divided into guidance's two parts, each with a mesh that fits the model."""
        try:
            for ranks in Axes.build(self.topology, guidance=PARTS).branches[0]:
                _ = self._sequence_of(dataclasses.replace(self._context, topology=self.topology.part(ranks))).mesh
        except UserError:
            return False
        return True

    @property
    def _context(self) -> RankContext:
        """This rank among all ranks of the engine, with their topology, the trace and the kernels."""
        return RankContext(self.transport, self.topology, self.trace, self._kernels)

    def _sequence_of(self, context: RankContext) -> SequenceRanks:
        """Return the object for ranks that share one sequence, with settings that fit the model. Nothing is opened yet.

        Args:
            context: this rank among those ranks.
        """
        work = AttentionWork(*self.adapter.heads(self.model))
        config = self.config if context.transport.size == 1 else self.adapter.exchange_settings(self.config)
        return SequenceRanks(config, context, work)

    @property
    def sequence(self) -> SequenceRanks:
        """The ranks that share the sequence of the current call: all of the engine's, or this rank's part of guidance's
        two."""
        return self._guided.current

    @property
    def compiled(self) -> str:
        """A summary of what torch.compile did on this rank so far; "" if nothing was compiled."""
        return str(self.compiler or "")

    # Entering and leaving -------------------------------------------------------------------------------------------

    def warn_until_entered(self) -> Engine:
        """Have the models warn, once, if they are called before this engine's `with` block is entered. Return this
        engine."""
        for model in self._models if self.size > 1 else ():
            self._undo.callback(model.register_forward_pre_hook(partial(_warn_outside, self._undo)).remove)
        return self

    def __enter__(self) -> Engine:
        self._open()
        self._undo.close()
        self._rule.begin()
        for model in self._models:
            if _is_parallel(model):
                raise UserError(f"this {type(model).__name__} is parallel already, by another engine: leave its `with`")
            self._check_model(model.named_modules())
            if self.compiler is not None:
                self.compiler.check(model)
        self._undo.callback(set_repeatable(self.transport.device, self.config.deterministic))
        try:
            for take_off in chain(self._share_vae(), *starmap(self._put_on, enumerate(self._models))):
                self._undo.callback(take_off)
        except BaseException as error:
            self._undo.__exit__(type(error), error, None)
            raise
        self.counter = StepCounter()
        self._inside = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._inside = False
        self._tell_others(kind, error, at)
        self._undo.__exit__(kind, error, at)
        self._sized.clear()
        self._guided.end(drain=error is None)
        self._results = self._results_of_all_ranks("leaving the parallelize block") if error is None else None
        if self._owns_transport and error is None:
            self.transport.close()

    def _tell_others(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        """Report the error with which this rank leaves the `with` block to the other ranks, unless it came from them.

        The arguments are those of `__exit__`.
        """
        if error is not None and not isinstance(error, PeerLost):  # PeerLost came from the others
            mistake = isinstance(error, UserError)
            self.transport.health.fail(str(error) if mistake else f"{type(error).__name__}: {error}", mistake)

    def _open(self) -> None:
        """Raise UserError if the engine is in use, or if its transport was closed by the caller. Open a new one if this
        engine closed it."""
        if self._inside:
            raise UserError("this engine is in use: leave its `with` block before entering it again")
        if self.transport.closed:
            if not self._owns_transport:
                raise UserError("the transport of this engine is closed: open another one and parallelize again")
            self.transport = open_transport(self.config)
            self._guided = GuidedRanks(self._context, self._rule, self._sequence_of)

    def _put_on(self, number: int, model: nn.Module) -> Iterator[Callable[[], object]]:
        """Make a model parallel: put hooks, attention and what the settings ask for around what is on it already.

        Yield, after each change, a function that undoes it.

        Args:
            number: index of the model among the pipeline's.
            model: the transformer.
        """
        # A single rank gives the bits of one process: it is the reference for others.
        kernels = self._kernels if self.size > 1 else self._new_kernels("torch")
        yield model.register_forward_pre_hook(checks.never_compiled(self._on_call), with_kwargs=True).remove
        yield self.adapter.attach(model, self, kernels)
        if self.compiler is not None:
            yield self.compiler.attach(model, self.adapter.blocks())
        if self.config.split is not None and self.size > 1:  # around compiled blocks
            from cocodiff.engine.weights import SplitWeights, part_of

            among = part_of(self.topology, self.transport, self._parts)
            split = self._weights.get(model) or SplitWeights(model, *among, self.config.split)
            self._undo.push(split.end)
            self._undo.push(self._tell_others)  # who may wait for this rank elsewhere, and have parts of the weights
            self._split[model] = split.compared
            yield partial(self._split.pop, model)
            yield split.attach(self.trace)
        if self._caches:  # around compiled blocks, so that the cache's messages are in no graph
            yield self._caches[number].attach()
        if self._rule.possible:
            yield replace_forward(model, self._guided.compute)
        yield replace(model, "__getstate__", self.__reduce__)

    def _share_vae(self) -> Iterator[Callable[[], object]]:
        """Replace methods of the pipeline's VAE, if it has one, so that ranks share its work as the setting `vae` says.

        Yield after each change a function that undoes it. So all changes are undone on exit, and those already made
        after an error.
        The VAE can then be neither copied nor pickled.
        """
        vae = getattr(self._pipe, "vae", None)
        if vae is not None:
            from cocodiff.engine.decoding import share_vae

            yield from share_vae(vae, self.config.vae, self.transport)
            yield replace(vae, "__getstate__", self.__reduce__)

    def __reduce__(self) -> Any:
        """Raise UserError instead of copying or pickling the engine, which holds a running job's connections.

        Inside the `with` block this also stands for `__getstate__` of the models, whose hooks hold the engine.
        """
        name = type(self._pipe or self.model).__name__
        raise UserError(
            f"this {name} is parallel and can be neither copied nor pickled: do that outside of its `with` block"
        )

    def new_run(self) -> None:
        """Declare that the next call of the transformer begins a new image. Every rank calls it.

        Nothing of the last image is used for the new one, and its steps count from 0. Pipelines do not need it. Without
        a pipeline, a run begins by itself where the timestep rises, or where the first timestep is repeated with other
        noise.
        """
        self.counter.new_run()

    # The bytes that were sent, and the reports of each step -----------------------------------------------------------

    def bytes(self, purpose: str = "attention") -> dict[str, int]:
        """Return the bytes that all ranks have sent for a purpose, by link class, summed over all uses of the `with`
        block so far.

        Inside the block it asks the other ranks, so every rank calls it. After it the bytes are those at the block's
        end.

        Args:
            purpose: one of the names below.

        "attention": q, k, v and outputs of attention
        "unsplit": its part of guidance branches that all ranks computed together though guidance is parallel
        "late", "overflow": its parts that no call waited for, and that did not fit in the lossless codec's first parts
        "whole": the bytes that attention would have sent uncoded, along the same routes
        "guidance", "gather": the model's output between guidance's two parts, and within a part
        "notes", "weights": the numbers by which codecs and the step cache decide, and shared weights
        """
        sent = self._current_results().bytes
        # Attention's bytes include those of guidance branches that all ranks computed together.
        also = sent["unsplit"] if purpose == "attention" else {}
        return {link: sent[purpose][link] + also.get(link, 0) for link in LINK_CLASSES}

    def drift_profile(self) -> list[dict[str, Any]]:
        """Return one row for each step so far, as a dictionary, over all layers, runs and ranks. Every rank calls it
        inside the block.

        A row has "step" and columns by the settings. With V-Major these are "change" (mean relative change of v against
        its reference) and "stable_fraction" (of image tokens that stayed unsent). With a codec or displacement they are
        those of `CodedStep.merged`, with a step cache "cached_fraction". The list is empty if everything is computed
        and sent as it is.
        """
        return list(self._current_results().drift)

    def forget_drift(self) -> None:
        """Delete the drift profile so far, on this rank. Every rank calls it."""
        for one in self._reporting:
            one.forget_report()
        if self._results is not None:
            self._results = Results(self._results.bytes, [])

    @property
    def _reporting(self) -> list[Any]:
        """The codecs and step caches of this rank, whose `report` methods give records of every step."""
        return [*(ranks.strategy.codec for ranks in self._guided.sequences), *self._caches]

    def _own_results(self) -> OwnResults:
        """Return this rank's bytes by purpose and link class, and the reports of its codecs and step caches."""
        return {purpose: self.trace.bytes(purpose) for purpose in PURPOSES}, [one.report() for one in self._reporting]

    def _current_results(self) -> Results:
        """Return the results of all ranks: inside the `with` block those so far, after it those at its end.

        Inside the block other ranks are asked, so all call it.
        """
        if self._inside:
            return self._results_of_all_ranks("engine.bytes() or drift_profile()")
        return self._results or Results.merged([self._own_results()])

    def _results_of_all_ranks(self, at: str) -> Results:
        """Return the results of all ranks so far. All ranks call it.

        Args:
            at: name of this exchange, for the error if a rank does not reach it.
        """
        return self.transport.reduce_values(self._own_results(), Results.merged, at)

    # What happens during a model call -------------------------------------------------------------------------------

    def _on_call(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], Arguments] | None:
        """Prepare for a call of a model: count it, compare ranks' inputs, check memory, and tell the codec its step.

        It is a forward pre-hook of torch. Return new arguments, as ((), dictionary), if this rank computes only some
        rows of the batch; else None.

        Args:
            model: the transformer that is called.
            args: its positional arguments.
            kwargs: its keyword arguments.
        """
        self.model = model
        arguments = self._signature.bind(*args, **kwargs).arguments
        self._check_call(arguments)
        sample, timestep, text = self.adapter.called_with(arguments)
        self.counter.call(timestep, sample, text, getattr(self._pipe, "scheduler", None))
        guided = getattr(self._pipe, "do_classifier_free_guidance", None)
        self._guided.begin_call(self.counter, sample, arguments.get("return_dict"), guided)
        self.sequence.segments = self.adapter.segments(model, arguments)
        self._try_device(arguments, sample)
        self._compare_with_others(arguments)
        own_rows = self._guided.own_rows(arguments, len(sample))
        self._begin_step(arguments)
        self._check_memory(self.adapter.called_with(own_rows or arguments)[0])
        return None if own_rows is None else ((), own_rows)

    def _check_model(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Raise UserError if a model is compiled by torch, or has a cache hook that does not go with the settings.

        With a cache hook that does go with them, all ranks compute all calls together from now on, see
        `GuidanceRule.stay_together`. It is called when the engine is entered and before each call of the model.

        Args:
            modules: pairs of name and module.
        """
        found = list(modules)
        checks.check_not_compiled(found)
        cache = checks.check_caches(found, self.config.step_cache, self.size)
        if cache and self.size > 1:
            # The cache counts calls, and would miss those that the other part of the ranks computes.
            self._rule.stay_together(f"the cache hook {cache}")

    def _check_call(self, arguments: Arguments) -> None:
        """Raise UserError if the current call cannot run in parallel, because of its arguments, gradients, or hooks
        added meanwhile.

        Args:
            arguments: the call's arguments, by name.
        """
        self._check_model(checks.called_often(self.model))
        if self.compiler is not None:
            self.compiler.check_forwards(self.model)
        self.adapter.check_call(self.model, arguments)
        if self.size > 1:
            checks.check_no_gradients(self.model, arguments)

    def _try_device(self, arguments: Arguments, sample: Tensor) -> None:
        """Try the ranks' accelerators at the shape of this call, in a run's first calls, once for each shape.

        If a rank's attention is wrong, all ranks compute attention by matrix products from then on. Raise UserError if
        a rank's copies are wrong, since every result would be.

        Args:
            arguments: the call's arguments, by name.
            sample: the tensor that is denoised.
        """
        sequence, ranks = self.sequence, self._guided.comparing(self.counter.branch)
        if ranks is None or self.counter.calls > COMPARED_CALLS or sample.device.type in ("cpu", "meta"):
            return
        from cocodiff.attention.trial import DeviceTrial, Shape, try_device

        mesh, (heads, head_dim), local = sequence.mesh, self.adapter.heads(self.model), sequence.connect().local
        tokens = sum(one.tokens for one in sequence.segments) or UNKNOWN_TOKENS
        masked = any(name.endswith("mask") and isinstance(x, Tensor) for name, x in arguments.items())
        qkv = len(sample), -(-tokens // mesh.ring), -(-heads // mesh.ulysses), head_dim
        matrix, parts = (-(-tokens // sequence.size), heads * head_dim), mesh.ring > 1 or sequence.config.chunks != 1
        shape = Shape(qkv, matrix, sample.dtype, masked, parts)
        if (sequence, shape) in self._tried:
            return
        self._tried.add((sequence, shape))
        own = try_device(local, shape, sample.device, self._new_kernels(self.config.kernels))
        found = self.device_trial = ranks.reduce_values(own, DeviceTrial.merged, "the trial of devices")
        if found.copies:
            raise UserError(f"results would be wrong: {found}: use a newer driver, or --device cpu")
        if found.error > 1 and not local.in_chunks:
            warnings.warn(f"attention goes in chunks of matrix products: {found} ({shape})", stacklevel=2)
            local.in_chunks = True

    def _compare_with_others(self, arguments: Arguments) -> None:
        """Raise UserError if the ranks' settings, weights or inputs differ. Only the first calls of a run are compared.

        The second call shows which pipelines guide in two calls, the third shows the noise.

        Args:
            arguments: the call's arguments, by name.
        """
        ranks = self._guided.comparing(self.counter.branch)
        if self.size == 1 or self.counter.calls > COMPARED_CALLS or ranks is None:
            return
        facts: dict[str, Any] = {
            "settings": repr(self.config),
            "number of steps": self._steps(),
            "guidance_scale": getattr(self._pipe, "guidance_scale", None),
            "guidance_scale_2": getattr(self._pipe, "_guidance_scale_2", None),
            "boundary_ratio": getattr(getattr(self._pipe, "config", None), "boundary_ratio", None),
            "step and branch": (self.counter.step, self.counter.branch),
        }
        if self.counter.calls == 1:
            facts["digest of weights"] = [weights_digest(model, self._split.get(model, ())) for model in self._models]
            arguments = arguments | components_of(self._pipe)
        wandering = self.device_trial.wandering if self.device_trial else ()
        check_agreement(facts | arguments, ranks, f"the transformer's {self.counter.here}", wandering)

    def _begin_step(self, arguments: Arguments) -> None:
        """Tell the codec and the step cache which run and step the current call belongs to.

        Args:
            arguments: the call's arguments, by name.
        """
        counter, number = self.counter, self._models.index(self.model)
        run = counter.run * len(self._models) + number  # a number for the run of this model
        step_info = StepInfo(run, counter.step, self._steps(), counter.sigma)
        self.sequence.connect().codec.begin_step(step_info)
        if self._caches:
            self._caches[number].begin_call(step_info, counter.branch, self.sequence, arguments)

    def _check_memory(self, hidden: Tensor) -> None:
        """Raise UserError if this rank lacks the memory for what codec and step cache keep between calls.

        It is checked at the first call of each size and branch. No rank is far ahead then, as the first exchange needs
        all. Families of models whose sizes cannot be planned use `check_room`.

        Args:
            hidden: the tensor that is denoised, with the rows that this rank computes.
        """
        ranks = self.sequence
        codec = ranks.strategy.codec
        if self.size == 1 or not (codec.keeps_state or self._caches) or not (ranks.segments and self.family.planned):
            return
        call = len(hidden), hidden.element_size(), self._guided.branches_kept(self.counter.branch + 1)
        if (ranks, ranks.segments, call) not in self._sized:
            self._sized.add((ranks, ranks.segments, call))
            held = codec.bytes_held() + sum(cache.bytes_held() for cache in self._caches)
            planner().check_room(self.model, self.family, ranks, call, hidden.device, self._ranks_on_node, held)

    def check_room(self, kind: str, layers: int, qkv: LazyQKV) -> None:
        """Raise UserError if this rank lacks the memory for what the codec keeps of some layers between calls.

        It is for models whose sizes cannot be planned and are seen only in a call. Layers call it before they attend;
        the first of each kind, guidance branch and size is checked for all of its kind.

        Args:
            kind: a name for the kind of layers.
            layers: number of layers of this kind.
            qkv: the layer's tensors, which show their sizes.
        """
        key = self.sequence, qkv.segments, kind, self.counter.branch
        if self.sequence.strategy.codec.keeps_state and key not in self._sized:
            self._sized.add(key)
            planner().check_room_for_layers(layers, qkv, self.sequence, self._ranks_on_node)

    def _steps(self) -> int | None:
        """Return the number of denoising steps of a run, from the scheduler, the pipeline or the settings; None if none
        of them tells it."""
        scheduler = getattr(self._pipe, "scheduler", None)
        begin = getattr(scheduler, "begin_index", None)
        if scheduler is not None and begin is not None:  # set by the pipeline that runs, which may be a copy
            return len(scheduler.timesteps) - int(begin)
        steps = getattr(self._pipe, "num_timesteps", None) or self.config.steps
        return None if steps is None else int(steps)

    @property
    def segments(self) -> Segments:
        """The segments (such as image and text) of the model's current call, with their tokens on all ranks."""
        return self.sequence.segments

    def attend(self, qkv: LazyQKV, layer: str) -> Tensor:
        """Return attention of this rank's rows to the rows of all ranks, [B, L, H, D]. Attention layers call it.

        Args:
            qkv: functions that compute this rank's queries, keys and values.
            layer: name of the module that attends.
        """
        if self.model is not self._models[0]:
            layer = f"{EXPERTS[1]}.{layer}"
        layer_key = LayerKey(layer, self.counter.branch)
        ranks = self.sequence
        ranks.transport.arrive(f"attention {layer} in {self.counter.here}")
        out_BLHD = ranks.strategy.attend(qkv, layer_key)
        if not self._guided.own:
            ranks.strategy.codec.forget(layer_key)
        return out_BLHD


def _is_parallel(model: nn.Module) -> bool:
    """Return True if a model is parallel now: it is in the `with` block of an engine."""
    return isinstance(getattr(vars(model).get("__getstate__"), "__self__", None), Engine)


def _warn_outside(hooks: ExitStack, model: nn.Module, *_: Any) -> None:
    """Warn that a model is called outside of its engine's `with` block, and remove the hooks that warn.

    It is a forward pre-hook of torch.

    Args:
        hooks: removes the hooks of all the engine's models.
        model: the model that is called.
        _: its arguments, which are not used.
    """
    if not _is_parallel(model):
        hooks.close()
        outside = f"{type(model).__name__} is called outside of its `with` block, so each rank computes all of it"
        warnings.warn(f"{outside}: call it inside `with cocodiff.parallelize(...) as engine:`", stacklevel=2)
