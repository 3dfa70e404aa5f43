# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a dense checkpoint does not have: gates are new, anything else is a mistake."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch.nn as nn
from mmengine.logging import print_log

from ..errors import UsageError
from .utils import find_gates


def report_missing(network: nn.Module, incompatible: tuple[list[str], list[str]]) -> None:
    """Post hook of loading: tell of missing keys, and take those of gates out of mmengine's own
    report, which would list them all.

    Raises:
        UsageError: If the checkpoint has none of the network's own keys.
    """
    name, missing = type(network).__name__, incompatible[0]
    gates = tuple(f'{gate}.' for gate in find_gates(network))
    new = _counted(key for key in missing if key.startswith(gates))
    missing[:] = [key for key in missing if not key.startswith(gates)]
    lost = _counted(missing)
    total = len(_counted(key for key in network.state_dict() if not key.startswith(gates)))
    if lost and len(lost) == total:
        raise UsageError(
            f"{name}: the checkpoint has none of the network's {total} keys, such as {lost[0]!r}; "
            "does init_cfg need a prefix, such as prefix='backbone.'?"
        )
    if new:
        count = sum(any(key.startswith(gate) for key in new) for gate in gates)
        print_log(
            f'{name}: {len(new)} keys of {count} gates are new, not in the checkpoint',
            logger='current',
        )
    if lost:
        print_log(
            f'{name}: {len(lost)} of {total} keys are missing in the checkpoint and keep their '
            f'initial values (gates not counted): {", ".join(lost)}',
            logger='current',
            level=logging.WARNING,
        )


def _counted(keys: Iterable[str]) -> list[str]:
    """Keys that every checkpoint has: files older than PyTorch 0.4.1 do not count batches."""
    return [key for key in keys if not key.endswith('num_batches_tracked')]
