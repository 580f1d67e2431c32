"""Draws axes.svg, the picture of parallel.md, from the axes that the engine divides ranks into:

python docs/axes.py > docs/axes.svg
"""

from cocodiff.config.config import load_machine
from cocodiff.topology import Place, Topology
from cocodiff.topology.axes import Axes

CASES = (  # nodes, replicas, guidance; left edge and top of the drawing; what it shows
    (1, 1, 2, 60, 16, "one image; each branch has a plane"),
    (1, 2, 2, 570, 16, "two images, each on a plane; each branch has half of it"),
    (2, 1, 2, 60, 262, "one image; each branch has a node"),
    (2, 2, 2, 60, 490, "two images, each on a node; each branch has a plane"),
)
FILLS = (("#1f5f9e", "#a9cdf0"), ("#a8480f", "#f5c8a2"))  # of a replica's two branches
INK = ("#ffffff", "#1f2328")  # on them
CARD, TILE, STEP, ROW = 60, 40, 72, 50  # widths of a card and a tile, from card to card, from plane to plane
NODE = 510  # from node to node


def text(x: float, y: float, words: str, style: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" {style}>{words}</text>'


def centre(place: Place, left: float, top: float) -> tuple[float, float]:
    return left + place.card % 6 * STEP + CARD / 2, top + 25 + place.plane * ROW


def node(number: int, topology: Topology, axes: Axes, left: float, top: float) -> list[str]:
    """Cards side by side, the tiles of a plane in a row; a line joins neighbours that exchange tokens."""
    places = [place for place in topology.places if place.node == number]
    lines = [text(left - 8, top + 29 + plane * ROW, f"plane {plane}", 'class="small right"') for plane in (0, 1)]
    for card in range(6):
        x = left + card * STEP
        lines.append(
            f'<rect x="{x:g}" y="{top:g}" width="{CARD}" height="100" rx="7" fill="#f3f4f6" stroke="#c4c9d0"/>'
        )
        lines.append(text(x + CARD / 2, top + 116, f"card {card}", 'class="small middle"'))
    for a in places:
        for b in places:
            near = (b.plane - a.plane, b.card - a.card) in ((0, 1), (1, 0))
            if near and axes.branch(a.rank) == axes.branch(b.rank):
                (x, y), (to_x, to_y) = centre(a, left, top), centre(b, left, top)
                lines.append(f'<path d="M {x:g} {y:g} L {to_x:g} {to_y:g}" stroke="#57606a" stroke-width="3"/>')
    for place in places:
        (x, y), at = centre(place, left, top), axes.coordinates(place.rank)
        fill = FILLS[at.replica][at.guidance]
        lines.append(f'<rect x="{x - TILE / 2:g}" y="{y - 17:g}" width="{TILE}" height="34" rx="4" fill="{fill}"/>')
        lines.append(text(x, y + 5, str(place.rank), f'class="bold middle" style="fill: {INK[at.guidance]}"'))
    return lines


def case(nodes: int, replicas: int, guidance: int, left: float, top: float, caption: str) -> list[str]:
    topology = Topology.build(load_machine("aurora"), 12 * nodes)
    axes = Axes.build(topology, replica=replicas, guidance=guidance)
    title = f"{nodes} node{'s' if nodes > 1 else ''}, replicas {replicas}, guidance {guidance}"
    lines = [text(left, top + 14, title, 'class="bold"'), text(left, top + 34, caption, "")]
    for number in range(nodes):
        lines += node(number, topology, axes, left + number * NODE, top + 48)
    for replica, branch in ((r, g) for r in range(replicas) for g in range(guidance)):
        x, y = left + branch * 144, top + 190 + replica * 20
        name = f"replica {replica}, branch {branch}" if replicas > 1 else f"branch {branch}"
        lines.append(f'<rect x="{x:g}" y="{y - 10:g}" width="12" height="12" rx="3" fill="{FILLS[replica][branch]}"/>')
        lines.append(text(x + 17, y, name, 'class="small"'))
    return lines


def picture() -> str:
    style = (
        "text { font-family: system-ui, sans-serif; font-size: 14px; fill: #1f2328 } .bold { font-weight: 600 } "
        ".small { font-size: 11.5px } .middle { text-anchor: middle } .right { text-anchor: end }"
    )
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="1020" height="716" viewBox="0 0 1020 716" role="img">',
        "<title>How the tiles of Aurora nodes go to replicas and to branches of guidance</title>",
        f"<style>{style}</style>",
        '<rect width="1020" height="716" fill="#ffffff"/>',
    ]
    for one in CASES:
        lines += case(*one)
    return "\n".join([*lines, "</svg>"])


if __name__ == "__main__":
    print(picture())
