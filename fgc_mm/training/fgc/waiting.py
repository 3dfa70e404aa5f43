# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Whether augmentations that mix pictures will end in the course of a training."""

from __future__ import annotations

from typing import Any, Optional

from mmengine.runner import Runner

from ...datasets import find_mixing, mixes
from ...runtime import unwrap


def mixing_now(runner: Runner) -> Optional[str]:
    """What mixes the pictures of the next batch, in words; None if nothing does."""
    return find_mixing(runner.train_dataloader.dataset, _preprocessor(runner))


def ends_mixing(runner: Runner, next_epoch: int) -> Optional[str]:
    """The hook that will take all of that out, from the epoch on in which one can still act:
    upstream's ``PipelineSwitchHook``, ``YOLOXModeSwitchHook`` or ``SwitchRecipeHook``; None if
    there is none."""
    dataset, preprocessor = runner.train_dataloader.dataset, _preprocessor(runner)
    of_batch = mixes(getattr(preprocessor, 'batch_augments', None))
    for hook in runner.hooks:
        known: Any = hook
        kinds = {cls.__name__ for cls in type(hook).__mro__}
        ended = False
        if 'PipelineSwitchHook' in kinds and not known._has_switched:
            in_time = known.switch_epoch < runner.max_epochs
            ended = in_time and not of_batch and not mixes(known.switch_pipeline)
        elif 'YOLOXModeSwitchHook' in kinds and not known._has_switched:
            ended = find_mixing(dataset, preprocessor, known.skip_type_keys) is None
        elif 'SwitchRecipeHook' in kinds:
            mixing = dict(batch_augments=of_batch, train_pipeline=find_mixing(dataset) is not None)
            for epoch, recipe in known.schedule.items():
                if next_epoch < epoch <= runner.max_epochs:
                    mixing.update({key: mixes(recipe[key]) for key in mixing if key in recipe})
                    ended = ended or not any(mixing.values())
        if ended:
            return type(hook).__name__
    return None


def _preprocessor(runner: Runner) -> Any:
    return getattr(unwrap(runner.model), 'data_preprocessor', None)
