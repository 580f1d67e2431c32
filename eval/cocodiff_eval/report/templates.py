"""The pages' templates, with the scripts and styles that are put into them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any


def fill_template(name: str, **values: Any) -> str:
    """A page of `templates/` with these values; one that it uses and that is not given is an error."""
    return str(_environment().get_template(name).render(**values))


def write_template(path: Path, name: str, **values: Any) -> None:
    """The same into a file, piece by piece: what iterators among the values yield is not kept."""
    pieces = _environment().get_template(name).generate(**values)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(pieces)


@cache
def _environment() -> Any:
    """Keeps templates that it has compiled."""
    import jinja2

    return jinja2.Environment(
        loader=jinja2.PackageLoader("cocodiff_eval", "templates"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
