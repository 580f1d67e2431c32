"""What a run takes of memory: the caches to the byte, real models' figures, and the refusal of what cannot fit."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from covering import examples
from hypothesis import given, strategies
from on_ranks import on_ranks, outputs_of
from planned_models import PLANNED, cast
from seams import step_caches_of
from test_latte import inputs as latte_inputs
from test_latte import latte
from tiny_models import FAMILIES
from torch.utils._python_dispatch import TorchDispatchMode
from value_tables import beside
from worlds import topology_of

from cocodiff.comm.loopback import run_ranks
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.engine.engine import parallelize
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.models import family_of
from cocodiff.models.adapter import image_and_text
from cocodiff.models.checks import called_often
from cocodiff.planner import automatic
from cocodiff.planner.case import Case, ModelShape, shape_of_config
from cocodiff.planner.memory import (
    MIB,
    RankMemory,
    block_parameters,
    check_fits,
    fullest,
    largest_batch,
    run_cache,
    size_run,
)
from cocodiff.topology import Topology
from cocodiff.topology.axes import Mesh

QWEN = load_shape("qwen-image")


CASES = beside(__file__)
KEPT = CASES["kept"]  # settings that keep something between calls
AURORA = topology_of("aurora", 12)


@pytest.fixture(scope="module", autouse=True)
def machine_of_four(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("machine") / "four.yaml"
    path.write_text("{name: four, tiles: 2, cards: 2, planes: [0, 1, 1, 0]}")
    return str(path)


@pytest.mark.parametrize("family", FAMILIES)
@given(
    world=strategies.sampled_from(((1, 1), (2, 1), (3, 1), (5, 1), (4, 2), (6, 2), (6, 3), (8, 1), (12, 1))),
    side=strategies.tuples(strategies.integers(4, 6), strategies.integers(3, 7)),
    text=strategies.integers(1, 9),
    heads=strategies.integers(12, 15),
    batch=strategies.integers(1, 2),
    kept=strategies.sampled_from(tuple(KEPT)),
    branches=strategies.integers(1, 2),
    dtype=strategies.sampled_from((torch.float32, torch.bfloat16)),
)
@examples(5, exhaustive=60)
def test_caches_are_as_real_ones_on_every_rank(
    family, world, side, text, heads, batch, kept, branches, dtype, machine_of_four
):
    """After a whole and two selective, coded or displaced steps; of eight ranks on two nodes. The engine's own check
    passes on the way. SD3's last block returns no text, so its step cache keeps none; some of its layers attend to the
    image once more."""
    (size, ring), make, inputs_of = world, *FAMILIES[family]
    model = (make(heads, dual=(0,)) if family == "sd3" else make(heads)).to(dtype)
    machine = {8: machine_of_four, 12: "aurora"}.get(size, "local")
    settings = KEPT[kept] | {"schedule": "fixed", "sync_interval": 0, "fine_steps": 0, "steps": 3}
    inputs = cast(inputs_of(batch, *side, text), dtype)
    parameters = sum(x.numel() for x in model.parameters())

    def work(transport: Any) -> tuple[int, int]:
        own = copy.deepcopy(model)
        with torch.no_grad(), parallelize(own, transport=transport, machine=machine, ring=ring, **settings) as engine:
            for time in (0.9, 0.6, 0.3):
                for _ in range(branches):
                    own(**inputs | {"timestep": torch.full_like(inputs["timestep"], time)})
            kept_text = 0 if family == "sd3" and "step cache" in kept else text
            shape, mesh = shape_of_config(family_of(own), own.config, parameters), engine.sequence.mesh
            call = image_and_text(side[0] * side[1], kept_text), batch, dtype.itemsize, branches
            case = Case(shape, engine.topology, Config(**KEPT[kept]), *call, known_mesh=mesh)
            expected = run_cache(case)[transport.rank]
            real = step_caches_of(engine)[0] if "step cache" in kept else engine.sequence.strategy.codec
            return real.bytes_held(), expected.step_cache or expected.cache

    for real, expected in run_ranks(size, work):
        assert real == expected and (expected > 0) == (size > 1 or "step cache" in kept)


class WholeImages(TorchDispatchMode):
    """Counts new tensors that are as large as all image tokens of a call."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self._numbers, self.seen = numbers, {}

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().nbytes() == self._numbers * out.itemsize:
            storage = out.untyped_storage()
            self.seen[storage.data_ptr()] = storage  # kept, so that no other gets its address
        return out


@pytest.mark.parametrize("family", [*FAMILIES, "wan"])
def test_tensors_of_the_whole_image_where_tokens_enter(family):
    """Before the engine cuts them: what `unsharded_copies` says of a family, counted on one of two ranks."""
    if family == "wan":
        model, inputs, tokens = PLANNED[family].model(), PLANNED[family].call(), 45
    else:
        make, inputs_of = FAMILIES[family]
        model, inputs, tokens = make(13), inputs_of(1, 6, 7, 5), 42

    def work(transport: Any) -> tuple[int, int]:
        own = copy.deepcopy(model)
        shape = shape_of_config(family_of(own), own.config, 1)
        with torch.no_grad(), parallelize(own, transport=transport), WholeImages(tokens * shape.width) as counter:
            own(**inputs)
        return len(counter.seen), shape.unsharded_copies

    for seen, expected in run_ranks(2, work):
        assert seen == expected


IMAGE = image_and_text(4096, 333)


def most(shape: ModelShape, topology: Topology, ring: int = 1) -> int:
    """Bytes of activations on the fullest rank."""
    case = Case(shape, topology, Config(), IMAGE, known_mesh=Mesh.build(topology, ring))
    return max(need.activations for need in size_run(case))


def test_a_large_image_needs_most_where_it_enters():
    """1024 x 1024 on 12 ranks: three whole tensors are more than a layer's of a twelfth each; one lives on in it."""
    shape = ModelShape("sd3", 24, 64, 12, 1000, unsharded_copies=3)
    without, whole = replace(shape, unsharded_copies=0), 4096 * shape.width * 2
    for topology in (AURORA, topology_of("aurora", 24)):
        assert most(shape, topology) == 3 * whole > most(without, topology) + whole
    few = topology_of("local", 4)
    assert most(shape, few) == most(without, few) + whole > 3 * whole
    assert most(without, few, ring=2) > most(without, few), "blocks of two other groups are here"


@pytest.mark.parametrize(("name", "kind", "config", "billions"), CASES["shipped"])
def test_shipped_shapes_and_their_blocks_are_those_of_diffusers(name, kind, config, billions):
    import diffusers

    with torch.device("meta"):
        model = getattr(diffusers, kind)(**config)
    numbers = sum(x.numel() for x in [*model.parameters(), *model.buffers()])
    shipped = load_shape(name)
    experts = 2 if name == "wan2.2" else 1
    counted = shape_of_config(family_of(model), model.config, experts * numbers)
    assert shipped == replace(counted, name=name, encoders=shipped.encoders)
    attending = [name for name in model.attn_processors if not name.endswith("attn2.processor") or experts == 1]
    assert len(attending) == shipped.joint_layers + shipped.parallel_layers
    assert round(shipped.parameters / 1e9, 1) == billions
    if name != "sd3.5":  # whose dual layers differ
        blocks = [sum(x.numel() for x in block.parameters()) for _, block in called_often(model)[1:]]
        assert block_parameters(shipped) == pytest.approx(blocks, rel=0.03)


@pytest.mark.parametrize(
    ("ranks", "job", "taken"),
    [(1, (1, 1), 0), (12, (1, 1), 384), (24, (1, 1), 384 + 1024), (1, (12, 1), 384), (12, (24, 2), 384 + 1024)],
)
def test_the_library_of_messages_takes_memory_of_every_process(ranks, job, taken):
    """By the machine's file: more across nodes, also where ranks of other nodes share no sequence with these; nothing
    where the file does not say so."""
    shape = ModelShape("sd3", 24, 64, 12, 1000)
    everywhere = range(ranks) if ranks > 1 else (0,)
    aurora = topology_of("aurora", max(12, ranks)).part(everywhere)
    silent = replace(
        aurora, machine=replace(aurora.machine, device=replace(aurora.machine.device, library_mib=0, across_mib=0))
    )
    sizes = (size_run(Case(shape, topology, Config(ring=1), IMAGE, job=job)) for topology in (aurora, silent))
    for with_library, without in zip(*sizes, strict=True):
        assert (with_library.library, without.library) == (taken * MIB, 0)
        assert with_library.total - without.total == taken * MIB


@pytest.mark.parametrize("kept", [None, "source", "card"])
@pytest.mark.parametrize(("name", "branches", "gib"), [("qwen-image", 2, 64), ("sd3.5", 1, 32)])
def test_the_largest_batch_fits_and_an_image_more_does_not(name, branches, gib, kept):
    """SD3.5's calls have two rows for an image."""
    shape, memory = load_shape(name), gib * 1024 * MIB
    case = Case(shape, AURORA, Config(**KEPT[kept] if kept else {}), image_and_text(96 * 96, 512), 4, 2, branches)
    largest = largest_batch(case, memory)
    rows = [shape.rows_per_image * (largest + more) for more in (0, 1)]
    totals = [fullest(replace(case, batch=batch)).total for batch in rows]
    assert totals[0] <= memory < totals[1] and largest > 1
    assert largest_batch(case, memory // 8) == 0


@pytest.mark.parametrize(("memory", "blame"), CASES["blames"])
def test_what_cannot_fit_is_refused_with_figures_and_blame(memory, blame):
    need = RankMemory(
        weights=100 * MIB, activations=50 * MIB, image_cache=30 * MIB, reference_cache=15 * MIB, text_cache=5 * MIB
    )
    check_fits(need, 200 * MIB, "rank 1 on cpu")
    with pytest.raises(UserError, match=blame) as caught:
        check_fits(need, memory * MIB, "rank 1 on cpu")
    text = str(caught.value)
    assert text.startswith("memory of rank 1 on cpu: 200 MiB") and "weights 100, activations 50, cache 50" in text
    assert f"{memory} MiB are there" in text and "\n" not in text


def run_on(
    monkeypatch: pytest.MonkeyPatch, free: int | None, calls: int = 1, blocks: int = 1, wider: int = 0, **settings: Any
) -> int:
    """Runs V-Major on 3 ranks that have `free` bytes, in some `with` blocks; returns how often memory was asked for.
    wider: columns that each call has more than the one before."""
    asked: list[int] = []
    monkeypatch.setattr(automatic, "free_memory", lambda _device, ranks: asked.append(ranks) or free)
    make, inputs_of = FAMILIES["sd3"]
    model, inputs = make(4), [inputs_of(2, 6, 7 + wider * call, 5) for call in range(calls)]

    def work(transport: Any) -> None:
        chosen = {"selection": "v_major", "steps": 4} | settings
        own = copy.deepcopy(model)
        engine = parallelize(own, transport=transport, **chosen)
        for _ in range(blocks):
            with torch.no_grad(), engine:
                for number, call in enumerate(inputs):
                    engine.model(**call | {"timestep": torch.full_like(call["timestep"], 0.9 - 0.1 * number)})

    run_ranks(3, work)
    assert set(asked) <= {3}
    return len(asked)


@pytest.mark.parametrize(("settings", "remedy"), CASES["remedies"])
def test_a_run_that_cannot_fit_is_refused_before_it_starts(settings, remedy, monkeypatch):
    for free, told in ((0, "weights and activations alone"), (activations_of_the_run(), remedy)):
        with pytest.raises(UserError, match=rf"memory of rank \d on cpu: .*{told}"):
            run_on(monkeypatch, free, **settings)


def test_a_run_is_not_refused_for_what_the_library_has_taken_before(monkeypatch, tmp_path):
    """What is free is told without that."""
    machine = tmp_path / "m.yaml"
    machine.write_text("{name: m, tiles: 1, planes: [0], device: {library_mib: 4096}}")
    assert run_on(monkeypatch, 2**30, machine=str(machine)) == 3


def activations_of_the_run() -> int:
    model = FAMILIES["sd3"][0](4)
    shape = shape_of_config(family_of(model), model.config, 1)
    case = Case(shape, topology_of("local", 3), Config(**KEPT["source"]), image_and_text(42, 5), 2, 4)
    return max(need.activations for need in size_run(case))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *product(("wan", "hunyuan 1.5"), ({"codec": "int4"}, {"arrival": "displaced"})),
        *product(("latte",), ({"codec": "lossless"}, {"codec": "int8"})),
    ],
    ids=str,
)
def test_what_a_model_without_a_shape_keeps_is_what_room_is_looked_for(name, settings, monkeypatch):
    """To the byte, on each rank."""
    needs: list[int] = []
    monkeypatch.setattr(automatic, "free_memory", lambda *_: 2**40)
    monkeypatch.setattr(automatic, "check_fits", lambda need, *_: needs.append(need.total))
    if name == "latte":
        model, call, dtype = latte(4, 8).to(torch.bfloat16), latte_inputs(2, 4, 8), torch.bfloat16
    else:
        model, call, dtype = PLANNED[name].model(), PLANNED[name].call(), torch.float32
    calls = [cast(call, dtype) | {"timestep": call["timestep"] - step} for step in range(3)]

    def run(own: Any, engine: Any) -> int:
        outputs_of(own, *calls)
        return engine.sequence.strategy.codec.bytes_held()

    held = [ran.found for ran in on_ranks(2, model, run=run, preset="flat", steps=9, **settings)]
    assert sorted(needs) == sorted(held) and min(held) > 0


def test_memory_is_asked_for_once_a_run_of_one_size_and_only_by_v_major(monkeypatch):
    assert run_on(monkeypatch, 2**40, calls=2, blocks=2) == 6  # by 3 ranks, each time that the engine is entered
    assert run_on(monkeypatch, 2**40, calls=2, wider=1) == 6  # and for each size
    assert run_on(monkeypatch, None, calls=3) == 3
    assert run_on(monkeypatch, 0, calls=2, selection="full") == 0


def test_a_file_takes_from_its_family_what_it_does_not_say(tmp_path):
    path = tmp_path / "mine.yaml"
    said = "name: mine\nheads: 4\nhead_dim: 8\njoint_layers: 2\nparameters: 100\n"
    path.write_text(said + "family: Qwen-Image\ntext_tokens: 9\n")
    shape = ModelShape("mine", 4, 8, 2, 100, text_tokens=9, branches=2, unsharded_copies=1, vae=QWEN.vae)
    assert load_shape(str(path)) == shape
    path.write_text(said + "text_tokens: 9\nbranches: 2\nentrance: 1\n")  # as before families and the longer name
    assert load_shape(str(path)) == replace(shape, vae=None)
