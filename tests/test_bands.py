"""Decoding and encoding on all ranks: in bands one process's images and latents, up to rounding; in tiles, bit for bit
what the VAE's own tiling gives in one process."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from covering import covering
from diffusers.models.attention_processor import AttnProcessor
from launching import TESTS, assert_succeeded
from on_ranks import check_alike, check_near, on_ranks, state_of
from test_engine_pipelines import inpainting, restored, restoring
from tiny_pipelines import flux2_pipeline, image_vae, image_vae_shape, qwen_pipeline
from torch import Tensor, nn
from warm_ranks import warm_mpiexec

from cocodiff.comm.loopback import run_ranks
from cocodiff.config.errors import PeerLost, UserError
from cocodiff.demo_model.vae import LappedTransformVAE
from cocodiff.engine.decoding import ShardedVAE, TiledVAE, share_tiles, share_vae
from cocodiff.engine.engine import parallelize

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

VIDEO = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1, "temperal_downsample": [True, False]}
RESIDUAL = {"is_residual": True, "patch_size": 2, "in_channels": 12, "out_channels": 12}
KL = image_vae_shape(4, (4, 8, 8)) | {"mid_block_add_attention": True}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "kl": ("AutoencoderKL", KL),
    "flux2": ("AutoencoderKLFlux2", KL),
    "qwen": ("AutoencoderKLQwenImage", VIDEO),
    "qwen2.1": ("AutoencoderKLQwenImage21", VIDEO | {"in_channels": 3, "out_channels": 3}),
    "wan2.1": ("AutoencoderKLWan", VIDEO),
    "wan2.2": ("AutoencoderKLWan", VIDEO | RESIDUAL),
}
# Latent frames, rows and columns: rows that are divided evenly and unevenly, columns, fewer rows than ranks, one row
SHAPES = ((1, 8, 5), (2, 7, 3), (3, 5, 6), (4, 3, 2), (5, 1, 1))


def random_vae(kind: str) -> Any:
    """With weights that differ from channel to channel, norms' too, as trained ones do."""
    name, settings = KINDS[kind]
    torch.manual_seed(1)
    vae = getattr(diffusers, name)(**settings).eval()
    for parameter in vae.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return vae


def random_latents(kind: str, frames: int, rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(frames)
    of_frames = () if kind in ("kl", "flux2") else (1,) if kind == "qwen2.1" else (frames,)
    return torch.randn(2, 4, *of_frames, rows, columns, generator=generator)


def both_ways(vae: Any, z: Tensor) -> tuple[Tensor, Tensor]:
    """What is decoded of latents, and what is encoded of an image with rows and columns that are no whole latents."""
    generator = torch.Generator().manual_seed(0)
    dtype, factor = z.dtype, 8 if getattr(vae.config, "is_residual", False) else 4
    rest = 0 if factor == 8 else 3
    frames = z.shape[2:-2] and (4 * z.shape[2] - 3,)
    image = torch.randn(1, 3, *frames, factor * z.shape[-2] + rest, factor * z.shape[-1] + rest, generator=generator)
    with torch.no_grad():
        return vae.decode(z).sample, vae.encode(image.to(z.device, dtype)).latent_dist.parameters


def shared(size: int, vae: Any, way: str, call: Callable[[Any], Any]) -> list[Any]:
    """What `call` finds on each rank of a VAE that ranks share in a way, and that stays as it is."""

    def work(transport: Any) -> Any:
        own = copy.deepcopy(vae)
        before = dict(vars(own))
        undo = [*share_vae(own, way, transport)]
        found = call(own)
        for take_off in undo:
            take_off()
        assert vars(own) == before
        return found

    return run_ranks(size, work)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("kind", "size", "dtype"), covering(tuple(KINDS), (1, 2, 3, 4), (torch.float32, torch.bfloat16))
)
def test_bands_of_all_ranks_are_one_process(kind, size, dtype):
    vae = random_vae(kind).to(dtype)
    latents = [random_latents(kind, *shape).to(dtype) for shape in SHAPES]

    def results(own: Any, dtype: torch.dtype = dtype) -> list[Tensor]:
        return [x for z in latents for x in both_ways(own, z.to(dtype))]

    plain, truth = results(vae), results(copy.deepcopy(vae).double(), torch.float64)
    vae.use_tiling = True
    of_ranks = shared(size, vae, "sharded", results)
    check_near(of_ranks, plain, truth)
    assert size > 1 or all(map(torch.equal, of_ranks[0], plain))


def test_pictures_of_some_size_have_one_process_bits():
    """Where convolutions and attention sum in the same order, whatever part of the picture they are given."""
    vae, z = random_vae("qwen"), torch.randn(2, 4, 2, 24, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = vae.decode(z).sample
    for found in run_ranks(3, lambda transport: ShardedVAE(copy.deepcopy(vae), transport).decode(z).sample):
        assert torch.equal(found, plain)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "frames", "smaller"),
    [
        ("flux.1", 1, '{"block_out_channels": [8, 8, 8, 8], "norm_num_groups": 4}'),
        ("wan2.2", 5, '{"base_dim": 4, "num_res_blocks": 1}'),
    ],
)
def test_ranks_of_an_mpi_job_decode_in_bands(name, frames, smaller):
    done = warm_mpiexec(3, TESTS / "bands_rank.py", name, str(frames), "40", "56", smaller)
    assert_succeeded(done)
    assert "one on 1: " in done.stdout and "sharded on 3: " in done.stdout


@pytest.mark.parametrize("kind", ["qwen", "kl"])
def test_a_convolution_takes_one_exchange_with_each_neighbour(kind):
    vae, z = random_vae(kind), random_latents(kind, 2, 8, 8)
    frames = 1 if kind == "kl" else 2
    layers = list(vae.decoder.modules())
    convolutions = sum(getattr(layer, "kernel_size", ())[-2:] == (3, 3) for layer in layers)
    gathers = 1 + sum(isinstance(layer, nn.GroupNorm) for layer in layers)

    def work(transport: Any) -> Counter[tuple[str, int, int]]:
        """Messages by what they are for, by who sends them and to whom."""
        messages, at = Counter[tuple[str, int, int]](), ["set-up"]
        send_recv = transport.world.send_recv

        def counted(sends: list[Any], recvs: list[Any]) -> Any:
            messages.update((at[0], transport.rank, peer) for _, peer in sends)
            return send_recv(sends, recvs)

        transport.health.arrive = lambda name, _: at.__setitem__(0, name)
        transport.world.send_recv = counted
        ShardedVAE(copy.deepcopy(vae), transport).decode(z)
        return messages

    of_ranks = run_ranks(3, work)
    edges, gather = "the exchange of a picture's edges", "a gather of all bands"
    for rank, messages in enumerate(of_ranks):
        for peer in {0, 1, 2} - {rank}:
            assert messages[edges, rank, peer] == (convolutions * frames if abs(rank - peer) == 1 else 0)
            assert messages[gather, rank, peer] == gathers * frames


class Normed(nn.LayerNorm):
    """A norm over columns."""


def put(place: str, layer: Any) -> Any:
    """Changes a VAE: another layer stands in a place of it."""
    path, _, name = place.rpartition(".")
    return lambda vae: setattr(vae.get_submodule(path), name, layer)


class OwnBlock(type(random_vae("qwen").decoder.mid_block)):  # type: ignore[misc]
    """Of a class that is known, but a class of its own."""


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("kl", put("decoder.conv_norm_out", Normed(8)), r"a Normed at decoder\.conv_norm_out"),
        ("kl", put("decoder.conv_in", nn.Conv2d(4, 8, 5, padding=2)), r"kernel_size=\(5, 5\).* at decoder\.conv_in"),
        ("kl", put("decoder.conv_in", nn.Conv2d(4, 8, 3, dilation=2, padding=2)), "dilation=.* at decoder.conv_in"),
        ("kl", put("decoder.conv_in", nn.Conv2d(4, 8, 3, padding=1, padding_mode="reflect")), "padding_mode=reflect"),
        ("kl", lambda vae: vae.set_attn_processor(AttnProcessor()), "attention by a AttnProcessor at encoder.mid"),
        ("kl", lambda vae: vae.decoder.conv_out.compile(), "a Conv2d that is compiled at decoder.conv_out"),
        ("qwen", lambda vae: setattr(vae.decoder.mid_block, "__class__", OwnBlock), "a OwnBlock at decoder.mid_block"),
        ("wan2.1", lambda vae: setattr(vae.decoder.norm_out, "channel_first", False), "with channel_first False"),
        ("wan2.2", put("post_quant_conv", nn.InstanceNorm3d(4)), "a InstanceNorm3d at post_quant_conv"),
        ("demo", str, ""),
        ("tiny", str, ""),
    ],
)
def test_layers_and_vaes_that_are_not_known_are_refused_by_name(kind, change, reason):
    vae = random_vae(kind) if kind in KINDS else {"demo": LappedTransformVAE, "tiny": diffusers.AutoencoderTiny}[kind]()
    change(vae)
    words = f"vae sharded: a {type(vae).__name__} is not known in bands: .*{reason}"
    with pytest.raises(UserError, match=words):
        run_ranks(1, lambda transport: ShardedVAE(vae, transport) and None)


def test_a_rank_that_fails_ends_the_others():
    vae, z = random_vae("qwen"), random_latents("qwen", 2, 8, 4)
    told: list[str] = []

    def work(transport: Any) -> None:
        own = copy.deepcopy(vae)
        if transport.rank == 1:
            own.decoder.up_blocks[0].register_forward_pre_hook(lambda *_: 1 / 0)
        try:
            ShardedVAE(own, transport).decode(z)
        except PeerLost as error:
            told.append(str(error))
            raise

    with pytest.raises(ZeroDivisionError):
        run_ranks(4, work, timeout_s=30.0)
    assert len(told) == 3 and all("failed: ZeroDivisionError" in one for one in told)


@pytest.mark.parametrize("name", ["qwen", "sd3"])
def test_a_pipeline_is_restored_in_bands(name):
    """By all ranks of a replica, whose two halves compute a branch of guidance each while they denoise."""
    pipe, arguments = inpainting(name)

    def work(transport: Any) -> Tensor:
        own = copy.deepcopy(pipe)
        part = transport.part(range(4) if transport.rank < 4 else (4, 5))
        with parallelize(own, transport=part, vae="sharded", guidance_parallel=2):
            return restored(own, arguments)

    images, plain = run_ranks(6, work), restored(pipe, arguments)
    for replica in (images[:4], images[4:]):
        assert all(torch.equal(image, replica[0]) for image in replica)
        torch.testing.assert_close(replica[0], plain, rtol=0, atol=1e-4)


# Tiles ----------------------------------------------------------------------------------------------------------------


def with_small_tiles(vae: Any) -> Any:
    """With tiles of 8 latent pixels a side, each of which begins 6 after the last one."""
    if hasattr(vae, "tile_latent_min_size"):
        vae.tile_latent_min_size, vae.tile_sample_min_size = 8, 16
    else:
        vae.spatial_compression_ratio = 2
        vae.enable_tiling(16, 16, 12, 12)
        vae.use_tiling = False
    return vae


def tiled_vae(name: str) -> Any:
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
    vae = tiled_vae(name)
    frames = (1,) if name == "qwen" else ()
    generator = torch.Generator().manual_seed(0)
    latents = [torch.randn(2, 4, *frames, *sides, generator=generator) for sides in SIDES]
    image = torch.rand(1, 3, *frames, 26, 40, generator=generator)

    def results(vae: Any) -> list[Tensor]:
        with torch.no_grad():
            images = [vae.decode(z).sample for z in latents] + [vae.decode(latents[2], return_dict=False)[0]]
            vae.enable_slicing()
            return [*images, vae.decode(latents[2]).sample, vae.encode(image).latent_dist.mode()]

    def with_count(vae: Any) -> tuple[list[Tensor], int]:
        decoded: list[int] = []
        vae.decoder.register_forward_pre_hook(lambda *_: decoded.append(1))
        found = results(vae)
        vae.disable_slicing()
        return found, len(decoded)

    plain = copy.deepcopy(vae)
    plain.use_tiling = True
    expected, tiles = with_count(plain)
    of_ranks = shared(size, vae, "tiled", with_count)
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
        with pytest.raises(UserError, match="a LappedTransformVAE does not decode in tiles"):
            parallelize(pipe, transport=transport, vae="tiled").__enter__()
        assert state_of(pipe) == before
        with pytest.raises(UserError, match="vae tiled: 3 frames"):
            TiledVAE(tiled_vae("qwen"), transport).decode(torch.zeros(1, 4, 3, 8, 8))

    run_ranks(1, work)
