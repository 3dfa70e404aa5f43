# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Where the channels of one layer end up: what each operation does to them.

A *label* says which channel an element of a tensor comes from, -1 for none. The labels of a tensor
are an array that broadcasts to its shape: ``1 x 64 x 1 x 1`` for a map of 64 channels. An operation
is harmless if no element of its output mixes labels; it then has a rule for those of its output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import numpy as np

from .recorder import Node, Ref

Labels = np.ndarray


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
FACTORS = _names(
    """
    mul div _prelu_kernel
    """
)
SUMS = _names(
    """
    add sub rsub maximum minimum max_other where fmod remainder lerp
    """
)
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


def base_name(op: str) -> str:
    """Name of an operation without the mark of its in-place form."""
    return op[:-1] if op.endswith('_') and not op.startswith('__') else op


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
    if name in POINTWISE:
        return _same(node, labels)
    if name in FACTORS or name in SUMS:
        if name in SUMS and any(
            ref.value not in labels and ref.value not in constants for ref in node.inputs()
        ):
            raise NotPrivate(f'it is added to another tensor{_where(node)}')
        return _joined(node, labels)
    if name in POOLS:
        return _windows(node, labels, POOLS[name])
    if name in NORMS:
        return _channel_norm(node, labels)
    if name in REDUCTIONS:
        return _reduced(node, labels)
    raise NotPrivate(f'{_said(node)} reads it')


def _said(node: Node) -> str:
    known = dict(
        native_layer_norm='a layer norm over the channels',
        native_group_norm='a group norm',
        bmm='a matrix product',
        mm='a matrix product',
        addmm='a matrix product',
        alias='a change in place of a part',
        value='a decision of the forward pass by its values',
        _softmax='a softmax over the channels',
    )
    return known.get(base_name(node.op), f'the operation {node.op}') + _where(node)


def _where(node: Node) -> str:
    return f' (in {node.module})' if node.module else ''


def _first(node: Node) -> Ref:
    return node.args[0]


def _only(node: Node, labels: dict[int, Labels]) -> Labels:
    """Labels of the first argument, which must be the only labeled one."""
    first = node.args[0] if node.args else None
    others = [r for r in node.inputs() if r.value in labels and r != first]
    if not isinstance(first, Ref) or first.value not in labels or others:
        raise NotPrivate(f'{_said(node)} reads it')
    return labels[first.value]


def _same(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found = _only(node, labels)
    return [found if ref.shape == _first(node).shape else None for ref in node.outputs]


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
            raise NotPrivate(f'{node.op} lets two of its channels meet{_where(node)}')
        found = np.where(found >= 0, found, mine)
    return [found for _ in node.outputs]


def _windows(node: Node, labels: dict[int, Labels], dims: int) -> list[Optional[Labels]]:
    found = _only(node, labels)
    if dims == 0 or any(size > 1 for size in found.shape[-dims:]):
        raise NotPrivate(f'{node.op} works across its channels{_where(node)}')
    return [found if index == 0 else None for index, _ in enumerate(node.outputs)]


def _channel_norm(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found = _only(node, labels)
    if any(size > 1 for d, size in enumerate(found.shape) if d != 1):
        raise NotPrivate(f'a batch norm works across its channels{_where(node)}')
    return [found if index == 0 else None for index, _ in enumerate(node.outputs)]


def _reduced(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found = _only(node, labels)
    dims = node.kwargs.get('dim', node.args[1] if len(node.args) > 1 else None)
    if base_name(node.op) in ('norm', 'linalg_vector_norm'):
        dims = node.kwargs.get('dim', node.args[2] if len(node.args) > 2 else None)
    rank = len(_first(node).shape)
    if dims is None or dims == [] or dims == ():
        dims = list(range(rank))
    if not isinstance(dims, (list, tuple)):
        dims = [dims]
    dims = sorted({int(d) % rank for d in dims})
    if any(found.shape[d] > 1 for d in dims):
        raise NotPrivate(f'{node.op} runs over its channels{_where(node)}')
    after = len(node.outputs[0].shape)
    if after == rank:
        return [found for _ in node.outputs]
    return [np.squeeze(found, axis=tuple(dims)) for _ in node.outputs]


# -- shapes ------------------------------------------------------------------------------


def _reshaped(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found = _only(node, labels)
    return [reshape(found, _first(node).shape, ref.shape) for ref in node.outputs]


def reshape(found: Labels, before: tuple[int, ...], after: tuple[int, ...]) -> Labels:
    """Labels of a tensor that is read in another shape.

    Args:
        found (Labels): Its labels.
        before (tuple): Its shape.
        after (tuple): The shape it is read in.
    """
    if before == after:
        return found
    long = [d for d in range(len(before)) if found.shape[d] > 1]
    if len(long) == 1:
        axis = long[0]
        left, right = _size(before[:axis]), _size(before[axis + 1 :])
        done = 1
        for d, size in enumerate(after):
            if done == left and size == before[axis] and _size(after[d + 1 :]) == right:
                shape = [1] * len(after)
                shape[d] = size
                return found.reshape(shape)
            done *= size
    full = np.ascontiguousarray(np.broadcast_to(found, before)).reshape(after)
    for d in range(full.ndim):
        one = np.take(full, [0], axis=d)
        if full.shape[d] > 1 and np.array_equal(np.broadcast_to(one, full.shape), full):
            full = one
    return full


def _size(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


def _permuted(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found = _only(node, labels)
    rank = found.ndim
    name = base_name(node.op)
    if name == 'permute':
        order = [int(d) % rank for d in node.args[1]]
    else:
        order = list(range(rank))
        a, b = (0, 1) if name == 't' else (int(d) % rank for d in node.args[1:3])
        if rank > 1:
            order[a], order[b] = order[b], order[a]
    return [found.transpose(order)]


def _unsqueezed(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found = _only(node, labels)
    return [np.expand_dims(found, int(node.args[1]) % (found.ndim + 1))]


def _squeezed(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found, shape = _only(node, labels), _first(node).shape
    dims = node.args[1] if len(node.args) > 1 else range(len(shape))
    dims = [dims] if isinstance(dims, int) else dims
    gone = tuple(d for d in {int(d) % len(shape) for d in dims} if shape[d] == 1)
    return [np.squeeze(found, axis=gone)]


def _sliced(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found, shape = _only(node, labels), _first(node).shape
    dim, start, end, by = [*node.args[1:], *[None] * 4][:4]
    dim = node.kwargs.get('dim', dim) or 0
    dim = int(dim) % len(shape)
    by = node.kwargs.get('step', by) or 1
    if found.shape[dim] == 1:
        return [found]
    index = [slice(None)] * found.ndim
    index[dim] = slice(node.kwargs.get('start', start), node.kwargs.get('end', end), by)
    return [found[tuple(index)]]


def _selected(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found, shape = _only(node, labels), _first(node).shape
    dim = int(node.args[1]) % len(shape)
    return [np.take(found, 0 if found.shape[dim] == 1 else int(node.args[2]), axis=dim)]


def _split(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found, shape = _only(node, labels), _first(node).shape
    name = base_name(node.op)
    dim = node.kwargs.get('dim', None)
    if dim is None:
        place = 1 if name == 'unbind' else 2
        dim = node.args[place] if len(node.args) > place else 0
    dim = int(dim) % len(shape)
    if name == 'unbind':
        parts = range(len(node.outputs))
        return [np.take(found, 0 if found.shape[dim] == 1 else i, axis=dim) for i in parts]
    outs: list[Optional[Labels]] = []
    start = 0
    for ref in node.outputs:
        index = [slice(None)] * found.ndim
        if found.shape[dim] > 1:
            index[dim] = slice(start, start + ref.shape[dim])
        part = found[tuple(index)]
        start += ref.shape[dim]
        outs.append(part if np.any(part >= 0) else None)
    return outs


def _concatenated(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    refs = [ref for ref in node.args[0] if isinstance(ref, Ref)]
    refs = [ref for ref in refs if ref.shape != (0,)]
    shape = node.outputs[0].shape
    dim = node.kwargs.get('dim', node.args[1] if len(node.args) > 1 else 0)
    dim = int(dim) % len(shape)
    parts = []
    for ref in refs:
        part = labels.get(ref.value)
        if part is None:
            part = np.full((1,) * len(shape), -1)
        sizes = list(part.shape)
        sizes[dim] = ref.shape[dim]
        parts.append(np.broadcast_to(part, sizes))
    common = np.broadcast_shapes(*(p.shape[:dim] + (1,) + p.shape[dim + 1 :] for p in parts))
    whole = np.concatenate(
        [np.broadcast_to(p, (*common[:dim], p.shape[dim], *common[dim + 1 :])) for p in parts],
        axis=dim,
    )
    if whole.shape[dim] > 1 and np.all(whole == np.take(whole, [0], axis=dim)):
        whole = np.take(whole, [0], axis=dim)  # along a dimension without labels
    return [whole]


def _padded(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found = _only(node, labels)
    pads = [int(p) for p in node.args[1]]
    widths = [(0, 0)] * found.ndim
    for i in range(len(pads) // 2):
        widths[-1 - i] = (pads[2 * i], pads[2 * i + 1])
    for d, (low, high) in enumerate(widths):
        if found.shape[d] == 1:
            continue
        if low < 0 or high < 0:
            index = [slice(None)] * found.ndim
            index[d] = slice(max(0, -low), found.shape[d] - max(0, -high))
            found = found[tuple(index)]
        grow = [(0, 0)] * found.ndim
        grow[d] = (max(0, low), max(0, high))
        found = np.pad(found, grow, constant_values=-1)
    return [found]


def _expanded(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found, after = _only(node, labels), node.outputs[0].shape
    return [found.reshape((1,) * (len(after) - found.ndim) + found.shape)]


def _moved(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    """Rolls and flips, over dimensions without labels."""
    found = _only(node, labels)
    name = base_name(node.op)
    dims = node.args[1] if name == 'flip' else (node.args[2] if len(node.args) > 2 else [])
    if not dims or any(found.shape[int(d)] > 1 for d in dims):
        raise NotPrivate(f'{_said(node)} reads it')
    return [found]


def _layer_norm(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found = _only(node, labels)
    if any(size > 1 for size in found.shape[-len(node.args[1]) :]):
        raise NotPrivate(f'a layer norm runs over its channels{_where(node)}')
    return [found if index == 0 else None for index, _ in enumerate(node.outputs)]


def _softmax(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found = _only(node, labels)
    if found.shape[int(node.args[1])] > 1:
        raise NotPrivate(f'{_said(node)} reads it')
    return [found]


def _indexed(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    """Picking along one dimension without labels."""
    found = _only(node, labels)
    dim = int(node.args[1]) % found.ndim
    if found.shape[dim] > 1:
        raise NotPrivate(f'{_said(node)} reads it')
    return [found]


def _like(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    """Only the shape is read."""
    return [None for _ in node.outputs]


_RULES: dict[str, Callable[[Node, dict[int, Labels]], list[Optional[Labels]]]] = {
    **dict.fromkeys(('view', '_unsafe_view', 'reshape', '_reshape_alias', 'flatten'), _reshaped),
    **dict.fromkeys(('permute', 'transpose', 't'), _permuted),
    'unsqueeze': _unsqueezed,
    'squeeze': _squeezed,
    'slice': _sliced,
    'select': _selected,
    **dict.fromkeys(('split', 'split_with_sizes', 'unbind', 'chunk', 'tensor_split'), _split),
    'cat': _concatenated,
    'constant_pad_nd': _padded,
    'expand': _expanded,
    'roll': _moved,
    'flip': _moved,
    '_softmax': _softmax,
    'native_layer_norm': _layer_norm,
    'index_select': _indexed,
    **dict.fromkeys(
        _names(
            """
            zeros_like ones_like empty_like full_like rand_like randn_like new_zeros
            new_ones new_empty new_full sym_size size
            """
        ),
        _like,
    ),
}
