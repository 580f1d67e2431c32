"""A family that only the tests know (`toys/family.py`) runs and is sized by its record and one line of the table."""

import json
from typing import Any

import pytest
import torch
from on_ranks import check_exact

from cocodiff import models
from cocodiff.cli.main import main
from cocodiff.jobs.model_shapes import load_shape
from cocodiff.planner.case import ModelShape

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(models.FAMILIES, "Toy", "toys.family:FAMILY")
    torch.manual_seed(0)
    return models.load_family("Toy").import_transformer()()


@pytest.mark.sample(2)
@pytest.mark.parametrize(("size", "machine", "ring"), [(3, "local", 1), (6, "local", 2), (12, "aurora", 2)])
def test_it_gives_what_one_process_gives(toy, size, machine, ring):
    inputs = {name: torch.randn(2, n, 24) for name, n in (("hidden_states", 17), ("encoder_hidden_states", 5))}
    presets = (("flat", 1), ("tapa", 1), ("split", 1), ("v_first", 1), ("split", 2), ("tapa", 3))
    modes = {f"{preset}, {chunks}": {"preset": preset, "chunks": chunks} for preset, chunks in presets}
    check_exact(size, toy, [inputs | {"timestep": torch.tensor([500.0])}], modes, machine=machine, ring=ring)


def test_plan_sizes_its_folder_and_a_file_that_names_it(toy, tmp_path):
    toy.save_pretrained(tmp_path / "mine")
    numbers = sum(x.numel() for x in toy.parameters())
    assert load_shape(str(tmp_path / "mine")) == ModelShape("mine", 6, 4, 2, numbers, text_tokens=5, branches=2)
    path = tmp_path / "toy.yaml"
    path.write_text("name: toy\nfamily: Toy\nheads: 6\nhead_dim: 4\njoint_layers: 2\nparameters: 1000\n")
    words = ("plan", "--memory", "--model", str(path), "--machine", "local", "--ranks", "3", "--size", "128")
    assert main([*words, "--preset", "cocodiff", "--out", str(tmp_path / "plan")]) == 0
    told = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert told["case"]["text_tokens"] == 5 and told["case"]["branches"] == 2
    assert told["memory_mib"]["rank"]["cache"] > 0
