"""`cocodiff plan`: what it prints and writes of real models, of users' own, of jobs and of measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tiny_models import sd3_transformer
from tiny_pipelines import wan_pipeline
from worlds import topology_of

from cocodiff.cli.doctor.command import needed
from cocodiff.cli.main import main
from cocodiff.config.config import load_machine
from cocodiff.planner.calibrate import AllToAll, Constants, slowed
from cocodiff.planner.decisions import read_decisions

Plan = Callable[..., tuple[dict[str, Any], str]]
TOY = "name: toy\nheads: 24\nhead_dim: 64\njoint_layers: 2\nparameters: 1000000\ntext_tokens: 24\n"
CARD = """name: a card
cards: 1
tiles: 2
planes: [0, 1]
links: {sibling_gb_s: 1, latency_us: 1}
device: {bf16_tflop_s: 100, memory_gb_s: 1000, launch_us: 1}
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """A function that runs the command in a folder with the files of toys: plan.json and what was printed."""
    monkeypatch.chdir(tmp_path)
    Path("toy.yaml").write_text(TOY)
    Path("toy-cfg.yaml").write_text(TOY + "branches: 2\n")
    Path("card.yaml").write_text(CARD)

    def run(*words: object) -> tuple[dict[str, Any], str]:
        given = " ".join(map(str, words)).split()
        assert main(["plan", *given, "--out", "plan", "--overwrite"]) == 0
        return json.loads(Path("plan/plan.json").read_text()), capsys.readouterr().out.replace(str(tmp_path), ".")

    return run


def rounded(value: Any) -> Any:
    """The same with six digits of every number, which do not depend on the order of sums."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


QWEN = "--memory --model qwen-image --size 1536 --machine aurora --nodes 1"
JOB = "--size 512 --steps 10 --preset tapa"


@pytest.mark.parametrize(
    "words",
    [
        f"{QWEN} --batch 4 --preset cocodiff",
        f"{QWEN} --batch 4 --preset cocodiff --branches 1",
        f"{QWEN} --batch 40 --preset cocodiff --weights whole",  # does not fit
        "--memory --model qwen-image --size 3072 --batch 2 --preset tapa",  # decoding fits in tiles alone
        "--memory --model flux.1 --nodes 2 --preset coded",
        "--memory --model flux.2 --size 2304 --preset lossless",  # some weights are shared
        "--model flux.2 --size 512 --preset tapa --weights card",  # all are, and waited for
        "--model flux.2 --size 1024 --preset tapa --weights node",
        pytest.param("--model sd3.5 --machine aurora --nodes 2 --preset ahead --explain", marks=pytest.mark.full),
        "--memory --model qwen-image --guidance_parallel 1 --step_cache first_block --preset tapa",
        "--memory --model wan2.2 --preset tapa",
        "--memory --model wan2.2 --preset tapa --frames 9 --height 64 --width 32",
        "--memory --model toy.yaml --machine card.yaml --preset coded",  # no VAE is known
        "--model sd3.5 --machine local --ranks 2",  # tells no rates
        "--model sd3.5 --machine local --ranks 4 --images 3 --compare",
        pytest.param(f"--model toy.yaml {JOB} --compare --explain", marks=pytest.mark.full),
        f"--model toy-cfg.yaml {JOB}",
        f"--model toy-cfg.yaml {JOB} --guidance_parallel 1",
        f"--model toy-cfg.yaml {JOB} --guidance_parallel 1 --negative_tokens 0",
        f"--model toy-cfg.yaml {JOB} --images 5 --batch 2",
        f"--model toy-cfg.yaml {JOB} --images 6 --compare",
    ],
)
def test_what_a_plan_says(words: str, plan: Plan, snapshot: Callable[[str], None]) -> None:
    """Printed, and in plan.json."""
    told, shown = plan(words)
    snapshot(shown)
    snapshot(yaml.safe_dump(rounded(told), sort_keys=False, default_flow_style=None, width=120))
    if "--compare --explain" in words:
        assert Path("plan/plan.png").stat().st_size > 10_000
        assert "to 3    plane" in Path("plan/explain.txt").read_text()
        assert told["time"]["step_s"] == next(r for r in told["compare"] if r["preset"] == "tapa")["step_s"]


def test_what_is_known_of_real_models_by_hand(plan: Plan) -> None:
    """Qwen-Image's caches are 4 x 60 layers x batch 4 x 9216 tokens x 24 heads x 128 x 2 bytes, a twelfth of it for
    each branch; whose VAE decodes 2021 numbers for a pixel. Wan has 21 latent frames of 30 x 52 tokens, and two
    experts."""
    of_branches = [plan(QWEN, f"--batch 4 --preset cocodiff --branches {n}")[0] for n in (1, 2)]
    for branches, told in enumerate(of_branches, start=1):
        rank = told["memory_mib"]["rank"]
        assert rank["image_cache"] + rank["reference_cache"] == branches * 4320
        assert told["memory_mib"]["site"]["cache"] * 60 == rank["cache"] and told["fits"]
        assert told["case"]["guidance_parallel"] == branches  # auto: each rank has the caches of one branch
    two = plan(QWEN.replace("nodes 1", "nodes 2"), "--batch 4 --preset cocodiff")[0]["memory_mib"]["rank"]
    assert two["cache"] == rank["cache"] / 2 and two["weights"] == rank["weights"]
    told, _ = plan("--memory --model qwen-image --size 3072 --batch 2 --preset tapa")
    one, tiled, sharded = (told["peaks_mib"]["vae"][how] for how in ("one", "tiled", "sharded"))
    assert told["peaks_mib"]["text_encoders"] * 2**20 == 2 * 8292166656
    assert one["decoding_rank"] == one["decoding_node"] == 2021 * 3072**2 * 2 * 2 / 2**20
    assert sharded["decoding_rank"] == 2021 * (3072 // 12 + 2) * 3072 * 2 * 2 / 2**20
    assert not one["fits"] and tiled["fits"] and sharded["fits"] and told["memory_mib"]["rank"]["cache"] == 0
    told, _ = plan("--memory --model wan2.2 --preset tapa")
    assert told["case"]["image_tokens"] == 21 * 30 * 52
    assert told["memory_mib"]["rank"]["weights"] * 2**20 == 2 * 2 * 14288753728


def test_a_plan_says_first_where_replicas_need_no_exchange(plan: Plan) -> None:
    """On a machine whose ranks have memory for the whole run, and 4 GiB free."""
    words = "--memory --model toy.yaml --machine sized.yaml --size 512"
    for memory_gib, told in ((8, True), (4, False)):
        Path("sized.yaml").write_text(CARD.replace("device: {", f"device: {{memory_gib: {memory_gib}, "))
        _, shown = plan(words)
        assert ("2 replicas of one rank" in shown.splitlines()[0]) == told
    assert "replicas of one rank" not in plan(words.replace("sized", "card"))[1]  # nothing is known of its memory


def test_doctor_needs_what_a_plan_says(plan: Plan) -> None:
    """In a size and a batch that are not the default ones, of a model with two rows for an image."""
    told, _ = plan("--memory --model sd3.5 --size 512 --batch 3 --preset flat --guidance_parallel 1 --dtype bf16")
    values = {"model": "sd3.5", "size": 512, "batch": 3}
    found = needed(values, topology_of("aurora", 12), SimpleNamespace(rank=0))
    assert found == told["memory_mib"]["rank"]["total"] * 2**20


def test_the_longer_text_of_two_branches_bounds_the_batch(plan: Plan) -> None:
    words = "--memory --model toy-cfg.yaml --size 512 --preset tapa --guidance_parallel 2"
    texts = ((0, 0), (24, 24), (24, 4000), (4000, 4000))
    most = [plan(words, f"--text_tokens {a} --negative_tokens {b}")[0]["largest_batch"] for a, b in texts]
    assert most[0] > most[1] > most[2] == most[3] > 1


def test_a_part_that_stays_is_planned_as_it_is_given(plan: Plan) -> None:
    """Where a threshold decides: what stays is not sent."""
    words = f"--model toy.yaml {JOB} --preset cocodiff --schedule threshold".replace("--preset tapa ", "")
    sent = []
    for stable in (0.25, 0.75):
        told, _ = plan(words, "--stable", stable)
        assert told["assumed"]["stable"] == stable
        sent.append(told["time"]["bytes_per_step"]["plane"])
    assert sent[0] > sent[1] > 0


def test_without_a_folder_a_plan_is_printed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["plan", "--model", "flux.1", "--preset", "split", "--compare", "--explain"]
    assert main(words) == main(words) == 0
    shown = capsys.readouterr().out
    assert (
        shown.count("<- taken") == shown.count("a step: ") == 2
        and "results: " not in shown
        and [*tmp_path.iterdir()] == []
    )


def test_models_of_folders(plan: Plan, tmp_path: Path) -> None:
    """A transformer alone, and pipelines of videos with a timestep for each token, with one expert and with two."""
    model = sd3_transformer(12, layers=3, dual=(1,), patch_size=2)
    model.save_config(tmp_path / "tiny" / "transformer")
    told, _ = plan("--memory --model tiny --size 64 --dtype fp32 --text_tokens 8")
    numbers = sum(x.numel() for x in [*model.parameters(), *model.buffers()])
    assert told["memory_mib"]["rank"]["weights"] * 2**20 == numbers * 4
    assert [told["case"][name] for name in ("model", "image_tokens", "text_tokens")] == ["tiny", 16, 8]
    wan_pipeline(experts=1, tokens=True).save_pretrained(tmp_path / "ti2v")
    told, _ = plan("--memory --model ti2v")
    assert told["case"]["image_tokens"] == 31 * 22 * 40 and told["case"]["height"] == 704
    weights = []
    for experts in (1, 2):
        wan_pipeline(experts=experts).save_pretrained(tmp_path / f"wan{experts}")
        told, _ = plan(f"--memory --model wan{experts}")
        weights.append(told["memory_mib"]["rank"]["weights"])
    assert weights[1] == 2 * weights[0] and told["peaks_mib"]["vae_weights"] > 0


def test_displaced_calls_are_planned_as_a_run_decided(plan: Plan) -> None:
    """By the metrics of a run, and by the file that a plan writes of them; more of it displaced takes less time."""
    words = "--model toy.yaml --machine card.yaml --size 512 --steps 4 --preset ahead --codec int2"
    steps_s = []
    for part in (0.0, 1.0):
        sets = [{"": 1.0}, *[{"": 1 - part, "qkvo": part}] * 2, {"": 1.0}]
        drift = [{"step": step, "displaced_sets": of_step} for step, of_step in enumerate([*sets, {"qkvo": 1.0}])]
        run = {"config": {"model": "a toy", "codec": "int2", "tau": 0.5}, "images": [{"mode": "ahead", "drift": drift}]}
        Path("metrics.json").write_text(json.dumps(run))
        told, shown = plan(words, "--decisions metrics.json")
        assert "displaced as in a recorded run, a toy model, 1 image(s): codec int2, tau 0.5, 5 steps" in shown
        steps_s.append(told["time"]["step_s"])
    assert steps_s[1] < steps_s[0]
    (decided,) = read_decisions(["metrics.json"])
    assert read_decisions(["plan/decisions.yaml"]) == (decided,)
    assert decided.over(4)[1] == {"": 0.0, "qkvo": 1.0} and decided.over(4)[3] == {"qkvo": 1.0}


def measured(rows: list[dict[str, Any]]) -> None:
    Path("bench.json").write_text(json.dumps({"schema": 1, "rows": rows}))


@pytest.mark.full
@pytest.mark.parametrize(("nodes", "rate"), [(1, "plane"), (2, "nic")])
def test_calibration_finds_the_constants_that_made_the_measurements(plan: Plan, nodes: int, rate: str) -> None:
    """Rows as bench alltoall writes them, made by a machine whose links reach some parts of their rates; on two nodes
    nothing depends on the planes, which stay as they are."""
    topology = topology_of("aurora", 12 * nodes)
    truth = Constants(latency_us=300.0, message_us=40.0, sibling=0.5, plane=0.8, nic=0.6)
    machine, rows = truth.machine(topology.machine), []
    for size in (0.25, 6):
        for name in ("flat", "tapa", "split"):
            exchange = AllToAll(topology, name, size)
            phases = ("phase1", "phase2") if name == "tapa" else ()
            row = {f"{part}_s": exchange.seconds(machine, part) for part in phases}
            rows.append(row | {"case": f"{size}MB", "variant": name, "median_s": exchange.seconds(machine)})
        rows.append({"case": f"{size}MB", "variant": "gloo", "median_s": 1.0})
    measured(rows)
    told, _ = plan("--nodes", nodes, "--calibrate bench.json")
    found = told["calibration"]
    assert found["fitted"] == ["latency_us", "message_us", "sibling", rate] and found["rms"] < 0.01
    for name in found["fitted"]:
        assert found["constants"][name] == pytest.approx(getattr(truth, name), rel=0.05)
    again = load_machine("plan/machine.yaml")
    reached = {"plane": 11.5, "nic": 25.0} | {rate: {"plane": 11.5 * 0.8, "nic": 25 * 0.6}[rate]}
    for name, gb_s in reached.items():
        assert getattr(again.links, f"{name}_gb_s") == pytest.approx(gb_s, rel=0.05)
    assert again.planes == topology.machine.planes


@pytest.mark.full
def test_calibration_says_what_it_cannot_know(plan: Plan) -> None:
    """Messages so large that no latency shows, on links that are so many times slower: the file of the machine that the
    emulated one stands for has the rates of `--machine` again."""
    topology = topology_of("aurora", 12)
    seconds = AllToAll(topology, "flat", 48).seconds(slowed(topology.machine, 1000.0))
    measured([{"case": "48MB", "variant": name, "median_s": seconds} for name in ("flat", "bound")])
    told, shown = plan("--calibrate bench.json")
    found = told["calibration"]
    assert found["fitted"] == ["plane"] and "sibling" in found["left"]
    assert (found["constants"]["plane"], found["scale"]) == pytest.approx((1.0, 1000.0), rel=0.01)
    assert "left: nothing measured depends on it" in shown
    emulated, unscaled = (load_machine(f"plan/machine{end}.yaml").links for end in ("", "-unscaled"))
    assert (emulated.plane_gb_s, unscaled.plane_gb_s) == pytest.approx((0.0115, 11.5), rel=0.01)
    assert unscaled.latency_us == pytest.approx(emulated.latency_us / 1000, rel=0.01)
    assert Constants(300, 40, 0.5, 0.8, 0.6).faster(10) == Constants(30, 4, 0.5, 0.8, 0.6)
