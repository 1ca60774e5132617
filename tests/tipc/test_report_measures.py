import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from report_runs import REPORT, TABLE, losses, record

from mezzo.amp.debugging import collect_operator_stats
from mezzo.tipc._logs import LINE_CHARS, READ_BYTES, one_line, plain, read_log, tail
from mezzo.tipc._measures import (
    MAX_POINTS,
    LossCurve,
    OperatorCalls,
    is_mixed,
    latencies,
    loss_curve,
    operator_table,
)
from mezzo.vision.infer import BenchmarkEnvironment, BenchmarkReport, StageTimes, Usage, percentiles
from mezzo.vision.train.log_lines import (
    SegmentationTrainLine,
    TrainLine,
    format_segmentation_train_line,
    format_train_line,
)


def segmentation_line(step: int, loss: float) -> str:
    times = {"batch_cost_s": 0.1, "reader_cost_s": 0.0, "samples_per_s": 1.0, "eta_s": 1}
    return format_segmentation_train_line(
        SegmentationTrainLine(epoch=step // 20 + 1, step=step, steps=40, loss=loss, lr=0.1, **times)
    )


def classification_line(epoch: int, step: int, loss: float) -> str:
    times = {"reader_cost_s": 0.0, "batch_cost_s": 0.1, "samples": 4.0, "images_per_s": 1.0}
    return format_train_line(TrainLine(epoch=epoch, step=step, top1=0.1, top5=0.2, lr=0.1, loss=loss, **times))


def test_loss_of_our_segmentation_training():
    log = "\n".join(
        ["begin", segmentation_line(10, 0.75), segmentation_line(30, float("nan")), segmentation_line(40, 0.5)]
    )
    assert loss_curve(log) == LossCurve(points=((10, 0.75), (40, 0.5)), num_bad=1)


def test_steps_of_our_classification_training_are_counted_on_from_epoch_to_epoch():
    log = "\n".join(classification_line(epoch, step, epoch + step) for epoch in (1, 2, 3) for step in (0, 1))
    assert loss_curve(log) == LossCurve(points=((0, 1.0), (1, 2.0), (2, 2.0), (3, 3.0), (4, 3.0), (5, 4.0)))


@pytest.mark.parametrize(
    ("log", "points"),
    [
        (losses(0.9, 0.5), ((10, 0.9), (20, 0.5))),
        (
            "[Train][Epoch 1/2][Iter: 0/10]lr: 0.1, top1: 0.0, CELoss: 9.0, loss: 7.25, batch_cost: 1s\n"
            "[Eval][Epoch 1][Iter: 0/3]CELoss: 9.0, loss: 99.0, top1: 0.1\n"
            "[Train][Epoch 2/2][Iter: 0/10]lr: 0.1, top1: 0.0, CELoss: 9.0, loss: 6.5, batch_cost: 1s",
            ((0, 7.25), (10, 6.5)),
        ),
        ("epoch: [1/2], global_step: 3, lr: 0.1, loss: 2.5e-1, reader", ((3, 0.25),)),
    ],
)
def test_loss_of_paddle_style_lines(log, points):
    curve = loss_curve(log)
    assert curve is not None
    assert curve.points == points
    assert curve.last == points[-1][1]


@pytest.mark.parametrize(
    "log", ["", "loss: 0.5", "iter: 3", "iter: 3 loss: none", "iter: 3, loss: 0.5.1", "iter: 3 myloss: 1"]
)
def test_other_lines_have_no_loss(log):
    assert loss_curve(log) is None


def test_a_loss_beyond_float32_is_not_finite_and_a_curve_may_have_no_point():
    curve = loss_curve("iter: 1, loss: inf\niter: 2, loss: -inf\niter: 3, loss: 1e300")
    assert curve == LossCurve(points=(), num_bad=3)
    assert curve.last is None


def test_a_long_curve_is_thinned_and_keeps_its_ends():
    curve = loss_curve("\n".join(f"iter: {step}, loss: {step}.5" for step in range(5000)))
    assert curve is not None
    assert len(curve.points) <= MAX_POINTS + 1
    assert (curve.points[0], curve.points[-1]) == ((0, 0.5), (4999, 4999.5))


def test_operators_of_a_real_recording_are_read_back():
    with collect_operator_stats(print_table=False) as stats:
        torch.mm(torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2, dtype=torch.bfloat16))
        torch.nn.functional.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2))
    table = operator_table(f"before\n{stats.table()}after")
    assert table is not None
    assert {row.name: (row.fp16, row.bf16, row.fp32, row.other) for row in table.rows} == stats.totals()
    assert table.half_share == 0.5


def test_share_in_half_is_that_of_matrix_products_and_convolutions():
    table = operator_table(TABLE)
    assert table is not None
    assert table.half_share == 0.75
    assert table.calls(products=True) == OperatorCalls("matrix products and convolutions", 3, 0, 1, 0)
    assert table.calls(products=False) == OperatorCalls("all operators", 8, 0, 16, 0)


def test_a_table_without_products_has_no_share():
    table = operator_table(TABLE.replace("convolution", "relu").replace("mm ", "add"))
    assert table is not None
    assert table.half_share is None


@pytest.mark.parametrize(
    "text", ["", TABLE.partition("\n")[2], "<-- op list -->", "<-- op list -->\n  mm | 1 | 2 | x | 4\n"]
)
def test_no_table_of_operators(text):
    assert operator_table(text) is None


def test_a_table_that_is_cut_off_is_read_as_far_as_it_goes():
    table = operator_table(TABLE[: TABLE.index("upsample")])
    assert table is not None
    assert [row.name for row in table.rows] == ["_to_copy", "convolution", "mm"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, True) for name in "mm addmm baddbmm _scaled_mm linear conv2d_grad matmul_v2 mkldnn::linear".split()),
        *(
            (name, False)
            for name in "upsample_linear1d convert_element_type add mul sum_mmx upsample_bilinear2d".split()
        ),
    ],
)
def test_which_operators_are_products(name, expected):
    assert OperatorCalls(name, 1, 0, 0, 0).is_product is expected


def test_times_of_our_benchmark_report_with_percentiles():
    (found,) = latencies(f"noise\n{REPORT}")
    assert (found.preprocess_ms, found.inference_ms, found.postprocess_ms) == (4.0, 20.0, 1.0)
    assert (found.p50_ms, found.p95_ms) == (19.5, 24.25)
    assert (found.model, found.device, found.precision, found.batch) == ("lite", "cpu", "fp16", "2")
    assert found.warnings == ()


def test_times_of_a_report_as_it_is_printed():
    samples = [10.0, 20.0, 30.0]
    times = StageTimes(
        warmup=0, cycles=3, samples_per_s=40.0, total_s=0.075, preprocess_ms=4.0, inference_ms=20.0, postprocess_ms=1.0,
        inference=percentiles(samples), cycle=percentiles(samples),
    )  # fmt: skip
    report = BenchmarkReport(
        model_name="lite", precision="fp32", batch_size=1, input_shape="dynamic", runtime_device="cpu", ir_optim=None,
        enable_memory_optim=None, enable_tensorrt=None, enable_mkldnn=None, cpu_threads=1,
        usage=Usage(mean_rss_mb=1.0, peak_rss_mb=1.0, gpu_memory_mb=None, gpu_util=None), times=times,
        env=BenchmarkEnvironment.query(engine="torch"),
    )  # fmt: skip
    (found,) = latencies("\n".join(report.lines()))
    assert (found.inference_ms, found.p50_ms) == (20.0, 20.0)


def test_many_reports_keep_their_own_percentiles_and_one_cut_off_is_left_out():
    old = REPORT.partition("inference_p50")[0]
    found = latencies(REPORT + old + REPORT.partition(" preprocess_time")[0])
    assert [each.p50_ms for each in found] == [19.5, None]


@pytest.mark.parametrize("time", ["None", "nan", "fast", "9" * 300, "True"])
def test_a_report_without_an_inference_time_is_left_out(time):
    assert latencies(REPORT.replace("inference_time(ms): 20.0", f"inference_time(ms): {time}")) == []


@pytest.mark.parametrize(
    ("trainer", "arguments", "expected"),
    [
        ("amp_train", "", True),
        ("norm_train", "", False),
        ("", "", False),
        ("norm_train", "--precision fp16 --amp_level O2", True),
        ("norm_train", "--precision=bf16", True),
        ("norm_train", "-o AMP.level=O1", True),
        ("norm_train", "--amp_level=OD", True),
        ("amp_train", "--amp_level=O0", False),
        ("amp_train", "--precision fp16 --amp_level=O0", False),
        ("amp_train", "--precision fp32", False),
    ],
)
def test_which_trainings_are_in_mixed_precision(trainer, arguments, expected):
    labels = {"trainer": trainer} if trainer else {}
    assert is_mixed(record(labels=labels, command=f"python train.py {arguments}")) is expected


@given(st.text())
def test_any_text_is_read_without_an_error(text):
    loss_curve(text)
    operator_table(text)
    latencies(text)


@pytest.mark.parametrize("whole", [losses(0.9, "nan", 0.1), TABLE, REPORT])
def test_damaged_logs_are_read_without_an_error(whole):
    draw = random.Random(0)
    for _ in range(100):
        letters = list(whole)
        for _ in range(8):
            letters[draw.randrange(len(letters))] = chr(draw.choice([0, 9, 10, 27, 45, 57, 58, 60, 91, 0x2028]))
        text = plain("".join(letters))
        loss_curve(text)
        operator_table(text)
        latencies(text)


def test_a_log_becomes_plain_text(tmp_path):
    path = tmp_path / "a.log"
    path.write_bytes(b"\x1b[33m Run \x1b[0m\x00\r\n10%\r20%\n\x1b]0;title\x07\xff\x1b]open\nend")
    assert read_log(path) == " Run \n10%\n20%\n\ufffd]open\nend"


def test_of_a_long_log_both_ends_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("mezzo.tipc._logs.READ_BYTES", 20)
    path = tmp_path / "a.log"
    path.write_text("first line" + "x" * 100 + "\nlast line")
    assert read_log(path) == "first line\n[... 100 bytes are left out here ...]\n\nlast line"
    assert READ_BYTES > 20


def test_long_lines_are_cut(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("x" * (LINE_CHARS + 1) + "\nshort")
    assert read_log(path) == "x" * LINE_CHARS + "...\nshort"


def test_what_is_no_file_is_no_log(tmp_path):
    assert read_log(tmp_path) is None
    assert read_log(tmp_path / "none.log") is None
    assert read_log(tmp_path / ("x" * 5000)) is None
    assert read_log(tmp_path / "a\0b") is None


def test_tail_and_one_line_are_short():
    assert tail("\n".join(map(str, range(100)))).split("\n") == [str(each) for each in range(40, 100)]
    assert len(one_line("word " * 1000)) == 160


@given(st.text())
def test_plain_text_has_no_control_characters_left(text):
    assert not [
        letter for letter in plain(text) if (letter < " " and letter not in "\n\t") or "\x7f" <= letter <= "\x9f"
    ]
