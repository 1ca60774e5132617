"""Images and labels from files to batches: data sets, transforms, lite data."""

from mezzo.data import transforms
from mezzo.data._augment import CenterCrop, RandomCrop, RandomErase, RandomResizedCrop, ResizeShort
from mezzo.data._classes import TRAIN, ImageFolder, ImageList, has_split, open_classification
from mezzo.data._datasets import (
    ADE20K,
    DATASETS,
    Cityscapes,
    ListDataset,
    MiniDeepGlobeRoadExtraction,
    OpticDiscSeg,
    PascalVOC,
    PPHumanSeg14K,
)
from mezzo.data._device import DeviceBatch, Prefetcher, ToInput
from mezzo.data._errors import DataError
from mezzo.data._images import SUFFIXES as IMAGE_SUFFIXES
from mezzo.data._images import decode_image, read_image, read_label
from mezzo.data._lists import check_listed, listed_path, read_list_file
from mezzo.data._lite import LITE, LITE_MARKER, prepare
from mezzo.data._loader import Batch, Loader, translate_worker_errors
from mezzo.data._policies import AutoAugment
from mezzo.data._sample import IGNORE, Dataset, Sample, Transform
from mezzo.data._stream import Shard, Stream
from mezzo.data.transforms import TRANSFORMS, Compose, Normalize

__all__ = [
    "Sample",
    "Dataset",
    "Transform",
    "IGNORE",
    "DataError",
    "DATASETS",
    "ListDataset",
    "Cityscapes",
    "ADE20K",
    "PascalVOC",
    "OpticDiscSeg",
    "PPHumanSeg14K",
    "MiniDeepGlobeRoadExtraction",
    "ImageFolder",
    "ImageList",
    "open_classification",
    "TRAIN",
    "IMAGE_SUFFIXES",
    "has_split",
    "read_list_file",
    "listed_path",
    "check_listed",
    "read_image",
    "decode_image",
    "read_label",
    "TRANSFORMS",
    "Compose",
    "Normalize",
    "transforms",
    "RandomResizedCrop",
    "ResizeShort",
    "CenterCrop",
    "RandomCrop",
    "RandomErase",
    "AutoAugment",
    "Stream",
    "Shard",
    "Loader",
    "translate_worker_errors",
    "Batch",
    "Prefetcher",
    "ToInput",
    "DeviceBatch",
    "LITE",
    "LITE_MARKER",
    "prepare",
]
