"""Muon for the transformer's block matrices, AdamW for the rest, and a running average of all weights.

torch has a Muon too, but it orthogonalises one matrix at a time in bfloat16, which a CPU without bfloat16 instructions
emulates: it would take four times as long as the model. This one takes matrices of equal shape together, in float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(updates_NRC: Tensor, steps: int = 5) -> Tensor:
    """Matrices [N, rows, columns] with the same singular vectors and all singular values near 1 (Newton-Schulz).

    Every step multiplies the matrix by a polynomial of its Gram matrix: the steps run on the small square Gram matrix
    alone and the (maybe long) matrix itself is multiplied once, at the end.
    """
    wide = updates_NRC.mT if updates_NRC.shape[1] > updates_NRC.shape[2] else updates_NRC
    wide = wide / (wide.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    gram = wide @ wide.mT
    eye = torch.eye(gram.shape[1], device=gram.device)
    total = eye.expand_as(gram)
    for _ in range(steps):
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c) + a * eye
        total = factor @ total
        gram = factor @ gram @ factor
    wide = total @ wide
    return wide.mT if updates_NRC.shape[1] > updates_NRC.shape[2] else wide


class Muon:
    """Momentum, orthogonalised; scaled so that the update's root mean square matches AdamW's at the same rate."""

    def __init__(self, matrices: list[nn.Parameter], momentum: float = 0.95, weight_decay: float = 0.02) -> None:
        self.momentum = momentum
        self.weight_decay = weight_decay
        shapes = {matrix.shape: [other for other in matrices if other.shape == matrix.shape] for matrix in matrices}
        self.groups = [(group, group[0].new_zeros(len(group), *shape)) for shape, group in shapes.items()]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update of every matrix from its gradient."""
        for group, velocity_NRC in self.groups:
            gradient_NRC = torch.stack([matrix.grad for matrix in group if matrix.grad is not None])
            velocity_NRC.lerp_(gradient_NRC, 1 - self.momentum)
            update_NRC = orthogonalise(gradient_NRC.lerp(velocity_NRC, self.momentum))
            size = 0.2 * max(update_NRC.shape[1:]) ** 0.5
            for matrix, update in zip(group, update_NRC, strict=True):
                matrix.mul_(1 - rate * self.weight_decay).add_(update, alpha=-rate * size)


class Optimizer:
    """Both optimisers under one relative rate, and the exponential moving average of the weights they produce."""

    def __init__(self, model: nn.Module, muon_rate: float, adam_rate: float, average: float) -> None:
        named = list(model.named_parameters())
        # The stream of the constant prompt is left to AdamW: Muon would spend half of its time there.
        other = ("norm", "context", "add_")
        matrices = [
            p
            for name, p in named
            if p.ndim == 2 and name.startswith("transformer_blocks") and not any(o in name for o in other)
        ]
        chosen = {id(p) for p in matrices}
        self.parameters: list[Tensor] = [p for _, p in named]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            [p for p in self.parameters if id(p) not in chosen], lr=adam_rate, betas=(0.9, 0.98), weight_decay=0.0
        )
        self.muon_rate, self.adam_rate, self.average = muon_rate, adam_rate, average
        self.averaged = [p.detach().clone() for p in self.parameters]
        self.count = 0

    def step(self, relative_rate: float) -> bool:
        """One update at `relative_rate` times the configured rates; clears the gradients. Returns whether they were
        finite; else nothing is updated."""
        if not nn.utils.clip_grad_norm_(self.parameters, 1.0).isfinite():
            return False
        self.muon.step(self.muon_rate * relative_rate)
        for group in self.adam.param_groups:
            group["lr"] = self.adam_rate * relative_rate
        self.adam.step()
        for parameter in self.parameters:
            parameter.grad = None
        self.count += 1
        keep = min(self.average, self.count / (self.count + 10))
        with torch.no_grad():
            torch._foreach_lerp_(self.averaged, self.parameters, 1 - keep)
        return True

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """The model with the running average of its weights while the block lasts."""
        raw = [parameter.detach().clone() for parameter in self.parameters]
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.averaged)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, raw)

    def state(self) -> dict[str, Any]:
        """What `load_state` goes on from."""
        velocities = [velocity_NRC for _, velocity_NRC in self.muon.groups]
        return {"muon": velocities, "adam": self.adam.state_dict(), "averaged": self.averaged, "count": self.count}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes the state of an optimiser of the same model."""
        for (_, velocity_NRC), kept_NRC in zip(self.muon.groups, state["muon"], strict=True):
            velocity_NRC.copy_(kept_NRC)
        self.adam.load_state_dict(state["adam"])
        torch._foreach_copy_(self.averaged, state["averaged"])
        self.count = state["count"]
