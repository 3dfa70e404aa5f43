# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Feature-Gate Coupling of one gated layer: two banks, neighbors, contrast."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Optional, Union

import torch
from torch import Tensor

from ..errors import UsageError, in_context
from .approximate import ApproximateSearch
from .contrast import FORMS, contrast_and_gradient, with_gradient
from .memory_bank import MemoryBank, unit_rows
from .neighbors import LabelSource, check_backend, check_k, nearest_neighbors
from .overlap import neighbor_overlap

SOURCES = ('feature', 'gate', 'label')
SPACES = ('logits', 'probs')


@dataclass
class CouplingResult:
    """What the coupling of one layer has to say about one batch.

    Attributes:
        logits (Tensor): The gate's logits, B x dim, with their graph.
        value (Tensor): L_g, the mean over the batch.
        gradient (Tensor): Its gradient in the logits.
        neighbors (Tensor, optional): B x k instances, -1 where a label has
            fewer; None in warm-up. Another layer can be given these (``shared``).
    """

    logits: Tensor
    value: Tensor
    gradient: Tensor
    neighbors: Optional[Tensor] = None

    @property
    def loss(self) -> Tensor:
        """L_g, differentiable in the logits."""
        return with_gradient(self.logits, self.value, self.gradient)


class LayerCoupling:
    """Aligns the gate space of one layer with its feature space.

    For a batch of instances: z = the normalized pooled feature, without a graph;
    neighbors = top-k of z over the feature bank, the instance itself excluded;
    loss = contrast of the gate's logits over the gate bank with these neighbors
    as positives; then both banks follow. :meth:`step` does all of it.

    In several processes, call :meth:`loss` with the rank's own batch, gather
    features, logits and indices of all ranks in the order of the ranks,
    and call :meth:`update` with the gathered batch on every rank. The banks
    then stay equal, bit for bit: they start equal, and :meth:`update` is
    deterministic, for repeated indices too.

    Deviations from the authors' code: no epsilon inside the logarithm, which cut
    off the gradient of most rows; the feature is normalized before it is mixed
    into its bank (``normalize_feature``).

    Args:
        num_instances (int): N, instances of the training set.
        dim (int): Channels of the gated layer.
        k (int): Neighbors. Defaults to 200.
        form (str): Contrast, ``'sum_log'`` (Eq. 8), ``'mean_log'`` (the same / k) or
            ``'log_sum'`` (the authors' code). The weight of the loss belongs
            to a form. ``log_sum`` is content when an instance recognizes
            itself: on free gate vectors and features in clusters it leaves the
            neighbor overlap at chance, where the other two raise it severalfold.
            Defaults to 'mean_log'.
        tau (float): Temperature. Defaults to 0.07.
        source (str): Where neighbors come from: ``'feature'``, ``'gate'``, or
            ``'label'`` (random instances of the same label).
            Defaults to 'feature'.
        space (str): What is contrasted: ``'logits'`` or ``'probs'`` of the gate.
            Defaults to 'logits'.
        include_self (bool, optional): Whether an instance is one of its own
            positives. Defaults to None: for ``log_sum`` only.
        momentum (float): Momentum of the banks. Defaults to 0.5.
        normalize_feature (bool): Whether the pooled feature is normalized
            before it enters its bank. Defaults to True.
        backend (str): Search back end, ``'auto'``, ``'torch'`` or ``'faiss'``.
            Defaults to 'auto'.
        approximate (dict, optional): Arguments of :class:`ApproximateSearch`;
            None searches exactly. Defaults to None.
        bank_dtype (str): ``'float32'`` or ``'float16'``. Defaults to 'float32'.
        bank_storage (str): ``'device'`` keeps the banks with the model, ``'host'`` in
            main memory, ``'mmap'`` in files. Defaults to 'device'.
        device (str | torch.device): Device of the model. Defaults to 'cpu'.
        mmap_dir (str, optional): Folder for the two files of
            ``'mmap'``; every layer and every rank needs its own. None
            takes unnamed temporary files. Defaults to None.
        labels (Tensor, optional): Labels of all N instances for
            ``source='label'``. Defaults to None: learned from the batches.
        seed (int): Seed of the banks and of the label draws; equal on all
            ranks. Defaults to 0.

    Example:
        >>> coupling = LayerCoupling(num_instances=1000, dim=64, k=5)
        >>> logits = torch.randn(8, 64, requires_grad=True)
        >>> out = coupling.step(torch.rand(8, 64), logits, torch.arange(8))
        >>> out.loss.backward()
    """

    def __init__(
        self,
        num_instances: int,
        dim: int,
        k: int = 200,
        form: str = 'mean_log',
        tau: float = 0.07,
        source: str = 'feature',
        space: str = 'logits',
        include_self: Optional[bool] = None,
        momentum: float = 0.5,
        normalize_feature: bool = True,
        backend: str = 'auto',
        approximate: Optional[dict] = None,
        bank_dtype: str = 'float32',
        bank_storage: str = 'device',
        device: Union[str, torch.device] = 'cpu',
        mmap_dir: Optional[str] = None,
        labels: Optional[Tensor] = None,
        seed: int = 0,
    ) -> None:
        for name, value, known in (
            ('form', form, FORMS),
            ('source', source, SOURCES),
            ('space', space, SPACES),
        ):
            if value not in known:
                raise UsageError(f'LayerCoupling: {name}={value!r} must be one of {known}')
        if not tau > 0:
            raise UsageError(f'LayerCoupling: tau={tau} must be positive')
        check_k(k, num_instances)
        check_backend(backend)
        self.num_instances = num_instances
        self.dim = dim
        self.k = k
        self.form = form
        self.tau = tau
        self.source = source
        self.space = space
        self.backend = backend
        self.include_self = form == 'log_sum' if include_self is None else include_self

        def bank(name: str, normalize_input: bool, bank_seed: int) -> MemoryBank:
            path = None if mmap_dir is None else os.path.join(mmap_dir, f'{name}.bank')
            return MemoryBank(
                num_instances, dim, bank_dtype, bank_storage, device, path, momentum,
                normalize_input, bank_seed,
            )  # fmt: skip

        self.feature_bank = bank('feature', normalize_feature, 2 * seed)
        self.gate_bank = bank('gate', False, 2 * seed + 1)
        self.searched = self.feature_bank if source == 'feature' else self.gate_bank
        self.label_source = LabelSource(num_instances, labels, seed) if source == 'label' else None
        self.search: Optional[ApproximateSearch] = None
        if approximate is not None and source != 'label':
            self.search = ApproximateSearch(self.searched, **{'backend': backend, **approximate})

    def step(
        self,
        feature: Tensor,
        logits: Tensor,
        indices: Tensor,
        labels: Optional[Tensor] = None,
        neighbors: Optional[Tensor] = None,
        warmup: bool = False,
    ) -> CouplingResult:
        """:meth:`loss`, then :meth:`update` with the same batch.

        Args:
            labels (Tensor, optional): B labels, for ``source='label'``; they are noted first.
                Defaults to None, known already.
        """
        if self.label_source is not None and labels is not None:
            self.label_source.observe(indices, labels)
        result = self.loss(feature, logits, indices, neighbors, warmup)
        self.update(feature, logits, indices)
        return result

    @torch.no_grad()
    def loss(
        self,
        feature: Tensor,
        logits: Tensor,
        indices: Tensor,
        neighbors: Optional[Tensor] = None,
        warmup: bool = False,
    ) -> CouplingResult:
        """Neighbors and loss of a batch against the banks as they are.

        Nothing here looks for NaN or Inf, which would mean to wait for the device: whoever
        calls does, once for all layers (``FGCHook`` does).

        Args:
            feature (Tensor): B x dim, pooled feature before gating, finite.
            logits (Tensor): B x dim, logits of the gate, finite, with their graph.
            indices (Tensor): B instance indices, unique over the training set.
            neighbors (Tensor, optional): B x k neighbors found elsewhere, for
                ``shared``; nothing is searched then.
            warmup (bool): Whether the instance itself is its only positive;
                nothing is searched then. Defaults to False.

        Returns:
            CouplingResult: The loss and what it was computed from.
        """
        self._check(feature, logits, indices)
        indices = indices.to(logits.device, torch.int64)
        gate = self._gate_vectors(logits.detach())
        positives = indices[:, None]
        if warmup:
            neighbors = None
        else:
            if neighbors is None:
                neighbors = self.find(feature, logits, indices)
            neighbors = neighbors.to(logits.device)
            own = (positives,) if self.include_self else ()
            positives = torch.cat((*own, neighbors), dim=1)
        each, gradient = contrast_and_gradient(
            gate, self.gate_bank.data, positives, self.form, self.tau
        )
        size = max(1, len(each))
        gradient = gradient * (1 / size)
        if self.space == 'probs':
            gradient = gradient * (1 - gate) * gate
        return CouplingResult(logits, each.sum() / size, gradient, neighbors)

    @torch.no_grad()
    def find(self, feature: Tensor, logits: Tensor, indices: Tensor) -> Tensor:
        """B x k neighbors of a batch, -1 where a label has fewer."""
        if self.label_source is not None:
            return self.label_source.draw(indices, self.k)
        gate = self._gate_vectors(logits.detach())
        queries = unit_rows(feature if self.source == 'feature' else gate)
        if self.search is not None:
            return self.search.search(queries, self.k, indices)[0]
        return nearest_neighbors(queries, self.searched.data, self.k, indices, self.backend)[0]

    @torch.no_grad()
    def update(self, feature: Tensor, logits: Tensor, indices: Tensor) -> None:
        """Let both banks follow a batch, that of all ranks if there are several.

        Features and logits are finite, see :meth:`loss`. Nothing is written if anything else
        about the batch is wrong.
        """
        self._check(feature, logits, indices)
        self.feature_bank.update(indices, feature)
        self.gate_bank.update(indices, self._gate_vectors(logits.detach()))
        if self.search is not None:
            self.search.rows_changed(indices)

    def overlap(self, k: Optional[int] = None, sample: int = 1024, seed: int = 0) -> float:
        """Neighbor overlap between the two banks, see :func:`neighbor_overlap`.

        Args:
            k (int, optional): How many neighbors. Defaults to the layer's.
            sample (int): Instances to average over. Defaults to 1024.
            seed (int): Seed of their choice. Defaults to 0.
        """
        generator = torch.Generator().manual_seed(seed)
        queries = torch.randperm(self.num_instances, generator=generator)[:sample]
        k = self.k if k is None else k
        return neighbor_overlap(self.feature_bank.data, self.gate_bank.data, k, queries)

    def _gate_vectors(self, logits: Tensor) -> Tensor:
        logits = logits.float() if logits.dtype != torch.float64 else logits
        return logits if self.space == 'logits' else torch.sigmoid(logits)

    def _check(self, feature: Tensor, logits: Tensor, indices: Tensor) -> None:
        self.feature_bank.check_indices(indices)
        expected = (indices.numel(), self.dim)
        for name, vectors in (('feature', feature), ('logits', logits)):
            if tuple(vectors.shape) != expected:
                raise ValueError(
                    f'{name}: expected the shape {expected}, one row per index, but got '
                    f'{tuple(vectors.shape)}'
                )

    def state_dict(self) -> dict[str, Any]:
        """Banks (not copied), labels and search state."""
        parts: dict[str, Any] = dict(feature=self.feature_bank, gate=self.gate_bank)
        parts.update(labels=self.label_source, search=self.search)
        state = {name: part.state_dict() for name, part in parts.items() if part is not None}
        return dict(state, source=self.source)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the state of a checkpoint.

        Raises:
            CheckpointError: If its banks are of another size, width or type.
        """
        for name, part in (('feature', self.feature_bank), ('gate', self.gate_bank)):
            with in_context(f'{name} bank'):
                part.check_state(state[name])
        self.feature_bank.load_state_dict(state['feature'])
        self.gate_bank.load_state_dict(state['gate'])
        if self.label_source is not None and 'labels' in state:
            self.label_source.load_state_dict(state['labels'])
        if self.search is not None and state.get('search'):
            self.search.load_state_dict(state['search'])
