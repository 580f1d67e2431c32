"""Plans against hand arithmetic and what strategies send, and exchanges that they have never seen."""

from dataclasses import replace

import pytest
import torch
from worlds import topology_of

from cocodiff.attention.strategy import LayerKey, LazyQKV
from cocodiff.comm.loopback import run_ranks
from cocodiff.comm.trace import LINK_CLASSES, Trace
from cocodiff.config.config import Config
from cocodiff.config.machine import Device, Machine, Topology
from cocodiff.config.registry import EXCHANGES
from cocodiff.engine.assemble import AttentionWork, build_strategy, with_codec_chosen
from cocodiff.exchange.codec import StepInfo
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.kernels import Kernels
from cocodiff.kernels.residual import Prediction, Reconstructions
from cocodiff.models.adapter import image_and_text
from cocodiff.planner.calibrate import AllToAll, Constants
from cocodiff.planner.costs import WHOLE, CallKind, state_sizes
from cocodiff.planner.decisions import Decisions, without_seldom
from cocodiff.planner.layers import (
    Case,
    kinds_of,
    kinds_of_steps,
    of_kind,
    over_steps,
    plan_layers,
    plan_step,
    sampled_kinds,
)
from cocodiff.planner.memory import Load, ModelShape, Split, block_parameters
from cocodiff.planner.roofline import cost_of, roofline, seconds, started
from cocodiff.planner.traffic import Latencies
from cocodiff.topology.links import alltoall_bound
from cocodiff.topology.routes.plans import Block, Phase

AURORA = topology_of("aurora", 12)
TIMELESS = Constants().machine(AURORA.machine)  # nominal rates, no latencies
TOY = ModelShape("toy", heads=48, head_dim=64, joint_layers=3, parallel_layers=2, parameters=10**6, text_tokens=24)


def case(preset="tapa", nodes=1, shape=TOY, steps=20, topology=None, **more):
    config = Config.preset(preset)
    load = Load(image_and_text(1008, shape.text_tokens), 1, 2, shape.branches, state_sizes(config))
    return Case(shape, topology or topology_of("aurora", 12 * nodes), config, load, steps, **more)


def planned(of, latencies=None):
    return plan_step(of, latencies or Latencies())


def layers(of, latencies=None):
    """Of the first kind of layers, by kinds of calls."""
    return plan_layers(of, latencies or Latencies())[0][1]


# All-to-alls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_mb", [0.5, 6, 48])
def test_closed_forms_hold_exactly_without_latencies(size_mb):
    """Flat and split reach the bound; TAPA takes 6c at the sibling's rate and 2c at the plane's; one peer at a time 11
    steps, each as long as its slowest message."""
    exchanges = {name: AllToAll(AURORA, name, size_mb) for name in ("flat", "split", "tapa")}
    c = exchanges["flat"].block_bytes
    bound = alltoall_bound(AURORA, c)
    assert exchanges["flat"].seconds(TIMELESS) == pytest.approx(bound, rel=1e-6)
    assert exchanges["split"].seconds(TIMELESS) == pytest.approx(bound, rel=1e-6)
    assert exchanges["tapa"].seconds(TIMELESS) == pytest.approx(6 * c / 134e9 + 2 * c / 11.5e9, rel=1e-6)


def test_two_nodes_are_held_by_their_fullest_nic():
    topology = topology_of("aurora", 24)
    flat = AllToAll(topology, "flat", 12)
    assert flat.seconds(TIMELESS) == pytest.approx(2 * 12 * flat.block_bytes / 25e9, rel=1e-6)
    assert flat.seconds(TIMELESS) >= alltoall_bound(topology, flat.block_bytes)


@pytest.mark.parametrize("size_mb", [6, 48])
def test_every_phase_adds_one_latency(size_mb):
    """All messages of a phase are under way together, so their latencies pass at once; TAPA's second phase waits for
    its first. Split's relayed messages leave while straight ones, at these sizes, still hold the links."""
    constants = Constants(latency_us=25e3, sibling=1 / 6000, plane=1 / 6000)  # the emulated node of docs/plan.md
    slow, timeless = (one.machine(AURORA.machine) for one in (constants, replace(constants, latency_us=0.0)))
    for name, phases in (("flat", 1), ("split", 1), ("tapa", 2)):
        exchange = AllToAll(AURORA, name, size_mb)
        expected = exchange.seconds(timeless) + phases * 25e-3
        assert exchange.seconds(slow) == pytest.approx(expected, rel=1e-6), name


def test_cards_of_one_tile_have_the_second_phase_alone():
    topology = topology_of("p4de", 8)
    tapa = AllToAll(topology, "tapa", 3)
    assert tapa.seconds(topology.machine, "phase2") == tapa.seconds(topology.machine)


# Strategies -----------------------------------------------------------------------------------------------------------


def by_the_next_rank(topology, rank):
    """A toy exchange in two phases: everything goes to the next rank first, which passes it on. Nothing knows it."""
    size = topology.size
    after, before = (rank + 1) % size, (rank - 1) % size
    first = Phase(
        "plane",
        sends={after: tuple(Block(rank, heads) for heads in range(size) if heads != rank)},
        receives={before: tuple(Block(before, heads) for heads in range(size) if heads != before)},
        hop=1,
    )
    second = Phase(
        "plane",
        sends={heads: (Block(before, heads),) for heads in range(size) if heads not in (rank, before)},
        receives={
            (rows + 1) % size: (Block(rows, rank),)
            for rows in range(size)
            if rows != rank and (rows + 1) % size != rank
        },
        hop=2,
    )
    return (first, second)


def test_messages_block_the_host():
    """Of an all-to-all, with each of 11 peers, a message each way. In a layer tensors go twice there, and once back."""
    blocking = replace(AURORA.machine, links=replace(AURORA.machine.links, blocked_us=1e4, latency_us=0.0))
    assert AllToAll(AURORA, "flat", 0.5).seconds(blocking) == pytest.approx(22 * 1e-2, rel=0.01)
    assert layers(case("flat"), Latencies(blocked_s=1e-2))[WHOLE].seconds >= 2 * 22 * 1e-2


def test_a_new_exchange_needs_no_change_of_the_plan(monkeypatch):
    monkeypatch.setitem(EXCHANGES, "next", f"{__name__}:by_the_next_rank")

    of = case("flat")
    toy = planned(replace(of, config=of.config.with_(exchange="next")))
    assert toy.step_s > planned(case("tapa")).step_s
    assert sum(toy.bytes.values()) > sum(planned(case("flat")).bytes.values())


def test_one_rank_sends_nothing_and_computes_all_the_time():
    alone = planned(case(topology=topology_of("local", 1), preset="cocodiff"))
    assert set(alone.bytes.values()) == {0.0} and alone.communication_share == 0.0


@pytest.mark.parametrize("preset", ["flat", "tapa", "split", "v_first", "cocodiff", "cocodiff+"])
def test_every_preset_is_planned_with_the_bytes_that_it_sends(preset):
    """The trace's own count, against the volume that has to leave every rank: all but its own twelfth of q, k, v, o."""
    of = case(preset)
    plan = planned(of, Latencies(1e-5, 1e-6, 5e-6))
    assert plan.step_s > plan.compute_s > 0 and plan.image_s == plan.step_s * of.steps
    straight = 4 * 11 / 12 * 5 * (1008 + 24) * 48 * 64 * 2
    sent = sum(plan.bytes.values())
    if preset == "flat":
        assert sent == pytest.approx(straight, rel=0.01)
    elif of.config.selection == "v_major":
        assert sent < straight * 16 / 11  # what TAPA sends of all tokens, its first phase included
    else:
        assert plan.bytes["cross_plane"] == 0 < plan.bytes["plane"]


SMALL = ModelShape("small", heads=24, head_dim=32, joint_layers=1, parameters=1, text_tokens=24)


@pytest.mark.parametrize(
    ("nodes", "settings"),
    [
        (2, {"exchange": "flat"}),
        (1, {"exchange": "tapa", "order": "v_first"}),
        (2, {"exchange": "split"}),
        (2, {"exchange": "split", "chunks": 2}),
        (1, {"exchange": "tapa", "ring": 2}),
        (1, {"exchange": "flat", "ring": 6, "ring_kind": "token"}),
        (2, {"exchange": "flat", "ring": 12, "ring_kind": "streaming"}),
        (1, {"exchange": "split", "codec": "int4", "arrival": "displaced"}),
        (1, {"exchange": "split", "codec": "lossless"}),
    ],
)
def test_planned_bytes_are_those_that_strategies_send(nodes, settings):
    """Of a layer in a run's first step, in every link class, by the trace."""
    topology, config = topology_of("aurora", 12 * nodes), Config(**settings)
    load = Load(image_and_text(12 * nodes * 4 + 5, 24), 2, 2)
    of = Case(SMALL, topology, config, load)

    def work(transport):
        group, slot = of.mesh.group_and_slot(transport.rank)
        trace = Trace(transport.rank)
        strategy = build_strategy(config, of.mesh, transport, trace, Kernels("torch"))
        rows = of.mesh.layouts(load.segments, SMALL.heads)[group].rows[slot]
        x_BLHD = torch.ones(load.batch, rows, SMALL.heads, SMALL.head_dim, dtype=torch.bfloat16)
        strategy.codec.begin_step(StepInfo(0, 0, of.steps))
        strategy.attend(LazyQKV(*[lambda: x_BLHD] * 3, load.segments, SMALL.heads), LayerKey("layer"))
        return trace.bytes()

    sent = run_ranks(topology.size, work, timeout_s=60.0)
    assert layers(of)[WHOLE].bytes == {link: sum(one[link] for one in sent) for link in LINK_CLASSES}


@pytest.mark.parametrize("settings", [{}, {"scoring": "card"}], ids=["source", "card"])
def test_planned_bytes_of_v_major_are_those_that_it_sends(settings):
    """In a step in which half of a card's tokens stay, and of scores or of what was chosen. Which rank of a card has
    them depends on numbers, and so do a sibling's bytes."""
    topology, config = topology_of("aurora", 12), Config.preset("cocodiff", schedule="fixed", warmup=1, **settings)
    load = Load(image_and_text(12 * 4, 24), 1, 4)
    of = Case(SMALL, topology, config, load)

    def work(transport):
        trace = Trace(transport.rank)
        strategy = build_strategy(config, of.mesh, transport, trace, Kernels("torch"))
        rows = of.mesh.layouts(load.segments, SMALL.heads)[0].rows[transport.rank]
        for step in range(2):
            trace.clear()
            x_BLHD = torch.rand(load.batch, rows, SMALL.heads, SMALL.head_dim)
            strategy.codec.begin_step(StepInfo(0, step, of.steps))
            strategy.attend(LazyQKV(*[lambda x=x_BLHD: x] * 3, load.segments, SMALL.heads), LayerKey("layer"))
        return trace.bytes()

    sent = run_ranks(topology.size, work, timeout_s=60.0)
    planned_bytes = layers(of)[CallKind(stable=0.5)].bytes
    found = {link: sum(one[link] for one in sent) for link in LINK_CLASSES}
    assert planned_bytes["plane"] == found["plane"] and planned_bytes["cross_plane"] == found["cross_plane"]
    assert planned_bytes["sibling"] == pytest.approx(found["sibling"], rel=0.2)


@pytest.mark.parametrize(
    ("preset", "first_bits", "channel_bits"), [("coded", 16, 4 + 8 / 32), ("coded-", 8 + 8 / 32, 2 + 8 / 32)]
)
def test_the_codec_is_planned_with_the_bytes_of_its_codes(preset, first_bits, channel_bits):
    """The first step whole or in 8 bits, of the others a scale byte for 32 channels and the codes, twice as long in the
    last two, in every link class; and a latency in which ranks agree."""
    of, exact = case(preset), case("split")
    coded, whole = planned(of), planned(exact)
    part = (first_bits + 17 * channel_bits + 2 * (2 * channel_bits - 8 / 32)) / 16 / 20
    assert coded.bytes == pytest.approx({link: count * part for link, count in whole.bytes.items()})
    assert layers(of)[CallKind()].compute_s > layers(exact)[WHOLE].compute_s  # it reads and decodes
    agreed = [planned(replace(one, steps=20), Latencies(1.0)).step_s for one in (of, exact)]
    assert agreed[0] - agreed[1] == pytest.approx(19 / 20, abs=1e-3)


LINKS = replace(AURORA.machine.links, nic_of=())
CARDS = Machine("two cards", 2, (0, 1, 1, 0), cards=2, links=LINKS, device=AURORA.machine.device)


def at_rates(machine, efficiency):
    rates = {name: efficiency * getattr(machine.links, name) for name in ("sibling_gb_s", "plane_gb_s", "nic_gb_s")}
    return replace(machine, links=replace(machine.links, **rates))


@pytest.mark.parametrize(("efficiency", "hidden"), [(3.0, True), (0.05, False)])
def test_what_a_call_does_not_wait_for_takes_no_time_or_that_of_the_links(efficiency, hidden):
    """Of layers that follow one another, in flat exchange and joint order, where nothing else hides a message: as long
    as they compute, or as long as their bytes are on the way."""
    topology = Topology.build(at_rates(CARDS, efficiency), 4)
    decisions = Decisions("none", "taylor", 0.04, "a test", ((("", 1.0),), (("", 0.5), ("qkvo", 0.5))))
    config = Config(exchange="flat", arrival="adaptive", fine_steps=0)
    load = Load(image_and_text(2000, 24), 1, 2, 1, state_sizes(config))
    shape = ModelShape("a layer", heads=24, head_dim=64, joint_layers=1, parameters=10**6)
    of = Case(shape, topology, config, load, steps=2, decisions=(decisions,))
    found = layers(of)
    seconds = {kind: plan.seconds for kind, plan in found.items()}
    compute = {kind: plan.compute_s for kind, plan in found.items()}
    awaited, late = CallKind(), CallKind(displaced="qkvo")
    assert list(seconds) == [WHOLE, awaited, late]
    assert len({tuple(plan.bytes.values()) for plan in found.values()}) == 1
    under_way = seconds[WHOLE] - compute[WHOLE]
    assert (under_way < compute[late]) is hidden
    assert seconds[late] == pytest.approx(max(compute[late], under_way), rel=0.01)
    assert planned(of).step_s == pytest.approx((seconds[WHOLE] + (seconds[awaited] + seconds[late]) / 2) / 2, rel=1e-3)


def test_recorded_decisions_are_stretched_over_other_runs_and_seldom_ones_wait_for_more():
    rows = ((("", 1.0),), (("q", 0.01), ("qkvo", 0.99)), (("qkv", 1.0),), (("", 1.0),))
    decisions = Decisions("none", "taylor", 0.04, "a test", rows)
    assert [list(step) for step in decisions.over(7)] == [[""], [""], *[["q", "qkvo"]] * 1, *[["qkv"]] * 3, [""]]
    assert without_seldom(decisions.over(4))[1] == {"": 0.01, "qkvo": 0.99}


@pytest.mark.parametrize(
    ("nodes", "efficiency", "arrival", "codec"),
    [
        (1, 1.0, "adaptive", "none"),  # a layer's bytes are sent while it computes
        (1, 1.0, "now", "none"),  # and codec would take as long as it saves
        (1, 0.109, "adaptive", "int2"),
        (2, 0.109, "displaced", "int2"),
        (2, 1.0, "adaptive", "none"),
    ],
)
def test_the_codec_follows_the_links(nodes, efficiency, arrival, codec):
    topology = Topology.build(at_rates(AURORA.machine, efficiency), 12 * nodes)
    found, told = with_codec_chosen(Config.preset("ahead", arrival=arrival), topology, AttentionWork(24, 128))
    assert found == Config.preset("ahead", arrival=arrival, codec=codec)
    assert told.startswith(f"codec auto: {codec}; predicted ms a layer: none ")


def test_a_machine_without_rates_and_settings_with_a_codec_are_left_alone():
    unknown = topology_of("local", 4)
    assert with_codec_chosen(Config(codec="auto"), unknown, AttentionWork(24, 128))[0].codec == "none"
    assert with_codec_chosen(Config(codec="int4"), AURORA, AttentionWork(24, 128)) == (Config(codec="int4"), None)


# Milliseconds a step in docs/plan.md: `cocodiff plan --model sd3.5-paper --size 1536 --nodes 4 --preset NAME`.
SD35_ON_4_NODES = {"v_first": 39.8, "cocodiff": 41.6, "cocodiff+": 39.2}


def test_v_major_is_planned_in_the_time_that_the_page_says():
    """What choosing tokens costs at 5 us a launch takes what fewer bytes gain, and no more than a twentieth of a step
    besides."""
    shape, topology = load_shape("sd3.5-paper"), topology_of("aurora", 48)
    steps_ms = {}
    for preset in SD35_ON_4_NODES:
        config = Config.preset(preset)
        load = Load(shape.segments(1536), shape.rows_per_image, 2, shape.branches, state_sizes(config))
        plan = planned(Case(shape, topology, config, load), Latencies.of(topology.machine))
        steps_ms[preset] = plan.step_s * 1e3
    assert steps_ms == pytest.approx(SD35_ON_4_NODES, abs=0.05)
    assert max(steps_ms["cocodiff"], steps_ms["cocodiff+"]) < 1.05 * steps_ms["v_first"]


@pytest.mark.parametrize(
    ("tiles", "schedule", "waits"), [(2, "linear", 1), (2, "threshold", 1), (1, "linear", 0), (1, "threshold", 1)]
)
def test_the_host_waits_for_numbers_of_rows_that_only_the_device_knows(tiles, schedule, waits):
    """Once a selective call, and that takes what the machine file says; of cards of one tile a fraction tells them."""
    machine = Machine("small", tiles=tiles, planes=(0, 1)[:tiles], device=Device(wait_us=1e6))
    config = Config.preset("cocodiff", schedule=schedule, warmup=2, sync_interval=0)
    one = replace(case(topology=Topology.build(machine, 2 * tiles), steps=10), config=config)
    selective = 0.8 * (one.shape.joint_layers + one.shape.parallel_layers) * one.load.branches
    plan = planned(one, Latencies(wait_s=1.0))
    assert plan.waits == pytest.approx(selective * waits)
    assert plan.step_s == pytest.approx(planned(one).step_s + plan.waits)


def test_v_first_hides_what_joint_order_waits_for():
    assert planned(case("v_first")).step_s < planned(case("tapa")).step_s


def test_fractions_follow_the_schedule():
    of = case("cocodiff", steps=50)
    every = kinds_of_steps(of)
    assert every[:5] == [{WHOLE: 1.0}] * 5 and every[15] == {WHOLE: 1.0} and every[-1] == {CallKind(stable=1.0): 1.0}
    none, half, all_ = (CallKind(stable=part) for part in (0.0, 0.5, 1.0))
    assert sampled_kinds(of) == [WHOLE, none, half, all_]
    assert sampled_kinds(case("cocodiff+", stable=0.25)) == [WHOLE, CallKind(stable=0.25)]
    assert sampled_kinds(case("flat")) == [WHOLE]
    known = {WHOLE: 9.0, none: 4.0, half: 2.0, all_: 1.0}
    assert of_kind(known, CallKind(stable=0.25)) == 3.0 and of_kind(known, WHOLE) == 9.0


@pytest.mark.parametrize("preset", ["cocodiff", "cocodiff+"])
def test_so_many_tokens_stay_as_the_schedule_says(preset):
    """All of q, k and v of a stable token stay; text and the output always travel."""
    of = case(preset, stable=0.5)
    segments = {kind: plan.bytes for kind, plan in layers(of).items()}
    whole, half = sum(segments[WHOLE].values()), sum(segments[CallKind(stable=0.5)].values())
    assert 0.5 < half / whole < 0.75


def test_layers_that_take_alike_are_one_kind():
    shape = ModelShape("of all kinds", 48, 64, 3, 10**6, parallel_layers=2, image_layers=1)
    found = kinds_of(shape, case().load)
    assert [(kind.name, kind.layers, kind.beside) for kind in found] == [
        ("joint", 3, False),
        ("parallel", 2, True),
        ("image", 1, False),
    ]
    assert [kind.name for kind in kinds_of(replace(shape, parallel_layers=0, image_layers=0), case().load)] == ["joint"]


# Prices ---------------------------------------------------------------------------------------------------------------


def test_a_layer_takes_its_arithmetic_where_memory_is_fast():
    """Products of the rank's rows with weights of W x W, MLP of 4 W, and attention of all queries to all keys with its
    heads: 2 for a multiplication and an addition. Of one rank of twelve."""
    machine = replace(AURORA.machine, device=Device(bf16_tflop_s=1e-12))  # a FLOP a second
    of = case("flat", topology=replace(AURORA, machine=machine))
    W, S = 48 * 64, 1008 + 24
    layer = roofline(TOY, of.topology, S, 1, 0, of.mesh.layouts(of.load.segments, 48)[0])
    product = 2 * S / 12 * W * W
    parts = (layer.project_v, layer.project_qk, layer.attention, layer.rest)
    assert parts == pytest.approx((product, 2 * product, 4 * S**2 * 4 * 64, 9 * product))
    joint = layers(of)[WHOLE]
    assert joint.compute_s == pytest.approx(layer.total)


def test_the_codecs_passes_read_both_reconstructions_where_they_need_them():
    """In bytes, for tensors of N bytes: a state is read or written at N each, codes and notes by their own size."""
    x = torch.empty(1, 10, 2, 64, device="meta", dtype=torch.bfloat16)
    code, notes, N = x.new_empty(1, 10, 2, 18, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64), x.nbytes
    one, two = Reconstructions(x), Reconstructions(x, x)
    hows = Prediction(), Prediction(1.0, linear=True), Prediction(1.0, True, True)

    def encoded(known, how):
        return cost_of("encode_residual", [x], (x, known, how, 2, code, notes))[0] - code.nbytes - notes.nbytes

    def decoded(known, factor):
        return cost_of("decode_residual", [x], (code, known, factor, 2))[0] - code.nbytes

    assert encoded(one, Prediction()) == encoded(two, Prediction()) == 3 * N
    assert encoded(two, Prediction(1.0, linear=True)) == 4 * N
    assert decoded(one, None) == decoded(two, None) == 2 * N and decoded(two, 1.0) == 3 * N
    rows = [[cost_of("encode_residual", [x], (x, two, how, bits, code, notes))[1] for how in hows] for bits in (4, 2)]
    assert all(row == sorted(set(row)) for row in (*rows, *map(list, zip(*rows, strict=True)))), "each takes more"
    assert cost_of("note_change", [x], (x, x, notes))[0] - notes.nbytes == 3 * N


def test_a_kernel_takes_its_traffic_or_its_instructions():
    """Of bf16 at 1 TB/s and 717 G instructions a second; a machine file without that rate counts the traffic alone."""
    device = AURORA.machine.device
    numbers, traffic = 10**8, 4e8
    assert seconds(device, 0, traffic, started("l1_score", numbers)) == pytest.approx(traffic / 1e12)
    bound = started("qk_norm_rope", numbers) / 717e9
    assert bound > traffic / 1e12 and seconds(device, 0, traffic, started("qk_norm_rope", numbers)) == bound
    assert seconds(replace(device, instructions_g_s=0), 0, traffic, 1e12) == pytest.approx(traffic / 1e12)


@pytest.mark.parametrize("mlp_ratio", [4, 400])
def test_split_weights_arrive_while_the_block_before_computes(mlp_ratio):
    """Half of a block comes over the sibling link, of which ranks wait for what is longer than the block before."""
    of = case(shape=replace(TOY, mlp_ratio=mlp_ratio))
    split = replace(of, load=replace(of.load, split=Split.of(("card", None), of.topology)))
    seconds = [
        over_steps({c: p.seconds for c, p in calls.items()}, kinds_of_steps(of))
        for _, calls in plan_layers(of, Latencies())
    ]
    of_blocks = [seconds[0]] * 3 + [seconds[1]] * 2
    halves = [numbers / 134e9 for numbers in block_parameters(of.shape)]  # of two bytes each
    waited = sum(max(0.0, half - of_blocks[number - 1]) for number, half in enumerate(halves))
    assert waited > 0
    assert planned(split).step_s == pytest.approx(planned(of).step_s + of.load.branches * waited)
