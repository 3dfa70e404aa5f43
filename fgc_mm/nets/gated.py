# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""``type='Gated'``: any registered backbone, or parts of any model, gated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, Union

import torch
import torch.nn as nn
from mmengine.registry import MODELS, Registry

from ..errors import UsageError
from ..gates import check_gate
from ..sites.choose import Choice
from ..sites.gate import DEFAULT_GATE, narrowed
from ..sites.gate import gate as gate_network
from ..sites.recorder import ExampleError
from .gated_model import SIZES, Parts, gate_model
from .scopes import registry_of
from .weights import watch_weights


@MODELS.register_module()
def Gated(
    backbone: Optional[dict] = None,
    gate: Optional[dict] = DEFAULT_GATE,
    sites: Choice = 'all',
    gated_convs: Union[str, Sequence[str], None] = None,
    widths: Optional[Mapping[str, int]] = None,
    example: Optional[tuple[int, int, int]] = None,
    gates_follow_freeze: bool = False,
    model: Optional[dict] = None,
    part: Parts = 'backbone',
    **kwargs: Any,
) -> nn.Module:
    """A backbone of mmdet, mmseg, mmpretrain or timm with gates on its sites, or a whole model
    with gates in some of its parts.

    The network is upstream's own: parameter names, defaults and weights are its, and with
    every gate open it computes the same. Its child ``gates``, or that of each part, holds the
    gates.

    Args:
        backbone (dict, optional): Config of the backbone. Defaults to None, if ``model`` is given.
        gate (dict, optional): Config of the gates; None builds the network without any. Defaults to
            a ``BinConcreteGate`` with layer norm.
        sites (str | int | Sequence): ``'all'`` but the stem, ``'last_stage'``, ``'stem'``, names of
            sites, blocks or stages, numbers of blocks, or a list of those. Defaults to 'all'.
        gated_convs (str | Sequence[str], optional): Of these only the sites of layers called so,
            ``'conv2'`` in every block or ``'layer1.0.conv2'`` in one. Defaults to None, every one.
        widths (dict, optional): Channels that are left of single sites, such as
            ``{'layer1.0.conv1': 37}``. Defaults to None.
        example (tuple, optional): Channels, height and width of a picture it runs on. Defaults
            to None: ``in_channels`` of its config, and 64 x 64 or 224 x 224.
        gates_follow_freeze (bool): Apply the backbone's ``frozen_stages`` and ``norm_eval`` to
            gates as well. Defaults to False: gates learn.
        model (dict, optional): In place of ``backbone`` the config of a model. Defaults to None.
        part (str | Sequence[str]): Names of the model's parts that are gated.
            Defaults to 'backbone'.
        **kwargs: Handed on to the backbone or the model; mmseg sets ``pretrained`` there, a runner
            ``data_preprocessor``.

    Returns:
        nn.Module: The backbone, or the model.

    Example:
        >>> backbone = dict(type='Gated', backbone=dict(type='mmdet.CSPNeXt'))
        >>> model = dict(type='Gated', model=_base_.model, part=('backbone', 'bbox_head'))
    """
    convs = [gated_convs] if isinstance(gated_convs, str) else gated_convs
    if model is not None and backbone is None:
        return _build_model(
            model, part, gate, sites, convs, widths, example, gates_follow_freeze, kwargs
        )
    if model is not None or part != 'backbone':
        raise UsageError(
            f'Gated: part={part!r} needs the config of a whole model, and no backbone beside it: '
            "model = dict(_delete_=True, type='Gated', model=_base_.model, part=...)"
        )
    if not isinstance(backbone, dict) or 'type' not in backbone:
        raise UsageError(
            f"Gated: backbone={backbone!r} must be a config such as dict(type='ResNet', depth=50)"
        )
    return build_gated(
        {**backbone, **kwargs},
        registry_of(backbone['type'], 'Gated'),
        gate,
        sites,
        convs,
        widths,
        example,
        gates_follow_freeze,
    )


def _build_model(
    model: dict,
    part: Parts,
    gate: Optional[dict],
    sites: Choice,
    convs: Optional[Sequence[str]],
    widths: Optional[Mapping[str, int]],
    example: Optional[tuple[int, int, int]],
    follow_freeze: bool,
    kwargs: dict[str, Any],
) -> nn.Module:
    """Build a model and gate parts of it, see :func:`Gated`."""
    if not isinstance(model, dict) or 'type' not in model:
        raise UsageError(
            f'Gated: model={model!r} must be the config of a model, such as model=_base_.model'
        )
    if gate is not None:
        check_gate(gate)
    cfg = {**copy.deepcopy(model), **kwargs}
    if model.get('data_preprocessor') is not None:  # a runner hands on that of the config's top
        cfg['data_preprocessor'] = copy.deepcopy(model['data_preprocessor'])
    network = registry_of(model['type'], 'Gated').build(cfg)
    if gate is None and not widths:
        return network
    convs = None if convs == ['all'] else convs
    return gate_model(network, part, gate, sites, convs, example, follow_freeze, widths)


def build_gated(
    backbone: dict,
    registry: Registry,
    gate: Optional[dict],
    sites: Choice = 'all',
    gated_convs: Union[str, Sequence[str], None] = None,
    widths: Optional[Mapping[str, int]] = None,
    example: Optional[tuple[int, int, int]] = None,
    gates_follow_freeze: bool = False,
    key: str = 'sites',
    within_blocks: bool = False,
    name: Optional[str] = None,
    change: Optional[Callable[[nn.Module], None]] = None,
) -> nn.Module:
    """Build a backbone and gate it: what :func:`Gated` and the names of families share.

    Args:
        backbone (dict): Config of the backbone.
        registry (Registry): Where its type is registered.
        gate (dict, optional): See :func:`Gated`, as for all up to ``gates_follow_freeze``.
        sites (str | int | Sequence): Defaults to 'all'.
        gated_convs (str | Sequence[str], optional): Defaults to None.
        widths (dict, optional): Defaults to None.
        example (tuple, optional): Defaults to None.
        gates_follow_freeze (bool): Defaults to False.
        key (str): What ``sites`` is called for the user. Defaults to 'sites'.
        within_blocks (bool): Leave what one block hands to the next to itself. Defaults to False.
        name (str, optional): The name it is known by, if that stands for one network: weights
            of another are refused. Defaults to None.
        change (Callable, optional): What else is done to the network. Defaults to None.
    """
    if gate is not None:
        check_gate(gate)
    network = registry.build(copy.deepcopy(backbone))
    if change is not None:
        change(network)
    watch_weights(network, name)
    if gate is None and not widths:
        return network
    channels = backbone.get('in_channels', 3)
    shapes = [example] if example else [(channels, size, size) for size in SIZES]
    convs = [gated_convs] if isinstance(gated_convs, str) else gated_convs
    for shape in shapes:
        try:
            if gate is None:
                return narrowed(network, widths or {}, torch.zeros(1, *shape))
            return gate_network(
                network,
                torch.zeros(1, *shape),
                gate,
                sites,
                follow_freeze=gates_follow_freeze,
                convs=None if convs == ['all'] else convs,
                key=key,
                within_blocks=within_blocks,
                widths=widths,
            )
        except ExampleError as error:
            last = error
    raise UsageError(
        f'{last}; in a config: {name or "Gated"}(example=(channels, height, width), ...)'
    ) from last
