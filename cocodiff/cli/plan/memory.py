"""The memory part of `cocodiff plan`, and the deals of a job's ranks: figures, tables and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from cocodiff.config import Config
from cocodiff.models.family import Video
from cocodiff.models.tokens import IMAGE, TEXT
from cocodiff.planning.deals import Deal
from cocodiff.planning.memory import KEPT, MIB, Load, ModelShape, RankMemory, add, largest_batch, mib, misfit, size_run
from cocodiff.planning.partition import Choice, PricedDeal, Workload, parts_of
from cocodiff.planning.peaks import Peaks, size_peaks
from cocodiff.text_table import aligned
from cocodiff.topology.machine import Topology
from cocodiff.trace import LINK_CLASSES


@dataclass(frozen=True)
class Sizes:
    """A plan's memory, in bytes. site: one joint attention of one branch on the fullest rank; node: the fullest.
    tile: the machine's memory of one rank, None where its file does not say; then `largest`, in images, is None too.
    peaks: of text encoders and VAE; None where the model's VAE is not known."""

    site: RankMemory
    rank: RankMemory
    node: RankMemory
    tile: int | None
    largest: int | None
    peaks: Peaks | None = None


def size(topology: Topology, work: Workload, deal: Deal, video: Video) -> Sizes:
    """video: what is made, or an image."""
    found: dict[int, RankMemory] = {}
    sites: dict[int, RankMemory] = {}
    largest_of_parts = []
    tile = int(topology.machine.device.memory_gib * 2**30) or None
    for part in (part for of_replica in parts_of(topology, work, deal) for part in of_replica):
        shape, load, mesh = part.work.shape, part.work.load, part.mesh
        one_site = replace(shape, joint_layers=1, parallel_layers=0, image_layers=0)
        found |= zip(part.ranks, size_run(shape, part.topology, load, mesh), strict=True)
        sites |= zip(part.ranks, size_run(one_site, part.topology, replace(load, branches=1), mesh), strict=True)
        if tile is not None:
            largest_of_parts.append(largest_batch(shape, part.topology, load, tile, mesh))
    of_ranks = [found[rank] for rank in range(topology.size)]
    fullest = max(range(topology.size), key=lambda rank: of_ranks[rank].total)
    nodes = [add([of_ranks[p.rank] for p in topology.places if p.node == node]) for node in range(topology.nodes)]
    node = max(nodes, key=lambda node: node.total)
    batch = max(1, work.load.batch // work.shape.rows_per_image)
    peaks = size_peaks(work.shape, topology, video, batch, work.load.itemsize, deal.replicas)
    return Sizes(sites[fullest], of_ranks[fullest], node, tile, min(largest_of_parts, default=None), peaks)


def table(
    values: dict[str, Any], shape: ModelShape, topology: Topology, load: Load, sizes: Sizes, video: Video
) -> list[str]:
    rank, frames = sizes.rank, "" if video.frames == 1 else f"{video.frames} frames of "
    lines = [
        f"{shape.name} {frames}{video.height}x{video.width} batch {values['batch']}, {load.branches} branch(es), "
        f"{values['dtype']}, preset {values['preset']}: {topology.size} rank(s) on {topology.nodes} node(s) of "
        f"{topology.machine.name}",
        f"{'MiB':<28}{'a site':>12}{'a rank':>12}{'a node':>12}",
    ]
    cached = {
        "q, k, v of the image": "image_cache",
        "scoring reference": "reference_cache",
        "q, k, v of the text": "text_cache",
        "reconstructions": "reconstructions",
        "messages in flight": "in_flight",
        "steps that are left out": "step_cache",
    }
    for name, field in {**{f"cache: {k}": v for k, v in cached.items()}, "cache": "cache"}.items():
        lines.append(f"{name:<28}" + "".join(f"{mib(getattr(x, field)):>12}" for x in (sizes.site, rank, sizes.node)))
    for name in ("weights", "activations", "total"):
        about = f"{name} (estimate)" if name == "activations" else name
        lines.append(f"{about:<28}{'':>12}" + "".join(f"{mib(getattr(x, name)):>12}" for x in (rank, sizes.node)))
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
    for how in sizes.peaks.of_vae if sizes.peaks is not None else ():
        when, need = fullest_moment(sizes, how)
        told = f"{mib(need)} MiB at the fullest, {when}: {'fits' if need <= tile else 'does not fit'}"
        found.setdefault(told, []).append(how)
    return [f"with text encoders and VAE, vae {' or '.join(settings)}: {told}" for told, settings in found.items()]


def fullest_moment(sizes: Sizes, how: str) -> tuple[str, int]:
    """What a run does when its fullest rank holds most, and how much that is. how: the setting `vae`."""
    assert sizes.peaks is not None, "of a model whose VAE is known"
    return max(sizes.peaks.of_rank(sizes.rank, how).items(), key=lambda moment: moment[1])


def peaks_json(sizes: Sizes, ranks: int) -> dict[str, Any] | None:
    if sizes.peaks is None:
        return None
    peaks, of_vae = sizes.peaks, {}
    for how, peak in peaks.of_vae.items():
        when, need = fullest_moment(sizes, how)
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


def as_json(
    values: dict[str, Any], shape: ModelShape, topology: Topology, load: Load, sizes: Sizes, video: Video
) -> dict[str, Any]:
    def part(of: RankMemory, names: Sequence[str]) -> dict[str, float]:
        return {name: getattr(of, name) / MIB for name in names}

    cache = (*KEPT, "cache")
    return {
        "schema": 1,
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
            "site": part(sizes.site, cache),
            "rank": part(sizes.rank, (*cache, "weights", "activations", "total")),
            "node": part(sizes.node, (*cache, "weights", "activations", "total")),
            "tile": None if sizes.tile is None else sizes.tile / MIB,
        },
        "fits": None if sizes.tile is None else sizes.rank.total <= sizes.tile,
        "largest_batch": sizes.largest,
        "peaks_mib": peaks_json(sizes, ranks_of_node(topology)),
    }


# Deals of a job's ranks -----------------------------------------------------------------------------------------------


def pinned_guidance(config: Config) -> int | None:
    return None if config.guidance_parallel == "auto" else int(config.guidance_parallel)


def one_replica(topology: Topology, work: Workload) -> Deal:
    """As the engine deals the ranks of one replica: by the setting `guidance_parallel`; auto is 2 where the model has
    two branches and the ranks are even."""
    wanted = pinned_guidance(work.config) or (2 if topology.size % 2 == 0 else 1)
    return Deal(1, wanted if work.guides else 1)


def deals_table(choice: Choice) -> list[str]:
    """All deals; the one that is taken is marked, and said in a last line."""
    heading = ["replicas", "guidance", "ranks", "ulysses", "ring", "MiB a rank", "fits"]
    rows = [[*heading, "s an image", "images/h", "s in all", *(f"{link} GB" for link in LINK_CLASSES), ""]]
    for one in choice.listed:
        fits = {True: "yes", False: "no", None: "unknown"}[one.fits]
        row = [*one.deal, one.ulysses * one.ring, one.ulysses, one.ring, f"{one.need.total / MIB:.0f}", fits]
        row += (
            ["-"] * 3
            if one.batch_s is None
            else [f"{one.batch_s:.3f}", f"{one.images_per_hour:.0f}", f"{one.job_s:.1f}"]
        )
        row += ["-" if one.sent is None else f"{one.sent[link] / 1e9:.2f}" for link in LINK_CLASSES]
        rows.append([str(x) for x in (*row, "<- taken" if one is choice.taken else "")])
    lines = aligned(rows, ">" * 14 + "<")
    lines += [f"{deal.replicas} replica(s), guidance {deal.guidance}: {why}" for deal, why in choice.refused.items()]
    return [*lines, choice.line()]


def deals_as_json(choice: Choice) -> dict[str, Any]:
    """`deals`: all of them; bytes of one image, or of one batch of images."""
    rows = [deal_as_json(one) | {"taken": one is choice.taken} for one in choice.listed]
    refused = [{**deal._asdict(), "error": str(why), "taken": False} for deal, why in choice.refused.items()]
    return {"images": choice.taken.images, "deals": rows + refused}


def deal_as_json(one: PricedDeal) -> dict[str, Any]:
    timed = one.batch_s is not None
    return {
        **one.deal._asdict(),
        "ranks": one.ulysses * one.ring,
        "ulysses": one.ulysses,
        "ring": one.ring,
        "rank_mib": one.need.total / MIB,
        "fits": one.fits,
        "image_s": one.batch_s,
        "images_per_hour": one.images_per_hour if timed else None,
        "job_s": one.job_s if timed else None,
        "first_s": one.first_s if timed else None,
        "bytes_per_image": one.sent,
        "output_bytes_per_image": one.outputs,
    }
