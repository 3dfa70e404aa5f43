# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What one operation does to the channels it reads.

A *label* says which channel an element of a tensor comes from, -1 for none. The labels of a tensor
are an array that broadcasts to its shape: ``1 x 64 x 1 x 1`` for a map of 64 channels. An operation
is harmless if no element of its output mixes labels; it then has a rule for those of its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Optional

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .recorder import Node, Ref

Labels = np.ndarray
Found = list[Optional[Labels]]
"""For each output its labels, None if it holds none."""


class NotPrivate(Exception):
    """The channels do not stay apart; the message says where."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# One element out for one element in.
POINTWISE = _names(
    """
    abs acos asin atan ceil celu clamp clamp_max clamp_min clone contiguous cos detach elu
    erf exp expm1 floor gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu log log1p
    log_sigmoid_forward logit mish neg pow reciprocal relu relu6 round rsqrt selu sigmoid
    sign silu sin softplus softshrink sqrt square tan tanh threshold _to_copy to alias
    lift_fresh dropout native_dropout bernoulli rrelu rrelu_with_noise positive sgn trunc
    frac logical_not _conj
    """
)
# Two tensors, element by element; a factor may come from anywhere.
FACTORS = _names('mul div _prelu_kernel')
SUMS = _names('add sub rsub maximum minimum where fmod remainder lerp gt ge lt le eq ne')
ELEMENTWISE = POINTWISE | FACTORS | SUMS
# Windows over the last dimensions, channel by channel.
POOLS = {
    **dict.fromkeys(
        _names(
            """
            max_pool2d max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d
            _adaptive_avg_pool2d adaptive_max_pool2d upsample_nearest2d upsample_bilinear2d
            upsample_bicubic2d _upsample_nearest_exact2d _upsample_bilinear2d_aa
            reflection_pad2d replication_pad2d
            """
        ),
        2,
    ),
    **dict.fromkeys(
        _names(
            """
            avg_pool1d adaptive_avg_pool1d upsample_linear1d upsample_nearest1d
            reflection_pad1d replication_pad1d
            """
        ),
        1,
    ),
    **dict.fromkeys(_names('max_pool3d_with_indices avg_pool3d _adaptive_avg_pool3d'), 3),
}
NORMS = _names(
    """
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
    cudnn_batch_norm batch_norm miopen_batch_norm _batch_norm_with_update
    _batch_norm_no_update _native_batch_norm_legit_functional
    """
)
_REDUCTIONS = _names('mean sum amax amin std var norm linalg_vector_norm var_mean std_mean prod')
_RESHAPES = _names('view _unsafe_view reshape _reshape_alias flatten')
# They only say where elements are, whatever these are.
_VIEWS = _names(
    """
    permute transpose t unsqueeze squeeze slice select split split_with_sizes unsafe_split
    unbind expand
    """
)
# Only the shape is read.
_SHAPES = _names(
    """
    zeros_like ones_like empty_like full_like rand_like randn_like sym_size size new_zeros
    new_ones new_empty new_full
    """
)
_WORDS = dict(
    native_layer_norm='a layer norm over the channels',
    native_group_norm='a group norm',
    bmm='a matrix product',
    mm='a matrix product',
    addmm='a matrix product',
    overlap='a change in place of a part',
    value='a decision of the forward pass by its values',
    _softmax='a softmax over the channels',
)


def step(node: Node, labels: dict[int, Labels], constants: set[int]) -> Found:
    """The labels of a node's outputs.

    Args:
        node (Node): An operation, not a layer.
        labels (dict): Tensor -> its labels, of those that hold labeled channels.
        constants (set): Tensors that do not depend on the input.

    Raises:
        NotPrivate: If channels are mixed, or nobody knows.
    """
    kind = node.kind
    if kind in SUMS or kind in POINTWISE:
        if any(ref.value not in labels and ref.value not in constants for ref in node.read):
            with_it = 'is added to' if kind in ('add', 'sub', 'rsub') else f'meets in {kind}'
            raise NotPrivate(f'it {with_it} another tensor{where(node)}')
        return _joined(node, labels)
    if kind in FACTORS:
        return _joined(node, labels)
    if kind in _SHAPES:
        return [None for _ in node.outputs]
    if kind in _RULES:
        return _RULES[kind](node, labels)
    if kind in _RESHAPES or kind in _VIEWS:
        return _viewed(node, labels)
    if kind in POOLS:
        return _apart(node, labels, range(-POOLS[kind], 0), f'{node.op} works across its channels')
    if kind in NORMS:
        return _batch_norm(node, labels)
    if kind in _REDUCTIONS:
        return _reduced(node, labels)
    raise NotPrivate(_reads(node))


def along(dim: int, shape: Sequence[int]) -> Labels:
    """Each entry of a dimension with a label of its own."""
    sizes = [1] * len(shape)
    sizes[dim] = shape[dim]
    return np.arange(shape[dim]).reshape(sizes)


def where(node: Node) -> str:
    """The module of an operation, for the end of a sentence."""
    return f' (in {node.module})' if node.module else ''


def _reads(node: Node) -> str:
    return f'{_WORDS.get(node.kind, f"the operation {node.op}")}{where(node)} reads it'


def _only(node: Node, labels: dict[int, Labels]) -> Labels:
    """Labels of the first argument, which must be the only labeled one."""
    first = node.args[0] if node.args else None
    others = [ref for ref in node.read if ref.value in labels and ref != first]
    if not isinstance(first, Ref) or first.value not in labels or others:
        raise NotPrivate(_reads(node))
    return labels[first.value]


def _apart(
    node: Node, labels: dict[int, Labels], dims: Iterable[int], fault: Optional[str] = None
) -> Found:
    """Of an operation that mixes what lies along some dimensions."""
    found = _only(node, labels)
    if any(found.shape[d] > 1 for d in dims):
        raise NotPrivate(f'{fault}{where(node)}' if fault else _reads(node))
    return [found for _ in node.outputs]


def _joined(node: Node, labels: dict[int, Labels]) -> Found:
    """Of several tensors, broadcast against each other."""
    rank = len(node.outputs[0].shape)
    found: Optional[Labels] = None
    for ref in node.read:
        if ref.value not in labels:
            continue
        mine = labels[ref.value]
        mine = mine.reshape((1,) * (rank - mine.ndim) + mine.shape)
        if found is None:
            found = mine
            continue
        found, mine = np.broadcast_arrays(found, mine)
        if np.any((found != mine) & (found >= 0) & (mine >= 0)):
            raise NotPrivate(f'{node.op} lets two of its channels meet{where(node)}')
        found = np.where(found >= 0, found, mine)
    return [found for _ in node.outputs]


def _viewed(node: Node, labels: dict[int, Labels]) -> Found:
    """What the operation itself makes of the labels."""
    whole = torch.tensor(_only(node, labels)).expand(node.args[0].shape)
    if node.kind in _RESHAPES:
        if whole.numel() != np.prod(node.outputs[0].shape, dtype=np.int64):  # of another type
            raise NotPrivate(_reads(node))
        return [thin(whole.reshape(node.outputs[0].shape))]
    assert node.func is not None
    out = node.func(whole, *node.args[1:], **node.kwargs)
    return [thin(part) for part in ([out] if isinstance(out, Tensor) else out)]


def thin(labels: Tensor) -> Labels:
    """Labels without the dimensions along which they are all the same."""
    for dim in range(labels.dim()):
        if labels.stride(dim) == 0:
            labels = labels.narrow(dim, 0, min(1, labels.size(dim)))
    for dim in range(labels.dim()):
        if labels.size(dim) > 1 and bool((labels == labels.narrow(dim, 0, 1)).all()):
            labels = labels.narrow(dim, 0, 1)
    return labels.numpy()


def _concatenated(node: Node, labels: dict[int, Labels]) -> Found:
    refs = [ref for ref in node.args[0] if isinstance(ref, Ref) and ref.shape != (0,)]
    rank = len(node.outputs[0].shape)
    dim = int(node.kwargs.get('dim', node.args[1] if len(node.args) > 1 else 0)) % rank
    parts = [labels.get(ref.value, np.full((1,) * rank, -1)) for ref in refs]
    sizes = [max(part.shape[d] for part in parts) for d in range(rank)]
    spread = [
        torch.tensor(part).expand(*sizes[:dim], ref.shape[dim], *sizes[dim + 1 :])
        for ref, part in zip(refs, parts, strict=True)
    ]
    return [thin(torch.cat(spread, dim))]


def _padded(node: Node, labels: dict[int, Labels]) -> Found:
    found = _only(node, labels)
    pads = [int(p) if found.shape[-1 - i // 2] > 1 else 0 for i, p in enumerate(node.args[1])]
    return [F.pad(torch.tensor(found), pads, value=-1).numpy()]


def _moved(node: Node, labels: dict[int, Labels]) -> Found:
    """Rolls and flips, over dimensions without labels."""
    dims = node.args[1] if node.kind == 'flip' else (node.args[2] if len(node.args) > 2 else [])
    if not dims:
        raise NotPrivate(_reads(node))
    return _apart(node, labels, dims)


def _batch_norm(node: Node, labels: dict[int, Labels]) -> Found:
    found = _only(node, labels)
    others = [d for d in range(found.ndim) if d != 1]
    _apart(node, labels, others, 'a batch norm works across its channels')
    return [found if len(ref.shape) == found.ndim else found.reshape(-1) for ref in node.outputs]


def _reduced(node: Node, labels: dict[int, Labels]) -> Found:
    place = 2 if node.kind in ('norm', 'linalg_vector_norm') else 1
    dims = node.kwargs.get('dim', node.args[place] if len(node.args) > place else None)
    rank = len(node.args[0].shape)
    if dims is None or isinstance(dims, bool) or dims == [] or dims == ():
        dims = list(range(rank))
    dims = sorted({int(d) % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])})
    found = _apart(node, labels, dims, f'{node.op} runs over its channels')
    if len(node.outputs[0].shape) == rank:
        return found
    return [np.squeeze(one, axis=tuple(dims)) for one in found if one is not None]


_RULES: dict[str, Callable[[Node, dict[int, Labels]], Found]] = {
    'cat': _concatenated,
    'constant_pad_nd': _padded,
    'roll': _moved,
    'flip': _moved,
    'index_select': lambda node, labels: _apart(node, labels, [int(node.args[1])]),
    '_softmax': lambda node, labels: _apart(node, labels, [int(node.args[1])]),
    'native_layer_norm': lambda node, labels: _apart(
        node, labels, range(-len(node.args[1]), 0), 'a layer norm runs over its channels'
    ),
}
