"""The tables that `exchange: auto` and `chunks: auto` go by: measured, by machine and its number of nodes."""

from __future__ import annotations

from pathlib import Path

from cocodiff.config import read_yaml, shipped_folder
from cocodiff.errors import UserError, check_choice
from cocodiff.registry import EXCHANGES


def load_exchange_table(machine: str, nodes: int, path: str | None = None) -> list[tuple[float, str]]:
    """Rows (up to so many MB per rank, exchange) of a machine's table for so many nodes, the last without limit.

    The file maps machine -> nodes -> rows. Raises UserError where it has no such entry, or something else in it.
    """
    file = Path(path) if path is not None else shipped_folder("exchange") / "auto.yaml"
    known = read_yaml(file)
    remedy = "measure one with cocodiff bench alltoall --tune and name it as exchange_table, or choose another exchange"
    try:
        rows = known.get(machine, {}).get(nodes)
        if rows is None:
            there = ", ".join(f"{name} on {count}" for name, of in known.items() for count in of)
            raise UserError(
                f"exchange auto: {file.name} has no table for machine {machine} on {nodes} node(s) but for {there}; "
                f"{remedy}"
            )
        table = [(float("inf") if limit is None else float(limit), str(name)) for limit, name in rows]
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{file}: not a table of machine -> nodes -> [[MB, exchange], ...] ({error}); {remedy}"
        ) from error
    for _, name in table:
        check_choice(f"exchange in {file.name}", name, EXCHANGES)
    if not table or table != sorted(table, key=lambda row: row[0]) or table[-1][0] != float("inf"):
        raise UserError(f"{file}: rows of {machine} on {nodes} node(s) must ascend and end with no limit (null)")
    return table


def load_chunk_table(machine: str, nodes: int) -> tuple[int, float]:
    """For `chunks: auto`: in how many chunks, and from how many MB of q, k and v per rank on, by a machine's table for
    so many nodes. The file maps machine -> nodes -> [chunks, MB]. Raises UserError where it has no such entry."""
    known = read_yaml(shipped_folder("exchange") / "chunks.yaml")
    found = known.get(machine, {}).get(nodes)
    if found is None:
        there = ", ".join(f"{name} on {count}" for name, of in known.items() for count in of)
        raise UserError(
            f"chunks auto: machine {machine} on {nodes} node(s) was not measured, but {there} were; give a number of "
            f"chunks, 1 for none"
        )
    chunks, from_mb = found
    return int(chunks), float(from_mb)
