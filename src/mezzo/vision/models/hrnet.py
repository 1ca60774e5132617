"""HRNet, a backbone with parallel branches of several resolutions, in three widths, and the FCN head on it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from mezzo.vision.models._blocks import ConvBN, ConvBNReLU, Padding, init_small, join
from mezzo.vision.models._registry import register_model
from mezzo.vision.models._resize import resize


class Bottleneck(nn.Module):
    """Residual block that expands to four times `planes`; `projects` adds a projection of the input."""

    def __init__(self, in_channels: int, planes: int, *, projects: bool, padding: Padding) -> None:
        super().__init__()
        self.conv1 = ConvBNReLU(in_channels, planes, 1)
        self.conv2 = ConvBNReLU(planes, planes, 3, padding=padding)
        self.conv3 = ConvBN(planes, 4 * planes, 1)
        self.conv_down = ConvBN(in_channels, 4 * planes, 1) if projects else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        out: Tensor = self.conv3(self.conv2(self.conv1(x)))
        return F.relu(out + (x if self.conv_down is None else self.conv_down(x)))


class BasicBlock(nn.Module):
    """Residual block of two 3x3 convolutions."""

    def __init__(self, channels: int, *, padding: Padding) -> None:
        super().__init__()
        self.conv1 = ConvBNReLU(channels, channels, 3, padding=padding)
        self.conv2 = ConvBN(channels, channels, 3, padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features."""
        return F.relu(self.conv2(self.conv1(x)) + x)


class Transition(nn.ModuleDict):
    """Maps the branches of a stage to those of the next, which has one more, at half the lowest resolution.

    A branch whose number of channels does not change has no layer here.
    """

    def __init__(self, name: str, before: Sequence[int], after: Sequence[int], *, padding: Padding) -> None:
        super().__init__()
        self._prefix = f"transition_{name}_layer"
        self._branches = len(after)
        for i, channels in enumerate(after, 1):
            if i > len(before):
                self[f"{self._prefix}_{i}"] = ConvBNReLU(before[-1], channels, 3, stride=2, padding=padding)
            elif before[i - 1] != channels:
                self[f"{self._prefix}_{i}"] = ConvBNReLU(before[i - 1], channels, 3, padding=padding)

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        """Return the inputs of the next stage, the highest resolution first."""
        out = []
        for i in range(1, self._branches + 1):
            x = xs[min(i, len(xs)) - 1]
            key = f"{self._prefix}_{i}"
            out.append(self[key](x) if key in self else x)
        return out


class Branches(nn.ModuleDict):
    """Independent basic blocks for each resolution."""

    def __init__(self, name: str, channels: Sequence[int], blocks: int, *, padding: Padding) -> None:
        super().__init__()
        self._prefix = f"bb_{name}_branch_layer"
        self._blocks = blocks
        for i, own in enumerate(channels, 1):
            for k in range(1, blocks + 1):
                self[f"{self._prefix}_{i}_{k}"] = BasicBlock(own, padding=padding)

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        """Return the features of each branch."""
        out = []
        for i, x in enumerate(xs, 1):
            for k in range(1, self._blocks + 1):
                x = self[f"{self._prefix}_{i}_{k}"](x)
            out.append(x)
        return out


class Fusion(nn.ModuleDict):
    """Gives each branch the sum of all branches, converted to its resolution and channels."""

    def __init__(self, name: str, channels: Sequence[int], *, padding: Padding) -> None:
        super().__init__()
        self._prefix = f"residual_{name}_layer"
        for i, own in enumerate(channels, 1):
            for j, other in enumerate(channels, 1):
                if j > i:
                    self[f"{self._prefix}_{i}_{j}"] = ConvBN(other, own, 1)
                for k in range(1, i - j + 1):
                    last = k == i - j
                    self[f"{self._prefix}_{i}_{j}_{k}"] = ConvBN(
                        other, own if last else other, 3, stride=2, padding=padding, relu=not last
                    )

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        """Return one sum per branch."""
        out = []
        for i, x in enumerate(xs, 1):
            total = x
            for j, y in enumerate(xs, 1):
                if j == i:
                    continue
                if j > i:
                    y = resize(self[f"{self._prefix}_{i}_{j}"](y), x)
                for k in range(1, i - j + 1):
                    y = self[f"{self._prefix}_{i}_{j}_{k}"](y)
                total = total + y
            out.append(F.relu(total))
        return out


class HRModule(nn.Module):
    """Branches, then their fusion."""

    def __init__(self, name: str, channels: Sequence[int], blocks: int, *, padding: Padding) -> None:
        super().__init__()
        self.branches_func = Branches(name, channels, blocks, padding=padding)
        self.fuse_func = Fusion(name, channels, padding=padding)

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        """Return the features at the resolutions of the inputs."""
        fused: list[Tensor] = self.fuse_func(self.branches_func(xs))
        return fused


class HRNet(nn.Module):
    """The backbone: images (n, 3, h, w) to features (n, channels, h / 4, w / 4), sizes rounded up.

    Args:
        width: Channels of the highest resolution; each lower resolution has twice as many.
        planes: Inner channels of the first bottlenecks.
        bottlenecks: Number of those bottlenecks.
        modules: Number of modules (branches and fusion) with two, three and four resolutions.
        blocks: Number of basic blocks per branch and module.
        padding: Of all 3x3 convolutions: "same" (as in TensorFlow, asymmetric for stride 2) or 1.
    """

    def __init__(
        self,
        width: int,
        *,
        planes: int = 64,
        bottlenecks: int = 4,
        modules: tuple[int, int, int] = (1, 4, 3),
        blocks: int = 4,
        padding: Padding = "same",
    ) -> None:
        super().__init__()
        self.channels = 15 * width
        """Number of channels of the features."""

        def stage(index: int) -> nn.Sequential:
            rounds = (f"st{index}_{m}" for m in range(1, modules[index - 2] + 1))
            return nn.Sequential(
                OrderedDict((f"stage_{r}", HRModule(r, widths[:index], blocks, padding=padding)) for r in rounds)
            )

        widths = [width, 2 * width, 4 * width, 8 * width]
        self.conv_layer1_1 = ConvBNReLU(3, 64, 3, stride=2, padding=padding)
        self.conv_layer1_2 = ConvBNReLU(64, 64, 3, stride=2, padding=padding)
        self.la1 = nn.Sequential()
        for i in range(1, bottlenecks + 1):
            block = Bottleneck(64 if i == 1 else 4 * planes, planes, projects=i == 1, padding=padding)
            self.la1.add_module(f"bb_layer2_{i}", block)
        self.tr1 = Transition("tr1", [4 * planes], widths[:2], padding=padding)
        self.st2 = stage(2)
        self.tr2 = Transition("tr2", widths[:2], widths[:3], padding=padding)
        self.st3 = stage(3)
        self.tr3 = Transition("tr3", widths[:3], widths, padding=padding)
        self.st4 = stage(4)
        init_small(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of all resolutions, concatenated at the size of the highest."""
        x = self.la1(self.conv_layer1_2(self.conv_layer1_1(x)))
        xs = self.st2(self.tr1([x]))
        xs = self.st3(self.tr2(xs))
        high, *lower = self.st4(self.tr3(xs))
        return join(high, *(resize(low, high) for low in lower))


def hrnet_w18_small_v1(padding: Padding = "same") -> HRNet:
    """Return a new HRNet of width 16, shallow, with 240 channels."""
    return HRNet(16, planes=32, bottlenecks=1, modules=(1, 1, 1), blocks=2, padding=padding)


def hrnet_w18(padding: Padding = "same") -> HRNet:
    """Return a new HRNet of width 18, with 270 channels."""
    return HRNet(18, padding=padding)


def hrnet_w48(padding: Padding = "same") -> HRNet:
    """Return a new HRNet of width 48, with 720 channels."""
    return HRNet(48, padding=padding)


class FCNHead(nn.Module):
    """Two 1x1 convolutions: features (n, c, h, w) to logits (n, classes, h, w)."""

    def __init__(self, in_channels: int, num_classes: int, *, bias: bool = True) -> None:
        super().__init__()
        self.conv_1 = ConvBNReLU(in_channels, in_channels, 1, bias=bias)
        self.cls = nn.Conv2d(in_channels, num_classes, 1, bias=bias)
        init_small(self)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits at the resolution of the features."""
        logits: Tensor = self.cls(self.conv_1(x))
        return logits


class FCN(nn.Module):
    """A fully convolutional network: images (n, 3, h, w) to a list of one tensor of logits (n, classes, h, w).

    Args:
        backbone: Computes the features.
        num_classes: Number of classes.
        bias: Whether the convolutions of the head have biases.
    """

    def __init__(self, backbone: HRNet, num_classes: int, *, bias: bool = True) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = FCNHead(backbone.channels, num_classes, bias=bias)

    def forward(self, x: Tensor) -> list[Tensor]:
        """Return the logits at the size of the images."""
        return [resize(self.head(self.backbone(x)), x)]


@register_model(
    task="segmentation",
    input_size=(192, 192),
    head_keys=("head.cls.",),
    aliases=("fcn_hrnetw18_small",),
)
def pp_humanseg_mobile(num_classes: int = 2, bias: bool = True, padding: Padding = "same") -> nn.Module:
    """Return a new PP-HumanSeg-mobile: FCN on the small HRNet."""
    return FCN(hrnet_w18_small_v1(padding), num_classes, bias=bias)


@register_model(
    task="segmentation",
    input_size=(512, 1024),
    head_keys=("head.cls.",),
    aliases=("fcn_hrnetw18",),
)
def fcn_hrnet_w18(num_classes: int = 19, bias: bool = False, padding: Padding = 1) -> nn.Module:
    """Return a new FCN on HRNet-W18, as in the test configuration of PaddleSeg.

    The published Cityscapes weights were trained with `bias=True` and `padding="same"`.
    """
    return FCN(hrnet_w18(padding), num_classes, bias=bias)
