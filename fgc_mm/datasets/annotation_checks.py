# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Saying which annotation it was, and what is wrong with it."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Optional
from xml.etree import ElementTree

from mmengine.fileio import list_from_file

from ..errors import DataError
from .instance_index import infos_of
from .mixing import children_of
from .path_checks import dataset_class, format_of, leaf_configs, resolve_path

_REMEDY = 'mend the file or take it out of the dataset'
_MOST = 1e9  # coordinates end as 32-bit floats
_SIDES = ('xmin', 'ymin', 'xmax', 'ymax')


def check_annotations(dataset: Any, scope: Optional[str] = None) -> None:
    """Raise a DataError if a dataset could not be built because of its annotations.

    Called after it failed: reads the annotation files one after the other.
    """
    for _, leaf in leaf_configs('', dataset):
        form = format_of(dataset_class(leaf.get('type'), scope))
        if form == 'voc':
            _check_voc(leaf)
        elif form == 'folders':
            _check_list(leaf)


def _check_voc(dataset: Mapping) -> None:
    prefix = (dataset.get('data_prefix') or {}).get('sub_data_root', '')
    folder = os.path.join(resolve_path(dataset, prefix), dataset.get('ann_subdir', 'Annotations'))
    try:
        names = list_from_file(resolve_path(dataset, dataset.get('ann_file') or ''))
    except (OSError, UnicodeError, ValueError) as error:
        raise DataError(f'ann_file={dataset.get("ann_file")!r} cannot be read: {error}') from error
    found: Counter[str] = Counter()
    for name in names:
        root = _read_xml(os.path.join(folder, f'{name}.xml'))
        found.update(str(item.findtext('name')) for item in root.findall('object'))
    classes = (dataset.get('metainfo') or {}).get('classes')
    if isinstance(classes, str):
        if not os.path.isfile(classes):  # of a class each line
            raise DataError(f'metainfo.classes={classes!r} must be a list, such as ({classes!r},)')
    elif classes and not any(name in found for name in classes):  # nothing is left then
        there = ', '.join(_shown(name) for name, _ in found.most_common(5)) or 'no object at all'
        raise DataError(
            f'metainfo.classes={tuple(classes)!r}: none of the {len(names)} annotations has an '
            f'object of these classes; they have {there}'
        )


def _read_xml(path: str) -> ElementTree.Element:
    """An annotation in the form of VOC."""
    if not os.path.isfile(path):
        raise DataError(
            f'annotation {path} does not exist; the dataset is incomplete: unpack it again'
        )
    if not os.path.getsize(path):
        raise DataError(f'annotation {path} is empty (0 bytes); fetch the file again')
    try:
        root = ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, UnicodeError, LookupError, ValueError) as error:
        raise DataError(f'annotation {path} is no XML ({error}); {_REMEDY}') from error
    for fault in _faults(root):
        raise DataError(f'annotation {path}: {fault}; {_REMEDY}')
    return root


def _faults(root: ElementTree.Element) -> Iterator[str]:
    """What keeps a detector from reading an annotation."""
    size = root.find('size')
    for side in ('width', 'height') if size is not None else ():
        text = size.findtext(side)  # type: ignore[union-attr]
        if not _is_number(text, whole=True):
            yield f'<size> has {side} {_shown(text)}, which is no whole number'
    for number, item in enumerate(root.findall('object'), 1):
        name = item.findtext('name')
        who = f'object {number}' + (f' ({_shown(name)})' if name else '')
        if item.find('name') is None:
            yield f'{who} has no <name>'
        difficult = item.find('difficult')
        if difficult is not None and not _is_number(difficult.text, whole=True):
            yield f'{who} has <difficult> {_shown(difficult.text)}, which is neither 0 nor 1'
        box = item.find('bndbox')
        if box is None:
            yield f'{who} has no <bndbox>'
            continue
        for side in _SIDES:
            text = box.findtext(side)
            if not _is_number(text):
                yield f'{who} has {side} {_shown(text)}, which is no number'


def _shown(text: Optional[str], most: int = 40) -> str:
    return repr(text) if text is None or len(text) <= most else f'{text[:most]!r} ...'


def _is_number(text: Optional[str], whole: bool = False) -> bool:
    try:
        value = int(text) if whole else float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return abs(value) < _MOST  # and so no NaN


def _check_list(dataset: Mapping) -> None:
    """mmpretrain's list of pictures and their classes."""
    listed = dataset.get('ann_file')
    path = resolve_path(dataset, listed or '')
    if not listed or not os.path.isfile(path) or not dataset.get('with_label', True):
        return
    for number, line in enumerate(list_from_file(path), 1):
        parts = line.rsplit(' ', 1)
        if len(parts) < 2 or not _is_number(parts[1], whole=True):
            raise DataError(
                f'ann_file={listed!r}: line {number} is {line[:80]!r}; every line must be a '
                'picture, a space and the number of its class'
            )


def check_boxes(dataset: Any) -> None:
    """See that the boxes of a VOC training set have an inside.

    A box without, or beyond the picture, has no logarithm of its size: it makes
    the loss infinite. Boxes marked difficult are not trained and may be anything.
    """
    for child in children_of(dataset):
        check_boxes(child)
    if format_of(type(dataset)) != 'voc' or getattr(dataset, 'test_mode', False):
        return
    for info in infos_of(dataset):
        for number, instance in enumerate(info.get('instances') or (), 1):
            fault = _box_fault(instance, info)
            if fault is not None and not instance.get('ignore_flag'):
                raise DataError(
                    f'annotation {info.get("xml_path")}: object {number} of those that are used '
                    f'has a box {fault}; {_REMEDY}'
                )


def _box_fault(instance: Mapping, info: Mapping) -> Optional[str]:
    left, top, right, bottom = box = instance['bbox']
    width, height = info.get('width') or math.inf, info.get('height') or math.inf
    if max(map(abs, box)) >= _MOST:
        fault = 'that is no box'
    elif right <= left or bottom <= top:
        fault = 'without an inside'
    elif right <= 0 or bottom <= 0 or left >= width or top >= height:
        fault = f'beyond the picture of {width} x {height}'
    else:
        return None
    shown = ', '.join(f'{side} {value + 1}' for side, value in zip(_SIDES, box, strict=True))
    return f'{fault} ({shown})'
