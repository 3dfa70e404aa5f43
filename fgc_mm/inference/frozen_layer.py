# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Layers of a frozen network: norms folded in, only some of their channels computed."""

from __future__ import annotations

import copy
from time import perf_counter
from typing import Any, Optional

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmcv.cnn.bricks.wrappers import Conv2d as MMConv2d
from mmcv.cnn.bricks.wrappers import Linear as MMLinear
from torch import Tensor

from . import kernels
from .frozen_pass import Pass, Side

PRODUCT_POSITIONS = 512
"""On larger maps a convolution is faster than a product on a CPU."""
_CONVOLVE = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, MMConv2d: F.conv2d, nn.Conv3d: F.conv3d}


class LayerForward:
    """``forward`` of a convolution or linear layer of a frozen network.

    Args:
        layer (nn.Module): The layer.
        state (Pass): Of the network.
        norm (nn.Module, optional): The batch norm after it, folded in. Defaults to None.
        act (nn.Module, optional): The activation after that, done as well. Defaults to None.
        ins (Side, optional): What its inputs follow. Defaults to None.
        outs (Side, optional): What its outputs follow. Defaults to None.
        last (bool): Whether its inputs are laid out channels-last. Defaults to True.
        adds (bool): Whether its output is only added to another tensor, before the activation.
            Defaults to False.
    """

    def __init__(
        self,
        layer: Any,
        state: Pass,
        norm: Optional[nn.Module] = None,
        act: Optional[nn.Module] = None,
        ins: Optional[Side] = None,
        outs: Optional[Side] = None,
        last: bool = True,
        adds: bool = False,
    ) -> None:
        self.layer = layer
        self.state = state
        self.adds = adds and act is not None
        self.act = act = None if adds else act
        self.ins, self.outs = ins, outs
        self.name, self.scalars, self.algorithm = kernels.activation(act)
        self.linear = isinstance(layer, nn.Linear)
        self.groups = 1 if self.linear else layer.groups
        self.channels = layer.weight.shape[0]
        self.is_plain = is_plain(layer)
        self.axis = -1 if self.linear else -1 - len(layer.kernel_size)
        self.weight, self.bias = fold(layer, norm)
        self.pointwise = self.linear or (
            layer.kernel_size == (1, 1) and layer.padding in ((0, 0), 'valid', 'same')
        )
        self.product = self.pointwise and not self.linear and layer.stride == (1, 1)
        self.has_kernel = self.is_plain and kernels.takes(layer)
        self.turns = self.has_kernel and outs is None and kernels.turns(layer)
        self.last = last and self.weight.dim() == 4
        if self.last:  # a convolution returns the layout of its weight
            self.weight = self.weight.contiguous(memory_format=torch.channels_last)
        self._lines: Optional[Tensor] = None
        self._turned: Optional[Tensor] = None
        self._packed: dict[Any, tuple[Tensor, Optional[Tensor]]] = {}

    def __call__(self, input: Optional[Tensor] = None, **named: Tensor) -> Tensor:
        x = next(iter(named.values())) if input is None else input
        state, opened = self.state, self.state.opened
        if state.original:
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
        if self.groups > 1 and cols is not None:
            full = x.new_zeros(*x.shape[:1], self.layer.in_channels, *x.shape[2:])
            x, cols, key = full.index_copy_(1, cols, x), None, None
        if rows is None and cols is None:
            key = ()
        out = self._run(x, rows, cols, key)
        if self.act is not None:
            state.done = out
        elif self.adds and kernels.fits(out):
            out = out.as_subclass(Summand)
            out.state = state
        if state.clocks and self.ins is not None:
            now = perf_counter()
            for site, _ in self.ins.ends:
                if site in state.clocks:
                    state.clocks[site] = now
        return out

    def _times(self, x: Tensor, factor: Optional[np.ndarray]) -> Tensor:
        if factor is None:
            return x
        shape = [1] * x.dim()
        shape[0], shape[self.axis] = factor.shape
        return x * torch.from_numpy(factor).to(x.device, x.dtype).view(shape)

    def _run(self, x: Tensor, rows: Optional[Tensor], cols: Optional[Tensor], key: Any) -> Tensor:
        """The layer on some channels, all of which are told by numbers."""
        groups = self.groups
        if groups > 1 and rows is not None:
            each = self.channels // groups
            if x.size(self.axis) != len(rows) // each * (self.layer.in_channels // groups):
                if each != 1 or self.layer.in_channels != groups:
                    return self._run(x, None, None, ()).index_select(self.axis, rows)
                x = x.index_select(self.axis, rows)
            groups = len(rows) // each
        if not self.is_plain:
            return self._shadowed(x, *self._weights(rows, cols), groups)
        if self.linear:
            weight, bias = self._kept(rows, cols, key)
            return self._activated(F.linear(x, weight, bias))
        if not (self.has_kernel and kernels.fits(x)):
            weight, bias = self._kept(rows, cols, key)
            shape = self.layer.stride, self.layer.padding, self.layer.dilation, groups
            return self._activated(_CONVOLVE[type(self.layer)](x, weight, bias, *shape))
        if self.product and x.size(0) * x.size(2) * x.size(3) <= PRODUCT_POSITIONS:
            weight, bias = self._kept(rows, cols, key)
            return self._multiply(x, weight, bias)
        if key is not None:
            weight, bias = self._pack(rows, cols, key, x, groups)
        elif cols is not None and rows is None and self.turns and self._gathers_much(x, cols):
            return self._turn(x, cols)
        else:
            weight, bias = self._weights(rows, cols)
        act = self.name, self.scalars, self.algorithm
        out = kernels.convolve(self.layer, x, weight, bias, groups, *act)
        return out if self.name != 'none' else self._activated(out)

    def _activated(self, out: Tensor) -> Tensor:
        act = self.act
        return out if act is None else type(act).forward(act, out)

    def _kept(
        self, rows: Optional[Tensor], cols: Optional[Tensor], key: Any
    ) -> tuple[Tensor, Optional[Tensor]]:
        """Weight and bias of some channels, known ones if there are."""
        if rows is None and cols is None:
            return self.weight, self.bias
        if key is None:
            return self._weights(rows, cols)
        known = self._packed.get(('plain', key))
        if known is None:
            known = self._packed['plain', key] = self._weights(rows, cols)
        return known

    def _pack(
        self, rows: Optional[Tensor], cols: Optional[Tensor], key: Any, x: Tensor, groups: int
    ) -> tuple[Tensor, Optional[Tensor]]:
        """Weight in the layout of the kernels, and bias, made once."""
        known = self._packed.get(key)
        if known is None:
            weight, bias = self._weights(rows, cols)
            weight = weight.contiguous(memory_format=torch.channels_last)
            packed = kernels.pack(self.layer, weight, x, groups)
            known = self._packed[key] = (weight if packed is None else packed, bias)
        return known

    def _weights(
        self, rows: Optional[Tensor], cols: Optional[Tensor]
    ) -> tuple[Tensor, Optional[Tensor]]:
        """Weight and bias of some output and input channels."""
        weight, bias = self.weight, self.bias
        if rows is not None and bias is not None:
            bias = bias.index_select(0, rows)
        if cols is None:
            return weight if rows is None else self._rows(rows), bias
        if self.pointwise:
            if self._lines is None:
                self._lines = weight.flatten(1).t().contiguous()
            taken = self._lines.index_select(0, cols)
            taken = (taken if rows is None else taken.index_select(1, rows)).t()
            if self.linear:
                return taken, bias
            taken = taken if self.last else taken.contiguous()
            return taken.view(*taken.shape, *self.weight.shape[2:]), bias
        if not self.last:
            weight = weight if rows is None else weight.index_select(0, rows)
            return weight.index_select(1, cols), bias
        weight = (weight if rows is None else self._rows(rows)).permute(0, 2, 3, 1)
        # gather runs on all cores and over two dimensions, index_select on one.
        lines = weight.reshape(-1, weight.size(3))
        lines = lines.gather(1, cols.expand(lines.size(0), -1))
        return lines.view(*weight.shape[:3], len(cols)).permute(0, 3, 1, 2), bias

    def _rows(self, rows: Tensor) -> Tensor:
        if not self.last:
            return self.weight.index_select(0, rows)
        return self.weight.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
        """A pointwise convolution as a product of matrices."""
        batch, _, height, width = x.shape
        pixels = x.permute(0, 2, 3, 1).flatten(0, 2)
        weight = weight.flatten(1).t()
        if bias is None:
            out = pixels.mm(weight)
        elif self.name == 'relu':
            # The bias comes with the ReLU, in one pass over what was just written.
            out = torch._add_relu_(pixels.mm(weight), bias)
        else:
            out = torch.addmm(bias, pixels, weight)
        out = out.view(batch, height, width, -1).permute(0, 3, 1, 2)
        return out if self.name == 'relu' and bias is not None else self._activated(out)

    def _gathers_much(self, x: Tensor, cols: Tensor) -> bool:
        """Whether there is more to gather than the output has values."""
        kernel = self.layer.kernel_size[0] * self.layer.kernel_size[1]
        return 2 * kernel * len(cols) >= x.size(0) * x.size(2) * x.size(3)

    def _turn(self, x: Tensor, cols: Tensor) -> Tensor:
        """As a transposed convolution: its weight has input channels first, so that taking some
        is copying rows."""
        if self._turned is None:
            self._turned = self.weight.flip(2, 3).permute(1, 2, 3, 0).contiguous()
        weight = self._turned.index_select(0, cols).permute(0, 3, 1, 2)
        act = self.name, self.scalars, self.algorithm
        out = kernels.convolve_turned(self.layer, x, weight, self.bias, *act)
        return out if self.name != 'none' else self._activated(out)

    def _shadowed(self, x: Tensor, weight: Tensor, bias: Optional[Tensor], groups: int) -> Tensor:
        """A layer whose forward does more than convolve, with other weights."""
        found = shadow(self.layer, {'weight': weight, 'bias': bias})
        if not self.linear:
            found.groups = groups
            found.out_channels, found.in_channels = len(weight), weight.size(1) * groups
        return self._activated(type(found).forward(found, x))

    def __getstate__(self) -> dict:
        # What the kernels made is opaque.
        return {**self.__dict__, '_packed': {}}


class Summand(Tensor):
    """The output of a layer to which another tensor is added, before a ReLU: both are one pass over
    memory. Whatever else is done with it sees an ordinary tensor."""

    state: Pass

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: Optional[dict] = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _SUMS and len(args) == 2 and not kwargs:
                mine, other = args if isinstance(args[0], Summand) else args[::-1]
                if isinstance(other, Tensor) and (other.shape, other.dtype) == (
                    mine.shape,
                    mine.dtype,
                ):
                    out = torch._add_relu_(mine.as_subclass(Tensor), other.as_subclass(Tensor))
                    mine.state.done = out
                    return out
            return func(*args, **(kwargs or {}))


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
            if not self.state.original:
                return x
        return type(self.module).forward(self.module, x)


class ScaledForward:
    """``forward`` of a module whose own tensors follow sites: it runs with what is computed.

    Args:
        module (nn.Module): The module.
        inner (Callable): Its forward.
        state (Pass): Of the network.
        tensors (dict): Its tensors by name -> (dimension, what they follow).
    """

    def __init__(self, module: nn.Module, inner: Any, state: Pass, tensors: dict) -> None:
        self.module = module
        self.inner = inner
        self.state = state
        self.tensors: dict[str, tuple[int, Side]] = tensors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        opened, found = self.state.opened, {}
        for name, (dim, side) in self.tensors.items():
            tensor = getattr(self.module, name)
            index, _ = side.index(opened, tensor.device)
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
    found.__dict__['_parameters'] = {
        name: tensors.get(name, own) for name, own in module._parameters.items()
    }
    found.__dict__['_buffers'] = {
        name: tensors.get(name, own) for name, own in module._buffers.items()
    }
    for name, tensor in tensors.items():
        if name not in module._buffers:
            found.__dict__['_parameters'][name] = tensor
    return found


def is_plain(layer: nn.Module) -> bool:
    """Whether a layer is nothing but ``F.conv2d`` or ``F.linear`` of its weight."""
    if type(layer) in (nn.Linear, MMLinear):
        return True
    return type(layer) in _CONVOLVE and layer.padding_mode == 'zeros'


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
