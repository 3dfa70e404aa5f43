# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Gates that start new in the checkpoint of a dense network."""

from __future__ import annotations

from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.runner import Runner

from ..errors import CheckpointError
from ..gates import find_gates
from ..nets.weights import old_gates
from ..runtime import unwrap
from .distillation.hook import DistillationHook
from .gate_loss_hook import GateLossHook


class NewGatesHook(Hook):
    """Counts the gates that the checkpoint of a dense network does not have.

    They keep their initial values; mmengine would list every key of them as missing. A
    checkpoint that has no weight of the model is refused. It also says if no loss is about gates.
    """

    priority = 'VERY_HIGH'

    def before_train(self, runner: Runner) -> None:
        """Say if nothing teaches the gates when to close."""
        gates = find_gates(unwrap(runner.model))
        learned = [
            name
            for name, gate in gates.items()
            if gate.shiftable() and any(p.requires_grad for p in gate.parameters())
        ]
        closing = [
            hook
            for hook in runner.hooks
            if isinstance(hook, GateLossHook) and not isinstance(hook, DistillationHook)
        ]
        if learned and not closing:
            runner.logger.warning(
                f'no hook adds a loss on the {len(learned)} gates, such as {learned[0]}: only the '
                'task trains them, and nothing closes channels; add '
                "dict(type='BudgetHook', target=0.5) to custom_hooks"
            )

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        weights = checkpoint.get('state_dict', checkpoint)
        if not isinstance(weights, dict):
            return
        model, keys, gates = unwrap(runner.model), 0, 0
        if old_gates(weights):
            if runner._resume and 'optimizer' in checkpoint:
                raise CheckpointError(
                    '--resume: the checkpoint is of an earlier version of fgc_mm, whose optimizer '
                    'has the gates in another order; go on from its weights alone, by '
                    'load_from=<the checkpoint> without --resume'
                )
            return  # its gates are renamed when they are loaded
        names = {key.removeprefix('module.') for key in weights}
        if not names & set(model.state_dict()):
            raise CheckpointError(
                f'load_from: the checkpoint has no weight of the {type(model).__name__}; it has '
                f'{", ".join(list(names)[:3])}, ... A backbone alone goes to '
                'model.backbone.init_cfg; tools/convert_weights.py makes a classifier of '
                "torchvision's weights"
            )
        for name, gate in find_gates(model).items():
            new = {
                f'{name}.{key}': value
                for key, value in gate.state_dict().items()
                if f'{name}.{key}' not in names
            }
            keys += sum(not key.endswith('num_batches_tracked') for key in new)
            gates += bool(new)
            weights.update(new)
        if gates and is_main_process():
            print_log(
                f'load_from: {keys} keys of {gates} gates are new, not in the checkpoint',
                logger='current',
            )
