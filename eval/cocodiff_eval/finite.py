"""Images of a model that are no numbers: found after the first step, and told with the weights that are at fault."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cocodiff.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


def check_finite(pipe: Any, values: Tensor) -> None:
    """Raises UserError where a pipeline's latents or images are NaN or Inf, naming weights that are, if any.

    On a device it waits for `values`; the weights are looked at only when something is wrong.
    """
    import torch

    if bool(torch.isfinite(values).all()):
        return
    name = type(pipe).__name__
    for part in ("transformer", "transformer_2", "vae"):
        module = getattr(pipe, part, None)
        for weight, tensor in module.named_parameters() if module is not None else ():
            if not bool(torch.isfinite(tensor).all()):
                raise UserError(
                    f"{name} returned NaN or Inf: the weights of its {part} hold some, in {weight} ({tensor.dtype}); "
                    "use a wider --dtype, or copy the model's weights again"
                )
    raise UserError(
        f"{name} returned NaN or Inf, though its weights are numbers: use a wider --dtype, or see whether diffusers "
        "alone makes an image of this model"
    )
