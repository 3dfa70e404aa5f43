# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Making a checkpoint small and safe to hand out."""

from __future__ import annotations

import hashlib
import io
import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union

import numpy as np
import torch
from mmengine.runner import CheckpointLoader
from torch import Tensor

from ...errors import CheckpointError, UsageError, in_context
from ...files import write_files

_META = {'cfg', 'fgc_mm', 'dataset_meta', 'epoch', 'iter', 'seed'}
_META |= {'experiment_name', 'mmengine_version'}


def published(checkpoint: Mapping[str, Any], no_ema: bool = False) -> dict[str, Any]:
    """What of a checkpoint, or of plain weights, is needed to use the network: ``meta`` and
    ``state_dict``, of plain types, so that it loads with ``weights_only=True``.

    The weights stay, and of the meta information what inferencers and
    ``load_from`` read: the config, the classes and palette, where the training
    stood. Optimizer, schedulers, message hub, random states and what hooks
    have added go. The averaged weights of an ``EMAHook`` are in
    ``state_dict`` already (the hook swaps them in when it saves), so
    ``ema_state_dict``, the weights as they were trained, goes too, unless ``no_ema`` asks for it.
    """
    given = checkpoint.get('state_dict', checkpoint)
    weights = OrderedDict((key, value) for key, value in given.items() if isinstance(value, Tensor))
    if not weights:
        raise CheckpointError('it holds no weights: neither a `state_dict` nor tensors of its own')
    if no_ema:
        if 'ema_state_dict' not in checkpoint:
            raise UsageError('--no-ema: it has no `ema_state_dict`, nothing was averaged')
        for key, value in checkpoint['ema_state_dict'].items():
            if key.startswith('module.'):
                weights[key[len('module.') :]] = value
    # A view would take the whole storage it looks at along.
    state = OrderedDict((key, value.detach().cpu().clone()) for key, value in weights.items())
    state._metadata = getattr(given, '_metadata', OrderedDict())  # type: ignore[attr-defined]
    meta = checkpoint.get('meta') if 'state_dict' in checkpoint else None
    kept = {key: _plain(value) for key, value in (meta or {}).items() if key in _META}
    return dict(meta=kept, state_dict=state)


def publish(source: Union[str, Path], target: Union[str, Path], no_ema: bool = False) -> Path:
    """Write a checkpoint for publication.

    Args:
        source (str | Path): The checkpoint. Outside of the tools one made by somebody else
            can run code: publish your own, or see
            :func:`~fgc_mm.runtime.untrusted.loading.guarded_loading`.
        target (str | Path): Name of the new file; the first eight digits of its
            SHA-256 are added, ``NAME-1a2b3c4d.pth``.
        no_ema (bool): Take the weights as they were trained instead of the averaged ones.
            Defaults to False.
    """
    target = Path(target)
    # Not with_suffix: names like resnet18_lr0.1 have dots.
    stem = re.sub(r'\.pth$', '', target.name)
    # The digits of an earlier publication are not those of this file.
    stem = re.sub(r'-[0-9a-f]{8}$', '', stem)
    try:
        checkpoint = CheckpointLoader.load_checkpoint(
            str(source), map_location='cpu', logger='silent'
        )
    except FileNotFoundError:
        raise
    except Exception as error:
        raise CheckpointError(f'{source} cannot be read as a checkpoint: {error}') from error
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f'{source} holds a {type(checkpoint).__name__}, not a checkpoint')
    with in_context(str(source)):
        content = published(checkpoint, no_ema)
    buffer = io.BytesIO()
    torch.save(content, buffer)
    digits = hashlib.sha256(buffer.getbuffer()).hexdigest()[:8]
    final = target.with_name(f'{stem}-{digits}.pth')
    write_files({final: buffer.getbuffer()})
    return final


def _plain(value: Any) -> Any:
    """The same out of dicts, lists, tuples, numbers and strings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        items = [_plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if value is None or isinstance(value, (bool, int, float, str, Tensor)):
        return value
    return str(value)
