"""Latte on several ranks: hidden states are transposed between frames and places, and no attention is split."""

import copy
import json
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from attention.byte_formulas import Formulas
from cocodiff_bench import latte as bench
from cocodiff_bench.common import of_benchmarks
from covering import all_but, covering
from diffusers import LatteTransformer3DModel
from worlds import topology_of

from cocodiff import verify
from cocodiff.comm.loopback import run_ranks
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.engine.engine import parallelize
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.jobs.options import parse, with_settings
from cocodiff.kernels.residual import coded_width
from cocodiff.planner import automatic
from cocodiff.topology.layout import Layout, Segment, ShardedSegment
from cocodiff.topology.routes.chunks import Piece, Side, pieces

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

EXCHANGES = ("flat", "tapa", "split")
WIDTH = 32


def latte(frames: int = 5, side: int = 6, layers: int = 2) -> LatteTransformer3DModel:
    """Every part that Latte-1 has, of few channels."""
    torch.manual_seed(0)
    return LatteTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=WIDTH // 4,
        in_channels=4,
        out_channels=8,
        num_layers=layers,
        cross_attention_dim=WIDTH,
        attention_bias=True,
        sample_size=side,
        patch_size=2,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        norm_eps=1e-6,
        caption_channels=24,
        video_length=frames,
    ).eval()


def inputs(
    batch: int = 2, frames: int = 5, side: int = 6, dtype: torch.dtype = torch.float32, **more: Any
) -> dict[str, Any]:
    """5 frames and 9 places unless others are wanted: neither divides by most numbers of ranks."""
    noise = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(batch, 4, frames, side, side, generator=noise).to(dtype),
        "timestep": torch.tensor([500] * batch),
        "encoder_hidden_states": torch.randn(batch, 7, 24, generator=noise).to(dtype),
    } | more


def output_of(model: Any, call: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**call).sample


def on_ranks(size: int, model: Any, *calls: dict[str, Any], preset: str = "tapa", **settings: Any) -> list[Any]:
    """Of every rank the outputs of some calls, one after the other, and the bytes that all ranks sent."""

    def work(transport: Any) -> tuple[list[torch.Tensor], dict[str, int]]:
        own = copy.deepcopy(model)
        with parallelize(own, preset, transport=transport, **settings) as engine:
            outputs = [output_of(own, call) for call in calls]
        return outputs, engine.bytes()

    return run_ranks(size, work)


def check_equals_one_process(size: int, shape: tuple[int, int], dtype: torch.dtype, batch: int, *tried: Any) -> None:
    """The error is at most twice that of one process, against the same weights in float64, plus rounding."""
    model = latte(*shape)
    truth = output_of(copy.deepcopy(model).double(), inputs(batch, *shape, torch.float64))
    model, call = model.to(dtype), inputs(batch, *shape, dtype)
    plain = output_of(model, call)
    allowed = 2 * (plain - truth).abs().max() + torch.finfo(dtype).eps * truth.abs().max()
    for exchange, chunks in tried:
        (first,), *others = (of for of, _ in on_ranks(size, model, call, preset=exchange, chunks=chunks))
        assert all(torch.equal(own, first) for (own,) in others)
        assert (first - truth).abs().max() <= allowed, (exchange, chunks)
        if chunks == 1:  # no sum is another one than in one process, but where a library goes by the rows of a product
            assert (first - plain).abs().max() <= 4 * torch.finfo(dtype).eps * plain.abs().max()


TYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("size", "dtype", "batch"), covering((1, 2, 3, 4), TYPES, (1, 2)))
def test_equals_one_process(size, dtype, batch):
    check_equals_one_process(size, (5, 6), dtype, batch, *zip(EXCHANGES, (1, 2, 4), strict=True))


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_equals_one_process_in_more_slices_than_all_have_frames(exchange):
    check_equals_one_process(3, (7, 8), torch.float32, 2, (exchange, 1), (exchange, 5))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("size", "dtype"), all_but([], (2, 4, 12), TYPES))
def test_equals_one_process_with_every_exchange_and_slicing(size, dtype):
    check_equals_one_process(size, (13, 12), dtype, 2, *product(EXCHANGES, (1, 2, 4, "auto")))


def divided(name: str, shares: tuple[int, ...]) -> ShardedSegment:
    return ShardedSegment(Segment(name, sum(shares)), shares)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("machine", "size", "frames", "side"), [("local", 3, 5, 6), ("aurora", 12, 17, 8)])
def test_bytes_are_those_of_the_closed_formula(exchange, machine, size, frames, side):
    """Each pair of blocks sends hidden states from frames to places and back, in slices or not."""
    topology, layers, batch = topology_of(machine, size), 2, 2
    shares = Segment("frames", frames).shares(topology)
    places = Segment("places", (side // 2) ** 2, extras_from="back").shares(topology)
    formulas = Formulas(topology, Layout((divided("frames", shares),), places))
    expected: Counter[str] = Counter()
    for rank, way in product(range(size), ("forward", "back")):
        expected.update(formulas.sent(exchange, way, rank, layers * batch * WIDTH * 4))
    for chunks in (1, 2):
        model, call = latte(frames, side, layers), inputs(batch, frames, side)
        of_ranks = on_ranks(size, model, call, preset=exchange, machine=machine, chunks=chunks)
        assert all(sent == dict(expected) for _, sent in of_ranks)


def test_half_the_bytes_of_ulysses():
    """Whose ranks have some places of all frames, and exchange q, k, v and the output of spatial attention."""
    model, call = latte(4, 8), inputs(2, 4, 8)
    plain = output_of(model, call)

    def work(transport: Any) -> dict[str, int]:
        totals = {}
        for way in ("ulysses", "transposed"):
            with bench.engine_of(model, Config.preset("flat"), transport, way) as engine:
                torch.testing.assert_close(output_of(engine.model, call), plain)
            totals[way] = sum(engine.bytes().values())
        return totals

    totals = run_ranks(4, work)[0]
    assert totals["ulysses"] == 2 * totals["transposed"] > 0


def test_the_benchmark_measures_all_ways(tmp_path, monkeypatch):
    words = ["--frames", "4", "--side", "4", "--heads", "2", "--head_dim", "8", "--repeats", "1", "--slices", "2"]
    words += ["--out", str(tmp_path / "bench"), "--exchanges", "flat", "--waits", "0.01", "--ways", *bench.WAYS]
    values = parse("bench latte", "", with_settings(bench.OPTIONS, of_benchmarks), words)
    bench.check(values, 2)
    made = bench.random_latte(values)  # once: ranks that are threads share torch's seed
    monkeypatch.setattr(bench, "random_latte", lambda _: copy.deepcopy(made))
    run_ranks(2, lambda transport: bench.measure(values, OutputFolder(str(tmp_path / "bench"), False), transport))
    rows = json.loads((tmp_path / "bench" / "bench.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == [f"flat {way}" for way in bench.WAYS]
    assert all(row["median_s"] >= 0.01 and sum(row["bytes"].values()) > 0 for row in rows)
    with pytest.raises(UserError, match="start at least 2"):
        bench.check(values, 1)


def test_calls_of_changing_size_and_without_temporal_attention():
    model = latte()
    calls = [inputs(), inputs(1, side=8), inputs(enable_temporal_attentions=False), inputs()]
    model.temp_pos_embed = model.temp_pos_embed.clone()
    before = {name: (set(vars(m)), len(m._forward_hooks)) for name, m in model.named_modules()}
    expected = [output_of(model, call) for call in calls]

    def work(transport: Any) -> list[torch.Tensor]:
        own = copy.deepcopy(model)
        with parallelize(own, "split", transport=transport, chunks=2):
            found = [output_of(own, call) for call in calls]
        assert {name: (set(vars(m)), len(m._forward_hooks)) for name, m in own.named_modules()} == before
        return found

    for found in run_ranks(2, work):
        for own, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(own, wanted)


@pytest.mark.parametrize(
    ("size", "more", "words"),
    [
        (2, {"preset": "cocodiff"}, "selection v_major is about attention's exchange, and LatteTransformer3DModel has"),
        (2, {"codec": "auto"}, "none: its hidden states are transposed; choose codec none"),
        (2, {"codec": "int4", "chunks": 2}, "chunks 2: .* goes whole with codec int4; choose chunks 1, or codec none"),
        (2, {"arrival": "displaced"}, "choose arrival now"),
        (2, {"step_cache": "first_block"}, "choose step_cache none"),
        (2, {"compile": True}, "choose compile False"),
        (2, {"ring": 2}, "ring 2: attention of LatteTransformer3DModel is not split between ranks; choose ring 1"),
        (6, {}, "6 ranks share 5 frames of 9 places, and each needs one of both: use at most 5 ranks"),
    ],
)
def test_what_has_no_form_is_refused_in_one_line(size, more, words):
    with pytest.raises(UserError, match=words):
        on_ranks(size, latte(), inputs(), **more)


def test_masks_of_the_text_and_caches_of_diffusers_are_refused():
    from diffusers import PyramidAttentionBroadcastConfig

    mask = torch.ones(2, 7, dtype=torch.bool)
    with pytest.raises(UserError, match="run without it, as LattePipeline does"):
        on_ranks(2, latte(), inputs(encoder_attention_mask=mask))

    def work(transport: Any) -> None:
        model = latte()
        model.enable_cache(PyramidAttentionBroadcastConfig(2, current_timestep_callback=lambda: 500))
        with parallelize(model, transport=transport):
            pass

    with pytest.raises(
        UserError, match=r"the cache hook \w+ takes blocks' outputs .* transformer\.disable_cache\(\) first"
    ):
        run_ranks(2, work)


def test_verify_knows_it_and_plan_says_that_it_does_not(tmp_path):
    found = verify(latte(), inputs(), ranks=[2])
    outcomes = {trial.setting: trial.outcome for trial in found.trials}
    refused = ("tapa, ring 2", "tapa, cached", "tapa, compiled")
    assert {name: outcomes.pop(name) for name in refused} == dict.fromkeys(refused, "refused")
    assert set(outcomes) == {"flat", "tapa", "v_first", "split", "split, chunks 2", "lossless"}
    assert set(outcomes.values()) == {"exact"} and found.ok
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "LatteTransformer3DModel"}))
    known = "the memory of a LatteTransformer3DModel is not known; known are SD3Tr"
    with pytest.raises(UserError, match=f"{known}.*; plan counts what attention exchanges, and its ranks transpose"):
        load_shape(str(tmp_path))


def steps_of(count: int, shape: tuple[int, int], dtype: torch.dtype, batch: int = 2) -> list[dict[str, Any]]:
    """Calls of a run of so many steps, each a little further."""
    calls = [inputs(batch, *shape, dtype) for _ in range(count)]
    for number, call in enumerate(calls):
        call["hidden_states"] = (call["hidden_states"] * (1 - 0.02 * number)).to(dtype)
        call["timestep"] = call["timestep"] - 10 * number
    return calls


@pytest.mark.parametrize(("size", "exchange"), [(2, "flat"), (3, "tapa"), (4, "split")])
def test_lossless_transposes_have_the_same_bits_in_fewer_bytes(size, exchange):
    model, calls = latte(9, 8).to(torch.bfloat16), steps_of(4, (9, 8), torch.bfloat16)
    whole = on_ranks(size, model, *calls, preset=exchange, chunks=1, steps=4)
    coded = on_ranks(size, model, *calls, preset=exchange, codec="lossless", steps=4)
    for (outputs, _), (expected, _) in zip(coded, whole, strict=True):
        assert all(torch.equal(*pair) for pair in zip(outputs, expected, strict=True))
    sent, of_whole = (sum(of_ranks[0][1].values()) for of_ranks in (coded, whole))
    assert 0.25 * of_whole < sent < 0.9 * of_whole  # the first of four calls is whole


@pytest.mark.parametrize(("codec", "first"), [("int8", None), ("int2", 8)])
def test_the_residual_codec_sends_transposes_in_the_bytes_of_its_codes(codec, first):
    """first: bits of the first call, None where that is whole."""
    size, shape, layers, batch = 3, (9, 8), 2, 2
    topology, bits = topology_of("local", size), int(codec.removeprefix("int"))
    layout = Layout((divided("frames", (3, 3, 3)),), Segment("places", 16, extras_from="back").shares(topology))
    formulas, expected = Formulas(topology, layout), Counter()
    widths = [4 * WIDTH if first is None else coded_width(WIDTH, first), *[coded_width(WIDTH, bits)] * 2]
    for rank, way, width in product(range(size), ("forward", "back"), widths):
        expected.update(formulas.sent("split", way, rank, layers * batch * width))
    calls = steps_of(3, shape, torch.float32)
    of_ranks = on_ranks(size, latte(*shape), *calls, preset="split", codec=codec, fine_steps=0, steps=3)
    assert all(sent == dict(expected) for _, sent in of_ranks)
    for outputs, *plain in zip(*(outputs for outputs, _ in of_ranks), strict=True):
        assert all(torch.equal(other, outputs) for other in plain)
    exact = [output_of(latte(*shape), call) for call in calls]
    error = max(float((own - of).abs().max() / of.abs().max()) for own, of in zip(of_ranks[0][0], exact, strict=True))
    assert 1e-6 < error < (0.02 if bits == 8 else 0.5)


@pytest.mark.parametrize("codec", ["lossless", "int8"])
def test_what_coded_transposes_keep_is_what_room_is_looked_for(codec, monkeypatch):
    needs = []
    monkeypatch.setattr(automatic, "free_memory", lambda *_: 2**40)
    monkeypatch.setattr(automatic, "check_fits", lambda need, *_: needs.append(need.total))
    model, calls = latte(4, 8).to(torch.bfloat16), steps_of(3, (4, 8), torch.bfloat16)

    def work(transport: Any) -> int:
        own = copy.deepcopy(model)
        with parallelize(own, "flat", transport=transport, codec=codec, steps=3) as engine:
            for call in calls:
                output_of(own, call)
            return engine.sequence.strategy.codec.bytes_held()

    held = run_ranks(2, work)
    assert sorted(needs) == sorted(held) and min(held) > 0


def pipeline(model: Any) -> Any:
    from diffusers import AutoencoderKL, DDIMScheduler, LattePipeline

    vae = AutoencoderKL(block_out_channels=(4,), latent_channels=4, norm_num_groups=2, sample_size=8).eval()
    pipe = LattePipeline(None, None, vae, model, DDIMScheduler(clip_sample=False))
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize(("size", "guidance"), [(3, 1), (2, 2), (4, 2), (4, "auto")])
def test_a_pipeline_with_guidance_in_one_batch_or_in_two_parts(size, guidance):
    """One rank of each part, too: it has all frames and places."""
    model, noise = latte(side=8), torch.Generator().manual_seed(2)
    text = {"prompt_embeds": torch.randn(1, 7, 24, generator=noise), "prompt": None, "negative_prompt": None}
    text |= {"negative_prompt_embeds": torch.randn(1, 7, 24, generator=noise)}
    call = text | {"height": 8, "width": 8, "video_length": 5, "num_inference_steps": 3, "guidance_scale": 4.0}

    def video_of(pipe: Any) -> torch.Tensor:
        latents = torch.randn(1, 4, 5, 8, 8, generator=torch.Generator().manual_seed(3))
        return pipe(**call, latents=latents, output_type="latent", mask_feature=False).frames

    whole = pipeline(model)
    expected = video_of(whole)

    def work(transport: Any) -> tuple[torch.Tensor, int]:
        pipe = copy.deepcopy(whole)
        with parallelize(pipe, transport=transport, guidance_parallel=guidance, chunks=2) as engine:
            return video_of(pipe), sum(engine.bytes("guidance").values())

    of_ranks = run_ranks(size, work)
    assert all(torch.equal(video, of_ranks[0][0]) and (sent > 0) == (guidance != 1) for video, sent in of_ranks)
    torch.testing.assert_close(of_ranks[0][0], expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


# Routes and memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "taken", "early"), [*product((1, 2, 4), (1, 3), (0, 1, 2, 3))])
def test_the_pieces_of_a_transpose_are_the_whole_of_it_once(given, taken, early):
    early, sent = min(early, taken), list(pieces(given, taken, min(early, taken)))
    assert len(sent) == given
    pairs = Counter(pair for posted in sent for piece in posted for pair in product(piece.given, piece.taken))
    assert pairs == Counter(product(range(given), range(taken)))
    for number, posted in enumerate(sent):
        assert all(piece.given.stop <= number + 1 for piece in posted), "nothing leaves before it is computed"
    needed = [max(piece.taken) for piece in sent[-1]]
    assert needed == sorted(needed), "what is needed first comes first"
    assert (Piece(range(1), range(early)) in sent[0]) == (early > 0 and (given > 1 or early == 1))


def test_sides_that_nothing_divides():
    side = Side.cut((3, 2, 4), 8)
    assert side.cuts == 2 and side.sizes(range(1)) == (2, 1, 2) and side.sizes(range(2)) == (3, 2, 4)
    assert side.own(2, range(1, 2)) == slice(2, 4) and side.whole(2, range(1, 2)) == slice(7, 9)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("size", "exchange", "chunks", "codec"),
    [(2, "flat", 1, "none"), (3, "tapa", 2, "none"), (4, "split", 2, "none"), (3, "split", 1, "int8")],
)
def test_no_access_to_memory_without_an_order(simulated, size, exchange, chunks, codec):
    from simulated_device.ranks import run_ranks as on_devices

    model = latte(9, 8).requires_grad_(False)
    call = inputs(2, 9, 8)
    model_on_cpu = output_of(model, call)
    near = {} if codec == "none" else {"rtol": 0, "atol": 0.02 * float(model_on_cpu.abs().max())}

    def work(transport: Any) -> torch.Tensor:
        own = copy.deepcopy(model).to(transport.device)
        placed = {name: x.to(transport.device) for name, x in call.items()}
        settings = {"kernels": "torch", "chunks": chunks, "codec": codec}
        with parallelize(own, exchange, transport=transport, **settings):
            for before in () if codec == "none" else (2, 1):
                output_of(own, placed | {"timestep": placed["timestep"] + before})
            return output_of(own, placed).cpu()

    with simulated.devices(size, strict=True) as found:
        of_ranks = on_devices(size, work)
    assert found.reports == []
    for own in of_ranks:
        torch.testing.assert_close(own, model_on_cpu, **near)
