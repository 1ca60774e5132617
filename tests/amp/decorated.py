"""Networks and a short training run for the tests of `decorate`."""

import torch
from torch import Tensor, nn

from mezzo.amp import GradScaler, auto_cast


class Net(nn.Module):
    """One of everything that is treated differently."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(8)
        self.instance_norm = nn.InstanceNorm1d(8, affine=True)
        self.group_norm = nn.GroupNorm(2, 8)
        self.layer_norm = nn.LayerNorm(8)
        self.lin = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10)
        self.register_buffer("positions", torch.linspace(0, 1, 8) + 1e-5)
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.conv(self.embed(tokens).transpose(1, 2))
        x = self.group_norm(self.instance_norm(self.batch_norm(x)))
        x = self.layer_norm(x.transpose(1, 2) + self.positions)
        return self.head(torch.relu(self.lin(x)))


def dtypes(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: t.dtype for name, t in (*model.named_parameters(), *model.named_buffers())}


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, level: str, half: torch.dtype, steps: int = 3
) -> list[float]:
    torch.manual_seed(3)
    device = next(model.parameters()).device
    tokens = torch.randint(0, 10, (4, 6)).to(device)
    scaler = GradScaler(enable=half is torch.float16, init_loss_scaling=1024)
    losses = []
    for _ in range(steps):
        with auto_cast(level=level, dtype=half):
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        assert loss.dtype is torch.float32
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embed(tokens))


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"deep": inner})
