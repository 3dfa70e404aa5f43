# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Labels of tensors that are read in another shape, taken apart or put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Optional

import numpy as np

from .labels import Labels, NotPrivate, base_name, first, only, said
from .recorder import Node, Ref

Rule = Callable[[Node, dict[int, Labels]], list[Optional[Labels]]]


def _reshaped(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found = only(node, labels)
    return [reshape(found, first(node).shape, ref.shape) for ref in node.outputs]


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
    found = only(node, labels)
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
    found = only(node, labels)
    return [np.expand_dims(found, int(node.args[1]) % (found.ndim + 1))]


def _squeezed(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found, shape = only(node, labels), first(node).shape
    dims = node.args[1] if len(node.args) > 1 else range(len(shape))
    dims = [dims] if isinstance(dims, int) else dims
    gone = tuple(d for d in {int(d) % len(shape) for d in dims} if shape[d] == 1)
    return [np.squeeze(found, axis=gone)]


def _sliced(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found, shape = only(node, labels), first(node).shape
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
    found, shape = only(node, labels), first(node).shape
    dim = int(node.args[1]) % len(shape)
    return [np.take(found, 0 if found.shape[dim] == 1 else int(node.args[2]), axis=dim)]


def _split(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    found, shape = only(node, labels), first(node).shape
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
    found = only(node, labels)
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
    found, after = only(node, labels), node.outputs[0].shape
    return [found.reshape((1,) * (len(after) - found.ndim) + found.shape)]


def _moved(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    """Rolls and flips, over dimensions without labels."""
    found = only(node, labels)
    name = base_name(node.op)
    dims = node.args[1] if name == 'flip' else (node.args[2] if len(node.args) > 2 else [])
    if not dims or any(found.shape[int(d)] > 1 for d in dims):
        raise NotPrivate(f'{said(node)} reads it')
    return [found]


def _indexed(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    """Picking along one dimension without labels."""
    found = only(node, labels)
    dim = int(node.args[1]) % found.ndim
    if found.shape[dim] > 1:
        raise NotPrivate(f'{said(node)} reads it')
    return [found]


def _like(node: Node, labels: dict[int, Labels]) -> list[Optional[Labels]]:
    """Only the shape is read."""
    return [None for _ in node.outputs]


SHAPES: dict[str, Rule] = {
    **dict.fromkeys(('view', '_unsafe_view', 'reshape', '_reshape_alias', 'flatten'), _reshaped),
    **dict.fromkeys(('permute', 'transpose', 't'), _permuted),
    'unsqueeze': _unsqueezed,
    'squeeze': _squeezed,
    'slice': _sliced,
    'select': _selected,
    **dict.fromkeys(('split', 'split_with_sizes', 'unsafe_split', 'unbind'), _split),
    'cat': _concatenated,
    'constant_pad_nd': _padded,
    'expand': _expanded,
    'roll': _moved,
    'flip': _moved,
    'index_select': _indexed,
    **dict.fromkeys(('zeros_like', 'ones_like', 'empty_like', 'full_like'), _like),
    **dict.fromkeys(('rand_like', 'randn_like', 'sym_size', 'size'), _like),
    **dict.fromkeys(('new_zeros', 'new_ones', 'new_empty', 'new_full'), _like),
}
"""Operation -> its rule."""
