"""What text encoders and VAE take of memory: the families' figures against their real architectures, and the sums."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from real_vaes import picture_sizes, real_vae
from safetensors.torch import save_file
from seams import number_of
from tiny_models import sd3_transformer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from value_tables import beside
from worlds import topology_of

from cocodiff.engine.decoding import Bands
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.models import load_family
from cocodiff.models.family import Video
from cocodiff.planner.case import ModelShape
from cocodiff.planner.memory import RankMemory, VaePeak, size_peaks, tile_sides


def on_meta(name: str) -> Any:
    """A model's VAE by its published architecture, on tensors without numbers."""
    with torch.device("meta"):
        return real_vae(name)


def shape_of(name: str) -> ModelShape:
    shape = load_shape("wan2.2" if name == "ti2v" else name)
    return replace(shape, vae=load_family("Wan").token_vae) if name == "ti2v" else shape


class Live(TorchDispatchMode):
    """The most bytes that live at once of tensors that are made inside, with a copy of a convolution's input while it
    computes."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self._sizes = {number_of(weight.untyped_storage()): 0 for weight in weights}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in (x for x in tree_leaves(out) if isinstance(x, torch.Tensor)):
            storage = tensor.untyped_storage()
            if (number := number_of(storage)) not in self._sizes:
                self._sizes[number] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, number)
        copies = args[0].nbytes if func is torch.ops.aten.convolution.default else 0
        self.peak = max(self.peak, self.now + copies)
        return out

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


CASES = [*((name, 1) for name in ("sd3.5", "flux.2", "qwen-image")), *product(("wan2.2", "ti2v"), (1, 9, 21))]
SHORT = [case for case in CASES if case[1] < 21]


def middle_rank(size: int) -> Any:
    """A transport of tensors without numbers, for a rank that has neighbours on both sides."""
    done = SimpleNamespace(wait=lambda: None)
    return SimpleNamespace(
        rank=1,
        size=size,
        arrive=lambda at: None,
        control=SimpleNamespace(submit=lambda job, *given: SimpleNamespace(wait=lambda: job(*given))),
        world=SimpleNamespace(send_recv=lambda sends, recvs: done, all_gather=lambda own, parts: done),
    )


@pytest.mark.sample(6)
@pytest.mark.parametrize(("case", "ranks"), [*((case, 1) for case in CASES), *product(SHORT, (4, 16))])
def test_a_vae_takes_what_its_real_architecture_does(case, ranks):
    """On one rank, and in bands of several, of which each takes its share and two rows."""
    (name, frames), how = case, "one" if ranks == 1 else "sharded"
    vae, shape = on_meta(name), shape_of(name)
    assert shape.vae is not None and shape.vae.parameters == sum(x.numel() for x in vae.parameters())
    told = size_peaks(shape, topology_of("local", ranks), Video(frames, 512, 512), 1, 4).of_vae[how]
    assert told.decoders == ranks
    near = 0.05 if ranks > 1 else 0.02 if case == ("ti2v", 21) else 0.01
    rows, weights = 512 // shape.vae.factor // ranks, [*vae.parameters(), *vae.buffers()]
    given = picture_sizes(name, shape.vae.factor, frames, 512 // ranks, 512)
    for call, sizes, expected in zip((vae.encode, vae.decode), given, told[:2], strict=True):
        bands = Bands(middle_rank(ranks), [rows] * ranks, -2) if ranks > 1 else nullcontext()
        x = torch.zeros(sizes, device="meta")
        with torch.no_grad(), Live(weights) as live, bands:
            call(x)
        assert live.peak == pytest.approx(expected, rel=near)


@pytest.mark.parametrize("name", ["sd3.5", "qwen-image"])
def test_tiles_are_those_that_the_vae_cuts(name):
    vae, told, sides = on_meta(name), load_shape(name).vae, []
    vae.decoder.register_forward_pre_hook(lambda _, args: sides.append(args[0].shape[-1] * 8))
    vae.use_tiling = True
    frames = (1,) if name == "qwen-image" else ()
    for side in (told.tile, 5 * told.tile // 2):
        with torch.no_grad():
            vae.decode(torch.zeros(1, 16, *frames, 8, side // 8, device="meta"))
        assert sides == tile_sides(side, told.tile)
        sides.clear()


def test_peaks_on_nodes_of_aurora(snapshot):
    """Of every setting of the VAE, and what a rank holds at each moment of a run with it."""
    lines, step = [], RankMemory(weights=1000, activations=100, image_cache=10)
    for name, ranks, sizes, images, replicas in beside(__file__):
        video = Video(*sizes)
        peaks = size_peaks(load_shape(name), topology_of("aurora", ranks), video, images, 2, replicas)
        lines.append(f"{name} {video[:]} on {ranks} ranks, {replicas} replicas of {images} images")
        lines += [f"{how}: {tuple(peak)} {peaks.of_rank(step, how)}" for how, peak in peaks.of_vae.items()]
    snapshot("\n".join(lines))
    by_hand = size_peaks(load_shape("sd3.5"), topology_of("aurora", 24), Video(1, 2048, 2048), 1, 2, 6).of_vae
    assert by_hand["one"] == VaePeak(640 * 2048**2 * 2, 960 * 2048**2 * 2, 3)
    assert by_hand["tiled"] == VaePeak(640 * 1024**2 * 2, 2 * (960 + 3 * 3) * 1024**2, 12)


def test_a_folders_encoders_and_vae_are_counted_in_its_files(tmp_path):
    sd3_transformer(12, layers=1, patch_size=2).save_config(tmp_path / "transformer")
    assert load_shape(str(tmp_path)).encoders == 0 and load_shape(str(tmp_path)).vae.parameters == 83819683
    for part, numbers in (("text_encoder", 10), ("text_encoder_2", 5), ("vae", 7)):
        (tmp_path / part).mkdir()
        save_file({"x": torch.zeros(numbers)}, tmp_path / part / "model.safetensors")
    shape = load_shape(str(tmp_path))
    assert shape.encoders == 15 and shape.vae.parameters == 7 and shape.vae.decoding == 960
