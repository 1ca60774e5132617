"""Train the static program at O1: operator lists decide which operators run in float16.

python examples/static/o1.py
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
# 1) the lists: `elementwise_add` is Paddle's name for `add`
amp_list = static.amp.CustomOpLists(custom_white_list=["elementwise_add"])
# 2) the optimizer
optimizer = static.amp.decorate(
    optimizer=optimizer,
    amp_lists=amp_list,
    init_loss_scaling=128.0,
    use_dynamic_loss_scaling=True,
    cpu_compute=options.cpu_compute,
)
optimizer.minimize(loss)

exe = static.Executor(options.device)
exe.run(static.default_startup_program())
run(options, exe, data, label, loss)
