# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""One unit vector per training instance, kept outside the model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO, Optional, Union, cast

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckpointError, UsageError

try:
    import fcntl
except ImportError:  # not on POSIX: nobody watches over the file
    fcntl = None  # type: ignore[assignment]

_DTYPES = {'float32': torch.float32, 'float16': torch.float16}
_STORAGES = ('device', 'host', 'mmap')
# Elements drawn at once when a bank is filled. Part of what a seed means: do
# not change it.
_INIT_ELEMENTS = 1 << 22


def unit_rows(x: Tensor) -> Tensor:
    """Rows of ``x`` scaled to length one, in float32; a zero row stays zero.

    Rows are first scaled by their largest entry, so that neither very long
    nor very short ones lose their direction to overflow or underflow.
    """
    x = x.float()
    largest = x.abs().amax(dim=1, keepdim=True)
    tiny = torch.finfo(x.dtype).tiny
    x = torch.where(largest > tiny, x / largest.clamp_min(tiny), torch.zeros_like(x))
    return x / x.norm(dim=1, keepdim=True).clamp_min(tiny)


def iter_chunks(
    data: Tensor,
    rows: int,
    device: Optional[torch.device] = None,
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[int, Tensor]]:
    """Pass over the rows of a bank, so many at a time: the number of the first row, and the piece
    on the device and of the type it is needed in, a view where these agree."""
    device = data.device if device is None else device
    for start in range(0, data.size(0), rows):
        yield start, data[start : start + rows].to(device=device, dtype=dtype)


class MemoryBank:
    """One vector per training instance: ``V_f`` or ``V_g`` of a coupled layer.

    Rows start as random unit vectors, the same for the same seed on every
    rank, and follow their instances with a momentum:
    ``V[i] <- normalize(m V[i] + (1 - m) v_i)``.

    A bank is no ``nn.Module`` and no buffer of one: hooks that average or copy
    the buffers of a model must not touch it.

    An index that occurs several times in one :meth:`update` is updated once
    per occurrence, in the order of the batch, as if the instances had come one
    after the other. The result does not depend on the device's scatter order.

    A zero vector (a layer whose features are all dead) has no direction and
    leaves its row as it is.

    Args:
        num_instances (int): Rows, N.
        dim (int): Width of a row, D.
        dtype (str): ``'float32'`` or ``'float16'``. Sums are
            float32 in both. Defaults to 'float32'.
        storage (str): ``'device'`` keeps the rows on ``device``, ``'host'`` in
            main memory, ``'mmap'`` in a file. Defaults to 'device'.
        device (str | torch.device): Device of the model. Defaults to 'cpu'.
        path (str, optional): File of ``storage='mmap'``, overwritten. Every
            process and every bank needs its own. None takes an unnamed file in
            the system's temporary folder. Defaults to None.
        momentum (float): m. Defaults to 0.5.
        normalize_input (bool): Whether a vector is normalized before it is
            mixed in. False mixes it as it is, so that long vectors move their
            row further: the gate bank of the paper, and the feature bank of
            the authors' code. Defaults to True.
        seed (int): Seed of the first rows. Defaults to 0.

    Example:
        >>> bank = MemoryBank(100, 64)
        >>> bank.update(torch.tensor([3, 7]), torch.rand(2, 64))
        >>> bank.data[3].norm()
        tensor(1.)
    """

    def __init__(
        self,
        num_instances: int,
        dim: int,
        dtype: str = 'float32',
        storage: str = 'device',
        device: Union[str, torch.device] = 'cpu',
        path: Optional[str] = None,
        momentum: float = 0.5,
        normalize_input: bool = True,
        seed: int = 0,
    ) -> None:
        if num_instances < 1 or dim < 1:
            raise UsageError(
                f'MemoryBank: num_instances={num_instances} and dim={dim} must both be at least 1'
            )
        if dtype not in _DTYPES:
            raise UsageError(f'MemoryBank: dtype={dtype!r} must be one of {tuple(_DTYPES)}')
        if storage not in _STORAGES:
            raise UsageError(f'MemoryBank: storage={storage!r} must be one of {_STORAGES}')
        if not 0 <= momentum < 1:
            raise UsageError(f'MemoryBank: momentum={momentum} must be within [0, 1)')
        if path is not None and storage != 'mmap':
            raise UsageError(f"MemoryBank: path={path!r} needs storage='mmap', not {storage!r}")
        self.num_instances = num_instances
        self.dim = dim
        self.storage = storage
        self.momentum = momentum
        self.normalize_input = normalize_input
        self.seed = seed
        self._file: Optional[BinaryIO] = None
        self.data = self._allocate(dtype, device, path)
        self.reset()

    def _allocate(
        self, dtype: str, device: Union[str, torch.device], path: Optional[str]
    ) -> Tensor:
        shape = (self.num_instances, self.dim)
        if self.storage != 'mmap':
            where = device if self.storage == 'device' else 'cpu'
            return torch.empty(shape, dtype=_DTYPES[dtype], device=where)
        if path is None:
            # Open as long as the bank lives.
            file = tempfile.TemporaryFile(prefix='fgc_bank_')  # noqa: SIM115
            self._file = cast(BinaryIO, file)
        else:
            size = self.num_instances * self.dim * np.dtype(dtype).itemsize
            self._file = _open_exclusive(path, size)
        return torch.from_numpy(np.memmap(self._file, dtype=dtype, mode='r+', shape=shape))

    def reset(self) -> None:
        """Fill the bank with the random unit vectors of its seed."""
        generator = torch.Generator().manual_seed(self.seed)
        rows = max(1, _INIT_ELEMENTS // self.dim)
        for start in range(0, self.num_instances, rows):
            piece = self.data[start : start + rows]
            piece.copy_(unit_rows(torch.randn(piece.shape, generator=generator)))

    @torch.no_grad()
    def update(self, indices: Tensor, vectors: Tensor) -> None:
        """Move the rows of a batch toward its vectors.

        Args:
            indices (Tensor): B instance indices; may repeat. Best on the CPU, see
                :meth:`check_indices`.
            vectors (Tensor): B x D, finite: NaN or Inf would stay in their rows for good, and
                looking for them here would mean to wait for the device.

        Raises:
            ValueError: If the shapes do not fit.
            IndexError: If an index is out of range. In both cases nothing has
                been written.
        """
        indices = self.check_indices(indices)
        if tuple(vectors.shape) != (indices.numel(), self.dim):
            raise ValueError(
                f'MemoryBank: expected vectors of shape {(indices.numel(), self.dim)}, one row per '
                f'index, but got {tuple(vectors.shape)}'
            )
        if not indices.numel():
            return
        vectors = vectors.detach().to(self.data.device, torch.float32)
        if self.normalize_input:
            vectors = unit_rows(vectors)
        turn = occurrences(indices)
        turns = int(turn.max()) + 1
        indices = indices.to(self.data.device)
        for t in range(turns):
            # Within one turn every index occurs once: the write is deterministic.
            now = slice(None) if turns == 1 else (turn == t).nonzero()[:, 0]
            self._mix(indices[now], vectors[now])

    def _mix(self, indices: Tensor, vectors: Tensor) -> None:
        old = self.data[indices].float()
        new = unit_rows(self.momentum * old + (1 - self.momentum) * vectors)
        # Without a direction: a zero vector, or one that cancels its row.
        keep = (vectors == 0).all(dim=1, keepdim=True) | (new == 0).all(dim=1, keepdim=True)
        self.data[indices] = torch.where(keep, old, new).to(self.data.dtype)

    def check_indices(self, indices: Tensor) -> Tensor:
        """The indices as int64.

        Raises:
            IndexError: If one is out of range. Only those on the CPU are looked at: for those
                on a GPU that would mean to wait for it.
        """
        indices = torch.as_tensor(indices)
        if indices.dim() != 1 or indices.is_floating_point() or indices.dtype == torch.bool:
            raise ValueError(
                'MemoryBank: indices must be a vector of integers, one per instance of the batch, '
                f'not {indices.dtype} of shape {tuple(indices.shape)}'
            )
        indices = indices.to(torch.int64)
        if indices.is_cuda:
            return indices
        bad = (indices < 0) | (indices >= self.num_instances)
        if bool(bad.any()):
            raise IndexError(
                f'instance index {int(indices[bad][0])} is out of range for a bank of '
                f'N={self.num_instances} instances; indices run from 0 to {self.num_instances - 1} '
                'over the whole training set'
            )
        return indices

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds. ``data`` is the bank itself, not a copy."""
        return dict(
            num_instances=self.num_instances,
            dim=self.dim,
            dtype=str(self.data.dtype).replace('torch.', ''),
            data=self.data,
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the rows of a checkpoint, see :meth:`check_state`."""
        self.check_state(state)
        self.data.copy_(state['data'])

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise a CheckpointError that says in what a state differs from this bank, or that it
        holds what is no number."""
        mine = self.state_dict()
        differs = [
            f'{name} is {state.get(name)!r} there and {mine[name]!r} here'
            for name in ('num_instances', 'dim', 'dtype')
            if state.get(name) != mine[name]
        ]
        if differs:
            raise CheckpointError('the stored memory bank does not fit: ' + '; '.join(differs))
        # In pieces: the rows may be a mapped file larger than memory.
        if not all(bool(torch.isfinite(rows).all()) for rows in state['data'].split(1 << 16)):
            raise CheckpointError('the stored memory bank holds NaN or Inf')


def _open_exclusive(path: str, size: int) -> BinaryIO:
    """Open the file of a memory-mapped bank, and refuse one that is in use.

    Two ranks on one file would apply every update twice, and silently.
    """
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    # Not 'w+b', which would cut off the file of whoever holds the lock.
    file = open(path, 'a+b')  # noqa: SIM115
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise UsageError(
                f'MemoryBank: path={path!r} is in use by another bank or process; '
                'give every rank and every bank a file of its own'
            ) from None
    file.truncate(size)
    return file


def occurrences(indices: Tensor) -> Tensor:
    """How many equal indices stand before each one: 5 7 5 5 -> 0 0 1 2."""
    values, order = indices.sort(stable=True)
    position = torch.arange(len(values), device=values.device)
    first = torch.ones_like(values, dtype=torch.bool)
    first[1:] = values[1:] != values[:-1]
    start = torch.cummax(torch.where(first, position, torch.zeros_like(position)), 0).values
    return torch.empty_like(position).scatter_(0, order, position - start)
