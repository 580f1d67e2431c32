"""What an engine is before, in and after its `with` block, and that it can be entered again."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from diffusers.models.attention_processor import JointAttnProcessor2_0
from planned_models import PLANNED
from seams import hooks_of
from tiny_models import sd3_inputs, sd3_transformer
from tiny_pipelines import TEXT_WIDTH, sd3_pipeline

from cocodiff.comm.connect import connect
from cocodiff.comm.health import Limits
from cocodiff.comm.launch import Launch
from cocodiff.comm.loopback import run_ranks
from cocodiff.config.config import Config
from cocodiff.config.errors import PeerLost, UserError
from cocodiff.engine.engine import open_transport, parallelize

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


def test_results_of_all_ranks_are_there_after_the_block_on_any_rank_alone():
    models, inputs = [sd3_transformer(4) for _ in range(3)], sd3_inputs(1, 4, 4, 3)

    def work(transport: Any) -> dict[str, int]:
        model = models[transport.rank]
        engine = parallelize(model, preset="cocodiff+", steps=4, transport=transport)
        assert sum(engine.bytes().values()) == 0 and engine.drift_profile() == []
        with engine:
            model(**inputs)
            inside = engine.bytes()
        once = engine.bytes()
        with engine:
            model(**inputs)
        # One rank after the other: a question that needed the others' answer would wait for ever.
        for rank in range(transport.size):
            if rank == transport.rank:
                assert engine.bytes() == {link: 2 * sent for link, sent in once.items()}
                assert len(engine.drift_profile()) == 1
                engine.forget_drift()
                assert engine.drift_profile() == []
            transport.world.barrier()
        assert inside == once
        return once

    of_ranks = run_ranks(3, work, timeout_s=60.0)
    assert all(sent == of_ranks[0] for sent in of_ranks) and sum(of_ranks[0].values()) > 0


def test_an_engine_in_use_is_not_entered_again(alone):
    engine = parallelize(sd3_transformer(4), transport=alone)
    with engine, pytest.raises(UserError, match="this engine is in use"):
        engine.__enter__()
    with engine, torch.no_grad():
        engine.model(**sd3_inputs(1, 4, 4, 3))


@pytest.mark.parametrize("model", [sd3_transformer(4), PLANNED["wan"].model()], ids=["family", "plan"])
def test_a_model_that_is_parallel_is_not_made_so_again(model, alone):
    inner, words = parallelize(model, transport=alone), "is parallel already"
    with parallelize(model, transport=alone), pytest.raises(UserError, match=f"this {type(model).__name__} {words}"):
        inner.__enter__()
    with inner:
        pass


def test_a_model_that_is_called_outside_of_the_block_says_so_once():
    """Each rank computes it whole then: the `with` may have been forgotten."""
    inputs, of_ranks = sd3_inputs(1, 4, 4, 3), sd3_transformer(4)

    def work(transport: Any) -> None:
        model = copy.deepcopy(of_ranks)
        parallelize(model, transport=transport)
        for block in (parallelize(model, transport=transport), nullcontext(), nullcontext()):
            with block:
                model(**inputs)
        assert not hooks_of(model)
        engine = parallelize(model, transport=transport)
        for block in (engine, nullcontext(), engine):
            with block:
                model(**inputs)

    def said(ranks: int) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_ranks(ranks, work)
        return [str(one.message) for one in caught if "outside" in str(one.message)]

    assert said(1) == []  # which has nobody to share it with
    words = "SD3Transformer2DModel is called outside of its `with` block"
    assert len(lines := said(2)) == 2 and all(line.startswith(words) for line in lines)


def test_an_engine_that_opened_its_transport_opens_another_when_entered_again():
    engine = parallelize(sd3_transformer(4))
    for _ in range(2):
        with engine, torch.no_grad():
            assert not engine.transport.closed and engine.sequence.transport is engine.transport
            engine.model(**sd3_inputs(1, 4, 4, 3))
        assert engine.transport.closed


@pytest.mark.parametrize("part", ["pipe", "transformer", "vae", "a transformer alone"])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_nothing_that_holds_the_engine_is_copied(copied, part, alone):
    pipe = sd3_pipeline()
    target = pipe.transformer if part == "a transformer alone" else getattr(pipe, part, pipe)
    whole = target if part == "a transformer alone" else pipe
    with parallelize(whole, transport=alone):
        if copied is copy.copy and part == "pipe":  # another pipeline of the same parts
            assert copied(pipe).vae is pipe.vae
        else:
            with pytest.raises(UserError, match=f"this {type(whole).__name__} is parallel and can be neither copied"):
                copied(target)
    copied(target)


def test_what_others_put_around_calls_inside_the_block_stays_theirs():
    """And nothing of ours in it."""
    pipe = sd3_pipeline()
    model, vae, latents = pipe.transformer, pipe.vae, torch.zeros(1, 16, 4, 4)
    inputs = sd3_inputs(2, 8, 8, 3) | {"hidden_states": torch.ones(2, 16, 8, 8)}
    inputs |= {"encoder_hidden_states": torch.ones(2, 3, TEXT_WIDTH)}
    with torch.no_grad():
        plain = model(**inputs).sample, vae.decode(latents).sample

    def work(transport: Any) -> None:
        own = copy.deepcopy(pipe)
        before, calls, theirs = [own.transformer.forward, own.vae.decode], [], JointAttnProcessor2_0()

        def around(call: Any) -> Any:
            return lambda *args, **kwargs: calls.append(1) or call(*args, **kwargs)

        with parallelize(own, transport=transport, guidance_parallel=2):
            own.transformer.forward, own.vae.decode = around(own.transformer.forward), around(own.vae.decode)
            found = [(own.transformer(**inputs).sample, own.vae.decode(latents).sample)]
            own.transformer.transformer_blocks[0].attn.set_processor(theirs)
        assert own.transformer.transformer_blocks[0].attn.processor is theirs
        transport.close()
        found.append((own.transformer(**inputs).sample, own.vae.decode(latents).sample))
        assert len(calls) == 4
        own.transformer.forward, own.vae.decode = before
        for one in found:
            torch.testing.assert_close(one, plain, rtol=0, atol=1e-5)

    run_ranks(2, work)


def test_a_lost_rank_is_pickled_with_its_number():
    lost = pickle.loads(pickle.dumps(PeerLost(3, "died")))
    assert (lost.rank, lost.reason, str(lost)) == (3, "died", "rank 3 died")


def test_a_transport_is_opened_with_all_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """No argument of `connect` has its default."""
    parameters = inspect.signature(connect)
    monkeypatch.setattr("cocodiff.engine.engine.connect", parameters.bind)
    limits = {"timeout_s": 7.0, "start_timeout_s": 8.0, "stall_timeout_s": 9.0}
    config = Config(device="cpu", transport="gloo", check_messages=True, **limits)
    launch, on_loss = Launch("torchrun", 1, 2, 1, 2), [print]
    given: Any = open_transport(config, launch, {"inputs": "a"}, on_loss)
    told = given.arguments.pop("settings")
    assert told == {name: str(value) for name, value in vars(config).items()} | {"inputs": "a"}
    wanted = {"launch": launch, "name": "gloo", "device": torch.device("cpu"), "limits": Limits(7.0, 8.0, 9.0)}
    assert given.arguments == wanted | {"on_loss": on_loss, "check_messages": True}
    assert {*given.arguments, "settings"} == {*parameters.parameters}
