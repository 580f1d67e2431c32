"""What a model of the embedded one's kind is trained on and by: batches, their loss, rates and the optimiser."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cocodiff.demo_model.training import (
    NOISE,
    Optimizer,
    TrainingBatch,
    draw_sigma,
    loss_of,
    make_batch,
    new_model,
    orthogonalise,
    relative_rate,
)
from cocodiff.demo_model.vae import LappedTransformVAE

SHIFT = 3.0


def noise() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def batch_of(image: Tensor, mask: Tensor, known: Tensor) -> TrainingBatch:
    return make_batch(image, mask, LappedTransformVAE(), SHIFT, noise(), known)


def test_a_batch_hides_what_is_masked_and_what_nobody_knows() -> None:
    """Of two images, neither square: the first has a mask and a part that nobody knows, the second a mask alone."""
    image, mask, known = torch.rand(2, 48, 64, generator=noise()), torch.zeros(2, 48, 64), torch.ones(2, 48, 64)
    mask[0, :24, :16], mask[1, 8:40, 24:] = 1, 1
    known[0, 32:, 40:] = 0
    batch, hidden = batch_of(image, mask, known), torch.maximum(mask, 1 - known)
    for seen, changed in ((False, torch.where(hidden > 0, 0.3, image)), (True, torch.where(hidden > 0, image, 0.3))):
        assert torch.equal(batch_of(changed, mask, known).input_BCHW[:, 17:], batch.input_BCHW[:, 17:]) != seen
    assert torch.equal(batch.input_BCHW[:, 16], hidden[:, ::8, ::8])
    clean, sigma = LappedTransformVAE().transform(image * 2 - 1), batch.sigma_B[:, None, None, None]
    torch.testing.assert_close(batch.input_BCHW[:, :16], clean + sigma * batch.target_BCHW)
    assert float((batch.target_BCHW + clean).std()) == pytest.approx(NOISE, rel=0.1)
    share = batch.share_B1HW[:, 0]
    assert share[[0, 1, 0], [1, 2, 5], [0, 5, 0]].tolist() == pytest.approx([0.8, 1.05, 0.05])  # a quarter is outside
    assert not share[0, 4:, 5:].any() and share[1].all() and share[0, :3].all()
    moved = batch.to(torch.device("meta"))
    assert isinstance(moved, TrainingBatch) and all(x.is_meta for x in moved)


def test_noise_levels_are_those_of_the_shifted_schedule_and_a_tenth_is_all_noise() -> None:
    sigma = draw_sigma(4000, SHIFT, noise())
    assert float((sigma == 1).float().mean()) == pytest.approx(0.1, abs=0.02)
    for at, level in ((400, 0.25), (2000, 0.75), (3600, 27 / 28)):  # 3 u / (1 + 2 u)
        assert float(sigma[at : at + 40].min()) == pytest.approx(level, abs=0.01)


def test_the_loss_weighs_tokens_channels_and_noise() -> None:
    """Every velocity is off by 1. A channel counts by the inverse of its scale, an image by its noise."""
    sigma, calls = torch.tensor([1.0, 0.25]), []

    def loss(share: tuple[float, float], off: Tensor) -> float:
        def model(**call: Any) -> list[Tensor]:
            calls.append(call)
            return [target + off]

        target = torch.rand(2, 4, 3, 5, generator=noise())
        shares = torch.tensor(share)[:, None, None, None].expand(2, 1, 3, 5)
        return float(loss_of(model, TrainingBatch(target, sigma, target, shares), (1.0, 0.5, 0.5, 1.0)))

    for share, expected in (((1, 0), 1.0), ((0, 1), 0.125), ((0.5, 0.5), 0.5625), ((3, 1), 0.78125), ((0, 0), 0.0)):
        assert loss(share, torch.ones(1)) == pytest.approx(expected)
    assert loss((1, 0), torch.tensor([0.0, 1, 0, 0])[:, None, None]) == pytest.approx(1 / 3)  # of weights 1, 2, 2, 1
    assert all(call["timestep"].tolist() == [1000, 250] for call in calls)
    assert all(len(call[of]) == 2 for call in calls for of in ("encoder_hidden_states", "pooled_projections"))


def test_the_rate_warms_up_stays_and_falls() -> None:
    expected = {0: 1 / 60, 29: 0.5, 59: 1.0, 300: 1.0, 650: 0.5, 999: 1 / 700}
    assert {step: relative_rate(step, 1000) for step in expected} == pytest.approx(expected)


@pytest.mark.parametrize(("rows", "columns"), [(6, 6), (6, 20), (20, 6)])
def test_matrices_become_orthogonal_each_by_itself(rows: int, columns: int) -> None:
    updates = torch.randn(2, rows, columns, generator=noise()) * torch.tensor([1.0, 50.0])[:, None, None]
    found = orthogonalise(updates)
    for update, one in zip(updates, found, strict=True):
        left, sizes, right = torch.linalg.svd(update, full_matrices=False)
        turned = left.T @ one @ right.T
        assert (turned - turned.diag().diag()).abs().max() < 1e-3 and found.shape == updates.shape
        assert ((turned.diag() > 0.6) & (turned.diag() < 1.25))[sizes > 0.1 * sizes.max()].all()


class Blocks(nn.Module):
    """Matrices of two shapes that Muon has, and others for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.transformer_blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)) for _ in range(2))
        self.proj_out = nn.Linear(4, 2)


def test_an_optimiser_updates_all_and_goes_on_from_its_state() -> None:
    model = Blocks()
    optimizer = Optimizer(model, 1.0)

    def step(own: Blocks, by: Optimizer, seed: int, rate: float = 0.5, factor: float = 1.0) -> bool:
        for number, x in enumerate(own.parameters()):
            x.grad = factor * torch.randn(x.shape, generator=torch.Generator().manual_seed(100 * seed + number))
        return by.step(rate)

    begun = copy.deepcopy(model)
    assert step(model, optimizer, 1) and all(x.grad is None for x in model.parameters())
    moved = {name: x - y for (name, x), y in zip(model.named_parameters(), begun.parameters(), strict=True)}
    sizes = [float(of.detach().pow(2).mean().sqrt()) for of in moved.values()]
    assert len(moved["transformer_blocks.0.0.weight"]) == 6 and min(sizes) > 1e-4
    assert sizes[-1] == pytest.approx(0.5 * 2e-3, rel=0.01)  # the rate, in the first step of AdamW
    kept, state = copy.deepcopy(model), copy.deepcopy(optimizer.state())
    assert not step(model, optimizer, 2, factor=float("nan"))
    assert all(map(torch.equal, model.parameters(), kept.parameters()))
    again = Optimizer(kept, 1.0)
    again.load_state(state)
    for own, by in ((model, optimizer), (kept, again)):
        assert step(own, by, 3, rate=0.25)
    assert all(map(torch.equal, model.parameters(), kept.parameters()))
    faster = copy.deepcopy(begun)
    step(faster, Optimizer(faster, 2.0), 1)
    of_twice_the_rate = (faster.proj_out.bias - begun.proj_out.bias).detach().abs().mean()
    assert float(of_twice_the_rate) == pytest.approx(2 * sizes[-1], rel=0.01)


def test_matrices_move_by_their_momentum() -> None:
    model, velocity = Blocks(), torch.zeros(6, 4)
    optimizer, weight = Optimizer(model, 1.0), model.transformer_blocks[0][0].weight
    for number in range(3):
        before, gradient = weight.detach().clone(), torch.zeros(6, 4)
        for x in model.parameters():
            x.grad = torch.zeros_like(x)
        gradient[number, number] = gradient[number + 1, 0] = 0.01
        weight.grad = gradient.clone()
        assert optimizer.step(0.5)
        velocity = 0.95 * velocity + 0.05 * gradient
        update = orthogonalise((0.05 * gradient + 0.95 * velocity)[None])[0]
        expected = before * (1 - 0.5 * 5e-3 * 0.02) - 0.5 * 5e-3 * 0.2 * 6**0.5 * update
        torch.testing.assert_close(weight.detach(), expected, rtol=1e-4, atol=1e-6)


def test_a_new_model_says_nothing_and_its_gates_are_nearly_closed() -> None:
    config = {"sample_size": 8, "patch_size": 1, "in_channels": 33, "out_channels": 16, "num_layers": 2}
    config |= {"attention_head_dim": 4, "num_attention_heads": 2, "joint_attention_dim": 8}
    model = new_model(config | {"caption_projection_dim": 8, "pooled_projection_dim": 8, "pos_embed_max_size": 8})
    for norm in (model.transformer_blocks[0].norm1, model.transformer_blocks[0].norm1_context):
        assert norm.linear.bias.view(6, 8)[:, 0].tolist() == pytest.approx([0, 0, 0.3, 0, 0, 0.3])
        assert not norm.linear.weight.any()
    call = {"hidden_states": torch.rand(1, 33, 8, 8), "timestep": torch.ones(1)}
    call |= {"encoder_hidden_states": torch.rand(1, 2, 8), "pooled_projections": torch.rand(1, 8)}
    assert not model(**call).sample.any() and model.transformer_blocks[0].attn.to_q.weight.any()
