# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Loading checkpoints other people made without running what is in them.

Whatever loads a checkpoint, mmengine's loader for all its addresses, ``torch.hub``, the task
packages and this one, does it by ``torch.load`` in the end. While :func:`guarded_loading` is
active, that is a function that makes nothing but plain data, whatever it is asked for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import serialization

from ...errors import CheckpointError
from ..checkpoints.file import unusual_format
from . import safe_types
from .config_text import find_code

FLAG = '--trust-checkpoint'
_FORCED = 'TORCH_FORCE_WEIGHTS_ONLY_LOAD'
_torch_load = serialization.load
_trusted = False


@contextlib.contextmanager
def guarded_loading(trust: bool = False) -> Iterator[None]:
    """Let ``torch.load`` of this process, whoever calls it, refuse files that could run code.

    The tools run inside; who imports fgc_mm keeps torch's and mmengine's own ways unless
    this is asked for.

    Args:
        trust (bool): Load files as they are all the same: ``--trust-checkpoint``.
            Defaults to False.
    """
    global _trusted
    before, trusted = (torch.load, serialization.load), _trusted
    torch.load = serialization.load = _load  # type: ignore[assignment]
    _trusted = trust
    # The list is enforced by an unpickler of ours: before torch 2.6 `weights_only=True` could be
    # made to run code. This variable has torch refuse every other unpickler, so it is set aside.
    forced = os.environ.pop(_FORCED, None)
    try:
        yield
    finally:
        torch.load, serialization.load = before  # type: ignore[assignment]
        _trusted = trusted
        if forced is not None:
            os.environ[_FORCED] = forced


def _load(f: Any, map_location: Any = None, pickle_module: Any = None, **options: Any) -> Any:
    """``torch.load``, guarded."""
    is_path = isinstance(f, (str, os.PathLike))
    name = os.fspath(f) if is_path else getattr(f, 'name', 'the file')
    weights_only = bool(options.pop('weights_only', None))
    if _trusted:
        return _torch_load(f, map_location, pickle_module, weights_only=weights_only, **options)
    with open(f, 'rb') if is_path else contextlib.nullcontext(f) as file:
        what = unusual_format(file)
    if what is not None:
        raise CheckpointError(_message(name, what))
    try:
        content = _torch_load(f, map_location, safe_types, weights_only=False, **options)
    except safe_types.UnsafePickleError as error:
        raise CheckpointError(_message(name, f'a pickle that names {error.name}')) from None
    except Exception as error:  # a damaged file fails in any way
        if isinstance(error, (OSError, MemoryError)) and error.args[:1] != (errno.EINVAL,):
            raise  # torch says that an argument is invalid of a file cut short
        if type(error) is RuntimeError and 'PytorchStreamReader' not in str(error):
            raise  # such as weights for a GPU that is not there
        reason = 'torch.save has not written it, or not to its end'
        if isinstance(error, (RuntimeError, pickle.UnpicklingError)):
            reason = str(error).strip().partition('\n')[0]
        raise CheckpointError(f'{name} is damaged or no checkpoint: {reason}') from None
    _check_config(content, name)
    return content


def _message(name: str, what: str) -> str:
    return (
        f'{name} was not loaded: it holds {what}, which no weights are made of and which could run '
        'code on this machine. Ask for a file with weights alone (tools/publish.py makes one), or '
        f'give {FLAG} if you trust whoever made it (docs/security.md)'
    )


def _check_config(content: Any, name: str) -> None:
    """Refuse code in the config a checkpoint brings along.

    Inferencers run ``meta['cfg']`` if they are given no config. Resuming runs ``meta['config']``,
    which mmcv wrote, to compare numbers of GPUs: nothing is left of that.
    """
    meta = content.get('meta') if isinstance(content, dict) else None
    hub = content.get('message_hub') if isinstance(content, dict) else None
    info = hub.get('runtime_info') if isinstance(hub, dict) else None
    for place, holder, key in (
        ("meta['config']", meta, 'config'),
        ("meta['cfg']", meta, 'cfg'),
        ("message_hub['runtime_info']['cfg']", info, 'cfg'),
    ):
        if not isinstance(holder, dict) or not isinstance(holder.get(key), str):
            continue
        found = find_code(holder[key])
        if found is not None:
            raise CheckpointError(
                f'{name} was not loaded: the config in its {place} is Python code ({found}) that '
                f'resuming or inference would run on this machine. Give {FLAG} if you trust '
                'whoever made it (docs/security.md)'
            )
        if key == 'config':
            holder[key] = ''
