"""What users hang on a transformer: LoRA, int8 layers, ControlNet residuals, an IP-Adapter, reference images, skipped
layers. Each gives what one process gives, or is refused by name."""

import copy
from collections.abc import Callable
from itertools import combinations
from typing import Any, NamedTuple

import pytest
import torch
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from exactness import Case
from on_ranks import ORDERS, Call, check_exact, on_ranks, refused
from peft import LoraConfig
from planned_models import PLANNED
from tiny_models import FAMILIES, flux_transformer, sd3_transformer
from torch import nn
from value_tables import beside

from cocodiff.comm.loopback import run_ranks
from cocodiff.config.errors import UserError
from cocodiff.engine.engine import parallelize
from cocodiff.models import family_of

pytestmark = pytest.mark.usefixtures("one_thread_a_rank")

HEADS, WIDTH = 8, 64


class Hung(NamedTuple):
    """A model and calls that have other outputs each. before: changes the model before the call of a number."""

    model: Any
    calls: list[Call]
    before: Callable[[Any, int], None] | None = None
    settings: Call | None = None


def call_of(family: str, batch: int = 1, **more: Any) -> Call:
    """The arguments of a call with 35 image tokens, and further ones."""
    return Case(HEADS, 5, 7, 5, batch, family=family).inputs() | more


def noise(*shape: int, seed: int = 9) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


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


def lora(model: Any, call: Call, kwargs: str) -> Hung:
    """Its strength changes between calls, by the adapter's weight and by the call, down to nothing."""
    scaled = [call | {kwargs: {"scale": scale}} for scale in (0.25, 0.0)]
    weights = (1.0, 0.5, 1.0, 1.0)
    return Hung(add_lora(model), [call, call, *scaled], lambda own, n: own.set_adapters(["a"], [weights[n]]))


def lora_of(family: str) -> Hung:
    model = FAMILIES[family][0](HEADS)
    return lora(model, call_of(family), family_of(model).adapter.attention_kwargs)


class Int8Linear(nn.Module):
    """A linear layer with int8 weights and a scale for each output channel: no weight that a part can be taken of."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        scale = layer.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", torch.round(layer.weight.detach() / scale).to(torch.int8))
        self.register_buffer("scale", scale.detach())
        self.bias = layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def with_int8(family: str) -> Hung:
    """Every linear layer of its attention is quantised."""
    model = FAMILIES[family][0](HEADS)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name.startswith(("to_", "add_")):
                setattr(module, name, Int8Linear(child))
    return Hung(model, [call_of(family)])


# ControlNet, IP-Adapter -----------------------------------------------------------------------------------------------


def residuals(tokens: int = 35, batch: int = 2, **numbers: int) -> Call:
    """numbers: of residuals, by argument."""
    return {name: list(noise(count, batch, tokens, WIDTH)) for name, count in numbers.items()}


CONTROLS: dict[str, tuple[Call, dict[str, int]]] = beside(__file__)


def controlled(family: str) -> Hung:
    """With residuals, and without."""
    config, numbers = CONTROLS[family]
    calls = [call_of(family, 2), call_of(family, 2) | residuals(**numbers)]
    repeated = [calls[1] | {"controlnet_blocks_repeat": True}] if family == "flux" else []
    return Hung(FAMILIES[family][0](HEADS, **config), calls + repeated)


def guided() -> Hung:
    """Each part of the ranks takes the residuals of its half of the batch."""
    of_batch = residuals(block_controlnet_hidden_states=2)
    return Hung(sd3_transformer(HEADS), [call_of("sd3", 2) | of_batch], None, {"guidance_parallel": 2})


def with_ip_adapters(images: int = 2) -> Any:
    """FLUX.1 with so many IP-Adapters, as `load_ip_adapter` puts them on."""
    model = flux_transformer(HEADS, num_layers=2)
    torch.manual_seed(2)
    processors = dict(model.attn_processors)
    for name in processors:
        if not name.startswith("single"):
            processors[name] = FluxIPAdapterAttnProcessor(WIDTH, 16, num_tokens=(3,) * images)
    model.set_attn_processor(processors)
    sizes = {"image_embed_dim": 12, "cross_attention_dim": 16, "num_image_text_embeds": 3}
    model.encoder_hid_proj = MultiIPAdapterImageProjection([ImageProjection(**sizes) for _ in range(images)])
    return model.eval()


def prompted(scale: float = 1.0) -> Call:
    """By two images for one adapter, and one for another."""
    embeds = {"ip_adapter_image_embeds": [scale * noise(2, 1 + n, 12) for n in range(2)]}
    return call_of("flux", 2, joint_attention_kwargs=embeds)


def strength(own: Any, number: int) -> None:
    for processor in own.attn_processors.values():
        processor.scale = [1.0, 0.7 - number]


# Reference images, layers of an image, skipped blocks -----------------------------------------------------------------


def several(*sides: tuple[int, int], config: Call, **more: Any) -> Hung:
    """A Qwen-Image sequence of 35 tokens that are several images."""
    shapes = [[(1, height, width) for height, width in sides]] * 2
    return Hung(FAMILIES["qwen"][0](HEADS, **config), [call_of("qwen", 2, img_shapes=shapes, **more)])


def with_reference(family: str) -> Hung:
    """Positions of FLUX' tokens of which some are another image's."""
    ids = torch.zeros(35, 4 if family == "flux2" else 3)
    ids[20:, 0] = 10 if family == "flux2" else 1
    ids[:, 1] = torch.cat([torch.arange(4).repeat_interleave(5), torch.arange(3).repeat_interleave(5)])
    ids[:, 2] = torch.arange(5).repeat(7)
    call = call_of(family, 2, img_ids=ids.repeat(2, 1, 1) if family == "flux2" else ids)
    return Hung(FAMILIES[family][0](HEADS), [call])


LAYERED = {"use_additional_t_cond": True, "use_layer3d_rope": True}
HUNG: dict[str, Callable[[], Hung]] = {
    **{f"a LoRA on {family}": lambda family=family: lora_of(family) for family in FAMILIES},
    **{f"int8 layers of {family}": lambda family=family: with_int8(family) for family in FAMILIES},
    **{
        f"a LoRA on {name}": lambda name=name: lora(PLANNED[name].model(), PLANNED[name].call(), "attention_kwargs")
        for name in ("wan", "hunyuan 1.5")
    },
    **{f"a ControlNet of {family}": lambda family=family: controlled(family) for family in CONTROLS},
    "a LoRA inside of blocks": lambda: Hung(add_lora(flux_transformer(HEADS), ["to_q", "proj_mlp"]), [call_of("flux")]),
    "a ControlNet of a guided batch": guided,
    "IP-Adapters": lambda: Hung(with_ip_adapters(), [prompted(), prompted(), prompted(3.0)], strength),
    "Qwen-Image Edit": lambda: several((4, 5), (3, 5), config={}),
    "Qwen-Image Edit Plus": lambda: several((4, 5), (2, 5), (1, 5), config={"zero_cond_t": True}),
    "Qwen-Image Layered": lambda: several((2, 5), (2, 5), (3, 5), config=LAYERED, additional_t_cond=torch.arange(2)),
    "FLUX.1 Kontext": lambda: with_reference("flux"),
    "FLUX.2 with a reference": lambda: with_reference("flux2"),
    "SD3 without some layers": lambda: Hung(sd3_transformer(HEADS, layers=4), [call_of("sd3", 2, skip_layers=[1, 2])]),
}


@pytest.mark.sample(16)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("name", HUNG)
def test_equals_one_process(name, size):
    model, calls, before, given = HUNG[name]()
    settings = given or {}
    if size % settings.get("guidance_parallel", 1):
        size += 1
    plain = check_exact(size, model, calls, ORDERS, before, **settings)
    for one, other in combinations(plain[:: len(plain) // len(calls)], 2):
        assert not torch.allclose(one, other, atol=1e-3)


# On some ranks only, and inside the block -----------------------------------------------------------------------------

OTHER_WEIGHTS = r"^1 of 3 ranks \(2\) call the transformer with another digest of weights"
CHANGES: dict[str, Callable[[Any], None]] = {
    "added": lambda own: add_lora(own, ["to_q", "proj_mlp"]),
    "weaker": lambda own: own.set_adapters(["a"], [0.5]),
    "unloaded": lambda own: own.unload_lora(),
    "other weights": lambda own: own.transformer_blocks[1].attn.processor.to_k_ip[0].weight.data.add_(1),
    "other strength": lambda own: strength(own, 1),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("name", "change", "run"),
    [
        *((f"a LoRA on {family}", change, 0) for family in FAMILIES for change in ("weaker", "unloaded")),
        *(("IP-Adapters", change, 0) for change in ("other weights", "other strength")),
        *(("a LoRA inside of blocks", change, 2) for change in ("weaker", "unloaded")),
        ("FLUX.1 Kontext", "added", 2),
    ],
)
def test_what_hangs_otherwise_on_some_ranks_is_found_in_the_first_or_a_later_run(name, change, run):
    """Of one engine, in whose run before it changes. Within a run, after its first call, nobody compares weights."""
    hung, begun = HUNG[name](), []
    call = hung.calls[0]

    def work(transport: Any) -> None:
        own, others = copy.deepcopy(hung.model), transport.rank != 2
        if not (others or run):
            CHANGES[change](own)
        with torch.no_grad(), parallelize(own, transport=transport) as engine:
            for number in range(run + 1):
                engine.new_run()
                for step in range(2):
                    begun.append((number, step))
                    own(**call | {"timestep": call["timestep"] * (1 - step / 4)})
                    if not others and (number, step) == (run - 1, 0):
                        CHANGES[change](own)

    with pytest.raises(UserError, match=OTHER_WEIGHTS):
        run_ranks(3, work, timeout_s=20.0)
    assert max(begun) == (run, 0)


def changed(model: Any, call: Call, change: Callable[[Any], Any], words: str) -> None:
    """What changes in the block is refused at the next call."""
    refused(words, model, run=lambda own, _: (change(own), own(**call)))


REPLACED = r"^a Linear where tokens are cut or gathered was replaced inside the .with. block.*LoRA"


def test_a_lora_that_comes_inside_the_block():
    """It is used as well, but for one on the layers where tokens are cut or gathered."""
    for family in FAMILIES:
        changed(FAMILIES[family][0](HEADS), call_of(family), add_lora, REPLACED)
    changed(add_lora(sd3_transformer(HEADS)), call_of("sd3"), CHANGES["unloaded"], REPLACED)
    changed(PLANNED["wan"].model(), PLANNED["wan"].call(), add_lora, REPLACED)
    model, call = flux_transformer(HEADS), call_of("flux")
    expected = CHANGES["added"](copy.deepcopy(model))(**call).sample

    def run(own: Any, _: Any) -> torch.Tensor:
        CHANGES["added"](own)
        return own(**call).sample + 0

    for rank in on_ranks(2, model, run=run, restored=False):
        torch.testing.assert_close(rank.found, expected, rtol=1e-4, atol=1e-5)


def test_ip_adapters_that_come_or_go_inside_the_block_are_refused():
    plain, adapted = flux_transformer(HEADS, num_layers=2), with_ip_adapters()
    for model, other, words in (
        (plain, adapted, r"transformer_blocks\.0\.attn\.processor became a FluxIPAdapterAttnProcessor inside"),
        (adapted, plain, r"attn\.processor became a FluxAttnProcessor inside the"),
    ):
        to = dict(other.attn_processors)
        changed(model, call_of("flux"), lambda own, to=to: own.set_attn_processor(dict(to)), words)


def test_an_ip_adapter_projects_queries_once_and_keeps_the_strength_it_got_in_the_block():
    model, projected = with_ip_adapters(), []
    model.transformer_blocks[1].attn.to_q.register_forward_hook(lambda *_: projected.append(None))

    def run(own: Any, _: Any) -> Any:
        strength(own, 0)
        own(**prompted())
        return own

    for rank in on_ranks(2, model, run=run):
        assert rank.found.transformer_blocks[0].attn.processor.scale == [1.0, 0.7]
    assert len(projected) == 2  # once on each rank


@pytest.mark.parametrize("family", CONTROLS)
def test_residuals_that_do_not_fit_the_image_are_refused(family):
    config, numbers = CONTROLS[family]
    for tokens in (40, 1):
        words = rf"has a tensor of shape \(1, {tokens}, {WIDTH}\).*\b35\b"
        refused(words, FAMILIES[family][0](HEADS, **config), call_of(family) | residuals(tokens, 1, **numbers))
