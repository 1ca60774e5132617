"""Train in float32, as a reference.

python examples/dynamic/fp32.py
"""

import torch
from simple_net import Steps, batches, make_model, make_parser
from torch import nn

options = make_parser(__doc__).parse_args()
model = make_model(options)
optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
mse_loss = nn.MSELoss()

steps = Steps()
for data, label in batches(options):
    with steps.timed():
        loss = mse_loss(model(data), label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.losses.append(loss.item())
steps.show(lambda: model(data))
