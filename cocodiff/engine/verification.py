"""The test that a transformer gives the same result on several ranks as in one process.

Every exact setting that the model allows, compiled blocks and the step cache are run on ranks that are threads of this
process. A setting may round differently, since attention sums in another order. That rounding is measured for the
model: one process runs with the keys of every attention in reverse order. A far larger error is not rounding. A step
cache is compared with itself on one rank, with a threshold at which it skips all that it can.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from cocodiff.comm.loopback import run_ranks
from cocodiff.comm.transport import Transport
from cocodiff.config.config import Config, preset_names
from cocodiff.config.errors import UserError
from cocodiff.config.text_table import aligned
from cocodiff.engine.engine import Engine, parallelize
from cocodiff.models import experts_of
from cocodiff.models.adapter import tensors_in
from cocodiff.models.planned_attention import TorchFunctions

CALLS = 4  # recorded calls of each of a pipeline's transformers: two steps with two guidance branches
BEYOND_ROUNDING = 8.0  # allowed error, as a multiple of the change by another order of summation
COMPILED, CACHED = "tapa, compiled", "tapa, cached"  # names of these settings in the table
MOVED = 1 + 1 / 64  # the second of a step cache's two samples is the first one times this
Calls = Sequence[tuple[nn.Module, Sequence[Mapping[str, Any]]]]  # each model with the arguments of its calls


@dataclass(frozen=True)
class SettingTrial:
    """The result of running a model with one setting on a number of ranks."""

    ranks: int  # number of ranks
    setting: str  # name of the setting in the table, such as "tapa, ring 2"
    outcome: str  # "exact", "wrong", "failed" or "refused"
    error: float | None = None  # largest absolute difference from one process; None if it did not run
    alike: bool | None = None  # True if all ranks have the same bits; None if it did not run
    reason: str = ""  # the error of a failed or refused trial, else a summary of what was compiled or cached


@dataclass(frozen=True)
class Verification:
    """The results of trying a model with all settings. As text it is a table with a verdict."""

    model: str  # class name of the transformer
    calls: int  # number of calls that were compared in each trial
    allowed: float  # largest absolute difference that rounding explains
    trials: tuple[SettingTrial, ...]  # one for each setting and number of ranks

    @property
    def exit_code(self) -> int:
        """The command's exit code: 0 if every setting that runs is exact, 1 if one is wrong or fails, 2 if none
        runs."""
        outcomes = {trial.outcome for trial in self.trials}
        return 1 if outcomes & {"wrong", "failed"} else 0 if "exact" in outcomes else 2

    @property
    def ok(self) -> bool:
        """True if at least one setting is exact, and none is wrong or fails. Refused settings do not count.

        Exact means: all ranks have the same bits, and these differ from one process by rounding at most.
        """
        return self.exit_code == 0

    def __str__(self) -> str:
        head = ("ranks", "setting", "outcome", "error", "same bits", "why")
        rows = []
        for trial in self.trials:
            error = "" if trial.error is None else f"{trial.error:.1e}"
            alike = {None: "", True: "yes", False: "no"}[trial.alike]
            rows.append((str(trial.ranks), trial.setting, trial.outcome, error, alike, trial.reason))
        about = f"{self.model}: {self.calls} calls, against one process; rounding explains {self.allowed:.1e}"
        verdict = {0: "exact", 1: "not exact: do not use it", 2: "runs with none of these settings"}[self.exit_code]
        bad = {trial.setting for trial in self.trials if trial.outcome in ("wrong", "failed")}
        if bad and bad <= {COMPILED, CACHED}:
            verdict = f"exact, but not with {' nor with '.join(sorted(bad))}"
        return "\n".join([about, *aligned([head, *rows], "><<><<"), f"{self.model}: {verdict}"])


def verify(
    target: Any,
    inputs: Mapping[str, Any] | None = None,
    *,
    ranks: Sequence[int] = (2, 3),
    plan: Any = None,
    compile: bool = False,
) -> Verification:
    """Compare a pipeline's transformers, or a bare transformer, on several ranks with one process, on the CPU.

    Parameters
    ----------
    target : diffusers pipeline or transformer
    inputs : dict, optional
        Arguments of a call of `target`. A pipeline makes two steps with them unless they say otherwise, and its
            transformers' calls are recorded and repeated.
    ranks : sequence of int
        Numbers of ranks to try.
    plan : dict, optional
        As for `parallelize`.
    compile : bool
        Compile the blocks' graphs in the compiled trials, which takes a minute. Otherwise graphs are traced but not
            compiled. These trials run on the first number of ranks only.

    Returns
    -------
    Verification

    Raises
    ------
    UserError
        If the target has no transformer, is not on the CPU, or cannot be called with the inputs.
    """
    models = experts_of(target)
    model = models[0]
    if any(x.device.type != "cpu" for one in models for x in one.parameters()):
        raise UserError(f"{type(model).__name__} is not on the CPU, where ranks are compared: load it there")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = dict(inputs or {})
        calls: Calls = [(model, [given] * 2)] if target is model else recorded_calls(target, models, given)
        try:
            plain = _outputs(calls)
        except Exception as error:
            about = f"{type(error).__name__}: {error}"
            raise UserError(f"{type(model).__name__} with {', '.join(given) or 'no inputs'}: {about}") from error
        with TorchFunctions(in_opposite_order):
            other = _outputs(calls)
        largest = _largest(plain)
        if not largest < float("inf"):
            raise UserError(f"{type(model).__name__} gives {largest} in one process: there is nothing to compare with")
        allowed = BEYOND_ROUNDING * _difference(plain, other) + torch.finfo(plain[0].dtype).eps * largest
        case = RecordedCalls(calls, plan, plain, allowed, compile)
        settings = exact_settings() | {CACHED: Config(step_cache="first_block", step_cache_threshold=1e30)}
        trials = [case.trial(size, name, config) for size in ranks for name, config in settings.items()]
        trials += [case.trial(size, COMPILED, Config(compile=True)) for size in ranks[:1]]
    return Verification(type(model).__name__, sum(len(of_model) for _, of_model in calls), allowed, tuple(trials))


def exact_settings() -> dict[str, Config]:
    """Return the settings that are tried, by their names in the table: the exact presets, a ring of 2, and 2 chunks."""
    presets = {name: Config.preset(name) for name in preset_names()}
    exact = {name: config for name, config in presets.items() if config.exact}
    return exact | {"tapa, ring 2": exact["tapa"].with_(ring=2), "split, chunks 2": exact["split"].with_(chunks=2)}


def recorded_calls(pipe: Any, models: Sequence[nn.Module], arguments: dict[str, Any]) -> Calls:
    """Run a pipeline, and return each of its transformers with the arguments of its first CALLS calls.

    The arguments of a call are copies, in a dictionary by their names. Raise UserError if the pipeline fails with its
    own arguments or does not call all its transformers.

    Args:
        pipe: the pipeline.
        models: its transformers.
        arguments: the pipeline's arguments. It makes two steps without decoding unless they say otherwise.
    """
    signature = inspect.signature(models[0].forward)
    calls: list[list[dict[str, Any]]] = [[] for _ in models]
    known = inspect.signature(pipe.__call__).parameters
    usual = {"num_inference_steps": 2, "output_type": "latent"}
    arguments = {name: value for name, value in usual.items() if name in known} | arguments

    def keep(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = calls[models.index(model)]
        if len(own) < CALLS:
            own.append(copy.deepcopy(dict(signature.bind(*args, **kwargs).arguments)))

    with ExitStack() as hooks:
        for model in models:
            hooks.callback(model.register_forward_pre_hook(keep, with_kwargs=True).remove)
        try:
            pipe(**arguments)
        except Exception as error:
            given = f"{type(pipe).__name__} with {', '.join(arguments)}"
            raise UserError(f"{given}: {error}: call cocodiff.verify(pipe, inputs=...) with what it wants") from error
    if not all(calls):
        of = f"{len(models)} transformers" if len(models) > 1 else "transformer"
        raise UserError(f"{type(pipe).__name__} did not call its {of}: give inputs that make it")
    return [*zip(models, calls, strict=True)]


@dataclass(frozen=True)
class RecordedCalls:
    """The calls of a model that all settings are tried on, with their results in one process."""

    calls: Calls  # each model with the arguments of its calls
    plan: Any  # places where tokens are cut and gathered, see `parallelize`; None for the class's known plan
    plain: Sequence[Tensor]  # the outputs of one process, of all calls one after the other
    allowed: float  # largest absolute difference that rounding explains
    compile: bool  # True to compile graphs in the compiled trials; False to only trace them

    def trial(self, ranks: int, setting: str, config: Config) -> SettingTrial:
        """Run the calls with a setting on a number of ranks, threads of this process, and return how they compare with
        one process.

        Args:
            ranks: number of ranks.
            setting: name of the setting in the table.
            config: the settings.
        """

        def work(transport: Transport) -> tuple[list[Tensor], str]:
            found, accounts = list[Tensor](), list[str]()
            for model, calls in self.calls:
                own = twin(model)
                engine = parallelize(own, config=config, transport=transport, plan=self.plan)
                if engine.compiler is not None and not self.compile:
                    engine.compiler.backend = "eager"
                if config.step_cache != "none":  # two calls, of which the engine takes the second for the next step
                    first, second = (copy.deepcopy(dict(calls[0])) for _ in range(2))
                    engine.adapter.called_with(second)[0].mul_(MOVED)
                    calls = first, second
                with torch.no_grad(), engine:
                    found += [x + 0 for x in _outputs([(own, calls)])]
                accounts.append(_account(engine))
            return found, "; ".join(filter(None, dict.fromkeys(accounts)))

        try:
            ((plain, _),) = [(self.plain, "")] if config.exact else run_ranks(1, work)
            of_ranks = run_ranks(ranks, work)
        except UserError as refusal:
            return SettingTrial(ranks, setting, "refused", reason=" ".join(str(refusal).split()))
        except Exception as failure:
            return SettingTrial(
                ranks, setting, "failed", reason=" ".join(f"{type(failure).__name__}: {failure}".split())
            )
        first, account = of_ranks[0]
        error = _difference(plain, first)
        alike = all(torch.equal(x, y) for outputs, _ in of_ranks for x, y in zip(outputs, first, strict=True))
        outcome = "exact" if alike and error <= self.allowed else "wrong"
        return SettingTrial(ranks, setting, outcome, error, alike, account)


def _account(engine: Engine) -> str:
    """Return a summary, in words, of what an engine compiled or how much its step cache skipped; "" if the settings ask
    for neither."""
    if engine.compiler is not None:
        return engine.compiled or "nothing was compiled"
    if engine.config.step_cache == "none":
        return ""
    return f"{engine.drift_profile()[-1]['cached_fraction']:.0%} of the second step's calls cached"


def twin(model: nn.Module) -> Any:
    """Return a copy of a model with new modules and the same weight tensors, so that each rank can have hooks of its
    own."""
    return copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})


def _outputs(calls: Calls) -> list[Tensor]:
    """Return all tensors that models return for their calls, one after the other. Arguments are copied first."""
    return [x for model, of_model in calls for call in of_model for x in tensors_in(model(**copy.deepcopy(call)))]


def _difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the largest absolute difference between two lists of tensors; infinite if shapes differ or a value is not
    a number.

    Args:
        one: some tensors.
        other: the tensors to compare them with, in the same order.
    """
    if [x.shape for x in one] != [x.shape for x in other]:
        return float("inf")
    found = _largest([x.double() - y.double() for x, y in zip(one, other, strict=True)])
    return found if found == found else float("inf")


def _largest(values: Sequence[Tensor]) -> float:
    """Return the largest absolute value in a list of tensors; NaN if one of them is."""
    return float(torch.stack([x.abs().max().double() for x in values]).max())


def in_opposite_order(query: Tensor, key: Tensor, value: Tensor, **call: Any) -> Tensor:
    """Return torch's attention computed with the keys in reverse order. It differs from the usual one by rounding only.

    Causal attention is computed in the usual order.

    Args:
        query: queries, as for `scaled_dot_product_attention`.
        key: keys.
        value: values.
        call: further arguments of `scaled_dot_product_attention`.
    """
    if call.get("is_causal"):
        return scaled_dot_product_attention(query, key, value, **call)
    mask = call.get("attn_mask")
    if mask is not None and mask.shape[-1] > 1:
        call["attn_mask"] = mask.flip(-1)
    return scaled_dot_product_attention(query, key.flip(-2), value.flip(-2), **call)
