"""Plans against closed forms of the papers, against what strategies really send, and as a table of real models."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from covering import examples
from hypothesis import given, strategies
from really_sent import ReallySent
from value_tables import beside
from worlds import topology_of

from cocodiff.attention.strategy import LayerKey, LazyQKV
from cocodiff.comm.loopback import LoopbackTransport, run_ranks
from cocodiff.comm.trace import LINK_CLASSES, Trace
from cocodiff.comm.transport import RankContext
from cocodiff.config.config import Config, preset_names
from cocodiff.config.machine import Device, Machine
from cocodiff.config.registry import EXCHANGES
from cocodiff.engine.assemble import AttentionWork, build_strategy, with_codec_chosen
from cocodiff.exchange.codec import WHOLE, CallKind, StepInfo
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.kernels import Kernels
from cocodiff.kernels.residual import Prediction, Reconstructions
from cocodiff.models.adapter import image_and_text
from cocodiff.planner.case import Case, ModelShape
from cocodiff.planner.decisions import Decisions, without_seldom
from cocodiff.planner.layers import plan_layers, plan_step
from cocodiff.planner.memory import block_parameters
from cocodiff.planner.roofline import cost_of, roofline, seconds, started
from cocodiff.planner.traffic import Constants, PlannedAllToAll, stages_of
from cocodiff.topology import Topology
from cocodiff.topology.axes import Mesh

CASES = beside(__file__)
WAITS = ("latency_us", "message_us", "blocked_us", "launch_us", "wait_us")


def with_waits(topology: Topology, **of: float) -> Topology:
    """The same ranks on a machine whose messages, launches and waits take so many microseconds, others none."""
    machine, waits = topology.machine, dict.fromkeys(WAITS, 0.0) | of
    parts = {
        name: replace(part, **{wait: us for wait, us in waits.items() if hasattr(part, wait)})
        for name, part in (("links", machine.links), ("device", machine.device))
    }
    return replace(topology, machine=replace(machine, **parts))


AURORA = with_waits(topology_of("aurora", 12))
TOY = ModelShape("toy", heads=48, head_dim=64, joint_layers=3, parallel_layers=2, parameters=10**6, text_tokens=24)
SMALL = ModelShape("small", heads=24, head_dim=32, joint_layers=1, parameters=1, text_tokens=24)


def case(config: Config | str = "tapa", shape: ModelShape = TOY, topology: Topology = AURORA, **more: Any) -> Case:
    """A run of an image of 1008 tokens, as a preset has it."""
    config = Config.preset(config) if isinstance(config, str) else config
    call = image_and_text(1008, shape.text_tokens), 1, 2, shape.branches
    return Case(shape, topology, config, *call, **{"steps": 20, **more})


def layers(of: Case) -> dict[CallKind, Any]:
    """Plan the first kind of layers, by kinds of calls."""
    return plan_layers(of)[0][1]


# All-to-alls ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("machine", "ranks", "variant", "siblings", "planes", "nics", "phases"), CASES["all-to-alls"])
def test_an_all_to_all_takes_its_blocks_on_the_fullest_link_and_a_latency_for_each_phase(
    machine, ranks, variant, siblings, planes, nics, phases
):
    """Split's relayed messages leave while straight ones, at this size, still hold the links."""
    topology, exchange = topology_of(machine, ranks), PlannedAllToAll(topology_of(machine, ranks), variant, 48)
    of_links = zip(("sibling", "plane", "nic"), (siblings, planes, nics), strict=True)
    blocks_s = sum(count / getattr(topology.machine.links, f"{link}_gb_s") / 1e9 for link, count in of_links)
    for latency_us in (0.0, 25e3):
        slow = Constants(latency_us).machine(topology.machine)
        expected = exchange.block_bytes * blocks_s + phases * latency_us / 1e6
        assert exchange.seconds(slow) == pytest.approx(expected, rel=1e-6)
    if variant == "tapa":
        parts = [exchange.seconds(slow, part) for part in ("phase1", "phase2")[-phases:]]
        assert exchange.seconds(slow) == pytest.approx(sum(parts))


def test_messages_block_the_host():
    """Of an all-to-all, with each of 11 peers, a message each way. In a layer q, k and v go there together, then the
    output goes back."""
    blocking = replace(AURORA.machine, links=replace(AURORA.machine.links, blocked_us=1e4, latency_us=0.0))
    assert PlannedAllToAll(AURORA, "flat", 0.5).seconds(blocking) == pytest.approx(22 * 1e-2, rel=0.01)
    waits = (with_waits(AURORA, blocked_us=us) for us in (1e4, 0.0))
    flat = Config.preset("flat", ring=1)  # a ring would have fewer messages
    (blocked,), (free,) = (layers(case(flat, topology=topology)).values() for topology in waits)
    assert blocked.seconds - free.seconds == pytest.approx(2 * 22 * 1e-2, rel=0.05)


def test_a_stage_waits_for_the_rank_with_the_most_messages():
    """Of five ranks on cards of two the last has no sibling, and serves both planes of its card: it sends to all others
    and hears from the two whose plane its heads are in."""
    of_phases = stages_of(Mesh.build(topology_of("local", 5)), "tapa")
    assert [(stage.messages, stage.handled) for stage in of_phases] == [(1, 2), (4, 6)]


# Strategies -----------------------------------------------------------------------------------------------------------


def test_an_exchange_that_the_planner_has_never_seen_is_planned_by_its_routes(monkeypatch):
    monkeypatch.setitem(EXCHANGES, "next", EXCHANGES["split"])
    split = case("split")
    unknown = replace(split, config=split.config.with_(exchange="next"))
    assert plan_step(unknown) == plan_step(split) != plan_step(case("flat"))


def run_of(of: Case, sent: ReallySent) -> list[dict[str, int]]:
    """Make the calls of a whole run, and return the bytes by link that traces counted, of these and of whole tensors,
    and that were really sent."""

    def work(transport: LoopbackTransport) -> list[dict[str, int]]:
        group, slot = of.mesh.group_and_slot(transport.rank)
        trace, generator = Trace(transport.rank), torch.Generator().manual_seed(transport.rank)
        strategy = build_strategy(of.config, of.mesh, RankContext(transport, of.topology, trace, Kernels("torch")))
        rows = of.mesh.layouts(of.segments, of.shape.heads)[group].rows[slot]
        for step in range(of.steps):
            x_BLHD = torch.rand(of.batch, rows, of.shape.heads, of.shape.head_dim, generator=generator).bfloat16()
            if of.config.codec == "lossless":  # whose codes of other numbers are as long as these need
                x_BLHD.fill_(1.0)
            strategy.codec.begin_step(StepInfo(0, step, of.steps))
            strategy.attend(LazyQKV(*[lambda x=x_BLHD: x] * 3, of.segments, of.shape.heads), LayerKey("layer"))
        return [trace.bytes(), trace.bytes("whole")]

    traced = zip(*run_ranks(of.topology.size, work, timeout_s=60.0), strict=True)
    counted = [{link: sum(one[link] for one in of_ranks) for link in LINK_CLASSES} for of_ranks in traced]
    return [*counted, sent.by_link(of.topology)]


@pytest.mark.parametrize(("nodes", "preset", "settings"), CASES["runs"])
def test_planned_bytes_are_those_that_ranks_send_in_a_run(nodes, preset, settings, monkeypatch):
    """In every link class. Which rank of a card has the tokens that V-Major leaves behind depends on numbers, and so do
    a sibling's bytes; of the lossless codec the first step is known."""
    config, topology = Config.preset(preset, **settings), topology_of("aurora", 12 * nodes)
    image = 12 * nodes * 4 + 5 * (preset != "cocodiff")
    of = Case(SMALL, topology, config, image_and_text(image, 24), 2, steps=1 if preset == "lossless" else 5)
    planned = {link: of.steps * count for link, count in plan_step(of).bytes.items()}
    traced, whole, sent = run_of(of, ReallySent(monkeypatch))
    if preset == "cocodiff":
        assert planned.pop("sibling") == pytest.approx(traced.pop("sibling"), rel=0.2)
    else:
        uncoded = plan_step(replace(of, config=config.with_(codec="none"))).bytes
        assert whole == pytest.approx({link: of.steps * count for link, count in uncoded.items()})
    assert traced == pytest.approx(planned)
    if config.codec == "none":  # others also send what ranks agree on, which counts for no call
        assert {link: sent[link] for link in traced} == traced


MODELS = [("sd3.5-paper", 1536), ("flux.2", 1024), ("qwen-image", 512)]
PRESETS = sorted(preset_names())


def test_plans_of_real_models(snapshot):
    """Milliseconds of a step and bytes by link of every preset; those of SD3.5 on four nodes are in docs/plan.md. On
    every machine there is a shape with layers of all kinds."""
    kinds = ModelShape("all kinds", 24, 64, 2, 10**9, parallel_layers=1, image_layers=1, branches=2, mlp_ratio=3)
    node, nodes, p4de = topology_of("aurora", 12), topology_of("aurora", 24), topology_of("p4de", 8)
    cases = [(kinds, 512, topology) for topology in (node, nodes, p4de, node.part((0,)))]
    cases += [
        (load_shape(name), size, topology) for (name, size), topology in zip(MODELS, (nodes, node, p4de), strict=True)
    ]
    lines = []
    for (shape, size, topology), preset in product(cases, PRESETS):
        config = Config.preset(preset)
        config = config.with_(codec="int2") if config.codec == "auto" else config
        plan = plan_step(Case(shape, topology, config, shape.segments(size), shape.rows_per_image, 2, shape.branches))
        assert plan.image_s == plan.step_s * 50 and -1e-9 < plan.communication_share < 1
        times = f"{plan.step_s * 1e3:.2f} ms, computing {plan.compute_s * 1e3:.2f}, waits {plan.waits:.1f}"
        sent = ", ".join(f"{link} {count / 1e6:.2f}" for link, count in plan.bytes.items() if count)
        ranks = f"{topology.machine.name} {topology.size}"
        lines.append(f"{shape.name}, {ranks}, {preset}: {times}; MB: {sent or 'none'}")
    snapshot("\n".join(lines))


@given(
    preset=strategies.sampled_from(PRESETS),
    nodes=strategies.sampled_from((1, 2)),
    slower=strategies.sampled_from(("sibling_gb_s", "plane_gb_s", "nic_gb_s", "bf16_tflop_s", "memory_gb_s")),
    factor=strategies.floats(1.0, 30.0),
    waits=strategies.fixed_dictionaries(dict.fromkeys(WAITS, strategies.floats(0, 100))),
)
@examples(10, exhaustive=60)
def test_a_slower_machine_takes_no_less(preset, nodes, slower, factor, waits):
    """A slower link or device, and messages, launches or waits that take longer."""
    aurora = with_waits(topology_of("aurora", 12 * nodes))
    machine = aurora.machine
    part = {"links": machine.links} if hasattr(machine.links, slower) else {"device": machine.device}
    slow = {name: replace(of, **{slower: getattr(of, slower) / factor}) for name, of in part.items()}
    config = Config.preset(preset)
    config = config.with_(codec="int4") if config.codec == "auto" else config
    quick = plan_step(case(config, topology=aurora, known_mesh=Mesh.build(aurora)))
    for topology in (replace(aurora, machine=replace(machine, **slow)), with_waits(aurora, **waits)):
        found = plan_step(case(config, topology=topology, known_mesh=Mesh.build(topology)))
        assert found.step_s >= quick.step_s * (1 - 1e-9) and found.bytes == quick.bytes


def test_auto_goes_by_the_size_of_q_k_and_v_together(tmp_path):
    """As the engine does."""
    one_mb = (1008 + 24) * TOY.heads * TOY.head_dim * 2 / 12 / 1e6
    of_name = {name: plan_step(case(Config(exchange=name))).bytes for name in ("tapa", "flat")}
    for limit_mb, taken in ((2.9 * one_mb, "flat"), (3.1 * one_mb, "tapa")):
        (tmp_path / "table.yaml").write_text(f"aurora: {{1: [[{limit_mb}, tapa], [null, flat]]}}")
        auto = case(Config(exchange="auto", exchange_table=str(tmp_path / "table.yaml")))
        assert plan_step(auto).bytes == of_name[taken] and of_name["tapa"] != of_name["flat"]


LINKS = replace(AURORA.machine.links, nic_of=())
CARDS = Machine(name="two cards", tiles=2, planes=(0, 1, 1, 0), cards=2, links=LINKS, device=AURORA.machine.device)


def at_rates(machine: Machine, efficiency: float) -> Machine:
    rates = {name: efficiency * getattr(machine.links, name) for name in ("sibling_gb_s", "plane_gb_s", "nic_gb_s")}
    return replace(machine, links=replace(machine.links, **rates))


@pytest.mark.parametrize(("efficiency", "hidden"), [(3.0, True), (0.05, False)])
def test_what_a_call_does_not_wait_for_takes_no_time_or_that_of_the_links(efficiency, hidden):
    """Of layers that follow one another, in flat exchange and joint order, where nothing else hides a message: as long
    as they compute, or as long as their bytes are on the way."""
    decisions = Decisions("none", "taylor", 0.04, "a test", [{"": 1.0}, {"": 0.5, "qkvo": 0.5}])
    config = Config(exchange="flat", arrival="adaptive", fine_steps=0)
    shape = ModelShape("a layer", heads=24, head_dim=64, joint_layers=1, parameters=10**6, text_tokens=24)
    of = case(config, shape, Topology.build(at_rates(CARDS, efficiency), 4), steps=2, decisions=(decisions,))
    of = replace(of, segments=image_and_text(2000, 24))
    found = layers(of)
    whole, awaited, late = (found[kind] for kind in (WHOLE, CallKind(), CallKind(displaced="qkvo")))
    assert whole.bytes == awaited.bytes == late.bytes
    under_way = whole.seconds - whole.compute_s
    assert (under_way < late.compute_s) is hidden
    assert late.seconds == pytest.approx(max(late.compute_s, under_way), rel=0.01)
    mean_s = (whole.seconds + (awaited.seconds + late.seconds) / 2) / 2
    assert plan_step(of).step_s == pytest.approx(mean_s, rel=1e-3)


def test_recorded_decisions_are_stretched_over_other_runs_and_seldom_ones_wait_for_more():
    rows = [{"": 1.0}, {"q": 0.01, "qkvo": 0.99}, {"qkv": 1.0}, {"": 1.0}]
    decisions = Decisions("none", "taylor", 0.04, "a test", rows)
    assert [list(step) for step in decisions.over(7)] == [[""], [""], ["q", "qkvo"], *[["qkv"]] * 3, [""]]
    assert without_seldom(decisions.over(4))[1] == {"": 0.01, "qkvo": 0.99}


@pytest.mark.parametrize(("nodes", "efficiency", "arrival", "codec"), CASES["codecs"])
def test_the_codec_follows_the_links(nodes, efficiency, arrival, codec):
    topology = Topology.build(at_rates(topology_of("aurora", 12).machine, efficiency), 12 * nodes)
    found, told = with_codec_chosen(Config.preset("ahead", arrival=arrival), topology, AttentionWork(24, 128))
    assert found == Config.preset("ahead", arrival=arrival, codec=codec)
    assert told.startswith(f"codec auto: {codec}; predicted ms a layer: none ")


def test_a_machine_without_rates_and_settings_with_a_codec_are_left_alone():
    assert with_codec_chosen(Config(codec="auto"), topology_of("local", 4), AttentionWork(24, 128))[0].codec == "none"
    assert with_codec_chosen(Config(codec="int4"), AURORA, AttentionWork(24, 128)) == (Config(codec="int4"), None)


# Prices ---------------------------------------------------------------------------------------------------------------


def test_a_layer_takes_its_arithmetic_where_memory_is_fast():
    """Products of the rank's rows with weights of W x W, MLP of 4 W, and attention of all queries to all keys with its
    heads: 2 for a multiplication and an addition. Of one rank of twelve."""
    machine = replace(AURORA.machine, device=Device(bf16_tflop_s=1e-12))  # a FLOP a second
    of = case("flat", topology=replace(AURORA, machine=machine))
    W, S = 48 * 64, 1008 + 24
    layer = roofline(TOY, of.topology, S, 1, 0, of.mesh.layouts(of.segments, 48)[0])
    product = 2 * S / 12 * W * W
    parts = (layer.project_v, layer.project_qk, layer.attention, layer.rest)
    assert parts == pytest.approx((product, 2 * product, 4 * S**2 * 4 * 64, 9 * product))
    assert layers(of)[WHOLE].compute_s == pytest.approx(layer.total)


def test_the_codecs_passes_read_both_reconstructions_where_they_need_them():
    """In bytes, for tensors of N bytes: a state is read or written at N each, codes and notes by their own size."""
    x = torch.empty(1, 10, 2, 64, device="meta", dtype=torch.bfloat16)
    code, notes, N = x.new_empty(1, 10, 2, 18, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64), x.nbytes
    one, two = Reconstructions(x), Reconstructions(x, x)
    plain, linear = Prediction(), Prediction(1.0, linear=True)
    for known, how, tensors in ((one, plain, 3), (two, plain, 3), (two, linear, 4)):
        traffic, _ = cost_of("encode_residual", [x], (x, known, how, 2, code, notes))
        assert traffic == tensors * N + code.nbytes + notes.nbytes
    for known, factor, tensors in ((one, None, 2), (two, None, 2), (two, 1.0, 3)):
        assert cost_of("decode_residual", [x], (code, known, factor, 2))[0] == tensors * N + code.nbytes
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
    of = case(shape=replace(TOY, mlp_ratio=mlp_ratio, branches=2))
    split = of.with_settings(weights="card")
    joint_s, parallel_s = (calls[WHOLE].seconds for _, calls in plan_layers(of))
    before_s = [parallel_s, *[joint_s] * 3, parallel_s]
    halves_s = [numbers / 134e9 for numbers in block_parameters(of.shape)]  # of two bytes each
    waited = 2 * sum(max(0.0, half - before) for half, before in zip(halves_s, before_s, strict=True))
    assert waited > 0
    assert plan_step(split).step_s == pytest.approx(plan_step(of).step_s + waited)
