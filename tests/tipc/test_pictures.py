"""Pictures of predictions beside labels: made from what a run's commands wrote, shown only from the run's own folder."""

import base64
import io
import json
import os
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from report_runs import full_run, labelled_run, record, write_run

from html_page import Page
from mezzo.tipc import load_run, merge_reports, write_reports
from mezzo.tipc._finish import finish_run
from mezzo.tipc._pictures import FOLDER, INDEX, SIDE, read_pictures, write_pictures

WIDTH, HEIGHT = 240, 120


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def inferred(tmp_path):
    """A repository in which two inferences wrote their label maps; a quarter of the second image is predicted wrongly."""
    rng = np.random.default_rng(0)
    label = np.zeros((HEIGHT, WIDTH), np.uint8)
    label[:, : WIDTH // 2] = 3
    label[:10] = 255  # pixels without a label
    wrong = np.where(label == 255, 0, label).astype(np.uint8)
    wrong[:, : WIDTH // 4] = 1
    for name in ("a", "b", "c"):
        save(tmp_path / f"data/images/{name}.png", rng.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8))
        save(tmp_path / f"data/labels/{name}.png", label)
        prediction = np.where(label == 255, 0, label).astype(np.uint8) if name == "a" else wrong
        save(tmp_path / f"results/labels/images/{name}.png", prediction)
    lines = "".join(f"images/{name}.png labels/{name}.png\n" for name in ("a", "b", "c"))
    (tmp_path / "data/list.txt").write_text(lines)
    command = "python deploy/python/infer.py --image_path=data/list.txt --save_dir=results"
    first = replace(record("infer-1", cwd=str(tmp_path), command=command), end="2024-01-01T00:00:01+00:00")
    second = replace(first, step="infer-2", end="2024-01-01T00:00:02+00:00")
    return write_run(tmp_path / "run", [first, second, record("train-1")])


def pixels_of(address):
    return Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2])))


def test_pictures_show_image_label_and_prediction(inferred):
    said = []
    write_pictures(load_run(inferred), said.append)
    assert said == []
    shown = read_pictures(load_run(inferred))
    # both steps wrote to the same folder, as the scripts' names have it: what is there is of the last one
    assert [(each.step, each.name, each.equal) for each in shown] == [
        ("infer-2", "a.png", 1.0),
        ("infer-2", "b.png", 0.75),
    ]
    (_, photo), (_, label), (_, prediction) = shown[1].parts
    assert [title for title, _ in shown[1].parts] == ["image", "label", "prediction"]
    assert pixels_of(photo).size == (SIDE, SIDE // 2)
    colours = np.array(pixels_of(label).convert("RGB"))
    assert colours[0, 0].tolist() == [255, 255, 255]  # no label
    assert colours[-1, 0].tolist() == [128, 128, 0]  # Pascal VOC's colour of class 3
    assert colours[-1, -1].tolist() == [0, 0, 0]
    predicted = np.array(pixels_of(prediction).convert("RGB"))
    assert predicted[-1, 0].tolist() == [128, 0, 0]
    assert predicted[-1, SIDE // 2 - 2].tolist() == [128, 128, 0]


def test_an_image_without_a_label_is_shown_with_its_prediction(inferred):
    (inferred.parent / "data/list.txt").write_text("images/a.png\nimages/b.png\n")
    write_pictures(load_run(inferred), print)
    (first, _) = read_pictures(load_run(inferred))
    assert [title for title, _ in first.parts] == ["image", "prediction"]
    assert first.equal is None


def test_a_damaged_file_is_one_line_and_the_run_goes_on(inferred):
    (inferred.parent / "data/images/a.png").write_bytes(b"\x89PNG broken")
    said = []
    finish_run(inferred, None, said.append)
    assert len(said) == 1
    assert said[0].startswith("no pictures of infer-2: ")
    assert "a.png" in said[0]


def test_other_runs_have_no_pictures(tmp_path):
    write_pictures(load_run(full_run(tmp_path)), print)
    assert not (tmp_path / FOLDER).exists()
    assert read_pictures(load_run(tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("../secret.png", None),
        ("/etc/passwd", None),
        ("a.svg", b"<svg onload=alert(1)>"),
        ("a.png", b"<script>alert(1)</script>"),
        ("a.png", b"\x89PNG\r\n\x1a\n" + b"0" * 40_000),  # too large
        ('a.png" onerror="alert(1)', None),
        (7, None),
    ],
)
def test_what_is_no_small_picture_of_the_folder_is_not_shown(name, data, tmp_path):
    folder = full_run(tmp_path / "run")
    (tmp_path / "run" / FOLDER).mkdir()
    save(tmp_path / "run/secret.png", np.zeros((4, 4), np.uint8))
    if data is not None:
        (folder / FOLDER / name).write_bytes(data)
    (folder / FOLDER / INDEX).write_text(json.dumps([{"step": "infer-1", "name": "x", "image": name}, 3, {"step": 1}]))
    assert read_pictures(load_run(folder)) == []


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    folder = full_run(tmp_path / "run")
    labelled_run(folder)
    (folder / FOLDER / "a-image.jpg").rename(tmp_path / "secret.jpg")
    os.symlink(tmp_path / "secret.jpg", folder / FOLDER / "a-image.jpg")
    (shown,) = read_pictures(load_run(folder))
    assert [title for title, _ in shown.parts] == ["label", "prediction"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', "[" * 100_000, "null"])
def test_a_damaged_index_shows_nothing(text, tmp_path):
    folder = full_run(tmp_path)
    (folder / FOLDER).mkdir()
    (folder / FOLDER / INDEX).write_text(text)
    assert read_pictures(load_run(folder)) == []
    assert "pictures" not in Page(write_reports(folder)[1].read_text()).texts


@pytest.mark.slow
def test_the_page_of_200_runs_stays_below_5_mb(tmp_path):
    log = "\n".join(f"2024-01-01 00:00:00 [INFO] line {n} of a long log, with some words in it" for n in range(200))
    for number in range(200):
        folder = tmp_path / "runs" / f"network_{number:03d}"
        full_run(folder)
        (folder / "train-1.log").write_text((folder / "train-1.log").read_text() + log)
        (folder / "eval-1.log").write_text(log)
        labelled_run(folder)
        (folder / FOLDER / "a-image.jpg").write_bytes(b"\xff\xd8\xff" + bytes(4000))
        text = (folder / "run.json").read_text().replace('"model": "lite"', f'"model": "network_{number:03d}"')
        (folder / "run.json").write_text(text)
        commands = (folder / "steps.jsonl").read_text().replace("lite.yml", "lite.yml " + "--long_option=value " * 25)
        (folder / "steps.jsonl").write_text(commands)
    page = merge_reports([tmp_path / "runs"], tmp_path / "all")[1]
    assert page.stat().st_size < 5e6
    text = page.read_text()
    assert (
        text.count("RuntimeError: &lt;img src=x onerror=alert(1)&gt; no half on this CPU") == 200
    )  # logs of failures stay
    assert text.count('<img alt="image of') > 50
    assert "more are in the folders of the runs" in text
