# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A Runner whose first steps fail with one message instead of a traceback."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch.nn as nn
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from ..datasets import check_annotations, check_boxes, name_broken_pictures
from ..errors import UsageError, in_context
from ..tasks import TASKS
from .config.files import dicts_in
from .messages import explained, shortened
from .module_hooks import unwrap

_SUBJECTS = {
    'start': 'the run cannot start',
    'train': 'the first training step failed',
    'val': 'the first validation failed',
    'test': 'the test failed',
}


class _FirstSteps(Hook):
    """Knows what a runner is doing, and what it has done once without failing."""

    priority = 'HIGHEST'  # what another hook does at the same point belongs to the new phase

    def __init__(self) -> None:
        self.now = 'start'
        self.done: set[str] = set()
        self.running: list[nn.Module] = []  # each inside the one before
        self.handles: list[Any] = []

    def before_train_iter(self, runner: Runner, *args: Any, **kwargs: Any) -> None:
        if self.now == 'train':  # the second step: the first one is through
            self._through('train', runner)
        elif 'train' not in self.done and not runner.cfg.get('compile'):
            self.handles = [
                register_module_forward_pre_hook(lambda layer, _: self.running.append(layer)),
                register_module_forward_hook(lambda *_: self.running.__delitem__(-1)),
            ]
        self.now = 'train'

    def before_val(self, runner: Runner) -> None:
        if self.now == 'train':
            self._through('train', runner)
        self.now = 'val'

    def before_test(self, runner: Runner) -> None:
        self.now = 'test'

    def after_train(self, runner: Runner) -> None:
        self._through('train', runner)

    def after_val(self, runner: Runner) -> None:
        self._through('val', runner)

    def after_test(self, runner: Runner) -> None:
        self._through('test', runner)

    def _through(self, phase: str, runner: Runner) -> None:
        if not self.done:
            runner.dump_config()  # the files in the work dir are of this run from now on
        self.done.add(phase)
        self._forget_layers()

    def _forget_layers(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.running, self.handles = [], []

    def _layer(self, runner: Runner) -> str:
        """The innermost layer that runs, for a message; '' if it is none of the model's."""
        for name, layer in unwrap(runner.model).named_modules():
            if name and layer in self.running[-1:]:
                return f' in {name}: {shortened(repr(layer), 100)}'
        return ''

    def explaining(self, runner: Runner, method: Callable[[], Any]) -> Callable[[], Any]:
        """A method of the runner whose first errors are one message."""

        def call() -> Any:
            try:
                return method()
            except Exception as error:
                if self.now in self.done:
                    raise
                with explained(_SUBJECTS[self.now] + self._layer(runner)):
                    raise error
            finally:
                self._forget_layers()

        return call


def watch_first_steps(runner: Runner) -> None:
    """Let a runner tell what is wrong with its config in one message.

    What fails before and in the first training step, the first validation or the
    test comes from the config or the data far more often than from the code.
    Errors of later steps pass as they are. Datasets name the file of a broken
    picture or annotation, and a checkpoint that cannot be loaded is named. The config is
    written into the work dir when all of that is through.
    """
    steps = _FirstSteps()
    runner.register_hook(steps)
    for name in ('train', 'val', 'test'):
        setattr(runner, name, steps.explaining(runner, getattr(runner, name)))
    load = runner.load_or_resume

    def load_or_resume() -> None:
        with explained(f'checkpoint {runner._load_from} cannot be used'):
            load()

    runner.load_or_resume = load_or_resume  # type: ignore[method-assign]
    _name_data_faults(runner)


def _name_data_faults(runner: Runner) -> None:
    build, nodes = runner.build_dataloader, dicts_in(runner.cfg.get('model'))
    given = (node.get('ignore_index') for _, node in nodes)
    ignored = {255, *(value for value in given if isinstance(value, int))}

    def build_dataloader(dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        key = _key(runner.cfg, dataloader)
        with explained(f'{key} cannot be built'):
            scope = runner.cfg.get('default_scope')
            try:
                loader = build(dataloader, *args, **kwargs)
            except Exception as error:
                empty = 'need at least one array to concatenate' in str(error)  # mmengine's
                _name_fault(key, dataloader, scope, empty)
                raise
            if hasattr(loader.dataset, '__len__') and not len(loader.dataset):
                _name_fault(key, dataloader, scope, empty=True)
            check_boxes(loader.dataset)
            check_classes(runner.model, loader.dataset, key)
        name_broken_pictures(loader.dataset, ignored)
        return loader

    runner.build_dataloader = build_dataloader  # type: ignore[method-assign]


def _name_fault(key: str, dataloader: Any, scope: Optional[str], empty: bool) -> None:
    """Raise what is wrong with a dataset that failed, or has nothing in it."""
    dataset = dataloader.get('dataset') if isinstance(dataloader, Mapping) else None
    with in_context(f'{key}.dataset'):
        check_annotations(dataset, scope)
    if empty:
        raise UsageError(
            f'{key}.dataset has no items: nothing is listed, or filter_cfg, indices and '
            'metainfo.classes leave nothing'
        )


def _key(cfg: Config, dataloader: Any) -> str:
    """What a loader, or one with other batches, is called in the config."""
    dataset = dataloader.get('dataset') if isinstance(dataloader, Mapping) else None
    for split in ('train', 'val', 'test'):
        own = cfg.get(f'{split}_dataloader') or {}
        if dataset is not None and own.get('dataset') == dataset:
            return f'{split}_dataloader'
    return 'the dataloader'


def check_classes(model: nn.Module, dataset: Any, key: str) -> None:
    """See that a model's head has an output for every class of a dataset.

    Otherwise the loss fails in the first batch that has one of the others, on a
    GPU without saying why. Region proposals and auxiliary heads may have tasks of
    their own and are left alone, as are datasets with things and stuff.
    """
    metainfo = getattr(dataset, 'metainfo', None) or {}
    classes = metainfo.get('classes')
    if classes is None or isinstance(classes, str) or 'thing_classes' in metainfo:
        return
    heads = '|'.join(head for task in TASKS.values() for head in task.heads)
    for name, module in unwrap(model).named_modules():
        outputs = getattr(module, 'num_classes', None)
        if not isinstance(outputs, int) or outputs >= len(classes):
            continue
        if not re.search(rf'(^|\.)({heads})(\.\d+)?$', name):
            continue
        shown = ', '.join(map(str, classes[:4])) + (', ...' if len(classes) > 4 else '')
        raise UsageError(
            f'model.{name}.num_classes={outputs}, but {key}.dataset has {len(classes)} classes '
            f'({shown}); set num_classes={len(classes)} in every head'
        )
