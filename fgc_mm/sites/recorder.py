# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""One pass of a network, written down: which operation read which tensor, inside which module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Optional

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

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
        read (list[Ref]): All tensors it read.
        outputs (list[Ref]): What it returned or changed in place.
        func (Callable, optional): The operation itself.
    """

    op: str
    module: str
    args: tuple
    kwargs: dict
    read: list[Ref]
    outputs: list[Ref]
    func: Optional[Callable] = None

    @cached_property
    def kind(self) -> str:
        """Name of the operation without the mark of its in-place form."""
        return self.op[:-1] if self.op.endswith('_') and not self.op.startswith('__') else self.op

    @property
    def given(self) -> Any:
        """The first argument, by position or name."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()))


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
    outputs: set[int] = field(default_factory=set)
    constants: set[int] = field(default_factory=set)
    """Tensors nobody computed: parameters, buffers and what was made from nothing."""
    names: dict[int, str] = field(default_factory=dict)
    """Parameter or buffer -> its name in the network."""

    def readers(self) -> dict[int, list[int]]:
        """Tensor -> the nodes that read it."""
        found: dict[int, list[int]] = {}
        for number, node in enumerate(self.nodes):
            for ref in node.read:
                found.setdefault(ref.value, []).append(number)
        return found


Given = tuple[tuple, dict, list[Ref]]
"""Arguments and named arguments with :class:`Ref` for tensors, and all of these."""


class Recorder(TorchDispatchMode):
    """Writes down the operations of a pass.

    A layer for which ``is_layer`` holds is one node, whatever it does inside. An operation
    that changes a tensor in place makes a new version of it; what shares the memory
    and is not that tensor counts as changed by something unknown (``'overlap'``).

    Args:
        module (nn.Module): The network.
        is_layer (Callable): Whether a module is one node.
    """

    def __init__(self, module: nn.Module, is_layer: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.record = Record()
        self._module = module
        self._paths = {id(part): name for name, part in module.named_modules()}
        self._layers = {id(part) for part in module.modules() if is_layer(part)}
        named = [*module.named_parameters(), *module.named_buffers()]
        self._own = {id(tensor): name for name, tensor in named}
        self._stack: list[str] = ['']
        self._open: list[int] = []
        self._quiet = 0
        self._next = 0
        self._numbers: dict[int, int] = {}
        # An id is unique only while its tensor lives.
        self._kept: dict[int, Tensor] = {id(tensor): tensor for _, tensor in named}
        self._same_memory: dict[int, set[int]] = {}
        self.depends: set[int] = set()

    # -- tensors -------------------------------------------------------------------------

    def ref(self, tensor: Tensor, fresh: bool = False) -> Ref:
        """The number of a tensor, a new one if it has none or was changed."""
        key = id(tensor)
        known = key in self._numbers
        if not known:
            self._kept[key] = tensor
            others = self._same_memory.setdefault(_memory(tensor), set())
            beside = next(iter(others), None)
            others.add(key)
            if beside is not None and not fresh and self._numbers[beside] in self.depends:
                # Made of another one without an operation, as x.data is.
                return self._overlap(key, [self._known(beside)])
        if fresh or not known:
            self._numbers[key] = self._next
            self._next += 1
            if not fresh:
                self.record.constants.add(self._numbers[key])
            if key in self._own:
                self.record.names[self._numbers[key]] = self._own[key]
        return self._known(key)

    def _known(self, key: int) -> Ref:
        return Ref(self._numbers[key], tuple(self._kept[key].shape))

    def _overlap(self, key: int, read: list[Ref]) -> Ref:
        """A tensor got other values by something unknown."""
        self._numbers[key] = self._next
        self._next += 1
        self._note('overlap', (tuple(read), {}, read), [self._known(key)])
        return self._known(key)

    def _given(self, args: Any, kwargs: Any) -> Given:
        read: list[Ref] = []

        def put(value: Any) -> Any:
            if isinstance(value, Tensor):
                read.append(self.ref(value))
                return read[-1]
            if isinstance(value, (list, tuple)):
                return [put(item) for item in value]
            if isinstance(value, dict):
                return {name: put(item) for name, item in value.items()}
            return value

        return tuple(map(put, args)), put(kwargs), read

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor occurred in the pass."""
        return id(tensor) in self._numbers

    # -- operations ----------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._quiet:
            return out
        name = func._schema.name.removeprefix('aten::')
        given = self._given(args, kwargs)
        if name in ('_local_scalar_dense', 'equal', 'is_nonzero') and self._depends(given[2]):
            self._note(VALUE, given, [])
        else:
            self._add(name, given, out, _written(func, args, kwargs), func)
        return out

    def _depends(self, read: list[Ref]) -> bool:
        return any(ref.value in self.depends for ref in read)

    def _add(
        self,
        name: str,
        given: Given,
        out: Any,
        written: Sequence[Tensor] = (),
        func: Optional[Callable] = None,
    ) -> None:
        outputs = []
        for tensor in written:
            others = self._same_memory.get(_memory(tensor), set()) - {id(tensor)}
            outputs.append(self.ref(tensor, fresh=True))
            for key in others:
                self._overlap(key, [self._known(key), *given[2]])
        done = {id(tensor) for tensor in written}
        outputs += [self.ref(t, fresh=True) for t in _tensors(out) if id(t) not in done]
        self._note(name, given, outputs, func)

    def _note(
        self, op: str, given: Given, outputs: list[Ref], func: Optional[Callable] = None
    ) -> None:
        known = self.depends if self._depends(given[2]) else self.record.constants
        known.update(ref.value for ref in outputs)
        self.record.nodes.append(Node(op, self._stack[-1], *given, outputs, func))

    def note_value(self, tensor: Any) -> None:
        """Python looks at the numbers of a tensor."""
        if self._quiet or not isinstance(tensor, Tensor):
            return
        given = self._given((tensor,), {})
        if self._depends(given[2]):
            self._note(VALUE, given, [])

    # -- modules -------------------------------------------------------------------------

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        is_layer = id(module) in self._layers
        if self._quiet:
            self._quiet += is_layer
            return
        name = self._paths[id(module)]
        self._stack.append(name)
        first = next(iter((*args, *kwargs.values())), None)
        given = self.ref(first) if isinstance(first, Tensor) else None
        self.record.calls.append(Call(name, len(self.record.nodes), -1, given))
        self._open.append(len(self.record.calls) - 1)
        if is_layer:
            self._quiet = 1
            self._args = self._given(args, kwargs)

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
        is_layer = id(module) in self._layers
        if self._quiet:
            self._quiet -= is_layer
            if self._quiet or not is_layer:
                return
            self._add(LAYER, self._args, out)
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
        self._add(name, self._given(args[1:], {}), out)
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


def _memory(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # it has none
        return -id(tensor)


def _tensors(value: Any) -> list[Tensor]:
    return [item for item in tree_flatten(value)[0] if isinstance(item, Tensor)]


def _written(func: Any, args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors an operation changes in place."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[position] if position < len(args) else None)
            found += _tensors(value)
    return found


def record_pass(
    module: nn.Module, args: tuple, kwargs: dict, is_layer: Callable[[nn.Module], bool]
) -> Record:
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
    given = _tensors((args, kwargs))
    for tensor in given:
        ref = recorder.ref(tensor)
        recorder.record.constants.discard(ref.value)
        recorder.depends.add(ref.value)
    try:
        with torch.no_grad(), recorder.watching():
            out = module(*args, **kwargs)
    except Exception as error:
        raise ExampleError(
            f'{type(module).__name__} cannot be run on the example of shape '
            f'{", ".join(str(tuple(t.shape)) for t in given)}: {type(error).__name__}: {error}; '
            'give an example that fits it, such as example=torch.rand(1, 3, 224, 224)'
        ) from error
    kept = [value for part in module.modules() for value in attributes(part)]
    recorder.record.outputs = {recorder.ref(tensor).value for tensor in tensors_in(out)} | {
        recorder.ref(tensor).value for tensor in tensors_in(kept) if recorder.knows(tensor)
    }
    return recorder.record
