"""What `warm` imports once: all that `cocodiff` imports before it forks ranks, for every family."""

from cocodiff.jobs.terminal import quiet_libraries

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
