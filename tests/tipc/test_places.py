"""Names from a text become parts of paths: nothing is written outside of the output folder."""

from pathlib import Path

import pytest
from tipc_plans import CONFIG, EXAMPLES, MODE

from mezzo.cli import run
from mezzo.tipc import PROFILES, ConfigError, Plan, check_folder_names, check_output_paths, make_plan

ROOT = Path("/repo")


def planned(*changes: tuple[str, str], mode: str = MODE, profile: str = "seg") -> Plan:
    text = CONFIG
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return make_plan(text, mode, PROFILES[profile], str(ROOT))


@pytest.mark.parametrize(
    "name", ["../../../x", "/etc", ".hidden", "a/b", "a..b", "..", "a b", "a\x1b[31m", "-rf", "a\\b"]
)
def test_a_name_that_is_no_folder_s_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="model_name"):
        check_folder_names(planned(("model_name:net", f"model_name:{name}")))
    with pytest.raises(ConfigError, match="mode"):
        check_folder_names(planned(mode=name))


@pytest.mark.parametrize("name", ["net", "PP-LiteSeg_v1.0+amp", "_x", "9", "Straße"])
def test_names_of_folders_are_taken(name: str) -> None:
    plan = planned(("model_name:net", f"model_name:{name}"))
    check_folder_names(plan)
    check_output_paths(plan, ROOT)


def test_recorded_texts_are_taken() -> None:
    for example in EXAMPLES:
        plan = make_plan(example["config"], example["mode"], PROFILES[example["profile"]], str(ROOT))
        check_folder_names(plan)
        check_output_paths(plan, ROOT)


UP = "../../../../../../evil"


@pytest.mark.parametrize(
    "change",
    [
        ("model_name:net", f"model_name:{UP}"),
        ("trainer:amp_train", f"trainer:x/{UP}"),
        ("gpu_list:0|0,1", f"gpu_list:192.168.0.1,192.168.0.2;/{UP}"),
        ("\ncast:null", f"\ncast:/{UP}"),
        ("--batch_size:1\n", f"--batch_size:/{UP}\n"),
        ("--precision:fp32", f"--precision:/{UP}"),
    ],
    ids=lambda change: change[0].strip().partition(":")[0],
)
def test_a_value_that_leads_a_log_out_is_refused(change: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="outside"):
        check_output_paths(planned(change, profile="ocr" if change[0].startswith("trainer") else "seg"), ROOT)


def test_a_literal_path_that_stays_inside_is_kept() -> None:
    check_output_paths(planned(("model_name:net", "model_name:a/../b")), ROOT)


@pytest.mark.parametrize("flags", [[], ["--compat"], ["--dry-run"], ["--allow-unknown-mode"]], ids=" ".join)
def test_a_run_outside_is_one_line_and_writes_nothing(
    flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "a" / "b" / "c" / "repo"
    root.mkdir(parents=True)
    (root / "x.txt").write_text(CONFIG.replace("model_name:net", "model_name:../../../x"))
    monkeypatch.chdir(root)
    mode = "../../../../x" if flags == ["--allow-unknown-mode"] else MODE
    assert run(["tipc", "run", *flags, "--profile", "seg", "x.txt", mode]) == 2
    assert run(["tipc", "matrix", "x.txt", "--mode", mode]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()] == ["a/b/c/repo/x.txt"]
