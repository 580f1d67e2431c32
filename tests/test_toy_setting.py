"""What one field of the settings and one entry of a table reach: flags, help, files, checks and sweeps."""

from __future__ import annotations

from pathlib import Path

import pytest
from cocodiff_eval.cli.inpaint import OPTIONS
from cocodiff_eval.harness.grid import SweepGrid, read_grid
from toys.setting import ToyConfig

from cocodiff.cli.main import main
from cocodiff.config.config import Config
from cocodiff.config.errors import UserError
from cocodiff.config.registry import RECORDS
from cocodiff.jobs.options import parse, preset_configs, with_settings


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORDS, "engine", "toys.setting:ToyConfig")


def config(*words: str) -> Config:
    values = parse("inpaint", "", with_settings(OPTIONS), ("--input", "a.tif", "--preset", "v_first", *words))
    return preset_configs(values)["v_first"]


def grid(**sections: object) -> SweepGrid:
    return read_grid(dict.fromkeys(("base", "grid", "points", "steps", "mask")) | sections)


@pytest.mark.usefixtures("toy")
def test_a_setting_has_a_flag_with_help_a_key_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("inpaint", "generate"):
        with pytest.raises(SystemExit):
            main([command, "--help-all"])
        assert "--zeal ZEAL how hard the toy tries; with order v_first or toy (default: the preset's)" in " ".join(
            capsys.readouterr().out.split()
        )
    assert config() == ToyConfig.preset("v_first") and config("--zeal", "3") == ToyConfig.preset("v_first", zeal=3)
    (tmp_path / "run.yaml").write_text("zeal: 4\n")
    assert config("--config", str(tmp_path / "run.yaml")) == ToyConfig.preset("v_first", zeal=4)
    (tmp_path / "run.yaml").write_text("zeal: much\n")
    for words, said in (
        (("--zeal", "0"), "zeal is 0"),
        (("--zael", "1"), "zael.*zeal"),
        (("--config", str(tmp_path / "run.yaml")), "zeal: 'much' is not of type int"),
    ):
        with pytest.raises(UserError, match=said):
            config(*words)
    with pytest.raises(UserError, match="zeal is 'much'"):
        ToyConfig(zeal="much")  # type: ignore[arg-type]


@pytest.mark.usefixtures("toy")
def test_a_setting_is_swept() -> None:
    found = grid(base={"order": "v_first"}, grid={"zeal": [2, 3]}, points=[{"preset": "flat"}])
    configs = {point.name: point.config for point in found.points}
    assert configs == {
        "zeal 2": ToyConfig(order="v_first", zeal=2),
        "zeal 3": ToyConfig(order="v_first", zeal=3),
        "flat": ToyConfig.preset("flat"),
    }
    with pytest.raises(UserError, match=r"zeal does nothing with order joint.*order: v_first"):
        grid(grid={"zeal": [2]})
