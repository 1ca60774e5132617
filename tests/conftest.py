"""Every test starts from the same state and leaves none behind."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings

from report_browser import NO_BROWSER, Browser, find_browser
from tiny_nets import TinyClassifier, tiny_segmenter

if TYPE_CHECKING:
    from mezzo.export import Deployed

# The same examples each time, so that a change is what makes a test fail; `--hypothesis-profile=explore` looks further.
settings.register_profile("fixed", derandomize=True, deadline=None)  # a busy machine is no failure
settings.register_profile("explore", derandomize=False)
settings.load_profile("fixed")

# They hold no doctests, and pytest takes two modules of one name in one run for a mistake.
collect_ignore_glob = ["*/conftest.py"]


@pytest.fixture(autouse=True, scope="session")
def no_real_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a test or a process of it fetches does not land in the home folder; nothing is fetched unless a test asks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEZZO_HOME", str(tmp_path_factory.mktemp("mezzo_home")))
        patch.setenv("MEZZO_OFFLINE", "1")
        patch.delenv("MEZZO_HISTORY", raising=False)
        yield


@pytest.fixture(autouse=True)
def clean_torch_state() -> Iterator[None]:
    """Seed, default dtype, autocast state and threads are as if the test ran alone."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    default_dtype = torch.get_default_dtype()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(default_dtype)
    for device_type in ("cpu", "cuda", "mtia"):  # the last one is on inside a layer that stays in half
        assert not torch.is_autocast_enabled(device_type), f"the test left autocast on for {device_type}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu skip with a reason where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Leave what is loaded by now out of later garbage collections: six thousand tests are a heap that takes long to walk."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def in_triton() -> Iterator[None]:
    """Steps are Triton's."""
    from mezzo.optim import step_tier

    with step_tier("triton"):
        yield


@pytest.fixture(scope="session")
def segmenter(tmp_path_factory: pytest.TempPathFactory) -> "Deployed":
    """An exported segmentation network, in float32 and in half."""
    from mezzo.export import Description, ExportOptions, export_model

    transforms = ({"type": "Resize", "target_size": [32, 24]}, {"type": "Normalize"})
    described = Description(task="segmentation", model_name="tiny", num_classes=3, transforms=transforms)
    options = ExportOptions(
        save_dir=tmp_path_factory.mktemp("segmenter"), precisions=("fp16", "bf16"), min_agreement=0.9
    )
    return export_model(tiny_segmenter(), described, options).model


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> "Deployed":
    """An exported classifier with names of its classes."""
    from mezzo.export import ExportOptions, export_model
    from mezzo.vision.export import describe_classifier

    torch.manual_seed(0)
    described = describe_classifier("tiny", 4, image_size=24, resize_size=32, class_names=("ant", "bee", "cat", "dog"))
    options = ExportOptions(save_dir=tmp_path_factory.mktemp("classifier"))
    return export_model(TinyClassifier().eval(), described, options).model


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    """A Chromium without a window; the test is skipped where there is none."""
    program = find_browser()
    if program is None:
        pytest.skip(NO_BROWSER)
    (tmp_path / "home").mkdir()
    with Browser(program, tmp_path / "home") as browser:
        yield browser


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say plainly that pages were not looked at in a browser."""
    skipped = sum(NO_BROWSER in str(each.longrepr) for each in terminalreporter.stats.get("skipped", []))
    if skipped:
        terminalreporter.write_line(f"{skipped} tests of pages were skipped: {NO_BROWSER}")


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder with three images of two sizes."""
    import cv2
    import numpy as np

    folder = tmp_path / "pictures"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, size in (("a.png", (40, 60)), ("b.jpg", (40, 60)), ("c.png", (50, 30))):
        small = rng.integers(0, 256, (5, 5, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / name), cv2.resize(small, size[::-1]))
    return folder
