# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Finding missing data before a run starts instead of after."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Union

from mmengine.config import Config
from mmengine.fileio import list_from_file
from mmengine.registry import DATASETS

from ..errors import DataError
from ..tasks import file_format
from .cifar_binary import find_cifar_files
from .demo.build import DEMO_KINDS


@dataclass
class _Problem:
    """What is wrong: ``<config key>.<text>. <remedy>``."""

    text: str
    remedy: str = ''
    keys: list[str] = field(default_factory=list)


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
    problems: dict[str, _Problem] = {}
    for split in splits:
        dataloader = cfg.get(f'{split}_dataloader')
        dataset = dataloader.get('dataset') if isinstance(dataloader, Mapping) else None
        if not isinstance(dataset, Mapping):
            continue
        for key, leaf in leaf_configs(f'{split}_dataloader.dataset', dataset):
            problem = _check(leaf, cfg.get('default_scope'))
            if problem is not None:
                problems.setdefault(problem.text, problem).keys.append(key)
    if problems:
        raise DataError('\n'.join(_message(problem) for problem in problems.values()))


def _message(problem: _Problem) -> str:
    first, *others = problem.keys
    also = f' (also in {", ".join(others)})' if others else ''
    options = ' '.join(f'{key}.data_root=<folder>' for key in problem.keys)
    remedy = problem.remedy or (
        f'Put the dataset there or say where it is with --cfg-options {options}; '
        'docs/data.md shows the layout.'
    )
    return f'{first}.{problem.text}{also}. {remedy}'


def leaf_configs(key: str, dataset: Mapping) -> Iterator[tuple[str, Mapping]]:
    """The datasets inside wrappers, each with the config key that leads to it."""
    inner, several = dataset.get('dataset'), dataset.get('datasets')
    if isinstance(inner, Mapping):
        yield from leaf_configs(f'{key}.dataset', inner)
    elif isinstance(several, (list, tuple)):
        for number, each in enumerate(several):
            if isinstance(each, Mapping):
                yield from leaf_configs(f'{key}.datasets.{number}', each)
    else:
        yield key, dataset


def _check(dataset: Mapping, scope: Optional[str]) -> Optional[_Problem]:
    cls = dataset_class(dataset.get('type'), scope)
    root = dataset.get('data_root') or ''
    if not isinstance(root, str) or _is_remote(dataset, root) or _downloads(cls, dataset):
        return None
    check = _CHECKS.get(format_of(cls))
    if root and not os.path.exists(root) and check is not _check_cifar:
        return _missing('data_root', root, root)
    return check(dataset, cls) if check is not None else None


def dataset_class(name: Any, scope: Optional[str]) -> Optional[type]:
    if isinstance(name, str):
        try:
            with DATASETS.switch_scope_and_registry(scope) as registry:
                name = registry.get(name)
        except Exception:  # an unknown type is the Runner's to complain about
            return None
    return name if inspect.isclass(name) else None


def format_of(cls: Optional[type]) -> Optional[str]:
    """The form of the files, by the class that really reads them; None if it is not known.

    A subclass with a ``load_data_list`` of its own may have any layout, one
    without has that of the class it inherits it from.
    """
    for base in cls.__mro__ if cls is not None else ():
        if 'load_data_list' in vars(base) or 'parse_data_info' in vars(base):
            return file_format(base)
    return None


def _is_remote(dataset: Mapping, root: str) -> bool:
    backend = (dataset.get('backend_args') or {}).get('backend', 'local')
    return '://' in root or backend not in ('local', 'disk')


def _downloads(cls: Optional[type], dataset: Mapping) -> bool:
    default = _default(cls, 'download') if cls is not None else None
    return bool(dataset.get('download', default))


def _default(cls: type, name: str) -> Any:
    """Default of an argument of the constructor, None if it has no such argument."""
    parameter = inspect.signature(cls.__init__).parameters.get(name)  # type: ignore[misc]
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def _missing(key: str, value: str, path: str, kind: str = 'folder') -> _Problem:
    hint = ''
    demo = re.match(rf'(.*?demo)[/\\](?:{"|".join(DEMO_KINDS)})(?:[/\\]|$)', path)
    if value.startswith('~'):
        hint = 'A config does not expand "~": write the whole path.'
    elif demo:
        hint = f'Build the demo data with "python tools/make_demo_data.py --root {demo.group(1)}".'
    return _Problem(f'{key}={value!r}: the {kind} {os.path.abspath(path)} does not exist', hint)


def resolve_path(dataset: Mapping, path: str) -> str:
    return os.path.join(dataset.get('data_root') or '', path)


def _missing_path(dataset: Mapping, key: str, value: Any, kind: str) -> Optional[_Problem]:
    """A problem if an entry of the config names a path that is not there."""
    if not isinstance(value, str) or not value or '://' in value:
        return None
    path = resolve_path(dataset, os.path.expanduser(value))
    there = os.path.isdir(path) if kind == 'folder' else os.path.exists(path)
    return None if there else _missing(key, value, path, kind)


def _missing_named(dataset: Mapping) -> Optional[_Problem]:
    """The first path named by ``ann_file`` and ``data_prefix`` that is not there."""
    prefix = dataset.get('data_prefix')
    prefixes = prefix.items() if isinstance(prefix, Mapping) else [('', prefix)]
    for name, value in prefixes:
        if name == 'seg_map_path' and not _reads_annotations(dataset.get('pipeline')):
            continue
        key = f'data_prefix.{name}' if name else 'data_prefix'
        problem = _missing_path(dataset, key, value, 'folder')
        if problem is not None:
            return problem
    return _missing_path(dataset, 'ann_file', dataset.get('ann_file'), 'file')


def _check_coco(dataset: Mapping, cls: Any) -> Optional[_Problem]:
    """mmdet's annotation file and folder of pictures."""
    return _missing_named(dataset)


def _check_custom(dataset: Mapping, cls: Any) -> Optional[_Problem]:
    """mmpretrain's folders of classes, ImageNet's ``split`` included."""
    problem = _missing_named(dataset)
    if problem is None and not dataset.get('data_prefix'):
        return _missing_path(dataset, 'split', dataset.get('split'), 'folder')
    return problem


def _check_cifar(dataset: Mapping, cls: Any) -> Optional[_Problem]:
    try:
        find_cifar_files(
            dataset.get('data_root') or '',
            dataset.get('split', 'train'),
            dataset.get('variant', 'cifar10'),
        )
    except KeyError:  # the dataset itself names its wrong argument
        return None
    except FileNotFoundError as error:
        return _Problem(str(error), 'docs/data.md shows the layout.')
    return None


def _check_voc(dataset: Mapping, cls: Any) -> Optional[_Problem]:
    """Every id of the image set has its picture and its annotation."""
    problem, listed = _missing_named(dataset), dataset.get('ann_file')
    if problem is not None or not listed or '://' in listed:
        return problem
    prefix = (dataset.get('data_prefix') or {}).get('sub_data_root', '')
    names = _listed(dataset, listed)
    if isinstance(names, _Problem):
        return names
    for key, suffix in (('img_subdir', '.jpg'), ('ann_subdir', '.xml')):
        subdir = dataset.get(key) or _default(cls, key)
        if subdir is None:
            if not cls.__init__.__module__.startswith('mmdet.'):
                return None  # a constructor of somebody's own may set another folder
            subdir = _VOC_FOLDERS[key]
        folder = os.path.join(resolve_path(dataset, prefix), subdir)
        if not os.path.isdir(folder):
            return _missing('data_prefix.sub_data_root', prefix, folder)
        problem = _incomplete(f'ann_file={listed!r}', names, folder, suffix)
        if problem is not None and dataset.get('indices') is None:
            return problem
    return None


def _check_segmentation(dataset: Mapping, cls: Any) -> Optional[_Problem]:
    """Every picture has its label map, if the pipeline reads label maps."""
    problem = _missing_named(dataset)
    prefix = dataset.get('data_prefix')
    if problem is not None or not isinstance(prefix, Mapping) or dataset.get('indices') is not None:
        return problem
    suffix, label_suffix = (
        dataset.get(key) or _default(cls, key) for key in ('img_suffix', 'seg_map_suffix')
    )
    if suffix is None or label_suffix is None:
        return None
    images = resolve_path(dataset, prefix.get('img_path') or '')
    listed = dataset.get('ann_file')
    if listed and os.path.isfile(resolve_path(dataset, listed)):
        names = _listed(dataset, listed)
        if isinstance(names, _Problem):
            return names
        names = [name.strip() for name in names]
        problem = _incomplete(f'ann_file={listed!r}', names, images, suffix)
        if problem is not None:
            return problem
    else:
        names = [name[: -len(suffix)] for name in _files(images) if name.endswith(suffix)]
    if not names:
        return _Problem(
            f'data_prefix.img_path={prefix.get("img_path")!r}: {os.path.abspath(images)} has no '
            f'file that ends in {suffix}'
        )
    labels = prefix.get('seg_map_path')
    if labels is None or not _reads_annotations(dataset.get('pipeline')):
        return None
    key, folder = f'data_prefix.seg_map_path={labels!r}', resolve_path(dataset, labels)
    problem = _incomplete(key, names, folder, label_suffix)
    if problem is not None and label_suffix.endswith('_labelTrainIds.png'):
        original = label_suffix.replace('_labelTrainIds', '_labelIds')
        if any(os.path.exists(os.path.join(folder, name + original)) for name in names):
            problem.remedy = (
                'Its labels are not converted to train ids yet: run "pip install '
                'cityscapesscripts" and "CITYSCAPES_DATASET='
                f'{dataset.get("data_root") or "<folder>"} csCreateTrainIdLabelImgs".'
            )
    return problem


def _incomplete(key: str, names: list[str], folder: str, suffix: str) -> Optional[_Problem]:
    """A problem if a folder does not have a file for each name."""
    there = set(_files(folder))
    lacking = [name for name in names if name + suffix not in there]
    if not lacking:
        return None
    return _Problem(
        f'{key}: {len(lacking)} of {len(names)} images, {lacking[0]!r} first, have no {suffix} '
        f'file in {os.path.abspath(folder)}',
        'The dataset is incomplete: unpack its archives again.',
    )


def _listed(dataset: Mapping, ann_file: str) -> Union[list[str], _Problem]:
    """The names in a list of images."""
    remedy = 'It must be a text file with the name of an image, without its ending, in each line.'
    try:
        names = list_from_file(resolve_path(dataset, ann_file))
    except UnicodeError:
        return _Problem(f'ann_file={ann_file!r} is no text file', remedy)
    if not names:
        return _Problem(f'ann_file={ann_file!r} lists no image')
    if '' in map(str.strip, names):
        number = [name.strip() for name in names].index('') + 1
        return _Problem(f'ann_file={ann_file!r}: line {number} is empty', remedy)
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


_VOC_FOLDERS = {'img_subdir': 'JPEGImages', 'ann_subdir': 'Annotations'}
_CHECKS: dict[Optional[str], Callable[[Mapping, Any], Optional[_Problem]]] = {
    'cifar': _check_cifar,
    'coco': _check_coco,
    'folders': _check_custom,
    'label_maps': _check_segmentation,
    'voc': _check_voc,
}
"""Form of the files, see :class:`~fgc_mm.tasks.Task` -> its check."""
