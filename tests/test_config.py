"""Settings: presets, overrides, machine files, and errors that say what to write instead."""

import pytest

import cocodiff
from cocodiff.config.config import Config, load_machine, preset_names, read_yaml
from cocodiff.config.errors import UserError


def test_presets_set_the_exchange():
    assert {"flat", "tapa"} <= set(preset_names())
    assert Config.preset("flat").exchange == "flat"
    assert Config.preset("tapa") == Config()


def test_a_ring_may_be_a_word():
    """As on the command line and in the settings of a run that is repeated."""
    assert Config(ring="4") == Config(ring=4) and Config().ring == "auto"


def test_overrides_go_on_top_of_a_preset():
    config = Config.preset("flat", machine="aurora", timeout_s=5)
    assert (config.exchange, config.machine, config.timeout_s) == ("flat", "aurora", 5)
    assert Config.preset("flat", exchange="tapa").exchange == "tapa"
    assert config.with_(exchange="tapa") == Config(exchange="tapa", machine="aurora", timeout_s=5)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (
            lambda: Config.preset("tappa"),
            ("unknown preset 'tappa'", "did you mean tapa?", "flat, lossless, split, tapa"),
        ),
        (lambda: Config.preset("tapa", mashine="x"), ("unknown key mashine", "did you mean machine?", "timeout_s")),
        (lambda: Config().with_(exchnge="flat"), ("unknown key exchnge", "did you mean exchange?")),
        (lambda: Config(exchange="flatt"), ("unknown exchange 'flatt'", "did you mean flat?")),
        (lambda: Config(transport="glo"), ("unknown transport 'glo'", "did you mean gloo?", "mpi")),
        (lambda: Config(device="gpu"), ("unknown device 'gpu'", "xpu, cuda")),
        (lambda: Config(timeout_s=0), ("timeout_s is 0", "above 0")),
        (lambda: Config(timeout_s=float("inf")), ("timeout_s is inf", "up to 604800")),
        (lambda: Config(timeout_s=float("nan")), ("timeout_s is nan", "up to 604800")),
        (lambda: Config(stall_timeout_s=1e10), ("stall_timeout_s is 10000000000.0", "up to 604800")),
        (lambda: Config(start_timeout_s=-1), ("start_timeout_s is -1", "above 0")),
        (lambda: Config(ring=0), ("ring is 0", "1 for none, or auto")),
        (lambda: Config(ring="atuo"), ("ring is 'atuo'", "give the ranks of a ring")),
        (lambda: Config(placement="topologie"), ("unknown placement 'topologie'", "did you mean topology?", "usp")),
        (lambda: load_machine("auorra"), ("unknown machine 'auorra'", "did you mean aurora?", ".yaml file")),
        (lambda: load_machine("absent.yaml"), ("absent.yaml does not exist", "aurora, cpu-cluster, local, local-6x2")),
    ],
)
def test_mistakes_are_named_with_a_remedy(make, parts):
    with pytest.raises(UserError) as caught:
        make()
    for part in parts:
        assert part in str(caught.value)


def test_parallelize_refuses_unknown_settings_before_it_starts():
    with pytest.raises(UserError, match="did you mean exchange"):
        cocodiff.parallelize(object(), exchnage="flat")


def test_a_machine_file_by_path(tmp_path):
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
        ("name: [x\n", "not valid YAML"),
        ("- aurora\n", "no key: value pairs but list"),
        ("", "no key: value pairs"),
    ],
)
def test_malformed_machine_files(tmp_path, text, message):
    path = tmp_path / "machine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_machine(str(path))


def test_unreadable_yaml(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*absent.yaml: No such file"):
        read_yaml(tmp_path / "absent.yaml")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00key: 1")
    with pytest.raises(UserError, match="not valid YAML"):
        read_yaml(binary)
