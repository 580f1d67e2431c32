"""Print which functions of cocodiff run, and on which thread, in the first attention call of a run on several ranks.

Run it as `.venv/bin/mpiexec -n 4 .venv/bin/python docs/attention_call.py`.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

import torch

import cocodiff
from cocodiff.demo_model import load_pipeline, prompt_embeddings

PACKAGES = {"models", "engine", "attention", "exchange", "comm"}
names = {"__call__", "attend", "joint", "send", "submit", "run_phase", "send_recv", "whole", "wait", "back"}
lines: dict[str, list[str]] = {}  # by thread
depths: dict[str, int] = {}  # by thread


def note(frame: FrameType, event: str, _: object) -> None:
    """Add a line for each call of the functions in `names`, from the first attention call's begin to its end."""
    file, name = Path(frame.f_code.co_filename), frame.f_code.co_name
    if name not in names or event not in ("call", "return"):
        return
    if file.parent.name not in PACKAGES or file.name in ("transport.py", "lane.py"):
        return
    thread, first = threading.current_thread().name, name == "__call__"
    depths[thread] = depths.get(thread, 0) + (1 if event == "call" else -1)
    if event == "call" and (lines or first):
        lines.setdefault(thread, []).append(f"{'  ' * depths[thread]}{file.parent.name}/{file.name}  {name}")
    if event == "return" and first:
        names.clear()


torch.manual_seed(0)  # the same inputs on every rank
call = {"image": torch.rand(1, 3, 96, 96), "mask_image": torch.ones(1, 1, 96, 96), "height": 96, "width": 96}
call |= {**prompt_embeddings(1), "guidance_scale": 1.0, "num_inference_steps": 1, "strength": 1.0}
pipe = load_pipeline()
threading.setprofile(note)  # for threads that start from here on: the lanes
sys.setprofile(note)
with cocodiff.parallelize(pipe, preset="tapa") as engine:
    pipe(**call)
sys.setprofile(None)
if engine.rank == 0:
    for thread, its_lines in lines.items():
        print(thread, *its_lines, sep="\n")
