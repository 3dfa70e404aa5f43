# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Feature-Gate Coupling as a training hook."""

from __future__ import annotations

import math
import os
from typing import Any, Optional

import torch
import torch.nn as nn
from mmengine.dist import get_rank
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor

from ...coupling import CouplingResult, LayerCoupling, TurnoverMeter, map_layers
from ...coupling.approximate import ApproximateSearch
from ...datasets import install_instance_index, refuse_mixing
from ...errors import UsageError, in_context
from ...gates import Gate, select_blocks
from ...gates.utils import Layers
from ...runtime import FiniteHook, SafeCheckpointHook, unwrap
from ...runtime.config.argument_types import argument_faults
from ..budget.hook import BudgetHook
from ..gate_loss_hook import GateLossHook
from ..schedules import BUDGET, ScheduleCfg, build_schedule
from .batch import Batch, check_finite, collect_batch, gather_rows
from .checkpoint import FGCCheckpoint

_OVERLAP_SAMPLE = 256


@HOOKS.register_module()
class FGCHook(GateLossHook):
    """Adds ``loss_fgc = eta * sum of L_g over the coupled gates``, the loss of
    "Self-supervised Feature-Gate Coupling for Dynamic Network Pruning".

    Every gate of a chosen block is coupled: instances that are neighbors in its
    feature space are drawn together in its gate space, see
    :class:`~fgc_mm.coupling.LayerCoupling`. The hook numbers the instances of the
    training set by itself (:func:`~fgc_mm.datasets.install_instance_index`), in
    several processes lets all of them work on the common batch, so that every
    rank holds the same banks after every step, and saves the banks beside each
    checkpoint that can be resumed, as ``epoch_3.banks.pth`` beside
    ``epoch_3.pth``. It brings :class:`SafeCheckpointHook` along.

    Resuming takes the banks over and refuses those of another dataset size,
    layer set or width. ``load_from`` and testing take weights only.

    Logged with the losses: ``fgc/turnover``, the share of an instance's
    neighbors that changed since it was last seen, and ``fgc/overlap``, the share
    of the feature-space neighbors that are also gate-space neighbors (both in
    the banks), which is what the coupling is for; both again per gate in the
    visualizer's backends.

    Args:
        layers (str | int | Sequence): The coupled blocks: ``'last_stage'``,
            ``'all'``, names of stages or blocks, or indices (-1 the last gated
            block). Defaults to 'last_stage'.
        k (int): Neighbors. Defaults to 200.
        eta (float | dict): Weight of the loss, a number or a schedule in
            epochs, such as ``dict(start='budget', value=0.03)``: from when the
            target of :class:`BudgetHook` is reached. It belongs to a ``form``
            (the paper's 0.003 to ``'log_sum'``); the default to ``'mean_log'``,
            see docs/coupling.md. Defaults to 0.03.
        tau (float): Temperature. Defaults to 0.07.
        momentum (float): Momentum of the banks. Defaults to 0.5.
        form (str): Contrast, ``'log_sum'`` (the authors' code), ``'sum_log'``
            (Eq. 8 of the paper) or ``'mean_log'`` (the same / k).
            Defaults to 'mean_log'.
        space (str): What is contrasted, ``'logits'`` or ``'probs'`` of the
            gates. Defaults to 'logits'.
        source (str): Where neighbors come from, ``'feature'``, ``'gate'`` or
            ``'label'`` (random instances of the same class).
            Defaults to 'feature'.
        shared (bool): Whether all gates use the neighbors of the last one.
            Defaults to False.
        warmup_epochs (float): How long an instance is its own only positive.
            Defaults to 0.
        include_self (bool, optional): Whether an instance is one of its own
            positives. Defaults to None: for ``'log_sum'`` only.
        normalize_feature (bool): Whether features are normalized before they
            enter their bank. Defaults to True.
        backend (str): Search back end, ``'auto'``, ``'torch'`` or ``'faiss'``.
            Defaults to 'auto'.
        approximate (dict, optional): Arguments of
            :class:`~fgc_mm.coupling.ApproximateSearch`; None searches exactly.
            Defaults to None.
        bank_dtype (str): ``'float32'`` or ``'float16'``. Defaults to 'float32'.
        bank_storage (str): ``'device'`` keeps the banks with the model,
            ``'host'`` in main memory, ``'mmap'`` in files.
            Defaults to 'device'.
        mmap_dir (str, optional): Folder of these files; None takes the system's
            temporary one. Defaults to None.
        save_banks (bool): Whether banks are saved. Defaults to True.
        fresh_banks (bool): Whether a resumed run starts with fresh banks instead
            of insisting on the saved ones. Defaults to False.
        num_instances (int, optional): N, if the data samples bring an
            ``instance_idx`` of their own, from 0 to N - 1, in their metainfo.
            Defaults to None: instances are numbered by the hook.
        seed (int): Seed of the banks. Defaults to 0.
        log_interval (int): Iterations between two logs of overlap and of what
            is logged per gate. Defaults to 50.

    Example:
        >>> custom_hooks = [dict(type='FGCHook', layers=[-2, -1], k=200, eta=0.03)]
    """

    loss_name = 'loss_fgc'

    def __init__(
        self,
        layers: Layers = 'last_stage',
        k: int = 200,
        eta: ScheduleCfg = 0.03,
        tau: float = 0.07,
        momentum: float = 0.5,
        form: str = 'mean_log',
        space: str = 'logits',
        source: str = 'feature',
        shared: bool = False,
        warmup_epochs: float = 0,
        include_self: Optional[bool] = None,
        normalize_feature: bool = True,
        backend: str = 'auto',
        approximate: Optional[dict] = None,
        bank_dtype: str = 'float32',
        bank_storage: str = 'device',
        mmap_dir: Optional[str] = None,
        save_banks: bool = True,
        fresh_banks: bool = False,
        num_instances: Optional[int] = None,
        seed: int = 0,
        log_interval: int = 50,
    ) -> None:
        super().__init__(log_interval)
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise UsageError(f'FGCHook: k={k!r} must be a whole number of neighbors, at least 1')
        if not warmup_epochs >= 0:
            raise UsageError(f'FGCHook: warmup_epochs={warmup_epochs!r} must be 0 or more')
        for fault in argument_faults(ApproximateSearch, approximate or {}, 'FGCHook: approximate'):
            raise UsageError(fault)
        self.layers = layers
        self.eta = build_schedule(eta, 'FGCHook: eta')
        self._eta = self.eta
        self.warmup_epochs = warmup_epochs
        self.shared = shared
        self.source = source
        self.mmap_dir = mmap_dir
        self.given_num_instances = num_instances
        self.seed = seed
        self.settings: dict[str, Any] = dict(
            k=k,
            form=form,
            tau=tau,
            source=source,
            space=space,
            include_self=include_self,
            momentum=momentum,
            normalize_feature=normalize_feature,
            backend=backend,
            approximate=approximate,
            dtype=bank_dtype,
            storage=bank_storage,
        )
        # A mistake in these shows now, and not after the data is loaded.
        with in_context('FGCHook'):
            LayerCoupling(num_instances=k + 1, dim=1, **{**self.settings, 'approximate': None})
        self.couplings: dict[str, LayerCoupling] = {}
        self.meters: dict[str, TurnoverMeter] = {}
        self.num_instances = 0
        self.seen = 0
        self._pending: list[Batch] = []
        self.checkpoint = FGCCheckpoint(self, save_banks, fresh_banks)

    @property
    def epochs(self) -> float:
        """Epochs of this training so far: instances seen / N."""
        return self.seen / self.num_instances

    def before_run(self, runner: Runner) -> None:
        SafeCheckpointHook.of(runner)

    def before_train(self, runner: Runner) -> None:
        """Number the instances, build the banks or take over the saved ones."""
        super().before_train(runner)
        model = unwrap(runner.model)
        labels = self._count_instances(runner, model)
        self._eta = self.eta.settled(runner, 'FGCHook: eta')
        self._look_at_budget(runner)
        with in_context('FGCHook'):
            blocks = select_blocks(model, self.layers)
        gates = dict(gate for block in blocks.values() for gate in block)
        for gate in gates.values():
            gate.wants_feature = True
        device = next(model.parameters()).device
        self.couplings = {
            name: self._build_coupling(name, gate, number, device, labels)
            for number, (name, gate) in enumerate(gates.items())
        }
        searched = list(gates)[-1:] if self.shared else list(gates)
        k = self.settings['k']
        self.meters = {name: TurnoverMeter(self.num_instances, k) for name in searched}
        self.seen = 0
        banks = [bank for c in self.couplings.values() for bank in (c.feature_bank, c.gate_bank)]
        size = sum(bank.data.numel() * bank.data.element_size() for bank in banks)
        runner.logger.info(
            f'FGCHook couples {", ".join(gates)} over N={self.num_instances} instances; '
            f'the banks take {size / 2**20:.1f} MiB'
        )
        self.checkpoint.before_train(runner)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """See that no hook has brought a mixing augmentation in."""
        if batch_idx == 0 and self.given_num_instances is None:
            model = unwrap(runner.model)
            refuse_mixing(runner.train_dataloader.dataset, _preprocessor(model))

    def loss(self, gates: dict[str, Gate], data_samples: Any, runner: Runner) -> Tensor:
        records = {name: gates[name].record for name in self.couplings}
        some = next(iter(self.couplings.values()))
        needs_labels = some.label_source is not None and bool((some.label_source.labels < 0).any())
        batch = collect_batch(records, data_samples, needs_labels)  # type: ignore[arg-type]
        self._check(batch, runner)
        eta = self._eta.at(self.epochs)
        value = next(iter(records.values())).logits.new_zeros(())  # type: ignore[union-attr]
        if batch.labels is not None:
            for coupling in self.couplings.values():
                assert coupling.label_source is not None
                coupling.label_source.observe(batch.indices, batch.labels)
        if eta:
            value = eta * batch.weight * self._contrast(gates, batch)
        self._pending.append(batch)
        return value

    def discard(self) -> None:
        super().discard()
        self._pending.clear()

    def after_train_iter(
        self,
        runner: Runner,
        batch_idx: int,
        data_batch: Any = None,
        outputs: Optional[dict] = None,
    ) -> None:
        """Update the banks, now that the step is taken; log turnover and overlap."""
        super().after_train_iter(runner, batch_idx, data_batch, outputs)
        for batch in self._pending:
            for name, coupling in self.couplings.items():
                layer = batch.layers[name]
                coupling.update(layer.feature, layer.logits, batch.indices, batch.labels)
            self.seen += len(batch.indices)
        self._pending.clear()
        if not self.every_n_train_iters(runner, self.log_interval):
            return
        overlaps = {
            name: coupling.overlap(sample=_OVERLAP_SAMPLE, seed=runner.iter)
            for name, coupling in self.couplings.items()
        }
        turnovers = {name: meter.compute() for name, meter in self.meters.items()}
        by_gate = {}
        for kind, values in (('overlap', overlaps), ('turnover', turnovers)):
            known = {name: value for name, value in values.items() if not math.isnan(value)}
            by_gate.update({f'fgc/{kind}/{name}': value for name, value in known.items()})
            if known:
                mean = sum(known.values()) / len(known)
                runner.message_hub.update_scalar(f'train/fgc/{kind}', mean)
        # Without the prefix 'train/' the console line stays short.
        runner.message_hub.update_scalars(by_gate)
        runner.visualizer.add_scalars(by_gate, step=runner.iter + 1)

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self.checkpoint.after_load(runner, checkpoint)

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self.checkpoint.before_save(runner, checkpoint)

    def before_test(self, runner: Runner) -> None:
        self.checkpoint.notice_ignored(runner, 'testing')

    def before_val(self, runner: Runner) -> None:
        self.checkpoint.notice_ignored(runner, 'validation')

    def _after_forward(self, runner: Runner, args: tuple, kwargs: dict, losses: Any) -> Any:
        # Whoever asks for losses in between must not touch the banks.
        if not unwrap(runner.model).training or not torch.is_grad_enabled():
            return None
        return super()._after_forward(runner, args, kwargs, losses)

    def _count_instances(self, runner: Runner, model: nn.Module) -> Optional[Tensor]:
        """Set N; return the labels of all instances, if they are of use and known."""
        if self.given_num_instances is not None:
            self.num_instances = self.given_num_instances
            return None
        loader = runner.train_dataloader
        with in_context('FGCHook'):
            refuse_mixing(loader.dataset, _preprocessor(model))
            index = install_instance_index(loader, runner.train_loop)
        self.num_instances = index.num_instances
        if index.num_items > index.num_instances:
            runner.logger.info(
                f'FGCHook: the datasets list {index.num_items} items of {index.num_instances} '
                'different pictures'
            )
        if self.source != 'label' or index.labels is None:
            return None
        return torch.from_numpy(index.labels)

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

    def _build_coupling(
        self, name: str, gate: Gate, number: int, device: torch.device, labels: Optional[Tensor]
    ) -> LayerCoupling:
        mmap_dir = None
        if self.mmap_dir is not None and self.settings['storage'] == 'mmap':
            mmap_dir = os.path.join(self.mmap_dir, f'rank{get_rank()}', name)
        with in_context(f'FGCHook: {name}'):
            return LayerCoupling(
                num_instances=self.num_instances,
                dim=gate.channels,
                device=device,
                mmap_dir=mmap_dir,
                labels=labels,
                seed=1000 * self.seed + number,
                **self.settings,
            )

    def _check(self, batch: Batch, runner: Runner) -> None:
        """Raise, on all ranks alike, before anything of the batch is used."""
        next(iter(self.couplings.values())).feature_bank.check_indices(batch.indices)
        # Once a step: nothing below looks again.
        if not any(isinstance(hook, FiniteHook) and hook.has_looked for hook in runner.hooks):
            check_finite(batch, runner.iter + 1)

    def _contrast(self, gates: dict[str, Gate], batch: Batch) -> Tensor:
        """Sum of L_g over the coupled gates, of this rank's instances."""
        own = batch.own
        indices = batch.indices[own]
        warmup = self.epochs < self.warmup_epochs

        def couple(name: str, shared: Optional[Tensor] = None) -> CouplingResult:
            record, feature = gates[name].record, batch.layers[name].feature[own]
            assert record is not None
            return self.couplings[name].loss(
                feature, record.logits, indices, neighbors=shared, warmup=warmup
            )

        # From the last to the first: the last one's neighbors may be shared.
        names = list(reversed(self.couplings))
        if self.shared:
            first = couple(names[0])
            results = [first, *(couple(name, first.neighbors) for name in names[1:])]
        else:
            device = batch.layers[names[0]].feature.device
            results = map_layers(couple, names, device)
        neighbors = {
            name: result.neighbors
            for name, result in zip(names, results, strict=True)
            if result.neighbors is not None and name in self.meters
        }
        if neighbors:
            self._note_turnover(neighbors, batch)
        return torch.stack([result.loss for result in results]).sum()

    def _note_turnover(self, neighbors: dict[str, Tensor], batch: Batch) -> None:
        """Tell the meters, on all ranks alike, about the watched instances."""
        watched = torch.isin(batch.indices, next(iter(self.meters.values())).chosen)
        if not bool(watched.any()):
            return
        mine = watched[batch.own].to(next(iter(neighbors.values())).device)
        counts = [int(part.sum()) for part in watched.split(batch.counts)]
        rows = torch.cat([found[mine] for found in neighbors.values()], dim=1)
        pieces = gather_rows(rows, counts).split(self.settings['k'], dim=1)
        for name, piece in zip(neighbors, pieces, strict=True):
            self.meters[name].update(batch.indices[watched], piece)


def _preprocessor(model: nn.Module) -> Optional[nn.Module]:
    return getattr(model, 'data_preprocessor', None)
