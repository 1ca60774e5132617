"""Reports out of logs: the documented sample, and whatever our own report can say."""

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mezzo.report import stamped
from mezzo.vision.infer import (
    BenchmarkEnvironment,
    BenchmarkReport,
    Percentiles,
    StageTimer,
    StageTimes,
    Usage,
    parse_reports,
)

DOCUMENTED = """\
2022-04-13 11:43:09 [INFO]    ---------------------- Env info ----------------------
2022-04-13 11:43:09 [INFO]     OS_version: CentOS Linux 7
2022-04-13 11:43:09 [INFO]     CUDA_version: 11.2.67
Build cuda_11.2.r11.2/compiler.29373293_0
2022-04-13 11:43:09 [INFO]     CUDNN_version: None.None.None
2022-04-13 11:43:09 [INFO]     drivier_version: 460.27.04
2022-04-13 11:43:09 [INFO]    ---------------------- Paddle info ----------------------
2022-04-13 11:43:09 [INFO]     paddle_version: 2.2.2
2022-04-13 11:43:09 [INFO]     paddle_commit: b031c389938bfa15e15bb20494c76f86289d77b0
2022-04-13 11:43:09 [INFO]     log_api_version: 1.0
2022-04-13 11:43:09 [INFO]    ----------------------- Conf info -----------------------
2022-04-13 11:43:09 [INFO]     runtime_device: cpu
2022-04-13 11:43:09 [INFO]     ir_optim: True
2022-04-13 11:43:09 [INFO]     enable_memory_optim: True
2022-04-13 11:43:09 [INFO]     enable_tensorrt: False
2022-04-13 11:43:09 [INFO]     enable_mkldnn: False
2022-04-13 11:43:09 [INFO]     cpu_math_library_num_threads: 1
2022-04-13 11:43:09 [INFO]    ----------------------- Model info ----------------------
2022-04-13 11:43:09 [INFO]     model_name:
2022-04-13 11:43:09 [INFO]     precision: fp32
2022-04-13 11:43:09 [INFO]    ----------------------- Data info -----------------------
2022-04-13 11:43:09 [INFO]     batch_size: 1
2022-04-13 11:43:09 [INFO]     input_shape: dynamic
2022-04-13 11:43:09 [INFO]     data_num: 50
2022-04-13 11:43:09 [INFO]    ----------------------- Perf info -----------------------
2022-04-13 11:43:09 [INFO]     cpu_rss(MB): 315.2656, gpu_rss(MB): 8842.0, gpu_util: 0.0%
2022-04-13 11:43:09 [INFO]     total time spent(s): 4.2386
2022-04-13 11:43:09 [INFO]     preprocess_time(ms): 33.7887, inference_time(ms): 50.7443, postprocess_time(ms): 0.2391
"""
TITLE = "---------------------- Env info ----------------------"
PREFIX = "2022-04-13 11:43:09 [INFO]    "
DOCUMENTED_VALUES = {
    "OS_version": "CentOS Linux 7",
    "CUDA_version": "11.2.67\nBuild cuda_11.2.r11.2/compiler.29373293_0",
    "CUDNN_version": "None.None.None",
    "drivier_version": "460.27.04",
    "paddle_version": "2.2.2",
    "paddle_commit": "b031c389938bfa15e15bb20494c76f86289d77b0",
    "log_api_version": 1.0,
    "runtime_device": "cpu",
    "ir_optim": True,
    "enable_memory_optim": True,
    "enable_tensorrt": False,
    "enable_mkldnn": False,
    "cpu_math_library_num_threads": 1,
    "model_name": "",
    "precision": "fp32",
    "batch_size": 1,
    "input_shape": "dynamic",
    "data_num": 50,
    "cpu_rss(MB)": 315.2656,
    "gpu_rss(MB)": 8842.0,
    "gpu_util": 0.0,
    "total time spent(s)": 4.2386,
    "preprocess_time(ms)": 33.7887,
    "inference_time(ms)": 50.7443,
    "postprocess_time(ms)": 0.2391,
    "identifier": None,
    "warnings": [],
}
OURS_ALONE = ("torch_", "engine", "cpu_peak", "warmup", "throughput", "inference_p", "cycle_p")

# One line, no control characters (a report refuses them), and no blanks at its ends (nobody can see those in a log).
texts = st.text(st.characters(exclude_categories=("Cc", "Cs")), max_size=20).map(str.strip)
tricky = st.sampled_from(
    ["None", "True", "12.10", "1e5", "50%", "precision: fp16", "--- Env info ---", "a, gpu_util: 3%"]
)
words = texts | tricky
numbers = st.floats(0, 1e17)
flags = st.none() | st.booleans()
percentiles = st.builds(Percentiles, p50_ms=numbers, p95_ms=numbers, p99_ms=numbers)
reports = st.builds(
    BenchmarkReport,
    model_name=words | st.just(TITLE),
    precision=words,
    batch_size=st.integers(1),
    input_shape=words,
    runtime_device=st.sampled_from(["cpu", "gpu"]),
    ir_optim=flags,
    enable_memory_optim=flags,
    enable_tensorrt=flags,
    enable_mkldnn=flags,
    cpu_threads=st.none() | st.integers(1, 512),
    usage=st.builds(
        Usage,
        mean_rss_mb=st.none() | numbers,
        peak_rss_mb=st.none() | numbers,
        gpu_memory_mb=st.none() | numbers,
        gpu_util=st.none() | st.floats(0, 100),
    ),
    times=st.builds(
        StageTimes,
        cycles=st.integers(1),
        warmup=st.integers(0),
        total_s=numbers,
        preprocess_ms=numbers,
        inference_ms=numbers,
        postprocess_ms=numbers,
        inference=percentiles,
        cycle=percentiles,
        samples_per_s=st.none() | numbers,
    ),
    env=st.builds(
        BenchmarkEnvironment,
        os_version=st.none() | words,
        cuda_version=st.none() | words,
        cudnn_version=st.none() | words,
        driver_version=st.none() | words,
        torch_version=words,
        torch_commit=st.none() | words,
        engine=words,
        engine_version=st.none() | words,
    ),
)
identifiers = st.text(st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="[]"), max_size=10)
prefixes = st.sampled_from(["", PREFIX, "[2022/05/13 23:07:42] root INFO: ", "\x1b[33m[INFO]\t", "INFO:root:"])


def expected(report, identifier):
    """Return what a reader makes of a report's fields: ours are behind its end, and the text None is None."""
    fields = {label: value for label, value in report.as_dict().items() if not label.startswith(OURS_ALONE)}
    return {label: None if value == "None" else value for label, value in fields.items()} | {"identifier": identifier}


def without_warnings(parsed):
    return [{label: value for label, value in report.items() if label != "warnings"} for report in parsed]


def test_documented_sample_is_read_value_by_value():
    assert parse_reports(DOCUMENTED) == [DOCUMENTED_VALUES]


@given(reports, identifiers, prefixes)
def test_every_report_is_read_as_it_was_written(report, identifier, prefix):
    text = "\n".join(prefix + line for line in report.lines(identifier))
    assert without_warnings(parse_reports(text)) == [expected(report, identifier or None)]


def test_reports_are_kept_in_order_with_their_identifiers_and_nothing_between_them():
    second = DOCUMENTED.replace("    OS_version", "    [trt] OS_version").replace("model_name:", "model_name: b")
    log = f"loading Env info\nbatch_size: 9\n{DOCUMENTED}data_num: 3\nprecision: int8\n{second}bye\n"
    first, last = parse_reports(log)
    assert first == DOCUMENTED_VALUES
    assert last == DOCUMENTED_VALUES | {"model_name": "b", "identifier": "trt"}


def test_colours_and_windows_line_ends_are_dropped():
    coloured = "".join(f"\x1b[1;33m{line}\x1b[0m\r\n" for line in DOCUMENTED.splitlines())
    assert parse_reports(coloured) == [DOCUMENTED_VALUES]


def test_prefix_of_our_own_log_is_no_identifier():
    when = datetime(2022, 4, 13, 11, 43, 9)
    log = "\n".join(stamped(line.removeprefix(PREFIX), when) for line in DOCUMENTED.splitlines())
    (report,) = parse_reports(log.replace(f"{stamped('Build', when)}", "Build"))
    assert report == DOCUMENTED_VALUES


def test_nothing_measured_on_the_gpu_is_none():
    log = DOCUMENTED.replace("8842.0, gpu_util: 0.0%", "None, gpu_util: None%")
    assert parse_reports(log) == [DOCUMENTED_VALUES | {"gpu_rss(MB)": None, "gpu_util": None}]


def test_a_line_of_another_program_does_not_change_a_number():
    log = DOCUMENTED.replace("data_num: 50\n", "data_num: 50\nWARNING: something else\n\n")
    assert parse_reports(log) == [DOCUMENTED_VALUES]


def test_unreadable_number_stays_text_and_is_told():
    (report,) = parse_reports(DOCUMENTED.replace("data_num: 50", "data_num: fifty"))
    assert report["data_num"] == "fifty"
    assert report["warnings"] == [
        "total and stages cannot be compared: not all of data_num, total time spent(s), preprocess_time(ms), "
        "inference_time(ms), postprocess_time(ms) are numbers"
    ]


def test_report_that_is_cut_off_is_kept_and_told():
    head, _, _ = DOCUMENTED.partition(f"{PREFIX}----------------------- Perf")
    cut, whole = parse_reports(head + DOCUMENTED)
    assert cut["data_num"] == 50
    assert cut["warnings"] == ["the report is cut off: it has no postprocess_time(ms)"]
    assert whole == DOCUMENTED_VALUES


@pytest.mark.parametrize("text", ["", "no report\n", f"{TITLE}\nnothing\n"])
def test_log_without_a_field_has_no_report(text):
    assert parse_reports(text) == []


@pytest.mark.parametrize(
    ("total_s", "is_fine"), [(4.2386, True), (4.32, True), (4.16, True), (4.33, False), (4.14, False)]
)
def test_total_may_be_two_percent_off_the_stages(total_s, is_fine):
    (report,) = parse_reports(DOCUMENTED.replace("4.2386", str(total_s)))
    message = (
        f"total time spent(s) is {total_s}, but the stages of 50 cycles make 4.2386; "
        "check warmup=0, the cycles that were left out"
    )
    assert report["warnings"] == ([] if is_fine else [message])


def test_warmup_is_left_out_of_the_comparison():
    log = DOCUMENTED.replace("4.2386", "3.8147")  # 45 of 50 cycles
    assert parse_reports(log, warmup=5)[0]["warnings"] == []
    assert parse_reports(log)[0]["warnings"] != []
    (warning,) = parse_reports(log, warmup=60)[0]["warnings"]
    assert "the stages of 0 cycles make 0.0000; check warmup=60" in warning


@given(st.lists(st.tuples(*[st.floats(0, 10)] * 3), min_size=3, max_size=9), reports)
def test_times_of_a_timer_are_always_consistent(stages_s, report):
    moments = iter(_moments(stages_s))
    timer = StageTimer(warmup=2, clock=lambda: next(moments))
    for _ in stages_s:
        with timer.cycle():
            timer.stamp()
            timer.stamp()
    fields = {name: getattr(report, name) for name in report.__slots__} | {"times": timer.times()}
    (parsed,) = parse_reports("\n".join(BenchmarkReport(**fields).lines()), warmup=2)
    assert parsed["warnings"] == []


def _moments(stages_s):
    now_s = 0.0
    for stages in stages_s:
        yield now_s
        for stage_s in stages:
            now_s += stage_s
            yield now_s


def test_warmup_must_not_be_negative():
    with pytest.raises(ValueError, match=r"^warmup=-1: must be 0 or more$"):
        parse_reports("", warmup=-1)
