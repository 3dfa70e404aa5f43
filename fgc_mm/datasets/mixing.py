# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Augmentations that make one picture of several."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Optional

from ..errors import UsageError

_MIXES = re.compile(r'mosaic|mix_?up|cut_?mix|resize_?mix|copy_?paste', re.IGNORECASE)


def refuse_mixing(dataset: Any, data_preprocessor: Any = None) -> None:
    """Raise if an item of the dataset or a batch of the model is made of several pictures.

    Such an item is no instance: there is no row of a bank it belongs to. See :func:`find_mixing`
    for the arguments.
    """
    found = find_mixing(dataset, data_preprocessor)
    if found is not None:
        raise UsageError(
            f'{found}, which makes one picture of several; Feature-Gate Coupling needs to know '
            'which picture an item shows: take it out of the config, or let a PipelineSwitchHook '
            'or YOLOXModeSwitchHook end it'
        )


def find_mixing(
    dataset: Any, data_preprocessor: Any = None, skipped: Collection[str] = ()
) -> Optional[str]:
    """What makes one picture of several, and where it stands.

    Args:
        dataset (Dataset): The training set.
        data_preprocessor (nn.Module, optional): That of the model. Defaults to None.
        skipped (Collection[str]): Types that a wrapper's pipeline is to leave out, beside those
            it leaves out already. Defaults to ().

    Returns:
        str: Such as ``'the pipeline of CocoDataset has Mosaic'``; None if nothing does.
    """
    if mixes(getattr(data_preprocessor, 'batch_augments', None)):
        augments: Any = data_preprocessor.batch_augments  # type: ignore[union-attr]
        first = next(a for a in _each(augments) if mixes(a))
        return f'data_preprocessor.batch_augments has {type(first).__name__}'
    attributes = getattr(dataset, '__dict__', {})
    if 'pipeline' in attributes:
        name, pipeline = type(dataset).__name__, attributes['pipeline']
        if not hasattr(type(dataset), 'prepare_data') and not isinstance(pipeline, list):
            return f'the training set has the wrapper {name} with a pipeline of its own'
        out = {*skipped, *(attributes.get('_skip_type_keys') or ())}
        kinds = attributes.get('pipeline_types')
        if kinds is not None:
            pipeline = [t for t, kind in zip(pipeline, kinds, strict=True) if kind not in out]
        for transform in _transforms(pipeline, set()):
            if _mixes(transform):
                return f'the pipeline of {name} has {type(transform).__name__}'
    found = (find_mixing(child, None, skipped) for child in children_of(dataset))
    return next(filter(None, found), None)


def mixes(augments: Any) -> bool:
    """Whether a pipeline or the augmentations of a batch, built or as a config, mix pictures."""
    if isinstance(augments, (list, tuple)):
        return any(mixes(each) for each in augments)
    if isinstance(augments, Mapping):
        kind = augments.get('type')
        named = isinstance(kind, str) and _MIXES.search(kind) is not None
        return named or any(mixes(v) for v in augments.values() if not isinstance(v, str))
    if augments is None:
        return False
    built = any(hasattr(each, 'mix') or _mixes(each) for each in _each(augments))
    return built or any(_mixes(each) for each in _transforms(augments, set()))


def children_of(dataset: Any) -> list[Any]:
    """The datasets that a wrapper holds; none of one that is no wrapper."""
    attributes = getattr(dataset, '__dict__', {})
    if isinstance(attributes.get('datasets'), (list, tuple)):
        return list(attributes['datasets'])
    return [attributes[key] for key in ('dataset', '_dataset') if key in attributes]


def _each(augments: Any) -> list[Any]:
    """The augmentations of a batch, one by one."""
    augments = getattr(augments, 'augments', augments)
    return list(augments) if hasattr(augments, '__iter__') else [augments]


def _mixes(transform: Any) -> bool:
    picks_others = any(hasattr(transform, key) for key in ('get_indexes', 'get_indices'))
    return picks_others or _MIXES.search(type(transform).__name__) is not None


def _transforms(value: Any, seen: set[int]) -> Iterator[Any]:
    """All transforms inside a pipeline, those inside other transforms too."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _transforms(item, seen)
        return
    composed = any(hasattr(value, key) for key in ('transform', 'transforms', 'get_indexes'))
    if isinstance(value, type) or not (composed or callable(value)) or id(value) in seen:
        return
    seen.add(id(value))
    yield value
    for inner in getattr(value, '__dict__', {}).values() if composed else ():
        if isinstance(inner, (list, tuple, Mapping)) or hasattr(inner, 'transforms'):
            yield from _transforms(inner, seen)
