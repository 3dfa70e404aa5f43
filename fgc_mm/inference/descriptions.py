# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a file may say that builds a network: types that are registered, and plain values.

A registry that does not know a type imports what its name says, and some of upstream's code
evaluates strings. So a description is looked at before anything is built.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import Any, Optional

import torch.nn as nn
from mmengine.registry import MODELS, TASK_UTILS, DefaultScope, Registry

from ..errors import CheckpointError, MissingPackageError, UsageError
from ..nets.names import FAMILIES, OWN_FAMILIES
from ..runtime.config.files import type_name
from ..tasks import scopes
from .gating_config import gating_node

_NAME = re.compile(r'[A-Za-z_]\w*(\.[A-Za-z_]\w*)?')
_STRING = re.compile(r'[\w./:, +*%#&\'-]*')
_OF_NMS = ('nms', 'soft_nms', 'nms_match', 'naive_nms')
_START = ('init_cfg', 'pretrained')
"""Weights to start from: those of the file come later."""
_FOREIGN_START = ('weights', 'weights_backbone', 'checkpoint_path', 'pretrained_cfg')
_PLAIN = (str, int, float, bool, type(None))


def plain_config(model: Any) -> dict[str, Any]:
    """A config as plain dicts, lists and values, without weights to start from.

    Args:
        model (Mapping): The config.

    Raises:
        UsageError: If it is none, or holds something that is not plain.
    """
    if not isinstance(model, Mapping) or not isinstance(model.get('type'), str):
        raise UsageError(
            f'model={model!r} must say what builds the network, such as '
            "dict(type='torchvision.models.resnet50') or the config of a model"
        )
    return _plain(model, 'model')


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {
            str(key): _plain(item, f'{where}.{key}')
            for key, item in value.items()
            if key not in _START
        }
    if isinstance(value, (list, tuple)):
        items = [_plain(item, f'{where}.{number}') for number, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, _PLAIN):
        return value
    raise UsageError(f'{where}={value!r} is no plain value, which a file could hold')


def gates_itself(model: Mapping[str, Any], network: str) -> bool:
    """Whether the config of a model gates a network of it."""
    try:
        node, _ = gating_node(model, network)
    except UsageError:
        return False
    return type_name(node) in ('Gated', *FAMILIES, *OWN_FAMILIES)


def check_description(described: Mapping[str, Any]) -> None:
    """See that building what is described runs nothing but known types.

    Args:
        described (Mapping): ``model``, ``scope`` and ``gating``.

    Raises:
        CheckpointError: If not; it names the entry.
    """
    scope = described.get('scope')
    if scope is not None and scope not in scopes():
        raise CheckpointError(f'scope={scope!r} must be one of {", ".join(scopes())}')
    foreign = _foreign(described['model'].get('type'))
    for where, value in _walk(described, ''):
        if isinstance(value, str) and not _STRING.fullmatch(value):
            raise CheckpointError(f'{where}={value!r} is no plain string, such as a name')
        if where.rpartition('.')[2] == 'type' and not (foreign and where == 'model.type'):
            _check_type(where, value, scope)


def _walk(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif isinstance(value, _PLAIN):
        items = ()
        yield where, value
    else:
        raise CheckpointError(f'{where} is a {type(value).__name__}, which is no plain value')
    for key, item in items:
        yield from _walk(item, f'{where}.{key}' if where else str(key))


def _check_type(where: str, kind: Any, scope: Any) -> None:
    if not isinstance(kind, str) or not _NAME.fullmatch(kind):
        raise CheckpointError(f'{where}={kind!r} is no name of a type')
    own, _, name = kind.rpartition('.')
    if own and own not in (*scopes(), 'mmengine', 'mmcv'):
        raise CheckpointError(f'{where}={kind!r} is of no package of OpenMMLab')
    for package in filter(None, {own or scope, scope}):
        import_module(f'{package}.registry' if package != 'mmcv' else 'mmcv')
    if any(name in _names(registry) for registry in (MODELS, TASK_UTILS)):
        return
    # Two kinds of upstream's entries have a type that no registry knows.
    parent = where.split('.')[-2] if '.' in where else ''
    layer = getattr(import_module('mmcv.ops'), name, None) if parent == 'roi_layer' else None
    if own or not (isinstance(layer, type) or (parent.startswith('nms') and name in _OF_NMS)):
        raise CheckpointError(f'{where}={kind!r} is not registered')


def _names(registry: Registry) -> set[str]:
    registry.import_from_location()
    return set(registry.module_dict).union(*map(_names, registry.children.values()))


def build_described(described: Mapping[str, Any]) -> nn.Module:
    """Build a network that :func:`check_description` has looked at, without the gates that its
    config does not name.

    Args:
        described (Mapping): The description.
    """
    model = plain_config(described['model'])
    build = _foreign(model['type'])
    if build is not None:
        return build(**{k: v for k, v in model.items() if k not in ('type', *_FOREIGN_START)})
    scope = described.get('scope')
    if scope is None:
        return MODELS.build(model)
    with DefaultScope.overwrite_default_scope(scope):
        return MODELS.build(model)


def _foreign(kind: Any) -> Optional[Callable[..., nn.Module]]:
    """What builds a network of torchvision or timm, None for others."""
    package, _, name = kind.partition('.') if isinstance(kind, str) else ('', '', '')
    if package not in ('torchvision', 'timm'):
        return None
    try:
        source = import_module('torchvision.models' if package == 'torchvision' else 'timm')
    except ImportError as error:
        raise MissingPackageError(
            f'the network is one of {package}: pip install {package}'
        ) from error
    name = name.removeprefix('models.')
    if not (source.is_model(name) if package == 'timm' else name in source.list_models()):
        raise CheckpointError(f'type={kind!r} is no network of {source.__name__}')
    if package == 'timm':
        return partial(source.create_model, name, pretrained=False)
    return source.get_model_builder(name)
