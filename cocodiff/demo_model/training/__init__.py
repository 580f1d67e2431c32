"""How models of the embedded model's kind are trained: flow matching on the latents of `LappedTransformVAE`, with the
33 input channels that `StableDiffusion3InpaintPipeline` feeds."""
