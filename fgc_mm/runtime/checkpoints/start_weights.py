# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Finding missing weights before a training starts instead of after."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Optional
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
from ..config.files import dicts_in
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
    problems = [_problem(key, path, cfg) for key, path in _start_weights(cfg)]
    if any(problems):
        raise UsageError('\n'.join(filter(None, problems)))


def _problem(key: str, path: str, cfg: Config) -> Optional[str]:
    if '://' in path:
        return _unreachable(key, path)
    if not os.path.exists(path):
        return _missing_file(key, path, cfg)
    fault = checkpoint_fault(path)
    return fault and f'{key}: {fault}'


def _start_weights(cfg: Config) -> Iterator[tuple[str, str]]:
    """The key and the place of everything a training loads before its first step."""
    if isinstance(cfg.get('load_from'), str):
        yield 'load_from', cfg.load_from
    for key, node in dicts_in(cfg.model, 'model'):
        place, old = node.get('checkpoint'), node.get('pretrained')
        if isinstance(place, str) and node.get('type') in ('Pretrained', 'PretrainedInit'):
            yield f'{key}.checkpoint', place
        if isinstance(old, str) and ('://' in old or old.endswith(('.pth', '.pt'))):
            yield f'{key}.pretrained', old


def _missing_file(key: str, path: str, cfg: Config) -> str:
    """What to say of a local file that does not exist."""
    maker, own = _maker(path, cfg), Path(cfg.filename or '')
    if maker is None:
        advice = f'Say where the weights are with --cfg-options {key}=FILE'
    else:
        advice = f'It is made by:  python tools/train.py {maker}'
        public = own.parents[1] / own.name if own.parent.name == 'paper' else None
        if public is not None and public.is_file():
            shown = os.path.relpath(public)
            advice += f'\nWithout a training before it:  python tools/train.py {shown}'
    return f'{key}={path!r} does not exist. {advice}'


def _maker(path: str, cfg: Config) -> Optional[str]:
    """The config whose work dir a checkpoint ``work_dirs/<config>/<file>`` lies in."""
    folder = Path(path).parent
    # work_dirs/short/<config> belongs to configs/short/<config>.py.
    candidates = [Path('configs', *folder.parts[1:]).with_suffix('.py')]
    for place in (Path(cfg.filename or 'configs/x').parent, Path('configs')):
        candidates += [place / f'{folder.name}.py', *sorted(place.glob(f'*/{folder.name}.py'))]
    found = [candidate for candidate in candidates if folder.name and candidate.is_file()]
    return os.path.relpath(found[0]) if found else None


def _unreachable(key: str, address: str) -> Optional[str]:
    """What to say of public weights that cannot be had; None if they can."""
    scheme, _, name = address.partition('://')
    url = address
    if scheme in _LISTS:
        known = _LISTS[scheme]()
        name = get_deprecated_model_names().get(name, name)
        if name not in known:
            return f'{key}={address!r} is not in the list of {scheme}{did_you_mean(name, known)}'
        url = known[name]
    if not url.startswith(('http://', 'https://')):
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
