# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Finding NaN and Inf, and where they come from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Optional

import torch
import torch.nn as nn
from torch import Tensor

from ..module_hooks import Attachments, forward_argument


def all_finite(tensors: Iterable[Tensor]) -> Tensor:
    """Whether no tensor has NaN or Inf, as a tensor: nothing waits for the device."""
    given = [t.detach() for t in tensors if t.is_floating_point() and t.numel()]
    if not given:
        return torch.tensor(True)
    # The largest absolute value is NaN or Inf if any is, and no sum overflows.
    device = given[0].device
    peaks = [torch.linalg.vector_norm(t, float('inf')).to(device, torch.float32) for t in given]
    return torch.isfinite(torch.stack(peaks)).all()


def not_finite(named: Iterable[tuple[str, Tensor]]) -> list[str]:
    """The names of tensors with NaN or Inf."""
    return [name for name, tensor in named if not bool(all_finite([tensor]))]


def loss_terms(losses: Mapping[str, Any]) -> dict[str, Tensor]:
    """What ``parse_losses`` sums up, each term by its name."""
    terms = {}
    for name, value in losses.items():
        parts = value if isinstance(value, (list, tuple)) else [value]
        tensors = [part.detach().flatten() for part in parts if isinstance(part, Tensor)]
        if 'loss' in name and tensors:
            terms[name] = torch.cat([t.to(tensors[0]) for t in tensors])
    return terms


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


@torch.no_grad()
def first_layer(model: nn.Module, args: tuple, kwargs: dict) -> Optional[str]:
    """Run a pass once more and name the first layer that makes NaN or Inf, with the pictures.

    The model's own forward hooks are not called; its norms see the batch again.
    """
    found: list[tuple[nn.Module, Tensor]] = []

    def look(module: nn.Module, _: Any, out: Any) -> None:
        if not found:
            bad = (tensor for tensor in tensors_in(out) if not bool(all_finite([tensor])))
            found.extend((module, tensor) for tensor in bad)

    attached = Attachments()
    names = {module: name for name, module in model.named_modules() if module is not model}
    for module in names:
        attached.after(module, look)
    try:
        with contextlib.suppress(Exception):  # what fails on NaN later on does not matter
            model.forward(*args, **kwargs)
    finally:
        attached.remove()
    if not found:
        return None
    layer, out = found[0]
    pictures = bad_pictures(out, forward_argument('data_samples', args, kwargs))
    return f'{names[layer]} ({type(layer).__name__})' + (f', of {pictures}' if pictures else '')


def bad_pictures(rows: Any, data_samples: Any) -> str:
    """The files of the pictures whose rows have NaN or Inf, where that can be told."""
    if not isinstance(data_samples, (list, tuple)) or not isinstance(rows, (Tensor, list, tuple)):
        return ''
    if len(rows) != len(data_samples):
        return ''
    bad = [i for i, row in enumerate(rows) if not bool(all_finite(tensors_in(row)))]
    if len(bad) == len(data_samples) > 1:
        return 'all pictures of the batch'
    return some(
        [str(getattr(data_samples[i], 'img_path', f'number {i} of the batch')) for i in bad]
    )


def some(names: list[str]) -> str:
    """The first few."""
    more = f' and {len(names) - 3} more' if len(names) > 3 else ''
    return ', '.join(names[:3]) + more
