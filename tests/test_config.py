"""Settings: presets, overrides, machine files, and errors that say what to write instead."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import cocodiff
from cocodiff.config.config import Config, load_machine, preset_names
from cocodiff.config.errors import UserError

MISTAKES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def test_presets_and_what_goes_on_top_of_them():
    assert {"flat", "tapa"} <= set(preset_names())
    assert Config.preset("flat") == Config(exchange="flat") and Config.preset("tapa") == Config()
    config = Config.preset("flat", machine="aurora", timeout_s=5)
    assert config == Config(exchange="flat", machine="aurora", timeout_s=5)
    assert Config.preset("flat", exchange="tapa").exchange == "tapa"
    assert config.with_(exchange="tapa") == Config(exchange="tapa", machine="aurora", timeout_s=5)
    assert Config(timeout_s=604800, ring=1).timeout_s == 604800  # numbers may be as large, or small, as they may be
    assert Config(ring="4") == Config(ring=4) and Config().ring == "auto"  # a word, as in the settings of a run


def test_a_choice_of_codec_is_exact_where_it_has_to_be():
    pairs = [(codec, only) for codec in ("auto", "lossless", "int8") for only in (True, False)]
    exact = [Config(codec=codec, only_exact=only).exact for codec, only in pairs]
    assert exact == [True, False, True, True, False, False]


@pytest.mark.parametrize(("settings", "values"), MISTAKES["settings"])
def test_mistakes_are_named_with_a_remedy(settings: dict[str, Any], values: str) -> None:
    for make in (Config().with_, partial(Config.preset, "tapa")):
        with pytest.raises(UserError) as caught:
            make(**settings)
        assert [value for value in values.split() if value not in str(caught.value)] == []


def test_parallelize_refuses_settings_before_it_starts():
    mistakes = (
        ({"exchnage": "flat"}, "exchnage.* exchange"),
        ({"ring": 0}, "ring is 0"),
        ({"preset": "flatt"}, "flatt.* flat"),
    )
    for settings, said in mistakes:
        with pytest.raises(UserError, match=said):
            cocodiff.parallelize(object(), **settings)


def test_a_machine_file_by_path(tmp_path: Path) -> None:
    path = tmp_path / "quad.yaml"
    path.write_text("name: quad\ntiles: 4\nplanes: [0, 1, 2, 3]\nlinks: {sibling_gb_s: 9, plane_gb_s: 7, nic_gb_s: 1}")
    machine = load_machine(str(path))
    assert (machine.name, machine.tiles, machine.planes, machine.cards) == ("quad", 4, (0, 1, 2, 3), None)
    assert machine.links.plane_gb_s == 7


@pytest.mark.parametrize(("content", "message"), MISTAKES["machines"])
def test_malformed_machine_files(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(yaml.safe_dump({"name": "x"} | content))
    with pytest.raises(UserError, match=message):
        load_machine(str(path))
