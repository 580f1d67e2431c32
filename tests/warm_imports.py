"""What `warm` imports once: all that `cocodiff` imports before it forks ranks, for every family.

The collector of garbage searches nothing of it, here or in a forked program."""

import gc

gc.disable()

from cocodiff.jobs.terminal import quiet_libraries  # noqa: E402

quiet_libraries("error")

from cocodiff_eval.harness.pipelines import EMBEDDED, Request  # noqa: E402
from cocodiff_eval.harness.session import import_before_fork  # noqa: E402
from diffusers import (  # noqa: E402, F401
    Flux2KleinInpaintPipeline,
    Flux2KleinPipeline,
    Flux2Pipeline,
    FluxFillPipeline,
    FluxInpaintPipeline,
    FluxPipeline,
    QwenImageInpaintPipeline,
    QwenImagePipeline,
    StableDiffusion3Pipeline,
)

import_before_fork(Request(EMBEDDED, "inpaint"))
gc.freeze()
gc.enable()
