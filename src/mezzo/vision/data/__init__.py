"""Images and labels from files to batches: data sets, transforms, loaders."""

from mezzo._torch.data_loaders import translate_worker_errors
from mezzo.vision.data import transforms
from mezzo.vision.data._augment import CenterCrop, RandomCrop, RandomErase, RandomResizedCrop, ResizeShort
from mezzo.vision.data._classes import TRAIN, ImageFolder, ImageList, has_split, open_classification
from mezzo.vision.data._datasets import (
    ADE20K,
    DATASETS,
    Cityscapes,
    ListDataset,
    MiniDeepGlobeRoadExtraction,
    OpticDiscSeg,
    PascalVOC,
    PPHumanSeg14K,
)
from mezzo.vision.data._device import DeviceBatch, Prefetcher, ToInput
from mezzo.vision.data._errors import DataError
from mezzo.vision.data._images import SUFFIXES as IMAGE_SUFFIXES
from mezzo.vision.data._images import decode_image, read_image, read_label
from mezzo.vision.data._lists import check_listed, listed_path, read_list_file
from mezzo.vision.data._loader import HostBatch, Loader
from mezzo.vision.data._policies import AutoAugment
from mezzo.vision.data._sample import IGNORE, Dataset, Sample, Transform
from mezzo.vision.data._stream import Shard, Stream
from mezzo.vision.data.transforms import TRANSFORMS, Compose, Normalize

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
    "HostBatch",
    "Prefetcher",
    "ToInput",
    "DeviceBatch",
]
