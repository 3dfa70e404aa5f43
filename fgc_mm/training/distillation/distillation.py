# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The gated network learns what a dense one computes: in any training loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ...errors import CheckpointError, UsageError, in_context
from ...runtime import Attachments
from .teacher import dense_copy, fill, fingerprint, read_weights, spread

START = 'start'


class Distillation:
    """Draws what a gated network computes to what a dense one computes on the same pictures.

    It needs no labels. The loss is the mean squared difference of feature maps over the mean
    square of the teacher's, so its scale is that of no network. Each training step costs one
    forward pass of the teacher, without gradients; a pass in evaluation or under ``torch.no_grad``
    costs nothing.

    Args:
        network (nn.Module): A network with gates, in the loop's own hands.
        teacher (str | nn.Module): ``'start'``, the network as it is now, without its gates; the
            file of a checkpoint with other weights of that dense network; or a network that is
            called in the same way. Defaults to 'start'.
        weight (float): Of the loss on features. Defaults to 10.0.
        outputs (Sequence[str]): Names of the modules inside ``backbone`` whose outputs are
            compared. Defaults to (), all outputs of the backbone itself.
        kl (float): Weight of the divergence of a classifier's logits. Defaults to 0.0, none.
        temperature (float): What logits are divided by for it. Defaults to 1.0.
        logits (str): Name of the module that gives the logits. Defaults to '', the network.
        backbone (str): Name of the part that is compared. Defaults to '', the network.

    Example:
        >>> distillation = Distillation(network)
        >>> network(images)
        >>> loss = distillation.loss() + budget.loss()
    """

    def __init__(
        self,
        network: nn.Module,
        teacher: Union[str, nn.Module] = START,
        *,
        weight: float = 10.0,
        outputs: Sequence[str] = (),
        kl: float = 0.0,
        temperature: float = 1.0,
        logits: str = '',
        backbone: str = '',
    ) -> None:
        check_options(weight, kl, temperature)
        self.weight = weight
        self.kl = kl
        self.temperature = temperature
        # What runs: for logits all of the network, else the part alone.
        self.root = '' if kl else backbone
        student = _module(network, self.root, 'backbone')
        if isinstance(teacher, nn.Module):
            self.teacher = teacher
        else:
            self.teacher = dense_copy(student)
            if teacher != START:
                fill(self.teacher, read_weights(teacher), self.root, teacher)
        self.teacher.eval()  # what that of a backbone returns may be None
        self.teacher.requires_grad_(False)
        spread(self.teacher)
        inside = backbone if kl else ''
        self._names = [f'{inside}.{name}'.strip('.') for name in outputs] or [inside]
        self._logits = logits
        self._ours: dict[str, Any] = {}
        self._theirs: dict[str, Any] = {}
        self._attached = Attachments()
        watched = [*self._names, *([logits] if kl else [])]
        for name in dict.fromkeys(watched):
            for owner, kept in ((student, self._ours), (self.teacher, self._theirs)):
                module = _module(owner, name, 'outputs' if name in self._names else 'logits')
                note = partial(self._note, student, kept, name)
                self._attached.after(module, note, first=True)
        # Before a loss that is made behind the same module.
        self._attached.after(student, self._teach, with_kwargs=True, first=True)

    @property
    def token(self) -> str:
        """What tells this teacher from all others."""
        return fingerprint(self.teacher)

    def loss(self) -> Tensor:
        """How far the network is from its teacher in the last training pass.

        Returns:
            Tensor: A scalar, weighted.

        Raises:
            UsageError: If there was none.
        """
        ours, theirs = dict(self._ours), dict(self._theirs)
        self.discard()
        if not theirs:
            raise UsageError('Distillation: run the network in training mode before loss()')
        device = next(iter(tensors_of(next(iter(theirs.values()))))).device.type
        with torch.autocast(device, enabled=False):
            pairs = [
                pair
                for name in self._names
                for pair in zip(tensors_of(ours[name]), tensors_of(theirs[name]), strict=True)
            ]
            loss = self.weight * torch.stack([relative_error(a, b) for a, b in pairs]).mean()
            if self.kl:
                (one,), (other,) = tensors_of(ours[self._logits]), tensors_of(theirs[self._logits])
                loss = loss + self.kl * divergence(one, other, self.temperature)
        return loss

    def discard(self) -> None:
        """Forget the last pass."""
        self._ours.clear()
        self._theirs.clear()

    def close(self) -> None:
        """Take all hooks off the network."""
        self.discard()
        self._attached.remove()

    def state_dict(self) -> dict[str, Any]:
        """The weights of the teacher, and what tells them from others."""
        weights = {name: value.detach() for name, value in self.teacher.state_dict().items()}
        return dict(token=self.token, weights=weights)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the teacher that another one had.

        Raises:
            CheckpointError: If it is of another network, or not whole.
        """
        with in_context('the teacher'):
            fill(self.teacher, state['weights'], self.root, 'the saved one')
        if self.token != state['token']:
            raise CheckpointError('the teacher that was saved is not the one it says it is')

    def _note(
        self, student: nn.Module, kept: dict, name: str, module: nn.Module, args: Any, out: Any
    ) -> None:
        if kept is self._theirs or (student.training and torch.is_grad_enabled()):
            kept[name] = out

    def _teach(self, student: nn.Module, args: tuple, kwargs: dict, out: Any) -> None:
        """Run the teacher on what the student has just run on, in the same precision."""
        if not (student.training and torch.is_grad_enabled()):
            return
        if 'mode' in kwargs:  # a model of OpenMMLab: no head, no loss
            kwargs = {**kwargs, 'mode': 'tensor'}
        with torch.no_grad():
            self.teacher(*args, **kwargs)


def check_options(weight: float, kl: float, temperature: float, task: float = 0.0) -> None:
    """Refuse what is out of range."""
    for name, value in dict(weight=weight, kl=kl, task=task).items():
        if not value >= 0:
            raise UsageError(f'{name}={value!r} must be 0 or more')
    if not weight and not kl:
        raise UsageError('weight=0 and kl=0: then there is nothing to learn from the teacher')
    if not temperature > 0:
        raise UsageError(f'temperature={temperature!r} must be positive')


def tensors_of(output: Any) -> list[Tensor]:
    """All maps in what a module gives."""
    return [x for x in tree_flatten(output)[0] if isinstance(x, Tensor) and x.is_floating_point()]


def relative_error(ours: Tensor, theirs: Tensor) -> Tensor:
    """Mean squared difference over the mean square of the second: 0 if equal, 1 for zeros."""
    theirs = theirs.float()
    return F.mse_loss(ours.float(), theirs) / theirs.square().mean().clamp(min=1e-20)


def divergence(ours: Tensor, theirs: Tensor, temperature: float = 1.0) -> Tensor:
    """Kullback-Leibler divergence of class probabilities, mean over pictures, times the square of
    the temperature, which keeps its gradients alike."""
    if ours.dim() != 2:
        raise UsageError(
            f'Distillation: kl is for the logits of a classifier, B x classes, and got '
            f'{tuple(ours.shape)}; name the module that gives them by logits=..., or set kl=0'
        )
    ours, theirs = (x.float() / temperature for x in (ours, theirs))
    found = F.kl_div(
        ours.log_softmax(1), theirs.log_softmax(1), reduction='batchmean', log_target=True
    )
    return temperature**2 * found


def _module(network: nn.Module, name: str, option: str) -> nn.Module:
    try:
        return network.get_submodule(name)
    except AttributeError as error:
        known = ', '.join(repr(child) for child, _ in network.named_children())
        raise UsageError(
            f'Distillation: {option}: {type(network).__name__} has no part {name!r}; it has {known}'
        ) from error
