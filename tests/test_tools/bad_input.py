# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Small data of every kind to damage, and how a case of bad input is written down."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

import numpy as np

PROJECT = Path(__file__).parents[2]
CONFIGS = {
    'dense': 'configs/demo/resnet18_digits.py',
    'gated': 'configs/demo/resnet18_digits_gated.py',
    'fgc': 'configs/demo/resnet18_digits_fgc.py',
    'budget': 'configs/demo/resnet18_digits_budget.py',
    'detector': 'configs/demo/faster_rcnn_r18_digits_gated.py',
    'segmentor': 'configs/demo/pspnet_r18_digits_gated.py',
    'cifar': 'configs/resnet20_baseline_cifar10.py',
}
_TREES = {'detector': 'voc', 'segmentor': 'seg', 'cifar': 'cifar'}
SPLITS = ('train', 'val', 'test')


@dataclass
class Place:
    """The folder of one case, with a copy of the small data to damage."""

    path: Path
    data: Path

    def tree(self, name: str) -> Path:
        """A copy of ``few``, ``voc``, ``seg`` or ``cifar``."""
        target = self.path / name
        if not target.exists():
            shutil.copytree(self.data / name, target)
        return target

    @property
    def pictures(self) -> list[Path]:
        return sorted((self.tree('few') / 'train').rglob('*.png'))

    @property
    def annotations(self) -> list[Path]:
        return sorted((self.tree('voc') / 'digits' / 'Annotations').glob('*.xml'))

    @property
    def labels(self) -> list[Path]:
        return sorted((self.tree('seg') / 'gtFine' / 'train').rglob('*.png'))

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path


Prepare = Callable[[Place], object]


@dataclass(frozen=True)
class Case:
    """A mistake, and what the user is told.

    Attributes:
        name (str): Of the test.
        tool (str): Which of tools/.
        args (tuple): Its arguments; ``{place}``, ``{work}``, ``{data}`` and the
            names of CONFIGS are filled in.
        says (tuple): Words of the message.
        prepare (Callable, optional): Makes the damage.
        data (str, optional): Key of CONFIGS whose small data is read, as
            ``--cfg-options``.
        options (tuple): Further ``--cfg-options``.
    """

    name: str
    tool: str
    args: tuple[str, ...]
    says: tuple[str, ...]
    prepare: Optional[Prepare] = None
    data: Optional[str] = None
    options: tuple[str, ...] = ()

    def command(self, place: Place, work: Path) -> list[str]:
        """Arguments of the tool, the paths filled in."""
        fill = dict(place=place.path, work=work, data=place.data, **CONFIGS)
        args = [arg.format(**fill) for arg in self.args]
        options = [option.format(**fill) for option in self.options]
        if self.data:
            options = small_data(self.data, place) + options
        return args + (['--cfg-options', *options] if options else [])


def small_data(config: str, place: Place) -> list[str]:
    """Options that let a config read the small data of a case, two pictures a step."""
    name = _TREES.get(config, 'few')
    own = place.path / name
    root = own if own.exists() else place.data / name
    options = [f'{split}_dataloader.dataset.data_root={root}/' for split in SPLITS]
    options += ['train_dataloader.batch_size=2', 'train_cfg.max_epochs=1', 'demo_data=None']
    if config == 'segmentor':
        options.append('load_from=None')
    if config == 'fgc':
        options.append('custom_hooks.3.k=2')
    if config == 'cifar':
        options += [f'{split}_dataloader.num_workers=0' for split in SPLITS]
        options += [f'{split}_dataloader.persistent_workers=False' for split in SPLITS]
    return options


def make_small_data(demo: Path, root: Path) -> None:
    """Few pictures of each demo dataset and of CIFAR's form."""
    for split in ('train', 'val'):
        for digit in '01':
            folder = root / 'few' / split / digit
            folder.mkdir(parents=True)
            for picture in sorted((demo / 'classification' / split / digit).glob('*.png'))[:3]:
                shutil.copy(picture, folder)
    _small_voc(demo / 'detection' / 'VOCdevkit' / 'digits', root / 'voc' / 'digits')
    _small_seg(demo / 'segmentation', root / 'seg')
    records = np.random.default_rng(0).integers(0, 255, (6, 3073), dtype=np.uint8)
    records[:, 0] = range(6)
    (root / 'cifar').mkdir()
    for name in ('data_batch_1.bin', 'test_batch.bin'):
        records.tofile(root / 'cifar' / name)


def _small_voc(source: Path, target: Path) -> None:
    for folder in ('Annotations', 'JPEGImages', 'ImageSets/Main'):
        (target / folder).mkdir(parents=True)
    for image_set in ('trainval', 'test'):
        names = (source / 'ImageSets' / 'Main' / f'{image_set}.txt').read_text().split()[:3]
        (target / 'ImageSets' / 'Main' / f'{image_set}.txt').write_text('\n'.join(names) + '\n')
        for name in names:
            shutil.copy(source / 'Annotations' / f'{name}.xml', target / 'Annotations')
            shutil.copy(source / 'JPEGImages' / f'{name}.jpg', target / 'JPEGImages')


def _small_seg(source: Path, target: Path) -> None:
    for split in ('train', 'val'):
        for path in sorted((source / 'leftImg8bit' / split).rglob('*.png'))[:3]:
            name = path.name.replace('_leftImg8bit', '_gtFine_labelTrainIds')
            label = source / 'gtFine' / split / path.parent.name / name
            for file in (path, label):
                place = target / file.relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, place)
