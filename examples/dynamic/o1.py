"""The same training at O1: lists decide which operators run in float16.

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
    """Return the region of mixed precision; `elementwise_add` is the documents' name of `add`."""
    return amp.auto_cast(custom_white_list={"elementwise_add"}, level="O1", cpu_compute=options.cpu_compute)


# 2) small gradients would vanish in float16: the loss is scaled up, and the step divides by the same number
scaler = amp.GradScaler(init_loss_scaling=1024)

steps = Steps()
for data, label in batches(options):
    with steps.timed():
        # 1) the forward and the loss run inside the region
        with region():
            loss = mse_loss(model(data), label)
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # skipped on the device if a gradient overflowed
        scaler.update()
        optimizer.zero_grad()
        steps.losses.append(loss.item())
with region():
    steps.show(lambda: model(data))
