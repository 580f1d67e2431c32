"""What `warm` imports once: all that `cocodiff` imports before it forks ranks, for every family."""

from cocodiff.console.terminal import quiet_libraries

quiet_libraries("error")

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

from cocodiff.jobs.session import import_before_fork  # noqa: E402
from cocodiff.loading.pipelines import EMBEDDED, Request  # noqa: E402

import_before_fork(Request(EMBEDDED, "inpaint"))
