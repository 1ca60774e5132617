"""Options of a run are checked before anything starts."""

from pathlib import Path
from typing import Any

import pytest

from mezzo.model.precision import make_precision
from mezzo.vision.train import OptionError, RunOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": -1}, "workers=-1: must be at least 0"),
        ({"log_every": 0}, "log_every=0: must be at least 1"),
        ({"save_every": 0}, "save_every=0: must be at least 1"),
        ({"keep_checkpoints": 0}, "keep_checkpoints=0: must be at least 1"),
        ({"early_stop_after": -3}, "early_stop_after=-3: must be at least 1"),
        ({"data_format": "NHCW"}, "unknown data_format 'NHCW'; did you mean"),
        ({"fsdp": True, "use_ema": True}, "use_ema together with fsdp"),
        (
            {"fsdp": True, "amp_level": "O3", "fp8": {"scaling": "delayed"}},
            "fp8 scaling=delayed together with fsdp: each process would keep scales of its own",
        ),
    ],
)
def test_a_value_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError) as caught:
        RunOptions(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(("value", "wanted"), [("5", True), ("6", True), ("4", False), ("x", False), ("", False)])
def test_the_documents_environment_variable_asks_for_the_operator_table(
    value: str, wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOG_v", value)
    assert RunOptions().wants_operator_table() is wanted


def test_options_become_plain_data() -> None:
    assert RunOptions(save_dir=Path("a"), resume=Path("b")).to_dict() | {} == {
        **RunOptions().to_dict(),
        "save_dir": "a",
        "resume": "b",
    }


def test_precisions_of_the_command_line() -> None:
    seg = make_precision("fp16", "O1", "segmentation").policy
    assert seg is not None
    assert {"batch_norm", "add"} <= seg.white
    assert any("bilinear" in name for name in seg.black)
    assert make_precision("bf16", "O2").scaler is None
    assert make_precision("fp16", "O0").name == make_precision("fp32", "O2").name == "fp32"
    scaler = make_precision("fp16", "O1").scaler
    assert scaler is not None
    assert scaler.get_scale() == 1024


@pytest.mark.parametrize(
    ("precision", "level", "message"),
    [
        ("fp8", "O1", "unknown precision 'fp8'; allowed: fp32, fp16, bf16"),
        ("fp16", "O4", "unknown amp_level 'O4'"),
    ],
)
def test_an_unknown_precision_is_refused(precision: str, level: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"unknown") as caught:
        make_precision(precision, level)
    assert message in str(caught.value)
