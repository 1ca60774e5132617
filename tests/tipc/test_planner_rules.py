"""Rules of the scripts that no recorded example shows."""

import subprocess
import sys

from tipc_plans import CONFIG, MODE

from mezzo.tipc import PROFILES, make_plan


def plan(profile, mode=MODE, text=CONFIG, **changes):
    for old, new in changes.items():
        key = {
            "gpus": "gpu_list:0|0,1",
            "trainer": "trainer:amp_train",
            "quant": "infer_quant:False",
            "cast": "cast:null",
        }[old]
        assert key in text
        text = text.replace(key, new)
    return make_plan(text, mode, PROFILES[profile])


def kinds(made):
    return [step.kind for step in made.steps]


def test_rec_trains_nothing_on_several_cards_and_goes_on():
    made = plan("rec", gpus="gpu_list:0,1")
    assert "train" not in kinds(made)
    assert "export" in kinds(made)
    assert any("trains nothing on several cards" in line for line in made.left_out)


def test_a_missing_quantisation_flag_moves_the_card_up():
    text = CONFIG.replace("infer_model:null", "infer_model:m")
    made = plan("ocr", "whole_infer", text, quant="infer_quant:")
    assert all("_gpus__use" in step.log for step in made.steps)
    assert any("precision_fp16" in step.log for step in made.steps)  # '0' is neither quantised nor not


def test_detection_counts_hosts_where_it_launches_on_them():
    made = plan("det", gpus="gpu_list:192.168.0.1,192.168.0.2;0", trainer="trainer:amp_train")
    assert "_nodes_1.log" in made.steps[0].log
    assert "_nodes_" not in made.steps[0].text
    made = plan("det", gpus="gpu_list:192.168.0.1,192.168.0.2;0,1")
    assert "_nodes_2.log" in made.steps[0].log
    assert "--ips=192.168.0.1,192.168.0.2 --gpus=0,1" in made.steps[0].text


def test_detection_copies_the_exported_model():
    made = plan("det", gpus="gpu_list:-1")
    copy = next(step for step in made.steps if step.kind == "shell")
    assert copy.text.startswith("cp ./test_tipc/output/net/")


def test_clas_links_the_quantised_model_before_it_is_used():
    text = CONFIG.replace("export1:null", "export1:quant.py").replace("infer_model:null", "infer_model:m")
    made = plan("clas", "whole_infer", text)
    assert [step.text for step in made.steps[1:3]] == [
        "ln -s model.pdmodel inference.pdmodel",
        "ln -s model.pdiparams inference.pdiparams",
    ]
    assert made.steps[1].enter == ("m/quant_post_static_model",)
    assert made.steps[3].enter == ("../../deploy",)


def test_weights_of_a_plain_training_go_to_pact_and_fpgm():
    text = (
        CONFIG.replace("pact_train:null", "pact_train:p.py")
        .replace("amp_train:", "norm_train:")
        .replace("--model_path:null", "--model_path:w")
    )
    made = make_plan(text.replace("trainer:amp_train", "trainer:norm_train|pact_train"), MODE, PROFILES["seg"])
    trainings = [step.text for step in made.steps if step.kind == "train"]
    assert "--model_path=w " in trainings[0]
    assert (
        "--model_path=./test_tipc/output/net/lite_train_lite_infer/norm_train_gpus_0_autocast_null/best_model/model.pdparams"
        in trainings[1]
    )
    assert "--model_path=w " not in trainings[1]
    made = make_plan(text.replace("trainer:amp_train", "trainer:pact_train"), MODE, PROFILES["seg"])
    assert "--model_path" not in made.steps[0].text  # there was none


def test_empty_items_are_the_shell_s():
    """An empty device set exports an empty variable; an empty trainer is no name, not even of an empty key."""
    made = plan("ocr", gpus="gpu_list:|0")
    assert [step.env["CUDA_VISIBLE_DEVICES"] for step in made.steps if step.kind == "infer"][:1] == [""]
    made = plan("ocr", trainer="trainer:||amp_train")
    assert made.steps[0].text.split()[1] == "tools/train.py"
    assert "  null" not in made.steps[0].text


def test_a_bar_in_a_tested_field_makes_the_test_an_error():
    made = plan("ocr", text=CONFIG.replace("eval:null", "eval:a|b").replace("norm_export:", "norm_export:a|"))
    assert kinds(made) == ["train", "train"]


def test_modes_of_quantisation():
    assert kinds(plan("seg-2022-04", "klquant_whole_infer")) == []
    assert "train" in kinds(plan("ocr", "klquant_whole_infer"))
    assert "train" in kinds(plan("clas", "klquant_whole_infer"))
    assert kinds(plan("medseg", "klquant_whole_infer")) == ["shell"]


def test_amp_words_of_each_repository():
    def training(profile, word):
        return plan(profile, cast=f"cast:{word}", gpus="gpu_list:0").steps

    def text(profile, word):
        return next(step.text for step in training(profile, word) if step.kind == "train")

    assert "Global.use_amp=True Global.scale_loss=1024.0" in text("ocr", "amp")
    assert "cast=" not in text("ocr", "amp")
    assert "cast=amp" in text("ocr-2022", "amp")
    assert "-o AMP.level=O2" in text("clas", "fp16")
    assert "-o AMP.level=O1" in text("clas", "amp")
    assert "-o AMP.use_amp=False" in text("clas", "null")
    assert "amp_level=O1" in text("det", "amp")
    assert "amp_level=O2" in text("yolo", "amp")
    assert "--amp --amp_level=O2" in text("gan", "fp16")
    assert (
        "tools/train.py --config configs/net/net.yml --precision fp16 --amp_level O1 --max_iters=30 --amp --amp_level 'O2'"
        in text("video", "fp16")
    )
    assert "amp=None" in text("dbnet", "null")


def test_seg_s_benchmark_has_words_of_its_own():
    text = CONFIG.replace("cast:null", "Global.auto_cast:fp16") + "log_iters:5;repeats:7"
    made = make_plan(text, "benchmark_train", PROFILES["seg"])
    assert "--precision=fp16" in made.steps[0].text
    assert made.steps[0].text.endswith("--amp_level=O2 --log_iters 5 --repeats 7")


def test_a_to_static_trainer_adds_its_argument():
    text = CONFIG + "==to_static_train_benchmark_params==\nto_static_train:--to_static"
    made = make_plan(text.replace("trainer:amp_train", "trainer:to_static_train"), MODE, PROFILES["seg"])
    assert "--amp_level O1 --to_static " in made.steps[0].text
    made = make_plan(text.replace("trainer:amp_train", "trainer:to_static_train"), MODE, PROFILES["det"])
    assert "--to_static" in made.steps[0].text
    made = make_plan(CONFIG.replace("trainer:amp_train", "trainer:strange"), MODE, PROFILES["det"])
    assert made.steps == ()


def test_planning_does_not_import_torch():
    code = (
        "import sys; from pathlib import Path; from mezzo.tipc import choose_profile, make_plan, plan_text\n"
        "text = sys.stdin.read(); profile, why = choose_profile(None, text, Path('/none'))\n"
        "assert plan_text(make_plan(text, 'lite_train_lite_infer', profile), why)\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=CONFIG, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
