# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What is left of a pipeline where there are no annotations."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Optional

from mmengine.registry import TRANSFORMS

from ..datasets import Pictures, picture_fault
from ..errors import DataError

_TRIALS = 4


def pipelines_of(dataset: Mapping) -> list[dict]:
    """The transforms of a dataset and of the wrappers around it, in their order."""
    inner = dataset.get('dataset')
    if inner is None:
        inner = next(iter(dataset.get('datasets') or []), None)
    before = pipelines_of(inner) if isinstance(inner, Mapping) else []
    return before + copy.deepcopy(list(dataset.get('pipeline') or []))


def without_annotations(
    pipeline: Sequence[Mapping], pictures: Pictures, scope: Optional[str]
) -> tuple[list[dict], list[str]]:
    """The transforms that run on pictures alone.

    Which these are is tried on some of the pictures: one that fails for lack of boxes, label maps
    or other pictures to mix with is left out.

    Args:
        pipeline (Sequence[Mapping]): Configs of transforms.
        pictures (Pictures): The pictures.
        scope (str, optional): The package whose transforms these are.

    Returns:
        tuple: The configs that are left, and the types of the others.

    Raises:
        DataError: If nothing is left that gives inputs for a model.
    """
    steps = min(_TRIALS, len(pictures))
    items = [pictures.get_data_info(n * len(pictures) // steps) for n in range(steps)]
    kept: list[dict] = []
    dropped: list[str] = []
    for cfg in pipeline:
        one = dict(cfg)
        if one.get('cat_max_ratio', 1.0) < 1:  # a crop that looks at label maps
            one['cat_max_ratio'] = 1.0
        after = None if 'Annotation' in str(one['type']) else _tried(one, items, scope)
        if after is None:
            dropped.append(str(one['type']))
        else:
            kept.append(one)
            items = after
    if not all('inputs' in item for item in items):
        raise DataError(
            f'no pipeline runs on pictures alone: of {[str(c["type"]) for c in pipeline]} '
            f'{dropped} fail without annotations'
        )
    return kept, dropped


def _tried(cfg: dict, items: Sequence[dict], scope: Optional[str]) -> Optional[list[dict]]:
    """What a transform makes of some items, None if it cannot."""
    with TRANSFORMS.switch_scope_and_registry(scope) as registry:
        transform = registry.build(copy.deepcopy(cfg))
    after = []
    for item in items:
        for _ in range(_TRIALS):  # a random one may do nothing
            try:
                result = transform(copy.deepcopy(item))
            except Exception as error:
                fault = picture_fault(item['img_path']) if 'img_path' in item else None
                if fault is not None:  # not for lack of annotations
                    raise DataError(fault) from error
                return None
            if result is None:
                return None
        after.append(result)
    return after
