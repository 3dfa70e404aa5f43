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
import re
from collections.abc import Iterator
from typing import Any

import torch
from mmengine.utils import digit_version
from torch import serialization

from ...errors import CheckpointError
from ..checkpoints.file import unusual_format
from . import safe_types
from .config_text import find_code, keep_assignment

FLAG = '--trust-checkpoint'
_NAMED = re.compile(r'GLOBAL (\S+)|unrecognized function (.+)|allowlisted .* but got (.+)')
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
    try:
        yield
    finally:
        torch.load, serialization.load = before  # type: ignore[assignment]
        _trusted = trusted


def _load(f: Any, map_location: Any = None, pickle_module: Any = None, **options: Any) -> Any:
    """``torch.load``, guarded."""
    name = os.fspath(f) if isinstance(f, (str, os.PathLike)) else getattr(f, 'name', 'the file')
    weights_only = options.pop('weights_only', None)
    if _trusted:
        options.update(pickle_module=pickle_module, weights_only=bool(weights_only))
        return _torch_load(f, map_location, **options)
    is_path = isinstance(f, (str, os.PathLike))
    with open(f, 'rb') if is_path else contextlib.nullcontext(f) as file:
        what = unusual_format(file)
    if what is not None:
        raise CheckpointError(_message(name, what))
    try:
        content = _load_plain(f, map_location, options)
    except safe_types.UnsafePickleError as error:
        raise CheckpointError(_message(name, f'a pickle that names {error.name}')) from None
    except Exception as error:  # a damaged file fails in any way
        if isinstance(error, (OSError, MemoryError)) and error.args[:1] != (errno.EINVAL,):
            raise  # torch says that an argument is invalid of a file cut short
        found = _NAMED.search(str(error))
        if found is not None:
            what = next(filter(None, found.groups()))
            raise CheckpointError(_message(name, f'a pickle that names {what}')) from None
        if type(error) is RuntimeError and 'PytorchStreamReader' not in str(error):
            raise  # such as weights for a GPU that is not there
        # Not as torch says it, which recommends to load the file unsafely.
        reason = 'torch.save has not written it, or not to its end'
        if isinstance(error, (RuntimeError, pickle.UnpicklingError)):
            reason = str(error).rpartition('error: ')[2].strip().partition('\n')[0]
        raise CheckpointError(f'{name} is damaged or no checkpoint: {reason}') from None
    _check_config(content, name)
    return content


def _load_plain(f: Any, map_location: Any, options: dict[str, Any]) -> Any:
    if digit_version(torch.__version__) < digit_version('2.6.0'):
        return _torch_load(f, map_location, pickle_module=safe_types, weights_only=False, **options)
    # mmengine adds a list of its own before it calls, and not all of that is safe.
    others = serialization.get_safe_globals()
    serialization.clear_safe_globals()
    serialization.add_safe_globals([(kind, n) for n, kind in safe_types.safe_types().items()])
    try:
        return _torch_load(f, map_location, weights_only=True, **options)
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(others)


def _message(name: str, what: str) -> str:
    return (
        f'{name} was not loaded: it holds {what}, which no weights are made of and which could run '
        'code on this machine. Ask for a file with weights alone (tools/publish.py makes one), or '
        f'give {FLAG} if you trust whoever made it (docs/security.md)'
    )


def _check_config(content: Any, name: str) -> None:
    """Refuse code in the config a checkpoint brings along, and leave none to run.

    Resuming runs ``meta['config']`` to learn ``gpu_ids``: that is all that is left of it.
    Inferencers run the others if they are given no config.
    """
    if not isinstance(content, dict):
        return
    hub = content.get('message_hub')
    places = {
        "meta['config']": (content.get('meta'), 'config'),
        "meta['cfg']": (content.get('meta'), 'cfg'),
        "message_hub['runtime_info']['cfg']": (
            hub.get('runtime_info') if isinstance(hub, dict) else None,
            'cfg',
        ),
    }
    for place, (holder, key) in places.items():
        if not isinstance(holder, dict) or not isinstance(holder.get(key), str):
            continue
        text = holder[key]
        found = find_code(text)
        if found is not None:
            raise CheckpointError(
                f'{name} was not loaded: the config in its {place} is Python code ({found}) that '
                f'resuming or inference would run on this machine. Give {FLAG} if you trust '
                'whoever made it (docs/security.md)'
            )
        if key == 'config':
            holder[key] = keep_assignment(text, 'gpu_ids')
