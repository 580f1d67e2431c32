"""`cocodiff plan`: what it prints and writes of real models, of users' own, of jobs and of measurements."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
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
from cocodiff.planner.decisions import read_decisions

Plan = Callable[..., tuple[dict[str, Any], str]]
TOY, CARD = (Path(__file__).with_name(f"{name}.yaml").read_text() for name in ("toy", "card"))


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


def plans() -> Iterator[Any]:
    for line in Path(__file__).with_name("plans.txt").read_text().splitlines():
        if words := line.partition("#")[0].strip():
            yield pytest.param(words.removeprefix("* "), marks=pytest.mark.full if words.startswith("* ") else ())


@pytest.mark.parametrize("words", [*plans()])
def test_what_a_plan_says(words: str, plan: Plan, snapshot: Callable[[str], None]) -> None:
    """Printed, and in plan.json."""
    told, shown = plan(words)
    snapshot(shown)
    snapshot(yaml.safe_dump(rounded(told), default_flow_style=None, width=120))
    if "--compare --explain" in words:
        assert Path("plan/plan.png").stat().st_size > 10_000
        assert "to 3    plane" in shown
        assert told["time"]["step_s"] == next(r for r in told["compare"] if r["preset"] == "tapa")["step_s"]


def test_a_plan_says_first_where_replicas_need_no_exchange(plan: Plan) -> None:
    """On a machine whose ranks have memory for the whole run, and 4 GiB free."""
    words = "--memory --model toy.yaml --machine sized.yaml --size 512"
    for memory_gib, told in ((8, True), (4, False)):
        Path("sized.yaml").write_text(CARD.replace("device: {", f"device: {{memory_gib: {memory_gib}, "))
        _, shown = plan(words)
        assert ("2 replicas of one rank" in shown.splitlines()[0]) == told
    assert "replicas of one rank" not in plan(words.replace("sized", "card"))[1]  # nothing is known of its memory


def test_a_plan_of_a_model_with_both_branches_in_one_call_may_leave_guidance_out(plan: Plan) -> None:
    both, one = (plan(f"--memory --model sd3.5 --nodes 1{more}") for more in ("", " --branches 1"))
    assert "each branch on 6 rank(s)" in both[1] and "guidance_parallel" not in one[1]
    assert one[0]["memory_mib"]["rank"]["activations"] < both[0]["memory_mib"]["rank"]["activations"]


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
    words = "--model toy.yaml --size 512 --steps 10 --preset cocodiff --schedule threshold"
    sent = []
    for stable in (0.25, 0.75):
        told, _ = plan(words, "--stable", stable)
        assert told["assumed"]["stable"] == stable
        sent.append(told["time"]["bytes_per_step"]["plane"])
    assert sent[0] > sent[1] > 0


@pytest.mark.usefixtures("plan")
def test_without_a_folder_a_plan_is_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().iterdir())
    words = ["plan", "--model", "toy.yaml", "--machine", "card.yaml", "--preset", "split", "--compare", "--explain"]
    assert main(words) == main(words) == 0
    shown = capsys.readouterr().out
    assert shown.count("<- taken") == shown.count("a step: ") == 2 and "results: " not in shown
    assert sorted(Path().iterdir()) == before


def numbers_of(model: Any) -> int:
    return sum(x.numel() for x in [*model.parameters(), *model.buffers()])


def test_models_of_folders(plan: Plan, tmp_path: Path) -> None:
    """A transformer alone, and a pipeline of videos with two experts and a timestep for each token."""
    model = sd3_transformer(12, layers=3, dual=(1,), patch_size=2)
    model.save_config(tmp_path / "tiny" / "transformer")
    told, _ = plan("--memory --model tiny --size 64 --dtype fp32 --text_tokens 8")
    assert told["memory_mib"]["rank"]["weights"] * 2**20 == numbers_of(model) * 4
    assert [told["case"][name] for name in ("model", "image_tokens", "text_tokens")] == ["tiny", 16, 8]
    pipe = wan_pipeline(tokens=True)
    pipe.save_pretrained(tmp_path / "ti2v")
    told, _ = plan("--memory --model ti2v --dtype fp32")
    assert told["case"]["image_tokens"] == 31 * 22 * 40 and told["case"]["height"] == 704
    assert told["memory_mib"]["rank"]["weights"] * 2**20 == 2 * numbers_of(pipe.transformer) * 4
    assert told["peaks_mib"]["vae_weights"] > 0


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
