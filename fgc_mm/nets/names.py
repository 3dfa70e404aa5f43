# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""``type='GatedResNet'`` and its like: a network of the config's scope, gated."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, Optional, Union

import torch.nn as nn
from mmengine.registry import MODELS, DefaultScope, Registry

from ..errors import UsageError
from ..runtime.messages import did_you_mean
from ..sites.choose import Choice
from .gated import Gated, build_gated
from .mobilenet_v2 import set_strides
from .scopes import on_every_registry, registry_of

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

    Args:
        gate (dict, optional): Config of the gates; None builds the dense network.
            Defaults to ``dict(type='BinConcreteGate')``.
        gated_blocks (str | int | Sequence): ``'all'`` but the stem, ``'last_stage'``, ``'stem'``,
            names of stages (``'layer4'``), blocks (``'layer3.1'``) or sites, numbers of blocks (-1
            the last), or a list of those. Defaults to 'all'.
        gated_convs (str | Sequence[str], optional): Of these only the sites of layers called so,
            ``'conv2'`` in every block or ``'layer1.0.conv2'`` in one. Defaults to None, every one.
        widths (dict, optional): Channels that are left of single sites, such as
            ``{'layer1.0.conv1': 37}``. Defaults to None.
        gates_follow_freeze (bool): Apply ``frozen_stages`` and ``norm_eval`` to gates as well.
            Defaults to False: gates learn.
        example (tuple, optional): Channels, height and width of a picture the network runs on.
            Defaults to None, ``in_channels`` x 64 x 64.
        pretrained (str, optional): Weights to start from, the same as
            ``init_cfg=dict(type='Pretrained', checkpoint=...)``. Defaults to None.
    """


def mobilenet_options(
    stem_stride: Optional[int] = None, strides: Optional[Sequence[int]] = None
) -> None:
    """What ``GatedMobileNetV2`` takes in addition, for small pictures.

    Args:
        stem_stride (int, optional): Stride of the first convolution. Defaults to None, 2.
        strides (Sequence[int], optional): Strides of the seven stages. Defaults to
            None, (1, 2, 2, 2, 1, 2, 1).
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
            *([mobilenet_options] if network == 'MobileNetV2' else []),
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
            for name, parameter in inspect.signature(function).parameters.items():
                if name != 'self' and parameter.kind is not parameter.VAR_KEYWORD:
                    found.setdefault(name, function)
        return found

    def fault(self, given: Mapping[str, Any]) -> Optional[str]:
        """What is wrong with the names of some arguments, None if nothing is."""
        known = self.arguments()
        unknown = [name for name in given if name not in known]
        whose = f'{self.__name__} is {self.upstream().__name__} of {self.home().scope}, gated'
        if unknown:
            shown = ', '.join(map(repr, unknown))
            near = did_you_mean(unknown[0], known).removeprefix('; ')
            return (
                f'{whose}: it has no argument {shown}{f" ({near})" if near else ""}; another '
                f"network keeps its own config: type='Gated', backbone=dict(type=..., "
                f'{unknown[0]}=...)'
            )
        lacking = [
            name
            for name, function in known.items()
            if name not in given
            and inspect.signature(function).parameters[name].default is inspect.Parameter.empty
        ]
        if lacking:
            return (
                f'{whose}: it needs the argument {lacking[0]!r}; another network keeps its own '
                "config: type='Gated', backbone=dict(type=...)"
            )
        return None

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        network = self.upstream()
        chain = constructors(network)
        positional = [p for p in inspect.signature(chain[-1]).parameters if p != 'self']
        kwargs = {**dict(zip(positional, args, strict=False)), **kwargs}
        fault = self.fault(kwargs)
        if fault is not None:
            raise UsageError(fault)
        mine = {
            name: parameter.default
            for name, parameter in inspect.signature(options).parameters.items()
        }
        mine.update((name, kwargs.pop(name)) for name in list(kwargs) if name in mine)
        theirs = {name for function in chain for name in inspect.signature(function).parameters}
        pretrained = mine.pop('pretrained')
        if pretrained is not None:
            self._start_from(pretrained, kwargs, 'pretrained' in theirs)
        steps = {
            name: kwargs.pop(name)
            for name in ('stem_stride', 'strides')
            if mobilenet_options in self.more and name in kwargs and name not in theirs
        }
        home = self.home()
        return build_gated(
            dict(kwargs, type=f'{home.scope}.{self.network}', _scope_=home.scope),
            home,
            sites=mine.pop('gated_blocks'),
            key='gated_blocks',
            within_blocks=True,
            name=self.__name__,
            change=partial(set_strides, **steps) if steps else None,
            **mine,
        )

    def _start_from(self, checkpoint: Any, kwargs: dict, known: bool) -> None:
        if not isinstance(checkpoint, str):
            raise UsageError(f'{self.__name__}: pretrained={checkpoint!r} must be a str or None')
        if kwargs.get('init_cfg'):
            raise UsageError(f'{self.__name__}: give either pretrained={checkpoint!r} or init_cfg')
        if known:
            kwargs['pretrained'] = checkpoint
        else:
            kwargs['init_cfg'] = dict(type='Pretrained', checkpoint=checkpoint)


def constructors(cls: type) -> list[Callable]:
    """The constructors of a class that its arguments reach, from its own to that of a base."""
    found: list[Callable] = []
    for base in cls.__mro__:
        init = vars(base).get('__init__')
        if not inspect.isfunction(init):
            continue
        found.append(init)
        kinds = {parameter.kind for parameter in inspect.signature(init).parameters.values()}
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            break
    return found


def _register(registry: Registry) -> None:
    for name, network in FAMILIES.items():
        registry.register_module(name, module=Family(name, network, registry))

    @wraps(Gated)
    def gated(*args: Any, **kwargs: Any) -> nn.Module:
        with DefaultScope.overwrite_default_scope(registry.scope):
            return Gated(*args, **kwargs)

    registry.register_module('Gated', module=gated)


GatedResNet, GatedResNetV1c, GatedResNetV1d, GatedMobileNetV2 = (
    Family(name, network, MODELS) for name, network in FAMILIES.items()
)
GatedResNetCifar, GatedWideResNet = (
    Family(name, network, MODELS) for name, network in OWN_FAMILIES.items()
)
for family in (
    GatedResNet,
    GatedResNetV1c,
    GatedResNetV1d,
    GatedMobileNetV2,
    GatedResNetCifar,
    GatedWideResNet,
):
    MODELS.register_module(family.__name__, module=family)
on_every_registry(_register)
