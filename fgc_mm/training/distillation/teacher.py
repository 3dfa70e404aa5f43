# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The dense network that teaches: made from the gated one, filled from files."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
from mmengine.dist import broadcast, get_world_size
from mmengine.runner import CheckpointLoader

from ...errors import CheckpointError
from ...sites import Gates
from ...sites.forward_hooks import remove_gates


def dense_copy(network: nn.Module) -> nn.Module:
    """A copy of a network, without its gates."""
    dense = copy.deepcopy(network)
    for name, module in list(dense.named_modules()):
        if isinstance(module, Gates):
            remove_gates(dense.get_submodule(name.rpartition('.')[0]))
    return dense


def read_weights(path: str) -> Mapping[str, Any]:
    """The weights in the file of a checkpoint."""
    try:
        loaded = CheckpointLoader.load_checkpoint(path, map_location='cpu', logger='silent')
    except FileNotFoundError as error:
        raise CheckpointError(f'teacher={path!r} does not exist') from error
    except Exception as error:  # pickle's own errors share no base class
        raise CheckpointError(
            f'teacher={path!r} cannot be read as a checkpoint: {error}'
        ) from error
    state = loaded.get('state_dict', loaded) if isinstance(loaded, Mapping) else None
    if not isinstance(state, Mapping):
        raise CheckpointError(f'teacher={path!r} holds no weights but a {type(loaded).__name__}')
    return {key.removeprefix('module.'): value for key, value in state.items()}


def fill(teacher: nn.Module, weights: Mapping[str, Any], part: str, name: str) -> None:
    """Load weights into a teacher; other parts of a model, and gates, may be among them.

    Args:
        teacher (nn.Module): The network.
        weights (Mapping): Of the network, or of a model it is a part of.
        part (str): Name of the network in that model.
        name (str): What the weights are called in errors.

    Raises:
        CheckpointError: If not all weights of the network are there.
    """
    front = f'{part}.' if part else ''
    if front and any(key.startswith(front) for key in weights):
        weights = {k.removeprefix(front): v for k, v in weights.items() if k.startswith(front)}
    own = teacher.state_dict()
    wrong = [
        key
        for key, value in own.items()
        if getattr(weights.get(key), 'shape', None) != value.shape
        and not (key not in weights and key.endswith('num_batches_tracked'))
    ]
    if wrong:
        found = weights.get(wrong[0])
        shape = 'missing' if found is None else f'{tuple(found.shape)}'
        raise CheckpointError(
            f'{name} does not fit the {type(teacher).__name__} that is taught: {len(wrong)} of its '
            f'{len(own)} weights are missing or of another shape, such as {wrong[0]}, '
            f'{tuple(own[wrong[0]].shape)}, which is {shape} there'
        )
    teacher.load_state_dict({key: weights.get(key, value) for key, value in own.items()})


def spread(teacher: nn.Module) -> None:
    """Have the first process's teacher in all processes."""
    if get_world_size() > 1:
        for value in teacher.state_dict().values():
            broadcast(value)


def fingerprint(network: nn.Module) -> str:
    """What tells the weights of a network from all others, wherever they lie."""
    digest = hashlib.sha256()
    for name, value in sorted(network.state_dict().items()):
        digest.update(f'{name} {tuple(value.shape)} {value.dtype}'.encode())
        flat = value.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()
