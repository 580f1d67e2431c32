"""Any transformer by a plan (`plan.py`), without an adapter of its own.

Tokens are cut and gathered where the plan says. Attention is intercepted where torch computes it, and q, k and v are
computed in the model's own order.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cocodiff.config.errors import PeerLost, UserError
from cocodiff.kernels import Kernels
from cocodiff.models.adapter import Adapter, Arguments, attention_modules, call_key, check_plain, tensors_in
from cocodiff.models.checks import replace_forward, signature_of
from cocodiff.models.family import Family
from cocodiff.models.plan import Cut, Gather, Plan, ShardedModel, as_given
from cocodiff.models.planned_attention import Followed, Marks, PlannedAttention, TorchFunctions, kind_of, segments_of
from cocodiff.models.plans import is_proven, plan_of
from cocodiff.topology.layout import Segment, Segments

DISPATCH = "diffusers.models.attention_dispatch"  # module in which a script chooses attention for all models


class PlanAdapter(Adapter):
    """The adapter of transformers that several ranks run by a plan alone: where tokens are cut and gathered.

    Attention is intercepted where torch computes it. So a class of transformers needs no adapter of its own.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def check_call(self, model: Any, arguments: Arguments) -> None:
        return

    def segments(self, model: Any, arguments: Arguments) -> Segments:
        """Return (): here the parts of the sequence are found when the call's tokens are cut."""
        return ()

    def heads(self, model: Any) -> tuple[int, int]:
        config = model.config
        of_modules = [getattr(m, name, None) for _, m in attention_modules(model) for name in ("heads", "num_heads")]
        named = [getattr(config, name, None) for name in ("num_attention_heads", "num_heads", "n_heads")]
        heads = next((number for number in (*named, *of_modules) if isinstance(number, int) and number), None)
        if heads is None:
            raise UserError(f"the config of {type(model).__name__} does not tell its number of attention heads")
        width = getattr(config, "attention_head_dim", None)
        return heads, width if isinstance(width, int) else 128

    def called_with(self, arguments: Arguments) -> tuple[Tensor, Any, Any]:
        sample = arguments.get("hidden_states", next(iter(arguments.values())))
        timestep = next((arguments[name] for name in ("timestep", "t", "timesteps") if name in arguments), None)
        text = next((arguments[n] for n in ("encoder_hidden_states", "cap_feats") if n in arguments), None)
        return _first_tensor(sample), timestep, _first_tensor(text)

    def attach(self, model: nn.Module, host: Any, kernels: Kernels) -> Callable[[], None]:
        check_attention(attention_modules(model))
        if host.size == 1:
            return lambda: None
        if host.config.selection != "full":
            raise UserError(
                f"selection {host.config.selection} keeps tokens of an image back, and the plan of "
                f"{type(model).__name__} does not say which these are: choose selection full, or another preset"
            )
        if host.rank == 0 and not is_proven(model, self.plan):
            warnings.warn(
                f"{type(model).__name__} runs by a plan that nobody compared with one process: cocodiff verify does",
                stacklevel=3,
            )
        return PlannedModel(self.plan, model, host).attach()


def family_by_plan(model: Any, plan: Plan | None, families: Iterable[str]) -> Family:
    """Return the description of the family that one model is by itself, which runs by a plan. Raise UserError if there
    is no plan.

    Args:
        model: the transformer.
        plan: the user's plan; None for that of the model's class: this project's, or if it has none, diffusers' own.
        families: names of the known families, for the error.
    """
    kind, plan = type(model), plan_of(model) if plan is None else plan
    if plan is None:
        raise UserError(
            f"no adapter for {kind.__name__}; known families: {', '.join(families)}; "
            f"docs/models.md tells how one is written, and how a plan does without"
        )
    name = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
    return Family(name, PlanAdapter(plan), vae_numbers=("scaling_factor",))


def check_attention(modules: Iterable[tuple[str, Any]]) -> None:
    """Raise UserError if attention modules have processors whose attention torch's own function does not compute.

    Fused projections are allowed.

    Args:
        modules: attention modules with their names.
    """
    for name, module in modules:
        check_plain(name, None, module.processor, (type(module.processor),))


class PlannedModel(ShardedModel):
    """A model that several ranks run by a plan (where tokens are cut and gathered), while the engine is entered.

    In the first call with arguments of some shapes it finds out which tokens each attention has; later calls use that.
    """

    def __init__(self, plan: Plan, model: nn.Module, host: Any) -> None:
        super().__init__(plan, model, host)
        self._attending = attention_modules(model)
        self._attention = PlannedAttention(host, (name for name, _ in self._attending))
        self._signature = signature_of(model)
        # By the form of a call: how each attention is computed, and the part of the sequence that each gather has.
        self._known: dict[Any, tuple[dict[str, Followed], dict[str, Segment]]] = {}
        self._marks: Marks | None = None  # the tensors with own tokens, in the first call of a form
        self._within: AbstractContextManager[Any]  # entered in modules that attend
        self._begin(None)

    def attach(self) -> Callable[[], None]:
        """Put hooks on the model and replace its forward. Return a function that undoes this. The engine calls it when
        entered."""
        undo = ExitStack()
        for step in self._steps:
            if step.name:
                self._put_on(step, undo)
        for name, module in self._attending:
            enter = partial(self._enter, name)
            undo.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            undo.callback(module.register_forward_hook(lambda *_: self._leave(), always_call=True).remove)
        undo.callback(replace_forward(self._model, self._forward))
        return undo.close

    # One call of the model ------------------------------------------------------------------------------------------

    def _forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a call of the model: cut its arguments, replace its attention, gather its outputs. Return the output.

        Args:
            forward: the model's own forward.
            args: the call's arguments by position.
            kwargs: the call's arguments by name.
        """
        # A user may have changed the model since it was entered.
        check_attention(self._attending)
        self._check_in_place()
        bound = self._signature.bind(*args, **kwargs)
        given = dict(bound.arguments)
        # Since its first call a script may have chosen other attention for all models: that is followed anew.
        backends = getattr(sys.modules.get(DISPATCH), "_AttentionBackendRegistry", None)
        chosen = None if backends is None else backends.get_active_backend()
        attention = chosen, torch.nn.functional.scaled_dot_product_attention
        form = self._host.sequence, call_key(given), attention
        self._begin(form)
        here = [step for step in self._steps if not step.name]
        for step in here:
            self._cut_arguments(step, bound.arguments)
        args, kwargs = as_given(bound, args, kwargs)
        functions = TorchFunctions(self._attend, self._marks)
        # If all attention is known to be in attention modules, torch's functions are intercepted in these alone.
        whole = self._marks is not None or any(name.startswith(OUTSIDE) for name in self._followed)
        self._within = nullcontext() if whole else functions
        if self._host.compiler is not None:
            self._host.compiler.paused = whole  # torch's functions cannot be intercepted in compiled blocks
        with functions if whole else nullcontext():
            try:
                output = forward(*args, **kwargs)
            except RuntimeError as error:
                self._check_all_are_cut(given, error)
                raise
        for step in here:
            output = self._cut_output(step, output)
        if self._marks is not None:
            self._check_followed()
            self._known[form], self._marks = (self._followed, self._leaving), None
        return output

    def _begin(self, form: Any) -> None:
        """Reset what is known of the current call.

        Args:
            form: key of the call by the shapes of its arguments, see `call_key`; None outside of calls.
        """
        self._followed, self._leaving = self._known.get(form, ({}, {}))
        self._marks = Marks() if form not in self._known else None
        self._of_length: dict[int, Segment] = {}
        self._named: dict[str, int] = {}
        self._inside: list[str] = []
        self._called: dict[str, str] = {}  # kinds of attention modules that received own tokens, with their classes
        self._within = nullcontext()
        self._attention.begin(self._followed, self._marks)

    def _enter(self, name: str, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record that an attention module is called, and begin to intercept torch's attention. It is a hook before its
        forward.

        Args:
            name: name of the module.
            args: the call's arguments by position.
            kwargs: the call's arguments by name.
        """
        if not self._inside:  # entered twice, it would intercept its own calls
            self._within.__enter__()
        self._inside.append(name)
        if self._marks is not None and (self._marks.any_of(args) or self._marks.any_of(kwargs.values())):
            self._called[kind_of(name)] = f"{type(module).__name__} with {type(module.processor).__name__}"

    def _leave(self) -> None:
        """Record that the attention module called last has returned, and stop intercepting torch's attention after the
        outermost."""
        if self._inside:
            self._inside.pop()
            if not self._inside:
                self._within.__exit__(None, None, None)

    def _check_followed(self) -> None:
        """Raise UserError if attention modules received this rank's tokens, and torch's function computed none of their
        kind.

        It is called at the end of a first call. Some blocks may skip their attention (LTX-2's guidance by perturbed
        attention), but not all of a kind.
        """
        for kind in self._called.keys() - {kind_of(name) for name in self._followed}:
            raise UserError(
                f"{kind}, {self._called[kind]}, attends to a shard by other means than torch's "
                f"scaled_dot_product_attention, where alone it can be exchanged: use the native attention backend"
            )

    def _check_all_are_cut(self, given: Arguments, error: RuntimeError) -> None:
        """Raise a RuntimeError that names arguments which the plan should probably cut, after a first call has failed.

        These may have as many tokens as the cut ones. Return if there are none.

        Args:
            given: the call's arguments by name; the first one, the sample, is removed.
            error: the error of the call.
        """
        sample, cut = next(iter(given)), {name for step in self._steps for name in step.arguments}
        sides = tensors_in(given.pop(sample))[0].shape[2:]  # sides of the sample, which becomes the tokens
        whole = [
            f"{name} {list(x.shape)}"
            for name, value in given.items()
            for x in tensors_in(value)
            if name not in cut and (self._of_length.keys() & {*x.shape} or (x.ndim > 3 and x.shape[2:] == sides))
        ]
        if self._marks is not None and whole and not isinstance(error, PeerLost):
            tokens = " and ".join(map(str, self._of_length))
            raise RuntimeError(
                f"the plan does not cut {'; '.join(whole)}, which may be {tokens} tokens of which a rank holds some "
                f"({str(error).splitlines()[0]}): cut it in the plan, or run without it"
            ) from error

    def _cut(self, cut: Cut, whole: Tensor, name: str) -> Tensor:
        """Return this rank's tokens of a tensor that has all of them. Raise UserError if the plan does not fit it.

        Args:
            cut: the dimension and the names of the tokens.
            whole: the tensor.
            name: the argument's or output's name, for errors.
        """
        if self._marks is not None and whole in self._marks:
            raise UserError(f"the plan cuts {name!r} a second time: its tokens are cut before")
        tokens = whole.shape[cut.dim]
        if cut.tokens:
            self._named[cut.tokens] = tokens
        lengths = [self._named.get(one, 0) for one in cut.of] or [tokens]
        if sum(lengths) != tokens:
            raise UserError(f"the plan cuts {name!r} into {', '.join(cut.of)}: {lengths} tokens, but it has {tokens}")
        parts = [
            self._host.sequence.cut(self._segment(length, name).name, part, cut.dim)
            for length, part in zip(lengths, whole.split(lengths, cut.dim), strict=True)
        ]
        own = parts[0] if len(parts) == 1 else torch.cat(parts, dim=cut.dim)
        if self._marks is not None:
            self._marks.add(own)
        return own

    def _segment(self, tokens: int, name: str) -> Segment:
        """Return the part of the sequence with this number of tokens; it is added to the sequence at its first use.

        Tensors with equally many tokens share a segment, as these are divided equally in any case.

        Args:
            tokens: their number on all ranks together.
            name: name for a new segment.
        """
        if tokens not in self._of_length:
            taken = {one.name for one in self._of_length.values()}
            new = Segment(name if name not in taken else f"{name} ({tokens})", tokens, on_every_rank=True)
            self._of_length[tokens] = new
            self._host.sequence.segments = (*self._host.sequence.segments, new)
        return self._of_length[tokens]

    def _gather(self, gather: Gather, x: Tensor, name: str) -> Tensor:
        """Return the tokens of all ranks, gathered from each rank's own. All ranks call this.

        Raise UserError if the tensor does not hold one segment's own tokens.

        Args:
            gather: the dimension of the tokens.
            x: this rank's tokens.
            name: the output's name, for errors.
        """
        rows, sequence = x.shape[gather.dim], self._host.sequence
        if self._marks is not None:
            facts = sequence.transport.all_gather_values([rows, x in self._marks])
            if not all(own for _, own in facts):
                raise UserError(f"the plan gathers {name!r}, whose tokens were not cut: correct the plan")
            found = segments_of(sequence, [rows for rows, _ in facts])
            if len(found) != 1:
                raise UserError(
                    f"the plan gathers {name!r}, which has {rows} tokens on rank {sequence.rank}: none that were "
                    f"cut, or several sorts of them: gather each where it is alone"
                )
            self._leaving[name] = found[0]
        whole: Tensor = sequence.gather(x, self._leaving[name].name, gather.dim)
        if self._marks is not None:
            self._marks.remove(whole)
        return whole

    def _attend(self, *qkv: Tensor, **call: Any) -> Tensor:
        """Return the result of one attention call of torch, for the attention module that is being called.

        Args:
            qkv: query, key and value.
            call: further arguments of torch's function, by name.
        """
        return self._attention.attend(self._inside[-1] if self._inside else OUTSIDE, *qkv, **call)


OUTSIDE = "attention"  # name of the layer for attention outside of attention modules


def _first_tensor(value: Any) -> Any:
    """Return the first tensor in nested lists or tuples, or the value itself if it is neither."""
    return next(iter(tensors_in(value)), value)
