"""Settings: presets, overrides, machine files, and errors that say what to write instead."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

import cocodiff
from cocodiff.config.config import Config, load_machine, preset_names
from cocodiff.config.errors import UserError


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


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        ({"exchange": "flatt"}, "exchange 'flatt' flat?"),
        ({"transport": "glo"}, "transport 'glo' gloo? mpi"),
        ({"device": "gpu"}, "device 'gpu' xpu, cuda"),
        ({"timeout_s": 0}, "timeout_s 0 above"),
        ({"timeout_s": float("inf")}, "timeout_s inf 604800"),
        ({"timeout_s": float("nan")}, "timeout_s nan 604800"),
        ({"stall_timeout_s": 1e10}, "stall_timeout_s 10000000000.0 604800"),
        ({"start_timeout_s": -1}, "start_timeout_s -1 above"),
        ({"ring": 0}, "ring 0 auto"),
        ({"ring": "atuo"}, "ring 'atuo' ranks"),
        ({"placement": "topologie"}, "placement 'topologie' topology? usp"),
        ({"exchnge": "flat"}, "exchnge exchange?"),
        ({"mashine": "x"}, "mashine machine? timeout_s"),
        *(({"chunks": one}, "chunks whole number auto") for one in (0, -1, 2.0, True, "two", None)),
        ({"selection": "v_major", "scoring": "card", "exchange": "flat"}, "scoring card exchange tapa, flat"),
        ({"selection": "v_major", "ratio": 1.5}, "ratio 1.5 fraction"),
        ({"selection": "v_major", "schedule": "list"}, "schedule list ratios"),
        ({"selection": "v_major", "schedule": "liner"}, "liner linear?"),
        ({"selection": "v_major", "warmup": -1}, "warmup -1"),
        ({"selection": "v_major", "sync_interval": 0.5}, "sync_interval 0.5"),
        ({"selection": "v_major", "codec": "int4"}, "codec int4 selection v_major none full"),
        ({"selection": "v_major", "arrival": "adaptive"}, "arrival adaptive v_major now"),
        ({"codec": "int4", "tau": 0}, "tau 0 above"),
        ({"codec": "int3"}, "codec 'int3' none, lossless, int8, int4, int2"),
        ({"codec": "int4", "predictor": "tailor"}, "predictor 'tailor' taylor?"),
    ],
)
def test_mistakes_are_named_with_a_remedy(settings: dict[str, Any], values: str) -> None:
    for make in (Config().with_, partial(Config.preset, "tapa")):
        with pytest.raises(UserError) as caught:
            make(**settings)
        assert [value for value in values.split() if value not in str(caught.value)] == []


def test_parallelize_refuses_settings_before_it_starts():
    mistakes = (({"exchnage": "flat"}, "mean exchange"), ({"ring": 0}, "ring is 0"), ({"preset": "flatt"}, "mean flat"))
    for settings, said in mistakes:
        with pytest.raises(UserError, match=said):
            cocodiff.parallelize(object(), **settings)


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (Config.preset, "tappa", "preset 'tappa' tapa? flat, lossless, split, tapa"),
        (load_machine, "auorra", "machine 'auorra' aurora? .yaml"),
        (load_machine, "absent.yaml", "absent.yaml exist aurora, cpu-cluster, local, local-6x2"),
    ],
)
def test_unknown_names_come_with_those_that_there_are(make: Any, name: str, values: str) -> None:
    with pytest.raises(UserError) as caught:
        make(name)
    assert [value for value in values.split() if value not in str(caught.value)] == []


LOCAL = "name: x\ntiles: 1\nplanes: [0]\nbeliefs: "


def test_a_machine_file_by_path(tmp_path: Path) -> None:
    path = tmp_path / "quad.yaml"
    path.write_text("name: quad\ntiles: 4\nplanes: [0, 1, 2, 3]\nlinks: {plane_gb_s: 7}\n")
    machine = load_machine(str(path))
    assert (machine.name, machine.tiles, machine.planes, machine.cards) == ("quad", 4, (0, 1, 2, 3), None)
    assert machine.links.plane_gb_s == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\ntile: 2\nplanes: [0, 1]\n", "machine.yaml: unknown key tile, did you mean tiles?"),
        ("name: x\ntiles: 1\nplanes: [0]\nlinks: {plane_gbs: 1}\n", "unknown key plane_gbs, did you mean plane_gb_s"),
        ("name: x\nplanes: [0, 1]\n", "machine.yaml.*tiles.*aurora.yaml for the keys"),
        ("name: x\ntiles: two\nplanes: [0, 1]\n", "aurora.yaml for the keys"),
        ("name: x\ntiles: 2\nplanes: 2\n", "aurora.yaml for the keys"),
        (f"{LOCAL}{{latency_us: {{low: 5, high: 50, source: a page}}}}", "latency_us from 5 to 50.*0"),
        (f"{LOCAL}{{nics_of: {{low: 5, high: 50, source: a page}}}}", "belief nics_of"),
        (f"{LOCAL}{{latency_us: {{low: 0, high: 50, where: a page}}}}", "latency_us: unknown key where"),
        (f"{LOCAL}[latency_us]", "aurora.yaml for the keys"),
        ("name: x\ntiles: 1\nplanes: [0]\ndevice: {overlap_share: 2}", "overlap_share 2"),
        ("name: x\ntiles: 1\nplanes: [0]\nlinks: {link_share: 0}", "link_share 0"),
    ],
)
def test_malformed_machine_files(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "machine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_machine(str(path))
