"""Mistakes in words, files and models: one line with the values, exit 2, nothing forked and nothing left."""

from __future__ import annotations

import json
import os
import resource
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import tifffile
import tiny_pipelines
from PIL import Image
from planned_models import PLANNED

from cocodiff.cli.main import main
from cocodiff.config.config import load_machine
from cocodiff.config.errors import UserError
from cocodiff.config.machine import MOST_RANKS, Topology
from cocodiff.jobs import children

pytestmark = pytest.mark.usefixtures("promptly")

HALF = "name: half\nheads: 4\nhead_dim: 8\n"
WHOLE = HALF + "joint_layers: 1\nparameters: 9\n"
TEXTS = {
    "half.yaml": HALF,
    "wrong.yaml": HALF.replace("heads", "head"),
    "unet/config.json": json.dumps({"_class_name": "Nothing"}),
    "kl/config.json": json.dumps({"_class_name": "AutoencoderKL"}),
    "campaign/empty/bench.json": "{}",
    "cut/step/bench.json": '{"rows": [',
    "poor/step/bench.json": '{"rows": [{"variant": "flat"}]}',
    "none/a.txt": "",
    "zero.yaml": WHOLE.replace("heads: 4", "heads: 0"),
    "part.yaml": WHOLE.replace("9", "1.5"),
    "less.yaml": WHOLE + "text_tokens: -1\n",
    "wide.yaml": WHOLE + "mlp_ratio: wide\n",
    "flux3.yaml": WHOLE + "family: FLUX.3\n",
    "mine.yaml": "name: mine\ncards: 2\ntiles: 2\nplanes: [0, 1]\n",
    "broken.tif": "II*\0 this is no image",
}


def volumes() -> dict[str, np.ndarray]:
    chance, most = np.random.default_rng(0), np.ones((20, 100, 110), np.uint8)
    holes, slab = (np.zeros((20, 32, 40), np.uint8) for _ in range(2))
    holes[4:10, 5:13, 6:15], slab[8:11] = 255, 255
    most[:, :, :20] = 0
    return {
        "good": chance.integers(0, 60000, (96, 96), dtype=np.uint16),
        "small": np.eye(64, dtype=np.uint8),
        "hole": np.eye(96, dtype=np.uint8),
        "nan": np.where(np.arange(96) == np.arange(96)[:, None] + 1, np.nan, np.float32(1)),
        "two": chance.random((2, 40, 48), dtype=np.float32),
        "volume": chance.integers(0, 60000, holes.shape, dtype=np.uint16),
        "large": chance.integers(0, 60000, most.shape, dtype=np.uint16),
        "holes": holes,
        "slab": slab,
        "most": most,
        "empty": most * 0,
    }


def without_image_encoder(folder: Path) -> None:
    index = folder / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"image_encoder": [None, None]}))


def renamed(folder: Path) -> None:
    index = folder / "model_index.json"
    index.write_text(index.read_text().replace("FluxFillPipeline", "FluxPipeline"))


# What makes a model, and what is done to its folder.
MODELS: dict[str, tuple[Callable[[], Any], Callable[[Path], object]]] = {
    "sd3": (tiny_pipelines.sd3_pipeline, str),
    "encoders": (lambda: tiny_pipelines.sd3_pipeline(**tiny_pipelines.clip_text()), str),
    "z_image": (tiny_pipelines.z_image_pipeline, str),
    "cogvideox": (tiny_pipelines.cogvideox_pipeline, str),
    "animate": (lambda: tiny_pipelines.wan_pipeline(image=True), str),
    "fill": (lambda: tiny_pipelines.flux_pipeline(fill=True), str),
    "renamed": (lambda: tiny_pipelines.flux_pipeline(fill=True), renamed),
    "experts": (tiny_pipelines.wan_pipeline, str),
    "one_expert": (
        tiny_pipelines.wan_pipeline,
        lambda folder: next((folder / "transformer_2").glob("*.safetensors")).unlink(),
    ),
    "clip": (lambda: tiny_pipelines.wan_pipeline(experts=1, image=True, clip=True), str),
    "blind": (lambda: tiny_pipelines.wan_pipeline(experts=1, image=True, clip=True), without_image_encoder),
    "tokens": (lambda: tiny_pipelines.wan_pipeline(experts=1, tokens=True), str),
    "wan": (PLANNED["wan"].model, str),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of good inputs, and of what there is to be refused; models are added when a case names them."""
    folder = tmp_path_factory.mktemp("files")
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name, voxels in volumes().items():
        tifffile.imwrite(folder / f"{name}.tif", voxels, photometric="minisblack")
    for name in ("pipe.tif", "pipe.yaml"):
        os.mkfifo(folder / name)
    with h5py.File(folder / "linked.h5", "w") as file:
        file["data"] = h5py.ExternalLink("other.h5", "/data")
    Image.fromarray(np.zeros((40, 60, 3), np.uint8)).save(folder / "first.png")
    Image.fromarray(np.zeros((16, 16), np.uint16)).save(folder / "deep.png")
    return folder


BOUNDED = "inpaint --steps 2 --quality {}"
VOLUME = "inpaint --input volume.tif --truth volume.tif --mask {}.tif --steps 2 --axes {}"
TRAIN = "train --input large.tif --iterations 6 --batch 2 --patches 40 --quiet"
MANY = "999999999999"
TOO_MANY = "MiB are available: start up to"
COUNTS = {  # options of commands that have to be 1 at least
    "plan --model flux.1": "batch steps size frames height width nodes ranks branches images",
    "inpaint": "steps batch ranks exact_slices samples tile frames",
    "generate --model sd3.5 --prompt a": "steps height width frames fps ranks",
    "train --input large.tif": "iterations batch patches ranks",
    "verify --model nowhere": "steps height width frames ranks",
    "doctor": "ranks batch size",
}
CASES = [
    *((f"{line} --{name} 0", f"--{name} 0: at least 1") for line, names in COUNTS.items() for name in names.split()),
    ("plan --model sd3.5 --images 2 --memory", "--images asks for the time of a job"),
    ("plan --model sd3.5 --negative_tokens 0", "--negative_tokens 0: sd3.5 does not call"),
    ("plan", "--model is missing: "),
    ("plan --memory", "--model is missing: "),
    ("plan --model flux.1 --stable 2", "--stable 2: give a part from 0 to 1"),
    ("plan --memory --model qwen-imag", "unknown model 'qwen-imag', did you mean qwen-image?"),
    ("plan --memory --model gone.yaml", "gone.yaml does not exist; shipped models: cogvideox-paper, flux.1"),
    ("plan --memory --model half.yaml", "model file half.yaml: missing 2 required"),
    ("plan --memory --model wrong.yaml", "wrong.yaml: unknown key head, did you mean heads?"),
    ("plan --memory --model zero.yaml", "heads 0: give a whole number of at least 1"),
    ("plan --memory --model part.yaml", "parameters 1.5: give a whole number"),
    ("plan --memory --model less.yaml", "text_tokens -1: give a whole number of at least 0"),
    ("plan --memory --model wide.yaml", "mlp_ratio 'wide': give a number above 0"),
    ("plan --memory --model flux3.yaml", "family of model file flux3.yaml 'FLUX.3', did you mean FLUX"),
    ("plan --memory --model none", "--model none holds no transformer/config.json"),
    ("plan --memory --model unet", "diffusers has no class Nothing"),
    ("plan --memory --model kl", "the memory of a AutoencoderKL is not known"),
    ("plan --memory --model flux.1 --size 1000", "use 992 or 1008"),
    ("plan --memory --model flux.1 --frames 5", "--frames 5: flux.1 makes images: leave it away"),
    ("plan --memory --model wan2.2 --size 512", "--size 512: wan2.2 makes videos: leave it away, or give"),
    ("plan --memory --model wan2.2 --frames 6", "--frames 6: wan2.2 makes 4 n + 1: use 5"),
    ("plan --memory --model wan2.2 --width 500", "--width 500: wan2.2 makes 16 n: use 496"),
    ("plan --memory --model flux.1 --text_tokens -1", "--text_tokens -1: at least 0 is needed"),
    ("plan --memory --model flux.1 --machine local", "machine local has no fixed size: add --ranks N"),
    ("plan --memory --model flux.1 --preset fast", "unknown preset 'fast'"),
    ("plan --memory --model flux.1 --dtype int8", "--dtype"),
    ("bench attention --tokens 0", "--tokens 0"),
    ("bench attention --ways token", "on 1 rank(s): choose from naive"),
    ("bench attention --ways naive --ranks 2", "choose from flat"),
    ("bench attention --tokens 2 --ranks 3", "give every rank one"),
    ("bench attention --waits", "cocodiff emulate"),
    ("bench step --steps 0", "at least 1"),
    ("bench step --preset tappa", "did you mean tapa?"),
    ("papers --paper tokenrings", "tokenring"),
    ("papers --runs nothing", "no command's name"),
    ("papers --measured none", "launch/campaign.pbs"),
    ("papers --measured campaign", "empty/bench.json"),
    ("papers --measured cut", "step/bench.json"),
    ("papers --measured poor", "step/bench.json"),
    ("papers --out half.yaml/out", "choose another folder"),
    (BOUNDED.format("12dB"), "--quality 12dB: neither a loss nor a distance: give the least PSNR"),
    (BOUNDED.format("50dB --preset flat,tapa"), "with presets flat, tapa: it chooses the setting of one"),
    (BOUNDED.format("50dB --preset cocodiff"), "with preset cocodiff"),
    (BOUNDED.format("50dB --codec int8"), "--codec int8: --quality 50dB chooses it"),
    (BOUNDED.format("50dB --no-exact"), "compares with the exact run: leave --no_exact away"),
    (BOUNDED.format("50dB --quality_every 0"), "--quality_every 0: at least 1"),
    (BOUNDED.format("1dB --mask hole.tif"), "the truth, which mask hole of good hides"),
    ("inpaint --input absent.tif", "no such file; absent.tif"),
    ("inpaint --input 'a\nb.tif'", "no such file"),
    ("inpaint --input broken.tif", "broken.tif"),
    ("inpaint --input linked.h5:/data", "--follow-links"),
    *((f"inpaint --{n} linked.h5:/data --follow-links", "linked.h5; not there") for n in ("input", "mask", "truth")),
    ("inpaint --input pipe.tif", "is a named pipe"),
    ("inpaint --mask pipe.tif", "pipe"),
    ("inpaint --truth pipe.tif", "pipe"),
    ("inpaint --machine pipe.yaml", "pipe"),
    ("inpaint --config pipe.yaml", "is a named pipe"),
    ("inpaint --config /dev/zero", "is a device"),
    *(
        (f"inpaint {option} '{name}{suffix}'", said)
        for name in ("x" * 5000, "nul\0")
        for option, suffix, said in (
            ("--mask", "", "check the path"),
            ("--input", ".tif", "check the path"),
            ("--model", "", "no such folder"),
        )
    ),
    ("inpaint --mask small.tif", "64 x 64; 96 x 96"),
    ("inpaint --mask center --input nan.tif", "row 0, column 1"),
    ("inpaint --preset tappa", "did you mean tapa?"),
    ("inpaint --stepz 5", "did you mean steps?"),
    ("inpaint --guidance 0", "--guidance 0: the embedded model has no guidance"),
    ("inpaint --strength 1e-300", "give at least"),
    ("inpaint --timeout-s -1", "timeout_s"),
    ("inpaint --range 7", "--range '7'; two intensities"),
    ("inpaint --ranks 200", "200 ranks for 144 image tokens"),
    ("inpaint --ranks 150 --parallel off", "150 ranks for the 144 image tokens"),
    ("inpaint --vae tiled", "has no tiles"),
    ("inpaint --vae sharded", "is not known in bands"),
    ("inpaint --machine aurora --ranks 5", "12; --machine local"),
    ("inpaint --machine mine.yaml --ranks 3", "start 4 ranks"),
    ("inpaint --model absent", "no such folder"),
    ("inpaint --input two.tif --model z_image --frames 5", "--frames 5; z_image restores images; leave it away"),
    ("inpaint --input two.tif --model z_image --tile 30", "multiples of 4; give 32"),
    ("inpaint --input two.tif --model z_image --fresh_noise 2", "--fresh_noise 2; from 0 to 1"),
    ("inpaint --input two.tif --model z_image --tile 32 --ranks 2 --quality 30dB", "heads; name a preset"),
    (
        "inpaint --input two.tif --model cogvideox --tile 32 --frames 5",
        "CogVideoXPipeline; 8 frames; 5 were asked for; 2 slices",
    ),
    ("inpaint --input two.tif --model animate", "12 channels; gives 4"),
    ("inpaint --input two.tif --model fill --fresh_noise 0", "--fresh_noise 0; fill only restores; leave it away"),
    (VOLUME.format("holes", "w"), "'w'"),
    (VOLUME.format("holes", "auto z"), "auto"),
    (VOLUME.format("holes", "z y"), "--samples 1: 2 axes"),
    (VOLUME.format("holes", "auto --no_hidden_test"), "--axes auto"),
    (VOLUME.format("holes", "y --quality 50dB"), "--quality"),
    (VOLUME.format("holes", "y --slices 0:10"), "slices along y need 16 x 16 at least"),
    (VOLUME.format("slab", "z"), "nothing is left to restore from"),
    ("generate", "--model is missing; the embedded model only restores"),
    ("generate --model embedded", "the embedded model only restores"),
    ("generate --model sd3 --prompt 'a tooth'", "has no text encoders, so it takes no --prompt"),
    ("generate --model encoders", "--prompt is missing"),
    ("generate --model sd3 --width 50", "--width 50: model"),
    ("generate --model sd3 --ranks 65", "65 ranks for 64 image tokens"),
    ("generate --model fill", "FluxFillPipeline's weights only restore"),
    ("generate --model renamed", "takes 48 channels and gives 16"),
    ("generate --model sd3 --frames 5", "makes images: leave it away"),
    ("generate --model sd3 --image first.png", "makes images from text alone"),
    ("generate --model experts --image first.png", "makes videos from text alone"),
    ("generate --model one_expert", "transformer_2 has no .safetensors weights"),
    ("generate --model clip", "--image is missing"),
    ("generate --model blind --image first.png", "has no image_encoder"),
    ("generate --model tokens --image none.png", "cannot be read"),
    ("generate --model tokens --image deep.png", "more than 8 bits"),
    ("generate --model tokens --guidance_2 0", "no second expert"),
    ("generate --model tokens --frames 6", "makes 4 n + 1 of them; give 5"),
    ("generate --model tokens --frames 5 --width 50", "--width 50"),
    (f"{TRAIN} --roi 0:64,0:64", "smaller than a patch of 96"),
    (f"{TRAIN} --slices 0:4", "at least 16 slices, or 192 voxels on a side"),
    (f"{TRAIN} --model none", "only the embedded model"),
    (f"{TRAIN} --rate 0", "--rate 0"),
    (f"{TRAIN} --mask most.tif", "too much is masked to train on"),
    (f"{TRAIN} --mask empty.tif", "the mask is empty"),
    ("verify --model nowhere", "--model nowhere: neither model_index.json nor config.json is there"),
    ("verify --model wan", "a WanTransformer3DModel alone: say what it is called with, by --inputs FILE"),
    ("verify --model wan --inputs none.pt", "--inputs none.pt: no file of torch.save that holds tensors"),
    (f"doctor --ranks {MANY}", "1,000,000 are possible"),
    (f"inpaint --input scan.tif --mask block --ranks {MANY}", TOO_MANY),
    (f"generate --model models/some --prompt 'a tooth' --ranks {MANY}", TOO_MANY),
    (f"sweep --input scan.tif --ranks {MANY}", TOO_MANY),
    (f"plan --model sd3.5 --machine local --ranks {MANY}", "1,000,000 are possible"),
    (f"plan --model sd3.5 --nodes {MANY}", "100,000 are possible"),
    (f"emulate --machine local --ranks {MANY} -- true", "ranks: up to 131072 can be placed"),
    (f"emulate --nodes {MANY} -- true", "ranks: up to 131072 can be placed"),
]


@pytest.mark.parametrize(("line", "values"), CASES, ids=[line[:40].replace("\0", " ") for line, _ in CASES])
def test_a_mistake_is_one_line_and_leaves_nothing(
    line: str, values: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files)
    named = MODELS.keys() & {*line.split()}  # of whose parts libraries may say something
    for name in named:
        if not (files / name).exists():
            make, change = MODELS[name]
            make().save_pretrained(files / name)
            change(files / name)
    capsys.readouterr()
    monkeypatch.setattr("os.fork", lambda: pytest.fail("forked"))
    words, before = shlex.split(line), sorted(files.rglob("*"))
    words += ["--input", "good.tif"] if words[0] == "inpaint" and "--input" not in words else []
    words += ["--out", "out"] if not {"--out", "verify", "doctor", "emulate"} & {*words} else []
    assert main(words) == 2
    captured = capsys.readouterr()
    assert sorted(files.rglob("*")) == before
    if words[0] not in ("inpaint", "generate", "train"):  # which say first what they read
        assert captured.out == ""
    (said,) = [line for line in captured.err.splitlines() if named == set() or line.startswith("cocodiff: ")]
    assert said.startswith("cocodiff: ") and [value for value in values.split("; ") if value not in said] == [], said


def test_limits_are_those_of_memory_processes_and_files(monkeypatch):
    monkeypatch.setattr(children, "_available_memory", lambda: 100 << 20)
    children.check_room(3)
    with pytest.raises(UserError, match=r"--ranks 4: each takes 26 MiB .* 100 MiB are available: start up to 3 here"):
        children.check_room(4)
    monkeypatch.setattr(children, "_available_memory", lambda: None)
    limits = {resource.RLIMIT_NPROC: (50, 50), resource.RLIMIT_NOFILE: (resource.RLIM_INFINITY,) * 2}
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    children.check_room(49)
    with pytest.raises(UserError, match="--ranks 50: this host lets you have 50 processes"):
        children.check_room(50)
    limits[resource.RLIMIT_NOFILE] = (64, 1024)
    children.check_room(12)
    with pytest.raises(UserError, match=r"--ranks 13: .* 68 files open, .* may have 64: allow more with ulimit -n 136"):
        children.check_room(13)
    limits[resource.RLIMIT_NOFILE] = (8, 8)
    children.check_room(1)


def test_the_largest_topology_is_larger_than_any_machine():
    assert MOST_RANKS > 10_624 * 12  # Aurora's tiles
    with pytest.raises(UserError, match="up to 131072 can be placed"):
        Topology.build(load_machine("local"), MOST_RANKS + 1)
