# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a checkpoint may be made of, and an unpickler that makes nothing else."""

from __future__ import annotations

import collections
import functools
import importlib
import io
import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import Any

import numpy as np
import torch
from mmengine.logging import HistoryBuffer
from mmengine.optim import OneCycleParamScheduler
from torch import _weights_only_unpickler


@functools.lru_cache(maxsize=1)
def safe_types() -> dict[str, Any]:
    """Everything besides torch's own that checkpoints of mmengine are made of.

    Whatever is here can be called by a file with arguments of its choice, so nothing is
    that imports, opens, evaluates or looks attributes up. Buffers of the log and OneCycleLR
    name their methods by ``getattr``, which leads from any function to everything Python
    can do: here it finds these methods only (mmengine's own list has the real one).
    """
    package = 'numpy._core' if hasattr(np, '_core') else 'numpy.core'
    multiarray = importlib.import_module(f'{package}.multiarray')
    types: dict[str, Any] = {
        'mmengine.logging.history_buffer.HistoryBuffer': HistoryBuffer,
        'collections.OrderedDict': collections.OrderedDict,
        'collections.Counter': collections.Counter,  # milestones of MultiStepLR
        'collections.defaultdict': collections.defaultdict,  # state of optimizers
        'builtins.getattr': _method,
        'mmengine.optim.scheduler.param_scheduler.OneCycleParamScheduler': _OneCycle,
        'builtins.dict': dict,
        'builtins.list': list,
        'builtins.set': set,
        'builtins.frozenset': frozenset,
        'builtins.slice': slice,
        'builtins.range': range,
        'builtins.complex': complex,
        'builtins.bytearray': bytearray,
        'torch.device': torch.device,  # not on the list of torch 2.1
        'numpy.ndarray': np.ndarray,
        'numpy.dtype': np.dtype,
    }
    for core in ('numpy.core', 'numpy._core'):  # NumPy 1 and 2 write different names
        types[f'{core}.multiarray._reconstruct'] = multiarray._reconstruct
        types[f'{core}.multiarray.scalar'] = multiarray.scalar
    return types


class UnsafePickleError(pickle.UnpicklingError):
    """A file names what is not on the list."""

    def __init__(self, name: str) -> None:
        super().__init__(f'GLOBAL {name} is not allowed')
        self.name = name


class _OneCycle:
    """Stands for the scheduler, which a file must not be able to make."""

    _annealing_cos = OneCycleParamScheduler._annealing_cos
    _annealing_linear = OneCycleParamScheduler._annealing_linear


_METHODS = {
    HistoryBuffer: ('min', 'max', 'current', 'mean'),
    _OneCycle: ('_annealing_cos', '_annealing_linear'),
}


def _method(owner: Any, name: Any) -> Any:
    """``getattr``, for the methods that checkpoints refer to."""
    if not isinstance(owner, type) or name not in _METHODS.get(owner, ()):
        label = getattr(owner, '__name__', type(owner).__name__)
        raise UnsafePickleError(f'getattr({label},{name})')
    return getattr(owner, name)


_build: Any = pickle._Unpickler.dispatch[pickle.BUILD[0]]  # type: ignore[attr-defined]


class RestrictedUnpickler(pickle._Unpickler):  # type: ignore[name-defined]
    """Python's own unpickler, for the list of :func:`safe_types` and torch's."""

    dispatch = dict(pickle._Unpickler.dispatch)  # type: ignore[attr-defined]

    def find_class(self, module: str, name: str) -> Any:
        # torch writes the names of Python 2
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        full = f'{module}.{name}'
        torch_own = _weights_only_unpickler._get_allowed_globals()
        for known in (torch_own, safe_types()):
            if full in known:
                return known[full]
        if full == '_codecs.encode':
            return _encode
        raise UnsafePickleError(full)

    def get_extension(self, code: int) -> None:
        raise UnsafePickleError(f'extension {code}')

    def load_build(self) -> None:
        instance = self.stack[-2]  # type: ignore[attr-defined]
        known = type(instance) in (torch.Tensor, torch.nn.Parameter, *safe_types().values())
        # Every dtype is of a class of its own; those of numbers and text.
        if not known and not (isinstance(instance, np.dtype) and instance.kind in 'biufcSU'):
            raise UnsafePickleError(f'the state of a {type(instance).__name__}')
        _build(self)

    dispatch[pickle.BUILD[0]] = load_build  # type: ignore[assignment]


def _encode(text: str, encoding: str) -> bytes:
    """``_codecs.encode`` as bytes are written with it, and no other codec."""
    if encoding != 'latin1':
        raise UnsafePickleError(f'_codecs.encode to {encoding}')
    return text.encode('latin1')


Unpickler = RestrictedUnpickler
"""With :func:`load`, what ``torch.load`` looks for in its ``pickle_module``."""


def load(file: io.IOBase, **options: Any) -> Any:
    """``pickle.load`` by the restricted unpickler."""
    return RestrictedUnpickler(file, **options).load()
