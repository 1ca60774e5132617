"""Train the static program at O2: half weights with float32 master weights.

python examples/static/o2.py
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
# 1) the optimizer
optimizer = static.amp.decorate(
    optimizer=optimizer,
    init_loss_scaling=128.0,
    use_dynamic_loss_scaling=True,
    use_pure_fp16=True,
    use_fp16_guard=False,
    cpu_compute=options.cpu_compute,
)
optimizer.minimize(loss)

exe = static.Executor(options.device)
exe.run(static.default_startup_program())
# 2) make the weights half and keep float32 masters
optimizer.amp_init(exe.device)

run(options, exe, data, label, loss)
