"""Broken folders of models: a line that names the file or the part, exit 2, and nothing written."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import tifffile
import tiny_pipelines
import torch
import yaml
from diffusers import StableDiffusion3InpaintPipeline, StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file
from words import words

from cocodiff.cli.main import main
from cocodiff.config.errors import UserError
from cocodiff.jobs.model_checks import check_scheduler, check_sides, variant_of
from cocodiff.jobs.model_shapes import load_shape

Break, Refused = Callable[[Path], Any], Callable[..., str]
INDEX, SCHEDULER = "model_index.json", "scheduler/scheduler_config.json"
TRANSFORMER, VAE = "transformer/config.json", "vae/config.json"
WEIGHTS = {part: f"{part}/diffusion_pytorch_model.safetensors" for part in ("transformer", "vae")}
CASES = yaml.safe_load(Path(__file__).with_name("model_folders.yaml").read_text())
pytestmark = pytest.mark.usefixtures("promptly")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders without and with text encoders, and a slice."""
    folder = tmp_path_factory.mktemp("sound")
    tiny_pipelines.sd3_pipeline().save_pretrained(folder / "sd3")
    tiny_pipelines.flux_pipeline().save_pretrained(folder / "flux")
    tiny_pipelines.sd3_pipeline(**tiny_pipelines.clip_text()).save_pretrained(folder / "encoders")
    tifffile.imwrite(folder / "scan.tif", np.random.default_rng(0).integers(0, 60000, (40, 40), dtype=np.uint16))
    return {path.stem: path for path in folder.iterdir()}


def inpaint(sound: dict[str, Path], model: Path, *more: str, out: Path) -> list[str]:
    return words("inpaint", *more, "--quiet", "--no-exact", input=sound["scan"], model=model, steps=1, out=out)


@pytest.fixture
def refused(sound: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Breaks a copy of a sound folder, restores a slice with it and returns the one line that is said of it."""

    def run(kind: str, *broken: Break) -> str:
        shutil.copytree(sound[kind], tmp_path / "model")
        for one in broken:
            one(tmp_path / "model")
        prompt = ["--prompt", "a tooth"] if kind == "encoders" else []
        code = main(inpaint(sound, tmp_path / "model", *prompt, out=tmp_path / "out"))
        lines = capsys.readouterr().err.splitlines()
        assert code == 2 and not (tmp_path / "out").exists(), lines
        (line,) = lines
        assert line.startswith("cocodiff: ")
        return line.replace(str(tmp_path), "")

    return run


def text(name: str, content: str | bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def setting(name: str, key: str, value: Any) -> Break:
    def change(folder: Path) -> None:
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | {key: value}))

    return change


def tensors(change: Callable[[dict[str, torch.Tensor]], Any], name: str = WEIGHTS["transformer"]) -> Break:
    def write(folder: Path) -> None:
        held = load_file(folder / name)
        change(held)
        save_file(held, folder / name, {"format": "pt"})

    return write


def emptied(name: str) -> Break:
    return lambda folder: [path.unlink() for path in (folder / name).iterdir()]


def size(count: int) -> bytes:
    """The length of a header, as safetensors has it."""
    return struct.pack("<Q", count)


@pytest.mark.parametrize("shard", [{}, {"max_shard_size": "100KB"}], ids=["whole", "sharded"])
def test_weights_of_a_variant_alone_are_loaded(sound: dict[str, Path], tmp_path: Path, shard: dict[str, str]) -> None:
    """As of diffusion_pytorch_model.fp16.safetensors: the same restoration as of the files without it."""
    absent = dict.fromkeys(("text_encoder_3", "tokenizer_3", "image_encoder", "feature_extractor"))
    pipe = StableDiffusion3Pipeline.from_pretrained(sound["encoders"], **absent)
    pipe.save_pretrained(tmp_path / "fp16", variant="fp16", **shard)
    names = [path.name for path in (tmp_path / "fp16").glob("*/*.safetensors")]
    assert names and all(".fp16" in name for name in names) and len(names) > 4 * bool(shard)
    assert variant_of(tmp_path / "fp16" / "transformer") == "fp16" and variant_of(sound["sd3"] / "transformer") is None
    found = []
    for model in (sound["encoders"], tmp_path / "fp16"):
        out = tmp_path / f"out-{model.name}"
        assert main(inpaint(sound, model, "--prompt", "a tooth", out=out)) == 0
        found.append(tifffile.imread(out / "images/scan_block_tapa.tif"))
    assert (found[0] == found[1]).all()


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", [INDEX, TRANSFORMER, VAE, SCHEDULER])
@pytest.mark.parametrize("content", ["{", "[]", "null", '"a"', b"\xff\xfe", "[" * 10**5, '{"a": ' + "9" * 5000 + "}"])
def test_files_that_are_no_json_object(refused: Callable[..., str], name: str, content: str | bytes) -> None:
    assert f"model/{name}" in refused("sd3", text(name, content))


@pytest.mark.parametrize("name", [INDEX, TRANSFORMER, VAE, SCHEDULER, *WEIGHTS.values()])
def test_files_that_are_pipes_or_gone(refused: Callable[..., str], tmp_path: Path, name: str) -> None:
    pipe = refused("sd3", lambda folder: (folder / name).unlink(), lambda folder: os.mkfifo(folder / name))
    assert "named pipe" in pipe or f"no {name}" in pipe
    shutil.rmtree(tmp_path / "model")
    assert name.split("/")[0] in refused("sd3", lambda folder: (folder / name).unlink())


@pytest.mark.sample(10)
@pytest.mark.parametrize(
    "key", ["sample_size", "patch_size", "in_channels", "num_attention_heads", "joint_attention_dim"]
)
@pytest.mark.parametrize("value", [None, 0, -1, "x", [], 1.5, True, 10**9])
def test_sizes_that_no_transformer_has(refused: Callable[..., str], key: str, value: Any) -> None:
    assert f"{TRANSFORMER}: {key} is {value!r}: " in refused("sd3", setting(TRANSFORMER, key, value))


HEUN = "FlowMatchHeunDiscreteScheduler"


def test_a_scheduler_of_another_kind(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before weights are read."""
    monkeypatch.setattr(StableDiffusion3InpaintPipeline, "from_pretrained", lambda *_, **__: pytest.fail("read"))
    swapped = setting(INDEX, "scheduler", ["diffusers", HEUN])
    line = refused("sd3", swapped, lambda folder: getattr(diffusers, HEUN)().save_pretrained(folder / "scheduler"))
    assert f"model /model: its {HEUN} calls the transformer 2 times a step" in line
    assert "FlowMatchEulerDiscreteScheduler" in line


@pytest.mark.parametrize(("pipeline", "kind", "settings", "task", "said"), CASES["schedulers"])
def test_which_schedulers_pipelines_run_with(pipeline: str, kind: str, settings: Any, task: str, said: str) -> None:
    scheduler, made = getattr(diffusers, kind)(**settings), getattr(diffusers, pipeline)
    with pytest.raises(UserError, match=said) if said else nullcontext():
        check_scheduler(scheduler, made, task != "generate", task == "keep", "m")


ENCODER = "text_encoder/model.safetensors"
NAN_OR_INF = "weights of its transformer hold some, in proj_out.bias (torch.float32)"
BROKEN: list[tuple[str, Break, str]] = [
    *(
        ("sd3", text(name, content), f"/{name}: not a readable safetensors file")
        for name in WEIGHTS.values()
        for content in (b"", b"\0" * 8, b"\xff" * 8 + b"{}", size(2) + b"[]", size(8) + b'{"a": 3}', b"x" * 5000)
    ),
    ("sd3", tensors(lambda held: held.pop("proj_out.weight")), "the weights of its transformer lack proj_out.weight"),
    ("sd3", tensors(lambda held: held.clear()), "the weights of its transformer lack"),
    ("sd3", tensors(lambda held: held.update(more=torch.zeros(2))), "has no place for more of its weights"),
    ("sd3", tensors(lambda held: held.update({"proj_out.bias": held["proj_out.bias"][:-1].clone()})), "proj_out.bias"),
    ("sd3", tensors(lambda held: held["proj_out.bias"].fill_(torch.nan)), NAN_OR_INF),
    ("sd3", tensors(lambda held: held["proj_out.bias"].fill_(torch.inf)), NAN_OR_INF),
    ("sd3", tensors(lambda held: [x.mul_(1e30) for x in held.values()]), "NaN or Inf, though its weights are numbers"),
    ("sd3", tensors(lambda held: held.update({name: x > 0 for name, x in held.items()})), "weights of type BOOL"),
    ("encoders", tensors(lambda held: held.pop(min(held)), ENCODER), "the weights of its text_encoder lack"),
    ("encoders", tensors(lambda held: [x.fill_(torch.nan) for x in held.values()], ENCODER), "text encoders give NaN"),
    ("encoders", emptied("tokenizer_2"), "tokenizer_2 has none of"),
    *((kind, setting(name, key, value), said) for kind, name, key, value, said in CASES["settings"]),
]


@pytest.mark.sample(31)
@pytest.mark.parametrize(("kind", "broken", "said"), BROKEN, ids=[said[:50] for _, _, said in BROKEN])
def test_settings_and_weights_that_fit_nothing(refused: Refused, kind: str, broken: Break, said: str) -> None:
    assert said in refused(kind, broken)


class Bomb:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("exploded"),)


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder", "text_encoder_2"])
def test_weights_that_are_pickles_are_never_opened(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.chdir(tmp_path)

    def pickled(folder: Path) -> None:
        (weights,) = (folder / part).glob("*.safetensors")
        name = "diffusion_pytorch_model.bin" if part in WEIGHTS else "pytorch_model.bin"
        torch.save(Bomb(), folder / part / name)
        weights.unlink()

    line = refused("encoders", pickled)
    assert f"{part} has pickle weights only" in line and not (tmp_path / "exploded").exists()
    torch.load(next((tmp_path / "model" / part).glob("*.bin")), weights_only=False)
    assert (tmp_path / "exploded").exists(), "it would not have gone off"


def test_a_plan_of_a_broken_folder(tmp_path: Path, sound: dict[str, Path]) -> None:
    shutil.copytree(sound["sd3"], tmp_path / "sd3")
    for broken, said in (
        (setting(TRANSFORMER, "num_layers", 10**9), "num_layers is 1000000000.*1000 "),
        (setting(TRANSFORMER, "dual_attention_layers", 3), "SD3Transformer2DModel cannot be made of it"),
        (text(TRANSFORMER, "[]"), "list"),
    ):
        broken(tmp_path / "sd3")
        with pytest.raises(UserError, match=said):
            load_shape(str(tmp_path / "sd3"))
        shutil.copy(sound["sd3"] / TRANSFORMER, tmp_path / "sd3" / TRANSFORMER)


def test_sides_beyond_a_models_positions_and_any_memory() -> None:
    sd3 = tiny_pipelines.sd3_pipeline()
    check_sides(sd3, 96, 96, "m")
    with pytest.raises(UserError, match=r"--width 100: .* 96 "):
        check_sides(sd3, 96, 100, "m")
    with pytest.raises(UserError, match=r"--height 16777216 --width 65536: .*49152 GiB") as caught:
        check_sides(tiny_pipelines.flux_pipeline(), 2**24, 2**16, "m")
    assert "this machine has" in str(caught.value)
