# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Configs of models, and what is left of their networks without channels or gates."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ..errors import UsageError
from ..runtime.config.files import type_name


def model_config(cfg: Mapping[str, Any]) -> Any:
    """The model of a config, with the preprocessor that stands beside it, as a Runner has it."""
    model = copy.deepcopy(cfg['model'])
    if cfg.get('data_preprocessor') is not None:
        model.setdefault('data_preprocessor', cfg['data_preprocessor'])
    return model


def with_gating(model: Any, networks: Mapping[str, Mapping[str, Any]]) -> None:
    """Have the config of a model build what is left of its networks.

    Args:
        model (dict): The config; it is changed.
        networks (Mapping): Name of each network that the config gates -> ``widths``, site -> the
            channels that are left, and ``sites``, those that have a gate.

    Raises:
        UsageError: If a network is none of the config.
    """
    left: dict[int, list[str]] = {}
    for name, options in networks.items():
        node, prefix = gating_node(model, name)
        widths = {prefix + site: width for site, width in options['widths'].items()}
        sites = left.setdefault(id(node), [])
        sites += [prefix + site for site in options['sites']]
        key = 'sites' if type_name(node) == 'Gated' else 'gated_blocks'
        node.update({'widths': {**(node.get('widths') or {}), **widths}, key: list(sites)})
        node.pop('gated_convs', None)
        # Weights to start from have the old widths.
        for built in (node.get('model'), node.get('backbone'), node):
            if built:
                built.pop('pretrained', None)
                built['init_cfg'] = None
    for name in networks:
        node, _ = gating_node(model, name)
        if not left[id(node)]:
            node['gate'] = None


def gating_node(model: Any, network: str) -> tuple[Any, str]:
    """The part of a config that gates a network, and what its sites begin with there.

    Args:
        model (dict): Config of a model.
        network (str): Name of the network in it.

    Raises:
        UsageError: If the config has no such part.
    """
    if type_name(model) == 'Gated' and model.get('model') is not None:
        alone = model.get('part', 'backbone') in ('backbone', ['backbone'], ('backbone',))
        return model, '' if alone else f'{network}.'
    node = model
    for part in filter(None, network.split('.')):
        if not isinstance(node, Mapping) or part not in node:
            raise UsageError(f'the config has no model.{network}, which the network is called')
        node = node[part]
    return node, ''
