# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Numbers stay numbers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Optional

import torch.nn as nn
from mmengine.dist import all_gather_object, all_reduce, get_world_size
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor

from ...errors import NonFiniteError, UsageError
from ..checkpoints.random_state_hook import checkpoint_due
from ..module_hooks import Attachments, forward_argument, unwrap
from .finite_search import (
    all_finite,
    bad_pictures,
    first_layer,
    loss_terms,
    not_finite,
    some,
    tensors_in,
)

ACTIONS = ('stop', 'skip', 'off')
_ADVICE = (
    'The checkpoints written before are good: --resume goes on from the last one, with a lower '
    'learning rate or optim_wrapper.clip_grad if need be'
)


class _FoundError(Exception):
    """Leaves the step of a batch, on all ranks."""


@HOOKS.register_module()
class FiniteHook(Hook):
    """Keeps NaN and Inf out of weights, checkpoints and whatever hooks remember.

    Looked at are, on all ranks and before anything is updated, the losses and what hooks want
    looked at (those with a method ``values_of_step``), then the gradients, and before a checkpoint
    replaces another the weights and what the optimizer remembers. If one rank finds something, all
    of them act.

    ``'stop'`` ends the training with the layer, loss or parameter where it came up. ``'skip'``
    leaves the batch out: weights, optimizer, norms' statistics and hooks are as before it.
    With loss scaling (``--amp``) single batches that overflow are usual and always skipped; there
    the scaler itself looks after the gradients. Weights that are not finite end a training in any
    case.

    ``tools/train.py`` adds this hook to trainings that do not list it.

    Args:
        action (str): ``'stop'``, ``'skip'``, or ``'off'`` for mmengine's own way, which is to go
            on. Defaults to 'stop'.
        max_skips (int): Batches in a row that may be skipped. Defaults to 10.

    Example:
        >>> custom_hooks = [dict(type='FiniteHook', action='skip')]
    """

    # After the hooks whose losses it looks at, before CheckpointHook saves.
    priority = 'LOW'

    def __init__(self, action: str = 'stop', max_skips: int = 10) -> None:
        if action not in ACTIONS:
            raise UsageError(f'FiniteHook: action={action!r} must be one of {", ".join(ACTIONS)}')
        if isinstance(max_skips, bool) or not isinstance(max_skips, int) or max_skips < 0:
            raise UsageError(
                f'FiniteHook: max_skips={max_skips!r} must be a whole number of batches, 0 or more'
            )
        self.action = action
        self.max_skips = max_skips
        self.skipped = 0
        self._row = 0
        self._scaled = False
        self._training = False
        self._watched: list[Any] = []
        self._exempt: set[str] = set()
        self._attached = Attachments()
        self._call: tuple[tuple, dict] = ((), {})
        self._terms: dict[str, Tensor] = {}
        # Within a step, behind the model: what hooks are about to use is known to be finite.
        self.has_looked = False

    def before_train(self, runner: Runner) -> None:
        if self.action == 'off':
            return
        model = unwrap(runner.model)
        self._exempt = {
            name for name in not_finite(model.named_buffers()) if '.running_' not in name
        }  # such as masks of attention
        self._training = True
        self._check_state(
            runner, 'the training starts with', 'Give other weights (load_from, init_cfg, --resume)'
        )
        self._watched = [hook for hook in runner.hooks if hasattr(hook, 'values_of_step')]
        self._attached.remove()
        self._attached.after(model, self._after_model, with_kwargs=True, first=True)
        self._attached.after(model, self._after_hooks, with_kwargs=True)
        self._attached.wrap(runner.model, 'train_step', partial(self._train_step, runner))
        own = [w for w in _wrappers(runner) if not hasattr(w, 'loss_scaler')]
        self._scaled = len(own) < len(_wrappers(runner))
        for wrapper in own:
            self._attached.wrap(wrapper, 'step', partial(self._step, wrapper))

    def after_train(self, runner: Runner) -> None:
        self._training = False
        self._attached.remove()
        if self.skipped:
            runner.logger.warning(f'FiniteHook: {self.skipped} batches were skipped')

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Optional[dict] = None,
    ) -> None:
        if self._training and checkpoint_due(runner):
            self._check_state(runner, 'no checkpoint is written:')

    def after_train_epoch(self, runner: Runner) -> None:
        if self._training:
            self._check_state(runner, 'no checkpoint is written:')

    def before_val(self, runner: Runner) -> None:
        if self._training:
            self._check_state(runner, 'nothing is validated:')

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """For whoever saves at another time, on the main process."""
        state = checkpoint.get('state_dict', {}) if self._training else {}
        bad = not_finite((k, v) for k, v in state.items() if isinstance(v, Tensor))
        bad = [name for name in bad if name not in self._exempt]
        if bad:
            raise NonFiniteError(f'no checkpoint is written: {some(bad)} hold NaN or Inf')

    def _train_step(
        self, runner: Runner, original: Callable, *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        model = unwrap(runner.model)
        may_skip = self.action == 'skip' or self._scaled
        # Norms take note of a batch when they see it.
        kept = [(b, b.clone()) for b in model.buffers()] if may_skip else []
        self.has_looked = True
        try:
            outputs = original(*args, **kwargs)
            self._row = 0
            return outputs
        except _FoundError:
            message = self._explain(runner)
            for wrapper in _wrappers(runner):
                wrapper.zero_grad()
            for buffer, value in kept:
                buffer.copy_(value)
            for hook in runner.hooks:
                if hasattr(hook, 'discard'):
                    hook.discard()
            self._act(runner, message, may_skip)
            return {}
        finally:
            self.has_looked = False
            self._call, self._terms = ((), {}), {}

    def _after_model(self, model: nn.Module, args: tuple, kwargs: dict, losses: Any) -> None:
        """Look at the model's own losses and at what hooks want, before anybody uses them."""
        if not self.has_looked or forward_argument('mode', args, kwargs) != 'loss':
            return
        self._call = args, kwargs
        self._terms = loss_terms(losses) if isinstance(losses, dict) else {}
        seen = [*self._terms.values(), *(value for _, value in self._values())]
        self._raise_unless(all_finite(seen))

    def _after_hooks(self, model: nn.Module, args: tuple, kwargs: dict, losses: Any) -> None:
        """Look at the losses that hooks have added."""
        if not self.has_looked or not isinstance(losses, dict):
            return
        added = {n: term for n, term in loss_terms(losses).items() if n not in self._terms}
        self._terms.update(added)
        if added:
            self._raise_unless(all_finite(added.values()))

    def _step(self, wrapper: OptimWrapper, original: Callable, **kwargs: Any) -> None:
        """Look at the gradients before they are clipped and used."""
        if self.has_looked:
            parameters = (p for group in wrapper.optimizer.param_groups for p in group['params'])
            self._raise_unless(all_finite(p.grad for p in parameters if p.grad is not None))
        original(**kwargs)

    def _values(self) -> Iterator[tuple[str, Tensor]]:
        """What hooks want looked at beside the losses."""
        for hook in self._watched:
            yield from hook.values_of_step()

    def _raise_unless(self, finite: Tensor) -> None:
        if not _on_all_ranks(finite):
            raise _FoundError

    def _explain(self, runner: Runner) -> str:
        """Where it came up, in the words of the rank that has it."""
        every = all_gather_object(self._explain_own(unwrap(runner.model)))
        if len(every) == 1:
            return every[0]
        return '; '.join(f'rank {rank}: {text}' for rank, text in enumerate(every) if text)

    def _explain_own(self, model: nn.Module) -> str:
        weights = not_finite(model.named_parameters())
        if weights:
            return f'an earlier update has left NaN or Inf in {some(weights)}'
        args, kwargs = self._call
        terms = not_finite(self._terms.items())
        values = not_finite(self._values())
        gradients = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
        if not terms and not values:
            # The last layer is the first to get a gradient.
            bad = not_finite(reversed(gradients))
            return f'the gradients of {some(bad)} are NaN or Inf' if bad else ''
        what = f'{some(terms)} is NaN or Inf' if terms else f'{some(values)} are NaN or Inf'
        inputs = forward_argument('inputs', args, kwargs)
        if not bool(all_finite(tensors_in(inputs))):
            pictures = bad_pictures(inputs, forward_argument('data_samples', args, kwargs))
            return f'{what}, and so are the pictures the model was given: {pictures}'
        syncs = any(isinstance(m, nn.SyncBatchNorm) for m in model.modules())
        # A norm over all ranks waits for the others, who may have nothing to look for.
        layer = None if syncs and get_world_size() > 1 else first_layer(model, args, kwargs)
        if layer is None and terms and values:
            return f'{what}, and so are {values[0]}'
        return what if layer is None else f'{what}, the first layer is {layer}'

    def _act(self, runner: Runner, message: str, may_skip: bool) -> None:
        where = f'iteration {runner.iter + 1}'
        if not may_skip:
            raise NonFiniteError(
                f'{where}: {message}. Weights, banks and checkpoints hold nothing of this batch: '
                '--resume goes on from the last checkpoint. A lower learning rate or '
                'optim_wrapper.clip_grad often help; dict(type="FiniteHook", action="skip") in '
                'custom_hooks leaves such batches out (docs/numbers.md)'
            )
        self._check_state(runner, f'{where} cannot be left out:')
        self.skipped += 1
        self._row += 1
        if self._row > self.max_skips:
            raise NonFiniteError(
                f'{where}: {message}. {self._row} batches in a row, more than '
                f'FiniteHook.max_skips={self.max_skips}: the training has diverged. {_ADVICE}'
            )
        runner.message_hub.update_scalar('train/skipped', self.skipped)
        runner.logger.log(logging.WARNING, f'FiniteHook: {where} is skipped: {message}')

    def _check_state(self, runner: Runner, prefix: str, advice: str = _ADVICE) -> None:
        """Raise, on all ranks alike, if the weights or the optimizer's state are not finite."""
        named = [
            (name, tensor)
            for name, tensor in unwrap(runner.model).state_dict().items()
            if isinstance(tensor, Tensor) and name not in self._exempt
        ]
        state = [t for w in _wrappers(runner) for t in tensors_in([*w.optimizer.state.values()])]
        if _on_all_ranks(all_finite([*(tensor for _, tensor in named), *state])):
            return
        bad = not_finite(named)
        what = f'the weights {some(bad)}' if bad else 'what the optimizer remembers'
        raise NonFiniteError(
            f'{prefix} NaN or Inf in {what} after {runner.iter} iterations. {advice} '
            '(docs/numbers.md)'
        )


def _on_all_ranks(finite: Tensor) -> bool:
    result = finite.int()
    all_reduce(result, 'min')
    return bool(result)


def _wrappers(runner: Runner) -> list[OptimWrapper]:
    outer = runner.optim_wrapper
    inner = getattr(outer, 'optim_wrappers', None)
    return list(inner.values()) if inner is not None else [outer]  # type: ignore[list-item]
