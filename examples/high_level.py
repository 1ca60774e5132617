"""Train a small network on handwritten digits with the high-level API (section 2.2 of the Paddle guide).

python examples/high_level.py --level O2
"""

import argparse

import torch
from torch import nn
from torch.utils.data import TensorDataset

import mezzo
from mezzo.model.metric import Accuracy


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return scikit-learn's 1,797 images of 8x8 pixels; the last 297 are for evaluation."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    inputs, targets = torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(labels)
    return TensorDataset(inputs[:-297], targets[:-297]), TensorDataset(inputs[-297:], targets[-297:])


def main() -> None:
    """Parse, train, evaluate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", default="O1", choices=["O0", "O1", "O2"])
    parser.add_argument("--dtype", default="float16", choices=["float16", "bfloat16"])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--save", help="where to write the trained model and the exported one")
    options = parser.parse_args()

    torch.manual_seed(100)
    network = nn.Sequential(nn.Flatten(1), nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 10))
    model = mezzo.Model(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp_configs = {"level": options.level}
    if options.level != "O0":
        amp_configs |= {"dtype": options.dtype, "custom_white_list": {"conv2d"}}
    if options.level != "O0" and options.dtype == "float16":
        amp_configs["use_dynamic_loss_scaling"] = True
    model.prepare(optimizer, nn.CrossEntropyLoss(), Accuracy(), amp_configs=amp_configs)
    train_data, eval_data = digits()
    model.fit(train_data, epochs=options.epochs, batch_size=32, verbose=1)
    result = model.evaluate(eval_data, batch_size=32, verbose=0)
    print(f"accuracy: {result['acc']:.4f} on {result['samples']} samples at {options.level}")
    if options.save:
        model.save(options.save)
        print(f"exported: {model.save(options.save + '_forward', training=False)}")


if __name__ == "__main__":
    main()
