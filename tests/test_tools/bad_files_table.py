# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Damaged checkpoints, datasets and pictures, and the words of the message each gets."""

from __future__ import annotations

import io
import shutil
import zipfile

import cv2
import numpy as np
import torch
from bad_input import Case, Place
from PIL import Image


def data(name, config, prepare, says, options=(), tool='train') -> Case:
    """Damaged data, read by a training or a test."""
    args = (f'{{{config}}}', '--work-dir', '{work}')
    if tool == 'test':
        args = (f'{{{config}}}', '{data}/dense.pth', '--work-dir', '{work}')
    return Case(name, tool, args, says, prepare, config, options)


def voc(name, change, says, options=()) -> Case:
    """One annotation of the detector's training set changed as a text."""

    def prepare(place: Place) -> None:
        path = place.annotations[1]
        path.write_text(change(path.read_text()))

    return data(name, 'detector', prepare, says, options)


def first(old: str, new: str):
    def change(content: str) -> str:
        assert old in content, old
        return content.replace(old, new, 1)

    return change


def box(content: str, **sides: str) -> str:
    """The first box with other numbers."""
    for side, value in sides.items():
        start = content.index(f'<{side}>') + len(side) + 2
        end = content.index(f'</{side}>')
        content = content[:start] + value + content[end:]
    return content


def picture(name, change, says, config='dense') -> Case:
    def prepare(place: Place) -> None:
        change(place.pictures[0])

    return data(name, config, prepare, says)


def label(name, change, says, **kwargs) -> Case:
    """One label map of the segmentor's training set rewritten."""

    def prepare(place: Place) -> None:
        path = place.labels[0]
        change(path)

    return data(name, 'segmentor', prepare, says, **kwargs)


def redraw(change):
    def write(path):
        labels = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        cv2.imwrite(str(path), change(labels))

    return write


def with_value(value):
    def change(labels):
        labels[5, 5] = value
        return labels

    return change


def on_place(change):
    return lambda place: change(place)


def remove(*parts):
    def prepare(place: Place) -> None:
        target = place.tree(parts[0]).joinpath(*parts[1:])
        shutil.rmtree(target) if target.is_dir() else target.unlink()

    return prepare


def rewrite(content, *parts):
    def prepare(place: Place) -> None:
        place.tree(parts[0]).joinpath(*parts[1:]).write_bytes(content)

    return prepare


def bomb(place: Place) -> None:
    """Entities that would unfold to 10^9 letters."""
    names = [f'a{n}' for n in range(10)]
    entities = ['<!ENTITY a0 "lollollol!">']
    entities += [f'<!ENTITY {b} "{f"&{a};" * 10}">' for a, b in zip(names, names[1:], strict=False)]
    text = f'<?xml version="1.0"?><!DOCTYPE x [{"".join(entities)}]><annotation>&a9;</annotation>'
    place.annotations[0].write_text(text)


def add_class(place: Place) -> None:
    shutil.copytree(place.tree('few') / 'train' / '0', place.tree('few') / 'train' / '2')


def only_list(*names):
    def prepare(place: Place) -> None:
        path = place.tree('voc') / 'digits' / 'ImageSets' / 'Main' / 'trainval.txt'
        path.write_bytes(b'\n'.join(names))

    return prepare


def rename_classes(place: Place) -> None:
    for path in place.annotations:
        text = path.read_text()
        for digit in ['zero', 'one', 'two', 'three', 'four', 'five', 'six', 'seven', 'eight', 'nine']:
            text = text.replace(f'<name>{digit}</name>', '<name>cow</name>')
        path.write_text(text)


DETECTION = [
    voc('xml_cut', lambda text: text[: len(text) // 2], says=()),
    voc('xml_empty', lambda text: '', says=()),
    voc('xml_text', lambda text: 'hello', says=()),
    voc('xml_binary', lambda text: '\x00\x01\x02', says=()),
    voc('xml_no_box', first('bndbox', 'bindbox'), says=()),
    voc('xml_no_side', lambda text: text.replace('ymax', 'ymxa'), says=()),
    voc('xml_word', lambda text: box(text, xmin='left'), says=()),
    voc('xml_nan', lambda text: box(text, xmin='nan'), says=()),
    voc('xml_inf', lambda text: box(text, xmax='1e999'), says=()),
    voc('xml_huge', lambda text: box(text, xmax='1e30'), says=()),
    voc('xml_no_name', lambda text: text.replace('name>', 'nmae>'), says=()),
    voc('xml_size', first('<width>128', '<width>wide'), says=()),
    voc('xml_no_width', lambda text: text.replace('width', 'breadth'), says=()),
    voc('xml_difficult', first('<difficult>0', '<difficult>maybe'), says=()),
    voc('box_turned', lambda text: box(text, xmin='90', xmax='20'), says=()),
    voc('box_empty', lambda text: box(text, xmin='20', xmax='20'), says=()),
    voc('box_outside', lambda text: box(text, xmin='400', xmax='420'), says=()),
    voc('box_negative', lambda text: box(text, ymin='-40', ymax='-20'), says=()),
    data('xml_bomb', 'detector', bomb, says=()),
    data('no_class', 'detector', rename_classes, says=()),
    data(
        'list_missing',
        'detector',
        remove('voc', 'digits', 'ImageSets', 'Main', 'trainval.txt'),
        says=(),
    ),
    data('list_empty', 'detector', only_list(), says=()),
    data('list_binary', 'detector', only_list(b'\xff\xfe\x00'), says=()),
    data('list_blank', 'detector', only_list(b'000001', b'', b'000002'), says=()),
    data('list_other', 'detector', only_list(b'000001', b'999999'), says=()),
    data('tree_empty', 'detector', remove('voc', 'digits'), says=()),
    data(
        'jpeg_missing',
        'detector',
        lambda place: [p.unlink() for p in (place.tree('voc') / 'digits' / 'JPEGImages').iterdir()],
        says=(),
    ),
    data(
        'jpeg_cut',
        'detector',
        lambda place: [
            p.write_bytes(p.read_bytes()[:300])
            for p in (place.tree('voc') / 'digits' / 'JPEGImages').iterdir()
        ],
        says=(),
    ),
    data(
        'classes_str',
        'detector',
        None,
        options=('train_dataloader.dataset.metainfo.classes=zero',),
        says=(),
    ),
    data(
        'classes_few',
        'detector',
        None,
        options=('val_dataloader.dataset.metainfo.classes=[cow,pig]',),
        says=(),
    ),
]
SEGMENTATION = [
    label('mask_size', redraw(lambda labels: labels[:100, :90]), says=()),
    label('mask_value', redraw(with_value(77)), says=()),
    label('mask_colour', redraw(lambda labels: np.stack([labels] * 3, axis=2)), says=()),
    label('mask_empty', lambda path: path.write_bytes(b''), says=()),
    label('mask_cut', lambda path: path.write_bytes(path.read_bytes()[:80]), says=()),
    label('mask_text', lambda path: path.write_text('hello'), says=()),
    label('mask_missing', lambda path: path.unlink(), says=()),
    label('mask_line', redraw(lambda labels: labels[:1]), says=()),
    label('mask_rgba', redraw(lambda labels: np.stack([labels] * 4, axis=2)), says=()),
    label(
        'mask_16',
        lambda path: Image.fromarray(np.full((128, 128), 300, np.uint16)).save(path),
        says=(),
    ),
    data('seg_empty', 'segmentor', remove('seg', 'leftImg8bit', 'train'), says=()),
    data('seg_no_labels', 'segmentor', remove('seg', 'gtFine'), says=()),
    data(
        'seg_val_value',
        'segmentor',
        lambda place: [
            redraw(with_value(200))(p)
            for p in (place.tree('seg') / 'gtFine' / 'val').rglob('*.png')
        ],
        says=(),
    ),
    data(
        'seg_pipeline',
        'segmentor',
        None,
        options=('train_dataloader.dataset.pipeline.1.type=PhotoMetricDistortion',),
        says=(),
    ),
]
PICTURES = [
    picture('folder', lambda path: (path.unlink(), path.mkdir()), says=()),
    picture('gif', lambda path: Image.new('P', (32, 32)).save(path, format='GIF'), says=()),
    picture('text', lambda path: path.write_text('hello'), says=()),
    picture('one_pixel', lambda path: Image.new('RGB', (1, 1)).save(path), says=()),
    picture('cmyk', lambda path: Image.new('CMYK', (32, 32)).save(path, format='JPEG'), says=()),
    picture('float', lambda path: Image.new('F', (32, 32)).save(path, format='TIFF'), says=()),
    data('tree_missing', 'dense', remove('few', 'train'), says=()),
    data(
        'tree_without_classes',
        'dense',
        lambda place: [shutil.rmtree(p) for p in (place.tree('few') / 'train').iterdir()],
        says=(),
    ),
    data(
        'tree_without_pictures',
        'dense',
        lambda place: [p.unlink() for p in place.pictures],
        says=(),
    ),
    data('class_added', 'dense', add_class, options=('model.head.num_classes=2',), says=()),
    data(
        'ann_file',
        'dense',
        lambda place: (place.tree('few') / 'train.txt').write_text('0/x.png\n1/y.png 1 2\n'),
        options=('train_dataloader.dataset.ann_file=train.txt',),
        says=(),
    ),
    data(
        'ann_file_label',
        'dense',
        lambda place: (place.tree('few') / 'train.txt').write_text('0/x.png cow\n'),
        options=('train_dataloader.dataset.ann_file=train.txt',),
        says=(),
    ),
    data(
        'cifar_length',
        'cifar',
        lambda place: (place.tree('cifar') / 'data_batch_1.bin').write_bytes(b'\x01' * 5000),
        says=(),
    ),
    data('cifar_empty', 'cifar', rewrite(b'', 'cifar', 'data_batch_1.bin'), says=()),
    data('cifar_label', 'cifar', rewrite(b'\xc8' * 3073, 'cifar', 'data_batch_1.bin'), says=()),
    data('cifar_missing', 'cifar', remove('cifar', 'data_batch_1.bin'), says=()),
    data(
        'cifar_variant',
        'cifar',
        None,
        options=('train_dataloader.dataset.variant=cifar1000',),
        says=(),
    ),
    data('cifar_split', 'cifar', None, options=('train_dataloader.dataset.split=val',), says=()),
]


def a_zip(names):
    content = io.BytesIO()
    with zipfile.ZipFile(content, 'w') as archive:
        for name in names:
            archive.writestr(name, 'hello')
    return content.getvalue()


def cut(place: Place) -> None:
    content = (place.data / 'gated.pth').read_bytes()
    place.write('x.pth', content[: len(content) // 2])


def flipped(place: Place) -> None:
    """A flipped byte inside of the weights."""
    content = bytearray((place.data / 'gated.pth').read_bytes())
    content[len(content) // 2] ^= 255
    place.write('x.pth', bytes(content))


def saved(what):
    return lambda place: torch.save(what, place.path / 'x.pth')


def checkpoint(name, prepare, says, tool='test', args=(), options=(), config='gated') -> Case:
    fixed = (f'{{{config}}}', '{place}/x.pth')
    return Case(name, tool, (*fixed, *args), says, prepare, config, options)


def file(content):
    return lambda place: place.write('x.pth', content)


WORK = ('--work-dir', '{work}')
CHECKPOINTS = [
    checkpoint('empty', file(b''), (), args=WORK),
    checkpoint('text', file('hello\n' * 50), (), args=WORK),
    checkpoint('html', file('<!DOCTYPE html><html>404</html>'), (), args=WORK),
    checkpoint('zip', file(a_zip(['a.txt'])), (), args=WORK),
    checkpoint('cut', cut, (), args=WORK),
    checkpoint('flipped', flipped, (), args=WORK),
    checkpoint('folder', lambda place: (place.path / 'x.pth').mkdir(), (), args=WORK),
    checkpoint('pickle', file(b'\x80\x04hello'), (), args=WORK),
    checkpoint('list', saved([1, 2]), (), args=WORK),
    checkpoint('no_weights', saved(dict(meta={}, state_dict={})), (), args=WORK),
    checkpoint('number', saved(3), (), args=WORK),
    checkpoint('state_list', saved(dict(state_dict=[1])), (), args=WORK),
    checkpoint('slim_empty', file(b''), (), tool='slim', args=('--out-dir', '{place}')),
    checkpoint('slim_cut', cut, (), tool='slim', args=('--out-dir', '{place}')),
    checkpoint('slim_list', saved([1, 2]), (), tool='slim', args=('--out-dir', '{place}')),
    checkpoint('export_cut', cut, (), tool='export', args=('--out', '{place}/m.onnx')),
    checkpoint('export_number', saved(3), (), tool='export', args=('--out', '{place}/m.onnx')),
    checkpoint(
        'infer_cut', cut, (), tool='infer', args=('{data}/few/val/0', '--out-dir', '{place}/out')
    ),
    checkpoint(
        'infer_number',
        saved(3),
        (),
        tool='infer',
        args=('{data}/few/val/0', '--out-dir', '{place}/out'),
    ),
    Case('analyze_cut', 'analyze', ('cost', '{gated}', '{place}/x.pth'), (), cut, 'gated'),
    Case('analyze_number', 'analyze', ('cost', '{gated}', '{place}/x.pth'), (), saved(3), 'gated'),
    Case(
        'analyze_dense',
        'analyze',
        ('cost', '{gated}', '{data}/dense.pth', '--out-dir', '{place}'),
        (),
        None,
        'gated',
    ),
    Case('publish_cut', 'publish', ('{place}/x.pth', '{place}/y.pth'), (), cut),
    Case('publish_zip', 'publish', ('{place}/x.pth', '{place}/y.pth'), (), file(a_zip(['a.txt']))),
    Case('publish_number', 'publish', ('{place}/x.pth', '{place}/y.pth'), (), saved(3)),
    Case('convert_cut', 'convert_weights', ('{place}/x.pth', '{place}/y.pth'), (), cut),
    Case('convert_text', 'convert_weights', ('{place}/x.pth', '{place}/y.pth'), (), file('hello')),
    Case('convert_ours', 'convert_weights', ('{data}/gated.pth', '{place}/y.pth'), ()),
    Case('resume_cut', 'train', ('{gated}', *WORK, '--resume', '{place}/x.pth'), (), cut, 'gated'),
    Case(
        'resume_weights',
        'train',
        ('{gated}', *WORK, '--resume', '{data}/gated.pth'),
        (),
        None,
        'gated',
    ),
    Case(
        'load_text',
        'train',
        ('{gated}', *WORK),
        (),
        file('hello'),
        'gated',
        ('load_from={place}/x.pth',),
    ),
    Case(
        'load_number',
        'train',
        ('{gated}', *WORK),
        (),
        saved(3),
        'gated',
        ('load_from={place}/x.pth',),
    ),
    Case('load_folder', 'train', ('{gated}', *WORK), (), None, 'gated', ('load_from={place}',)),
    Case(
        'init_zip',
        'train',
        ('{gated}', *WORK),
        (),
        file(a_zip(['a.txt'])),
        'gated',
        (
            'model.backbone.init_cfg.type=Pretrained',
            'model.backbone.init_cfg.checkpoint={place}/x.pth',
        ),
    ),
]
