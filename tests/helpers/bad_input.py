# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The table of bad input: reading it, and few pictures of every kind to damage."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PROJECT = Path(__file__).parents[2]
TABLE = PROJECT / 'tests/test_cli/bad_input.txt'
CONFIGS = {
    'dense': 'configs/demo/resnet18_digits.py',
    'gated': 'configs/demo/resnet18_digits_gated.py',
    'fgc': 'configs/demo/resnet18_digits_fgc.py',
    'budget': 'configs/demo/resnet18_digits_budget.py',
    'detector': 'configs/demo/faster_rcnn_r18_digits_gated.py',
    'segmentor': 'configs/demo/pspnet_r18_digits_gated.py',
    'cifar': 'configs/paper/resnet20_baseline_cifar10.py',
}
_TREES = {'detector': 'voc', 'segmentor': 'seg', 'cifar': 'cifar'}
_SPLITS = ('train', 'val', 'test')
_WITH_WORK_DIR = ('train', 'test', 'slim', 'export')


@dataclass
class Place:
    """The folder of one case, with copies of the few pictures where they are damaged."""

    path: Path
    data: Path

    def tree(self, name: str) -> Path:
        """A copy of ``few``, ``voc``, ``seg`` or ``cifar``, made when first asked for."""
        target = self.path / name
        if not target.exists():
            shutil.copytree(self.data / name, target)
        return target


@dataclass(frozen=True)
class Case:
    """A line of the table."""

    section: str
    name: str
    command: str
    damage: str
    words: tuple[str, ...]
    fast: bool

    def prepare(self, place: Place) -> None:
        """Do the damage."""
        import damages

        name, colon, content = self.damage.partition(':')
        if colon:
            text = _fill(content.strip(), place, Path()).replace('\\n', '\n')
            raw = text.encode().decode('unicode_escape') if '\\x' in text else text
            (place.path / name).write_bytes(raw.encode('latin-1' if '\\x' in text else 'utf-8'))
        elif name:
            function, *args = name.split()
            getattr(damages, function)(place, *args)

    def arguments(self, place: Place, work: Path) -> tuple[str, list[str]]:
        """The tool, and its arguments with all paths and options filled in."""
        tool, *rest = (_fill(token, place, work) for token in shlex.split(self.command))
        config = next((token for token in rest if token in CONFIGS), None)
        own = (
            f'{place.path}/mine.py' in rest and '_base_' in self.damage and '::' not in self.damage
        )
        args = [CONFIGS.get(token, token) for token in rest]
        options = []
        if tool not in ('tradeoff', 'sweep') and '--cfg-options' not in args:
            options = [t for t in args if '=' in t and not t.startswith('-')]
        args = [token for token in args if token not in options]
        if tool in _WITH_WORK_DIR and args and '--work-dir' not in args:
            args += ['--work-dir', str(work)]
        if '--cfg-options' not in args and (config or own):
            options = small_data(config or 'gated', place) + options
        return tool, args + (['--cfg-options', *options] if options else [])


def read_table() -> list[Case]:
    """All cases; those with a star before their name belong to the fast tests."""
    cases, section = [], ''
    for line in TABLE.read_text(encoding='utf-8').splitlines():
        if line.startswith('['):
            section = line.strip('[]')
        elif line.strip() and not line.startswith('#'):
            name, command, damage, words = (part.strip() for part in line.split('|'))
            said = tuple(word.strip() for word in words.split(' & '))
            fast = name.startswith('*')
            cases.append(Case(section, name.lstrip('* '), command, damage, said, fast))
    return cases


def filled(words: str, place: Place, work: Path) -> str:
    """Words of a message, the paths filled in."""
    return _fill(words, place, work)


def _fill(text: str, place: Place, work: Path) -> str:
    known = {'place': place.path, 'data': place.data, 'work': work}
    known.update({name: PROJECT / path for name, path in CONFIGS.items()})
    for name, value in known.items():
        text = text.replace(f'{{{name}}}', str(value))
    return text


def small_data(config: str, place: Place) -> list[str]:
    """Options that let a config read the few pictures of a case, two a step."""
    name = _TREES.get(config, 'few')
    own = place.path / name
    root = own if own.exists() else place.data / name
    options = [f'{split}_dataloader.dataset.data_root={root}/' for split in _SPLITS]
    options += ['train_dataloader.batch_size=2', 'train_cfg.max_epochs=1', 'demo_data=None']
    if config in ('segmentor', 'budget'):
        options.append('load_from=None')
    if config == 'fgc':
        options.append('custom_hooks.3.k=2')
    if config == 'cifar':
        options += [f'{split}_dataloader.num_workers=0' for split in _SPLITS]
        options += [f'{split}_dataloader.persistent_workers=False' for split in _SPLITS]
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
        names = (source / 'ImageSets' / 'Main' / f'{image_set}.txt').read_text().split()[:4]
        (target / 'ImageSets' / 'Main' / f'{image_set}.txt').write_text('\n'.join(names) + '\n')
        for name in names:
            shutil.copy(source / 'Annotations' / f'{name}.xml', target / 'Annotations')
            shutil.copy(source / 'JPEGImages' / f'{name}.jpg', target / 'JPEGImages')


def _small_seg(source: Path, target: Path) -> None:
    for split in ('train', 'val'):
        for path in sorted((source / 'leftImg8bit' / split).rglob('*.png'))[:4]:
            name = path.name.replace('_leftImg8bit', '_gtFine_labelTrainIds')
            label = source / 'gtFine' / split / path.parent.name / name
            for file in (path, label):
                place = target / file.relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, place)
