"""What `cocodiff plan` says and writes: memory, the partitions of a job's ranks, a preset's step, all presets side by
side, and one layer in detail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cocodiff.comm.trace import LINK_CLASSES
from cocodiff.config.config import Config, preset_names
from cocodiff.config.errors import UserError
from cocodiff.config.machine import Topology
from cocodiff.config.registry import EXCHANGES
from cocodiff.config.text_table import aligned
from cocodiff.engine.assemble import AttentionWork, with_codec_chosen
from cocodiff.jobs.options import engine_record
from cocodiff.jobs.terminal import say
from cocodiff.models.adapter import IMAGE, TEXT
from cocodiff.models.family import Video
from cocodiff.planner.choice import Choice, Part, PartitionStep, PricedPartition, Pricer, Workload, parts_of
from cocodiff.planner.costs import CallKind, costs_of
from cocodiff.planner.decisions import as_file, decisions_of
from cocodiff.planner.layers import SITES, Case, plan_layers
from cocodiff.planner.memory import KEPT, MIB, RankMemory, add, largest_batch, mib, misfit, size_run
from cocodiff.planner.partitions import Partition
from cocodiff.planner.peaks import Peaks, size_peaks
from cocodiff.planner.placement import table as meshes_table
from cocodiff.planner.placement import worth_listing
from cocodiff.planner.traffic import Latencies, plan_of
from cocodiff.topology.layout import Layout
from cocodiff.topology.routes.plans import Phase

PEERS_SHOWN = 6  # of one phase's messages
ROWS = {  # of the table of memory: fields of `RankMemory`
    "cache: q, k, v of the image": "image_cache",
    "cache: scoring reference": "reference_cache",
    "cache: q, k, v of the text": "text_cache",
    "cache: reconstructions": "reconstructions",
    "cache: messages in flight": "in_flight",
    "cache: steps that are left out": "step_cache",
    "cache": "cache",
    "weights": "weights",
    "activations (estimate)": "activations",
    "total": "total",
}


@dataclass(frozen=True)
class Sizes:
    """A plan's memory, in bytes. layer: one joint attention of one branch on the fullest rank; node: the fullest.
    tile: the machine's memory of one rank, None where its file does not say; then `largest`, in images, is None too.
    peaks: of text encoders and VAE; None where the model's VAE is not known."""

    layer: RankMemory
    rank: RankMemory
    node: RankMemory
    tile: int | None
    largest: int | None
    peaks: Peaks | None = None


def size(topology: Topology, work: Workload, partition: Partition, video: Video) -> Sizes:
    """video: what is made, or an image."""
    found, layers, largest_of_parts = dict[int, RankMemory](), dict[int, RankMemory](), []
    tile = int(topology.machine.device.memory_gib * 2**30) or None
    for part in (part for of_replica in parts_of(topology, work, partition) for part in of_replica):
        shape, load, mesh = part.work.shape, part.work.load, part.mesh
        one_site = replace(shape, joint_layers=1, parallel_layers=0, image_layers=0)
        found |= zip(part.ranks, size_run(shape, part.topology, load, mesh), strict=True)
        layers |= zip(part.ranks, size_run(one_site, part.topology, replace(load, branches=1), mesh), strict=True)
        if tile is not None:
            largest_of_parts.append(largest_batch(shape, part.topology, load, tile, mesh))
    of_ranks = [found[rank] for rank in range(topology.size)]
    fullest = max(range(topology.size), key=lambda rank: of_ranks[rank].total)
    nodes = [add([of_ranks[p.rank] for p in topology.places if p.node == node]) for node in range(topology.nodes)]
    node = max(nodes, key=lambda node: node.total)
    batch = max(1, work.load.batch // work.shape.rows_per_image)
    peaks = size_peaks(work.shape, topology, video, batch, work.load.itemsize, partition.replicas)
    return Sizes(layers[fullest], of_ranks[fullest], node, tile, min(largest_of_parts, default=None), peaks)


def table(values: dict[str, Any], topology: Topology, work: Workload, sizes: Sizes, video: Video) -> list[str]:
    shape, load, rank = work.shape, work.load, sizes.rank
    frames = "" if video.frames == 1 else f"{video.frames} frames of "
    lines = [
        f"{shape.name} {frames}{video.height}x{video.width} batch {values['batch']}, {load.branches} branch(es), "
        f"{values['dtype']}, preset {values['preset']}: {topology.size} rank(s) on {topology.nodes} node(s) of "
        f"{topology.machine.name}",
        f"{'MiB':<28}{'a layer':>12}{'a rank':>12}{'a node':>12}",
    ]
    for name, field in ROWS.items():
        layer = mib(getattr(sizes.layer, field)) if "cache" in name else ""
        lines.append(f"{name:<28}{layer:>12}{mib(getattr(rank, field)):>12}{mib(getattr(sizes.node, field)):>12}")
    lines += peak_lines(sizes, ranks_of_node(topology))
    if sizes.tile is None:
        return [*lines, f"machine {topology.machine.name} does not say how much memory a rank has"]
    reason = misfit(rank, sizes.tile)
    left = f"fits: {mib(sizes.tile - rank.total)} of {mib(sizes.tile)} MiB of a tile are left"
    lines += [left if reason is None else f"does not fit: {reason}", f"largest batch that fits: {sizes.largest}"]
    return lines + verdicts(sizes, sizes.tile)


def ranks_of_node(topology: Topology) -> int:
    """Of the node that has most."""
    return max(sum(place.node == node for place in topology.places) for node in range(topology.nodes))


def peak_lines(sizes: Sizes, ranks: int) -> list[str]:
    """Rows of text encoders and VAE. ranks: of a node."""
    if sizes.peaks is None:
        return ["text encoders and VAE: not known of this model"]
    peaks = sizes.peaks
    rows = [("text encoders, at the start", peaks.encoders, 1), ("VAE: weights", peaks.vae, ranks)]
    rows += [(f"VAE: encoding, {how}", peak.encoding, ranks) for how, peak in peaks.of_vae.items() if how != "all"]
    rows += [(f"VAE: decoding, {how}", peak.decoding, peak.decoders) for how, peak in peaks.of_vae.items()]
    return [f"{name:<28}{'':>12}{mib(one):>12}{mib(one * times):>12}" for name, one, times in rows]


def verdicts(sizes: Sizes, tile: int) -> list[str]:
    """What a rank takes at its fullest with text encoders and VAE, for each setting of `vae` that differs."""
    found: dict[str, list[str]] = {}
    if sizes.peaks is None:
        return []
    for how in sizes.peaks.of_vae:
        when, need = sizes.peaks.fullest(sizes.rank, how)
        told = f"{mib(need)} MiB at the fullest, {when}: {'fits' if need <= tile else 'does not fit'}"
        found.setdefault(told, []).append(how)
    return [f"with text encoders and VAE, vae {' or '.join(settings)}: {told}" for told, settings in found.items()]


def peaks_json(sizes: Sizes, ranks: int) -> dict[str, Any] | None:
    if sizes.peaks is None:
        return None
    peaks, of_vae = sizes.peaks, {}
    for how, peak in peaks.of_vae.items():
        when, need = peaks.fullest(sizes.rank, how)
        of_vae[how] = {
            "encoding_rank": peak.encoding / MIB,
            "encoding_node": peak.encoding * ranks / MIB,
            "decoding_rank": peak.decoding / MIB,
            "decoding_node": peak.decoding * peak.decoders / MIB,
            "decoders_node": peak.decoders,
            "fullest_rank": need / MIB,
            "fullest_when": when,
            "fits": None if sizes.tile is None else need <= sizes.tile,
        }
    return {"text_encoders": peaks.encoders / MIB, "vae_weights": peaks.vae / MIB, "vae": of_vae}


def memory_json(
    values: dict[str, Any], topology: Topology, work: Workload, sizes: Sizes, video: Video
) -> dict[str, Any]:
    def part(of: RankMemory, names: Iterable[str] = ROWS.values()) -> dict[str, float]:
        return {name: getattr(of, name) / MIB for name in names}

    shape, load = work.shape, work.load
    return {
        "case": {
            "model": shape.name,
            "size": values["size"],
            **({} if shape.video is None else {name: getattr(video, name) for name in ("frames", "height", "width")}),
            "batch": values["batch"],
            "image_tokens": load.tokens(IMAGE),
            "text_tokens": load.tokens(TEXT),
            "branches": load.branches,
            "dtype": values["dtype"],
            "preset": values["preset"],
            "machine": topology.machine.name,
            "nodes": topology.nodes,
            "ranks": topology.size,
        },
        "memory_mib": {
            "site": part(sizes.layer, (*KEPT, "cache")),
            "rank": part(sizes.rank),
            "node": part(sizes.node),
            "tile": None if sizes.tile is None else sizes.tile / MIB,
        },
        "fits": None if sizes.tile is None else sizes.rank.total <= sizes.tile,
        "largest_batch": sizes.largest,
        "peaks_mib": peaks_json(sizes, ranks_of_node(topology)),
    }


# Partitions of a job's ranks -----------------------------------------------------------------------------------------


def pinned_guidance(config: Config) -> int | None:
    return None if config.guidance_parallel == "auto" else int(config.guidance_parallel)


def one_replica(topology: Topology, work: Workload) -> Partition:
    """As the engine divides the ranks of one replica: by the setting `guidance_parallel`; auto is 2 where the model has
    two branches and the ranks are even."""
    wanted = pinned_guidance(work.config) or (2 if topology.size % 2 == 0 else 1)
    return Partition(1, wanted if work.guides else 1)


def partitions_table(choice: Choice) -> list[str]:
    """All partitions; the one that is taken is marked, and said in a last line."""
    heading = ["replicas", "guidance", "ranks", "ulysses", "ring", "MiB a rank", "fits"]
    rows = [[*heading, "s an image", "images/h", "s in all", *(f"{link} GB" for link in LINK_CLASSES), ""]]
    for one in choice.listed:
        fits = {True: "yes", False: "no", None: "unknown"}[one.fits]
        row = [*one.partition, one.ulysses * one.ring, one.ulysses, one.ring, f"{one.need.total / MIB:.0f}", fits]
        times = ["-"] * (3 + len(LINK_CLASSES))
        if one.batch_s is not None and one.sent is not None:
            times = [f"{one.batch_s:.3f}", f"{one.images_per_hour:.0f}", f"{one.job_s:.1f}"]
            times += [f"{one.sent[link] / 1e9:.2f}" for link in LINK_CLASSES]
        rows.append([str(x) for x in (*row, *times, "<- taken" if one is choice.taken else "")])
    refused = [f"{one.replicas} replica(s), guidance {one.guidance}: {why}" for one, why in choice.refused.items()]
    return [*aligned(rows, ">" * 14 + "<"), *refused, choice.line()]


def partitions_as_json(choice: Choice) -> dict[str, Any]:
    """`deals`: all partitions; bytes of one image, or of one batch of images."""
    rows = [partition_as_json(one) | {"taken": one is choice.taken} for one in choice.listed]
    refused = [{**partition._asdict(), "error": str(why), "taken": False} for partition, why in choice.refused.items()]
    return {"images": choice.taken.images, "deals": rows + refused}


def partition_as_json(one: PricedPartition) -> dict[str, Any]:
    times = ("images_per_hour", "job_s", "first_s")
    return {
        **one.partition._asdict(),
        "ranks": one.ulysses * one.ring,
        "ulysses": one.ulysses,
        "ring": one.ring,
        "rank_mib": one.need.total / MIB,
        "fits": one.fits,
        "image_s": one.batch_s,
        **{name: None if one.batch_s is None else getattr(one, name) for name in times},
        "bytes_per_image": one.sent,
        "output_bytes_per_image": one.outputs,
    }


# Times ----------------------------------------------------------------------------------------------------------------


def add_times(
    values: dict[str, Any],
    pricer: Pricer,
    work: Workload,
    partition: Partition,
    plan: dict[str, Any],
    folder: Path | None,
) -> None:
    """Says the times of one replica and adds them to the plan; with --compare those of all presets, with plan.png in
    the folder that there is."""
    topology, latencies = pricer.topology, Latencies.of(pricer.topology.machine)
    first = parts_of(topology, work, partition)[0][0]
    chosen, config = pricer.step(work, partition), first.work.config
    codec = with_codec_chosen(work.config, first.topology, AttentionWork(work.shape.heads, work.shape.head_dim))[1]
    if codec is not None:
        say(codec)
    say("\n".join(summary(chosen)))
    plan["time"] = step_json(chosen)
    if config.selection == "full" and not config.exact_attention:
        exact = pricer.step(work.with_config(work.config.with_(codec="none", arrival="now")), partition)
        what = [name for name, plain in ((config.codec, "none"), (config.arrival, "now")) if name != plain]
        say(beside(chosen, exact, " and ".join(what)))
        plan["without_codec"] = step_json(exact)
    replayed = decisions_of(config, work.steps, work.decisions) if topology.size > 1 else None
    if replayed is not None:
        say(f"displaced as in a recorded run, {replayed.title()}")
        if folder is not None:
            (folder / "decisions.yaml").write_text(as_file(*(work.decisions or [replayed])))
    stable = values["stable"] if config.schedule == "threshold" else None
    decided = None if replayed is None else replayed.title()
    plan["assumed"] = {**latencies._asdict(), "stable": stable, "decisions": decided}
    if values["explain"]:
        told = explain(first, latencies)
        say("\n".join(told))
        if folder is not None:
            (folder / "explain.txt").write_text("\n".join(told) + "\n")
    if values["compare"] and values["images"] is None:
        rows = compare(values, pricer, work, partition, {values["preset"]: chosen})
        plan["compare"] = rows
        say("\n".join(compared(rows)))
        if folder is None:
            return
        side = values["size"]
        sides = "" if side is None else f" {side}x{side}"
        where = f"{work.shape.name}{sides} batch {values['batch']}, {topology.size} ranks on "
        plot_presets(rows, where + f"{topology.nodes} node(s) of {topology.machine.name}", folder / "plan.png")


def summary(step: PartitionStep) -> list[str]:
    plan = step.plan
    sent = ", ".join(f"{link} {plan.bytes[link] / 1e9:.2f}" for link in LINK_CLASSES)
    outputs = ", ".join(f"{link} {count / 1e6:.1f}" for link, count in step.outputs.items() if count)
    lines = [
        f"a step: {plan.step_s * 1e3:.1f} ms, of them {plan.compute_s * 1e3:.1f} ms compute and "
        f"{plan.communication_share:.0%} communication that nothing hides",
        f"an image ({plan.steps} steps, denoising alone): {plan.image_s:.2f} s",
        f"GB sent in a step by all ranks: {sent}",
    ]
    if plan.waits:
        lines.append(f"the host waits for the device {plan.waits:.0f} times a step, to know how many tokens travel")
    return [*lines, f"MB of outputs that guidance branches exchange in a step: {outputs}"] if outputs else lines


def beside(coded: PartitionStep, uncoded: PartitionStep, codec: str) -> str:
    """What a codec or displacement gains, in words: the step and the bytes of both. codec: their names."""
    step_s, whole_s = coded.plan.step_s, uncoded.plan.step_s
    sent, whole = (sum(step.plan.bytes.values()) for step in (coded, uncoded))
    told = f"without {codec}: {whole_s * 1e3:.1f} ms a step, exact"
    if not whole:
        return f"{told}; nothing is sent, so there is nothing to code"
    gain = f"{codec} takes {step_s / whole_s:.3f} of that time and sends {sent / whole:.3f} of the bytes"
    return f"{told}; {gain}" + ("" if step_s < whole_s else ": it does not pay here, choose codec none, arrival now")


def step_json(step: PartitionStep) -> dict[str, Any]:
    plan, times = step.plan, ("step_s", "image_s", "steps", "compute_s", "communication_share")
    return {
        **{name: getattr(plan, name) for name in times},
        "host_waits": plan.waits,
        "bytes_per_step": plan.bytes,
        "bytes_per_image": {link: count * plan.steps for link, count in plan.bytes.items()},
        "output_bytes_per_step": step.outputs,
    }


# All presets ----------------------------------------------------------------------------------------------------------


def compare(
    values: dict[str, Any], pricer: Pricer, work: Workload, partition: Partition, known: Mapping[str, PartitionStep]
) -> list[dict[str, Any]]:
    """One row for each preset, flat first. A preset that this machine cannot run says why instead of times."""
    rows: list[dict[str, Any]] = []
    for name in sorted(preset_names(), key=lambda name: name != "flat"):
        config = engine_record().preset(name, machine=values["machine"])
        of_preset = work.with_config(config)
        row: dict[str, Any] = {"preset": name, "exact": config.exact}
        try:
            step = known.get(name) or pricer.step(of_preset, partition)
            need = pricer.need(of_preset, partition)
        except UserError as error:
            rows.append(row | {"error": str(error)})
            continue
        tile = int(pricer.topology.machine.device.memory_gib * 2**30)
        row |= step_json(step) | {"rank_mib": need.total / 2**20, "fits": misfit(need, tile) is None if tile else None}
        row["over_flat"] = rows[0]["step_s"] / step.plan.step_s if rows and "step_s" in rows[0] else 1.0
        rows.append(row)
    return rows


def compared(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    heading = ["preset", "ms a step", "s an image", "over flat", "comm.", *(f"{link} GB" for link in LINK_CLASSES)]
    table = [[*heading, "memory"]]
    for row in rows:
        if "error" in row:
            table.append([row["preset"], row["error"]])
            continue
        times = [f"{row['step_s'] * 1e3:.1f}", f"{row['image_s']:.2f}", f"{row['over_flat']:.2f}x"]
        sent = [f"{row['bytes_per_step'][link] / 1e9:.2f}" for link in LINK_CLASSES]
        fits = {True: "fits", False: "does not fit", None: "unknown"}[row["fits"]] + ("" if row["exact"] else "; lossy")
        memory = f"{row['rank_mib']:.0f} MiB a rank: {fits}"
        table.append([row["preset"], *times, f"{row['communication_share']:.0%}", *sent, memory])
    return aligned(table, "<" + ">" * 8 + "<")


# One layer ------------------------------------------------------------------------------------------------------------


def explain(part: Part, latencies: Latencies) -> list[str]:
    """The spans of the rank that computes longest, of its main thread and lanes, in one layer of each kind, and whom
    rank 0 sends what. part: its own."""
    work, lines = part.work, []
    case = part.case(work.load)
    for kind, plans in plan_layers(case, latencies):
        for call, plan in plans.items():
            about = named(call, work.config)
            lines.append(f"layer {kind.name}, {about}: {plan.seconds * 1e3:.3f} ms; ms from its start:")
            for span in sorted(plan.spans, key=lambda span: (span.start_s, span.end_s)):
                when = f"{span.start_s * 1e3:9.3f} to {span.end_s * 1e3:9.3f}"
                lines.append(f"  {when}  {span.lane:<8} {span.name}")
    return lines + messages(case)


def named(kind: CallKind, config: Config) -> str:
    """What calls of a kind send, and what they do not wait for."""
    if config.selection != "full":
        return "all tokens travel" if kind.whole else f"{kind.stable:.0%} of the tokens stay"
    if kind.whole:
        return "all tokens travel" if config.exact_attention else "whole"
    coded = "as they are" if config.codec == "none" else f"coded in {config.codec}" + ", twice the bits" * kind.fine
    if not kind.displaced:
        return coded
    return f"{coded}, {', '.join(kind.displaced)} displaced (the last of {SITES} layers)"


def messages(case: Case) -> list[str]:
    """The meshes of Ulysses and Ring that ranks and heads allow, and rank 0's plan of messages in its Ulysses group, of
    q, k or v with all tokens, coded where the settings have a codec."""
    if case.topology.size == 1:
        return ["one rank: nothing is sent"]
    head_bytes = costs_of(case.config).sent_bytes(case.shape.head_dim, case.load.itemsize)
    work = AttentionWork(case.shape.heads, case.shape.head_dim, case.load.segments, case.load.batch, case.load.itemsize)
    work = replace(work, head_bytes=head_bytes)
    lines = ["meshes of Ulysses and Ring for one attention call, all ranks' MB (docs/exchange.md):"]
    lines += meshes_table(worth_listing(case.topology, work, case.mesh), case.mesh)
    group, slot = case.mesh.group_and_slot(0)
    topology = case.mesh.parts[group]
    if topology.size == 1:
        return lines
    layout = case.mesh.layouts(case.load.segments, case.shape.heads)[group]
    cell = case.load.batch * head_bytes
    names = list(EXCHANGES) if case.config.exchange == "auto" else [case.config.exchange]
    for name in names:
        for number, phase in enumerate(plan_of(topology, slot, name, case.config.nic_balance), 1):
            lines.append(f"rank 0, {name}, phase {number} of q, k or v, lane {phase.lane}:")
            lines += sends(phase, topology, slot, layout, cell)
    return lines


def sends(phase: Phase, topology: Topology, slot: int, layout: Layout, cell: int) -> list[str]:
    lines = []
    for peer, blocks in list(phase.sends.items())[:PEERS_SHOWN]:
        size = sum(layout.rows[block.rows] * layout.heads[block.heads] * cell for block in blocks)
        about = [f"{block.rows} for {block.heads}" for block in blocks[:4]] + ["..."] * (len(blocks) > 4)
        link = topology.link_class(slot, peer)
        lines.append(f"  to {peer:<4} {link:<12} {size / 1e6:9.3f} MB  rows of {', '.join(about)}")
    hidden = len(phase.sends) - PEERS_SHOWN
    return lines + ([f"  and {hidden} more"] if hidden > 0 else [])


def plot_presets(rows: Sequence[Mapping[str, Any]], where: str, path: Path) -> None:
    """A step's compute and open communication for every preset, and the bytes it sends over each class of links."""
    from matplotlib.figure import Figure

    shown = [row for row in rows if "step_s" in row]
    names = [row["preset"] for row in shown]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, sent = figure.subplots(1, 2)
    compute, whole = ([row[key] * 1e3 for row in shown] for key in ("compute_s", "step_s"))
    opened = [max(0.0, w - c) for w, c in zip(whole, compute, strict=True)]
    times.bar(names, compute, color="#4e79a7", label="compute")
    times.bar(names, opened, bottom=compute, color="#f28e2b", label="communication that nothing hides")
    for x, (row, top) in enumerate(zip(shown, whole, strict=True)):
        note = f"{row['over_flat']:.2f}x" + ("" if row["exact"] else "\nlossy")
        times.text(x, top, note, ha="center", va="bottom", fontsize=8)
    times.set(ylabel="ms a step", ylim=(0, max(whole) * 1.25), title="time (speed-up over flat)")
    times.legend(fontsize=8)
    below = [0.0] * len(shown)
    colours = {"sibling": "#76b7b2", "plane": "#59a14f", "cross_plane": "#edc948", "node": "#e15759"}
    for link, colour in colours.items():
        count = [row["bytes_per_step"][link] / 1e9 for row in shown]
        sent.bar(names, count, bottom=below, color=colour, label=link)
        below = [a + b for a, b in zip(below, count, strict=True)]
    sent.set(ylabel="GB a step, all ranks", title="payload by class of link", ylim=(0, max(below) * 1.25 or 1))
    sent.legend(fontsize=8, ncols=2)
    for axes in (times, sent):
        axes.tick_params(axis="x", labelrotation=20)
    figure.suptitle(where, fontsize=10)
    figure.savefig(path, dpi=110)
