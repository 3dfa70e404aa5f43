# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""One pass of a network, written down: which operation read which tensor, inside which module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Optional

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from ..errors import UsageError
from .unseen import Looks, attributes, custom_functions, tensors_in


class ExampleError(UsageError):
    """A network cannot be run on the example it was given."""


LAYER = 'layer'
"""Name of the node of a whole convolution or linear layer."""
VALUE = 'value'
"""Name of the node where Python looks at the numbers of a tensor that depends on the input."""


@dataclass(frozen=True)
class Ref:
    """A tensor in the arguments of a node: its number and shape."""

    value: int
    shape: tuple[int, ...]


@dataclass
class Node:
    """One operation, or one call of a convolution or linear layer.

    Attributes:
        op (str): Name of the ATen operation, or ``LAYER``.
        module (str): Path of the innermost module it ran in.
        args (tuple): Its arguments, tensors replaced by :class:`Ref`.
        kwargs (dict): Its named arguments, likewise.
        outputs (list[Ref]): What it returned or changed in place.
    """

    op: str
    module: str
    args: tuple
    kwargs: dict
    outputs: list[Ref]

    @cached_property
    def _read(self) -> list[Ref]:
        flat = tree_flatten((self.args, self.kwargs))[0]
        return [item for item in flat if isinstance(item, Ref)]

    def inputs(self) -> list[Ref]:
        """All tensors it read."""
        return self._read


@dataclass
class Call:
    """One call of a module: when, and which tensor it was given first.

    Attributes:
        module (str): Its path.
        start (int): Number of the first node inside.
        end (int): Number of the first node after it.
        given (Ref, optional): Its first argument, if that is a tensor.
    """

    module: str
    start: int
    end: int
    given: Optional[Ref]


@dataclass
class Record:
    """A pass: its nodes in their order, the calls of modules, and what went in and out."""

    nodes: list[Node] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    inputs: set[int] = field(default_factory=set)
    outputs: set[int] = field(default_factory=set)
    constants: set[int] = field(default_factory=set)
    """Tensors nobody computed: parameters, buffers and what was made from nothing."""
    names: dict[int, str] = field(default_factory=dict)
    """Parameter or buffer -> its name in the network."""

    def readers(self) -> dict[int, list[int]]:
        """Tensor -> the nodes that read it."""
        found: dict[int, list[int]] = {}
        for number, node in enumerate(self.nodes):
            for ref in node.inputs():
                found.setdefault(ref.value, []).append(number)
        return found


class Recorder(TorchDispatchMode):
    """Writes down the operations of a pass.

    A layer for which ``is_layer`` holds is one node, whatever it does inside. An operation
    that changes a tensor in place makes a new version of it; what shares the memory
    and is not that tensor counts as changed by something unknown (``'overlap'``).

    Args:
        is_layer (Callable): Whether a module is one node.
    """

    def __init__(self, module: nn.Module, is_layer: Any) -> None:
        super().__init__()
        self.record = Record()
        self._module = module
        self._is_layer = is_layer
        self._names = {}
        for name, part in module.named_modules():
            self._names[id(part)] = name
        # The tensors are kept with their names: an id is unique only while its tensor lives.
        named = [*module.named_parameters(), *module.named_buffers()]
        self._own = {id(tensor): (name, tensor) for name, tensor in named}
        self._stack: list[str] = ['']
        self._open: list[int] = []
        self._quiet = 0
        self._numbers: dict[int, int] = {}
        self._kept: list[Tensor] = []  # an id is unique only while its tensor lives
        self._same_memory: dict[int, set[int]] = {}
        self._next = 0
        self.depends: set[int] = set()

    # -- tensors -------------------------------------------------------------------------

    def ref(self, tensor: Tensor, fresh: bool = False) -> Ref:
        """The number of a tensor, a new one if it has none or was changed."""
        key = id(tensor)
        if key not in self._numbers:
            self._kept.append(tensor)
            memory = self._memory(tensor)
            if memory is not None:
                others = self._same_memory.setdefault(memory, set())
                if others and not fresh and self._unseen(tensor, next(iter(others))):
                    fresh = True
                others.add(key)
        if fresh or key not in self._numbers:
            self._numbers[key] = self._next
            self._next += 1
            if not fresh:
                self.record.constants.add(self._numbers[key])
            if key in self._own:
                self.record.names[self._numbers[key]] = self._own[key][0]
        return Ref(self._numbers[key], tuple(tensor.shape))

    def _unseen(self, tensor: Tensor, other: int) -> bool:
        """Note a tensor that was made of another without an operation, as ``x.data`` is; False if
        that does not depend on the input."""
        before = self._numbers[other]
        if before not in self.depends:
            return False
        shape = next(tuple(t.shape) for t in self._kept if id(t) == other)
        after = Ref(self._next, tuple(tensor.shape))
        self.record.nodes.append(
            Node('overlap', self._stack[-1], (Ref(before, shape),), {}, [after])
        )
        self.depends.add(after.value)
        return True

    @staticmethod
    def _memory(tensor: Tensor) -> Optional[int]:
        try:
            return tensor.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):
            return None

    def _refs(self, value: Any) -> Any:
        return tree_map(lambda v: self.ref(v) if isinstance(v, Tensor) else v, value)

    # -- operations ----------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._quiet:
            return out
        name = func._schema.name.removeprefix('aten::')
        read = self._refs(args), self._refs(kwargs)
        written = _written(func, args, kwargs)
        depends = any(
            ref.value in self.depends for ref in tree_flatten(read)[0] if isinstance(ref, Ref)
        )
        if name in ('_local_scalar_dense', 'equal', 'is_nonzero') and depends:
            self.record.nodes.append(Node(VALUE, self._stack[-1], *read, []))
            return out
        self._add(name, read, out, written, depends)
        return out

    def _add(
        self, name: str, read: tuple[Any, Any], out: Any, written: list[Tensor], depends: bool
    ) -> None:
        outputs = []
        for tensor in written:
            others = self._same_memory.get(self._memory(tensor) or -1, set()) - {id(tensor)}
            outputs.append(self.ref(tensor, fresh=True))
            for key in others:
                before = self._numbers[key]
                self._numbers[key] = self._next
                self._next += 1
                shape = next(tuple(t.shape) for t in self._kept if id(t) == key)
                after = Ref(self._numbers[key], shape)
                self.record.nodes.append(
                    Node('overlap', self._stack[-1], (Ref(before, shape), *read), {}, [after])
                )
                if depends:
                    self.depends.add(after.value)
        done = {id(tensor) for tensor in written}
        for tensor in tree_flatten(out)[0]:
            if isinstance(tensor, Tensor) and id(tensor) not in done:
                outputs.append(self.ref(tensor, fresh=True))
        if depends:
            self.depends.update(ref.value for ref in outputs)
        else:
            self.record.constants.update(ref.value for ref in outputs)
        self.record.nodes.append(Node(name, self._stack[-1], *read, outputs))

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor occurred in the pass."""
        return id(tensor) in self._numbers

    def note_value(self, tensor: Any) -> None:
        """Python looks at the numbers of a tensor."""
        if self._quiet or not isinstance(tensor, Tensor):
            return
        ref = self.ref(tensor)
        if ref.value in self.depends:
            self.record.nodes.append(Node(VALUE, self._stack[-1], (ref,), {}, []))

    # -- modules -------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        if self._quiet:
            self._quiet += bool(self._is_layer(module))
            return
        name = self._names[id(module)]
        self._stack.append(name)
        first = next(iter((*args, *kwargs.values())), None)
        given = self.ref(first) if isinstance(first, Tensor) else None
        self.record.calls.append(Call(name, len(self.record.nodes), -1, given))
        self._open.append(len(self.record.calls) - 1)
        if self._is_layer(module):
            self._quiet = 1
            self._args = self._refs(args), self._refs(kwargs)

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
        if self._quiet:
            self._quiet -= bool(self._is_layer(module))
            if self._quiet or not self._is_layer(module):
                return
            depends = any(
                ref.value in self.depends
                for ref in tree_flatten(self._args)[0]
                if isinstance(ref, Ref)
            )
            self._add(LAYER, self._args, out, [], depends)
        self.record.calls[self._open.pop()].end = len(self.record.nodes)
        self._stack.pop()

    def _function(self, name: str, forward: Any, *args: Any) -> Any:
        """A custom function of autograd is one operation, whatever it does inside."""
        if self._quiet:
            return forward(*args)
        self._quiet = 1
        try:
            out = forward(*args)
        finally:
            self._quiet = 0
        read: tuple[Any, dict] = self._refs(args[1:]), {}
        refs = (ref for ref in tree_flatten(read)[0] if isinstance(ref, Ref))
        self._add(name, read, out, [], any(ref.value in self.depends for ref in refs))
        return out

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Know which module runs."""
        with ExitStack() as stack:
            stack.enter_context(custom_functions(self._function))
            for part in self._module.modules():
                for handle in (
                    part.register_forward_pre_hook(self._enter, with_kwargs=True),
                    part.register_forward_hook(self._leave, with_kwargs=True),
                ):
                    stack.callback(handle.remove)
            stack.enter_context(Looks(self.note_value))
            with self:
                yield


def _written(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors an operation changes in place."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = kwargs.get(argument.name, args[position] if position < len(args) else None)
        found += [t for t in tree_flatten(value)[0] if isinstance(t, Tensor)]
    return found


def record_pass(module: nn.Module, args: tuple, kwargs: dict, is_layer: Any) -> Record:
    """Run a module once, without gradients, and write it down.

    Args:
        module (nn.Module): Any module, in the mode it is to be recorded in.
        args (tuple): What to call it with.
        kwargs (dict): Named arguments, likewise.
        is_layer (Callable): Which modules are one node.

    Raises:
        ExampleError: If the module cannot be run with them.
    """
    recorder = Recorder(module, is_layer)
    for tensor in tree_flatten((args, kwargs))[0]:
        if isinstance(tensor, Tensor):
            ref = recorder.ref(tensor)
            recorder.record.inputs.add(ref.value)
            recorder.record.constants.discard(ref.value)
            recorder.depends.add(ref.value)
    try:
        with torch.no_grad(), recorder.watching():
            out = module(*args, **kwargs)
    except Exception as error:
        shapes = [tuple(t.shape) for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        raise ExampleError(
            f'{type(module).__name__} cannot be run on the example of shape '
            f'{", ".join(map(str, shapes))}: {type(error).__name__}: {error}; give an '
            'example that fits it, such as example=torch.rand(1, 3, 224, 224)'
        ) from error
    kept = [value for part in module.modules() for value in attributes(part)]
    recorder.record.outputs = {recorder.ref(tensor).value for tensor in tensors_in(out)} | {
        recorder.ref(tensor).value for tensor in tensors_in(kept) if recorder.knows(tensor)
    }
    return recorder.record
