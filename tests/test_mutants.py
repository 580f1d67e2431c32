"""The maker of faults (`mutants.py`) on a small file."""

import ast
from pathlib import Path

from mutants import faults_of

SOURCE = Path(__file__).with_name("mutants.txt").read_text()  # a program
CHANGES = {
    "border": "len(rows) <= size",
    "logic": "and rows[0] and rows[1] and size:",
    "condition": "if len(rows) < size and rows[0]:",
    "arithmetic": "row - 4",
    "off by one": "size: int = 3",
    "other end": "rows[-1]",
    "swallowed": "        pass\n    for",
    "loop": "            continue",
    "min for max": "return min(",
    "no copy": "max(rows,",
    "lost option": "max(rows.copy())",
    "axis": "dim=1 - 1",
    "forgotten": "            pass\n            self.last",
    "first kept": "if not hasattr(self, 'last'): self.last = key",
    "lost clean-up": "finally:\n            pass",
    "lost call": "finally:\n            pass",
    "swapped": "self.close(values, key)",
}


def test_every_kind_of_fault_is_made_where_it_fits(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    found = faults_of(tmp_path, "a.py")
    assert {fault.kind for fault in found} == set(CHANGES)
    for kind, text in CHANGES.items():
        assert any(text in fault.applied(SOURCE.encode()).decode() for fault in found if fault.kind == kind), kind
    for fault in found:
        changed = fault.applied(SOURCE.encode()).decode()
        ast.parse(changed)
        assert "1 number stays" in changed
        assert "list[int]" in changed
