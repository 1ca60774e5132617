"""The networks of `mezzo bench static`, by name: SimpleNet, the zoo, and those of timm and transformers.

Each trains as its own recipe says: size, batch, loss and optimizer. Nothing is downloaded: weights are
random. The data can be learned in a few steps, so a loss that does not fall shows a broken recipe.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, Optimizer

from mezzo.bench._workloads import SEED, simple_net_workload
from mezzo.errors import OptionError, require, unknown_choice
from mezzo.kernels import linear_cross_entropy
from mezzo.vision.models import create_model, model_info, names_and_aliases
from mezzo.vision.options import BATCH_SIZE, ClassifierOptions

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Any, Tensor], Tensor]

BATCHES = 4
"""The small set of batches that a check trains on."""
LEARNED_CLASSES, LEARNED_TOKENS = 8, 64
"""As many different labels and tokens occur: few, so that 50 steps learn them."""
PATCH = 32
"""Side of the squares of one class in a label map."""
IMAGE_CLASSES = 1000
_TIMM_BATCHES = {"resnet50": 256, "efficientnet_b0": 256}
_TIMM_BATCH = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSizes:
    """Sizes that the user chose; None: those of the network's recipe."""

    size: int
    """Width of SimpleNet."""
    simple_net_batch: int
    batch_size: int | None = None
    images: int | None = None
    """Batch size of image networks; goes before `batch_size`."""
    image_size: tuple[int, int] | None = None
    """Height and width."""
    layers: int | None = None
    """Of Llama models."""
    length: int | None = None
    """Tokens in a row of Llama models."""
    words: int | None = None
    """Vocabulary of Llama models."""
    mask: bool = False
    """Llama models get the mask tensor of transformers; otherwise attention is called as causal."""
    recompute: bool = False
    """Llama models recompute their layers in the backward pass."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A network, and how it trains."""

    name: str
    kind: str
    """SimpleNet, images, tokens or llm: which recipes it has."""
    dtype: str
    """The usual half dtype."""
    shape: tuple[int, ...]
    """Of the inputs of a batch."""
    create: Callable[[], nn.Module]
    make_loss: Callable[[], Loss]
    make_optimizer: Callable[..., Optimizer]
    """Gets the network, and options such as `fused`."""
    draw: Callable[[], Batch]
    """Returns new inputs and targets, on the default device."""
    fuse_loss: Callable[[nn.Module], Loss] | None = None
    """Changes a network so that its loss computes the last layer too, and returns that loss; None: it cannot."""
    batches: int = BATCHES
    flops: float | None = None
    """Floating-point operations to train on one unit, recomputation not counted; None: not known."""

    @property
    def unit(self) -> str:
        """What is counted per second."""
        return "tokens" if self.kind in ("tokens", "llm") else "samples"

    @property
    def units(self) -> int:
        """How many of them a batch has."""
        return self.shape[0] * self.shape[1] if self.unit == "tokens" else self.shape[0]

    def make(self, device: torch.device) -> tuple[nn.Module, Loss, list[Batch]]:
        """Return the network in training mode, its loss and its batches; every call makes the same numbers."""
        torch.manual_seed(SEED)
        with device:
            model = self.create().train()
            loss = self.make_loss()
            torch.manual_seed(SEED)  # the data do not depend on how many numbers the weights took
            return model, loss, [self.draw() for _ in range(self.batches)]


def find_network(name: str, sizes: NetworkSizes) -> Network:
    """Return the network of a name of `--model`.

    Raises:
        OptionError: There is none of the name; the message has the nearest.
        MissingExtra: The package that has it is not installed.
    """
    library, colon, own = name.partition(":")
    if name == "SimpleNet":
        return _simple_net(sizes)
    if colon and library == "timm":
        return _timm(own, sizes)
    if colon and library == "transformers":
        return _language_model(own, sizes)
    if name not in names_and_aliases():
        raise OptionError(unknown_choice("--model", name, network_names()))
    return _zoo(name, sizes)


def network_names() -> tuple[str, ...]:
    """Return the names of all networks; timm has many more."""
    timm = (f"timm:{name}" for name in (*_TIMM_BATCHES, "vit_base_patch16_224", "convnext_tiny"))
    language = (*_LANGUAGE_MODELS, *(f"llama-{size}" for size in LLAMA_SIZES))
    return ("SimpleNet", *names_and_aliases(), *timm, *(f"transformers:{name}" for name in language))


def _simple_net(sizes: NetworkSizes) -> Network:
    # One workload has network and data: its numbers are those of the other benchmarks.
    def made() -> Any:
        return simple_net_workload(sizes.size, sizes.simple_net_batch, torch.get_default_device())

    def draw() -> Batch:
        workload = made()
        return workload.inputs, workload.targets

    return Network(
        name="SimpleNet",
        kind="SimpleNet",
        dtype="float16",
        shape=(sizes.simple_net_batch, sizes.size),
        create=lambda: made().model,
        make_loss=lambda: torch.nn.functional.mse_loss,
        make_optimizer=lambda model, **_: SGD(model.parameters(), lr=0.003),
        draw=draw,
        batches=1,
    )


def _images(
    name: str, sizes: NetworkSizes, batch_size: int, image_size: tuple[int, int], classes: int, **parts: Any
) -> Network:
    """Return a network of images; the user's sizes go before those of its recipe."""
    chosen = sizes.batch_size if sizes.images is None else sizes.images
    shape = (batch_size if chosen is None else chosen, 3, *(sizes.image_size or image_size))
    is_map = parts.pop("is_map", False)
    draw = (lambda: _draw_maps(shape, classes)) if is_map else (lambda: _draw_images(shape))
    return Network(name=name, kind="images", shape=shape, draw=draw, **parts)


def _draw_images(shape: tuple[int, ...]) -> Batch:
    """Return images in the colour of their class, with noise."""
    labels = torch.randint(LEARNED_CLASSES, shape[:1])
    return _colours(LEARNED_CLASSES)[labels][:, :, None, None] + 0.5 * torch.randn(shape), labels


def _draw_maps(shape: tuple[int, ...], classes: int) -> Batch:
    """Return images of squares in the colours of their classes, with noise, and their label maps, which are bytes."""
    count, _, height, width = shape
    squares = torch.randint(classes, (count, -(-height // PATCH), -(-width // PATCH)))
    labels = squares.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)[:, :height, :width]
    images = _colours(classes)[labels].permute(0, 3, 1, 2) + 0.5 * torch.randn(shape)
    return images.contiguous(), labels.to(torch.uint8).contiguous()


def _colours(classes: int) -> Tensor:
    """Return a colour for each class, the same at every call."""
    generator = torch.Generator(device="cpu").manual_seed(SEED)
    return 2 * torch.randn(classes, 3, generator=generator, device="cpu").to(torch.get_default_device())


def _momentum_sgd(model: nn.Module, **options: Any) -> Optimizer:
    return SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, **options)


def _zoo(name: str, sizes: NetworkSizes) -> Network:
    if model_info(name).task == "classification":
        size = ClassifierOptions().image_size
        return _images(
            name,
            sizes,
            BATCH_SIZE,
            (size, size),
            IMAGE_CLASSES,
            dtype="float16",
            create=lambda: create_model(name, num_classes=IMAGE_CLASSES),
            make_loss=lambda: cross_entropy,
            make_optimizer=_momentum_sgd,
        )
    require("cv2", "PIL", extra="vision")
    from mezzo.vision.recipes import load_recipe  # reads and augments images: needs OpenCV
    from mezzo.vision.shipped import recipe_file

    recipe = load_recipe(recipe_file(name))
    return _images(
        name,
        sizes,
        recipe.batch_size,
        recipe.train_size,
        recipe.num_classes,
        is_map=True,
        dtype="float16",
        create=recipe.create_model,
        make_loss=recipe.create_loss,
        make_optimizer=recipe.optimizer.create,
    )


def _timm(name: str, sizes: NetworkSizes) -> Network:
    require("timm", extra="bench")
    timm = importlib.import_module("timm")
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=1)
        hint = f" did you mean 'timm:{close[0]}'?" if close else ""
        raise OptionError(f"unknown --model 'timm:{name}';{hint} timm.list_models() has all names")
    _, height, width = timm.create_model(name, pretrained=False).default_cfg["input_size"]

    def create() -> nn.Module:
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=IMAGE_CLASSES)
        resize: Any = getattr(model, "set_input_size", None)
        if sizes.image_size is not None and resize is not None:
            resize(img_size=sizes.image_size)  # position embeddings depend on the size
        return model

    return _images(
        f"timm:{name}",
        sizes,
        _TIMM_BATCHES.get(name, _TIMM_BATCH),
        (height, width),
        IMAGE_CLASSES,
        dtype="bfloat16",
        create=create,
        make_loss=lambda: cross_entropy,
        make_optimizer=_momentum_sgd,
    )


@dataclass(frozen=True, slots=True)
class _LanguageModel:
    """A network of transformers: its class, its configuration, and its batch."""

    network: str
    config: str
    options: dict[str, Any]
    batch_size: int
    length: int
    mask: int | None = None
    """The token that hides others from a masked language model; None: the next token is predicted."""


_LANGUAGE_MODELS = {
    "gpt2": _LanguageModel(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "n_positions": 1024, "use_cache": False},
        16,
        1024,
    ),
    "bert": _LanguageModel(
        "BertForMaskedLM",
        "BertConfig",
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 512},
        32,
        512,
        mask=103,
    ),
    "llama": _LanguageModel(
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "vocab_size": 32000,
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "max_position_embeddings": 2048,
            "attention_dropout": 0.0,
            "use_cache": False,
        },
        8,
        2048,
    ),
}


LLAMA_SIZES = ("tiny", "0.4b", "1b", "3b", "8b")


@dataclass(frozen=True, slots=True)
class _Llama:
    """The widths of a Llama model, and the rows of a batch that fit on one large GPU."""

    width: int
    hidden: int
    layers: int
    heads: int
    key_heads: int
    words: int
    is_tied: bool
    batch_size: int
    length: int

    def flops(self, layers: int, length: int, words: int) -> float:
        """Return the operations to train on one token: six for each weight of a product, and causal attention."""
        head_width = self.width // self.heads
        weights = layers * self.width * (2 * self.width + 2 * self.key_heads * head_width + 3 * self.hidden)
        return 6.0 * (weights + self.width * words) + 6.0 * layers * self.width * length


# The widths of Llama 3.1 and 3.2 as published; 0.4b is the model of our other benchmarks.
_LLAMAS = {
    "tiny": _Llama(64, 128, 2, 4, 2, 256, True, 2, 32),
    "0.4b": _Llama(1024, 2816, 24, 16, 16, 32000, False, 8, 2048),
    "1b": _Llama(2048, 8192, 16, 32, 8, 128256, True, 4, 4096),
    "3b": _Llama(3072, 8192, 28, 24, 8, 128256, True, 2, 4096),
    "8b": _Llama(4096, 14336, 32, 32, 8, 128256, False, 1, 4096),
}


def _llama(name: str, sizes: NetworkSizes) -> Network:
    size = name.removeprefix("llama-")
    if size not in _LLAMAS:
        raise OptionError(unknown_choice("--size", size, LLAMA_SIZES))
    require("transformers", extra="bench")
    transformers, kind = importlib.import_module("transformers"), _LLAMAS[size]
    count, length = sizes.batch_size or kind.batch_size, sizes.length or kind.length
    layers, words = sizes.layers or kind.layers, sizes.words or kind.words

    def create() -> nn.Module:
        config = transformers.LlamaConfig(
            vocab_size=words,
            hidden_size=kind.width,
            intermediate_size=kind.hidden,
            num_hidden_layers=layers,
            num_attention_heads=kind.heads,
            num_key_value_heads=kind.key_heads,
            tie_word_embeddings=kind.is_tied,
            max_position_embeddings=length,
            rope_theta=500000.0,
            attention_dropout=0.0,
            use_cache=False,
            attn_implementation="sdpa" if sizes.mask else _maskless_attention(transformers),
        )
        network = transformers.LlamaForCausalLM(config)
        if sizes.recompute:
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return _Logits(network)

    return Network(
        name=f"transformers:llama-{size}",
        kind="llm",
        dtype="bfloat16",
        shape=(count, length),
        create=create,
        make_loss=lambda: _token_loss,
        make_optimizer=lambda model, **options: AdamW(model.parameters(), lr=3e-4, **options),
        draw=lambda: _draw_tokens(count, length, None),
        fuse_loss=_fuse_head_and_loss,
        flops=kind.flops(layers, length, words),
    )


def _maskless_attention(transformers: Any) -> str:
    """Return the name of SDPA without a mask tensor, for all recipes.

    In compiled code transformers always makes a mask with torch before 2.14, and kernels of attention
    then compute all scores, not half of them.
    """
    transformers.AttentionInterface.register(_MASKLESS, transformers.AttentionInterface()["sdpa"])
    return _MASKLESS


_MASKLESS = "sdpa_without_mask"
"""No function of transformers makes a mask for this name, so attention is called with `is_causal`."""


class _Logits(nn.Module):
    """A network of transformers that takes tokens by position and returns only the logits, as graphs need it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network: Any = network
        self.stops_before_head = False

    def forward(self, tokens: Tensor) -> Tensor:
        part = self.network.base_model if self.stops_before_head else self.network
        result: Tensor = part(input_ids=tokens, return_dict=False)[0]
        return result


def _fuse_head_and_loss(model: nn.Module) -> Loss:
    """Let a network return the input of its head; return the loss of that input, which never holds all logits."""
    assert isinstance(model, _Logits)
    model.stops_before_head, head = True, model.network.get_output_embeddings()
    return lambda hidden, targets: linear_cross_entropy(hidden, head.weight, targets)


def _language_model(name: str, sizes: NetworkSizes) -> Network:
    if name.startswith("llama-"):
        return _llama(name, sizes)
    if name not in _LANGUAGE_MODELS:
        known = [f"transformers:{each}" for each in _LANGUAGE_MODELS]
        raise OptionError(unknown_choice("--model", f"transformers:{name}", known))
    require("transformers", extra="bench")
    transformers, kind = importlib.import_module("transformers"), _LANGUAGE_MODELS[name]
    count = kind.batch_size if sizes.batch_size is None else sizes.batch_size

    def create() -> nn.Module:
        config = getattr(transformers, kind.config)(**kind.options)
        return _Logits(getattr(transformers, kind.network)(config))

    return Network(
        name=f"transformers:{name}",
        kind="tokens",
        dtype="bfloat16",
        shape=(count, kind.length),
        create=create,
        make_loss=lambda: _token_loss,
        make_optimizer=lambda model, **options: AdamW(model.parameters(), lr=3e-4, **options),
        draw=lambda: _draw_tokens(count, kind.length, kind.mask),
        fuse_loss=_fuse_head_and_loss if kind.mask is None else None,  # a masked model has more layers in its head
    )


def _draw_tokens(count: int, length: int, mask: int | None) -> Batch:
    """Return rows of tokens that count upwards, and what to predict: the next tokens, or the hidden ones."""
    rows = (torch.randint(LEARNED_TOKENS, (count, 1)) + torch.arange(length + 1)) % LEARNED_TOKENS
    if mask is None:
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    tokens = rows[:, :-1].contiguous()
    is_hidden = torch.rand(tokens.shape) < 0.15  # as BERT was trained
    return tokens.masked_fill(is_hidden, mask), tokens.masked_fill(~is_hidden, -100)


def _token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of all tokens that are not -100."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())
