"""The output of `cocodiff plan`: memory, the partitions of a job's ranks, a preset's step, all presets side by side,
and one layer in detail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from cocodiff.comm.trace import LINK_CLASSES
from cocodiff.config.config import Config, preset_names
from cocodiff.config.errors import UserError
from cocodiff.config.grouping import by_key
from cocodiff.config.registry import EXCHANGES
from cocodiff.config.text_table import aligned
from cocodiff.engine.assemble import AttentionWork, with_codec_chosen
from cocodiff.exchange.codec import CallKind
from cocodiff.jobs.options import engine_record
from cocodiff.jobs.terminal import say
from cocodiff.models.adapter import IMAGE, TEXT
from cocodiff.models.family import Video
from cocodiff.planner.automatic import price_meshes
from cocodiff.planner.case import Case
from cocodiff.planner.choice import Choice, Division, choices_of, ends_of, pays, turning_points, uncoded
from cocodiff.planner.decisions import as_file, decisions_of
from cocodiff.planner.layers import SITES, StepPlan, plan_layers
from cocodiff.planner.memory import KEPT, MIB, Peaks, RankMemory, add, largest_batch, mib, misfit, size_peaks, size_run
from cocodiff.topology import Topology
from cocodiff.topology.axes import Axes
from cocodiff.topology.layout import Layout
from cocodiff.topology.routes.plans import Phase, plan_of

Document = dict[str, Any]  # a part of plan.json, from which the printed lines are made
PEERS_SHOWN = 6  # messages of one phase that are printed
WORTH_SAYING = 0.1  # an end of a range that changes a step by a smaller share of it is not reported
GIGABYTES = [f"{link} GB" for link in LINK_CLASSES]
FITS = {True: "yes", False: "no", None: "unknown"}
ROWS = {  # rows of the table of memory, with the field of `RankMemory`
    "cache: q, k, v of the image": "image_cache",
    "cache: scoring reference": "reference_cache",
    "cache: q, k, v of the text": "text_cache",
    "cache: reconstructions": "reconstructions",
    "cache: messages in flight": "in_flight",
    "cache: steps that are left out": "step_cache",
    "cache": "cache",
    "weights": "weights",
    "activations (estimate)": "activations",
    "library of messages": "library",
    "total": "total",
}


def record_of(division: Division, values: dict[str, Any], video: Video) -> Document:
    """Return the section "case" of plan.json: model, sizes, preset, machine, ranks and their division.

    Args:
        division: the plan.
        values: the command's options by name.
        video: the size of the video or image.
    """
    (case,), partition = division.cases, division.partition
    shape, topology = case.shape, case.topology
    told: Document = {"model": shape.name, "size": values["size"]}
    if shape.video is not None:
        told |= {"frames": video.frames, "height": video.height, "width": video.width}
    told |= {"batch": values["batch"], "image_tokens": case.tokens(IMAGE), "text_tokens": case.tokens(TEXT)}
    told |= {"branches": case.branches, "dtype": values["dtype"], "preset": values["preset"]}
    told |= {"machine": topology.machine.name, "nodes": topology.nodes, "ranks": topology.size}
    return told | {"replicas": partition.replicas, "guidance_parallel": partition.guidance}


def memory_of(division: Division, video: Video) -> tuple[dict[str, Any], str | None]:
    """Return (the sections of plan.json about memory, the reason why a rank does not fit a tile). The reason is None if
    it fits or a tile's memory is not known.

    Sections are in MiB: the memory of the fullest rank ("rank"), of one of its attention layers in one guidance branch
    ("site"), of the fullest node ("node"), and of text encoders and VAE.

    Args:
        division: the plan.
        video: the size of the video or image.
    """
    (case,), (replicas, guidance), parts = division.cases, division.partition, [*chain(*division.parts[0])]
    topology, tile, of_ranks = case.topology, case.tile, dict[int, tuple[RankMemory, RankMemory]]()
    for ranks, part in zip(chain(*Axes.build(topology, replicas, guidance).branches), parts, strict=True):
        one_site = replace(part.shape, joint_layers=1, parallel_layers=0, image_layers=0)
        site = replace(part, shape=one_site, branches=1, known_mesh=part.mesh)
        of_ranks |= zip(ranks, zip(size_run(part), size_run(site), strict=True), strict=True)
    rank, site_there = max(of_ranks.values(), key=lambda sizes: sizes[0].total)
    on_nodes = [add([of_ranks[rank][0] for rank in ranks]) for ranks in topology.on_node.values()]
    node, why = max(on_nodes, key=lambda node: node.total), misfit(rank, tile)
    batch = max(1, case.batch // case.shape.rows_per_image)
    peaks = size_peaks(case.shape, topology, video, batch, case.itemsize, replicas)
    sizes: Document = {"site": in_mib(site_there, (*KEPT, "cache")), "rank": in_mib(rank, ROWS.values())}
    told = {
        "memory_mib": {**sizes, "node": in_mib(node, ROWS.values()), "tile": None if tile is None else tile / MIB},
        "fits": None if tile is None else why is None,
        "largest_batch": None if tile is None else min(largest_batch(part, tile) for part in parts),
        "peaks_mib": None if peaks is None else peaks_in_mib(peaks, rank, tile, ranks_of_node(topology)),
    }
    return told, why


def in_mib(of: RankMemory, names: Iterable[str]) -> dict[str, float]:
    """Return some fields of a rank's memory in MiB, by name.

    Args:
        of: the memory in bytes.
        names: names of the fields.
    """
    return {name: getattr(of, name) / MIB for name in names}


def peaks_in_mib(peaks: Peaks, rank: RankMemory, tile: int | None, ranks: int) -> dict[str, Any]:
    """Return the section "peaks_mib" of plan.json: the memory of text encoders and VAE, in MiB.

    For each value of the setting `vae` it has the VAE's peaks, the phase of a run in which a rank holds most (which may
    be denoising), and whether the rank's memory suffices then.

    Args:
        peaks: the memory of text encoders and VAE, before and after the denoising steps, in bytes.
        rank: memory, in a denoising step, of the rank that needs most then.
        tile: bytes of memory on the tile of a GPU card that a rank has; None if not known.
        ranks: number of ranks on the node that has most.
    """
    of_vae: dict[str, Document] = {}
    for how, (encoding, decoding, decoders) in peaks.of_vae.items():
        when, need = max(peaks.of_rank(rank, how).items(), key=lambda phase: phase[1])
        told: Document = {"encoding_rank": encoding / MIB, "encoding_node": encoding * ranks / MIB}
        told |= {"decoding_rank": decoding / MIB, "decoding_node": decoding * decoders / MIB, "decoders_node": decoders}
        told |= {"fullest_rank": need / MIB, "fullest_when": when, "fits": None if tile is None else need <= tile}
        of_vae[how] = told
    return {"text_encoders": peaks.encoders / MIB, "vae_weights": peaks.vae / MIB, "vae": of_vae}


def title_of(case: Document) -> str:
    """Return a line that names the model, the sizes and the ranks of a plan.

    Args:
        case: the section "case" of plan.json.
    """
    frames = "" if case.get("frames", 1) == 1 else f"{case['frames']} frames of "
    height, width = (case.get(name, case["size"]) for name in ("height", "width"))
    made = f"{frames}{height}x{width} batch {case['batch']}, {case['branches']} branch(es), {case['dtype']}"
    return f"{case['model']} {made}: {case['ranks']} rank(s) on {case['nodes']} node(s) of {case['machine']}"


def memory_table(plan: Document, topology: Topology, why: str | None) -> list[str]:
    """Return the lines that `cocodiff plan` prints about memory: a heading, the table, and what fits.

    Args:
        plan: the content of plan.json, with its sections about memory.
        topology: all ranks.
        why: the reason why a rank does not fit a tile; None if it fits.
    """
    case, of, peaks = plan["case"], plan["memory_mib"], plan["peaks_mib"]
    lines = [f"{title_of(case)}, preset {case['preset']}", f"{'MiB':<28}{'a layer':>12}{'a rank':>12}{'a node':>12}"]
    rows = [(name, of["site"].get(field), of["rank"][field], of["node"][field]) for name, field in ROWS.items()]
    if peaks is not None:
        rows.append(("text encoders, at the start", None, peaks["text_encoders"], peaks["text_encoders"]))
        rows.append(("VAE: weights", None, peaks["vae_weights"], peaks["vae_weights"] * ranks_of_node(topology)))
        for what in ("encoding", "decoding"):
            for how, peak in peaks["vae"].items():
                if (what, how) != ("encoding", "all"):  # equal to that with one
                    rows.append((f"VAE: {what}, {how}", None, peak[f"{what}_rank"], peak[f"{what}_node"]))
    for name, *cells in rows:
        lines.append(f"{name:<28}" + "".join(f"{'' if x is None else mib(x * MIB):>12}" for x in cells))
    if peaks is None:
        lines.append("text encoders and VAE: not known of this model")
    tile = of["tile"]
    if tile is None:
        return [*lines, f"machine {case['machine']} does not say how much memory a rank has"]
    left = f"fits: {mib((tile - of['rank']['total']) * MIB)} of {mib(tile * MIB)} MiB of a tile are left"
    lines += [f"does not fit: {why}" if why else left, f"largest batch that fits: {plan['largest_batch']}"]
    told: dict[str, list[str]] = {}
    for how, peak in (peaks or {"vae": {}})["vae"].items():
        fits = "fits" if peak["fits"] else "does not fit"
        at_most = f"{mib(peak['fullest_rank'] * MIB)} MiB at the fullest, {peak['fullest_when']}: {fits}"
        told.setdefault(at_most, []).append(how)
    return lines + [f"with text encoders and VAE, vae {' or '.join(hows)}: {at_most}" for at_most, hows in told.items()]


def ranks_of_node(topology: Topology) -> int:
    """Return the number of ranks on the fullest node."""
    return max(map(len, topology.on_node.values()))


# Partitions of a job's ranks -----------------------------------------------------------------------------------------


def partitions_of_job(choice: Choice) -> Document:
    """Return the sections "images" and "deals" of plan.json: the number of images, and a row for each way to divide the
    ranks.

    A row has the mesh, memory and predicted times, or the error by which it is impossible. `image_s` and bytes per
    image are of one call of the pipeline, which may make a batch of images.

    Args:
        choice: all partitions of the ranks, and the one that was chosen.
    """
    rows: list[Document] = []
    for one in choice.listed:
        names = ("image_s", "images_per_hour", "job_s", "first_s", "bytes_per_image", "output_bytes_per_image")
        mesh = {"ranks": one.mesh.topology.size, "ulysses": one.mesh.ulysses, "ring": one.mesh.ring}
        memory = {"rank_mib": one.need.total / MIB, "fits": one.fits}
        times = {name: None if choice.reason else getattr(one, name) for name in names}
        rows.append({**one.partition._asdict(), **mesh, **memory, **times, "taken": one is choice.taken})
    rows += [{**partition._asdict(), "error": str(why), "taken": False} for partition, why in choice.refused.items()]
    return {"images": choice.taken.images, "deals": rows}


def partitions_table(deals: Sequence[Document]) -> list[str]:
    """Return the lines of the table of all partitions of the ranks, with the chosen one marked. Impossible ones follow
    with their errors.

    Args:
        deals: the rows of the section "deals" of plan.json.
    """
    heading = ["replicas", "guidance", "ranks", "ulysses", "ring"]
    rows = [[*heading, "MiB a rank", "fits", "s an image", "images/h", "s in all", *GIGABYTES, ""]]
    refused = []
    for one in deals:
        if "error" in one:
            refused.append(f"{one['replicas']} replica(s), guidance {one['guidance']}: {one['error']}")
            continue
        row = [*(str(one[name]) for name in heading), f"{one['rank_mib']:.0f}", FITS[one["fits"]]]
        times = ["-"] * (3 + len(LINK_CLASSES))
        if one["image_s"] is not None:
            times = [f"{one['image_s']:.3f}", f"{one['images_per_hour']:.0f}", f"{one['job_s']:.1f}"]
            times += gigabytes(one["bytes_per_image"])
        rows.append([*row, *times, "<- taken" if one["taken"] else ""])
    return [*aligned(rows, ">" * 14 + "<"), *refused]


def gigabytes(sent: Mapping[str, float]) -> list[str]:
    """Return numbers of bytes in GB as texts, in the order of the link classes.

    Args:
        sent: bytes by link class.
    """
    return [f"{sent[link] / 1e9:.2f}" for link in LINK_CLASSES]


# Times ----------------------------------------------------------------------------------------------------------------


def say_all(lines: Sequence[str]) -> None:
    """Print lines on the terminal, if there are any."""
    if lines:
        say("\n".join(lines))


def add_times(values: dict[str, Any], division: Division, plan: Document, folder: Path | None) -> None:
    """Print the predicted times of one replica and add them to the content of plan.json; with --compare also those of
    all presets.

    Args:
        values: the command's options by name.
        division: the plan.
        plan: the content of plan.json, which is added to.
        folder: folder of the results, which decisions.yaml and plan.png are written to as the options ask; None for
            none.
    """
    (case,), first = division.cases, division.parts[0][0][0]
    topology, config, step = case.topology, first.config, step_json(division.steps[0])
    plan["time"] = step
    work = AttentionWork(case.shape.heads, case.shape.head_dim)
    codec = with_codec_chosen(case.config, first.topology, work)[1]
    say_all([*filter(None, [codec]), *summary(step)])
    if config.selection == "full" and not config.exact_attention:
        plan["without_codec"] = step_json(uncoded(division))
        what = [name for name, plain in ((config.codec, "none"), (config.arrival, "now")) if name != plain]
        say_all([beside(step, plan["without_codec"], " and ".join(what)), *limits_of_codec(division)])
    replayed = decisions_of(config, case.steps, case.decisions) if topology.size > 1 else None
    title = None if replayed is None else replayed.title()
    if replayed is not None:
        say(f"displaced as in a recorded run, {title}")
        if folder is not None:
            (folder / "decisions.yaml").write_text(as_file(*(case.decisions or [replayed])))
    stable = case.stable if config.schedule == "threshold" else None
    plan["assumed"] = {**case.latencies._asdict(), "stable": stable, "decisions": title}
    if values["explain"]:
        say_all(explain(first))
    plan["beliefs"] = rows = at_both_ends(division)
    say_all(ends_table(rows, step["step_s"], choices_of(division), topology.machine.name))
    if values["compare"] and values["images"] is None:
        plan["compare"] = rows = compare(division, values["machine"], {values["preset"]: step})
        say_all([*compared(rows), *(fastest_at_ends(division, values["machine"], rows) if topology.size > 1 else [])])
        if folder is not None:
            plot_presets(rows, title_of(plan["case"]), folder / "plan.png")


def step_json(step: StepPlan) -> Document:
    """Return the predicted costs of a step as a section of plan.json, by name."""
    names = ("step_s", "image_s", "steps", "compute_s", "communication_share")
    told = {name: getattr(step, name) for name in names} | {"host_waits": step.waits, "bytes_per_step": step.bytes}
    return told | {"bytes_per_image": step.of_image(step.bytes), "output_bytes_per_step": step.outputs}


def summary(step: Document) -> list[str]:
    """Return the lines that `cocodiff plan` prints about a step: its time, an image's time, bytes and waits.

    Args:
        step: the step's section of plan.json.
    """
    sent = ", ".join(f"{link} {count / 1e9:.2f}" for link, count in step["bytes_per_step"].items())
    outputs = [f"{link} {count / 1e6:.1f}" for link, count in step["output_bytes_per_step"].items() if count]
    lines = [
        f"a step: {step['step_s'] * 1e3:.1f} ms, of them {step['compute_s'] * 1e3:.1f} ms compute and "
        f"{step['communication_share']:.0%} communication that nothing hides",
        f"an image ({step['steps']} steps, denoising alone): {step['image_s']:.2f} s",
        f"GB sent in a step by all ranks: {sent}",
    ]
    if waits := step["host_waits"]:
        lines.append(f"the host waits for the device {waits:.0f} times a step, to know how many tokens travel")
    if outputs:
        lines.append(f"MB of outputs that guidance branches exchange in a step: {', '.join(outputs)}")
    return lines


def beside(coded: Document, uncoded: Document, codec: str) -> str:
    """Return a line that compares the time and bytes of a step with and without a codec or displacement.

    Args:
        coded: the section of plan.json about the step with them.
        uncoded: the section about the step without them.
        codec: names of the codec and the kind of displacement.
    """
    step_s, whole_s = coded["step_s"], uncoded["step_s"]
    sent, whole = (sum(step["bytes_per_step"].values()) for step in (coded, uncoded))
    told = f"without {codec}: {whole_s * 1e3:.1f} ms a step, exact"
    if not whole:
        return f"{told}; nothing is sent, so there is nothing to code"
    gain = f"{codec} takes {step_s / whole_s:.3f} of that time and sends {sent / whole:.3f} of the bytes"
    return f"{told}; {gain}" + ("" if step_s < whole_s else ": it does not pay here, choose codec none, arrival now")


# What is believed of the machine --------------------------------------------------------------------------------------


def at_both_ends(division: Division) -> list[Document]:
    """Return the section "beliefs" of plan.json: the plan at both ends of the range of every value that was not
    measured on the machine.

    These values are the machine file's beliefs. A row has the value's name, its value at that end, a step's predicted
    seconds, and mesh and codec in words. Ends that are the file's own value have no row.
    """
    return [
        {"belief": belief.name, "value": value, "step_s": there.steps[0].step_s, "choices": choices_of(there)}
        for belief, _, value, there in ends_of(division)
    ]


def ends_table(rows: Sequence[Document], step_s: float, choices: str, machine: str) -> list[str]:
    """Return the lines about values that were not measured: those ends of their ranges that change a step by more than
    WORTH_SAYING, or the mesh or the codec.

    Args:
        rows: the section "beliefs" of plan.json.
        step_s: seconds of a step with the machine file's values.
        choices: mesh and codec with these values, in words.
        machine: name of the machine.
    """
    table = [["not measured:", "if it is", "ms a step", "times", "then"]]
    for row in rows:
        ratio, other = row["step_s"] / step_s, row["choices"] if row["choices"] != choices else ""
        if other or abs(ratio - 1) > WORTH_SAYING:
            table.append([row["belief"], f"{row['value']:g}", f"{row['step_s'] * 1e3:.1f}", f"{ratio:.2f}", other])
    rest = sorted({row["belief"] for row in rows} - {cells[0] for cells in table})
    lines = aligned(table, "<>>><") if len(table) > 1 else []
    small = f"a step changes by less than {WORTH_SAYING:.0%} over what is believed of {', '.join(rest)} on {machine}"
    return lines + ([small] if rest else [])


def limits_of_codec(division: Division) -> list[str]:
    """Return a line for every unmeasured value of the machine file that decides whether a codec or displacement saves
    time, with the value at which it no longer does (or begins to)."""
    gains = pays(division)
    then = "costs time" if gains else "pays"
    return [
        f"that hangs on {belief.name} ({believed:g}): {'below' if value < believed else 'above'} {at:.3g} it {then}"
        for (belief, believed, value, _), at in turning_points(division, pays)
    ]


# All presets ----------------------------------------------------------------------------------------------------------


def compare(division: Division, machine: str, known: Mapping[str, Document]) -> list[Document]:
    """Return the section "compare" of plan.json: a row for each preset with its costs, flat first.

    A preset that this machine cannot run has an error instead of times.

    Args:
        division: the plan, whose settings each preset replaces.
        machine: the option --machine.
        known: sections about the steps of presets that are planned already, by preset.
    """
    rows: list[Document] = []
    (case,) = division.cases
    for name in sorted(preset_names(), key=lambda name: name != "flat"):
        config = engine_record().preset(name, machine=machine, image_tokens=case.config.image_tokens)
        of_preset = replace(division, cases=[replace(case, config=config)])
        row: Document = {"preset": name, "exact": config.exact}
        rows.append(row)
        try:
            step, need = known.get(name) or step_json(of_preset.steps[0]), of_preset.need
            row |= step | {"rank_mib": need.total / MIB, "fits": of_preset.fits}
            row["over_flat"] = rows[0].get("step_s", step["step_s"]) / step["step_s"]
        except UserError as error:
            row["error"] = str(error)
    return rows


def fastest_at_ends(division: Division, machine: str, rows: Sequence[Document]) -> list[str]:
    """Return a line for every end of an unmeasured value's range at which another preset is fastest than with the
    machine file's value: of the exact presets, or of all.

    Args:
        division: the plan with the machine file's values.
        machine: the option --machine.
        rows: the section "compare" of plan.json with these values.
    """
    found = ((end, fastest(compare(end.division, machine, {}))) for end in ends_of(division))
    now = fastest(rows)
    return [f"fastest with {end.belief.name} {end.value:g}: {at}, not {now}" for end, at in found if at != now]


def fastest(rows: Sequence[Document]) -> str:
    """Return the names of the fastest exact preset and of the fastest of all presets, as "flat and ahead"; one name if
    they are the same preset.

    Args:
        rows: the section "compare" of plan.json.
    """
    timed = [row for row in rows if "step_s" in row]
    exact = [row for row in timed if row["exact"]]
    return " and ".join(dict.fromkeys(min(some, key=lambda row: row["step_s"])["preset"] for some in (exact, timed)))


def compared(rows: Sequence[Document]) -> list[str]:
    """Return the lines of the table of all presets.

    Args:
        rows: the section "compare" of plan.json.
    """
    table = [["preset", "ms a step", "s an image", "over flat", "comm.", *GIGABYTES, "memory"]]
    for row in rows:
        if "error" in row:
            table.append([row["preset"], row["error"]])
            continue
        times = [f"{row['step_s'] * 1e3:.1f}", f"{row['image_s']:.2f}", f"{row['over_flat']:.2f}x"]
        fits = {True: "fits", False: "does not fit", None: "unknown"}[row["fits"]] + ("" if row["exact"] else "; lossy")
        memory = f"{row['rank_mib']:.0f} MiB a rank: {fits}"
        sent = gigabytes(row["bytes_per_step"])
        table.append([row["preset"], *times, f"{row['communication_share']:.0%}", *sent, memory])
    return aligned(table, "<" + ">" * 8 + "<")


# One layer ------------------------------------------------------------------------------------------------------------


def explain(case: Case) -> list[str]:
    """Return the lines of --explain: what one layer of each kind does when, on the rank that computes longest, and rank
    0's messages.

    Args:
        case: the case of the first ranks that share a sequence.
    """
    lines = []
    for kind, plans in plan_layers(case):
        for call, plan in plans.items():
            about = named(call, case.config)
            lines.append(f"layer {kind.name}, {about}: {plan.seconds * 1e3:.3f} ms; ms from its start:")
            for span in sorted(plan.spans, key=lambda span: (span.start_s, span.end_s)):
                lines.append(f"  {span.start_s * 1e3:9.3f} to {span.end_s * 1e3:9.3f}  {span.lane:<8} {span.name}")
    return lines + messages(case)


def named(kind: CallKind, config: Config) -> str:
    """Return in words how attention calls of a kind send tensors: how many tokens, in which code, and which are
    displaced.

    For instance "50% of the tokens stay" (are not sent), or "coded in int8, q, k displaced" (no call waits for q and
    k).
    """
    if config.selection != "full":
        return "all tokens travel" if kind.whole else f"{kind.stable:.0%} of the tokens stay"
    if kind.whole:
        return "all tokens travel" if config.exact_attention else "whole"
    coded = "as they are" if config.codec == "none" else f"coded in {config.codec}" + ", twice the bits" * kind.fine
    if not kind.displaced:
        return coded
    return f"{coded}, {', '.join(kind.displaced)} displaced (the last of {SITES} layers)"


def messages(case: Case) -> list[str]:
    """Return the lines of --explain about messages: the meshes that ranks and heads allow, and what rank 0 sends in its
    Ulysses group.

    The messages are those of q, k or v with all tokens, coded if the settings have a codec.
    """
    if case.topology.size == 1:
        return ["one rank: nothing is sent"]
    lines = ["meshes of Ulysses and Ring, all ranks' MB of an attention call and ms of a layer (docs/exchange.md):"]
    lines += meshes_table(case)
    group, slot = case.mesh.group_and_slot(0)
    topology = case.mesh.parts[group]
    if topology.size == 1:
        return lines
    layout = case.mesh.layouts(case.segments, case.shape.heads)[group]
    cell = case.batch * case.codec.sent_bytes(case.shape.head_dim, case.itemsize)
    for name in list(EXCHANGES) if case.config.exchange == "auto" else [case.config.exchange]:
        for number, phase in enumerate(plan_of(topology, slot, name, case.config.nic_balance), 1):
            lines.append(f"rank 0, {name}, phase {number} of q, k or v, lane {phase.lane}:")
            lines += sends(phase, topology, slot, layout, cell)
    return lines


def meshes_table(case: Case) -> list[str]:
    """Return the lines of the table of all meshes whose rings pass keys round, and of other kinds of rings that are
    faster, with the chosen one marked."""
    found = price_meshes(case.config.with_(ring="auto", ring_kind="auto", placement="auto"), case.topology, case.work)
    of_keys = by_key((one.mesh.ring, one.seconds) for one in found if one.mesh.kind == "keys")
    sent = ("sibling MB", "plane MB", "cross MB", "node MB", "busiest MB")
    lines = [["ulysses", "ring", "placement", "heads a slot", "idle", *sent, "ms", ""]]
    for mesh, messages, seconds in sorted(found, key=lambda one: (one.mesh.ring, one.seconds)):
        if mesh.kind != "keys" and mesh != case.mesh and seconds >= min(of_keys[mesh.ring]):
            continue
        name = "-" if 1 in (mesh.ring, mesh.ulysses) else f"{mesh.placement}, by {mesh.axis}"
        name += "" if mesh.kind == "keys" else f", {mesh.kind}"
        heads = mesh.heads(case.shape.heads)
        idle = max(heads) * len(heads) / sum(heads)  # the cost of uneven heads: the largest number over the mean
        megabytes = [f"{count / 1e6:.2f}" for count in (*messages.bytes.values(), messages.busiest_node)]
        held = "-".join(map(str, sorted({*heads})))
        cells = [str(mesh.ulysses), str(mesh.ring), name, held, f"{idle:.3f}", *megabytes, f"{seconds * 1e3:.3f}"]
        lines.append([*cells, "<- taken" if mesh == case.mesh else ""])
    return aligned(lines, ">><" + ">" * 8 + "<")


def sends(phase: Phase, topology: Topology, slot: int, layout: Layout, cell: int) -> list[str]:
    """Return lines with the messages that one rank sends in one phase of an exchange, the first PEERS_SHOWN of them.

    Args:
        phase: the phase.
        topology: the ranks of a Ulysses group.
        slot: index of the rank in the group.
        layout: the tokens and heads of each rank.
        cell: bytes of one token and head.
    """
    lines = []
    for peer, blocks in list(phase.sends.items())[:PEERS_SHOWN]:
        size = sum(layout.rows[block.rows] * layout.heads[block.heads] * cell for block in blocks)
        about = [f"{block.rows} for {block.heads}" for block in blocks[:4]] + ["..."] * (len(blocks) > 4)
        link = topology.link_class(slot, peer)
        lines.append(f"  to {peer:<4} {link:<12} {size / 1e6:9.3f} MB  rows of {', '.join(about)}")
    hidden = len(phase.sends) - PEERS_SHOWN
    return lines + ([f"  and {hidden} more"] if hidden > 0 else [])


def plot_presets(rows: Sequence[Mapping[str, Any]], where: str, path: Path) -> None:
    """Draw plan.png: each preset's computation and unhidden communication in a step, and the bytes that it sends over
    each class of links.

    Args:
        rows: the section "compare" of plan.json.
        where: the title: model, batch and ranks.
        path: file that the picture is written to.
    """
    from matplotlib.figure import Figure

    shown = [row for row in rows if "step_s" in row]
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    times, sent = figure.subplots(1, 2)
    ms_2R = 1e3 * np.array([[row["compute_s"], max(0.0, row["step_s"] - row["compute_s"])] for row in shown]).T
    gb_CR = np.array([[row["bytes_per_step"][link] / 1e9 for link in LINK_CLASSES] for row in shown]).T
    of_time = ("compute", "communication that nothing hides")
    for axes, labels, parts in ((times, of_time, ms_2R), (sent, LINK_CLASSES, gb_CR)):
        for label, height_R, top_R in zip(labels, parts, parts.cumsum(0), strict=True):
            axes.bar([row["preset"] for row in shown], height_R, bottom=top_R - height_R, label=label)
        axes.set_ylim(0, 1.25 * parts.sum(0).max() or 1)  # room for the legend
        axes.legend(fontsize=8, ncols=len(labels) // 2)
        axes.tick_params(axis="x", labelrotation=20)
    times.bar_label(times.containers[1], [f"{row['over_flat']:.2f}x" + "\nlossy" * (not row["exact"]) for row in shown])
    times.set(ylabel="ms a step", title="time (speed-up over flat)")
    sent.set(ylabel="GB a step, all ranks", title="payload by class of link")
    figure.suptitle(where, fontsize=10)
    figure.savefig(path, dpi=110)
