"""A training that starts from weights behind an address: fetched, opened and loaded; or refused in one line."""

import http.server
import tarfile
import threading
from functools import partial

import pytest
from small_runs import person_config, train

from mezzo.checkpoint import save_pdparams
from mezzo.cli import run
from mezzo.vision.models import create_model

BACKBONE = {"type": "STDC1"}
HEAD = {"type": "PPLiteSeg", "num_classes": 2, "arm_out_chs": [32, 64, 128], "seg_head_inter_chs": [32, 64, 64]}
LOSSES = {"types": [{"type": "CrossEntropyLoss"}] * 3, "coef": [1, 1, 1]}


@pytest.fixture
def address(tmp_path, monkeypatch):
    """An archive of a backbone on a server of this machine."""
    folder = tmp_path / "served"
    folder.mkdir()
    save_pdparams(create_model("pp_liteseg_stdc1", num_classes=2).backbone, folder / "model.pdparams")
    with tarfile.open(folder / "PP_STDCNet1.tar.gz", "w:gz", compresslevel=1) as archive:
        archive.add(folder / "model.pdparams", "PP_STDCNet1/model.pdparams")
    quiet = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("MEZZO_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield f"http://127.0.0.1:{server.server_port}/PP_STDCNet1.tar.gz"
    server.shutdown()
    server.server_close()


def config(tmp_path, persons, address):
    model = {**HEAD, "backbone": {**BACKBONE, "pretrained": address}}
    return person_config(tmp_path, persons, model=model, loss=LOSSES, iters=1)


@pytest.mark.slow  # a step of PP-LiteSeg
def test_a_backbone_is_fetched_once_and_trained_from(tmp_path, persons, address, monkeypatch, capsys):
    monkeypatch.delenv("MEZZO_OFFLINE")
    path = config(tmp_path, persons, address)
    assert train("--config", path, "--save_dir", tmp_path / "out") == 0
    first = capsys.readouterr()
    assert "fetching http://127.0.0.1" in first.err
    assert "backbone: " in first.out
    assert "missing" not in first.out
    monkeypatch.setenv("MEZZO_OFFLINE", "1")  # now it is in the cache
    assert train("--config", path, "--save_dir", tmp_path / "again") == 0
    assert "fetching" not in capsys.readouterr().err


def test_without_a_network_one_line_says_where_to_put_the_file(tmp_path, persons, address, capsys):
    assert train("--config", config(tmp_path, persons, address), "--save_dir", tmp_path / "out") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "MEZZO_OFFLINE is set" in line
    assert f"put it at {tmp_path}/home/weights/127.0.0.1" in line
    assert "--opts model.backbone.pretrained=null" in line
    assert not (tmp_path / "out").exists()


def test_weights_of_a_backbone_are_not_exported_as_a_network(tmp_path, persons, address, capsys):
    path = config(tmp_path, persons, address)
    weights = tmp_path / "served/model.pdparams"
    assert run(["export", "--config", str(path), "--model_path", str(weights), "--save_dir", str(tmp_path / "d")]) == 2
    assert "backbone" in capsys.readouterr().err
    assert not (tmp_path / "d/deploy.yaml").exists()
