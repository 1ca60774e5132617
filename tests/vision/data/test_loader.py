"""Batches as they travel and as a network takes them."""

import itertools
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from mezzo.vision.data import Compose, DataError, Loader, Prefetcher, Sample, Shard, Stream, ToInput
from mezzo.vision.data.transforms import Normalize, RandomHorizontalFlip


class Numbered:
    """Images whose pixels are the index; one of them may be bad."""

    num_classes = 10

    def __init__(self, length: int, bad: int | None = None, sizes: tuple[int, ...] = (4,)) -> None:
        self.length, self.bad, self.sizes = length, bad, sizes

    def __len__(self) -> int:
        return self.length

    def path(self, index: int) -> str:
        return f"{index}.png"

    def read(self, index: int) -> Sample:
        if index == self.bad:
            raise DataError(f"{index}.png: is no image")
        side = self.sizes[index % len(self.sizes)]
        image = np.full((side, 6, 3), index, np.uint8)
        image[:, :3, 0] = 100  # so that a flip shows
        return Sample(image=image, label=index % 10, path=self.path(index))


def flipping() -> Compose:
    return Compose([RandomHorizontalFlip(prob=0.5), Normalize(mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 0.2))])


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_and_restarts_change_nothing(workers: int) -> None:
    def images(first_step: int, count: int, workers: int) -> list[torch.Tensor]:
        stream = Stream(8, 3, seed=3, first_step=first_step)
        loader = Loader(Numbered(8), flipping(), stream, seed=3, workers=workers)
        found = [batch.images for batch in itertools.islice(loader, count)]
        loader.close()
        return found

    whole = images(0, 6, 0)
    for number, image in enumerate(images(2, 4, workers)):
        assert torch.equal(image, whole[2 + number])
    assert not torch.equal(whole[0], whole[2])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_file_is_one_line_also_from_a_worker(workers: int) -> None:
    loader = Loader(Numbered(4, bad=2), Compose([]), Shard(4, 2), workers=workers)
    with pytest.raises(DataError) as caught:
        list(loader)
    loader.close()
    assert str(caught.value) == "2.png: is no image"


def test_images_of_two_sizes_are_named() -> None:
    loader = Loader(Numbered(4, sizes=(4, 5)), Compose([]), Shard(4, 2))
    with pytest.raises(
        DataError, match=r"one size: 0.png has 6x4, 1.png 6x5; end the transforms with a crop or Resize"
    ):
        list(loader)


def test_images_travel_as_bytes_and_are_normalised_on_the_device() -> None:
    transforms = flipping()
    loader = Loader(Numbered(4), Compose([transforms.normalize]), Shard(4, 4))
    (raw,) = loader
    assert raw.images.dtype == torch.uint8
    assert raw.images.shape == (4, 4, 6, 3)
    (batch,) = Prefetcher(loader, ToInput(transforms.normalize, torch.device("cpu")), torch.device("cpu"))
    mean, std = np.array([0.5, 0.4, 0.3]), np.array([0.5, 0.25, 0.2])
    expected = (raw.images.numpy().astype(np.float64) / 255 - mean) / std
    # float32: three roundings of numbers up to 4
    np.testing.assert_allclose(batch.images.permute(0, 2, 3, 1).numpy(), expected, rtol=0, atol=1e-6)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.labels.dtype == torch.int64
    assert batch.paths == ["0.png", "1.png", "2.png", "3.png"]
    plain = ToInput(transforms.normalize, torch.device("cpu"), channels_last=False)(raw.images)
    assert plain.is_contiguous()


def test_a_normalisation_in_the_middle_stays_on_the_host() -> None:
    transforms = Compose([Normalize(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)), RandomHorizontalFlip(prob=1.0)])
    assert transforms.normalize is None
    (raw,) = Loader(Numbered(2), transforms, Shard(2, 2))
    assert raw.images.dtype == torch.float32
    assert ToInput(None, torch.device("cpu"))(raw.images).min() >= -1


@pytest.mark.gpu
def test_a_gpu_gets_the_same_numbers() -> None:
    device = torch.device("cuda")
    transforms = flipping()
    loader = Loader(Numbered(64), transforms, Stream(64, 16, seed=1), seed=1, workers=2, pinned=True)
    on_gpu = itertools.islice(Prefetcher(loader, ToInput(transforms.normalize, device), device), 8)
    host = Loader(Numbered(64), transforms, Stream(64, 16, seed=1), seed=1)
    on_cpu = Prefetcher(host, ToInput(transforms.normalize, torch.device("cpu")), torch.device("cpu"))
    for ours, right in zip(on_gpu, on_cpu, strict=False):
        torch.testing.assert_close(ours.images.cpu(), right.images, rtol=0, atol=1e-6)
        assert torch.equal(ours.labels.cpu(), right.labels)


def test_opencv_is_single_threaded_in_workers(tmp_path: Path) -> None:
    class Threads(Numbered):
        def read(self, index: int) -> Sample:
            return Sample(image=np.full((1, 1, 3), cv2.getNumThreads(), np.uint8), label=0, path="")

    loader = Loader(Threads(1), Compose([]), Shard(1, 1), workers=1)
    (batch,) = loader
    loader.close()
    assert batch.images.max() <= 1


def test_labels_of_two_sizes_and_missing_ones_are_named() -> None:
    class Labelled(Numbered):
        def read(self, index: int) -> Sample:
            label = None if self.bad == index else np.zeros((4 + index, 6), np.uint8)
            return Sample(image=np.zeros((4, 6, 3), np.uint8), label=label, path=self.path(index))

    with pytest.raises(DataError, match=r"a batch needs labels of one size: 0.png has 6x4, 1.png 6x5; end the"):
        list(Loader(Labelled(2), Compose([]), Shard(2, 2)))
    with pytest.raises(DataError, match=r"1.png: has no label, and training and evaluation need one"):
        list(Loader(Labelled(2, bad=1), Compose([]), Shard(2, 1)))


def test_workers_can_start_before_anything_is_read_and_the_batches_are_the_same() -> None:
    def loader(workers: int) -> Loader:
        return Loader(Numbered(8), flipping(), Stream(8, 3, seed=3), seed=1, workers=workers)

    plain = [batch.paths for batch in itertools.islice(loader(0), 4)]
    early = loader(2)
    try:
        early.start()
        started = early._loader._iterator
        assert started is not None
        assert all(worker.is_alive() for worker in started._workers)
        assert started._tasks_outstanding == 0
        early.start()  # a second time changes nothing
        assert [batch.paths for batch in itertools.islice(early, 4)] == plain
        assert early._loader._iterator is started  # no worker was forked again
    finally:
        early.close()
