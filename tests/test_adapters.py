"""What users hang on a transformer of a family: LoRA, ControlNet residuals, an IP-Adapter, reference images, skipped
layers. Each gives what one process gives, or is refused by name."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from exactness import ORDERS, Case, Expected
from peft import LoraConfig
from planned_models import PLANNED
from tiny_models import FAMILIES, flux_transformer, sd3_transformer
from torch import nn

from cocodiff.comm.loopback import run_ranks
from cocodiff.config.errors import UserError
from cocodiff.engine.engine import parallelize
from cocodiff.models import family_of

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

HEADS, WIDTH = 8, 64
Call = Callable[[torch.dtype], dict[str, Any]]


def call_of(family: str, text: int = 5, batch: int = 1, more: Any = lambda dtype: {}) -> Call:
    """The arguments of a call in a dtype: 35 image tokens. more: further ones."""
    case = Case(HEADS, 5, 7, text, batch, family=family)
    return lambda dtype: case.inputs(dtype) | more(dtype)


def check(model: nn.Module, calls: list[Call], size: int, before: Any = None, **settings: Any) -> list[torch.Tensor]:
    """All ranks give the same bits, as close to the truth as one process, with either order. before: changes the model
    before the call of a number. Returns what one process gives."""
    expected = []
    for number, call in enumerate(calls):
        own = copy.deepcopy(model)
        for one in range(number + 1 if before else 0):
            before(own, one)
        with torch.no_grad():
            plain, truth = own(**call(torch.float32)).sample, own.double()(**call(torch.float64)).sample
        expected.append(Expected(own, plain, truth))

    def work(transport: Any) -> list[torch.Tensor]:
        own, outputs = copy.deepcopy(model), []
        for order in ORDERS:
            with torch.no_grad(), parallelize(own, transport=transport, order=order, **settings):
                for number, call in enumerate(calls):
                    if before:
                        before(own, number)
                    outputs.append(own(**call(torch.float32)).sample + 0)
        return outputs

    of_ranks = run_ranks(size, work)
    for number, output in enumerate(of_ranks[0]):
        expected[number % len(calls)].check(output)
        assert all(torch.equal(outputs[number], output) for outputs in of_ranks)
    return [one.plain for one in expected]


def refused(model: nn.Module, call: dict[str, Any], message: str, inside: Any = None, size: int = 2) -> None:
    """inside: changes the model in the block."""

    def work(transport: Any) -> None:
        own = copy.deepcopy(model)
        with torch.no_grad(), parallelize(own, transport=transport):
            if inside:
                inside(own)
            own(**call)

    with pytest.raises(UserError, match=message) as caught:
        run_ranks(size, work, timeout_s=20.0)
    assert "\n" not in str(caught.value)


# LoRA -----------------------------------------------------------------------------------------------------------------


def add_lora(model: Any, targets: list[str] | None = None) -> Any:
    """A random LoRA on the layers of these names; None for every linear layer."""
    every = [layer for layer, module in model.named_modules() if type(module) is nn.Linear]
    model.add_adapter(LoraConfig(r=2, target_modules=targets or every), adapter_name="a")
    generator = torch.Generator().manual_seed(1)  # torch's own is shared by ranks, which are threads
    for name, x in model.named_parameters():
        if "lora_" in name:
            x.data = torch.randn(x.shape, generator=generator) / 4
    return model.eval()


@pytest.mark.sample(4)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_lora_on_every_linear_layer(family, size):
    """Its strength changes between calls, by the adapter's weight and by the call."""
    model = FAMILIES[family][0](HEADS)
    kwargs = family_of(model).adapter.attention_kwargs
    scaled = {kwargs: {"scale": 0.25}}
    calls = [call_of(family), call_of(family), call_of(family, more=lambda _: copy.deepcopy(scaled))]
    with torch.no_grad():
        untouched = model(**call_of(family)(torch.float32)).sample
    with_lora = check(add_lora(model), calls, size, lambda own, n: own.set_adapters(["a"], [(1.0, 0.5, 1.0)[n]]))
    for n, one in enumerate((*with_lora, untouched)):
        assert all(not torch.allclose(one, other, atol=1e-3) for other in with_lora[n + 1 :])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lora_on_some_ranks_only_is_found(family):
    """Or one that is stronger there."""
    model, call = FAMILIES[family][0](HEADS), call_of(family)(torch.float32)
    with_lora = add_lora(copy.deepcopy(model))
    weaker = copy.deepcopy(with_lora)
    weaker.set_adapters(["a"], [0.5])

    def work(transport: Any, other: nn.Module) -> None:
        own = copy.deepcopy(other if transport.rank == 2 else with_lora)
        with torch.no_grad(), parallelize(own, transport=transport):
            own(**call)

    for other in (model, weaker):
        with pytest.raises(UserError, match=r"^1 of 3 ranks \(2\) call the transformer with another digest of weights"):
            run_ranks(3, lambda t, other=other: work(t, other), timeout_s=20.0)


@pytest.mark.parametrize("change", ["added", "set", "unloaded"])
def test_a_lora_that_changes_on_some_ranks_only_is_found_in_the_next_run(change):
    """Of one engine. Within a run, after its first call, nobody compares weights."""
    plain, call = FAMILIES["flux"][0](HEADS), call_of("flux")(torch.float32)
    targets = ["to_q", "proj_mlp"]
    model = plain if change == "added" else add_lora(plain, targets)
    changes: dict[str, Callable[[Any], None]] = {
        "added": lambda own: add_lora(own, targets),
        "set": lambda own: own.set_adapters(["a"], [0.5]),
        "unloaded": lambda own: own.unload_lora(),
    }

    def work(transport: Any) -> None:
        own = copy.deepcopy(model)
        with torch.no_grad(), parallelize(own, transport=transport) as engine:
            for run in range(3):
                engine.new_run()
                for step in range(2):
                    own(**call | {"timestep": call["timestep"] * (1 - step / 4)})
                    if run == 1 and step == 0 and transport.rank == 2:
                        changes[change](own)
                assert run < 2

    with pytest.raises(UserError, match=r"^1 of 3 ranks \(2\) call the transformer with another digest of weights"):
        run_ranks(3, work, timeout_s=20.0)


@pytest.mark.parametrize("name", ["wan", "hunyuan 1.5"])
def test_a_lora_on_a_class_by_plan(name):
    case = PLANNED[name]
    model, untouched = add_lora(case.model()), case.model()
    with torch.no_grad():
        plain = model(**case.call()).sample
        assert not torch.allclose(untouched(**case.call()).sample, plain, atol=1e-3)

    def work(transport: Any) -> torch.Tensor:
        own = copy.deepcopy(model)
        with torch.no_grad(), parallelize(own, transport=transport):
            return own(**case.call()).sample

    for output in run_ranks(3, work):
        torch.testing.assert_close(output, plain, rtol=1e-4, atol=1e-4)


REPLACED = r"^a Linear where tokens are cut or gathered was replaced inside the .with. block, as a LoRA does"


def test_a_lora_that_comes_inside_the_block():
    """It is used as well, but for one on the layers where tokens are cut or gathered."""
    for family in FAMILIES:
        model, call = FAMILIES[family][0](HEADS), call_of(family)(torch.float32)
        refused(model, call, REPLACED, add_lora)
    refused(add_lora(model), call, REPLACED, lambda own: own.unload_lora())
    planned = PLANNED["wan"]
    refused(planned.model(), planned.call(), REPLACED, add_lora)
    check(
        flux_transformer(HEADS),
        [call_of("flux")],
        2,
        lambda own, _: add_lora(own, ["to_q", "proj_mlp"]) if not hasattr(own, "peft_config") else None,
    )


# ControlNet -----------------------------------------------------------------------------------------------------------


def residuals(batch: int, tokens: int, **numbers: int) -> Callable[[torch.dtype], dict[str, Any]]:
    """numbers: of residuals, by argument."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        g = torch.Generator().manual_seed(9)
        return {
            n: [torch.randn(batch, tokens, WIDTH, generator=g).to(dtype) for _ in range(k)] for n, k in numbers.items()
        }

    return make


CONTROLS = {
    "sd3": ({"layers": 4}, {"block_controlnet_hidden_states": 2}),
    "flux": (
        {"num_layers": 3, "num_single_layers": 2},
        {"controlnet_block_samples": 2, "controlnet_single_block_samples": 1},
    ),
    "qwen": ({}, {"controlnet_block_samples": 2}),
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("family", CONTROLS)
def test_controlnet_residuals(family, size):
    config, numbers = CONTROLS[family]
    model, make = FAMILIES[family][0](HEADS, **config), residuals(2, 35, **numbers)
    more = {"controlnet_blocks_repeat": True} if family == "flux" else {}
    calls = [call_of(family, batch=2, more=of) for of in (lambda _: {}, make, lambda dtype: make(dtype) | more)]
    without, with_them, _ = check(model, calls, size)
    assert not torch.allclose(without, with_them, atol=1e-2)


def test_controlnet_residuals_of_a_guided_batch():
    """Each part of the ranks takes the residuals of its half of the batch."""
    model = sd3_transformer(HEADS)
    check(
        model,
        [call_of("sd3", batch=2, more=residuals(2, 35, block_controlnet_hidden_states=2))],
        4,
        guidance_parallel=2,
    )


@pytest.mark.parametrize("family", CONTROLS)
def test_residuals_that_do_not_fit_the_image_are_refused(family):
    config, numbers = CONTROLS[family]
    model = FAMILIES[family][0](HEADS, **config)
    for tokens in (40, 1):
        call = call_of(family, more=residuals(1, tokens, **numbers))(torch.float32)
        refused(
            model, call, rf"has a tensor of shape \(1, {tokens}, {WIDTH}\), where ranks cut \[batch, 35 image tokens"
        )


# IP-Adapter -----------------------------------------------------------------------------------------------------------


def with_ip_adapters(images: int = 2) -> Any:
    """FLUX.1 with so many IP-Adapters, as `load_ip_adapter` puts them on."""
    model = flux_transformer(HEADS, num_layers=2)
    torch.manual_seed(2)
    processors = dict(model.attn_processors)
    for name in processors:
        if not name.startswith("single"):
            processors[name] = FluxIPAdapterAttnProcessor(WIDTH, 16, num_tokens=(3,) * images)
    model.set_attn_processor(processors)
    layers = [
        ImageProjection(image_embed_dim=12, cross_attention_dim=16, num_image_text_embeds=3) for _ in range(images)
    ]
    model.encoder_hid_proj = MultiIPAdapterImageProjection(layers)
    return model.eval()


def prompted(images: int = 2, scale: float = 1.0) -> Callable[[torch.dtype], dict[str, Any]]:
    def make(dtype: torch.dtype) -> dict[str, Any]:
        g = torch.Generator().manual_seed(9)
        embeds = [scale * torch.randn(2, 1 + n, 12, generator=g).to(dtype) for n in range(images)]
        return {"joint_attention_kwargs": {"ip_adapter_image_embeds": embeds}}

    return make


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_ip_adapter_of_flux(size):
    """Two images in one adapter, one in another; their strength changes inside the block, and stays when it is left."""
    model = with_ip_adapters()

    def strength(own: Any, number: int) -> None:
        for processor in own.attn_processors.values():
            processor.scale = [1.0, 0.7 - number]

    calls = [call_of("flux", batch=2, more=prompted(scale=scale)) for scale in (1.0, 1.0, 3.0)]
    outputs = check(model, calls, size, strength)
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)

    def work(transport: Any) -> None:
        own = copy.deepcopy(model)
        own_processors = [id(processor) for processor in own.attn_processors.values()]
        with torch.no_grad(), parallelize(own, transport=transport):
            strength(own, 0)
        assert [id(processor) for processor in own.attn_processors.values()] == own_processors
        assert own.transformer_blocks[0].attn.processor.scale == [1.0, 0.7]

    run_ranks(size, work)


def test_an_ip_adapter_projects_queries_once():
    model, projected = with_ip_adapters(), []
    model.transformer_blocks[1].attn.to_q.register_forward_hook(lambda *_: projected.append(None))

    def work(transport: Any) -> None:
        own = copy.deepcopy(model)
        with torch.no_grad(), parallelize(own, transport=transport):
            own(**call_of("flux", batch=2, more=prompted())(torch.float32))

    run_ranks(2, work)
    assert len(projected) == 2  # once on each rank


def test_another_ip_adapter_on_some_ranks_is_found():
    model, call = with_ip_adapters(), call_of("flux", batch=2, more=prompted())

    def work(transport: Any, change: Callable[[Any], None]) -> None:
        own = copy.deepcopy(model)
        if transport.rank:
            change(own.transformer_blocks[1].attn.processor)
        with torch.no_grad(), parallelize(own, transport=transport):
            own(**call(torch.float32))

    for change in (lambda p: p.to_k_ip[0].weight.data.add_(1), lambda p: setattr(p, "scale", [0.5, 0.5])):
        with pytest.raises(UserError, match="another digest of weights"):
            run_ranks(2, lambda t, change=change: work(t, change), timeout_s=20.0)


def test_adapters_that_come_or_go_inside_the_block_are_refused():
    plain, call = flux_transformer(HEADS, num_layers=2), call_of("flux")(torch.float32)

    def load(own: Any) -> None:
        own.set_attn_processor(dict(with_ip_adapters().attn_processors))

    refused(plain, call, r"transformer_blocks\.0\.attn\.processor became a FluxIPAdapterAttnProcessor inside", load)
    unload = lambda own: own.set_attn_processor(dict(plain.attn_processors))  # noqa: E731
    refused(with_ip_adapters(), call, r"attn\.processor became a FluxAttnProcessor inside the", unload)


def test_what_has_no_ip_adapter_here_is_refused():
    sd3, call = sd3_transformer(HEADS), call_of("sd3")(torch.float32)
    embeds = {"joint_attention_kwargs": {"ip_adapter_image_embeds": torch.zeros(1, 3, 12)}}
    refused(sd3, call | embeds, r"joint_attention_kwargs \(ip_adapter_image_embeds\) reach no parallel attention")
    flux = flux_transformer(HEADS), call_of("flux")(torch.float32)
    refused(flux[0], flux[1] | embeds, r"joint_attention_kwargs \(ip_adapter_image_embeds\) reach no parallel")


# Reference images, layers of an image, skipped blocks -----------------------------------------------------------------


def shapes(*sides: tuple[int, int]) -> Callable[[torch.dtype], dict[str, Any]]:
    """Of 35 tokens of a Qwen-Image sequence that are several images."""
    assert sum(height * width for height, width in sides) == 35
    return lambda _: {"img_shapes": [[(1, height, width) for height, width in sides]] * 2}


def kind_of_layers(dtype: torch.dtype) -> dict[str, Any]:
    return shapes((2, 5), (2, 5), (3, 5))(dtype) | {"additional_t_cond": torch.tensor([0, 1])}


def with_reference(axes: int, batched: bool) -> Callable[[torch.dtype], dict[str, Any]]:
    """Positions of FLUX' tokens of which some are another image's."""
    ids = torch.zeros(35, axes)
    ids[20:, 0] = 10 if axes == 4 else 1
    ids[:, 1] = torch.cat([torch.arange(4).repeat_interleave(5), torch.arange(3).repeat_interleave(5)])
    ids[:, 2] = torch.arange(5).repeat(7)
    return lambda _: {"img_ids": ids.repeat(2, 1, 1) if batched else ids}


VARIANTS: dict[str, tuple[str, dict[str, Any], Callable[[torch.dtype], dict[str, Any]]]] = {
    "Qwen-Image Edit": ("qwen", {}, shapes((4, 5), (3, 5))),
    "Qwen-Image Edit Plus": ("qwen", {"zero_cond_t": True}, shapes((4, 5), (2, 5), (1, 5))),
    "Qwen-Image Layered": ("qwen", {"use_additional_t_cond": True, "use_layer3d_rope": True}, kind_of_layers),
    "FLUX.1 Kontext": ("flux", {}, with_reference(3, batched=False)),
    "FLUX.2 with a reference": ("flux2", {}, with_reference(4, batched=True)),
    "SD3 without some layers": ("sd3", {"layers": 4}, lambda _: {"skip_layers": [1, 2]}),
}


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("name", VARIANTS)
def test_sequences_of_several_images_and_skipped_layers(name, size):
    family, config, more = VARIANTS[name]
    check(FAMILIES[family][0](HEADS, **config), [call_of(family, batch=2, more=more)], size)
