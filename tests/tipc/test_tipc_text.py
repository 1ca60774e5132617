"""From text to fields to a plan: the shell's rules against bash itself, and properties over any text."""

import json
import os
import subprocess

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tipc_plans import EXAMPLES

from mezzo.tipc import MODES, PROFILES, ConfigError, Plan, choose_profile, dialect_of, lint, make_plan, read_config
from mezzo.tipc._shell import find_shell_syntax, words
from mezzo.tipc._text import after_first_colon, argument, echoed, evaluated, for_mode, items, kept_lines, second_piece

PLAIN = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=40)
LISTS = st.text("ab|=: ", max_size=12)


def bash(script, *arguments):
    result = subprocess.run(["bash", "-c", script, "bash", *arguments], capture_output=True, text=True, check=True)
    return result.stdout


def test_lines_lose_empty_ones_after_the_limit_and_keep_blank_ones():
    assert kept_lines("a\n\n \nb\n") == ("a", " ", "b")
    assert kept_lines("a\n\nb\nc", 3) == ("a", "b")
    assert kept_lines("\ufeffa\r\nb\r\n") == ("a", "b")


@settings(max_examples=40, deadline=None)
@given(LISTS)
def test_lists_are_split_as_bash_splits_them(value):
    # glob characters are not drawn: the shell would look for files
    printed = bash('IFS="|"; for item in ${1}; do printf "<%s>" "$item"; done', value)
    assert "".join(f"<{each}>" for each in items(value)) == printed


@settings(max_examples=40, deadline=None)
@given(st.text("k:v =", max_size=10))
def test_values_are_the_second_piece_as_in_bash(line):
    printed = bash('IFS=":"; array=(${1}); printf "%s" "${array[1]}"', line)
    assert second_piece(line) == printed


@settings(max_examples=40, deadline=None)
@given(st.text("ab=| ", max_size=14), st.sampled_from(["a", "b", "ab"]))
def test_mode_lists_are_read_as_in_bash(value, mode):
    script = """
    IFS="|"
    for each in ${1}; do
        IFS="="; array=(${each}); IFS="|"
        if [[ "${array[0]}" = "$2" ]]; then printf "%s" "${array[1]}"; break; fi
    done
    """
    assert for_mode(value, mode) == bash(script, value, mode)


@settings(max_examples=40, deadline=None)
@given(st.text("ab\\nt -", max_size=12))
def test_status_lines_are_echoed_as_by_bash(text):
    assert echoed("x" + text) == bash('echo -e "$1"', "x" + text).removesuffix("\n")


@settings(max_examples=40, deadline=None)
@given(st.text("ab| ", max_size=12))
def test_a_bar_in_a_command_becomes_a_blank_as_by_eval(text):
    words_of = bash('IFS="|"; set -f; args() { printf "<%s>" "$@"; }; eval args x $1', text)
    assert "".join(f"<{word}>" for word in evaluated(f"x {text}").split()) == words_of


def test_arguments():
    assert argument("--a", "1") == "--a=1"
    assert argument("-o Global.device", "gpu") == "-o Global.device=gpu"
    assert [argument("null", "1"), argument("--a", "null"), argument("--a", ""), argument("--a", " ")] == [" "] * 4
    assert after_first_colon("a:https://b") == "https://b"
    assert after_first_colon("plain") == "plain"


def test_dialects_by_their_landmarks():
    known = {example["dialect"] for example in EXAMPLES if "dialect" in example}
    for example_ in EXAMPLES:
        if "dialect" in example_:
            assert dialect_of(example_["config"]).replace("clas-52", "standard-51") == example_["dialect"].replace(
                "clas-52", "standard-51"
            )
    assert {"tutorial-32", "seg-52"} <= known
    assert dialect_of("") == dialect_of("no header") == "unknown"


def test_the_profile_is_the_one_named_the_repository_s_or_the_text_s(tmp_path):
    seg = next(each["config"] for each in EXAMPLES if each["profile"] == "seg")
    assert choose_profile("ocr", seg, tmp_path)[0].name == "ocr"
    assert choose_profile(None, seg, tmp_path)[0].name == "seg"
    script = tmp_path / "test_tipc" / "test_train_inference_python.sh"
    script.parent.mkdir()
    for profile, text in {
        "clas": "CLS_ROOT_PATH=$(pwd) func_inference",
        "gan": "set_export_weight_path=",
        "tutorial-early": 'trainer_py= LOG_PATH="./log/${model_name}"',
        "parl": "xparl stop; trainer_py=",
        "ocr": "func_inference cat ${save_log}/train.log",
        "template": "func_inference load_norm_train_model=",
        "ocr-2022": "func_inference",
        "seg-2022-04": "deploy.yaml -le 26",
    }.items():
        script.write_text(text)
        assert choose_profile(None, seg, tmp_path)[0].name == profile
    (tmp_path / "test_tipc/utils_func.sh").write_text("")
    assert choose_profile(None, seg, tmp_path)[0].name == "det"
    script.write_text("exec python -m mezzo tipc run")
    assert choose_profile(None, seg, tmp_path)[0].name == "seg"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "its headers stand at none of the known places; name one with --profile"),
        ("===ptq_params===\n", "of another script"),
        ("\n".join("=" if i in (0, 8, 11) else "x" for i in range(14)), "14-line form"),
    ],
)
def test_texts_without_profile_are_refused(text, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        choose_profile(None, text, tmp_path)


def test_unknown_profiles_and_files_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown profile 'sge'; did you mean 'seg'\?"):
        choose_profile("sge", "", tmp_path)
    with pytest.raises(ConfigError, match=r"cannot read configuration: .*nowhere.txt: no such file"):
        read_config(tmp_path / "nowhere.txt")
    (tmp_path / "nul").write_bytes(b"a\0b")
    with pytest.raises(ConfigError, match="NUL"):
        read_config(tmp_path / "nul")
    (tmp_path / "big").write_bytes(b"x" * (1 << 20) + b"y")
    with pytest.raises(ConfigError, match="larger than 1048576 bytes"):
        read_config(tmp_path / "big")


def texts():
    """Any text, and real ones with lines cut out, doubled or changed."""
    real = st.sampled_from([example["config"] for example in EXAMPLES[::7]])
    changed = st.tuples(real, st.integers(0, 60), st.text(max_size=30), st.booleans()).map(_changed)
    return st.text(max_size=400) | changed


def _changed(drawn):
    text, place, line, replaces = drawn
    lines = text.split("\n")
    lines[place : place + replaces] = [line]
    return "\n".join(lines)


@settings(max_examples=150, deadline=None)
@given(texts(), st.sampled_from(sorted(PROFILES)), st.sampled_from([*MODES, "other", ""]))
@example("", "clas", "whole_infer")
def test_any_text_gives_a_plan_that_goes_through_json(text, profile, mode):
    plan = make_plan(text, mode, PROFILES[profile])
    assert Plan.from_json(plan.as_json()) == plan
    for finding in lint(text, mode, PROFILES[profile], plan):
        assert str(finding).startswith(("error: ", "warning: "))
    dialect_of(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[]", "object"),
        ('{"steps": []}', "model"),
        ('{"modle": 1}', "modle"),
    ],
)
def test_plans_that_are_none_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        Plan.from_json(text)


def test_a_plan_with_odd_steps_is_refused():
    plan = json.loads(make_plan(EXAMPLES[0]["config"], "whole_infer", PROFILES["seg"]).as_json())
    with pytest.raises(ValueError, match="'steps' is 1"):
        Plan.from_json(json.dumps({**plan, "steps": 1}))
    with pytest.raises(ValueError, match="color"):
        Plan.from_json(json.dumps({**plan, "steps": [{"color": 1}]}))


@settings(max_examples=60, deadline=None)
@given(st.text("ab ;&|`$()\"'\\", max_size=10))
def test_texts_that_are_let_pass_run_one_command_only(text):
    """Independent judge: bash's own parser, asked for the number of commands of a text it does not run."""
    if find_shell_syntax(text) or any(char in text for char in "()<>") or not text.strip():
        return
    checked = subprocess.run(["bash", "-n", "-c", f"echo {text}"], capture_output=True, text=True)
    if checked.returncode:
        return  # quotes that do not close: bash refuses it as well
    printed = subprocess.run(
        ["bash", "-c", f"echo() {{ printf 'once\\n'; }}; echo {text}"], capture_output=True, text=True
    )
    assert printed.stdout == "once\n"
    assert printed.stderr == ""


def test_dangerous_characters_count_outside_of_quotes_only():
    assert find_shell_syntax("a --x='1;2' --y=\"3&4\" > log 2>&1 ") == []
    assert find_shell_syntax("a; b") == [";"]
    assert find_shell_syntax("a && b") == ["&", "&"]
    assert find_shell_syntax('a "$(b)"') == ["$("]
    assert find_shell_syntax("a `b`") == ["`", "`"]
    assert find_shell_syntax("a '`b`' \\; c") == []
    assert find_shell_syntax("a | b") == ["|"]
    assert find_shell_syntax("true $'\\''; touch x #'") != []
    assert find_shell_syntax("cat <(b) >(c)") == ["<(", ">("]
    assert words("a 'b c' \"d\"") == ("a", "b c", "d")
    assert words("a 'b") == ()


def test_a_pipe_in_place_of_a_text_or_a_script_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "text.txt")
    with pytest.raises(ConfigError, match=r"text\.txt: is a named pipe"):
        read_config(tmp_path / "text.txt")
    (tmp_path / "test_tipc").mkdir()
    os.mkfifo(tmp_path / "test_tipc" / "test_train_inference_python.sh")
    with pytest.raises(ConfigError, match="name one with --profile"):
        choose_profile(None, "", tmp_path)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"steps": [{"name": 3, "kind": "x", "text": "y"}]}, "'name' is 3"),
        ({"steps": [{"name": "a", "kind": "x", "text": "y", "needs": 3}]}, "'needs' is 3"),
        ({"left_out": [[]]}, r"'left_out' is \[\[\]\]"),
        ({"model": 10**400}, "too large"),
    ],
)
def test_a_plan_with_values_of_other_types_is_refused(changes, word):
    plan = Plan(model="m", mode="x", profile="seg", log_dir="log", status_file="s", banner=False, steps=())
    with pytest.raises(ValueError, match=word):
        Plan.from_json(json.dumps(json.loads(plan.as_json()) | changes))
