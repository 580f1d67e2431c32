"""What does not fit a tile is made to fit: shared weights, and the state of as many layers as there is room for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from worlds import topology_of

from cocodiff.config.config import Config
from cocodiff.config.machine import Topology
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.models.adapter import image_and_text
from cocodiff.models.family import Video
from cocodiff.planner.choice import Partition, Pricer, Workload, parts_of, with_weights_chosen
from cocodiff.planner.costs import state_sizes
from cocodiff.planner.memory import Load, block_parameters, coded_layers, size_run


@pytest.mark.parametrize(("among", "ranks"), [("card", 2), ("node", 12)])
@pytest.mark.parametrize("layers", [None, 4])
def test_weights_that_tiles_share_leave_a_part_and_two_buffers(among, ranks, layers):
    """Each branch of guidance has a node, whose ranks share among themselves."""
    shape = load_shape("qwen-image")
    work = Workload(shape, Load(shape.segments(512), 1, 2, 2), Config(weights=among, split_layers=layers), 50)
    (parts,) = parts_of(topology_of("aurora", 24), work, Partition(1, 2))
    block, split = block_parameters(shape)[0] * 2, layers or 60
    held = shape.parameters * 2 - split * block * (1 - 1 / ranks) + 2 * block
    assert [part.need.weights for part in parts] == pytest.approx([held, held], rel=1e-6)


MODELS_THAT_DO_NOT_FIT = [("flux.2", 1536), ("flux.2", 2304), ("qwen-image", 3072), ("wan2.2", 480), ("wan2.2", 720)]


def work_of(name: str, size: int, preset: str, **settings: Any) -> Workload:
    """One image of a side, or a video of as many rows, on tiles of Aurora."""
    shape, config = load_shape(name), Config.preset(preset, machine="aurora", **settings)
    video = Video(81, size, {480: 832, 720: 1280}[size]) if shape.video else Video(1, size, size)
    tokens = shape.video_tokens(video) if shape.video else shape.image_tokens(size)
    segments = image_and_text(tokens, shape.text_tokens)
    return Workload(shape, Load(segments, shape.rows_per_image, 2, shape.branches, state_sizes(config)), config, 50)


def needed(topology: Topology, work: Workload, **settings: Any) -> int:
    config = work.config.with_(**settings)
    work = replace(work, config=config, load=replace(work.load, state=state_sizes(config)))
    return Pricer(topology).need(work, Partition()).total


@pytest.mark.sample(3)
@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
@pytest.mark.parametrize("preset", ["tapa", "split", "lossless", "coded", "cocodiff"])
@pytest.mark.parametrize(("name", "size"), MODELS_THAT_DO_NOT_FIT)
def test_what_does_not_fit_a_tile_is_made_to_fit(name, size, preset, nodes):
    """4 GiB of a tile stay free, and with one shared block less, or one more layer's state, they would not."""
    topology, room = topology_of("aurora", 12 * nodes), 60 * 2**30
    work = work_of(name, size, preset)
    chosen = with_weights_chosen(topology, work, Partition()).config
    assert needed(topology, work) == needed(topology, work, **settings_of(chosen)) <= room
    assert (chosen.weights == "whole") == (needed(topology, work, weights="whole") <= room)
    assert chosen.predictor in (work.config.predictor, "last")
    less = settings_of(chosen)
    if chosen.state_layers is not None:
        less["state_layers"] += 1
    elif chosen.split_layers not in (None, 1):
        less["split_layers"] -= 1
    else:
        return
    assert needed(topology, work, **less) > room


def settings_of(config: Config) -> dict[str, Any]:
    names = ("weights", "split_layers", "predictor", "state_layers")
    return {name: getattr(config, name) for name in names if name != "predictor" or config.codec != "none"}


def test_the_state_of_some_layers_is_that_of_so_many():
    topology, work = topology_of("aurora", 12), work_of("flux.2", 1024, "lossless")
    whole, some = (
        size_run(work.shape, topology, replace(work.load, state=state_sizes(config)))[0]
        for config in (work.config, work.config.with_(state_layers=14))
    )
    assert (
        some.reconstructions * 4 == whole.reconstructions and work.shape.joint_layers + work.shape.parallel_layers == 56
    )
    assert coded_layers(work.shape, 14) == (8, 6, 0)
    assert coded_layers(replace(work.shape, image_layers=4), 7) == (4, 0, 3)
