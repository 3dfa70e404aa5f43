# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""``type='Gated'``: any registered backbone, gated."""

from __future__ import annotations

import copy
from typing import Any, Optional

import torch
import torch.nn as nn
from mmengine.registry import MODELS, DefaultScope, Registry

from ..errors import UsageError
from ..sites.choose import Choice
from ..sites.gate import gate as gate_network
from ..sites.recorder import ExampleError

_SIZES = (64, 224)
"""Sides of the pictures a network is tried on if its config names none."""


@MODELS.register_module()
def Gated(
    backbone: dict,
    gate: Optional[dict] = None,
    sites: Choice = 'all',
    example: Optional[tuple[int, int, int]] = None,
    gates_follow_freeze: bool = False,
    **kwargs: Any,
) -> nn.Module:
    """A backbone of mmdet, mmseg, mmpretrain or timm with gates on its sites.

    The network is upstream's own: parameter names, defaults and weights are its, and with
    every gate open it computes the same. Its child ``gates`` holds the gates.

    Args:
        backbone (dict): Config of the backbone.
        gate (dict, optional): Config of the gates. Defaults to None, a
            ``BinConcreteGate`` with layer norm.
        sites (str | int | Sequence): ``'all'`` but the stem, ``'last_stage'``, ``'stem'``, names of
            sites, blocks or stages, numbers of blocks, or a list of those. Defaults to 'all'.
        example (tuple, optional): Channels, height and width of a picture it runs on. Defaults
            to None: ``in_channels`` of its config, and 64 x 64 or 224 x 224.
        gates_follow_freeze (bool): Apply the backbone's ``norm_eval`` to gates as well. Defaults to
            False: gates learn.
        **kwargs: Handed on to the backbone; mmseg sets ``pretrained`` there.

    Returns:
        nn.Module: The backbone.

    Example:
        >>> backbone = dict(type='Gated', backbone=dict(type='mmdet.CSPNeXt'))
    """
    if not isinstance(backbone, dict) or 'type' not in backbone:
        raise UsageError(
            f"Gated: backbone={backbone!r} must be a config such as dict(type='ResNet', depth=50)"
        )
    network = _registry_of(backbone).build({**copy.deepcopy(backbone), **kwargs})
    channels = backbone.get('in_channels', 3)
    shapes = [example] if example else [(channels, size, size) for size in _SIZES]
    for shape in shapes:
        try:
            return gate_network(
                network, torch.rand(1, *shape), gate, sites, follow_norm_eval=gates_follow_freeze
            )
        except ExampleError as error:
            last = error
    raise UsageError(
        f'{last}; in a config: Gated(example=(channels, height, width), ...)'
    ) from last


def _registry_of(cfg: dict) -> Registry:
    """Where the type of a config is registered.

    A runner sets the scope of its config. Without one the packages that are imported are asked.
    """
    kind = cfg['type']
    if not isinstance(kind, str) or '.' in kind or DefaultScope.get_current_instance() is not None:
        return MODELS
    if kind in MODELS.module_dict:
        return MODELS
    owners = [child for child in MODELS.children.values() if kind in child.module_dict]
    if len(owners) == 1:
        return owners[0]
    found = ', '.join(f'{owner.scope}.{kind}' for owner in owners)
    raise UsageError(
        f'Gated: {kind!r} is in {len(owners)} of the imported packages'
        + (f' ({found}); write one of these' if owners else '; write its package in front')
        + ", as in dict(type='mmdet.ResNet'), or set default_scope"
    )
