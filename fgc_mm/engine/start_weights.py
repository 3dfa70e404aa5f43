# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Finding missing weights before a training starts instead of after."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Optional

from mmengine.config import Config

from .checkpoint_file import checkpoint_fault

# What a gated detector or segmentor needs to become sparse from dense weights.
_DENSE_GATES = 'optim_wrapper.paramwise_cfg.custom_keys.gate.lr_mult=10'


def check_start_weights(cfg: Config) -> None:
    """See that the local files a training takes its first weights from exist.

    These are ``load_from`` and the ``checkpoint`` of every ``Pretrained``
    initialisation inside ``model``. Addresses such as ``torchvision://resnet50``
    are left to mmengine.

    Args:
        cfg (Config): The config of a training.

    Raises:
        FileNotFoundError: Naming the first missing file, the config that makes
            it, and how to start from dense weights instead.
        ValueError: If a file cannot be a checkpoint.
    """
    load_from = cfg.get('load_from')
    if isinstance(load_from, str):
        if _is_missing(load_from):
            raise FileNotFoundError(_message('load_from', load_from, cfg, _dense_load(cfg)))
        _check_file('load_from', load_from)
    for key, init_cfg, owner in _pretrained('model', cfg.model, {}):
        path = init_cfg['checkpoint']
        if _is_missing(path):
            options = _dense_init(key, init_cfg, owner)
            raise FileNotFoundError(_message(f'{key}.checkpoint', path, cfg, options))
        _check_file(f'{key}.checkpoint', path)


def _check_file(key: str, path: str) -> None:
    fault = checkpoint_fault(path) if '://' not in path else None
    if fault is not None:
        raise ValueError(f'{key}: {fault}')


def _is_missing(path: str) -> bool:
    return '://' not in path and not os.path.exists(path)


def _pretrained(key: str, node: Any, owner: Mapping) -> Iterator[tuple[str, Mapping, Mapping]]:
    """Every ``Pretrained`` config below a node: its key, itself, the module it belongs to."""
    if isinstance(node, Mapping):
        if node.get('type') in ('Pretrained', 'PretrainedInit') and isinstance(
            node.get('checkpoint'), str
        ):
            yield key, node, owner
            return
        for name, value in node.items():
            inside_init = name == 'init_cfg'
            yield from _pretrained(f'{key}.{name}', value, node if inside_init else owner)
    elif isinstance(node, (list, tuple)):
        for number, value in enumerate(node):
            yield from _pretrained(f'{key}.{number}', value, owner)


def _message(key: str, path: str, cfg: Config, options: str) -> str:
    maker = _maker(path, cfg)
    lines = [f'{key}={path!r} does not exist']
    if maker is not None:
        lines.append(f'It is made by:  python tools/train.py {maker}')
    else:
        lines.append(f'Say where the weights are with --cfg-options {key}=<file>')
    lines.append(f'To start from dense weights instead:  --cfg-options {options}')
    lines.append('docs/configs.md has more about both.')
    return '\n'.join(lines)


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


def _dense_load(cfg: Config) -> str:
    weights = _torchvision(cfg.model.get('backbone') or {})
    if weights is None:
        return 'load_from=<checkpoint of the dense model>, or load_from=None for random weights'
    init = 'model.backbone.init_cfg'
    return f'load_from=None {init}.type=Pretrained {init}.checkpoint={weights}'


def _dense_init(key: str, init_cfg: Mapping, owner: Mapping) -> str:
    options = [f'{key}.checkpoint={_torchvision(owner) or "<dense weights>"}']
    if init_cfg.get('prefix') is not None:
        options.append(f'{key}.prefix=None')
    gate = owner.get('gate')
    if isinstance(gate, Mapping):
        if isinstance(gate.get('norm_cfg'), Mapping):
            options.append(f'{key.rpartition(".")[0]}.gate.norm_cfg.type=LN')
        options.append(_DENSE_GATES)
    return ' '.join(options)


def _torchvision(backbone: Mapping) -> Optional[str]:
    """The public dense weights of a ResNet."""
    kind, depth = backbone.get('type'), backbone.get('depth')
    if backbone.get('base_channels', 64) != 64:  # there are none of another width
        return None
    if backbone.get('style') == 'caffe':  # the stride is elsewhere, and so is the blue
        return f'open-mmlab://detectron2/resnet{depth}_caffe' if depth in (50, 101) else None
    if depth not in (18, 34, 50, 101, 152) or not isinstance(kind, str):
        return None
    if kind.endswith('ResNetV1c'):
        return f'open-mmlab://resnet{depth}_v1c'
    return f'torchvision://resnet{depth}' if kind.endswith('ResNet') else None
