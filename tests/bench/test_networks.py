"""The networks of `mezzo bench static`: sizes of their recipes, data, and other packages' networks."""

import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from mezzo.bench import NetworkSizes, find_network
from mezzo.errors import OptionError
from mezzo.vision.models import names_and_aliases

USUAL = NetworkSizes(size=4, simple_net_batch=3)
CPU = torch.device("cpu")


def fake(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    """Put a module of this name where imports find it."""
    module = ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("name", "shape"),  # by hand, from test_tipc/configs
    [
        ("SimpleNet", (3, 4)),
        ("mobilenet_v3_small", (256, 3, 224, 224)),
        ("pp_liteseg_t", (4, 3, 512, 1024)),
        ("pp_liteseg_stdc2", (4, 3, 512, 1024)),
        ("PPHumanSegLite", (8, 3, 224, 398)),
        ("fcn_hrnetw18_small", (64, 3, 192, 192)),
        ("fcn_hrnet_w18", (2, 3, 512, 1024)),
        ("ocrnet_hrnetw18", (2, 3, 512, 1024)),
        ("ocrnet_hrnetw48", (2, 3, 512, 1024)),
        ("deeplabv3p_resnet50", (64, 3, 512, 512)),
    ],
)
def test_a_network_has_the_size_and_batch_of_its_recipe(name: str, shape: tuple[int, ...]) -> None:
    network = find_network(name, USUAL)
    assert (network.shape, network.dtype, network.unit) == (shape, "float16", "samples")


def test_every_name_of_the_zoo_is_known() -> None:
    assert all(find_network(name, USUAL).kind == "images" for name in names_and_aliases())


def test_chosen_sizes_go_before_those_of_the_recipe_and_images_before_batch_size() -> None:
    sizes = NetworkSizes(size=4, simple_net_batch=3, batch_size=5, image_size=(32, 64))
    assert find_network("pp_liteseg_t", sizes).shape == (5, 3, 32, 64)
    sizes = NetworkSizes(size=4, simple_net_batch=3, batch_size=5, images=6)
    assert find_network("mobilenet_v3_small", sizes).shape == (6, 3, 224, 224)


def test_two_calls_make_the_same_weights_and_batches_with_the_loss_of_the_recipe() -> None:
    network = find_network("pp_liteseg_t", NetworkSizes(size=4, simple_net_batch=3, batch_size=2, image_size=(64, 64)))
    (model, loss, batches), (again, _, batches_again) = network.make(CPU), network.make(CPU)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    for (images, labels), (images_again, labels_again) in zip(batches, batches_again, strict=True):
        assert torch.equal(images, images_again)
        assert torch.equal(labels, labels_again)
    assert not torch.equal(batches[0][0], batches[1][0])
    assert (batches[0][1].dtype, batches[0][1].shape) == (torch.uint8, (2, 64, 64))
    assert [type(each).__name__ for each in loss.losses] == ["OhemCrossEntropyLoss"] * 3  # type: ignore[attr-defined]
    assert model.training


def test_colours_of_images_name_their_classes() -> None:
    """What a check must learn is there: the nearest mean colour finds the label of every image."""
    network = find_network(
        "mobilenet_v3_small", NetworkSizes(size=4, simple_net_batch=3, images=32, image_size=(32, 32))
    )
    images, labels = network.draw()
    others, other_labels = network.draw()
    colours = torch.stack([images[labels == label].mean((0, 2, 3)) for label in labels.unique()])
    nearest = labels.unique()[torch.cdist(others.mean((2, 3)), colours).argmin(1)]
    is_known = torch.isin(other_labels, labels)
    assert torch.equal(nearest[is_known], other_labels[is_known])


class Classifier(nn.Module):
    """Pools and classifies, as a network of timm."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, classes)
        self.default_cfg = {"input_size": (3, 160, 192)}
        self.resized: tuple[int, int] | None = None

    def set_input_size(self, img_size: tuple[int, int]) -> None:
        self.resized = img_size

    def forward(self, images: Tensor) -> Tensor:
        return self.head(images.mean((2, 3)))


@pytest.mark.parametrize(("name", "batch_size"), [("resnet50", 256), ("efficientnet_b0", 256), ("vit_tiny", 128)])
def test_timm_networks_have_the_size_of_their_default_cfg(
    name: str, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def create_model(name: str, pretrained: bool, num_classes: int = 7) -> nn.Module:
        asked.append((name, pretrained, num_classes))
        return Classifier(num_classes)

    names = ["resnet50", "efficientnet_b0", "vit_tiny"]
    fake(monkeypatch, "timm", create_model=create_model, list_models=lambda: names, is_model=lambda name: name in names)
    network = find_network(f"timm:{name}", USUAL)
    assert (network.name, network.shape, network.dtype) == (f"timm:{name}", (batch_size, 3, 160, 192), "bfloat16")
    small = find_network(f"timm:{name}", NetworkSizes(size=4, simple_net_batch=3, batch_size=2, image_size=(8, 16)))
    model, loss, batches = small.make(CPU)
    assert asked[-1] == (name, False, 1000)
    assert model.resized == (8, 16)
    assert loss(model(batches[0][0]), batches[0][1]).isfinite()
    assert isinstance(small.make_optimizer(model), torch.optim.SGD)
    with pytest.raises(OptionError, match=r"unknown --model 'timm:resnet5O'; did you mean 'timm:resnet50'"):
        find_network("timm:resnet5O", USUAL)


class LanguageModel(nn.Module):
    """One layer, as a network of transformers: logits are the first of a tuple."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.config, self.embedding = config, nn.Embedding(200, 200)

    def forward(self, input_ids: Tensor, return_dict: bool) -> tuple[Tensor]:
        assert not return_dict
        return (self.embedding(input_ids),)


@pytest.mark.parametrize(
    ("name", "network", "config", "shape"),
    [
        ("gpt2", "GPT2LMHeadModel", "GPT2Config", (16, 1024)),
        ("bert", "BertForMaskedLM", "BertConfig", (32, 512)),
        ("llama", "LlamaForCausalLM", "LlamaConfig", (8, 2048)),
    ],
)
def test_language_models_are_made_from_a_configuration(
    name: str, network: str, config: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, "transformers", **{network: LanguageModel, config: SimpleNamespace})
    found = find_network(f"transformers:{name}", USUAL)
    assert (found.shape, found.unit, found.units, found.dtype) == (shape, "tokens", shape[0] * shape[1], "bfloat16")
    small = find_network(f"transformers:{name}", NetworkSizes(size=4, simple_net_batch=3, batch_size=2))
    model, loss, batches = small.make(CPU)
    tokens, targets = batches[0]
    assert tokens.shape == targets.shape == (2, shape[1])
    assert loss(model(tokens), targets).isfinite()
    assert isinstance(small.make_optimizer(model), torch.optim.AdamW)
    options = vars(model.network.config)
    assert all(value == 0 for key, value in options.items() if "drop" in key)
    if name == "bert":
        hidden = targets != -100
        assert torch.equal(hidden, tokens == 103)
        assert 0.1 < hidden.float().mean() < 0.2  # 15 %
    else:
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        assert torch.equal(targets, (tokens + 1) % 64)
    if name == "llama":
        sizes = (options["hidden_size"], options["num_hidden_layers"], options["num_attention_heads"])
        assert (*sizes, options["intermediate_size"], options["vocab_size"]) == (1024, 24, 16, 2816, 32000)


class Attention:
    """Takes the place of transformers' table of attention functions."""

    functions: ClassVar[dict[str, object]] = {"sdpa": object()}

    def __getitem__(self, name: str) -> object:
        return self.functions[name]

    @classmethod
    def register(cls, name: str, function: object) -> None:
        cls.functions[name] = function


class Llama(nn.Module):
    """Takes the place of transformers' class."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.embedding, self.recompute = config, nn.Embedding(256, 256), None

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict[str, Any]) -> None:
        self.recompute = gradient_checkpointing_kwargs

    def forward(self, input_ids: Tensor, return_dict: bool) -> tuple[Tensor]:
        return (self.embedding(input_ids),)


@pytest.mark.parametrize(
    # Widths, layers, heads, words and whether embedding and head are one: the configuration files of Llama 3.1 and 3.2.
    ("size", "published"),
    [
        ("1b", (2048, 8192, 16, 32, 8, 128256, True)),
        ("3b", (3072, 8192, 28, 24, 8, 128256, True)),
        ("8b", (4096, 14336, 32, 32, 8, 128256, False)),
    ],
)
def test_llama_models_have_the_published_widths(
    size: str, published: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(monkeypatch, "transformers", LlamaForCausalLM=Llama, LlamaConfig=SimpleNamespace, AttentionInterface=Attention)
    config = find_network(f"transformers:llama-{size}", USUAL).create().network.config
    assert Attention.functions[config.attn_implementation] is Attention.functions["sdpa"]
    assert published == (
        *(config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.num_attention_heads),
        *(config.num_key_value_heads, config.vocab_size, config.tie_word_embeddings),
    )
    sizes = NetworkSizes(size=4, simple_net_batch=3, batch_size=2, layers=3, length=16, recompute=True)
    small = find_network(f"transformers:llama-{size}", sizes)
    network = small.create().network
    assert (small.shape, small.unit, small.units, network.config.num_hidden_layers) == ((2, 16), "tokens", 32, 3)
    assert network.recompute == {"use_reentrant": False}


def test_operations_of_a_llama_are_six_for_each_weight_of_a_product_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch, "transformers", LlamaForCausalLM=Llama, LlamaConfig=SimpleNamespace, AttentionInterface=Attention)
    # Llama 3.1 8B has 8.03e9 parameters, 0.525e9 of them in the embedding, which is no product.
    without_attention = find_network("transformers:llama-8b", NetworkSizes(size=4, simple_net_batch=3, length=1)).flops
    assert without_attention == pytest.approx(6 * (8.03e9 - 0.525e9), rel=1e-3)
    # Causal attention: two products of length x width in each layer, half of each, three times in a training step.
    longer = find_network("transformers:llama-8b", NetworkSizes(size=4, simple_net_batch=3, length=4097)).flops
    assert longer - without_attention == 3 * 2 * (2 * 4096 * 4096) / 2 * 32
    with pytest.raises(OptionError, match="unknown --size '2b'"):
        find_network("transformers:llama-2b", USUAL)
