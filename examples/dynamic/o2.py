"""Train at O2: half weights with float32 master weights.

python examples/dynamic/o2.py
"""

import torch
from simple_net import Steps, batches, make_model, make_parser
from torch import nn

from mezzo import amp

options = make_parser(__doc__).parse_args()
model = make_model(options)
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
mse_loss = nn.MSELoss()

# 1) make the weights float16; the optimizer keeps float32 masters, and its step writes both
model, optimizer = amp.decorate(models=model, optimizers=optimizer, level="O2")
# 3) the loss scale, as at O1
scaler = amp.GradScaler(init_loss_scaling=1024)

steps = Steps()
for data, label in batches(options):
    with steps.timed():
        # 2) run all operators except losses and normalisation in float16
        with amp.auto_cast(level="O2", cpu_compute=options.cpu_compute):
            loss = mse_loss(model(data), label)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        steps.losses.append(loss.item())
with amp.auto_cast(level="O2", cpu_compute=options.cpu_compute):
    steps.show(lambda: model(data))
