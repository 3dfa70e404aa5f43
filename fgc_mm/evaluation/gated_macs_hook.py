# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The hook that counts while a model is validated or tested."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial, reduce
from operator import add
from typing import Any, Optional

import torch.nn as nn
from mmengine.config import Config
from mmengine.evaluator import Evaluator
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.model import BaseTTAModel
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement

from ..errors import UsageError, in_context
from ..macs import ImageMACs, MACsTracer
from ..runtime import Attachments, forward_argument, unwrap
from ..runtime.config.files import type_name
from .gated_macs import FIELD, GatedMACs


@HOOKS.register_module()
class GatedMACsHook(Hook):
    """Counts executed MACs in validation and testing, of any task model.

    It writes an :class:`~fgc_mm.macs.ImageMACs` as ``gated_macs`` into
    each data sample the model predicts, and adds the metric :class:`GatedMACs`
    to the evaluators that lack it, so one line in a config is all:

        >>> custom_hooks = [dict(type='GatedMACsHook')]

    Every pass of the backbone over an image counts, be it for windows of the
    image or for test-time augmentation.

    Args:
        backbone (str): Name of the model's part that the pruning ratio is
            about; '' for the whole model. Defaults to 'backbone'.
    """

    def __init__(self, backbone: str = 'backbone') -> None:
        self.backbone = backbone
        self._counter: Optional[PredictionCounter] = None

    def before_run(self, runner: Runner) -> None:
        """See that the backbone exists, and not after the first epoch."""
        with in_context('GatedMACsHook'):
            PredictionCounter(runner.model, self.backbone)

    def before_val(self, runner: Runner) -> None:
        self._start(runner, runner.val_loop.evaluator)

    def before_test(self, runner: Runner) -> None:
        self._start(runner, runner.test_loop.evaluator)

    def after_val(self, runner: Runner) -> None:
        self._stop()

    def after_test(self, runner: Runner) -> None:
        self._stop()

    def _start(self, runner: Runner, evaluator: Evaluator) -> None:
        self._stop()
        self._counter = PredictionCounter(runner.model, self.backbone)
        self._counter.attach()
        if any(isinstance(metric, GatedMACs) for metric in evaluator.metrics):
            return
        if hasattr(evaluator, 'dataset_prefixes'):
            print_log(
                f'{type(evaluator).__name__} evaluates one metric per dataset: list GatedMACs in '
                'val_evaluator and test_evaluator yourself to have it reported',
                logger='current',
                level=logging.WARNING,
            )
            return
        evaluator.metrics.append(GatedMACs())

    def _stop(self) -> None:
        if self._counter is not None:
            self._counter.detach()
            self._counter = None


class PredictionCounter:
    """Writes the MACs of every prediction of a model into its data sample.

    Args:
        model (nn.Module): A task model, which may be wrapped for distributed
            or test-time augmented execution.
        backbone (str): Name of the part that is the backbone.
            Defaults to 'backbone'.

    Attributes:
        model (nn.Module): The task model itself.
    """

    def __init__(self, model: nn.Module, backbone: str = 'backbone') -> None:
        model = unwrap(model)
        self._tta = model if isinstance(model, BaseTTAModel) else None
        self.model = task_model(model)
        self.tracer = MACsTracer(self.model, backbone)
        self._attached = Attachments()

    def attach(self) -> None:
        """Start counting."""
        self.tracer.attach()
        self._attached.before(self.model, lambda *_: self.tracer.reset())
        self._attached.after(self.model, self._after_forward, with_kwargs=True)
        if self._tta is not None:
            self._tta.__dict__['merge_preds'] = partial(_merge, self._tta.merge_preds)

    def detach(self) -> None:
        """Stop counting."""
        self.tracer.detach()
        self._attached.remove()
        if self._tta is not None:
            self._tta.__dict__.pop('merge_preds', None)

    def _after_forward(self, model: nn.Module, args: tuple, kwargs: dict, outputs: Any) -> None:
        if forward_argument('mode', args, kwargs) != 'predict':
            return
        samples = list(outputs)
        # mmengine's loops take a last element with nothing but losses aside.
        if samples and isinstance(samples[-1], BaseDataElement) and samples[-1].keys() == ['loss']:
            samples.pop()
        if not samples:
            return
        for sample, macs in zip(samples, self.tracer.take(len(samples)), strict=True):
            _write(sample, macs)


def _merge(merge: Callable[[Any], Any], data_samples_list: Any) -> Any:
    """Merged predictions are new data samples: give them the sums."""
    sums = [reduce(add, map(read_macs, views)) for views in data_samples_list]
    merged = merge(data_samples_list)
    for sample, macs in zip(merged, sums, strict=True):
        _write(sample, macs)
    return merged


def _write(sample: Any, macs: ImageMACs) -> None:
    if isinstance(sample, BaseDataElement):
        sample.set_field(macs, FIELD)
    elif isinstance(sample, dict):
        sample[FIELD] = macs
    else:
        raise UsageError(
            f'GatedMACsHook writes into data samples, but the model predicted a '
            f'{type(sample).__name__}; predict BaseDataElement or dict'
        )


def read_macs(sample: Any) -> ImageMACs:
    """What :class:`PredictionCounter` wrote into a data sample."""
    return sample[FIELD] if isinstance(sample, dict) else sample.get(FIELD)


def task_model(model: nn.Module) -> nn.Module:
    """The task model inside distributed wrappers and test-time augmentation."""
    model = unwrap(model)
    return unwrap(model.module) if isinstance(model, BaseTTAModel) else model


def counted_backbone(cfg: Config) -> str:
    """The part of the model that the :class:`GatedMACsHook` of a config calls the backbone."""
    for hook in cfg.get('custom_hooks') or []:
        if type_name(hook).endswith('GatedMACsHook'):
            return hook.get('backbone', 'backbone')
    return 'backbone'
