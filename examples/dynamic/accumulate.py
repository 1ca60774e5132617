"""Train at O1 with gradient accumulation: each step uses the gradients of several batches.

python examples/dynamic/accumulate.py --accumulate 10
"""

import torch
from simple_net import Steps, batches, make_model, make_parser
from torch import nn

from mezzo import amp

parser = make_parser(__doc__)
parser.add_argument("--accumulate", type=int, default=10, help="batches per step")
options = parser.parse_args()
if options.epochs * options.batches % options.accumulate:
    parser.error(f"--accumulate {options.accumulate}: must divide the {options.epochs * options.batches} batches")
model = make_model(options)
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
mse_loss = nn.MSELoss()
scaler = amp.GradScaler(init_loss_scaling=1024)

steps = Steps()
for number, (data, label) in enumerate(batches(options), start=1):
    with steps.timed():
        with amp.auto_cast(level="O1", cpu_compute=options.cpu_compute):
            loss = mse_loss(model(data), label)
        # The division makes the sum of these gradients equal to the gradient of one batch of all samples.
        scaler.scale(loss / options.accumulate).backward()
        if number % options.accumulate == 0:
            scaler.step(optimizer)
            scaler.update()  # the scale changes only here, so all gradients of a sum have the same scale
            optimizer.zero_grad()
        steps.losses.append(loss.item())
with amp.auto_cast(level="O1", cpu_compute=options.cpu_compute):
    steps.show(lambda: model(data))
