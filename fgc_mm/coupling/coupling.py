# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Feature-Gate Coupling of a network, in any training loop."""

from __future__ import annotations

import math
import os
from typing import Any, ClassVar, Optional

import torch
import torch.nn as nn
from mmengine.dist import get_rank
from torch import Tensor

from ..errors import CheckpointError, UsageError, in_context
from ..gates import GateRecord, forget_records, records_of, select_blocks
from ..gates.utils import Layers
from ..runtime import Attachments
from ..runtime.config.argument_types import check_arguments
from .batch import Batch, Read, check_finite, collect_batch, gather_rows
from .layer_coupling import CouplingResult, LayerCoupling
from .overlap import TurnoverMeter
from .parallel import map_layers

_OVERLAP_SAMPLE = 256


class Coupling:
    """Draws instances that are neighbors in feature space together in gate space, for the gates of
    chosen blocks, each by a :class:`LayerCoupling`.

    The banks follow in :meth:`step`. In several processes all of them work on the common batch,
    so every rank holds the same banks after every step.

    A pass under ``torch.no_grad`` or in evaluation leaves everything as it is.

    Args:
        network (nn.Module): A network with gates.
        num_instances (int): N, instances of the training set.
        layers (str | int | Sequence): The coupled blocks: ``'last_stage'``,
            ``'all'``, names of stages or blocks, or indices (-1 the last gated
            block). Defaults to 'last_stage'.
        eta (float): Weight of the loss; it belongs to a ``form`` and can be set at any time.
            Defaults to 0.03.
        k (int): Neighbors. Defaults to 200.
        shared (bool): Whether all gates use the neighbors of the last one.
            Defaults to False.
        warmup_epochs (float): How long an instance is its own only positive.
            Defaults to 0.
        mmap_dir (str, optional): Folder for the banks of ``bank_storage='mmap'``; None takes the
            system's temporary one. Defaults to None.
        labels (Tensor, optional): Labels of all N instances, for ``source='label'``.
            Defaults to None.
        seed (int): Seed of the banks. Defaults to 0.
        **options: ``form``, ``tau``, ``momentum``, ``space``, ``source``, ... of
            :class:`LayerCoupling`.

    Example:
        >>> coupling = Coupling(network, num_instances=len(dataset), layers=[-2, -1])
        >>> loss = criterion(network(images), labels) + coupling.loss(indices)
        >>> loss.backward()
        >>> optimizer.step()
        >>> coupling.step()
    """

    options_of: ClassVar[dict] = {LayerCoupling: ('device',)}

    def __init__(
        self,
        network: nn.Module,
        num_instances: int,
        layers: Layers = 'last_stage',
        eta: float = 0.03,
        k: int = 200,
        shared: bool = False,
        warmup_epochs: float = 0,
        mmap_dir: Optional[str] = None,
        labels: Optional[Tensor] = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        check_arguments(type(self), options)
        self.network = network
        self.num_instances = num_instances
        self.eta = eta
        self.k = k
        self.shared = shared
        self.warmup_epochs = warmup_epochs
        blocks = select_blocks(network, layers)
        self.gates = dict(gate for block in blocks.values() for gate in block)
        device = next(network.parameters()).device
        self.layers: dict[str, LayerCoupling] = {}
        for number, (name, gate) in enumerate(self.gates.items()):
            gate.wants_feature = True
            own = None
            if mmap_dir is not None and options.get('bank_storage') == 'mmap':
                own = os.path.join(mmap_dir, f'rank{get_rank()}', name)
            with in_context(name):
                self.layers[name] = LayerCoupling(
                    num_instances,
                    gate.channels,
                    k=k,
                    device=device,
                    mmap_dir=own,
                    labels=labels,
                    seed=1000 * seed + number,
                    **options,
                )
        searched = list(self.gates)[-1:] if shared else list(self.gates)
        self.meters = {name: TurnoverMeter(num_instances, k) for name in searched}
        self.seen = 0
        self._pending: list[Batch] = []
        self._attached = Attachments()
        self._attached.before(network, lambda *_: forget_records(self.gates))
        forget_records(self.gates)

    @property
    def epochs(self) -> float:
        """Epochs of this training so far: instances seen / N."""
        return self.seen / self.num_instances

    @property
    def needs_labels(self) -> bool:
        """Whether :meth:`loss` has to be told labels: until those of all instances are known."""
        source = next(iter(self.layers.values())).label_source
        return source is not None and bool((source.labels < 0).any())

    @property
    def bank_bytes(self) -> int:
        """Bytes of the banks."""
        banks = [b.data for c in self.layers.values() for b in (c.feature_bank, c.gate_bank)]
        return sum(data.numel() * data.element_size() for data in banks)

    def loss(self, indices: Tensor, labels: Optional[Tensor] = None) -> Tensor:
        """``eta`` times the sum of L_g over the coupled gates, of the last pass.

        Args:
            indices (Tensor): For each picture its number in the training set, 0 to N - 1.
            labels (Tensor, optional): Their labels, for ``source='label'``. Defaults to None.

        Returns:
            Tensor: A scalar; 0 outside of training, where nothing is remembered.

        Raises:
            NonFiniteError: If a feature or a logit is NaN or Inf.
        """
        if labels is None and self.needs_labels and self._trains():
            raise UsageError(
                "source='label' needs labels: loss(indices, labels), or those of all instances "
                'as Coupling(labels=...)'
            )
        return self.loss_of(lambda: (indices, labels if self.needs_labels else None))

    def loss_of(self, read: Read, when: Optional[str] = 'in this step') -> Tensor:
        """:meth:`loss` of what is read here.

        Args:
            read (Callable): Gives indices and labels of this rank's part; it may raise, and all
                ranks do then.
            when (str, optional): When this is, for the error if a feature or a logit is NaN or
                Inf; None if somebody has looked. Defaults to 'in this step'.
        """
        if not self._trains():
            return torch.zeros((), device=next(self.network.parameters()).device)
        records = records_of(self.gates)
        idle = [name for name in self.gates if name not in records]
        if idle:
            raise UsageError(f'{idle[0]} did not run in this pass; leave it out of layers=')
        bank = next(iter(self.layers.values())).feature_bank

        def checked() -> tuple[Tensor, Optional[Tensor]]:
            indices, labels = read()
            return bank.check_indices(torch.as_tensor(indices).cpu()), labels

        batch = collect_batch(records, checked)
        if when is not None:
            check_finite(batch, when)
        for layer in self.layers.values():
            if layer.label_source is not None and batch.labels is not None:
                layer.label_source.observe(batch.indices, batch.labels)
        logits = next(iter(records.values())).logits
        value = logits.new_zeros(())
        if self.eta:
            with torch.autocast(logits.device.type, enabled=False):
                value = self.eta * batch.weight * self._contrast(records, batch)
        self._pending.append(batch)
        return value

    def _trains(self) -> bool:
        return self.network.training and torch.is_grad_enabled()

    def step(self) -> None:
        """Let the banks follow. Call it after each step of the optimizer."""
        for batch in self._pending:
            for name, coupling in self.layers.items():
                layer = batch.layers[name]
                coupling.update(layer.feature, layer.logits, batch.indices)
            self.seen += len(batch.indices)
        self._pending.clear()

    def discard(self) -> None:
        """Forget the last batches, because their step is not taken."""
        self._pending.clear()

    def close(self) -> None:
        """Take all hooks off the network."""
        self.discard()
        self._attached.remove()

    def overlap(self, seed: int = 0) -> dict[str, float]:
        """Gate -> share of neighbors in feature space that are neighbors in gate space, of a
        sample of the instances."""
        return {
            name: layer.overlap(sample=_OVERLAP_SAMPLE, seed=seed)
            for name, layer in self.layers.items()
        }

    def turnover(self) -> dict[str, float]:
        """Gate -> share of an instance's neighbors that changed since it was last seen, the mean
        since the last call; not of gates of which nothing was seen twice."""
        found = {name: meter.compute() for name, meter in self.meters.items()}
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def state_dict(self) -> dict[str, Any]:
        """Banks (not copied) and counters."""
        return dict(
            num_instances=self.num_instances,
            seen=self.seen,
            layers={name: layer.state_dict() for name, layer in self.layers.items()},
            turnover={name: meter.state_dict() for name, meter in self.meters.items()},
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another one was.

        Raises:
            CheckpointError: If its training set, its layers or its banks are others.
        """
        if state['num_instances'] != self.num_instances:
            raise CheckpointError(
                f'the banks are of a training set of {state["num_instances"]} instances, this one '
                f'has {self.num_instances}'
            )
        if set(state['layers']) != set(self.layers):
            raise CheckpointError(
                f'there are banks of the gates {sorted(state["layers"])}, and coupled are '
                f'{sorted(self.layers)}'
            )
        self.seen = state.get('seen', self.seen)  # beside the banks in earlier versions
        for name, layer in self.layers.items():
            with in_context(name):
                layer.load_state_dict(state['layers'][name])
        for name, meter in self.meters.items():
            saved = state['turnover'].get(name)
            if saved is not None and saved['last'].shape == meter.last.shape:
                meter.load_state_dict(saved)

    def _contrast(self, records: dict[str, GateRecord], batch: Batch) -> Tensor:
        """Sum of L_g over the coupled gates, of this rank's instances."""
        own = batch.own
        indices = batch.indices[own]
        warmup = self.epochs < self.warmup_epochs

        def couple(name: str, shared: Optional[Tensor] = None) -> CouplingResult:
            return self.layers[name].loss(
                batch.layers[name].feature[own],
                records[name].logits,
                indices,
                neighbors=shared,
                warmup=warmup,
            )

        # From the last to the first: the last one's neighbors may be shared.
        names = list(reversed(self.layers))
        if self.shared:
            first = couple(names[0])
            results = [first, *(couple(name, first.neighbors) for name in names[1:])]
        else:
            results = map_layers(couple, names, batch.layers[names[0]].feature.device)
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
        pieces = gather_rows(rows, counts).split(self.k, dim=1)
        for name, piece in zip(neighbors, pieces, strict=True):
            self.meters[name].update(batch.indices[watched], piece)
