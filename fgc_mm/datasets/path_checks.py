# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Finding missing data before a run starts instead of after."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional, Union

from mmengine.config import Config
from mmengine.fileio import list_from_file
from mmengine.registry import DATASETS

from ..errors import DataError
from ..tasks import file_format
from .cifar_binary import find_cifar_files
from .demo.build import DEMO_KINDS

_VOC_FOLDERS = {'img_subdir': 'JPEGImages', 'ann_subdir': 'Annotations'}


class _FaultError(Exception):
    """What is wrong with a dataset: ``<config key>.<text>. <remedy>``."""

    def __init__(self, text: str, remedy: str = '') -> None:
        super().__init__(text)
        self.remedy = remedy


def check_dataset_paths(
    cfg: Union[Config, Mapping], splits: Sequence[str] = ('train', 'val', 'test')
) -> None:
    """See that the data of a config is where the config says it is.

    Datasets inside ``ConcatDataset``, ``RepeatDataset`` and other wrappers are
    looked at, too. For the readers of VOC trees and segmentation folders every
    picture is checked to have its annotation, by listing folders, not by opening
    files. Of a dataset class that is not known only ``data_root`` is looked at,
    and nothing of one that downloads its data or reads it from a remote store.
    """
    faults: dict[str, tuple[str, list[str]]] = {}  # text -> remedy, and the keys that have it
    for split in splits:
        dataloader = cfg.get(f'{split}_dataloader')
        dataset = dataloader.get('dataset') if isinstance(dataloader, Mapping) else None
        for key, leaf in leaf_configs(f'{split}_dataloader.dataset', dataset):
            try:
                _check(leaf, cfg.get('default_scope'))
            except _FaultError as fault:
                faults.setdefault(str(fault), (fault.remedy, []))[1].append(key)
    if faults:
        raise DataError('\n'.join(_message(t, *found) for t, found in faults.items()))


def _message(text: str, remedy: str, keys: list[str]) -> str:
    also = f' (also in {", ".join(keys[1:])})' if keys[1:] else ''
    options = ' '.join(f'{key}.data_root=<folder>' for key in keys)
    remedy = remedy or (
        f'Put the dataset there or say where it is with --cfg-options {options}; '
        'docs/data.md shows the layout.'
    )
    return f'{keys[0]}.{text}{also}. {remedy}'


def leaf_configs(key: str, dataset: Any) -> Iterator[tuple[str, Mapping]]:
    """The datasets inside wrappers, each with the config key that leads to it."""
    if not isinstance(dataset, Mapping):
        return
    several = dataset.get('datasets')
    if isinstance(dataset.get('dataset'), Mapping):
        yield from leaf_configs(f'{key}.dataset', dataset['dataset'])
    elif isinstance(several, (list, tuple)):
        for number, each in enumerate(several):
            yield from leaf_configs(f'{key}.datasets.{number}', each)
    else:
        yield key, dataset


def format_of(cls: Optional[type]) -> Optional[str]:
    """The form of the files, by the class that really reads them; None if it is not known.

    A subclass with a ``load_data_list`` of its own may have any layout, one
    without has that of the class it inherits it from.
    """
    for base in cls.__mro__ if cls is not None else ():
        if 'load_data_list' in vars(base) or 'parse_data_info' in vars(base):
            return file_format(base)
    return None


def dataset_class(name: Any, scope: Optional[str]) -> Optional[type]:
    if isinstance(name, str):
        try:
            with DATASETS.switch_scope_and_registry(scope) as registry:
                name = registry.get(name)
        except Exception:  # an unknown type is the Runner's to complain about
            return None
    return name if inspect.isclass(name) else None


def resolve_path(dataset: Mapping, path: str) -> str:
    return os.path.join(dataset.get('data_root') or '', path)


def _check(dataset: Mapping, scope: Optional[str]) -> None:
    cls = dataset_class(dataset.get('type'), scope)
    root = dataset.get('data_root') or ''
    backend = (dataset.get('backend_args') or {}).get('backend', 'local')
    remote = not isinstance(root, str) or '://' in root or backend not in ('local', 'disk')
    if remote or dataset.get('download', _default(cls, 'download')):
        return
    form = format_of(cls)
    if form == 'cifar':
        _check_cifar(dataset)
        return
    if root and not os.path.exists(root):
        raise _missing('data_root', root, root)
    if form is not None:
        _check_named(dataset)
    if form == 'folders' and not dataset.get('data_prefix'):
        _check_entry(dataset, 'split', dataset.get('split'), 'folder')  # of ImageNet
    elif form == 'voc':
        _check_voc(dataset, cls)
    elif form == 'label_maps':
        _check_label_maps(dataset, cls)


def _default(cls: Any, name: str) -> Any:
    """Default of an argument of the constructor, None if it has no such argument."""
    parameter = inspect.signature(cls.__init__).parameters.get(name) if cls is not None else None
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def _missing(key: str, value: str, path: str, kind: str = 'folder') -> _FaultError:
    hint = ''
    demo = re.match(rf'(.*?demo)[/\\](?:{"|".join(DEMO_KINDS)})(?:[/\\]|$)', path)
    if value.startswith('~'):
        hint = 'A config does not expand "~": write the whole path.'
    elif demo:
        hint = f'Build the demo data with "python tools/make_demo_data.py --root {demo.group(1)}".'
    return _FaultError(f'{key}={value!r}: the {kind} {os.path.abspath(path)} does not exist', hint)


def _check_entry(dataset: Mapping, key: str, value: Any, kind: str) -> None:
    """See that the path in an entry of the config is there."""
    if not isinstance(value, str) or not value or '://' in value:
        return
    path = resolve_path(dataset, os.path.expanduser(value))
    if not (os.path.isdir(path) if kind == 'folder' else os.path.exists(path)):
        raise _missing(key, value, path, kind)


def _check_named(dataset: Mapping) -> None:
    """See that the paths named by ``data_prefix`` and ``ann_file`` are there."""
    prefix = dataset.get('data_prefix')
    for name, value in prefix.items() if isinstance(prefix, Mapping) else [('', prefix)]:
        if name != 'seg_map_path' or _reads_annotations(dataset.get('pipeline')):
            key = f'data_prefix.{name}' if name else 'data_prefix'
            _check_entry(dataset, key, value, 'folder')
    _check_entry(dataset, 'ann_file', dataset.get('ann_file'), 'file')


def _check_cifar(dataset: Mapping) -> None:
    split, variant = dataset.get('split', 'train'), dataset.get('variant', 'cifar10')
    try:
        find_cifar_files(dataset.get('data_root') or '', split, variant)
    except KeyError:  # the dataset itself names its wrong argument
        return
    except FileNotFoundError as error:
        raise _FaultError(str(error), 'docs/data.md shows the layout.') from error


def _check_voc(dataset: Mapping, cls: Any) -> None:
    """Every id of the image set has its picture and its annotation."""
    listed = dataset.get('ann_file')
    if not listed or '://' in listed:
        return
    names = _listed(dataset, listed)
    prefix = (dataset.get('data_prefix') or {}).get('sub_data_root', '')
    for key, suffix in (('img_subdir', '.jpg'), ('ann_subdir', '.xml')):
        subdir = dataset.get(key) or _default(cls, key)
        if subdir is None:
            if not cls.__init__.__module__.startswith('mmdet.'):
                return  # a constructor of somebody's own may set another folder
            subdir = _VOC_FOLDERS[key]
        folder = os.path.join(resolve_path(dataset, prefix), subdir)
        if not os.path.isdir(folder):
            raise _missing('data_prefix.sub_data_root', prefix, folder)
        if dataset.get('indices') is None:
            _check_complete(f'ann_file={listed!r}', names, folder, suffix)


def _check_label_maps(dataset: Mapping, cls: Any) -> None:
    """Every picture has its label map, if the pipeline reads label maps."""
    prefix = dataset.get('data_prefix')
    suffix, label_suffix = (
        dataset.get(key) or _default(cls, key) for key in ('img_suffix', 'seg_map_suffix')
    )
    if not isinstance(prefix, Mapping) or dataset.get('indices') is not None:
        return
    if suffix is None or label_suffix is None:
        return
    images = resolve_path(dataset, prefix.get('img_path') or '')
    listed = dataset.get('ann_file')
    if listed and os.path.isfile(resolve_path(dataset, listed)):
        names = [name.strip() for name in _listed(dataset, listed)]
        _check_complete(f'ann_file={listed!r}', names, images, suffix)
    else:
        names = [name[: -len(suffix)] for name in _files(images) if name.endswith(suffix)]
    if not names:
        raise _FaultError(
            f'data_prefix.img_path={prefix.get("img_path")!r}: {os.path.abspath(images)} has no '
            f'file that ends in {suffix}'
        )
    labels = prefix.get('seg_map_path')
    if labels is None or not _reads_annotations(dataset.get('pipeline')):
        return
    folder = resolve_path(dataset, labels)
    try:
        _check_complete(f'data_prefix.seg_map_path={labels!r}', names, folder, label_suffix)
    except _FaultError as fault:
        original = label_suffix.replace('_labelTrainIds.png', '_labelIds.png')
        there = (os.path.exists(os.path.join(folder, name + original)) for name in names)
        if original != label_suffix and any(there):
            fault.remedy = (
                'Its labels are not converted to train ids yet: run "pip install '
                'cityscapesscripts" and "CITYSCAPES_DATASET='
                f'{dataset.get("data_root") or "<folder>"} csCreateTrainIdLabelImgs".'
            )
        raise


def _check_complete(key: str, names: list[str], folder: str, suffix: str) -> None:
    """See that a folder has a file for each name."""
    there = set(_files(folder))
    lacking = [name for name in names if name + suffix not in there]
    if lacking:
        raise _FaultError(
            f'{key}: {len(lacking)} of {len(names)} images, {lacking[0]!r} first, have no '
            f'{suffix} file in {os.path.abspath(folder)}',
            'The dataset is incomplete: unpack its archives again.',
        )


def _listed(dataset: Mapping, ann_file: str) -> list[str]:
    """The names in a list of images."""
    remedy = 'It must be a text file with the name of an image, without its ending, in each line.'
    try:
        names = list_from_file(resolve_path(dataset, ann_file))
    except UnicodeError:
        raise _FaultError(f'ann_file={ann_file!r} is no text file', remedy) from None
    if not names:
        raise _FaultError(f'ann_file={ann_file!r} lists no image')
    for number, name in enumerate(names, 1):
        if not name.strip():
            raise _FaultError(f'ann_file={ann_file!r}: line {number} is empty', remedy)
    return names


def _files(folder: str) -> list[str]:
    """All files below a folder, relative to it, sorted."""
    found = []
    for parent, _, names in os.walk(folder, followlinks=True):
        relative = os.path.relpath(parent, folder)
        found += names if relative == '.' else [f'{relative}/{name}' for name in names]
    return sorted(name.replace(os.sep, '/') for name in found)


def _reads_annotations(pipeline: Any) -> bool:
    if isinstance(pipeline, Mapping):
        name = pipeline.get('type')
        name = name if isinstance(name, str) else getattr(name, '__name__', '')
        return 'LoadAnnotations' in name or _reads_annotations(pipeline.get('transforms'))
    return isinstance(pipeline, (list, tuple)) and any(map(_reads_annotations, pipeline))
