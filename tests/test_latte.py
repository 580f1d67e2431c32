"""Latte on several ranks: hidden states are transposed between frames and places, and no attention is split."""

import copy
import json
import re
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from attention.byte_formulas import Formulas
from cocodiff_bench import latte as bench
from cocodiff_bench.common import of_benchmarks
from diffusers import LatteTransformer3DModel, PyramidAttentionBroadcastConfig
from on_ranks import Call, check_alike, check_exact, on_ranks, outputs_of, refused
from planned_models import cast, noise
from test_simulated_models import on_devices
from tiny_models import small
from value_tables import beside
from worlds import topology_of

from cocodiff import verify
from cocodiff.comm.loopback import run_ranks
from cocodiff.config.errors import UserError
from cocodiff.engine.engine import parallelize
from cocodiff.jobs.folder import OutputFolder
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.jobs.options import parse, with_settings
from cocodiff.kernels.residual import coded_width
from cocodiff.topology.layout import Layout, Segment, ShardedSegment
from cocodiff.topology.routes.chunks import TransposePiece, pieces

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

EXCHANGES = ("flat", "tapa", "split")
WIDTH = 32


def latte(frames: int = 5, side: int = 6, layers: int = 2) -> LatteTransformer3DModel:
    """Every part that Latte-1 has, of few channels."""
    torch.manual_seed(0)
    settings = {"num_attention_heads": 4, "cross_attention_dim": WIDTH, "caption_channels": 24, "num_layers": layers}
    settings |= {"out_channels": 8, "patch_size": 2, "video_length": frames, "sample_size": side}
    settings |= {"attention_bias": True, "activation_fn": "gelu-approximate", "num_embeds_ada_norm": 1000}
    settings |= {"norm_type": "ada_norm_single", "norm_elementwise_affine": False, "norm_eps": 1e-6}
    return small("LatteTransformer3DModel", settings).eval()


def inputs(batch: int = 2, frames: int = 5, side: int = 6, **more: Any) -> Call:
    """5 frames and 9 places unless others are wanted: neither divides by most numbers of ranks."""
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": noise(batch, 4, frames, side, side)(generator=generator),
        "timestep": torch.tensor([500] * batch),
        "encoder_hidden_states": noise(batch, 7, 24)(generator=generator),
    } | more


def modes(*chunks: int | str) -> dict[str, Call]:
    return {f"{one}, {n}": {"preset": one, "chunks": n} for one, n in product(EXCHANGES, chunks)}


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("size", "frames", "side", "batch", "chunks"),
    [
        (1, 5, 6, 2, (1, 2)),
        (2, 5, 6, 1, (1, 4)),
        (3, 3, 8, 2, (2, 5)),
        (4, 7, 6, 2, (1, 2)),
        *(pytest.param(n, 13, 12, 2, (1, 2, 4, "auto"), marks=pytest.mark.exhaustive) for n in (2, 4, 12)),
    ],
)
def test_equals_one_process(size, frames, side, batch, chunks, dtype):
    """In more slices than all ranks have frames too, and in calls of changing size; without temporal attention each
    rank computes all."""
    calls = [
        inputs(batch, frames, side),
        inputs(1, frames, 8),
        inputs(batch, frames, side, enable_temporal_attentions=False),
    ]
    model = latte(frames, side).to(dtype)
    model.temp_pos_embed = model.temp_pos_embed.clone()
    check_exact(size, model, [cast(call, dtype) for call in calls], modes(*chunks))


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
        for ran in on_ranks(size, model, call, preset=exchange, machine=machine, chunks=chunks):
            assert ran.engine.bytes() == dict(expected)


def test_the_benchmark_measures_all_ways(tmp_path, monkeypatch, capsys):
    """Ulysses' ranks have some places of all frames, and exchange q, k, v and the output of spatial attention: twice
    the bytes of transposes."""
    words = ["--frames", "4", "--side", "4", "--heads", "2", "--head_dim", "8", "--repeats", "1", "--slices", "2"]
    words += ["--out", str(tmp_path / "bench"), "--exchanges", "flat", "--waits", "0.1", "--ways", *bench.WAYS]
    values = parse("bench latte", "", with_settings(bench.OPTIONS, of_benchmarks), words)
    bench.check(values, 2)
    made = bench.random_latte(values)  # once: ranks that are threads share torch's seed
    monkeypatch.setattr(bench, "random_latte", lambda _: copy.deepcopy(made))
    run_ranks(2, lambda transport: bench.measure(values, OutputFolder(str(tmp_path / "bench"), False), transport))
    rows = json.loads((tmp_path / "bench" / "bench.json").read_text())["rows"]
    assert [row["variant"] for row in rows] == [f"flat {way}" for way in bench.WAYS]
    assert all(row["median_s"] >= 0.1 for row in rows)
    sent = [sum(row["bytes"].values()) for row in rows]
    assert sent[0] == 2 * sent[1] > 0 and len({*sent[1:]}) == 1
    (difference,) = re.findall(r"difference to the first: (\S+)", capsys.readouterr().out)
    assert float(difference) < 1e-5
    with pytest.raises(UserError, match=r"bench latte .*--ranks 2"):
        bench.check(values, 1)


@pytest.mark.parametrize(("size", "more", "words"), beside(__file__))
def test_what_has_no_form_is_refused_in_one_line(size, more, words):
    refused(words, latte(), inputs(), size=size, **more)


def test_a_call_that_fails_leaves_nothing_for_the_next():
    """Which has no temporal attention, and so nothing to transpose."""
    model, call = latte(), inputs(enable_temporal_attentions=False)

    def run(own: Any, engine: Any) -> list[torch.Tensor]:
        hook = own.temporal_transformer_blocks[0].ff.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            own(**inputs())
        hook.remove()
        engine.new_run()
        return outputs_of(own, call, inputs())

    check_alike(on_ranks(2, model, run=run), outputs_of(model, call, inputs()))


def test_masks_of_the_text_and_caches_of_diffusers_are_refused():
    mask = torch.ones(2, 7, dtype=torch.bool)
    refused("^encoder_attention_mask is for the rows of all frames", latte(), inputs(encoder_attention_mask=mask))
    model = latte()
    model.enable_cache(PyramidAttentionBroadcastConfig(2, current_timestep_callback=lambda: 500))
    refused(r"the cache hook \w+ takes blocks' outputs .*transformer\.disable_cache\(\)", model)


def test_verify_knows_it_and_plan_says_that_it_does_not(tmp_path):
    found = verify(latte(), inputs(), ranks=[2])
    outcomes = {trial.setting: trial.outcome for trial in found.trials}
    refused = ("tapa, ring 2", "tapa, cached", "tapa, compiled")
    assert {name: outcomes.pop(name) for name in refused} == dict.fromkeys(refused, "refused")
    assert set(outcomes) == {"flat", "tapa", "v_first", "split", "split, chunks 2", "lossless"}
    assert set(outcomes.values()) == {"exact"} and found.ok
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "LatteTransformer3DModel"}))
    known = r"the memory of a LatteTransformer3DModel is not known.*SD3Tr.*engine\.bytes\(\)"
    with pytest.raises(UserError, match=known):
        load_shape(str(tmp_path))


def steps_of(count: int, shape: tuple[int, int], dtype: torch.dtype) -> list[Call]:
    """Calls of a run of so many steps, each a little further."""
    calls = [cast(inputs(2, *shape), dtype) for _ in range(count)]
    for number, call in enumerate(calls):
        call["hidden_states"] = (call["hidden_states"] * (1 - 0.02 * number)).to(dtype)
        call["timestep"] = call["timestep"] - 10 * number
    return calls


@pytest.mark.parametrize(("size", "exchange"), [(2, "flat"), (3, "tapa"), (4, "split")])
def test_lossless_transposes_have_the_same_bits_in_fewer_bytes(size, exchange):
    model, calls = latte(9, 8).to(torch.bfloat16), steps_of(4, (9, 8), torch.bfloat16)
    (whole, *_), coded = (
        on_ranks(size, model, *calls, preset=exchange, codec=codec, steps=4, chunks=chunks)
        for codec, chunks in (("none", 1), ("lossless", "auto"))
    )
    first = check_alike(coded, whole.found, atol=0.0)
    assert 0.25 * whole.sent() < first.sent() < 0.9 * whole.sent()  # the first of four calls is whole


@pytest.mark.parametrize(("codec", "first"), [("int8", None), ("int2", 8)])
def test_the_residual_codec_sends_transposes_in_the_bytes_of_its_codes(codec, first):
    """first: bits of the first call, None where that is whole."""
    size, shape, bits = 3, (9, 8), int(codec.removeprefix("int"))
    model, calls = latte(*shape), steps_of(3, shape, torch.float32)
    (whole, *_), of_ranks = (
        on_ranks(size, model, *calls, preset="split", codec=one, fine_steps=0, steps=3) for one in ("none", codec)
    )
    found = check_alike(of_ranks, of_ranks[0].found).found
    widths = [4 * WIDTH if first is None else coded_width(WIDTH, first), *[coded_width(WIDTH, bits)] * 2]
    assert all(ran.sent() * 3 * 4 * WIDTH == whole.sent() * sum(widths) for ran in of_ranks)
    exact = outputs_of(model, *calls)
    error = max(float((own - of).abs().max() / of.abs().max()) for own, of in zip(found, exact, strict=True))
    assert 1e-6 < error < (0.02 if bits == 8 else 0.5)


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
    assert (TransposePiece(range(1), range(early)) in sent[0]) == (early > 0 and (given > 1 or early == 1))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("size", "exchange", "chunks", "codec"),
    [(2, "flat", 1, "none"), (3, "tapa", 2, "none"), (4, "split", 2, "none"), (3, "split", 1, "int8")],
)
def test_no_access_to_memory_without_an_order(simulated, size, exchange, chunks, codec):
    model = latte(9, 8).requires_grad_(False)
    call = inputs(2, 9, 8)
    (model_on_cpu,) = outputs_of(model, call)
    near = {} if codec == "none" else {"rtol": 0, "atol": 0.02 * float(model_on_cpu.abs().max())}

    def work(transport: Any) -> torch.Tensor:
        own = copy.deepcopy(model).to(transport.device)
        placed = {name: x.to(transport.device) for name, x in call.items()}
        settings = {"kernels": "torch", "chunks": chunks, "codec": codec}
        with parallelize(own, exchange, transport=transport, **settings):
            for before in () if codec == "none" else (2, 1):
                outputs_of(own, placed | {"timestep": placed["timestep"] + before})
            return outputs_of(own, placed)[0].cpu()

    for own in on_devices(simulated, size, work, late=0.0):
        torch.testing.assert_close(own, model_on_cpu, **near)
