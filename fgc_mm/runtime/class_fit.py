# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Refusing data with more classes than the model has outputs for."""

from __future__ import annotations

import re
from typing import Any

import torch.nn as nn

from ..errors import UsageError
from ..tasks import TASKS
from .task_model import unwrap


def check_classes(model: nn.Module, dataset: Any, key: str) -> None:
    """See that a model's head has an output for every class of a dataset.

    Otherwise the loss fails in the first batch that has one of the others, on a
    GPU without saying why. Region proposals and auxiliary heads may have tasks of
    their own and are left alone, as are datasets with things and stuff.

    Args:
        model (nn.Module): The task model, which may be wrapped.
        dataset (Dataset): The dataset, or a wrapper of one.
        key (str): What its loader is called in the config, for the error.

    Raises:
        UsageError: If there are more classes; it names the key of the head.
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
