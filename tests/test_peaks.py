"""What text encoders and VAE take of memory: the families' figures against their real architectures, and the sums."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import sd3_transformer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from worlds import topology_of

from cocodiff.bands import Bands
from cocodiff.loading.model_shapes import load_shape
from cocodiff.planning.memory import RankMemory
from cocodiff.planning.peaks import VaePeak, size_peaks, tile_sides


def real_vae(name: str) -> Any:
    """A model's VAE by its published architecture, on tensors without numbers."""
    from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage

    with torch.device("meta"):
        if name == "flux.2":
            return AutoencoderKLFlux2()
        if name == "qwen-image":
            return AutoencoderKLQwenImage()
        return AutoencoderKL(
            block_out_channels=(128, 256, 512, 512),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=16,
            layers_per_block=2,
            sample_size=1024,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )


class Live(TorchDispatchMode):
    """The most bytes that live at once of tensors that are made inside, with a copy of a convolution's input while it
    computes."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self._weights = weights
        self._sizes = {weight.untyped_storage()._cdata: 0 for weight in weights}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func, _types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in (x for x in tree_leaves(out) if isinstance(x, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata)
        copies = args[0].nbytes if func is torch.ops.aten.convolution.default else 0
        self.peak = max(self.peak, self.now + copies)
        return out

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


@pytest.mark.parametrize("name", ["sd3.5", "flux.2", "qwen-image"])
def test_a_familys_vae_is_its_real_architecture(name):
    vae, told = real_vae(name), load_shape(name).vae
    assert told is not None and told.parameters == sum(x.numel() for x in vae.parameters())
    frames, channels = ((1,) if name == "qwen-image" else ()), 32 if name == "flux.2" else 16
    for call, depth, side, numbers in ((vae.encode, 3, 512, told.encoding), (vae.decode, channels, 64, told.decoding)):
        x = torch.zeros(1, depth, *frames, side, side, device="meta")
        with torch.no_grad(), Live([*vae.parameters(), *vae.buffers()]) as live:
            call(x)
        assert live.peak == pytest.approx(numbers * 512**2 * x.itemsize, rel=0.01)


def middle_rank(size: int) -> Any:
    """A transport of tensors without numbers, for a rank that has neighbours on both sides."""
    done = SimpleNamespace(wait=lambda: None)
    return SimpleNamespace(
        rank=1,
        size=size,
        arrive=lambda at: None,
        control=SimpleNamespace(submit_inline=lambda job, *given: SimpleNamespace(wait=lambda: job(*given))),
        world=SimpleNamespace(send_recv=lambda sends, recvs: done, all_gather=lambda own, parts: done),
    )


@pytest.mark.parametrize("ranks", [4, 16])
@pytest.mark.parametrize("name", ["sd3.5", "flux.2", "qwen-image"])
def test_a_band_takes_its_share_and_two_rows(name, ranks):
    vae, rows = real_vae(name), 64 // ranks
    frames, channels = ((1,) if name == "qwen-image" else ()), 32 if name == "flux.2" else 16
    peaks = size_peaks(load_shape(name), topology_of("local", ranks), 512, 1, 4)
    assert peaks.of_vae["sharded"].decoders == ranks
    for call, depth, factor, told in (
        (vae.encode, 3, 8, peaks.of_vae["sharded"].encoding),
        (vae.decode, channels, 1, peaks.of_vae["sharded"].decoding),
    ):
        x = torch.zeros(1, depth, *frames, factor * rows, factor * 64, device="meta")
        weights = [*vae.parameters(), *vae.buffers()]
        with torch.no_grad(), Live(weights) as live, Bands(middle_rank(ranks), [rows] * ranks, -2):
            call(x)
        assert live.peak == pytest.approx(told, rel=0.05)


def test_with_many_bands_a_rank_holds_what_is_gathered():
    shape = load_shape("qwen-image")
    peaks = size_peaks(shape, topology_of("aurora", 132), 1024, 1, 2)
    assert peaks.of_vae["sharded"].encoding == 2 * 4 * shape.vae.attention * 128**2
    assert peaks.of_vae["sharded"].decoders == 12
    alone = size_peaks(load_shape("sd3.5"), topology_of("aurora", 12), 512, 1, 2, replicas=12)
    assert alone.of_vae["sharded"] == alone.of_vae["all"]


@pytest.mark.parametrize("name", ["sd3.5", "qwen-image"])
def test_tiles_are_those_that_the_vae_cuts(name):
    vae, told, sides = real_vae(name), load_shape(name).vae, []
    vae.decoder.register_forward_pre_hook(lambda _, args: sides.append(args[0].shape[-1] * 8))
    vae.use_tiling = True
    frames = (1,) if name == "qwen-image" else ()
    for side in (told.tile, 5 * told.tile // 2):
        with torch.no_grad():
            vae.decode(torch.zeros(1, 16, *frames, 8, side // 8, device="meta"))
        assert sides == tile_sides(side, told.tile)
        sides.clear()


def test_peaks_of_replicas_add_up_on_their_node():
    shape, two_nodes = load_shape("sd3.5"), topology_of("aurora", 24)
    one, six = (size_peaks(shape, two_nodes, 2048, 1, 2, replicas) for replicas in (1, 6))
    assert one.encoders == six.encoders == 2 * 5580620800 and one.vae == 2 * 83819683
    whole = 960 * 2048**2 * 2
    assert one.of_vae["one"] == VaePeak(640 * 2048**2 * 2, whole, 1)
    assert six.of_vae["one"].decoders == 3 and six.of_vae["all"] == one.of_vae["all"] == VaePeak(*six.of_vae["all"])
    assert one.of_vae["all"].decoders == 12 and one.of_vae["all"].decoding == whole
    assert tile_sides(2048, 1024) == [1024, 1024, 512]
    assert one.of_vae["tiled"].decoders == 9, "nine tiles on the first node's ranks"
    assert six.of_vae["tiled"].decoders == 12, "of the four ranks of each of three replicas"
    own = 3 * 1024**2
    assert one.of_vae["tiled"].decoding == 2 * (960 * 1024**2 + own)
    assert six.of_vae["tiled"].decoding == 2 * (960 * 1024**2 + 3 * own)


def test_what_a_rank_holds_at_each_moment():
    peaks = size_peaks(load_shape("sd3.5"), topology_of("aurora", 12), 1024, 1, 2)
    step = RankMemory(weights=1000, activations=100, image_cache=10)
    assert peaks.of_rank(step, "one") == {
        "text encoding": peaks.encoders,
        "image encoding": 1000 + peaks.vae + peaks.of_vae["one"].encoding,
        "denoising": 1110 + peaks.vae,
        "decoding": 1010 + peaks.vae + peaks.of_vae["one"].decoding,
    }


def test_a_folders_encoders_and_vae_are_counted_in_its_files(tmp_path):
    sd3_transformer(12, layers=1, patch_size=2).save_config(tmp_path / "transformer")
    assert load_shape(str(tmp_path)).encoders == 0 and load_shape(str(tmp_path)).vae.parameters == 83819683
    for part, numbers in (("text_encoder", 10), ("text_encoder_2", 5), ("vae", 7)):
        (tmp_path / part).mkdir()
        save_file({"x": torch.zeros(numbers)}, tmp_path / part / "model.safetensors")
    shape = load_shape(str(tmp_path))
    assert shape.encoders == 15 and shape.vae.parameters == 7 and shape.vae.decoding == 960
