"""The maker of faults (`mutants.py`) on a small file."""

import ast
from pathlib import Path

from mutants import faults_of
from value_tables import beside

CASES = beside(__file__)
SOURCE, CHANGES = CASES["source"], CASES["changes"]


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
