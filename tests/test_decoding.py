"""Decoding in tiles on all ranks: bit for bit what the VAE's own tiling gives in one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from on_ranks import check_alike, on_ranks, state_of
from test_engine_pipelines import inpainting, restored, restoring
from tiny_pipelines import flux2_pipeline, image_vae, qwen_pipeline

from cocodiff.comm.loopback import run_ranks
from cocodiff.config.errors import UserError
from cocodiff.demo_model.vae import LappedTransformVAE
from cocodiff.engine.engine import parallelize
from cocodiff.models.decoding import TiledVAE, share_tiles, share_vae

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


def with_small_tiles(vae: Any) -> Any:
    """With tiles of 8 latent pixels a side, each of which begins 6 after the last one."""
    if hasattr(vae, "tile_latent_min_size"):
        vae.tile_latent_min_size, vae.tile_sample_min_size = 8, 16
    else:
        vae.spatial_compression_ratio = 2
        vae.enable_tiling(16, 16, 12, 12)
        vae.use_tiling = False
    return vae


def random_vae(name: str) -> Any:
    torch.manual_seed(1)
    if name == "qwen":
        return with_small_tiles(qwen_pipeline().vae)
    return with_small_tiles(image_vae(4) if name == "sd3" else flux2_pipeline().vae)


# Latents' rows and columns: smaller than a tile, one tile, tiles that are filled and that are not, one row of tiles
SIDES = ((5, 7), (8, 8), (14, 20), (11, 27), (4, 33))


@pytest.mark.sample(4)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["sd3", "flux2", "qwen"])
def test_tiles_of_all_ranks_are_one_process_with_tiling(name, size):
    vae = random_vae(name)
    frames = (1,) if name == "qwen" else ()
    generator = torch.Generator().manual_seed(0)
    latents = [torch.randn(2, 4, *frames, *sides, generator=generator) for sides in SIDES]
    image = torch.rand(1, 3, *frames, 26, 40, generator=generator)

    def results(vae: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            images = [vae.decode(z).sample for z in latents] + [vae.decode(latents[2], return_dict=False)[0]]
            vae.enable_slicing()
            return [*images, vae.decode(latents[2]).sample, vae.encode(image).latent_dist.mode()]

    def with_count(vae: Any) -> tuple[list[torch.Tensor], int]:
        decoded: list[int] = []
        vae.decoder.register_forward_pre_hook(lambda *_: decoded.append(1))
        return results(vae), len(decoded)

    plain = copy.deepcopy(vae)
    plain.use_tiling = True
    expected, tiles = with_count(plain)

    def work(transport: Any) -> tuple[list[torch.Tensor], int]:
        own = copy.deepcopy(vae)
        undo = [*share_vae(own, "tiled", transport)]
        found = with_count(own)
        for take_off in undo:
            take_off()
        assert not own.use_tiling and not {"encode", "decode"} & vars(own).keys()
        return found

    of_ranks = run_ranks(size, work)
    for found, _ in of_ranks:
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert sum(count for _, count in of_ranks) == tiles, "every tile is decoded by one rank"


def test_tiles_are_dealt_evenly():
    assert share_tiles([64, 64, 32, 64, 64, 32, 32, 32, 16], 3) == [[0, 4, 8], [1, 2, 6], [3, 5, 7]]
    assert share_tiles([5], 3) == [[0], [], []]


def test_a_pipeline_is_restored_in_tiles():
    pipe, arguments = inpainting("flux")
    with_small_tiles(pipe.vae)
    alone, shared = (on_ranks(size, pipe, run=restoring(arguments), vae="tiled") for size in (1, 3))
    pipe.vae.enable_tiling()
    plain = restored(pipe, arguments)
    check_alike(alone, [plain], 0)
    check_alike(shared, [plain])


def test_what_has_no_tiles_is_refused_and_stays_as_it_was():
    pipe, _ = inpainting("flux")
    pipe.vae = LappedTransformVAE()
    before = state_of(pipe)

    def work(transport: Any) -> None:
        with pytest.raises(UserError, match="a LappedTransformVAE does not decode in tiles; choose vae one or all"):
            parallelize(pipe, transport=transport, vae="tiled").__enter__()
        assert state_of(pipe) == before
        with pytest.raises(UserError, match="3 frames; only images are decoded in tiles"):
            TiledVAE(random_vae("qwen"), transport).decode(torch.zeros(1, 4, 3, 8, 8))

    run_ranks(1, work)
