"""Time the backward pass of bilinear upsampling on CUDA: torch's kernel, and mezzo's operator.

PYTHONPATH=src python benchmarks/resize.py
"""

import statistics

import torch

from mezzo.kernels import enlarge_gradient

CASES = [  # n, channels, from, to: heads and fusions of the networks
    (16, 11, (44, 60), (352, 480)),
    (4, 19, (64, 128), (512, 1024)),
    (16, 2, (96, 96), (192, 192)),
    (16, 96, (22, 30), (44, 60)),
    (8, 72, (32, 64), (64, 128)),
    (8, 144, (16, 32), (128, 256)),
]


def time_of(run, rounds: int = 15) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)  # the host runs ahead, so that only the device is timed
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; milliseconds, median of 15")
    print("| shape | to | dtype | layout | torch | mezzo | ratio | error torch | error ours |")
    print("|---|---|---|---|---|---|---|---|---|")
    for n, channels, size, to in CASES:
        wide = torch.randn(n, channels, *to, device="cuda", dtype=torch.float64)
        x = torch.empty(n, channels, *size, device="cuda", dtype=torch.float64)
        right = torch.ops.aten.upsample_bilinear2d_backward(wide, list(to), list(x.shape), False)
        for dtype in (torch.float32, torch.float16):
            for layout in (torch.contiguous_format, torch.channels_last):
                grad = wide.to(dtype).to(memory_format=layout)

                def stock(grad=grad, to=to, x=x):
                    return torch.ops.aten.upsample_bilinear2d_backward(grad, list(to), list(x.shape), False)

                def ours(grad=grad, size=size):
                    return enlarge_gradient(grad, *size)

                errors = [((run() - right).abs().max() / right.std()).item() for run in (stock, ours)]
                a, b = time_of(stock), time_of(ours)
                name = "NHWC" if layout == torch.channels_last else "NCHW"
                print(
                    f"| {n}x{channels}x{size[0]}x{size[1]} | {to[0]}x{to[1]} | {str(dtype)[6:]} | {name} | {a:.3f} | "
                    f"{b:.3f} | {a / b:.1f}x | {errors[0]:.1e} | {errors[1]:.1e} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
