# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Finding missing weights before a training starts instead of after."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, Optional
from urllib.parse import urlparse

import torch
from mmengine.config import Config
from mmengine.runner.checkpoint import (
    get_deprecated_model_names,
    get_external_models,
    get_mmcls_models,
    get_torchvision_models,
)

from ...errors import UsageError
from ..messages import did_you_mean
from .file import checkpoint_fault

_SECONDS = 15
"""How long a server may take to answer."""


def check_start_weights(cfg: Config) -> None:
    """See that the weights a training starts from can be had.

    These are ``load_from``, the ``checkpoint`` of every ``Pretrained`` initialization
    inside ``model``, and ``pretrained`` of a model or backbone. A file must exist. Public
    weights, such as ``torchvision://resnet50``, must be in the cache or on a server that
    answers; the first process alone asks.
    """
    problems = []
    for key, path in _start_weights(cfg):
        if '://' in path:
            problem = _unreachable(key, path)
        elif not os.path.exists(path):
            problem = _missing_file(key, path, cfg)
        else:
            fault = checkpoint_fault(path)
            problem = fault and f'{key}: {fault}'
        if problem is not None:
            problems.append(problem)
    if problems:
        raise UsageError('\n'.join(problems))


def _start_weights(cfg: Config) -> Iterator[tuple[str, str]]:
    """The key and the place of everything a training loads before its first step."""
    if isinstance(cfg.get('load_from'), str):
        yield 'load_from', cfg.load_from
    yield from _pretrained('model', cfg.model)


def _pretrained(key: str, node: Any) -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping):
        place = node.get('checkpoint')
        if node.get('type') in ('Pretrained', 'PretrainedInit') and isinstance(place, str):
            yield f'{key}.checkpoint', place
            return
        for name, value in node.items():
            if name == 'pretrained' and isinstance(value, str) and _is_place(value):
                yield f'{key}.pretrained', value
            yield from _pretrained(f'{key}.{name}', value)
    elif isinstance(node, (list, tuple)):
        for number, value in enumerate(node):
            yield from _pretrained(f'{key}.{number}', value)


def _is_place(value: str) -> bool:
    return '://' in value or value.endswith(('.pth', '.pt'))


def _missing_file(key: str, path: str, cfg: Config) -> str:
    """What to say of a local file that does not exist."""
    maker = _maker(path, cfg)
    if maker is not None:
        text = f'{key}={path!r} does not exist. It is made by:  python tools/train.py {maker}'
        public = Path(cfg.filename or '').parent.parent / Path(cfg.filename or '').name
        if Path(cfg.filename or '').parent.name == 'paper' and public.is_file():
            text += (
                f'\nWithout a training before it:  python tools/train.py {os.path.relpath(public)}'
            )
        return text
    return f'{key}={path!r} does not exist. Say where the weights are with --cfg-options {key}=FILE'


def _maker(path: str, cfg: Config) -> Optional[str]:
    """The config whose work dir a checkpoint ``work_dirs/<config>/<file>`` lies in."""
    name = Path(path).parent.name
    beside = Path(cfg.filename).parent if cfg.filename else Path('configs')
    # work_dirs/short/<config> belongs to configs/short/<config>.py.
    below = Path('configs', *Path(path).parent.parts[1:]).with_suffix('.py')
    if name and below.is_file():
        return str(below)
    for folder in (beside, Path('configs')):
        for candidate in (folder / f'{name}.py', *sorted(folder.glob(f'*/{name}.py'))):
            if name and candidate.is_file():
                return os.path.relpath(candidate)
    return None


def _unreachable(key: str, address: str) -> Optional[str]:
    """What to say of public weights that cannot be had; None if they can."""
    scheme, _, name = address.partition('://')
    url: Optional[str] = address
    if scheme in _LISTS:
        known = _LISTS[scheme]()
        name = get_deprecated_model_names().get(name, name)
        url = known.get(name)
        if url is None:
            return f'{key}={address!r} is not in the list of {scheme}{did_you_mean(name, known)}'
    if url is None or not url.startswith(('http://', 'https://')):
        return None  # left to mmengine
    # Where torch.hub, which mmengine downloads with, keeps them.
    folder = os.path.join(torch.hub.get_dir(), 'checkpoints')
    file = os.path.basename(urlparse(url).path)
    if os.path.exists(os.path.join(folder, file)) or int(os.environ.get('RANK', 0)):
        return None
    try:
        with urllib.request.urlopen(url, timeout=_SECONDS):
            return None
    except (OSError, ValueError, HTTPException) as error:
        reason = getattr(error, 'reason', None) or error
    return (
        f'{key}={address!r} cannot be fetched: {reason}. Without a network, get {url} elsewhere '
        f'and put it into {folder} as {file}, or name any other place with --cfg-options {key}=FILE'
    )


_LISTS = {
    'torchvision': get_torchvision_models,
    'modelzoo': get_torchvision_models,
    'open-mmlab': get_external_models,
    'openmmlab': get_external_models,
    'mmcls': get_mmcls_models,
}
