"""The first hour on Aurora, as docs/aurora.md has it, with stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from launching import TESTS, run

SCRIPT = str(TESTS / "aurora/first_hour.py")


@pytest.mark.full
def test_the_page_leads_from_login_to_results() -> None:
    """Two minutes on two cores."""
    done = run([sys.executable, SCRIPT], timeout_s=3000)
    assert done.returncode == 0, done.stdout + done.stderr
    for step in ("pip install", "doctor", "inpaint", "generate", "sweep", "DRY_RUN=1 bash launch/campaign.pbs"):
        assert step in done.stdout


def test_a_command_that_fails_is_told_and_the_next_one_is_tried(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(
        "`qsub -V launch/aurora.pbs`\n```\ncd /; echo no; false   # why\npwd\ntest $PWD = /\n```\n"
    )
    done = run([sys.executable, SCRIPT, str(TESTS.parent), str(tmp_path / "page.md")])
    refused, fails, *rest = done.stdout.splitlines()
    assert done.returncode == 1 and "(2)" in refused and "-V" in refused and fails.endswith("(1): no")
    assert [line.split(":")[-1] for line in rest] == [" ok", " ok"]
