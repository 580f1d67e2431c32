"""Tables of words and values, which stand in YAML beside the tests that read them."""

from pathlib import Path
from typing import Any

import yaml


def beside(file: str, end: str = ".yaml") -> Any:
    """Return what the YAML file of the same name, with this end, holds. file: the test's own, `__file__`."""
    return yaml.load(Path(file).with_suffix(end).read_text(), yaml.CSafeLoader)
