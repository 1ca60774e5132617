"""Options of a run work together: a resumed run and a compiled run train as the written-out loop does.

Each case draws its options at random. Most faults of single options have tests of their own; these look for pairs.
"""

import io
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LRScheduler, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mezzo import Precision, amp

pytestmark = pytest.mark.slow

STEPS, CUT = 12, 6
RTOL = 0.03  # graph mode rounds less often: units of 2^-8 of logits, which grow over the steps
RTOL_FP8 = 0.1  # a rounding may also move a number to its FP8 neighbour, up to 1/8 away
OPTIMIZERS: dict[str, Any] = {
    "SGD": {"lr": 0.02, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 3e-3},
    "AdamW": {"lr": 3e-3, "weight_decay": 0.05},
    "RMSprop": {"lr": 1e-3},
    "Adagrad": {"lr": 3e-3},
    "Adafactor": {"lr": 1e-2},
    "NAdam": {"lr": 3e-3},
}
HAVE_HALF_STATE = ("SGD", "Adam", "AdamW")


class Net(nn.Module):
    """Convolution, norms of images and rows, residuals, an embedding, a parameter of its own, and a layer without use."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.widen = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2)
        )
        self.shift, self.words, self.unused = nn.Parameter(torch.zeros(32)), nn.Embedding(10, 32), nn.Linear(4, 4)
        nn.init.normal_(self.words.weight, std=0.2)  # as a head, larger ones overflow float16 for many steps
        self.head = nn.Linear(32, 10, bias=False)
        if is_tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        rows = self.widen(F.relu(self.norm(self.conv(x))).flatten(2).mT)
        for layer in self.layers:
            rows = rows + layer(rows)
        return self.head(rows.mean(1) + self.shift + self.words(torch.zeros(1, dtype=torch.long)))


class Case(NamedTuple):
    """Options of one run."""

    level: str
    options: dict[str, Any]
    optimizer: str
    has_groups: bool
    is_tied: bool
    is_frozen: bool
    fuses: bool
    checkpoints: bool
    has_average: bool
    has_schedule: bool
    max_norm: float | None
    accumulate: int
    backend: str


class Run(NamedTuple):
    """Everything that trains."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    average: AveragedModel | None
    schedule: LRScheduler | None


def draw(seed: int) -> Case:
    rng = random.Random(seed)

    def maybe(value: Any, share: float) -> Any:
        return value if rng.random() < share else None

    level, optimizer = rng.choice(["O0", "OD", "O1", "O2", "O2", "O3"]), rng.choice(list(OPTIMIZERS))
    options: dict[str, Any] = {"dtype": rng.choice(["float16", "bfloat16"])}
    if level in ("O1", "O2", "O3"):
        options |= {"master_weight": rng.choice([None, True, "compact"]), "use_promote": maybe(False, 0.15)}
    if level in ("O1", "O2"):
        options |= {"custom_black_list": maybe([rng.choice(["gelu", "add", "linear", "layer_norm"])], 0.2)}
    if level == "O3":
        recipe = rng.choice([{}, {"scaling": "delayed"}, {"granularity": "row"}, {"gradient": "e4m3"}])
        options |= {"fp8": {"emulate": True, "min_width": 1, "min_size": 1, **recipe}, "half_layers": ()}
    if level != "O0":
        options["excluded_layers"] = maybe([rng.choice(["head", "layers.0*", nn.LayerNorm, "words"])], 0.25)
    if optimizer in HAVE_HALF_STATE:
        options["optimizer_state"] = maybe("bfloat16", 0.4)
    return Case(
        level,
        {name: value for name, value in options.items() if value is not None},
        optimizer,
        *(rng.random() < share for share in (0.4, 0.3, 0.2, 0.3, 0.25, 0.3, 0.4)),
        max_norm=rng.choice([None, 1.0, 0.1]),
        accumulate=rng.choice([1, 1, 2, 3]),
        backend=rng.choice(["eager", "aot_eager"]),
    )


def build(case: Case) -> Run:
    torch.manual_seed(0)
    net = Net(case.is_tied)
    net.conv.requires_grad_(not case.is_frozen)
    params: list[Any] = list(net.parameters())
    if case.has_groups:
        params = [
            {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.01},
            {"params": [param for param in params if param.dim() < 2], "lr": 1e-3},
        ]
    optimizer = getattr(torch.optim, case.optimizer)(params, **OPTIMIZERS[case.optimizer])
    precision = Precision(case.level, **case.options)
    net, optimizer = precision.prepare(net, optimizer, fuse=case.fuses)
    if case.checkpoints:
        amp.checkpoint_blocks(net, "layers.*")
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if case.has_average else None
    return Run(net, optimizer, precision, average, StepLR(optimizer, 2, 0.7) if case.has_schedule else None)


def train(case: Case, run: Run, batches: Sequence[tuple[Tensor, Tensor]], compiled: bool) -> list[float]:
    """Return the losses of a written-out loop, or of a compiled step."""
    average = {"ema": run.average} if run.average is not None else {}
    options = {"max_norm": case.max_norm, "accumulate": case.accumulate, "backend": case.backend, **average}
    step = run.precision.compile(run.net, F.cross_entropy, run.optimizer, **options) if compiled else None
    losses = []
    for number, (x, y) in enumerate(batches, start=1):
        updates = number % case.accumulate == 0
        if step is not None:
            loss = step(x, y)
        else:
            with run.precision.autocast():
                loss = F.cross_entropy(run.net(x), y)
            run.precision.backward(loss / case.accumulate)
            if updates:
                run.precision.step(run.optimizer, max_norm=case.max_norm)
                run.optimizer.zero_grad()
                if run.average is not None:
                    run.average.update_parameters(run.net)
        if updates and run.schedule is not None:
            run.schedule.step()
        losses.append(loss.item())
    return losses


def state_of(run: Run) -> list[Any]:
    """Return the state after it went through a file."""
    file = io.BytesIO()
    torch.save([part.state_dict() for part in run if part is not None], file)
    file.seek(0)
    state: list[Any] = torch.load(file, weights_only=True)
    return state


def check_equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("seed", range(16))
def test_a_resumed_run_is_the_unbroken_one_and_a_compiled_run_follows_the_loop(seed: int, compiled: bool) -> None:
    case = draw(seed)
    noise = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(16, 3, 4, 4, generator=noise), torch.randint(10, (16,), generator=noise)) for _ in range(STEPS)
    ]
    whole = build(case)
    losses = train(case, whole, batches, compiled)
    trained, untrained = whole.net.state_dict(), build(case).net.state_dict()
    assert all(value.dtype is torch.float32 for value in trained.values() if value.is_floating_point())
    assert all(not torch.equal(trained[name], untrained[name]) for name in ("widen.weight", "head.weight", "shift"))

    first = build(case)
    before = train(case, first, batches[:CUT], compiled)
    state, second = state_of(first), build(case)
    for part, saved in zip((part for part in second if part is not None), state, strict=True):
        part.load_state_dict(saved)
    assert before + train(case, second, batches[CUT:], compiled) == losses
    check_equal(state_of(second), state_of(whole))

    if compiled:
        loop = train(case, build(case), batches, compiled=False)
        assert losses == pytest.approx(loop, rel=RTOL_FP8 if case.level == "O3" else RTOL)
