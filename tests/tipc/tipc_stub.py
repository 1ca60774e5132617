"""Stands in for an interpreter in tests: writes down how it was called, and leaves what a training would leave."""

import json
import os
import re
import stat
import sys


def target():
    """Return where standard output goes: a file below the root, 'tee' for a pipe that is not the test's own."""
    status = os.fstat(1)
    if stat.S_ISREG(status.st_mode):
        return os.path.relpath(os.readlink("/proc/self/fd/1"), os.environ["STUB_ROOT"])
    # a run's own output is the test's pipe, which is also its error output's neighbour; through tee both are one pipe
    return "tee" if os.readlink("/proc/self/fd/1") == os.readlink("/proc/self/fd/2") else ""


def main():
    argv = sys.argv[1:]
    root = os.environ["STUB_ROOT"]
    env = {
        name: os.environ[name] for name in ("FLAGS_cudnn_deterministic", "CUDA_VISIBLE_DEVICES") if name in os.environ
    }
    text = [word.replace(root, "$ROOT") for word in argv]
    cwd = os.path.relpath(os.getcwd(), root)
    call = {"argv": text, "env": env, "cwd": "" if cwd == "." else cwd, "stdout": target()}
    with open(os.environ["STUB_RECORD"], "a") as file:
        file.write(json.dumps(call) + "\n")
    return train(argv)


def train(argv):
    """Leave log and weights of a training, where a save directory is named; fails where the variant says so."""
    with open(os.environ["STUB_CONFIG"]) as file:
        lines = [line for line in file.read().split("\n") if line]
    variant = os.environ["STUB_VARIANT"]
    saved = next(
        (word.split("=", 1)[1] for word in argv if re.search(r"=\S*_train_gpus_[^/]*$|=\S*/norm_gpus_[^/]*$", word)),
        None,
    )
    line_10 = lines[10] if len(lines) > 10 else ""
    scripts = [word for word in argv if word.endswith(".py")]
    others = ("export", "infer", "predict", "eval", "to_static", "test.py", "extract")
    is_training = saved is not None and not any(other in script for other in others for script in scripts)
    is_training = is_training and "--export" not in str(argv) and "--eval" not in argv
    if not is_training:
        return 0
    for name in ("train.log", "log.txt"):
        os.makedirs(saved, exist_ok=True)
        leave(os.path.join(saved, name))
        for model in {lines[1].split(":")[-1], "RecModel"}:
            leave(os.path.join(saved, model, name))
    if variant == "trainfail":
        return 1
    checkpoint = line_10.split(":")[1] if ":" in line_10 else ""
    if variant != "bare" and checkpoint not in ("", "null"):
        path = checkpoint.replace("*/*checkpoint", "-run/iter_1_checkpoint")
        leave(os.path.join(saved, path))
        leave(os.path.join(saved, os.path.dirname(path), "log.txt"))
    return 0


def leave(path):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if not os.path.isdir(path):
        with open(path, "w") as file:
            file.write("loss: 1\n")


if __name__ == "__main__":
    sys.exit(main())
