"""Train at O1: operator lists decide which operators run in float16.

python examples/dynamic/o1.py
"""

import torch
from simple_net import Steps, batches, make_model, make_parser
from torch import nn

from mezzo import amp

options = make_parser(__doc__).parse_args()
model = make_model(options)
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
mse_loss = nn.MSELoss()


def region() -> amp.auto_cast:
    """Return a region of mixed precision; `elementwise_add` is Paddle's name for `add`."""
    return amp.auto_cast(custom_white_list={"elementwise_add"}, level="O1", cpu_compute=options.cpu_compute)


# 2) scale the loss, so that small float16 gradients do not become zero; the step divides them again
scaler = amp.GradScaler(init_loss_scaling=1024)

steps = Steps()
for data, label in batches(options):
    with steps.timed():
        # 1) run the forward pass and the loss inside the region
        with region():
            loss = mse_loss(model(data), label)
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # skipped on the device if a gradient overflowed
        scaler.update()
        optimizer.zero_grad()
        steps.losses.append(loss.item())
with region():
    steps.show(lambda: model(data))
