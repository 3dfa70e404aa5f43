# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Refusing the checkpoint of another architecture, which mmengine only warns about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn as nn
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import Tensor

from ..errors import CheckpointError
from .gated_macs_hook import task_model

NEEDED = 0.75
"""Share of the model's and of the checkpoint's tensors that have to be there."""


def check_fit(model: nn.Module, checkpoint: Mapping[str, Any], name: str) -> None:
    """See that a checkpoint is one of this model.

    Gates do not count: dense weights may be tried in a gated network, and the
    other way round. A few tensors that are missing or too many are left to mmengine,
    which names them in a warning. One of another shape is of another network: its layer
    would stay random.

    Raises:
        CheckpointError: If a tensor has another shape, or more than a quarter
            of either side's tensors are not there; it counts and names them.
    """
    model = task_model(model)
    state = checkpoint.get('state_dict', checkpoint) if isinstance(checkpoint, Mapping) else None
    if not isinstance(state, Mapping):
        found = type(checkpoint if state is None else state).__name__
        raise CheckpointError(f'checkpoint {name} holds no weights but a {found}')
    given = {
        key.removeprefix('module.'): value.shape
        for key, value in state.items()
        if isinstance(value, Tensor) and _counts(key)
    }
    wanted = {key: value.shape for key, value in model.state_dict().items() if _counts(key)}
    if not given:
        raise CheckpointError(f'checkpoint {name} holds no weights')
    missing = [key for key in wanted if key not in given]
    unexpected = [key for key in given if key not in wanted]
    other = [
        f'{key} {tuple(given[key])} instead of {tuple(shape)}'
        for key, shape in wanted.items()
        if key in given and given[key] != shape
    ]
    fitting = len(wanted) - len(missing) - len(other)
    if not other and fitting >= NEEDED * max(len(wanted), len(given)):
        return
    lines = [
        f'checkpoint {name} does not belong to this config: of the {len(wanted)} tensors of the '
        f'{type(model).__name__} {fitting} fit, and the checkpoint has {len(given)} (gates aside)'
    ]
    for what, names in (('missing', missing), ('unexpected', unexpected), ('other shape', other)):
        if names:
            more = ', ...' if len(names) > 3 else ''
            lines.append(f'  {what} {len(names)}: {", ".join(names[:3])}{more}')
    lines.append('Give the config the checkpoint was trained with.')
    raise CheckpointError('\n'.join(lines))


def _counts(key: str) -> bool:
    # The parameters of gates have `gate` in their names, whatever the backbone.
    return 'gate' not in key and not key.endswith('num_batches_tracked')


class CheckpointFitHook(Hook):
    """Checks a checkpoint before it is loaded, see :func:`check_fit`.

    Args:
        name (str): Path of the checkpoint, for the error.
    """

    priority = 'VERY_HIGH'

    def __init__(self, name: str) -> None:
        self.name = name
        self.keys: set[str] = set()
        """What the checkpoint has."""

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        check_fit(runner.model, checkpoint, self.name)
        weights = checkpoint.get('state_dict', checkpoint)
        self.keys = {key.removeprefix('module.') for key in weights}
