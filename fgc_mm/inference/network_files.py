# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A network as one file: its weights, and in plain data what builds it."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, Optional, Union

import torch
import torch.nn as nn

from ..errors import CheckpointError, in_context
from ..files import write_files
from ..runtime import unwrap
from ..runtime.untrusted.config_text import plain_values
from ..runtime.untrusted.loading import guarded_loading
from ..sites.gate import gate as gate_network
from ..sites.gate import narrowed
from ..sites.origin import Gating, filled, from_plain
from .descriptions import build_described, check_description, gates_itself, plain_config
from .gating_config import model_config, with_gating

VERSION = 1
"""Of what ``meta['fgc_mm']`` looks like."""


def save(
    network: nn.Module,
    path: Union[str, os.PathLike],
    model: Mapping[str, Any],
    scope: Optional[str] = None,
) -> None:
    """Write a network with all that :func:`load` needs to build it again.

    Args:
        network (nn.Module): With gates, with static gates, slimmed, or as it is.
        path (str): The file.
        model (Mapping): What builds the network without gates, or with those of its config: the
            config of a model of mmdet, mmseg, mmpretrain, or such as
            ``dict(type='torchvision.models.resnet50', num_classes=10)`` and
            ``dict(type='timm.resnet18')``. Where channels were taken out and gates dropped since is
            known.
        scope (str, optional): The package whose types ``model`` names, such as 'mmdet'. Defaults to
            None, the scope of the run.

    Raises:
        UsageError: If ``model`` is not plain, or names what may not be built from a file.

    Example:
        >>> save(net, 'net.pth', dict(type='torchvision.models.resnet50'))
        >>> net = load('net.pth')
    """
    network = unwrap(network)
    described: dict[str, Any] = dict(model=plain_config(model), scope=scope, gating=[])
    own = {}
    for name, module in network.named_modules():
        gating = module.__dict__.get('gating')
        if not isinstance(gating, Gating):
            continue
        if gates_itself(described['model'], name):
            own[name] = dict(widths=gating.widths, sites=gating.sites)
        else:
            described['gating'].append(dict(vars(gating), network=name))
    with_gating(described['model'], own)
    check_description(described)
    meta: dict[str, Any] = dict(fgc_mm=dict(described, version=VERSION))
    if isinstance(getattr(network, 'dataset_meta', None), Mapping):
        meta['dataset_meta'] = dict(network.dataset_meta)  # type: ignore[arg-type]
    state = network.state_dict()
    for key, value in state.items():
        state[key] = value.detach().cpu()
    write_files({Path(path): partial(torch.save, dict(meta=meta, state_dict=state))})


def load(path: Union[str, os.PathLike]) -> nn.Module:
    """Build the network of a file and load its weights.

    Files of :func:`save` and checkpoints of a Runner are read as data: nothing in them is run.

    Args:
        path (str): The file.

    Returns:
        nn.Module: The network, on the CPU, in evaluation mode.

    Raises:
        CheckpointError: If the file cannot be read or trusted, or does not say what builds it.
    """
    try:
        with guarded_loading():
            content = torch.load(path, map_location='cpu')
    except FileNotFoundError as error:
        raise CheckpointError(f'{path} does not exist') from error
    meta = (content.get('meta') if isinstance(content, dict) else None) or {}
    described = _description(meta, str(path))
    with in_context(f'{path} was not loaded'):
        check_description(described)
        network = build_described(described)
        for entry in described['gating']:
            _gate_again(network.get_submodule(entry['network']), from_plain(entry))
    problem = f'{path} was not loaded: its weights are not those of what it describes'
    load_exactly(network, content['state_dict'], problem)
    if 'dataset_meta' in meta:
        network.dataset_meta = meta['dataset_meta']
    network.eval()
    return network


def load_exactly(model: nn.Module, state: Mapping[str, Any], problem: str) -> None:
    """Load weights that are all of a model and no more.

    Args:
        model (nn.Module): The model.
        state (Mapping): Its weights.
        problem (str): What to say first if they are others.

    Raises:
        CheckpointError: If anything is missing, left over or of another shape.
    """
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        faults = [shorten(line, 200) for line in str(error).splitlines()[1:4]]
        raise CheckpointError(f'{problem}: {"; ".join(faults)}') from error


def _description(meta: Mapping[str, Any], path: str) -> dict[str, Any]:
    """What builds a network, of a file of ours or in the config of a Runner's checkpoint."""
    own = meta.get('fgc_mm')
    if isinstance(own, Mapping):
        if own.get('version') != VERSION:
            raise CheckpointError(
                f'{path} is of version {own.get("version")!r} of these files, and this fgc_mm '
                f'reads version {VERSION}: use the one that wrote it'
            )
        if not isinstance(own.get('model'), Mapping) or not isinstance(own.get('gating'), list):
            raise CheckpointError(f'{path} was not loaded: it does not say what builds its network')
        return copy.deepcopy(dict(own))
    values = plain_values(meta['cfg']) if isinstance(meta.get('cfg'), str) else {}
    if not isinstance(values.get('model'), dict):
        raise CheckpointError(
            f'{path} does not say what builds its network: write it by fgc_mm.save, or build '
            'the network from its config'
        )
    return dict(model=model_config(values), scope=values.get('default_scope'), gating=[])


def _gate_again(network: nn.Module, gating: Gating) -> None:
    example, widths = filled(gating.example), gating.widths
    if not gating.sites or gating.gate is None:
        narrowed(network, widths, example)
    else:
        follow = gating.follow_freeze
        gate_network(network, example, gating.gate, gating.sites, follow, widths=widths)
