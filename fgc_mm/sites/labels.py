# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Where the channels of one layer end up: what each operation does to them.

A *label* says which channel an element of a tensor comes from, -1 for none. The labels of a tensor
are an array that broadcasts to its shape: ``1 x 64 x 1 x 1`` for a map of 64 channels. An operation
is harmless if no element of its output mixes labels; it then has a rule for those of its output.
"""

from __future__ import annotations

import numpy as np

from .recorder import Node, Ref

Labels = np.ndarray


class NotPrivate(Exception):
    """The channels do not stay apart; the message says where."""


def base_name(op: str) -> str:
    """Name of an operation without the mark of its in-place form."""
    return op[:-1] if op.endswith('_') and not op.startswith('__') else op


def said(node: Node) -> str:
    """An operation in words, and where it is."""
    known = dict(
        native_layer_norm='a layer norm over the channels',
        native_group_norm='a group norm',
        bmm='a matrix product',
        mm='a matrix product',
        addmm='a matrix product',
        overlap='a change in place of a part',
        value='a decision of the forward pass by its values',
        _softmax='a softmax over the channels',
    )
    return known.get(base_name(node.op), f'the operation {node.op}') + where(node)


def where(node: Node) -> str:
    """The module of an operation, for the end of a sentence."""
    return f' (in {node.module})' if node.module else ''


def first(node: Node) -> Ref:
    """The tensor an operation reads first."""
    return node.args[0]


def only(node: Node, labels: dict[int, Labels]) -> Labels:
    """Labels of the first argument, which must be the only labeled one."""
    read = node.args[0] if node.args else None
    others = [r for r in node.inputs() if r.value in labels and r != read]
    if not isinstance(read, Ref) or read.value not in labels or others:
        raise NotPrivate(f'{said(node)} reads it')
    return labels[read.value]
