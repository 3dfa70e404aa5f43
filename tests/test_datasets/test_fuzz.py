# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Damaged annotations and label maps through the loaders of the tools: they load, or one error
names the file. Nothing hangs, and nothing else is raised."""

import io
import random
import re
import shutil
import signal
import struct
import zlib
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from mmengine.config import Config
from PIL import Image

from fgc_mm.errors import DataError, UsageError
from fgc_mm.runtime import launch

FEW, MANY = 150, 4000
SECONDS = 20  # for one file


class LateError(BaseException):
    """Not an Exception: what takes those for damage of the file would hide a hang."""


@contextmanager
def in_time():
    def late(*_):
        raise LateError(f'one file took more than {SECONDS} s')

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def loader_of(tmp_path, monkeypatch):
    """Builds the Runner of a demo config as the tools do; gives its guarded loaders."""
    monkeypatch.chdir(launch.__file__.rpartition('/fgc_mm/')[0])

    def build(name, root):
        cfg = Config.fromfile(f'configs/demo/{name}.py')
        cfg.work_dir, cfg.launcher, cfg.load_from = str(tmp_path / 'work'), 'none', None
        cfg.log_level = 'ERROR'
        for split in ('train', 'val', 'test'):
            cfg[f'{split}_dataloader'].dataset.data_root = f'{root}/'
        cfg.train_dataloader.dataset.serialize_data = False  # it collects garbage each time
        cfg.train_dataloader.update(
            batch_size=1, sampler=dict(type='DefaultSampler', shuffle=False)
        )
        runner = launch.build_runner(cfg)
        return cfg, lambda: next(iter(runner.build_dataloader(cfg.train_dataloader)))

    return build


# -- XML ------------------------------------------------------------------------------------------

NUMBERS = ['', '-1', '0', '1', '1e3', '1e400', '-inf', 'nan', '0x10', '7' * 500, 'ten', ' 5 ', '١٢']
MARKUP = [
    '<',
    '>',
    '&',
    '&amp;',
    '&x;',
    ']]>',
    '<!--',
    '<?x?>',
    '\x00',
    '\ufeff',
    '</object>',
    '<object>',
]


def damage_xml(content: bytes, rng: random.Random) -> bytes:
    """One to three changes of the kinds that disks, editors and scripts make."""
    for _ in range(rng.randint(1, 3)):
        content = rng.choice([_flip, _cut, _double, _other_number, _other_tag, _insert, _encode])(
            content, rng
        )
    return content


def _flip(content, rng):
    if not content:
        return content
    place = rng.randrange(len(content))
    return content[:place] + bytes([rng.randrange(256)]) + content[place + 1 :]


def _cut(content, rng):
    begin, end = sorted(rng.randint(0, len(content)) for _ in range(2))
    return rng.choice([content[:begin], content[:begin] + content[end:]])


def _double(content, rng):
    begin, end = sorted(rng.randint(0, len(content)) for _ in range(2))
    return content[:end] + content[begin:end] * rng.randint(1, 3) + content[end:]


def _other_number(content, rng):
    found = list(re.finditer(rb'>(\d+)<', content))
    if not found:
        return content
    match = rng.choice(found)
    return content[: match.start(1)] + rng.choice(NUMBERS).encode() + content[match.end(1) :]


def _other_tag(content, rng):
    found = sorted(set(re.findall(rb'<(\w+)>', content)))
    if not found:
        return content
    old, new = rng.choice(found), rng.choice([*found, b'x', b'size', b'bndbox'])
    count = rng.choice([1, 2, -1])
    return content.replace(b'<%s>' % old, b'<%s>' % new, count).replace(
        b'</%s>' % old, b'</%s>' % new, count
    )


def _insert(content, rng):
    place = rng.randint(0, len(content))
    piece = rng.choice(MARKUP) * rng.choice([1, 1, 1, 5000])
    return content[:place] + piece.encode() + content[place:]


def _encode(content, rng):
    text = content.decode('utf-8', 'replace')
    kind = rng.choice(['utf-16', 'latin-1', 'utf-8-sig', 'declared'])
    if kind == 'declared':
        name = rng.choice(['klingon', 'utf-16', 'ascii', 'utf-7'])
        return b'<?xml version="1.0" encoding="%s"?>' % name.encode() + content
    return text.encode(kind, 'replace')


# The file is whole, but no object in it is to be trained.
NOTHING_LEFT = [
    'train_dataloader.dataset has no items',
    'train_dataloader.dataset: metainfo.classes=',
]


def fuzz_xml(demo_root, tmp_path, loader_of, count, seed):
    source = demo_root / 'detection' / 'VOCdevkit' / 'digits'
    root = tmp_path / 'voc'
    tree = root / 'digits'
    for folder in ('Annotations', 'JPEGImages', 'ImageSets/Main'):
        (tree / folder).mkdir(parents=True)
    (tree / 'ImageSets' / 'Main' / 'trainval.txt').write_text('000001\n')
    shutil.copy(source / 'JPEGImages' / '000001.jpg', tree / 'JPEGImages')
    originals = [path.read_bytes() for path in sorted((source / 'Annotations').glob('*.xml'))[:40]]
    target = tree / 'Annotations' / '000001.xml'
    _, load = loader_of('faster_rcnn_r18_digits', root)
    rng, outcome = random.Random(seed), dict(loaded=0, refused=0)
    for _ in range(count):
        content = damage_xml(rng.choice(originals), rng)
        target.write_bytes(content)
        try:
            with in_time():
                batch = load()
        except (DataError, UsageError) as error:
            assert refused_well(error, [target, *NOTHING_LEFT]), (error, content)
            outcome['refused'] += 1
        else:
            boxes = batch['data_samples'][0].gt_instances.bboxes.tensor
            assert bool(torch.isfinite(boxes).all()), content
            assert bool((boxes[:, 2:] > boxes[:, :2]).all()), content
            outcome['loaded'] += 1
    return outcome


def refused_well(error, named):
    """Whether a message names one of these, is short, and shows no inner workings."""
    message = str(error)
    return (
        any(str(name) in message for name in named)
        and len(message) < 1000
        and ('Traceback' not in message)
    )


# -- label maps -----------------------------------------------------------------------------------

MODES = ['1', 'L', 'P', 'RGB', 'RGBA', 'LA', 'I', 'I;16', 'CMYK', 'F']
FORMATS = ['PNG', 'BMP', 'GIF', 'TIFF', 'JPEG']


def damage_label(content: bytes, rng: random.Random) -> bytes:
    """A damaged file, or a whole one of something else."""
    kind = rng.choice(['bytes', 'bytes', 'values', 'size', 'mode', 'header'])
    if kind == 'bytes':
        for _ in range(rng.randint(1, 3)):
            content = rng.choice([_flip, _cut, _double])(content, rng)
        return content
    if kind == 'header':
        return _with_header(content, rng)
    labels = np.array(Image.open(io.BytesIO(content)))
    if kind == 'values':
        spots = rng.choice([1, 50, labels.size])
        places = np.random.default_rng(rng.randrange(1 << 30)).integers(0, labels.size, spots)
        labels.ravel()[places] = rng.choice([0, 5, 6, 19, 128, 254, 255])
        return _saved(Image.fromarray(labels), 'PNG')
    if kind == 'size':
        size = rng.choice(
            [(1, 1), (128, 127), (127, 128), (256, 256), (64, 64), (128, 1), (1, 128)]
        )
        return _saved(Image.fromarray(labels).resize(size, Image.NEAREST), 'PNG')
    image = Image.fromarray(labels)
    try:
        mode = rng.choice(MODES)
        image = image.convert('I').convert(mode) if mode == 'I;16' else image.convert(mode)
        return _saved(image, rng.choice(FORMATS))
    except (OSError, ValueError, KeyError):  # modes a format cannot hold
        return _saved(image.convert('RGB'), 'PNG')


def _saved(image, file_format):
    content = io.BytesIO()
    image.save(content, format=file_format)
    return content.getvalue()


def _with_header(content, rng):
    """A PNG whose first chunk says something else, its checksum right."""
    width, height = (rng.choice([0, 1, 128, 200, 1 << 14, 1 << 31, 3]) for _ in range(2))
    depth, color = rng.choice([(8, 0), (16, 0), (1, 0), (8, 2), (8, 3), (8, 6), (3, 0), (8, 7)])
    chunk = b'IHDR' + struct.pack('>IIBBBBB', width, height, depth, color, 0, 0, rng.choice([0, 1]))
    return content[:12] + chunk + struct.pack('>I', zlib.crc32(chunk)) + content[33:]


def fuzz_labels(demo_root, tmp_path, loader_of, count, seed):
    source = demo_root / 'segmentation'
    labels = sorted((source / 'gtFine' / 'train').rglob('*_labelTrainIds.png'))[:40]
    root, first = tmp_path / 'seg', labels[0]
    image = first.name.replace('_gtFine_labelTrainIds', '_leftImg8bit')
    target = root / first.relative_to(source)
    picture = root / 'leftImg8bit' / 'train' / first.parent.name / image
    for path in (target, picture):
        path.parent.mkdir(parents=True)
    shutil.copy(source / picture.relative_to(root), picture)
    cfg, load = loader_of('pspnet_r18_digits', root)
    classes = len(cfg.metainfo.classes)
    originals = [path.read_bytes() for path in labels]
    rng, outcome = random.Random(seed), dict(loaded=0, refused=0)
    for number in range(count):
        content = damage_label(rng.choice(originals), rng)
        target.write_bytes(content)
        try:
            with in_time():
                batch = load()
        except (DataError, UsageError) as error:
            assert refused_well(error, [target]), (number, error)
            outcome['refused'] += 1
        else:
            found = batch['data_samples'][0].gt_sem_seg.data
            assert found.shape == (1, 128, 128)
            assert set(found.unique().tolist()) <= {*range(classes), 255}
            outcome['loaded'] += 1
    return outcome


FUZZERS = dict(xml=fuzz_xml, labels=fuzz_labels)


@pytest.mark.parametrize('kind', FUZZERS)
def test_damaged_files(kind, demo_root, tmp_path, loader_of):
    outcome = FUZZERS[kind](demo_root, tmp_path, loader_of, FEW, seed=1)
    assert min(outcome.values()) > FEW // 20, outcome  # both happen


@pytest.mark.slow
@pytest.mark.parametrize('kind', FUZZERS)
def test_many_damaged_files(kind, demo_root, tmp_path, loader_of):
    outcome = FUZZERS[kind](demo_root, tmp_path, loader_of, MANY, seed=2)
    print(kind, outcome)
