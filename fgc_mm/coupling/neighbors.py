# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Whose neighbors an instance has: exact search, and the label source."""

from __future__ import annotations

import functools
import importlib
import logging
from types import ModuleType
from typing import Any, Optional

import torch
from mmengine.logging import print_log
from torch import Tensor

from ..errors import MissingPackageError, UsageError
from .memory_bank import iter_chunks
from .topk import merge, pack, topk_rows, unpack

BACKENDS = ('auto', 'torch', 'faiss')
# faiss.knn wants float32; a float16 bank is converted in pieces of this size.
_CONVERT_ELEMENTS = 1 << 22
_FAISS_GPU_MAX_K = 2048


def nearest_neighbors(
    queries: Tensor,
    data: Tensor,
    k: int,
    exclude: Optional[Tensor] = None,
    backend: str = 'auto',
) -> tuple[Tensor, Tensor]:
    """The k rows of a bank with the largest inner product with each query.

    Exact. Both back ends search the bank where it lies, need memory for a
    piece of it at most, and give the same answer: best first, and of two rows
    of equal similarity the one with the smaller number. (Similarities that
    differ by less than the rounding of a float32 sum may be ordered
    differently, because the back ends sum in different orders.)

    Args:
        queries (Tensor): B x D, finite: what is no number is near to nothing.
        data (Tensor): N x D, float32 or float16, on any device.
        k (int): How many.
        exclude (Tensor, optional): B row numbers, the query's own row, which is
            never its neighbor; -1 for none. Defaults to None.
        backend (str): ``'torch'``, ``'faiss'`` or ``'auto'``, see
            :func:`choose_backend`. Defaults to 'auto'.

    Returns:
        tuple: Row numbers (int64) and similarities (float32), each B x k, on
        the device of the queries.

    Raises:
        ValueError: If the shapes do not fit or k is out of range.
    """
    if queries.dim() != 2 or queries.size(1) != data.size(1):
        raise ValueError(
            f'queries of shape {tuple(queries.shape)} do not fit a bank of shape '
            f'{tuple(data.shape)}: the widths must agree'
        )
    check_k(k, data.size(0), excludes_self=exclude is not None)
    queries = queries.detach().float()
    with torch.no_grad(), torch.autocast(queries.device.type, enabled=False):
        if choose_backend(backend, queries, data, k) == 'faiss':
            return _faiss_topk(queries, data, k, exclude)
        return topk_rows(queries, data, k, exclude)


def check_k(k: int, num_instances: int, excludes_self: bool = True) -> None:
    """Raise a UsageError that says which k fits, unless this one does."""
    most = num_instances - int(excludes_self)
    if most < 1:
        raise UsageError(f'N={num_instances} instances are too few for neighbors; there must be 2')
    if not 1 <= k <= most:
        others = ', itself left out,' if excludes_self else ''
        raise UsageError(
            f'k={k} neighbors: among N={num_instances} instances an instance{others} has '
            f'{most}; choose k from 1 to {most}'
        )


def check_backend(backend: str) -> None:
    """Raise an error unless there is a back end of that name."""
    if backend not in BACKENDS:
        raise UsageError(f'backend={backend!r} must be one of {BACKENDS}')
    if backend == 'faiss' and _faiss() is None:
        raise MissingPackageError(
            "backend='faiss' but faiss is not installed; install it, or use backend='torch' "
            "or 'auto'"
        )


def choose_backend(backend: str, queries: Tensor, data: Tensor, k: int) -> str:
    """What ``'auto'`` means: ``torch`` on a CPU, ``faiss`` on a GPU if it is there.

    On a CPU the choice rests on one size, N=50,000, D=64, B=256, k=200, where
    product and top-k took 64 ms on one core and ``faiss.knn`` 103 ms (``benchmarks/fgc.py
    --backends``). On a GPU ``faiss.knn_gpu`` fuses product and selection; that is not measured.
    """
    check_backend(backend)
    if backend == 'torch':
        return 'torch'
    faiss: Any = _faiss()
    on_gpu = queries.is_cuda and data.is_cuda
    without_gpu = on_gpu and not (hasattr(faiss, 'knn_gpu') and faiss.get_num_gpus() > 0)
    if backend == 'faiss':
        if without_gpu:
            raise MissingPackageError(
                "backend='faiss' with the bank on a GPU but this faiss was built without GPUs; "
                "install faiss-gpu, or use backend='torch' or 'auto'"
            )
        return 'faiss'
    if faiss is None or without_gpu:
        lacks = 'is not installed' if faiss is None else 'has no GPU support'
        _notice_once(f'faiss {lacks}: neighbors are searched by the torch back end')
        return 'torch'
    return 'faiss' if on_gpu and k + 2 <= _FAISS_GPU_MAX_K else 'torch'


@functools.cache
def _faiss() -> Optional[ModuleType]:
    try:
        return importlib.import_module('faiss')
    except ImportError:
        return None


@functools.cache
def _notice_once(message: str) -> None:
    print_log(message, logger='current', level=logging.WARNING)


@functools.cache
def _gpu_resources(device: torch.device) -> Any:
    faiss = importlib.import_module('faiss')
    with torch.cuda.device(device):
        return faiss.StandardGpuResources()


def _faiss_topk(
    queries: Tensor, data: Tensor, k: int, exclude: Optional[Tensor]
) -> tuple[Tensor, Tensor]:
    # One more for the query itself, one more to see a tie at the end.
    want = min(k + 2, data.size(0))
    if queries.is_cuda and data.is_cuda:
        keys = _faiss_gpu_keys(queries, data, want)
    else:
        keys = _faiss_cpu_keys(queries.cpu(), data.cpu(), want).to(queries.device)
    rows, similarity = unpack(keys)
    if exclude is not None:
        own = exclude.to(rows.device)[:, None]
        keys = keys.masked_fill(rows == own, torch.iinfo(torch.int64).min)
        keys = keys.sort(dim=1, descending=True).values
        rows, similarity = unpack(keys)
    tied = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
    if rows.size(1) > k:
        tied = similarity[:, k - 1] == similarity[:, k]
    rows, similarity = rows[:, :k].contiguous(), similarity[:, :k].contiguous()
    if bool(tied.any()):
        # Which of equal rows faiss kept is its own affair; here the first ones count.
        left_out = None if exclude is None else exclude.to(tied.device)[tied]
        rows[tied], similarity[tied] = topk_rows(queries[tied], data, k, left_out)
    return rows, similarity


def _faiss_cpu_keys(queries: Tensor, data: Tensor, want: int) -> Tensor:
    faiss = importlib.import_module('faiss')
    size, dim = data.shape
    piece = size if data.dtype == torch.float32 else max(want, _CONVERT_ELEMENTS // dim)
    best = torch.empty(len(queries), 0, dtype=torch.int64)
    array = queries.contiguous().numpy()
    for start, rows in iter_chunks(data, piece):
        similarity, numbers = faiss.knn(
            array, rows.numpy(), min(want, len(rows)), metric=faiss.METRIC_INNER_PRODUCT
        )
        keys = pack(torch.from_numpy(similarity), torch.from_numpy(numbers) + start)
        best = merge((best, keys), want)
    return best


def _faiss_gpu_keys(queries: Tensor, data: Tensor, want: int) -> Tensor:
    faiss = importlib.import_module('faiss')
    importlib.import_module('faiss.contrib.torch_utils')  # lets faiss read tensors
    similarity, numbers = faiss.knn_gpu(
        _gpu_resources(queries.device),
        queries.contiguous().to(data.dtype),
        data,
        want,
        metric=faiss.METRIC_INNER_PRODUCT,
    )
    return pack(similarity.float(), numbers).sort(dim=1, descending=True).values


class LabelSource:
    """Neighbors of the ablation: k random instances with the same label.

    Every draw shuffles each class with a generator seeded by (seed, draw), and
    gives an instance the k instances that follow it in its class, around the end
    to the beginning: a uniformly random set without itself. It depends on the
    instance and the draw only, not on the rest of the batch or the rank.

    A class with at most k other known members gives all of them; the rest of
    the row is -1 and ignored by the loss. Labels are known from the start if
    ``labels`` is given, else from an instance's first appearance on.

    Args:
        num_instances (int): N.
        labels (Tensor, optional): Labels of all N instances. Defaults to None.
        seed (int): Seed of the draws. Defaults to 0.
    """

    def __init__(self, num_instances: int, labels: Optional[Tensor] = None, seed: int = 0) -> None:
        self.labels = torch.full((num_instances,), -1, dtype=torch.int64)
        self.seed = seed
        self.draws = 0
        if labels is not None:
            self.observe(torch.arange(num_instances), torch.as_tensor(labels))

    def observe(self, indices: Tensor, labels: Tensor) -> None:
        """Note the labels of a batch.

        Raises:
            UsageError: If they are not one integer each.
        """
        if labels.shape != indices.shape or labels.is_floating_point():
            raise UsageError(
                "source='label' needs one integer label per instance, but labels are "
                f'{labels.dtype} of shape {tuple(labels.shape)} for {indices.numel()} instances'
            )
        labels = labels.detach().cpu().long()
        if bool((labels < 0).any()):
            raise UsageError(f"source='label': label {int(labels.min())} is negative")
        self.labels[indices.detach().cpu()] = labels

    def draw(self, indices: Tensor, k: int) -> Tensor:
        """B x k neighbors of the instances, -1 where there are no more."""
        own = indices.detach().cpu()
        mine = self.labels[own]
        if bool((mine < 0).any()):
            raise UsageError(
                f"source='label': no label was given for instance {int(own[mine < 0][0])}; use "
                "source='feature' where there are none"
            )
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * self.draws)
        self.draws += 1
        shuffled = torch.randperm(len(self.labels), generator=generator)
        # Only the classes of the batch need to be put in order.
        members = shuffled[torch.isin(self.labels[shuffled], mine)]
        members = members[self.labels[members].argsort(stable=True)]
        labels = self.labels[members]
        first = torch.searchsorted(labels, mine)
        size = (torch.searchsorted(labels, mine, right=True) - first)[:, None]
        place = torch.empty_like(self.labels)
        place[members] = torch.arange(len(members))
        step = torch.arange(1, k + 1)
        around = (place[own] - first)[:, None] + step
        picked = members[first[:, None] + around % size]
        return picked.masked_fill(step >= size, -1).to(indices.device)

    def state_dict(self) -> dict[str, Any]:
        return dict(labels=self.labels, draws=self.draws)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.labels.copy_(state['labels'])
        self.draws = state['draws']
