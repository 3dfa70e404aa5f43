# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Switching sparse execution of a model on and off."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter, is_
from typing import Any, Optional, Union

import torch
import torch.nn as nn
from mmengine.logging import print_log
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ..errors import UsageError
from ..gates import find_gates
from ..nets import GatedBackbone, GatedBlock
from ..runtime.module_hooks import is_watched
from .folding import FoldedLayer
from .forwards import (
    FoldedForward,
    SkippedForward,
    autocasts,
    is_foldable,
    is_plain_conv,
    is_unpatched,
    recording,
)
from .gate_bundle import GateBundle
from .memory import to_contiguous
from .sparse_block import SparseBlock, why_not
from .stamp import Stamp, checks

WAYS = ('auto', 'dense', 'union', 'groups')
_TRAINING, _HOOKS = attrgetter('training'), attrgetter('_forward_hooks')
_EARLY_HOOKS = attrgetter('_forward_pre_hooks')


def enable_sparse(
    model: nn.Module,
    channels_last: bool = True,
    granularity: Optional[int] = None,
    way: str = 'auto',
    constant: bool = False,
) -> nn.Module:
    """Compute only the open channels of a model's gated backbones.

    From now on, wherever the model is in evaluation mode and no gradient is
    recorded (``torch.no_grad()``, ``torch.inference_mode()``), gated blocks
    gather the weights of the open channels and convolve with those; batch
    norms of the backbone are folded into its convolutions. In training, under
    a tracer and wherever gradients are recorded the model runs as before.
    Results agree with those of masked execution up to rounding. The records of
    the gates are left as always, but without ``feature``: closed channels are
    not computed.

    Weights are prepared at the first pass, and again when they have changed.
    Copies and pickles of the model are sparse as well.

    Args:
        model (nn.Module): A gated backbone, or any model with one inside.
        channels_last (bool): Run the backbone in channels-last layout, which
            suits odd numbers of channels; it returns the layout it is given.
            Defaults to True.
        granularity (int, optional): Pad the gathered channels to a multiple of this,
            with zeros. Defaults to None: 8 on a GPU, whose matrix units want it,
            1 on a CPU, where padding was measured to gain nothing.
        way (str): How a batch is run: 'groups' of equal masks, on the 'union'
            of open channels, 'dense', or 'auto', whichever is cheapest.
            Defaults to 'auto'.
        constant (bool): Weights, modules and hooks will not change any more: they are
            looked at in the first passes, and not before every one. Defaults to False.

    Returns:
        nn.Module: The same model.

    Raises:
        UsageError: If it has no gated backbone with gates, or an argument is
            out of range.

    Example:
        >>> model = enable_sparse(GatedResNet(50)).eval()
        >>> with torch.no_grad():
        ...     outs = model(torch.rand(1, 3, 512, 512))
    """
    if granularity is not None and granularity < 1:
        raise UsageError(f'enable_sparse: granularity={granularity} must be at least 1')
    if way not in WAYS:
        raise UsageError(f'enable_sparse: way={way!r} must be one of {WAYS}')
    if not find_gates(model):
        raise UsageError(
            f'enable_sparse: {type(model).__name__} has no gates, nothing is ever closed; use '
            "a gated backbone, such as backbone=dict(type='GatedResNet', ...)"
        )
    prepare(model, channels_last, granularity, way, constant)
    return model


def prepare(
    model: nn.Module,
    channels_last: bool,
    granularity: Optional[int] = None,
    way: str = 'auto',
    constant: bool = False,
) -> None:
    """What :func:`enable_sparse` does, also for a backbone whose gates are gone."""
    _restore(model, (FoldedForward, SkippedForward))
    for name, block in _modules(model, GatedBlock):
        reason = why_not(block)
        if reason is None:
            multiple = granularity or _granularity(block)
            SparseBlock(block, channels_last, multiple, way).attach()
        else:
            print_log(
                f'enable_sparse: block {name} stays masked, {reason}',
                logger='current',
                level=logging.WARNING,
            )
        _fold_plain_layers(block, channels_last)
    for _, backbone in _modules(model, GatedBackbone):
        _fold_plain_layers(backbone, channels_last)
        for block in backbone.private_inputs():
            if isinstance(block.runner, SparseBlock):
                block.runner.owns_input = True
        again = partial(prepare, backbone, channels_last, granularity, way, constant)
        checked = CheckedForward(backbone, channels_last, again, constant)
        backbone.forward = checked  # type: ignore[method-assign,assignment]


def disable_sparse(model: nn.Module) -> nn.Module:
    """Run a model as before :func:`enable_sparse`; nothing happens otherwise.

    Args:
        model (nn.Module): Any model.

    Returns:
        nn.Module: The same model.
    """
    _restore(model, (FoldedForward, SkippedForward, CheckedForward))
    return model


def _restore(model: nn.Module, ours: tuple[type, ...]) -> None:
    """Give blocks back, and modules their own ``forward`` in place of such ones of ours."""
    for _, block in _modules(model, GatedBlock):
        if isinstance(block.runner, SparseBlock):
            block.runner.detach()
    for module in model.modules():
        forward = module.__dict__.get('forward')
        if isinstance(forward, ours):
            del module.__dict__['forward']
            if isinstance(forward, CheckedForward) and forward.patch is not None:
                module.__dict__['forward'] = forward.patch


def is_sparse(model: nn.Module) -> bool:
    """Whether a model has blocks that run sparsely in evaluation."""
    return any(block.runner is not None for _, block in _modules(model, GatedBlock))


class ChannelsLastForward:
    """``forward`` of a backbone that computes in channels-last layout.

    Args:
        backbone (nn.Module): The backbone.
        forward (Callable): Its own.
    """

    def __init__(self, backbone: nn.Module, forward: Callable) -> None:
        self.backbone = backbone
        self.inner = forward

    def __call__(self, x: Tensor) -> Any:
        last = torch.channels_last
        if self.backbone.training or recording() or x.dim() != 4:
            return self.inner(x)
        if x.is_contiguous(memory_format=last) and not x.is_contiguous():
            return self.inner(x)
        # Some ops that come later, such as RoIAlign, take the layout for granted.
        outs = self.inner(x.contiguous(memory_format=last))
        return tuple(to_contiguous(out) for out in outs)


class _Passes:
    """Passes through a backbone that are under way in some thread."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._running = self._wanted = 0
        self._own = threading.local()

    def begin(self) -> None:
        """Count a pass in, unless somebody waits to prepare the backbone."""
        if self._process != os.getpid():
            self.__init__()  # type: ignore[misc]  # threads do not come along with a fork
        depth = getattr(self._own, 'depth', 0)
        with self._changed:
            if not depth:  # what began in a pass has to end with it
                self._changed.wait_for(lambda: not self._wanted)
            self._running += 1
        self._own.depth = depth + 1

    def end(self) -> None:
        """Count it out."""
        self._own.depth -= 1
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    @contextmanager
    def none(self) -> Iterator[None]:
        """No pass of another thread begins here, and those under way have ended."""
        with self._changed:
            self._wanted += 1
            try:
                # Two passes that began in others would wait for each other.
                if not getattr(self._own, 'depth', 0):
                    self._changed.wait_for(lambda: not self._running)
                yield
            finally:
                self._wanted -= 1
                self._changed.notify_all()


class CheckedForward:
    """``forward`` of a sparse backbone that looks once, and not before every
    layer, whether weights have changed.

    Args:
        backbone (nn.Module): The backbone.
        channels_last (bool): Whether it is run in that layout.
        again (Callable): Prepares it anew, after modules of it were replaced.
        constant (bool): Whether to look no more once all was found prepared.
    """

    def __init__(
        self, backbone: nn.Module, channels_last: bool, again: Callable[[], None], constant: bool
    ) -> None:
        self.backbone = backbone
        self.constant = constant
        self._settled = False
        before: Any = backbone.__dict__.get('forward')
        ours = isinstance(before, CheckedForward)
        # What somebody else has put in place of the class's.
        self.patch: Optional[Callable] = before.patch if ours else before
        self.passes: _Passes = before.passes if ours else _Passes()
        own = self.patch or partial(type(backbone).forward, backbone)
        self.inner = ChannelsLastForward(backbone, own) if channels_last else own
        self.again = again
        self.modules = list(backbone.modules())
        self.blocks = [m for m in self.modules if isinstance(m, GatedBlock)]
        self.folded = [
            m for m in self.modules if isinstance(m.__dict__.get('forward'), FoldedForward)
        ]
        self.skipped = [
            m for m in self.modules if isinstance(m.__dict__.get('forward'), SkippedForward)
        ]
        self._watched: Optional[tuple[list, Stamp]] = None
        # Lists side by side, for loops that no Python runs in.
        self._owners = [m._modules for m in self.modules for _ in m._modules]
        self._keys = [key for m in self.modules for key in m._modules]
        self._children = [child for m in self.modules for child in m._modules.values()]
        self._places = [m._modules for m in self.modules]
        self._counts = list(map(len, self._places))

    def __call__(self, x: Tensor) -> Any:
        successor = self._successor()
        if successor is not None:
            # It may be around somebody's own that calls this one.
            return successor(x) if successor.patch is self.patch else self.inner(x)
        before = checks.done
        checks.done = False
        self.passes.begin()
        try:
            known = self._settled and not (self.backbone.training or autocasts())
            if known or (self._successor() is None and self._unchanged()):
                if recording() or not (known or self._undisturbed()):
                    return self.inner(x)
                if known or self._refresh():
                    checks.done = True
                    return self.inner(x)
        finally:
            self.passes.end()
            checks.done = before
        self._prepare_anew()
        return self.inner(x) if self._successor() is None else self(x)

    def _prepare_anew(self) -> None:
        """Prepare the backbone as it is now, unless somebody has."""
        with self.passes.none():
            if self.backbone.__dict__.get('forward') is self:
                self.again()
            elif self._successor() is None:
                # Somebody's own calls this one: it must stay.
                disable_sparse(self.backbone)

    def _successor(self) -> Optional[CheckedForward]:
        """What has taken the place of this one."""
        found = self.backbone.__dict__.get('forward')
        return found if isinstance(found, CheckedForward) and found is not self else None

    def _refresh(self) -> bool:
        """Prepare all weights, anew if parameters have changed; whether that can be done."""
        parts, watched = self._parts(), self._watched
        if watched is None or watched[0] != parts or not watched[1].holds():
            if not self._fits():
                return False
            # First the stamp, as parameters may change meanwhile.
            sources = [source for part in parts for source in part.sources()]
            sources += [(module.__dict__, 'forward') for module in self.skipped]
            sources += [(block.__dict__, 'decide') for block in self.blocks]
            stamp = Stamp(sources)
            for part in parts:
                part.refresh()
            self._watched = parts, stamp
        else:
            self._settled = self.constant
        return True

    def _fits(self) -> bool:
        """Whether all that was prepared is still such as can be."""
        runners = [b.runner for b in self.blocks if isinstance(b.runner, SparseBlock)]
        layers = all(map(is_plain_conv, self.folded)) and all(map(is_unpatched, self.skipped))
        norms = [m for m in self.skipped if isinstance(m, _BatchNorm)]
        return layers and all(map(is_foldable, norms)) and all(r.fits() for r in runners)

    def _parts(self) -> list[Union[GateBundle, FoldedLayer]]:
        parts: list[Union[GateBundle, FoldedLayer]] = []
        for block in self.blocks:
            if isinstance(block.runner, SparseBlock):
                parts += block.runner.parts
        for conv in self.folded:
            forward = conv.__dict__.get('forward')
            if isinstance(forward, FoldedForward):
                parts.append(forward.layer)
        return parts

    def _unchanged(self) -> bool:
        """Whether all modules are those that were prepared."""
        found = map(dict.get, self._owners, self._keys)
        return all(map(is_, found, self._children)) and list(map(len, self._places)) == self._counts

    def _undisturbed(self) -> bool:
        """Whether neither autocast nor anybody else's code takes part in the pass."""
        if autocasts() or any(map(_TRAINING, self.modules)):
            return False
        if not (any(map(_HOOKS, self.modules)) or any(map(_EARLY_HOOKS, self.modules))):
            return True
        hooked = (m for m in self.modules if m._forward_hooks or m._forward_pre_hooks)
        return not any(map(is_watched, hooked))

    def __getstate__(self) -> dict:
        # Copies have tensors and threads of their own.
        return {**self.__dict__, '_watched': None, '_settled': False, 'passes': None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state, passes=_Passes())


def _modules(model: nn.Module, kind: type) -> Iterator[tuple[str, Any]]:
    return ((name, m) for name, m in model.named_modules() if isinstance(m, kind))


def _granularity(block: GatedBlock) -> int:
    """What the number of gathered channels is padded to where a block lies now."""
    return 8 if any(weight.is_cuda for weight in block.parameters()) else 1


def _fold_plain_layers(module: Any, channels_last: bool) -> None:
    for names in module.plain_layers():
        conv, norm, act = (name and module.get_submodule(name) for name in names)
        if is_plain_conv(conv) and is_foldable(norm):
            relu = type(act) is nn.ReLU and is_unpatched(act)
            conv.forward = FoldedForward(FoldedLayer(conv, norm, channels_last), relu)
            norm.forward = SkippedForward(norm, conv.forward)
            if relu:
                act.forward = SkippedForward(act, conv.forward)
