# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Layers of a frozen network: norms folded in, only some of their channels computed."""

from __future__ import annotations

import copy
from typing import Any, Optional

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmcv.cnn.bricks.wrappers import Conv2d as MMConv2d
from mmcv.cnn.bricks.wrappers import Linear as MMLinear
from torch import Tensor
from torch.utils._pytree import tree_map

from . import kernels
from .frozen_pass import Pass, Side

_CONVOLVE = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, MMConv2d: F.conv2d, nn.Conv3d: F.conv3d}


class LayerForward:
    """``forward`` of a convolution or linear layer: with the norm and the activation after it, on
    the channels that its sides say. ``last``: its inputs are laid out channels-last. ``adds``: the
    output is only added to a tensor that nobody needs later."""

    def __init__(
        self,
        layer: Any,
        state: Pass,
        norm: Optional[nn.Module],
        act: Optional[nn.Module],
        ins: Optional[Side],
        outs: Optional[Side],
        last: bool,
        adds: bool,
    ) -> None:
        self.adds = adds and type(act) in (nn.ReLU, type(None))
        self.layer = layer
        self.state = state
        self.acts = act is not None
        self.act = kernels.ACTIVATIONS[type(act)] if act is not None else kernels.NOTHING
        self.ins, self.outs = ins, outs
        self.linear = isinstance(layer, nn.Linear)
        self.groups = 1 if self.linear else layer.groups
        self.axis = -1 if self.linear else -1 - len(layer.kernel_size)
        plain = type(layer) in (nn.Linear, MMLinear) or (
            type(layer) in _CONVOLVE and layer.padding_mode == 'zeros'
        )
        self.plain = plain
        self.last = last and layer.weight.dim() == 4
        self.has_kernel = (
            plain and isinstance(layer, nn.Conv2d) and not isinstance(layer.padding, str)
        )
        self.turns = self.has_kernel and ins is not None and outs is None and kernels.turns(layer)
        weight, self.bias = fold(layer, norm)
        # Input channels at the end, and one more that is zero for those a site was padded with.
        self.weight = weight.movedim(1, -1).contiguous()
        self.wide: Optional[Tensor] = None
        if self.turns:
            self.turned = F.pad(self.weight, (0, 1)).flip(1, 2).permute(3, 1, 2, 0).contiguous()
        self._laid_out: dict[Any, tuple[Tensor, Optional[Tensor]]] = {}

    def __call__(self, input: Optional[Tensor] = None, **named: Tensor) -> Tensor:
        x = next(iter(named.values())) if input is None else input
        opened = self.state.opened
        if self.state.original:
            factor = self.ins.factor(opened, True) if self.ins else None
            return type(self.layer).forward(self.layer, self._times(x, factor))
        cols: Optional[Tensor] = None
        rows: Optional[Tensor] = None
        key: Any = ()
        if self.ins is not None:
            cols, key = self.ins.index(opened, x.device)
            x = self._times(x, self.ins.factor(opened))
        if self.outs is not None:
            rows, own = self.outs.index(opened, x.device)
            key = None if own is None or key is None else (key, own)
        groups = self.groups
        if groups > 1 and cols is not None:
            full = x.new_zeros(*x.shape[:1], self.layer.in_channels, *x.shape[2:])
            x, cols, key = full.index_copy_(1, cols, x), None, None
        if groups > 1 and rows is not None:
            each = len(self.weight) // groups
            if x.size(self.axis) != len(rows) // each * (self.layer.in_channels // groups):
                if each != 1 or self.layer.in_channels != groups:
                    return self._run(x, None, None, (), groups).index_select(self.axis, rows)
                x = x.index_select(self.axis, rows)
            groups = len(rows) // each
        return self._run(x, rows, cols, key, groups)

    def _times(self, x: Tensor, factor: Optional[np.ndarray]) -> Tensor:
        if factor is None:
            return x
        shape = [1] * x.dim()
        shape[0], shape[self.axis] = factor.shape
        return x * torch.from_numpy(factor).to(x.device, x.dtype).view(shape)

    def _run(
        self, x: Tensor, rows: Optional[Tensor], cols: Optional[Tensor], key: Any, groups: int
    ) -> Tensor:
        """The layer on some channels, all of which are told by numbers."""
        layer = self.layer
        fast = self.has_kernel and kernels.fits(x)
        turned = self.turns and cols is not None and key is None
        if fast and self.adds and not (turned and self._gathers_much(x, cols)):
            return Pending.of(self, x, *self._weights(rows, cols, key, x, groups))
        if fast:
            act = kernels.NOTHING if self.adds else self.act
            if turned and cols is not None:
                weight = self.turned.index_select(0, cols).permute(0, 3, 1, 2)
                out = kernels.convolve_turned(layer, x, weight, self.bias, *act)
            else:
                weight, bias = self._weights(rows, cols, key, x, groups)
                out = kernels.convolve(layer, x, weight, bias, groups, *act)
            if self.acts and not self.adds:
                self.state.done = out
            return out
        weight, bias = self._weights(rows, cols, key)
        if not self.plain:  # it does more than convolve
            found = shadow(layer, {'weight': weight, 'bias': bias})
            if not self.linear:
                found.groups = groups
                found.out_channels, found.in_channels = len(weight), weight.size(1) * groups
            return type(found).forward(found, x)
        if self.linear:
            return F.linear(x, weight, bias)
        shape = layer.stride, layer.padding, layer.dilation, groups
        return _CONVOLVE[type(layer)](x, weight, bias, *shape)

    def _gathers_much(self, x: Tensor, cols: Any) -> bool:
        """Whether gathering weights costs more than a pass over the output for a sum."""
        area = self.layer.kernel_size[0] * self.layer.kernel_size[1]
        return 8 * area * len(cols) > x.size(0) * x.size(2) * x.size(3)

    def _weights(
        self,
        rows: Optional[Tensor],
        cols: Optional[Tensor],
        key: Any,
        x: Optional[Tensor] = None,
        groups: int = 1,
    ) -> tuple[Tensor, Optional[Tensor]]:
        """Weight and bias of some channels; packed for the kernels if there is an input, and known
        ones if there is a key."""
        known = self._laid_out.get((key, x is None)) if key is not None else None
        if known is not None:
            return known
        weight, bias = self.weight, self.bias
        if cols is not None:
            if self.wide is None:
                self.wide = F.pad(weight, (0, 1))
            weight = self.wide
        if rows is not None:
            weight = weight.index_select(0, rows)
            bias = None if bias is None else bias.index_select(0, rows)
        if cols is not None:
            # gather runs on all cores and over two dimensions, index_select on one.
            lines = weight.reshape(-1, weight.size(-1))
            lines = lines.gather(1, cols.expand(len(lines), -1))
            weight = lines.view(*weight.shape[:-1], -1)
        weight = weight.movedim(-1, 1)
        weight = weight if self.last else weight.contiguous()
        if key is not None:
            if x is not None:
                weight = kernels.pack(self.layer, weight, x, groups)
            self._laid_out[key, x is None] = weight, bias
        return weight, bias

    def __getstate__(self) -> dict:
        # What the kernels made is opaque.
        return {**self.__dict__, '_laid_out': {}}


class Pending(Tensor):
    """What a layer returns that is only added to something: kernels add to that tensor, and do the
    ReLU after the sum, without another pass over memory."""

    @classmethod
    def of(cls, layer: LayerForward, x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        conv = layer.layer
        size = [
            (n + 2 * pad - step * (kernel - 1) - 1) // stride + 1
            for n, pad, step, kernel, stride in zip(
                x.shape[2:], conv.padding, conv.dilation, conv.kernel_size, conv.stride, strict=True
            )
        ]
        out = x.new_empty(1).expand(len(x), len(layer.weight), *size).as_subclass(cls)
        out.__dict__['work'] = layer, x, weight, bias
        return out

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: Optional[dict] = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, '__name__', '') == '__get__' or func is Tensor.size:
                return func(*args, **(kwargs or {}))
            if func in _SUMS and len(args) == 2 and not kwargs:
                mine, other = args if isinstance(args[0], Pending) else args[::-1]
                other = _computed(other)
                if isinstance(other, Tensor):
                    layer, x, weight, bias = mine.__dict__['work']
                    if other.shape == mine.shape and kernels.fits(other):
                        out = kernels.accumulate(layer.layer, x, weight, bias, other, layer.act[0])
                        layer.state.done = out if layer.acts else None
                        return out
            args, kwargs = tree_map(_computed, (args, kwargs or {}))
            return func(*args, **kwargs)


def _computed(value: Any) -> Any:
    if not isinstance(value, Pending):
        return value
    layer, x, weight, bias = value.__dict__['work']
    return kernels.convolve(layer.layer, x, weight, bias, layer.groups, *kernels.NOTHING)


_SUMS = (Tensor.__iadd__, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.add, torch.add)


class SkippedForward:
    """``forward`` of a norm that is folded into the layer before it."""

    def __init__(self, module: nn.Module, state: Pass) -> None:
        self.module = module
        self.state = state

    def __call__(self, x: Tensor) -> Tensor:
        return type(self.module).forward(self.module, x) if self.state.original else x


class ActivationForward(SkippedForward):
    """``forward`` of an activation that some layers do as well."""

    def __call__(self, x: Tensor) -> Tensor:
        if x is self.state.done:
            self.state.done = None
            return x
        return type(self.module).forward(self.module, x)


class ScaledForward:
    """``forward`` of a module whose own tensors follow sites: it runs with what is computed of them
    (name -> dimension, and what that follows)."""

    def __init__(self, module: nn.Module, inner: Any, state: Pass, tensors: dict) -> None:
        self.module = module
        self.inner = inner
        self.state = state
        self.tensors: dict[str, tuple[int, Side]] = tensors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = {}
        for name, (dim, side) in self.tensors.items():
            tensor = getattr(self.module, name)
            index, _ = side.index(self.state.opened, tensor.device)
            if index is not None:
                found[name] = tensor.detach().index_select(dim, index)
        if not found or self.state.original:
            return self.inner(*args, **kwargs)
        stand_in = shadow(self.module, found)
        return type(stand_in).forward(stand_in, *args, **kwargs)


def shadow(module: nn.Module, tensors: dict[str, Optional[Tensor]]) -> Any:
    """A module with other parameters and buffers, everything else shared."""
    found: Any = copy.copy(module)
    found.__dict__.pop('forward', None)
    for kind in ('_parameters', '_buffers'):
        own = found.__dict__[kind]
        found.__dict__[kind] = {name: tensors.get(name, value) for name, value in own.items()}
    return found


@torch.no_grad()
def fold(layer: Any, norm: Any) -> tuple[Tensor, Optional[Tensor]]:
    """Weight and bias of a layer and the batch norm after it as those of one layer."""
    weight, bias = layer.weight.detach(), layer.bias
    if norm is None:
        return weight.clone(), None if bias is None else bias.detach().clone()
    wide = torch.promote_types(weight.dtype, torch.float32)
    scale = torch.rsqrt(norm.running_var.to(wide) + norm.eps)
    if norm.weight is not None:
        scale = scale * norm.weight.to(wide)
    shift = -norm.running_mean.to(wide) if bias is None else bias.to(wide) - norm.running_mean
    shift = shift * scale
    if norm.bias is not None:
        shift = shift + norm.bias.to(wide)
    folded = weight.to(wide) * scale.view(-1, *(1,) * (weight.dim() - 1))
    return folded.to(weight.dtype), shift.to(weight.dtype)
