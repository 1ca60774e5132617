"""Train a static program in float32, as a reference.

python examples/static/fp32.py
"""

import torch
from simple_net import SimpleNet, read_options, run
from torch import nn

from mezzo import static

options = read_options(__doc__)
static.enable_static()
model = SimpleNet(options.size)
mse_loss = nn.MSELoss()

data = static.data(name="data", shape=[options.batch_size, options.size], dtype="float32")
label = static.data(name="label", shape=[options.batch_size, options.size], dtype="float32")
predict = model(data)
loss = mse_loss(predict, label)

optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
static.minimize(optimizer, loss)

exe = static.Executor(options.device)
exe.run(static.default_startup_program())
run(options, exe, data, label, loss)
