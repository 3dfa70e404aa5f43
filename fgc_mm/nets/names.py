# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""``type='GatedResNet'`` and its like: a network of the config's scope, gated."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Optional, Union

import torch.nn as nn
from mmengine.registry import MODELS, DefaultScope, Registry

from ..errors import UsageError
from ..runtime.messages import did_you_mean
from ..sites.choose import Choice
from .gated import Gated, gate_on_pictures
from .mobilenet_v2 import set_strides
from .scopes import on_every_registry, registry_of
from .weights import watch_weights

FAMILIES = {
    'GatedResNet': 'ResNet',
    'GatedResNetV1c': 'ResNetV1c',
    'GatedResNetV1d': 'ResNetV1d',
    'GatedMobileNetV2': 'MobileNetV2',
}
"""Name -> the network it gates, in mmdet, mmseg and mmpretrain."""

OWN_FAMILIES = {'GatedResNetCifar': 'ResNetCifar', 'GatedWideResNet': 'WideResNet'}
"""Name -> the network of :mod:`fgc_mm.nets` it gates."""


def options(
    gate: Optional[dict] = dict(type='BinConcreteGate'),
    gated_blocks: Choice = 'all',
    gated_convs: Union[str, Sequence[str], None] = None,
    widths: Optional[Mapping[str, int]] = None,
    gates_follow_freeze: bool = False,
    example: Optional[tuple[int, int, int]] = None,
    pretrained: Optional[str] = None,
) -> None:
    """What every name takes beside the arguments of its network.

    ``gated_blocks`` is ``sites`` of :func:`Gated`, and without the sites between two blocks;
    ``pretrained='file'`` is the same as ``init_cfg=dict(type='Pretrained', checkpoint='file')``.
    The others are those of :func:`Gated`. ``GatedMobileNetV2`` takes those of
    :func:`~fgc_mm.nets.mobilenet_v2.set_strides` in addition.
    """


class Family:
    """Builds a network of another package, gated, under a name of its own.

    Args:
        name (str): The name.
        network (str): Type of the network.
        registry (Registry): Whose network it is; the root's means that of the current scope.
    """

    advice = "; another network keeps its own config: type='Gated', backbone=dict(type=...)"
    """What a config check adds to an argument nobody has."""

    def __init__(self, name: str, network: str, registry: Registry) -> None:
        self.__name__ = self.__qualname__ = name
        self.network = network
        self.registry = registry
        self.more: list[Callable] = [
            options,
            *([set_strides] if name == 'GatedMobileNetV2' else []),
        ]

    def __repr__(self) -> str:
        return f'{self.__name__} (the {self.network} of {self.registry.scope}, gated)'

    def home(self) -> Registry:
        """The registry the network is built from."""
        if self.registry is not MODELS or self.network in MODELS.module_dict:
            return self.registry
        return registry_of(self.network, self.__name__)

    def upstream(self) -> type:
        """The class of the network.

        Raises:
            UsageError: If its package has none.
        """
        home = self.home()
        found = home.get(f'{home.scope}.{self.network}')
        if found is None:
            raise UsageError(
                f'{self.__name__}: {home.scope} has no {self.network}; gate a network it has by '
                "type='Gated', backbone=dict(type=...), or name its package, as in "
                f"type='mmpretrain.{self.__name__}'"
            )
        return found

    def arguments(self) -> dict[str, Callable]:
        """All it can be given: name -> the function whose argument that is."""
        found: dict[str, Callable] = {}
        for function in (*self.more, *constructors(self.upstream())):
            for name in parameters(function):
                found.setdefault(name, function)
        return found

    def check(self, given: Mapping[str, Any]) -> None:
        """See that the network takes arguments of these names, and has all that it needs.

        Raises:
            UsageError: If not.
        """
        known = self.arguments()
        unknown = [name for name in given if name not in known]
        empty = inspect.Parameter.empty
        needed = [name for name, of in known.items() if parameters(of)[name].default is empty]
        lacking = [name for name in needed if name not in given]
        if unknown:
            near = did_you_mean(unknown[0], known).removeprefix('; ')
            shown = ', '.join(map(repr, unknown))
            fault = f'it has no argument {shown}{f" ({near})" if near else ""}'
        elif lacking:
            fault = f'it needs the argument {lacking[0]!r}'
        else:
            return
        own = f', {unknown[0]}=...' if unknown else ''
        raise UsageError(
            f'{self.__name__} is {self.upstream().__name__} of {self.home().scope}, gated: '
            f"{fault}; another network keeps its own config: type='Gated', "
            f'backbone=dict(type=...{own})'
        )

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        theirs = {n: None for f in constructors(self.upstream()) for n in parameters(f)}
        given = {**dict(zip(theirs, args, strict=False)), **kwargs}
        self.check(given)
        mine = {name: given.pop(name, p.default) for name, p in parameters(options).items()}
        start = mine['pretrained']
        if start is not None and not isinstance(start, str):
            raise UsageError(f'{self.__name__}: pretrained={start!r} must be a str or None')
        if start is not None and given.get('init_cfg'):
            raise UsageError(f'{self.__name__}: give either pretrained={start!r} or init_cfg')
        if start is not None and 'pretrained' in theirs:
            given['pretrained'] = start
        elif start is not None:
            given['init_cfg'] = dict(type='Pretrained', checkpoint=start)
        ours = [name for name in parameters(set_strides) if name in given and name not in theirs]
        strides = {name: given.pop(name) for name in ours}
        home = self.home()
        cfg = dict(copy.deepcopy(given), type=f'{home.scope}.{self.network}', _scope_=home.scope)
        network = home.build(cfg)
        if strides:
            set_strides(network, **strides)
        watch_weights(network, self.__name__)
        return gate_on_pictures(
            network,
            given.get('in_channels', 3),
            mine['example'],
            mine['gate'],
            mine['widths'],
            mine['gated_convs'],
            self.__name__,
            sites=mine['gated_blocks'],
            key='gated_blocks',
            within_blocks=True,
            follow_freeze=mine['gates_follow_freeze'],
        )


def constructors(cls: type) -> list[Callable]:
    """The constructors of a class that its arguments reach, from its own to that of a base."""
    found: list[Callable] = []
    for base in cls.__mro__:
        init = vars(base).get('__init__')
        if not inspect.isfunction(init):
            continue
        found.append(init)
        if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(init).parameters.values()):
            break
    return found


def parameters(function: Callable) -> dict[str, inspect.Parameter]:
    """What a function can be given by name, but for the object it is about."""
    every = inspect.signature(function).parameters
    return {
        name: parameter
        for name, parameter in every.items()
        if name not in ('self', 'network') and parameter.kind is not parameter.VAR_KEYWORD
    }


def _register(registry: Registry) -> None:
    for name, network in FAMILIES.items():
        registry.register_module(name, module=Family(name, network, registry))

    @wraps(Gated)
    def gated(*args: Any, **kwargs: Any) -> nn.Module:
        with DefaultScope.overwrite_default_scope(registry.scope):
            return Gated(*args, **kwargs)

    registry.register_module('Gated', module=gated)


EVERY = [Family(name, net, MODELS) for name, net in {**FAMILIES, **OWN_FAMILIES}.items()]
for family in EVERY:
    MODELS.register_module(family.__name__, module=family)
(
    GatedResNet,
    GatedResNetV1c,
    GatedResNetV1d,
    GatedMobileNetV2,
    GatedResNetCifar,
    GatedWideResNet,
) = EVERY
on_every_registry(_register)
