# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a checkpoint of another time or package is called here, and whose it cannot be."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from functools import partial
from typing import Any, Optional

import torch.nn as nn
from mmengine.logging import print_log

from ..errors import CheckpointError
from ..gates import find_gates
from ..sites import Gates
from ..sites.container import NAME

_OLD_GATE = re.compile(r'(?P<block>.+)\.gate(?P<number>\d)\.(?P<rest>.+)')
_MOBILE = ('expand_conv', 'depthwise_conv', 'linear_conv')


def watch_weights(network: nn.Module, name: Optional[str] = None) -> None:
    """See what a network loads.

    Gates of earlier versions (``layer1.0.gate1``) get the names of their sites, and layers that
    mmdet, mmseg and mmpretrain call differently those of the network. Weights of another
    network are refused if the network is known by a name that stands for one.

    Args:
        network (nn.Module): The network.
        name (str, optional): That name. Defaults to None.
    """
    hook = partial(_before_loading, name)  # a copy of the network keeps it
    network._register_load_state_dict_pre_hook(hook, with_module=True)


def _before_loading(
    name: Optional[str],
    network: nn.Module,
    state_dict: dict,
    prefix: str,
    local_metadata: dict,
    strict: bool,
    *_: Any,
) -> None:
    own = network.state_dict()
    given = {key[len(prefix) :]: key for key in state_dict if key.startswith(prefix)}
    names = rename_layers(own, list(given))
    gates = rename_gates(network, [key for key in given if key not in own])
    renamed = {**names, **gates}
    values = {old: state_dict.pop(given[old]) for old in renamed}  # names may change places
    for old, new in renamed.items():
        if new is not None:
            state_dict[prefix + new] = values[old]
    if name is not None and strict:
        shapes = {
            key[len(prefix) :]: value.shape
            for key, value in state_dict.items()
            if key.startswith(prefix) and hasattr(value, 'shape')
        }
        fault = fault_of(network, shapes, whole=not prefix)
        if fault:
            raise CheckpointError(
                f'{name} gates a {type(network).__name__}, and the checkpoint is of another '
                f'network: {fault}; gate that one under its own name: '
                "type='Gated', backbone=dict(type=...)"
            )


def old_gates(keys: Iterable[str]) -> list[str]:
    """Those of some names that are parameters of gates in an earlier version's checkpoint."""
    return [key for key in keys if _OLD_GATE.fullmatch(key)]


def rename_gates(network: nn.Module, keys: list[str]) -> dict[str, Optional[str]]:
    """Old -> new name of gates that were children of their blocks, None without a place.

    A gate that has none, as that of the block of a MobileNetV2 that expands nothing, is
    told and left out: its channels stay open.
    """
    modules = dict(network.named_modules())
    holder = modules.get(NAME)
    sites = holder.sites if isinstance(holder, Gates) else {}
    found: dict[str, Optional[str]] = {}
    homeless = set()
    for key in keys:
        match = _OLD_GATE.fullmatch(key)
        if match is None or match['block'] not in modules:
            continue
        block, number = match['block'], match['number']
        layers = [f'{block}.conv{number}', f'{block}.conv.0.conv', f'{block}.expand_conv.conv']
        site = next((layer for layer in layers if layer in modules), layers[0])
        found[key] = f'{NAME}.{Gates.name_of(site)}.{match["rest"]}'
        if sites and site not in sites:
            found[key] = None
            homeless.add(f'{block}.gate{number}')
    if homeless:
        print_log(
            f'{type(network).__name__}: {len(homeless)} gates of the checkpoint have no gate here, '
            f'their channels stay open: {", ".join(sorted(homeless))}',
            logger='current',
            level=logging.WARNING,
        )
    return found


def rename_layers(own: dict, given: list[str]) -> dict[str, str]:
    """What other packages call deep stems, shortcuts, inverted residuals -> the network's names."""
    found = {}
    keys = set(given)
    for key in given:
        if key in own:
            continue
        for other in _other_names(key, keys):
            if other in own and other not in keys:
                found[key] = other
                break
    return found | _shifted_shortcuts(own, keys)


def _other_names(key: str, keys: set[str]) -> list[str]:
    nested = re.fullmatch(r'stem\.(\d)\.(conv|bn)\.(\w+)', key)
    flat = re.fullmatch(r'stem\.(\d)\.(\w+)', key)
    mobile = re.fullmatch(r'(layer\d\.\d+)\.conv\.(\d)(\..+)', key)
    unnamed = re.fullmatch(r'(layer\d\.\d+)\.(\w+_conv)(\..+)', key)
    if nested:
        return [f'stem.{3 * int(nested[1]) + (nested[2] == "bn")}.{nested[3]}']
    if flat:
        part = ('conv', 'bn')[int(flat[1]) % 3 % 2]
        return [f'stem.{int(flat[1]) // 3}.{part}.{flat[2]}']
    if mobile:
        expands = any(other.startswith(f'{mobile[1]}.conv.2.') for other in keys)
        number = int(mobile[2]) + (not expands)
        return [f'{mobile[1]}.{_MOBILE[number]}{mobile[3]}'] if number < 3 else []
    if unnamed and unnamed[2] in _MOBILE:
        expands = any(other.startswith(f'{unnamed[1]}.{_MOBILE[0]}.') for other in keys)
        number = _MOBILE.index(unnamed[2]) - (not expands)
        return [f'{unnamed[1]}.conv.{number}{unnamed[3]}']
    return []


def _shifted_shortcuts(own: dict, keys: set[str]) -> dict[str, str]:
    """A shortcut with a pooling layer without a stride is one module longer in mmdet and mmseg."""
    found = {}
    for stage in range(1, 5):
        name = f'layer{stage}.0.downsample'
        short, long = f'{name}.0.weight', f'{name}.2.weight'
        if short in keys and short not in own and long in own:
            step = 1
        elif short in own and short not in keys and long in keys:
            step = -1
        else:
            continue
        for key in keys:
            match = re.fullmatch(rf'({re.escape(name)}\.)(\d)(\..+)', key)
            if match:
                found[key] = f'{match[1]}{int(match[2]) + step}{match[3]}'
    return found


def fault_of(network: nn.Module, shapes: dict[str, Any], whole: bool) -> Optional[str]:
    """Why weights with these shapes cannot be those of a network, None if they can; ``whole`` says
    that a file may hold more, such as a head beside it.

    A layer's bias that is too many (the public Caffe weights have one) and a first layer for
    other pictures are none.
    """
    own = network.state_dict()
    gates = tuple(f'{gate}.' for gate in find_gates(network))
    modules = {name for name, _ in network.named_modules()}
    foreign = [
        key
        for key in shapes
        if key not in own
        and key.rpartition('.')[0] not in modules
        and not key.startswith(f'{NAME}.')
        and not (whole and key.partition('.')[0] not in modules)
    ]
    if foreign:
        return f'it has {len(foreign)} tensors that are none of its, such as {foreign[0]!r}'
    other = [
        key
        for key, value in own.items()
        if key in shapes and shapes[key] != value.shape and not key.startswith(gates)
    ]
    if len(other) > 1:
        key = other[1]
        return (
            f'{len(other)} tensors have another shape, such as {key!r}: '
            f'{tuple(shapes[key])} in place of {tuple(own[key].shape)}'
        )
    return None
