# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""From the config of a gate to the gate."""

from __future__ import annotations

from typing import Any

from mmengine.registry import MODELS

from ..errors import UsageError
from .base import Gate


def check_gate(cfg: Any) -> None:
    """See that a config is one of a gate; the error names the gates there are."""
    if not isinstance(cfg, dict) or 'type' not in cfg:
        raise UsageError(
            f"gate={cfg!r} must be a dict such as dict(type='BinConcreteGate'), or None for the "
            'dense network'
        )
    with MODELS.switch_scope_and_registry(cfg.get('_scope_')) as registry:
        kind = registry.get(cfg['type']) if isinstance(cfg['type'], str) else cfg['type']
    if not _is_gate(kind):
        known = [name for name, cls in MODELS.module_dict.items() if _is_gate(cls)]
        problem = 'is not registered' if kind is None else 'is no gate'
        raise UsageError(f'gate: type={cfg["type"]!r} {problem}; choose from {", ".join(known)}')


def build_gate(cfg: dict, in_channels: int, channels: int) -> Gate:
    """Build the gate of a config, which reads ``in_channels`` and decides over ``channels``.

    Raises:
        UsageError: If the config is not that of a gate, or has other widths.
    """
    check_gate(cfg)
    widths = dict(in_channels=in_channels, channels=channels)
    for key, width in widths.items():
        if cfg.get(key, width) != width:
            raise UsageError(
                f'gate: {key}={cfg[key]} does not fit its place, which needs {width}; leave it '
                'out, it is filled in'
            )
    return MODELS.build({**cfg, **widths})


def _is_gate(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, Gate)
