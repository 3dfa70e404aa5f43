# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""CIFAR from the files of its official binary version."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple, Optional, Union

import numpy as np
from mmengine.dataset import BaseDataset
from mmengine.logging import print_log
from mmengine.registry import DATASETS

from ..errors import DataError, UsageError

_PIXELS = 3 * 32 * 32
_CIFAR10 = 'airplane automobile bird cat deer dog frog horse ship truck'
_CIFAR100 = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
    camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile
    cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp
    lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom
    oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
    possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake
    spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
    train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""


class _Variant(NamedTuple):
    """One of the two CIFAR distributions; the last label byte is the class."""

    folder: str
    files: dict[str, str]
    label_bytes: int
    pictures: dict[str, int]  # in each file
    classes: tuple[str, ...]


_VARIANTS = {
    'cifar10': _Variant(
        folder='cifar-10-batches-bin',
        files={'train': 'data_batch_*.bin', 'test': 'test_batch.bin'},
        label_bytes=1,
        pictures={'train': 10_000, 'test': 10_000},
        classes=tuple(_CIFAR10.split()),
    ),
    'cifar100': _Variant(
        folder='cifar-100-binary',
        files={'train': 'train.bin', 'test': 'test.bin'},
        label_bytes=2,
        pictures={'train': 50_000, 'test': 10_000},
        classes=tuple(_CIFAR100.split()),
    ),
}


def find_cifar_files(
    data_root: Union[str, os.PathLike], split: str = 'train', variant: str = 'cifar10'
) -> list[Path]:
    """The binary files of a split, in order."""
    spec, root = _VARIANTS[variant], Path(data_root)
    name = spec.files[split]
    for folder in (root, root / spec.folder):
        paths = [p for p in folder.glob(name) if p.name == name or p.stem.split('_')[-1].isdigit()]
        if paths:  # the tenth after the second, and no copies beside them
            return sorted(paths, key=lambda path: (len(path.name), path.name))
    raise FileNotFoundError(
        f'data_root={str(data_root)!r} has no {name}, neither itself nor in {spec.folder}/: unpack '
        f'the binary version of {variant.upper()} (https://www.cs.toronto.edu/~kriz/cifar.html, '
        f'"binary version") there, or set data_root to where it is'
    )


@DATASETS.register_module()
class CIFARBinary(BaseDataset):
    """CIFAR-10 or CIFAR-100 from the official binary files.

    Items are those of mmpretrain's ``CIFAR10``: ``img`` is 32 x 32 x 3, uint8,
    **RGB** (so ``to_rgb=False`` in the data preprocessor), ``gt_label`` is the
    class, for CIFAR-100 the fine one; mmpretrain's pipelines follow unchanged.
    All ``data_batch_*.bin`` that exist are used, so part of the training set
    will do.

    Args:
        data_root (str): The folder of the ``.bin`` files, or the folder into
            which the archive was unpacked.
        split (str): ``'train'`` or ``'test'``. Defaults to ``'train'``.
        variant (str): ``'cifar10'`` or ``'cifar100'``. Defaults to ``'cifar10'``.
        metainfo (dict, optional): Meta information; ``classes`` are CIFAR's own
            unless given. Defaults to None.
        **kwargs: Other arguments of mmengine's ``BaseDataset``.
    """

    def __init__(
        self,
        data_root: str,
        split: str = 'train',
        variant: str = 'cifar10',
        metainfo: Optional[dict] = None,
        **kwargs,
    ) -> None:
        if variant not in _VARIANTS:
            raise UsageError(f'CIFARBinary: variant={variant!r} must be cifar10 or cifar100')
        if split not in ('train', 'test'):
            raise UsageError(f'CIFARBinary: split={split!r} must be train or test')
        self.split = split
        self.variant = variant
        metainfo = {'classes': _VARIANTS[variant].classes, **(metainfo or {})}
        super().__init__(data_root=data_root, metainfo=metainfo, **kwargs)

    def load_data_list(self) -> list[dict]:
        files = find_cifar_files(self.data_root, self.split, self.variant)
        data_list = [item for path in files for item in self._read(path)]
        print_log(
            f'CIFARBinary: {len(data_list)} pictures of {self.variant} {self.split} from '
            f'{", ".join(path.name for path in files)} in {files[0].parent}',
            logger='current',
        )
        return data_list

    def get_cat_ids(self, idx: int) -> list[int]:
        """Class of one picture, as mmengine's ``ClassBalancedDataset`` asks for it."""
        return [int(self.get_data_info(idx)['gt_label'])]

    def _read(self, path: Path) -> list[dict]:
        spec = _VARIANTS[self.variant]
        record = spec.label_bytes + _PIXELS
        data = np.fromfile(path, np.uint8)
        if data.size == 0 or data.size % record:
            whole = spec.pictures[self.split]
            raise DataError(
                f'{path} has {data.size} bytes, which is no whole number of pictures of '
                f'{record} bytes ({spec.label_bytes} label + {_PIXELS} pixel bytes, '
                f'variant={self.variant!r}); the official file has {whole * record} bytes '
                f'({whole} pictures): unpack it again'
            )
        records = data.reshape(-1, record)
        labels = records[:, spec.label_bytes - 1].astype(int)
        if labels.max() >= len(spec.classes):
            raise DataError(
                f'{path} has label {labels.max()} in picture {int(labels.argmax())}, but '
                f'{self.variant} has {len(spec.classes)} classes; is it a file of another dataset?'
            )
        images = records[:, spec.label_bytes :].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return [
            {'img': image, 'gt_label': label}
            for image, label in zip(np.ascontiguousarray(images), labels.tolist(), strict=True)
        ]
