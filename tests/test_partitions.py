"""Partitions of ranks: prices against hand arithmetic, which is taken, and how what does not fit is made to fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from value_tables import beside
from worlds import topology_of

from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.models.adapter import image_and_text
from cocodiff.models.family import Video
from cocodiff.planner.case import Case, ModelShape, coded_layers
from cocodiff.planner.choice import OUTPUT_CHANNELS, Choice, Division, choose, with_weights_chosen
from cocodiff.planner.layers import StepPlan, plan_step
from cocodiff.planner.memory import size_run
from cocodiff.topology import Topology
from cocodiff.topology.axes import Axes, Partition, partitions_of

AURORA = topology_of("aurora", 12)
TOY = ModelShape("toy", heads=24, head_dim=64, joint_layers=2, parameters=10**6, text_tokens=24, branches=2)


def case_of(
    shape: ModelShape = TOY, image: int = 1008, preset: str = "flat", steps: int = 10, topology: Topology = AURORA
) -> Case:
    call = image_and_text(image, shape.text_tokens), shape.rows_per_image, 2, shape.branches
    return Case(shape, topology, Config.preset(preset), *call, steps)


def step_of(case: Case, *partition: int) -> StepPlan:
    return Division(Partition(*partition), [case]).steps[0]


def best(cases: list[Case], images: int, replicas: int | None = None, guidance: int | None = None) -> Choice:
    """The choice among all divisions of the ranks that have so many replicas and branches, where these are given."""
    return choose(cases, images, images, partitions_of(cases[0].topology.size, cases[0].guides, replicas, guidance))


def with_memory(topology: Topology, count: float) -> Topology:
    """The same ranks on a machine whose tiles have so many bytes."""
    machine = topology.machine
    return replace(topology, machine=replace(machine, device=replace(machine.device, memory_gib=count / 2**30)))


@pytest.mark.parametrize(("ranks", "given", "expected"), beside(__file__))
def test_every_deal_that_divides_the_ranks(ranks, given, expected):
    if isinstance(expected, list):
        assert [[*one] for one in partitions_of(ranks, **given)] == expected
    else:
        with pytest.raises(UserError, match=expected):
            partitions_of(ranks, **given)


def test_two_branches_take_as_long_as_one_on_its_plane_and_the_exchange_of_outputs():
    """On one Aurora node a branch has a plane: 6 ranks with a link between any two. Flat sends each of the other five a
    sixth of a rank's rows; outputs go to the sibling, 64 channels of every image token."""
    case, latency_s = case_of(), 10e-6
    step = step_of(case, 1, 2)
    alone = plan_step(replace(case, topology=AURORA.part(Axes.build(AURORA, guidance=2).branch(0)), branches=1))
    output = 1008 * OUTPUT_CHANNELS * 2
    assert step.step_s == pytest.approx(alone.step_s + output / 134e9 + latency_s)
    attention = 2 * 2 * 4 * (1008 + 24) * 24 * 64 * 2 * 5 // 6  # layers, branches, q k v o, rows, heads, D, bf16
    assert step.bytes == {"sibling": 0, "plane": attention, "cross_plane": 0, "node": 0}
    assert step.outputs == {"sibling": 12 * output, "plane": 0, "cross_plane": 0, "node": 0}
    of_presets = Division(Partition(1, 2), [case, case]).output_bytes_per_image  # each of ten steps
    assert of_presets == {link: 2 * 10 * count for link, count in step.outputs.items()}
    assert sum(step_of(case, 2, 2).outputs.values()) == 6 * output  # of one of two replicas
    split = case_of(preset="split", topology=topology_of("aurora", 24))  # a branch has a node
    nodes = [step_of(split, 1, guidance) for guidance in (1, 2)]
    assert nodes[0].bytes["node"] > 0 == nodes[1].bytes["node"] < nodes[1].outputs["node"]


def test_halves_of_a_batch_and_calls_are_guidance_alike():
    """A model that calls once with two rows, and one that calls twice: a branch is the same work."""
    batched = case_of(replace(TOY, branches=1, rows_per_image=2))
    in_turn, at_once = (best([case], 4, 2, 2).taken for case in (case_of(), batched))
    assert at_once.job_s == 2 * at_once.image_s == 2 * in_turn.image_s
    assert in_turn.job_s == pytest.approx(at_once.job_s + in_turn.image_s / 10)  # the first of ten steps, once more
    assert best([case_of()], 4, 2, 1).taken.first_s == 0, "all ranks compute both branches in each step"
    assert at_once.steps == in_turn.steps and at_once.need == in_turn.need


def test_of_unequal_texts_the_longer_branch_decides():
    long, short = (case_of(replace(TOY, text_tokens=tokens)) for tokens in (480, 24))
    cases = long, short, replace(long, negative=short.segments)
    longer, shorter, unequal = (step_of(case, 1, 2).step_s for case in cases)
    assert shorter < longer == unequal
    longer, shorter, unequal = (step_of(case, 1, 1).step_s for case in cases)
    assert unequal == pytest.approx((longer + shorter) / 2)


@pytest.mark.parametrize("model", ["sd3.5", "qwen-image"])
@pytest.mark.parametrize("ranks", [12, pytest.param(96, marks=pytest.mark.full)])
def test_auto_is_the_best_of_all_deals(ranks, model):
    shape = load_shape(model)
    case = case_of(shape, shape.image_tokens(1024), "tapa", 50, topology_of("aurora", ranks))
    for images in (1, 12, 2000):
        found = best([case], images)
        taken, jobs = found.taken, {one.partition: one.job_s for one in found.listed}
        assert set(jobs) | set(found.refused) == set(partitions_of(ranks, guides=True)) and len(jobs) >= 10
        assert all("sit differently" in str(why) for why in found.refused.values())
        assert taken.job_s == jobs[taken.partition] <= 1.001 * min(jobs.values())
        as_good = [one.partition for one in found.listed if one.job_s <= 1.001 * min(jobs.values())]
        assert taken.partition == max(as_good), "of those that take the same time the most replicas"
        others = [one for one in found.listed if one is not taken]
        assert found.following is not None and found.following.job_s == min(one.job_s for one in others)
        assert f"next best: {found.following}, " in found.line() and "the least time by prediction" in found.line()
        assert taken.job_s * taken.partition.replicas >= images * taken.image_s * (1 - 1e-9)


def test_memory_comes_first():
    """A tile that holds a third of the activations that one rank alone would have."""
    case = case_of(image=4096)
    alone, together = (Division(partition, [case]).need for partition in (Partition(12, 1), Partition(1, 1)))
    assert best([case], 120).taken.partition.replicas == 12
    third = together.library + alone.weights + alone.activations / 3
    choice = best([replace(case, topology=with_memory(AURORA, third))], 120)
    assert choice.taken.fits and choice.taken.mesh.topology.size > 1
    assert "do not fit the memory" in choice.line()
    choice.check_fits()
    none = best([replace(case, topology=with_memory(AURORA, together.weights))], 120)
    assert none.taken.need.total == min(one.need.total for one in none.listed) and not none.taken.fits
    with pytest.raises(UserError, match=r"the partition that needs least, .*replica.* activations .* MiB are there"):
        none.check_fits()


def test_memory_is_that_of_the_preset_that_needs_most():
    """Wherever it stands among the presets: one of them has caches."""
    cases = [case_of(image=4096, preset=preset) for preset in ("flat", "coded")]
    needs = [Division(Partition(), [case]).need.total for case in cases]
    for order in (cases, cases[::-1]):
        small = with_memory(AURORA, sum(needs) / 2)
        choice = best([replace(case, topology=small) for case in order], 1, 1, 1)
        assert choice.taken.need.total == max(needs) > min(needs) and choice.taken.fits is False


@pytest.mark.parametrize(("images", "taken"), [(1, (1, 2)), (3, (3, 2)), (5, (4, 1)), (100, (12, 1))])
def test_without_rates_replicas_come_first_then_guidance(images, taken):
    choice = best([case_of(topology=topology_of("local", 12))], images)
    assert choice.taken.partition == taken and choice.taken.fits is None
    assert "machine local does not say what others would take" in choice.line()


def test_what_cannot_be_says_why():
    """A table of chunks knows one and two nodes; chunks on ranks that sit differently; more ranks than tokens."""
    case = case_of(replace(TOY, heads=36), topology=topology_of("aurora", 36)).with_settings(chunks="auto", ring=1)
    choice = best([case], 1, guidance=1)
    assert choice.taken.partition.replicas > 1 and "chunks auto" in str(choice.refused[Partition(1, 1)])
    choice = best([case_of(topology=topology_of("aurora", 24)).with_settings(chunks=2)], 3)
    assert set(choice.refused) == {(3, 1), (3, 2), (6, 1)}  # cards of a node have their planes in two orders
    assert "sit differently" in str(choice.refused[Partition(3, 1)])
    few = case_of(image=4, topology=topology_of("local", 12))
    choice = best([few], 3)
    assert set(choice.refused) == {(1, 1), (1, 2), (2, 1)} and choice.taken.partition == (3, 2)
    with pytest.raises(UserError, match="12 ranks"):
        best([few], 1)


# What does not fit a tile ---------------------------------------------------------------------------------------------


MODELS_THAT_DO_NOT_FIT = [("flux.2", 1536), ("flux.2", 2304), ("qwen-image", 3072), ("wan2.2", 480), ("wan2.2", 720)]


def case_on_tiles(name: str, size: int, preset: str, nodes: int) -> Case:
    """One image of a side, or a video of as many rows, on nodes of Aurora."""
    shape, config = load_shape(name), Config.preset(preset, machine="aurora")
    video = Video(81, size, {480: 832, 720: 1280}[size]) if shape.video else Video(1, size, size)
    tokens = shape.video_tokens(video) if shape.video else shape.image_tokens(size)
    call = image_and_text(tokens, shape.text_tokens), shape.rows_per_image, 2, shape.branches
    return Case(shape, topology_of("aurora", 12 * nodes), config, *call)


def needed(case: Case, **settings: Any) -> int:
    return Division(Partition(), [case.with_settings(**settings)]).need.total


@pytest.mark.sample(3)
@pytest.mark.parametrize("nodes", [1, 2, *(pytest.param(nodes, marks=pytest.mark.exhaustive) for nodes in (4, 8))])
@pytest.mark.parametrize("preset", ["tapa", "split", "lossless", "coded", "cocodiff"])
@pytest.mark.parametrize(("name", "size"), MODELS_THAT_DO_NOT_FIT)
def test_what_does_not_fit_a_tile_is_made_to_fit(name, size, preset, nodes):
    """4 GiB of a tile stay free, and with one shared block less, or one more layer's state, they would not."""
    case, room = case_on_tiles(name, size, preset, nodes), 60 * 2**30
    chosen = with_weights_chosen(case, Partition()).config
    assert needed(case) == needed(case, **settings_of(chosen)) <= room
    assert (chosen.weights == "whole") == (needed(case, weights="whole") <= room)
    assert chosen.predictor in (case.config.predictor, "last")
    less = settings_of(chosen)
    if chosen.state_layers is not None:
        less["state_layers"] += 1
    elif chosen.split_layers not in (None, 1):
        less["split_layers"] -= 1
    else:
        return
    assert needed(case, **less) > room


def settings_of(config: Config) -> dict[str, Any]:
    names = ("weights", "split_layers", "predictor", "state_layers")
    return {name: getattr(config, name) for name in names if name != "predictor" or config.codec != "none"}


def test_the_state_of_some_layers_is_that_of_so_many():
    case = case_on_tiles("flux.2", 1024, "lossless", 1)
    whole, some = (size_run(one)[0] for one in (case, case.with_settings(state_layers=14)))
    shape = case.shape
    assert some.reconstructions * 4 == whole.reconstructions and shape.joint_layers + shape.parallel_layers == 56
    assert coded_layers(shape, 14) == (8, 6, 0)
    assert coded_layers(replace(shape, image_layers=4), 7) == (4, 0, 3)
