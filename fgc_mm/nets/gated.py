# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""``type='Gated'``: any registered backbone, or parts of any model, gated."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Optional, Union

import torch
import torch.nn as nn
from mmengine.registry import MODELS

from ..errors import UsageError, in_context
from ..gates import check_gate
from ..sites import gate_sites
from ..sites.choose import Choice, choose
from ..sites.find import find_in_model
from ..sites.gate import DEFAULT_GATE, narrow_found, narrowed, remember, stem_of
from ..sites.gate import gate as gate_network
from ..sites.origin import InModel
from ..sites.parts import check_parts, in_part
from ..sites.recorder import ExampleError
from ..sites.site import is_in
from .scopes import registry_of
from .weights import watch_weights

Shape = tuple[int, int, int]

SIZES = (64, 224)
"""Sides of the pictures a network is tried on if its config names none."""


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
    part: Union[str, Sequence[str]] = 'backbone',
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
    options: dict[str, Any] = dict(
        gate=gate,
        sites=sites,
        convs=gated_convs,
        widths=widths,
        follow_freeze=gates_follow_freeze,
    )
    if model is not None and backbone is None:
        if not isinstance(model, dict) or 'type' not in model:
            raise UsageError(
                f'Gated: model={model!r} must be the config of a model, such as model=_base_.model'
            )
        cfg = {**copy.deepcopy(model), **kwargs}
        if model.get('data_preprocessor') is not None:  # a runner hands on that of the config's top
            cfg['data_preprocessor'] = copy.deepcopy(model['data_preprocessor'])
        built = registry_of(model['type'], 'Gated').build(cfg)
        parts = [part] if isinstance(part, str) else list(part)
        with in_context('Gated'):
            check_parts(built, parts)
        for name in parts:
            watch_weights(built.get_submodule(name))
        if parts == ['backbone']:  # a picture is all that it takes
            gate_on_pictures(built.get_submodule('backbone'), 3, example, **options)
        else:
            gate_in_model(built, parts, example, **options)
        return built
    if model is not None or part != 'backbone':
        raise UsageError(
            f'Gated: part={part!r} needs the config of a whole model, and no backbone beside it: '
            "model = dict(_delete_=True, type='Gated', model=_base_.model, part=...)"
        )
    if not isinstance(backbone, dict) or 'type' not in backbone:
        raise UsageError(
            f"Gated: backbone={backbone!r} must be a config such as dict(type='ResNet', depth=50)"
        )
    cfg = {**copy.deepcopy(backbone), **kwargs}
    network = registry_of(cfg['type'], 'Gated').build(cfg)
    watch_weights(network)
    return gate_on_pictures(network, backbone.get('in_channels', 3), example, **options)


def gate_on_pictures(
    network: nn.Module,
    channels: int,
    example: Optional[Shape],
    gate: Optional[dict],
    widths: Optional[Mapping[str, int]],
    convs: Union[str, Sequence[str], None],
    name: str = 'Gated',
    **options: Any,
) -> nn.Module:
    """Gate a network that takes pictures and nothing else.

    Args:
        network (nn.Module): The network; it is changed and returned.
        channels (int): Channels of a picture.
        example (tuple, optional): See :func:`Gated`, as for the next three.
        gate (dict, optional): Config of the gates.
        widths (dict, optional): Channels that are left of single sites.
        convs (str | Sequence[str], optional): Which layers.
        name (str): Type of the config. Defaults to 'Gated'.
        **options: See :func:`fgc_mm.sites.gate.gate`.
    """

    def attempt(shape: Shape) -> None:
        pictures = torch.zeros(1, *shape)
        if gate is None:
            narrowed(network, widths or {}, pictures)
        else:
            gate_network(network, pictures, gate, convs=_layers(convs), widths=widths, **options)

    if _asks_for_any(gate, widths):
        _try_sizes(attempt, channels, example, name)
    return network


def gate_in_model(
    model: nn.Module,
    parts: Sequence[str],
    example: Optional[Shape],
    gate: Optional[dict],
    sites: Choice,
    convs: Union[str, Sequence[str], None],
    widths: Optional[Mapping[str, int]],
    follow_freeze: bool,
) -> None:
    """Gate parts of a model, each of which gets a child ``gates``; see :func:`Gated`.

    Raises:
        UsageError: If the forward pass never runs a part, or it has no site.
    """

    def attempt(shape: Shape) -> None:
        find = partial(find_in_model, shape=shape)
        whole = narrow_found(model, find(model), widths or {}, find)
        if gate is None:
            return
        found = {part: in_part(whole, part) for part in parts}
        named, stem = [], []
        for part, mine in found.items():
            where = f'part={part!r} of {type(model).__name__}'
            if not mine.sites and not mine.refused:
                raise UsageError(
                    f'Gated: the forward pass never runs {where}, neither in testing nor in '
                    'training; leave it out'
                )
            if not mine.sites:
                reasons = '; '.join(f'{r.name}: {r.reason}' for r in mine.refused[:3])
                raise UsageError(
                    f'Gated: {where} has no site to put a gate on ({reasons}); leave it out'
                )
            named += [site.seen_from(part) for site in mine.sites]
            if mine.first:
                stem = [f'{part}.{name}' for name in stem_of(model.get_submodule(part), mine)]
        chosen = {site.name for site in choose(named, sites, stem, _layers(convs))}
        for part, mine in found.items():
            own = [site for site in mine.sites if f'{part}.{site.name}' in chosen]
            if not own:
                continue
            network = model.get_submodule(part)
            gate_sites(network, own, gate, follow_freeze)
            left = {
                name.removeprefix(f'{part}.'): kept
                for name, kept in (widths or {}).items()
                if is_in(name, part)
            }
            remember(network, InModel(part, shape), left, dict(gate))

    if _asks_for_any(gate, widths):
        hint = (
            '. To gate a backbone alone a picture is enough: '
            "backbone=dict(type='Gated', backbone=dict(type=...))"
        )
        _try_sizes(attempt, 3, example, 'Gated', hint)


def _asks_for_any(gate: Optional[dict], widths: Optional[Mapping[str, int]]) -> bool:
    if gate is not None:
        check_gate(gate)
    return gate is not None or bool(widths)


def _layers(convs: Union[str, Sequence[str], None]) -> Optional[Sequence[str]]:
    """What ``gated_convs`` names; ``'all'`` is one way to say every one."""
    names = [convs] if isinstance(convs, str) else convs
    return None if names == ['all'] else names


def _try_sizes(
    attempt: Callable[[Shape], None],
    channels: int,
    example: Optional[Shape],
    name: str,
    hint: str = '',
) -> None:
    """Do something with a picture of the example's shape, or of some usual one."""
    shapes = [example] if example else [(channels, size, size) for size in SIZES]
    for shape in shapes:
        try:
            return attempt(shape)
        except ExampleError as error:
            last = error
    raise UsageError(
        f'{last}; in a config: {name}(example=(channels, height, width), ...){hint}'
    ) from last
