# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Finding types that do not exist, arguments that nobody has and numbers that cannot be, before
anything is built."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Optional

from mmengine import registry
from mmengine.config import Config
from mmengine.registry import MODELS, Registry
from mmengine.runner import Runner
from torch.utils.data import DataLoader

from ...errors import UsageError
from ...tasks import scopes
from ..messages import did_you_mean
from .argument_types import argument_faults, describe, fits

_MOST = 10
_PACKAGES = ('fgc_mm', 'mmcv', 'mmdet', 'mmengine', 'mmpretrain', 'mmseg')
# What these packages build from the registry of models, wherever it stands in one of theirs.
_MODELS = re.compile(r'backbone|neck|(\w+_)?head|gate|data_preprocessor')
# The same, but some of their arguments are for whoever uses them.
_LAYERS = re.compile(r'(norm|conv|act)_cfg|loss(_\w+)?')
_DECAYS = ('bias_decay_mult', 'norm_decay_mult', 'dwconv_decay_mult')
_RUNNERS = ('num_batch_per_epoch', 'disable_subprocess_warning')  # keys of a loader that it takes
_TOGETHER = (
    ('train_dataloader', 'train_cfg', 'optim_wrapper'),
    ('val_dataloader', 'val_cfg', 'val_evaluator'),
    ('test_dataloader', 'test_cfg', 'test_evaluator'),
)
_LOADERS = ('train_dataloader', 'val_dataloader', 'test_dataloader')
_ABSENT = object()
# Key -> type and least value. mmengine and torch find these late, or fail over them elsewhere.
_NUMBERS: dict[str, tuple[Any, float]] = {
    'train_cfg.max_epochs': (int, 1),
    'train_cfg.max_iters': (int, 1),
    'train_cfg.val_interval': (int, 1),
    'optim_wrapper.optimizer.lr': (float, 0),
    'optim_wrapper.optimizer.weight_decay': (float, 0),
    'optim_wrapper.accumulative_counts': (int, 1),
    'optim_wrapper.clip_grad.max_norm': (float, 0),
    'auto_scale_lr.base_batch_size': (int, 1),
    'randomness.seed': (Optional[int], 0),
    **{f'{loader}.batch_size': (Optional[int], 1) for loader in _LOADERS},
    **{f'{loader}.num_workers': (int, 0) for loader in _LOADERS},
}


def check_run_settings(cfg: Config) -> None:
    """See that numbers and names every run has are possible."""
    for key, (hint, least) in _NUMBERS.items():
        value: Any = cfg
        for part in key.split('.'):
            value = value.get(part, _ABSENT) if isinstance(value, (Config, Mapping)) else _ABSENT
        if value is not _ABSENT:
            _check_number(key, value, hint, least)
    for keys in _TOGETHER:
        lacking = [key for key in keys if cfg.get(key) is None]
        if 0 < len(lacking) < len(keys):
            raise UsageError(
                f'the config has no {" and no ".join(lacking)}: {", ".join(keys)} go together; set '
                'all of them, or all to None'
            )
    level = cfg.get('log_level', 'INFO')
    if isinstance(level, str) and not isinstance(logging.getLevelName(level), int):
        raise UsageError(f'log_level={level!r} must be DEBUG, INFO, WARNING or ERROR')
    scope = cfg.get('default_scope')
    if scope is not None and not _is_installed(scope):
        there = [known for known in (*scopes(), 'mmengine') if _is_installed(known)]
        raise UsageError(
            f'default_scope={scope!r} names no installed package'
            f'{did_you_mean(scope, there) or "."} Those there are: {", ".join(map(repr, there))}'
        )


def check_config(cfg: Config, splits: Collection[str]) -> None:
    """See that what a Runner will build exists and has the arguments it is given.

    Only what is certain is told: of a class of one of the packages it is known what it builds
    of its own arguments, of one of the user's it is not.
    """
    if 'runner_type' in cfg:  # builds what it wants
        return
    walk = _Walk(cfg.get('default_scope') or 'mmengine')
    walk.model('model', cfg.get('model'), walk.scope)
    for key in ('default_hooks', 'custom_hooks'):
        walk.parts(registry.HOOKS, key, cfg.get(key), ('priority',))
    visualizer = cfg.get('visualizer')
    walk.part(registry.VISUALIZERS, 'visualizer', visualizer)
    backends = visualizer.get('vis_backends') if isinstance(visualizer, Mapping) else None
    walk.parts(registry.VISBACKENDS, 'visualizer.vis_backends', backends)
    walk.arguments('randomness', Runner.set_randomness, cfg.get('randomness'))
    for split in splits:
        walk.loader(f'{split}_dataloader', cfg.get(f'{split}_dataloader'))
        walk.loop(f'{split}_cfg', cfg.get(f'{split}_cfg'))
        walk.evaluator(f'{split}_evaluator', cfg.get(f'{split}_evaluator'))
    if 'train' in splits:
        wrapper = cfg.get('optim_wrapper')
        # As the usual constructor makes them; another one, or several optimizers, have their ways.
        if isinstance(wrapper, Mapping) and 'optimizer' in wrapper and 'constructor' not in wrapper:
            handled, key = ('paramwise_cfg',), 'optim_wrapper'
            walk.part(registry.OPTIM_WRAPPERS, key, wrapper, handled, default='OptimWrapper')
            walk.part(registry.OPTIMIZERS, f'{key}.optimizer', wrapper['optimizer'])
            walk.decay(key, wrapper)
        schedules = cfg.get('param_scheduler')
        handled = ('convert_to_iter_based',)
        walk.parts(registry.PARAM_SCHEDULERS, 'param_scheduler', schedules, handled)
    if walk.faults:
        raise UsageError('\n'.join(walk.faults[:_MOST]))


class _Walk:
    """Goes through a config and notes what is wrong."""

    def __init__(self, scope: str) -> None:
        self.scope = scope
        self.faults: list[str] = []

    def part(
        self,
        kind: Registry,
        key: str,
        node: Any,
        handled: Sequence[str] = (),
        scope: Optional[str] = None,
        default: Optional[str] = None,
    ) -> Any:
        """Look at what a registry builds, some arguments ``handled`` before; return its class."""
        if not isinstance(node, Mapping) or not node.get('type', default):
            return None
        name = node.get('type', default)
        cls, known = _find(kind, name, node.get('_scope_', scope or self.scope))
        if cls is None:
            own = '; a class of your own has to be imported, by custom_imports=dict(imports=[...])'
            self.faults.append(
                f'{key}.type={name!r} is not in the {kind.name} registry'
                f'{did_you_mean(name, known) or own}'
            )
        if not inspect.isclass(cls) and not hasattr(cls, 'arguments'):
            return None
        self.arguments(key, cls, node, ('type', '_scope_', *handled))
        return cls

    def parts(self, kind: Registry, key: str, node: Any, handled: Sequence[str] = ()) -> None:
        for inner, each in _items(key, node):
            self.part(kind, inner, each, handled)

    def arguments(self, key: str, what: Any, node: Any, handled: Sequence[str] = ()) -> None:
        if isinstance(node, Mapping):
            given = {name: value for name, value in node.items() if name not in handled}
            try:
                self.faults += argument_faults(what, given, key)
            except UsageError as error:  # a builder that finds nothing to build
                self.faults.append(f'{key}: {error}')

    def model(self, key: str, node: Any, scope: str, sure: bool = True) -> None:
        """Look at a model and its parts, ``sure`` to be built from the registry of models."""
        if isinstance(node, (list, tuple)):
            for number, each in enumerate(node):
                self.model(f'{key}.{number}', each, scope, sure)
        elif isinstance(node, str) and sure:
            self.faults.append(f'{key}={node!r} must be a dict such as dict(type={node!r})')
        if not isinstance(node, Mapping):
            return
        scope = node.get('_scope_', scope)
        if sure:
            cls = self.part(MODELS, key, node, scope=scope)
        else:
            cls = _find(MODELS, node.get('type'), scope)[0] if node.get('type') else None
        for name, value in node.items():
            if _is_known(cls) and _LAYERS.fullmatch(name):
                if isinstance(value, Mapping):
                    layer = {k: value[k] for k in ('type', '_scope_') if k in value}
                    self.part(MODELS, f'{key}.{name}', layer, scope=scope)
            elif isinstance(value, (Mapping, list, tuple, str)):
                certain = _is_known(cls) and _MODELS.fullmatch(name) is not None
                self.model(f'{key}.{name}', value, scope, certain)

    def loader(self, key: str, node: Any) -> None:
        if not isinstance(node, Mapping):
            return
        self.arguments(key, DataLoader, node, _RUNNERS)
        for name in ('sampler', 'batch_sampler'):
            self.part(registry.DATA_SAMPLERS, f'{key}.{name}', node.get(name))
        self.dataset(f'{key}.dataset', node.get('dataset'), self.scope)

    def dataset(self, key: str, node: Any, scope: str) -> None:
        """Look at a dataset, those it wraps and its pipeline."""
        cls = self.part(registry.DATASETS, key, node, scope=scope)
        if not _is_known(cls):
            return
        scope = node.get('_scope_', scope)
        self.dataset(f'{key}.dataset', node.get('dataset'), scope)
        for inner, each in _items(f'{key}.datasets', node.get('datasets')):
            self.dataset(inner, each, scope)
        self.transforms(f'{key}.pipeline', node.get('pipeline'), scope)

    def transforms(self, key: str, node: Any, scope: str) -> None:
        """Look at the steps of a pipeline, and at those that mmcv's steps are made of."""
        for inner, step in _items(key, node):
            if isinstance(step, (list, tuple)):
                self.transforms(inner, step, scope)
            cls = self.part(registry.TRANSFORMS, inner, step, scope=scope)
            if cls is not None and cls.__module__.startswith('mmcv.'):
                self.transforms(f'{inner}.transforms', step.get('transforms'), scope)

    def loop(self, key: str, node: Any) -> None:
        if not isinstance(node, Mapping):
            return
        default = {'val_cfg': 'ValLoop', 'test_cfg': 'TestLoop'}.get(key)
        handled: tuple[str, ...] = ()
        if key == 'train_cfg' and 'by_epoch' in node and 'type' not in node:
            handled = ('by_epoch',)
            default = 'EpochBasedTrainLoop' if node['by_epoch'] else 'IterBasedTrainLoop'
        self.part(registry.LOOPS, key, node, handled, default=default)

    def evaluator(self, key: str, node: Any) -> None:
        if isinstance(node, Mapping) and 'metrics' in node:
            self.part(registry.EVALUATOR, key, node)
            key, node = f'{key}.metrics', node['metrics']
        self.parts(registry.METRICS, key, node)

    def decay(self, key: str, wrapper: Mapping) -> None:
        """Look for factors of a weight decay that the optimizer was not given."""
        optimizer, options = wrapper['optimizer'], wrapper.get('paramwise_cfg')
        if not isinstance(options, Mapping) or not isinstance(optimizer, Mapping):
            return
        if optimizer.get('weight_decay') is not None:
            return
        each = options.get('custom_keys')
        found = [name for name in options if name in _DECAYS]
        for name, factors in each.items() if isinstance(each, Mapping) else ():
            if isinstance(factors, Mapping) and 'decay_mult' in factors:
                found.append(f'custom_keys.{name}.decay_mult')
        for name in found:
            self.faults.append(
                f'{key}.paramwise_cfg.{name} has nothing to multiply: {key}.optimizer '
                f'({optimizer.get("type")}) has no weight_decay; drop {name.split(".")[-1]}, or '
                'give the optimizer its weight_decay'
            )


def _items(key: str, node: Any) -> list[tuple[str, Any]]:
    """The entries of a list or of a dict of several, each with its key; a single one as it is."""
    if isinstance(node, Mapping):
        each_one = [(f'{key}.{name}', each) for name, each in node.items()]
        return [(key, node)] if 'type' in node else each_one
    if isinstance(node, (list, tuple)):
        return [(f'{key}.{number}', each) for number, each in enumerate(node)]
    return []


def _is_known(cls: Any) -> bool:
    known = inspect.isclass(cls) or hasattr(cls, 'arguments')
    return known and cls.__module__.partition('.')[0] in _PACKAGES


def _find(kind: Registry, name: Any, scope: str) -> tuple[Any, list[str]]:
    """What a registry has under a name, and all names it has."""
    if not isinstance(name, str):
        return name, []
    with kind.switch_scope_and_registry(scope) as here:
        try:
            found = here.get(name)
        except RuntimeError:  # a path in a package that does not exist
            found = None
        known: list[str] = []
        node: Optional[Registry] = here
        while node is not None:
            known += node.module_dict
            node = node.parent
    return found, known


def _check_number(key: str, value: Any, hint: Any, least: float) -> None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # as mmengine takes 1e5 for iterations
    if not fits(value, hint) or (value is not None and not value >= least):
        raise UsageError(f'{key}={value!r} must be {describe(hint)}, {least:g} or more')


def _is_installed(scope: Any) -> bool:
    try:
        return importlib.util.find_spec(str(scope)) is not None
    except (ImportError, ValueError):
        return False
