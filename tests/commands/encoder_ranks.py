"""Loads a model with text encoders on two forked ranks; says what each rank read. Arguments: model folder, prompt.

With a third argument rank 0 fails while it encodes.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import torch
import transformers
from cocodiff_eval.harness.pipelines import Request, load_model

from cocodiff.comm.launch import detect
from cocodiff.config.config import Config
from cocodiff.jobs.ranks import run_ranks
from cocodiff.models.family import GENERATE


def work(transport: Any) -> None:
    read: list[str] = []
    original = transformers.PreTrainedModel.from_pretrained.__func__

    def noted(kind: type, *args: Any, **kwargs: Any) -> Any:
        read.append(kind.__name__)
        if len(sys.argv) > 3:
            raise OSError("the disk is on fire")
        return original(kind, *args, **kwargs)

    transformers.PreTrainedModel.from_pretrained = classmethod(noted)  # in this forked rank alone
    model = load_model(Request(sys.argv[1], GENERATE, (sys.argv[2],)), "fp32", transport)
    alive = sum(isinstance(thing, transformers.PreTrainedModel) for thing in gc.get_objects())
    parts = [name for name, part in model.pipe.components.items() if part is not None]
    sums = {name: float(torch.as_tensor(value).double().sum()) for name, value in model.prompts[0].items()}
    told = transport.gather_values({"read": read, "alive": alive, "parts": sorted(parts), "sums": sums})
    if told is not None:
        print(json.dumps(told))


def main() -> int:
    return run_ranks(2, detect(), Config(), {}, work)
