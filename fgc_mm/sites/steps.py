# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What one operation does to the channels it reads."""

from __future__ import annotations

from typing import Optional

import numpy as np

from .labels import Labels, NotPrivate, base_name, first, only, said, where
from .recorder import Node
from .shapes import SHAPES


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
FACTORS = _names(
    """
    mul div _prelu_kernel
    """
)
SUMS = _names(
    """
    add sub rsub maximum minimum where fmod remainder lerp gt ge lt le eq ne
    """
)
ELEMENTWISE = POINTWISE | FACTORS | SUMS
# Windows over the last dimensions, channel by channel.
POOLS = {
    'max_pool2d': 2,
    'max_pool2d_with_indices': 2,
    'avg_pool2d': 2,
    'adaptive_avg_pool2d': 2,
    '_adaptive_avg_pool2d': 2,
    'adaptive_max_pool2d': 2,
    'upsample_nearest2d': 2,
    'upsample_bilinear2d': 2,
    'upsample_bicubic2d': 2,
    '_upsample_nearest_exact2d': 2,
    '_upsample_bilinear2d_aa': 2,
    'avg_pool1d': 1,
    'adaptive_avg_pool1d': 1,
    'upsample_linear1d': 1,
    'upsample_nearest1d': 1,
    'reflection_pad1d': 1,
    'replication_pad1d': 1,
    'max_pool3d_with_indices': 3,
    'avg_pool3d': 3,
    '_adaptive_avg_pool3d': 3,
    'reflection_pad2d': 2,
    'replication_pad2d': 2,
    'pixel_shuffle': 0,
}
NORMS = _names(
    """
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training
    cudnn_batch_norm batch_norm miopen_batch_norm _batch_norm_with_update
    _batch_norm_no_update _native_batch_norm_legit_functional
    """
)
REDUCTIONS = _names(
    """
    mean sum amax amin std var norm linalg_vector_norm var_mean std_mean prod
    """
)


def step(node: Node, labels: dict[int, Labels], constants: set[int]) -> list[Optional[Labels]]:
    """The labels of a node's outputs.

    Args:
        node (Node): An operation, not a layer.
        labels (dict): Tensor -> its labels, of those that hold labeled channels.
        constants (set): Tensors that do not depend on the input.

    Returns:
        list: One for each output; None if it holds none.

    Raises:
        NotPrivate: If channels are mixed, or nobody knows.
    """
    name = base_name(node.op)
    rule = _RULES.get(name)
    if rule is not None:
        return rule(node, labels)
    if name in FACTORS:
        return _joined(node, labels)
    if name in POINTWISE or name in SUMS:
        if any(ref.value not in labels and ref.value not in constants for ref in node.inputs()):
            with_it = 'is added to' if name in ('add', 'sub', 'rsub') else f'meets in {name}'
            raise NotPrivate(f'it {with_it} another tensor{where(node)}')
        return _joined(node, labels)
    if name in POOLS:
        return _windows(node, labels, POOLS[name])
    if name in NORMS:
        return _channel_norm(node, labels)
    if name in REDUCTIONS:
        return _reduced(node, labels)
    raise NotPrivate(f'{said(node)} reads it')


def _joined(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    """Of several tensors, broadcast against each other."""
    rank = len(node.outputs[0].shape)
    found: Optional[Labels] = None
    for ref in node.inputs():
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


def _windows(node: Node, labels: dict[int, Labels], dims: int) -> list[Optional[Labels]]:
    found = only(node, labels)
    if dims == 0 or any(size > 1 for size in found.shape[-dims:]):
        raise NotPrivate(f'{node.op} works across its channels{where(node)}')
    return [found for _ in node.outputs]


def _channel_norm(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found = only(node, labels)
    if any(size > 1 for d, size in enumerate(found.shape) if d != 1):
        raise NotPrivate(f'a batch norm works across its channels{where(node)}')
    return [found if len(ref.shape) == found.ndim else found.reshape(-1) for ref in node.outputs]


def _reduced(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found = only(node, labels)
    dims = node.kwargs.get('dim', node.args[1] if len(node.args) > 1 else None)
    if base_name(node.op) in ('norm', 'linalg_vector_norm'):
        dims = node.kwargs.get('dim', node.args[2] if len(node.args) > 2 else None)
    rank = len(first(node).shape)
    if dims is None or isinstance(dims, bool) or dims == [] or dims == ():
        dims = list(range(rank))
    if not isinstance(dims, (list, tuple)):
        dims = [dims]
    dims = sorted({int(d) % rank for d in dims})
    if any(found.shape[d] > 1 for d in dims):
        raise NotPrivate(f'{node.op} runs over its channels{where(node)}')
    after = len(node.outputs[0].shape)
    if after == rank:
        return [found for _ in node.outputs]
    return [np.squeeze(found, axis=tuple(dims)) for _ in node.outputs]


def _layer_norm(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found = only(node, labels)
    if any(size > 1 for size in found.shape[-len(node.args[1]) :]):
        raise NotPrivate(f'a layer norm runs over its channels{where(node)}')
    return [found for _ in node.outputs]


def _softmax(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found = only(node, labels)
    if found.shape[int(node.args[1])] > 1:
        raise NotPrivate(f'{said(node)} reads it')
    return [found]


_RULES = {**SHAPES, '_softmax': _softmax, 'native_layer_norm': _layer_norm}
