# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Feature-Gate Coupling as a training hook."""

from __future__ import annotations

import os
import uuid
from typing import Any, ClassVar, Optional

import torch
from mmengine.registry import HOOKS
from mmengine.runner import Runner, find_latest_checkpoint
from torch import Tensor

from ...coupling import ApproximateSearch, Coupling, LayerCoupling
from ...datasets import install_instance_index, refuse_mixing
from ...errors import CheckpointError, UsageError, in_context
from ...gates import Gate
from ...runtime import FiniteHook, SafeCheckpointHook, unwrap
from ...runtime.checkpoints.companions import find_companion, read_companion
from ...runtime.checkpoints.work_dir_paths import run_folders
from ...runtime.config.argument_types import argument_faults, arguments_of, check_arguments
from ..budget.hook import BudgetHook
from ..gate_loss_hook import GateLossHook, log_by_gate
from ..schedules import BUDGET, ScheduleCfg, build_schedule, epochs_seen
from .samples import read_samples
from .waiting import ends_mixing, mixing_now

_KEY, _BANKS = 'fgc', 'banks'


@HOOKS.register_module()
class FGCHook(GateLossHook):
    """Adds ``loss_fgc = eta * sum of L_g over the coupled gates``, the loss of
    "Self-supervised Feature-Gate Coupling for Dynamic Network Pruning".

    Every gate of a chosen block is coupled: instances that are neighbors in its
    feature space are drawn together in its gate space, see
    :class:`~fgc_mm.coupling.Coupling`. The hook numbers the instances of the
    training set by itself (:func:`~fgc_mm.datasets.install_instance_index`), in
    several processes lets all of them work on the common batch, so that every
    rank holds the same banks after every step, and saves the banks beside each
    checkpoint that can be resumed, as ``epoch_3.banks.pth`` beside
    ``epoch_3.pth``. It brings :class:`SafeCheckpointHook` along.

    Where augmentations make one picture of several (mosaic, mixup), it waits until upstream's
    ``PipelineSwitchHook``, ``YOLOXModeSwitchHook`` or ``SwitchRecipeHook`` has taken them out.

    Resuming takes the banks over and refuses those of another dataset size,
    layer set or width. ``load_from`` and testing take weights only.

    Logged with the losses: ``fgc/turnover``, the share of an instance's
    neighbors that changed since it was last seen, and ``fgc/overlap``, the share
    of the feature-space neighbors that are also gate-space neighbors (both in
    the banks), which is what the coupling is for; both again per gate in the
    visualizer's backends.

    Args:
        eta (float | dict): Weight of the loss, a number or a schedule in
            epochs, such as ``dict(start='budget', value=0.03)``: from when the
            target of :class:`BudgetHook` is reached. It belongs to a ``form``
            (the paper's 0.003 to ``'log_sum'``); the default to ``'mean_log'``,
            see docs/coupling.md. Defaults to 0.03.
        k (int): Neighbors. Defaults to 200.
        save_banks (bool): Whether banks are saved. Defaults to True.
        fresh_banks (bool): Whether a resumed run starts with fresh banks instead
            of insisting on the saved ones. Defaults to False.
        num_instances (int, optional): N, if the data samples bring an
            ``instance_idx`` of their own, from 0 to N - 1, in their metainfo.
            Defaults to None: instances are numbered by the hook.
        log_interval (int): Iterations between two logs of overlap and of what
            is logged per gate. Defaults to 50.
        **options: ``layers``, ``shared``, ``warmup_epochs``, ``mmap_dir`` and ``seed`` of
            :class:`~fgc_mm.coupling.Coupling`, and all of
            :class:`~fgc_mm.coupling.LayerCoupling`.

    Example:
        >>> custom_hooks = [dict(type='FGCHook', layers=[-2, -1], k=200, eta=0.03)]
    """

    loss_name = 'loss_fgc'

    options_of: ClassVar[dict] = {Coupling: ('labels',)}

    def __init__(
        self,
        eta: ScheduleCfg = 0.03,
        k: int = 200,
        save_banks: bool = True,
        fresh_banks: bool = False,
        num_instances: Optional[int] = None,
        log_interval: int = 50,
        **options: Any,
    ) -> None:
        super().__init__(log_interval)
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise UsageError(f'FGCHook: k={k!r} must be a whole number of neighbors, at least 1')
        check_arguments(type(self), options)
        warmup, approximate = options.get('warmup_epochs', 0), options.get('approximate') or {}
        if not warmup >= 0:
            raise UsageError(f'FGCHook: warmup_epochs={warmup!r} must be 0 or more')
        for fault in argument_faults(ApproximateSearch, approximate, 'FGCHook: approximate'):
            raise UsageError(fault)
        self.eta = build_schedule(eta, 'FGCHook: eta')
        self._eta = self.eta
        self.given_num_instances = num_instances
        self.options = dict(options, k=k)
        # A mistake in these shows now, and not after the data is loaded.
        known = {*arguments_of(LayerCoupling)[0]} - {'approximate', 'mmap_dir', 'seed'}
        with in_context('FGCHook'):
            LayerCoupling(k + 1, 1, **{n: v for n, v in self.options.items() if n in known})
        self.coupling: Optional[Coupling] = None
        # While pictures are mixed nobody knows what an item shows.
        self.waits = False
        self.uncoupled = 0.0
        self.save_banks = save_banks
        self.fresh_banks = fresh_banks
        self._loaded: Optional[dict[str, Any]] = None
        self._path: Optional[str] = None
        # That of the last banks that were written is in the checkpoint and in their file.
        self._token = (-1, '')

    def before_run(self, runner: Runner) -> None:
        SafeCheckpointHook.of(runner)

    def before_train(self, runner: Runner) -> None:
        """Number the instances, build the banks or take over the saved ones."""
        super().before_train(runner)
        model = unwrap(runner.model)
        self.waits, self.uncoupled = False, 0.0
        num_instances, labels = self._count_instances(runner)
        self._eta = self.eta.settled(runner, 'FGCHook: eta')
        self._look_at_budget(runner)
        with in_context('FGCHook'):
            self.coupling = Coupling(model, num_instances, labels=labels, **self.options)
        runner.logger.info(
            f'FGCHook couples {", ".join(self.coupling.gates)} over N={num_instances} instances; '
            f'the banks take {self.coupling.bank_bytes / 2**20:.1f} MiB'
        )
        self._token = (-1, '')
        if runner.iter:
            self._resume(runner)
        else:
            self._notice_ignored(runner, 'load_from')
        self._loaded = None

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """See whether pictures are mixed, which hooks bring in and take out between epochs."""
        if batch_idx or self.given_num_instances is not None:
            return
        mixing = self._mixing(runner, runner.epoch + 1)
        if self.waits and not mixing:
            runner.logger.info(f'FGCHook: couples from epoch {runner.epoch + 1} on')
        self.waits = mixing

    def loss(self, gates: dict[str, Gate], data_samples: Any, runner: Runner) -> Tensor:
        coupling = self.coupling
        assert coupling is not None
        if self.waits:
            return torch.zeros((), device=next(runner.model.parameters()).device)
        coupling.eta = self._eta.at(coupling.epochs + self.uncoupled)
        # Once a step: nothing below looks again.
        looked = any(isinstance(hook, FiniteHook) and hook.has_looked for hook in runner.hooks)
        with in_context('FGCHook'):
            return coupling.loss_of(
                lambda: read_samples(data_samples, coupling.needs_labels),
                None if looked else f'at iteration {runner.iter + 1}',
            )

    def discard(self) -> None:
        super().discard()
        if self.coupling is not None:
            self.coupling.discard()

    def after_step(self, runner: Runner) -> None:
        """Update the banks, now that the step is taken; log turnover and overlap."""
        assert self.coupling is not None
        self.coupling.step()
        if self.waits:
            self.uncoupled = epochs_seen(runner, runner.iter + 1) - self.coupling.epochs
        if self.waits or not self.every_n_train_iters(runner, self.log_interval):
            return
        by_gate = {}
        found = dict(overlap=self.coupling.overlap(runner.iter), turnover=self.coupling.turnover())
        for kind, values in found.items():
            by_gate.update({f'fgc/{kind}/{name}': value for name, value in values.items()})
            if values:
                mean = sum(values.values()) / len(values)
                runner.message_hub.update_scalar(f'train/fgc/{kind}', mean)
        log_by_gate(runner, by_gate)

    def after_train(self, runner: Runner) -> None:
        super().after_train(runner)
        if self.coupling is not None:
            self.coupling.close()

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Keep aside what a checkpoint holds; whether it is of use shows later."""
        entry = checkpoint.get(_KEY)
        self._loaded = dict(entry) if isinstance(entry, dict) else {}
        if not isinstance(self._loaded.get('banks'), str):
            self._loaded['banks'] = None
        self._path = runner._load_from
        if self._path is None and runner._resume:
            self._path = find_latest_checkpoint(runner.work_dir)

    def before_test(self, runner: Runner) -> None:
        self._notice_ignored(runner, 'testing')

    def before_val(self, runner: Runner) -> None:
        self._notice_ignored(runner, 'validation')

    def _notice_ignored(self, runner: Runner, by: str) -> None:
        """Say that banks were not looked at, unless this is a training."""
        loaded, self._loaded = self._loaded, None
        if loaded and loaded.get('banks'):
            runner.logger.info(
                f'FGCHook: {by} takes the weights only; the banks in '
                f'{os.path.basename(loaded["banks"])} are ignored'
            )

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Write the banks and refer to them. Called on the main process only."""
        coupling = self.coupling
        if coupling is None:
            return
        path = None
        # Without an optimizer it is one of the best, and not meant to be resumed.
        if self.save_banks and 'optimizer' in checkpoint:
            if self._token[0] != coupling.seen:
                self._token = coupling.seen, uuid.uuid4().hex
            saver = SafeCheckpointHook.of(runner)
            path = saver.add_companion(_BANKS, self._token[1], coupling.state_dict())
        checkpoint[_KEY] = dict(
            seen=coupling.seen,
            uncoupled=self.uncoupled,
            num_instances=coupling.num_instances,
            banks=path,
            token=None if path is None else self._token[1],
        )

    def _resume(self, runner: Runner) -> None:
        coupling, loaded = self.coupling, self._loaded or {}
        assert coupling is not None
        same_size = loaded.get('num_instances') == coupling.num_instances
        if same_size:
            coupling.seen = loaded['seen']
            self.uncoupled = loaded.get('uncoupled', 0.0)
        else:
            coupling.seen = round(epochs_seen(runner) * coupling.num_instances)
        recorded = loaded.get('banks')
        if self.fresh_banks or (recorded is None and not self.save_banks):
            runner.logger.warning('FGCHook: resuming with fresh banks')
            return
        advice = 'To go on with fresh banks, set fresh_banks=True in FGCHook'
        if recorded is None:
            raise CheckpointError(
                'FGCHook: the checkpoint to be resumed was saved without banks (best checkpoints '
                'and those saved without an optimizer or with save_banks=False have none); resume '
                f'one that has. {advice}'
            )
        path = find_companion(_BANKS, recorded, loaded['token'], self._path, run_folders(runner))
        if path is None:
            raise CheckpointError(
                f'FGCHook: the banks of the checkpoint to be resumed, '
                f'{os.path.basename(recorded)}, are neither beside it nor in the work dir; copy '
                f'the file there. {advice}'
            )
        with in_context('FGCHook', after=f'. {advice}'):
            state = read_companion(path)
            if state['token'] != loaded['token']:
                raise CheckpointError(
                    f'{path} belongs to another checkpoint than the one to be resumed'
                )
            with in_context(path):
                coupling.load_state_dict(state)
        runner.logger.info(f'FGCHook: banks resumed from {path}')

    def _count_instances(self, runner: Runner) -> tuple[int, Optional[Tensor]]:
        """N, and the labels of all instances, if they are of use and known."""
        if self.given_num_instances is not None:
            return self.given_num_instances, None
        loader = runner.train_dataloader
        with in_context('FGCHook'):
            mixing = self._mixing(runner, runner.epoch)
            index = install_instance_index(loader, runner.train_loop, mixes=mixing)
        if index.num_items > index.num_instances:
            runner.logger.info(
                f'FGCHook: the datasets list {index.num_items} items of {index.num_instances} '
                'different pictures'
            )
        if self.options.get('source') != 'label' or index.labels is None:
            return index.num_instances, None
        return index.num_instances, torch.from_numpy(index.labels)

    def _look_at_budget(self, runner: Runner) -> None:
        """Say when the coupling starts, and whether a budget still closes gates then."""
        for hook in runner.hooks:
            if not isinstance(hook, BudgetHook):
                continue
            if self.eta.start == BUDGET:
                runner.logger.info(
                    f'FGCHook: couples from epoch {self._eta.start:.4g} on, when the budget is met'
                )
            elif hook.reach and self._eta.at(1e-6):  # from the first step on, be it as a ramp
                runner.logger.info(
                    'FGCHook: couples from the start on, to a bank of gates that were more open, '
                    f'while the first {hook.reach:.0%} of the training close them. It learns more '
                    "if it starts then: eta=dict(start='budget', value=...)"
                )

    def _mixing(self, runner: Runner, next_epoch: int) -> bool:
        """Whether pictures are mixed now; refused if no hook ends it from an epoch on."""
        found = mixing_now(runner)
        if found is None:
            return False
        ends = ends_mixing(runner, next_epoch)
        if ends is None:
            with in_context('FGCHook'):
                refuse_mixing(
                    runner.train_dataloader.dataset, unwrap(runner.model).data_preprocessor
                )
        if not self.waits:
            runner.logger.info(f'FGCHook: {found}; couples when {ends} has taken that out')
        self.waits = True
        return True
