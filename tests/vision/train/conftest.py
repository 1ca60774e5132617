"""Generated data, made once for all tests of training."""

from pathlib import Path

import pytest

from mezzo.vision.lite import prepare


@pytest.fixture(scope="session")
def persons(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare("mini_supervisely", tmp_path_factory.mktemp("data") / "persons", count=(12, 4, 4), size=(64, 64))


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare("imagenet_lite", tmp_path_factory.mktemp("data") / "shapes", count=(2, 1), size=(40, 40))
