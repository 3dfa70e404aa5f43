# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Pictures alone, for trainings without labels."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any, Optional

import numpy as np
from mmengine.dataset import BaseDataset
from mmengine.registry import DATASETS
from PIL import Image

from ..errors import DataError, UsageError
from .path_checks import dataset_class, format_of, leaf_configs

PICTURE_ENDINGS = ('.bmp', '.jpeg', '.jpg', '.png', '.ppm', '.tif', '.tiff', '.webp')
"""Endings of the files that count as pictures, in either case."""
_MOST_HELD_BACK = 500
_SHARE_HELD_BACK = 0.1


@DATASETS.register_module()
class Pictures(BaseDataset):
    """The pictures of a folder or of another dataset, without anything that is known about them.

    Annotations are not read, but where a file of them is also the list of the pictures, as COCO's.
    Every tenth picture, up to 500 and the same ones in every run, can be held back.

    Args:
        folder (str, optional): With pictures in it or below. Defaults to None.
        source (dict, optional): In place of it, the config of a dataset. Defaults to None.
        part (str): ``'train'``, ``'held_back'`` or ``'all'``. Defaults to 'all'.
        scope (str, optional): The package whose datasets ``source`` names. Defaults to None, that
            of the run.
        **kwargs: Other arguments of mmengine's ``BaseDataset``, such as ``pipeline``.
    """

    def __init__(
        self,
        folder: Optional[str] = None,
        source: Optional[dict] = None,
        part: str = 'all',
        scope: Optional[str] = None,
        **kwargs: Any,
    ) -> None:
        if (folder is None) == (source is None):
            raise UsageError(f'Pictures: give one of folder={folder!r} and source={source!r}')
        if part not in ('train', 'held_back', 'all'):
            raise UsageError(f"Pictures: part={part!r} must be 'train', 'held_back' or 'all'")
        self.folder = folder
        self.source = source
        self.part = part
        self.scope = scope
        super().__init__(**kwargs)

    def load_data_list(self) -> list[dict]:
        """List the pictures."""
        found = (
            [dict(img_path=path) for path in pictures_below(self.folder)]
            if self.folder is not None
            else _pictures_of(self.source or {}, self.scope)
        )
        if len(found) < 2:
            where = self.folder or f'the {(self.source or {}).get("type")}'
            raise DataError(f'{where} has {len(found)} pictures; at least 2 are needed')
        if self.part == 'all':
            return found
        order = np.random.default_rng(0).permutation(len(found))
        count = min(_MOST_HELD_BACK, max(1, int(_SHARE_HELD_BACK * len(found))))
        chosen = order[:count] if self.part == 'held_back' else order[count:]
        return [found[number] for number in sorted(chosen)]


def pictures_below(folder: str) -> list[str]:
    """The pictures in a folder and below, by their names.

    Raises:
        DataError: If there is no folder, no picture in it, or one that is none.
    """
    if not os.path.isdir(folder):
        raise DataError(f'{folder} is no folder of pictures')
    found = sorted(
        os.path.join(path, name)
        for path, _, names in os.walk(folder)
        for name in names
        if name.lower().endswith(PICTURE_ENDINGS)
    )
    if not found:
        raise DataError(
            f'folder {folder} has no pictures (files ending in {", ".join(PICTURE_ENDINGS)})'
        )
    for path in found:
        try:
            with Image.open(path):
                pass  # the header alone: all of it is read when it is its turn
        except Exception as error:
            raise DataError(
                f'picture {path} cannot be read: it is damaged or no picture; fetch it again or '
                'take it out of the folder'
            ) from error
    return found


def _pictures_of(source: Mapping, scope: Optional[str]) -> list[dict]:
    """The pictures of all datasets in a config, each once."""
    found: dict[Any, dict] = {}
    for _, leaf in leaf_configs('source', source):
        for number, item in enumerate(_items(dict(copy.deepcopy(leaf)), scope)):
            if 'img_path' in item:
                found.setdefault(item['img_path'], dict(img_path=item['img_path']))
            elif 'img' in item:
                found[id(leaf), number] = dict(img=item['img'])
            else:
                raise UsageError(
                    f'the items of {leaf.get("type")} name no picture (img_path or img); name a '
                    'folder of pictures'
                )
    return list(found.values())


def _items(leaf: dict, scope: Optional[str]) -> list[dict]:
    leaf.update(pipeline=[], lazy_init=True)
    leaf.pop('filter_cfg', None)  # which pictures have boxes is an annotation
    voc = format_of(dataset_class(leaf.get('type'), scope)) == 'voc'
    if voc:  # small boxes are not looked for
        leaf['test_mode'] = True
    with DATASETS.switch_scope_and_registry(scope) as registry:
        dataset = registry.build(leaf)
    if voc:  # whose lists of names are enough
        folder = dataset.sub_data_root
        dataset.parse_data_info = lambda info: dict(
            img_path=os.path.join(folder, info['file_name'])
        )
    dataset.serialize_data = False
    dataset.full_init()
    return [dataset.get_data_info(number) for number in range(len(dataset))]
