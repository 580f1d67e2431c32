"""`cocodiff plan`: its tables, plan.json, the models it takes, and its mistakes in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from launching import with_options
from tiny_models import sd3_transformer
from tiny_pipelines import wan_pipeline
from worlds import topology_of

from cocodiff.cli.main import main
from cocodiff.config.config import load_machine
from cocodiff.planner.calibrate import AllToAll, Constants, slowed
from cocodiff.planner.decisions import read_decisions

QWEN = ("--memory", "--model", "qwen-image", "--size", "1536", "--batch", "4", "--preset", "cocodiff")


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*words: str) -> tuple[dict[str, Any], str]:
        assert main(["plan", *map(str, words), "--out", str(tmp_path / "plan"), "--overwrite"]) == 0
        return json.loads((tmp_path / "plan" / "plan.json").read_text()), capsys.readouterr().out

    return run


@pytest.mark.parametrize(("branches", "expected"), [(1, 4320), (2, 8640)])
def test_qwen_image_on_one_node_of_aurora(plan, branches, expected):
    told, shown = plan(*QWEN, "--nodes", "1", "--machine", "aurora", "--branches", str(branches))
    rank = told["memory_mib"]["rank"]
    assert rank["image_cache"] + rank["reference_cache"] == expected
    assert rank["cache"] == expected + rank["text_cache"]
    assert rank["total"] == pytest.approx(rank["cache"] + rank["weights"] + rank["activations"])
    assert told["memory_mib"]["tile"] == 65536 and told["fits"] and told["largest_batch"] >= 4
    assert told["case"]["ranks"] == 12 and told["case"]["image_tokens"] == 9216
    assert f"largest batch that fits: {told['largest_batch']}" in shown and "fits: " in shown
    assert told["case"]["guidance_parallel"] == branches  # auto: each rank has the caches of one branch
    assert told["memory_mib"]["site"]["cache"] * 60 == rank["cache"]


def test_without_a_folder_a_plan_is_printed_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["plan", "--model", "flux.1", "--preset", "split", "--compare", "--explain"]
    assert main(words) == main(words) == 0
    shown = capsys.readouterr().out
    assert shown.count("a step: ") == 2 and "results: " not in shown and [*tmp_path.iterdir()] == []


def test_branches_are_the_models_usual(plan):
    assert plan(*QWEN)[0]["case"]["branches"] == 2
    assert plan("--memory", "--model", "flux.1")[0]["case"]["branches"] == 1


def test_exact_presets_keep_nothing(plan):
    told, _ = plan(*with_options(QWEN, "--preset", "tapa"))
    assert told["memory_mib"]["rank"]["cache"] == 0 < told["memory_mib"]["rank"]["activations"]


def test_more_nodes_hold_less_each(plan):
    one, two = (plan(*QWEN, "--nodes", n)[0]["memory_mib"]["rank"] for n in ("1", "2"))
    assert two["cache"] == one["cache"] / 2 and two["weights"] == one["weights"]


def test_what_does_not_fit_says_why(plan):
    told, shown = plan(*with_options(QWEN, "--batch", "40"), "--weights", "whole")
    assert not told["fits"] and told["largest_batch"] < 40
    assert "does not fit: " in shown and "V-Major's cache is too much" in shown


def test_text_encoders_and_vae(plan, tmp_path):
    """Qwen-Image at 3072: decoding on one rank does not fit a tile of Aurora, decoding in tiles does."""
    words = ("--memory", "--model", "qwen-image", "--batch", "2", "--preset", "tapa")
    told, shown = plan(*words, "--size", "3072")
    peaks, rank = told["peaks_mib"], told["memory_mib"]["rank"]
    assert peaks["text_encoders"] * 2**20 == 2 * 8292166656
    one, tiled = peaks["vae"]["one"], peaks["vae"]["tiled"]
    assert one["decoding_rank"] == one["decoding_node"] == 2021 * 3072**2 * 2 * 2 / 2**20
    assert one["fullest_rank"] == pytest.approx(rank["weights"] + peaks["vae_weights"] + one["decoding_rank"])
    assert one["fullest_when"] == "decoding" and tiled["fullest_when"] == "denoising" and told["fits"]
    assert not one["fits"] and not peaks["vae"]["all"]["fits"] and tiled["fits"] and tiled["decoders_node"] == 12
    sharded = peaks["vae"]["sharded"]
    assert sharded["decoding_rank"] == 2021 * (3072 // 12 + 2) * 3072 * 2 * 2 / 2**20 < one["decoding_rank"] / 11
    assert sharded["fits"] and sharded["decoders_node"] == 12
    assert "vae one or all: " in shown and "MiB at the fullest, decoding: does not fit" in shown
    (tmp_path / "mine.yaml").write_text("name: mine\nheads: 12\nhead_dim: 8\njoint_layers: 3\nparameters: 1000\n")
    told, shown = plan("--memory", "--model", tmp_path / "mine.yaml")
    assert told["peaks_mib"] is None and "text encoders and VAE: not known" in shown


def test_videos_of_a_shipped_model_and_of_a_folder(plan, tmp_path):
    """Tokens of all latent frames, both experts' weights, and the VAE whole and in bands; no tiles of videos."""
    words = ("--memory", "--model", "wan2.2", "--preset", "tapa")
    told, shown = plan(*words)
    case, peaks, rank = told["case"], told["peaks_mib"]["vae"], told["memory_mib"]["rank"]
    assert case["image_tokens"] == 21 * 30 * 52 and case["branches"] == 2 and case["text_tokens"] == 0
    assert [case[name] for name in ("size", "frames", "height", "width")] == [None, 81, 480, 832]
    assert rank["weights"] * 2**20 == 2 * 2 * 14288753728 and "81 frames of 480x832" in shown
    whole, band, n = 5254 + 3 * 81, 5254 * (72 + 2) + 3 * 81 * 72, 480 * 2 / 2**20
    assert [*peaks] == ["one", "all", "sharded"] and peaks["one"]["decoding_rank"] == whole * 832 * n
    assert peaks["sharded"]["decoding_rank"] == max(band, 3 * 81 * (2 * 832 + 72)) * n
    told, _ = plan(*words, "--frames", "9", "--height", "64", "--width", "32")
    assert told["case"]["image_tokens"] == 3 * 4 * 2

    wan_pipeline(experts=1, tokens=True).save_pretrained(tmp_path / "ti2v")
    told, _ = plan("--memory", "--model", tmp_path / "ti2v")
    assert told["case"]["image_tokens"] == 31 * 22 * 40 and told["case"]["height"] == 704
    wan_pipeline().save_pretrained(tmp_path / "two")
    wan_pipeline(experts=1).save_pretrained(tmp_path / "one")
    told, one = (plan("--memory", "--model", tmp_path / name)[0] for name in ("two", "one"))
    weights = [of["memory_mib"]["rank"]["weights"] for of in (told, one)]
    assert weights[0] == 2 * weights[1] and told["peaks_mib"]["vae_weights"] > 0


def test_a_machine_that_tells_no_memory(plan):
    told, shown = plan("--memory", "--model", "sd3.5", "--machine", "local", "--ranks", "4")
    assert told["fits"] is None and told["largest_batch"] is None and told["memory_mib"]["tile"] is None
    assert "machine local does not say how much memory a rank has" in shown


def test_a_model_of_a_folder_and_of_a_file(plan, tmp_path):
    model = sd3_transformer(12, layers=3, dual=(1,), patch_size=2)
    model.save_config(tmp_path / "tiny" / "transformer")
    told, _ = plan("--memory", "--model", tmp_path / "tiny", "--size", "64", "--dtype", "fp32", "--text_tokens", "8")
    numbers = sum(x.numel() for x in [*model.parameters(), *model.buffers()])
    assert told["memory_mib"]["rank"]["weights"] * 2**20 == numbers * 4
    assert told["case"]["model"] == "tiny" and told["case"]["image_tokens"] == 16 and told["case"]["text_tokens"] == 8
    (tmp_path / "mine.yaml").write_text("name: mine\nheads: 12\nhead_dim: 8\njoint_layers: 3\nparameters: 1000\n")
    assert plan("--memory", "--model", tmp_path / "mine.yaml")[0]["case"]["model"] == "mine"


TOY = "name: toy\nheads: 24\nhead_dim: 64\njoint_layers: 2\nparameters: 1000000\ntext_tokens: 24\n"


@pytest.mark.full
def test_times_of_a_preset_and_of_all_side_by_side(plan, tmp_path):
    (tmp_path / "toy.yaml").write_text(TOY)
    words = ("--model", tmp_path / "toy.yaml", "--size", "512", "--steps", "10", "--preset", "tapa")
    told, shown = plan(*words, "--compare", "--explain")
    time, rows = told["time"], {row["preset"]: row for row in told["compare"]}
    assert time["image_s"] == pytest.approx(10 * time["step_s"]) and 0 < time["communication_share"] < 1
    assert rows["tapa"]["step_s"] == time["step_s"] and rows["tapa"]["bytes_per_step"] == time["bytes_per_step"]
    assert next(iter(rows)) == "flat" and rows["flat"]["over_flat"] == 1.0
    assert rows["tapa"]["over_flat"] == pytest.approx(rows["flat"]["step_s"] / time["step_s"])
    assert set(rows) == {
        "flat",
        "tapa",
        "v_first",
        "split",
        "lossless",
        "cocodiff",
        "cocodiff+",
        "coded",
        "coded-",
        "ahead",
    }
    assert rows["split"]["exact"] and not rows["cocodiff"]["exact"] and rows["cocodiff"]["fits"]
    assert (tmp_path / "plan" / "plan.png").stat().st_size > 10_000
    for part in ("a step: ", "GB sent in a step", "wait for qkv", "rank 0, tapa, phase 2 of q, k or v, lane plane:"):
        assert part in shown
    assert "to 3    plane" in (tmp_path / "plan" / "explain.txt").read_text()


CARD = """name: a card
cards: 1
tiles: 2
planes: [0, 1]
links: {sibling_gb_s: 1, latency_us: 1}
device: {bf16_tflop_s: 100, memory_gb_s: 1000, launch_us: 1}
"""


def test_displaced_calls_are_planned_as_a_run_decided(plan, tmp_path):
    """By the metrics of a run, and by the file that a plan writes of them; more of it displaced takes less time."""
    (tmp_path / "toy.yaml").write_text(TOY)
    (tmp_path / "card.yaml").write_text(CARD)
    words = ("--model", tmp_path / "toy.yaml", "--size", "512", "--steps", "4", "--preset", "ahead", "--codec", "int2")
    words = (*words, "--machine", tmp_path / "card.yaml")
    steps_s = []
    for part in (0.0, 1.0):
        sets = [{"": 1.0}, *[{"": 1 - part, "qkvo": part}] * 2, {"": 1.0}]
        drift = [{"step": step, "displaced_sets": of_step} for step, of_step in enumerate([*sets, {"qkvo": 1.0}])]
        run = {"config": {"model": "a toy", "codec": "int2", "tau": 0.5}, "images": [{"mode": "ahead", "drift": drift}]}
        (tmp_path / "metrics.json").write_text(json.dumps(run))
        told, shown = plan(*words, "--decisions", tmp_path / "metrics.json")
        assert "displaced as in a recorded run, a toy model, 1 image(s): codec int2, tau 0.5, 5 steps" in shown
        steps_s.append(told["time"]["step_s"])
    assert steps_s[1] < steps_s[0]
    (run,) = read_decisions([tmp_path / "metrics.json"])
    assert read_decisions([tmp_path / "plan" / "decisions.yaml"]) == (run,)
    assert run.over(4)[1] == {"": 0.0, "qkvo": 1.0} and run.over(4)[3] == {"qkvo": 1.0}


def test_deals_of_a_job(plan, tmp_path):
    (tmp_path / "toy.yaml").write_text(TOY + "branches: 2\n")
    words = ("--model", tmp_path / "toy.yaml", "--size", "512", "--steps", "10", "--preset", "tapa")
    told, shown = plan(*words, "--images", "6", "--compare")
    partitions = told["deals"]
    assert [(row["replicas"], row["guidance"]) for row in partitions] == [
        *((1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (6, 1), (6, 2), (12, 1))
    ]
    taken = [row for row in partitions if row["taken"]]
    assert len(taken) == 1 and taken[0]["job_s"] == min(row["job_s"] for row in partitions) and told["images"] == 6
    assert told["case"]["replicas"] == taken[0]["replicas"] and told["time"]["image_s"] == taken[0]["image_s"]
    for row in partitions:
        assert row["replicas"] * row["guidance"] * row["ranks"] == 12 and row["fits"]
        assert row["job_s"] == pytest.approx(row["image_s"] * -(-6 // row["replicas"]) + row["first_s"])
        assert row["images_per_hour"] == pytest.approx(6 * 3600 / row["job_s"])
        assert (sum(row["output_bytes_per_image"].values()) > 0) == (row["guidance"] == 2)
    assert "compare" not in told and not (tmp_path / "plan" / "plan.png").exists()
    assert shown.count("<- taken") == 1 and "ranks divided into " in shown and "images/h" in shown
    chosen, shown = plan(*words, "--images", "6")
    assert chosen["case"] == told["case"] and "images/h" not in shown and "next best: " in shown
    split, _ = plan(*words)
    assert split["case"]["guidance_parallel"] == 2 and split["time"]["image_s"] == partitions[1]["image_s"]
    apart, _ = plan(*words, "--guidance_parallel", "1")
    assert apart["time"]["bytes_per_image"] == partitions[0]["bytes_per_image"]
    unequal, _ = plan(*words, "--guidance_parallel", "1", "--negative_tokens", "0")
    assert unequal["time"]["step_s"] < apart["time"]["step_s"]


def test_deals_on_a_machine_that_tells_no_rates(plan):
    told, shown = plan("--model", "sd3.5", "--machine", "local", "--ranks", "4", "--images", "3", "--compare")
    assert [row["taken"] for row in told["deals"]] == [False, False, False, True, False]  # 2 replicas, 2 branches each
    assert {row["job_s"] for row in told["deals"]} == {None} and "replicas first" in shown


def test_a_machine_that_tells_no_rates_has_no_times(plan):
    told, shown = plan("--model", "sd3.5", "--machine", "local", "--ranks", "2")
    assert "time" not in told and "does not say how fast its device and its links are: no times" in shown


def test_memory_alone(plan):
    assert "time" not in plan("--memory", "--model", "sd3.5")[0]


@pytest.mark.full
def test_calibration_finds_the_constants_that_made_the_measurements(plan, tmp_path):
    """Rows as bench alltoall writes them, made by a machine whose links reach some parts of their rates."""
    topology = topology_of("aurora", 12)
    truth = Constants(latency_us=300.0, message_us=40.0, sibling=0.5, plane=0.8)
    machine, rows = truth.machine(topology.machine), []
    for size in (0.25, 6):
        for name in ("flat", "tapa", "split"):
            exchange = AllToAll(topology, name, size)
            row = {"case": f"{size}MB", "variant": name, "median_s": exchange.seconds(machine)}
            if name == "tapa":
                row |= {f"{part}_s": exchange.seconds(machine, part) for part in ("phase1", "phase2")}
            rows.append(row)
        rows.append({"case": f"{size}MB", "variant": "gloo", "median_s": 1.0})
    (tmp_path / "bench.json").write_text(json.dumps({"schema": 1, "rows": rows}))
    told, shown = plan("--calibrate", tmp_path / "bench.json")
    found = told["calibration"]
    assert found["fitted"] == ["latency_us", "message_us", "sibling", "plane"] and found["rms"] < 0.01
    for name in found["fitted"]:
        assert found["constants"][name] == pytest.approx(getattr(truth, name), rel=0.05)
    assert "fitted" in shown
    again = load_machine(str(tmp_path / "plan" / "machine.yaml"))
    assert again.links.plane_gb_s == pytest.approx(11.5 * 0.8, rel=0.05) and again.planes == topology.machine.planes


@pytest.mark.full
def test_calibration_says_what_it_cannot_know(plan, tmp_path):
    """Messages so large that no latency shows, on links that are so many times slower: the file of the machine that the
    emulated one stands for has the rates of `--machine` again."""
    topology, rows = topology_of("aurora", 12), []
    slow = slowed(topology.machine, 1000.0)
    for name in ("flat", "bound"):
        rows.append({"case": "48MB", "variant": name, "median_s": AllToAll(topology, "flat", 48).seconds(slow)})
    (tmp_path / "bench.json").write_text(json.dumps({"schema": 1, "rows": rows}))
    told, shown = plan("--calibrate", tmp_path / "bench.json")
    assert told["calibration"]["fitted"] == ["plane"] and "sibling" in told["calibration"]["left"]
    assert told["calibration"]["constants"]["plane"] == pytest.approx(1.0, rel=0.01)
    assert told["calibration"]["scale"] == pytest.approx(1000, rel=0.01)
    assert "left: nothing measured depends on it" in shown
    emulated, unscaled = (
        load_machine(str(tmp_path / "plan" / f"machine{end}.yaml")).links for end in ("", "-unscaled")
    )
    assert emulated.plane_gb_s == pytest.approx(0.0115, rel=0.01)
    assert unscaled.latency_us == pytest.approx(emulated.latency_us / 1000, rel=0.01)
    assert unscaled.plane_gb_s == pytest.approx(11.5, rel=0.01)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--model", "sd3.5", "--images", "2", "--memory"), "--images asks for the time of a job"),
        (("--model", "sd3.5", "--negative_tokens", "9"), "--negative_tokens 9: sd3.5 does not call"),
        ((), "--model is missing: "),
        (("--memory",), "--model is missing: "),
        (("--model", "flux.1", "--steps", "0"), "--steps 0: at least 1 is needed"),
        (("--model", "flux.1", "--stable", "2"), "--stable 2: give a part from 0 to 1"),
        (("--calibrate", "gone.json"), "--calibrate gone.json: No such file"),
        (("--calibrate", "half.yaml"), "--calibrate half.yaml is no bench.json"),
        (("--calibrate", "other.json"), "has no all-to-all of flat, flat_serial, tapa or split"),
        (("--memory", "--model", "qwen-imag"), "unknown model 'qwen-imag', did you mean qwen-image?"),
        (
            ("--memory", "--model", "gone.yaml"),
            "file gone.yaml does not exist; shipped models: cogvideox-paper, flux.1",
        ),
        (("--memory", "--model", "half.yaml"), "model file half.yaml: missing 2 required"),
        (("--memory", "--model", "wrong.yaml"), "wrong.yaml: unknown key head, did you mean heads?"),
        (("--memory", "--model", "empty"), "--model empty holds no transformer/config.json"),
        (("--memory", "--model", "unet"), "diffusers has no class Nothing"),
        (("--memory", "--model", "vae"), "the memory of a AutoencoderKL is not known"),
        (("--memory", "--model", "flux.1", "--size", "1000"), "use 992 or 1008"),
        (("--memory", "--model", "flux.1", "--frames", "5"), "--frames 5: flux.1 makes images: leave it away"),
        (("--memory", "--model", "wan2.2", "--size", "512"), "--size 512: wan2.2 makes videos: leave it away, or give"),
        (("--memory", "--model", "wan2.2", "--frames", "6"), "--frames 6: wan2.2 makes 4 n + 1: use 5"),
        (("--memory", "--model", "wan2.2", "--width", "500"), "--width 500: wan2.2 makes 16 n: use 496"),
        (("--memory", "--model", "flux.1", "--batch", "0"), "--batch 0: at least 1 is needed"),
        (("--memory", "--model", "flux.1", "--text_tokens", "-1"), "--text_tokens -1: at least 0 is needed"),
        (("--memory", "--model", "flux.1", "--machine", "local"), "machine local has no fixed size: add --ranks N"),
        (("--memory", "--model", "flux.1", "--preset", "fast"), "unknown preset 'fast'"),
        (("--memory", "--model", "flux.1", "--dtype", "int8"), "--dtype"),
    ],
)
def test_mistakes_are_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("half.yaml").write_text("name: half\nheads: 4\nhead_dim: 8\n")
    Path("wrong.yaml").write_text("name: half\nhead: 4\n")
    Path("other.json").write_text(json.dumps({"rows": [{"case": "6MB", "variant": "gloo", "median_s": 1.0}]}))
    Path("empty").mkdir()
    for name, kind in (("unet", "Nothing"), ("vae", "AutoencoderKL")):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps({"_class_name": kind}))
    assert main(["plan", *words, "--out", "plan"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and not Path("plan").exists()
    assert len(captured.err.splitlines()) == 1 and message in captured.err, captured.err
