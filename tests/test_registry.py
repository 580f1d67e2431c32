"""What is imported late: modules that take long and that few runs use."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from cocodiff.config.registry import import_late


def test_a_late_module_is_executed_at_its_first_use_and_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_package").mkdir()
    (tmp_path / "late_package" / "__init__.py").write_text("executed = []\n")
    (tmp_path / "late_package" / "part.py").write_text(
        "import late_package\nlate_package.executed.append(__name__)\nvalue = 3\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import_late("late_package.part")
    package, part = import_module("late_package"), import_module("late_package.part")
    assert package.executed == [] and package.part is part
    assert part.value == 3 and part.value == 3 and package.executed == ["late_package.part"]
    with pytest.raises(AttributeError, match="nothing"):
        _ = part.nothing
    import_late("late_package.part")
    import_late("late_package.absent")
    assert package.executed == ["late_package.part"] and sys.modules["late_package.part"] is part


@pytest.mark.full
def test_what_one_rank_needs_is_imported_without_statistics_pictures_and_metrics() -> None:
    script = (
        "import sys; from cocodiff_eval.harness.pipelines import Request, import_pipeline; "
        "import_pipeline(Request('embedded', 'inpaint', ('',), None)); "
        "print({'scipy.stats._stats_py', 'skimage', 'matplotlib', 'cocodiff_eval.report'} & {*sys.modules}); "
        "import scipy.stats; print(scipy.stats.beta.ppf(0.5, 2, 2))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, ["set()", "0.5"]), done.stderr
