# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What a dense checkpoint does not have: gates are new, anything else is a mistake."""

from __future__ import annotations

import logging

import torch.nn as nn
from mmengine.logging import print_log

from ..errors import UsageError
from .utils import find_gates


def report_missing(network: nn.Module, incompatible: tuple[list[str], list[str]]) -> None:
    """Post hook of loading: count the missing keys, gates apart.

    Args:
        network (nn.Module): What was loaded.
        incompatible (tuple): Its missing and unexpected keys; those of gates are taken out.

    Raises:
        UsageError: If the checkpoint has none of the network's own keys.
    """
    name, missing = type(network).__name__, incompatible[0]
    gates = [f'{gate}.' for gate in find_gates(network)]
    new = [key for key in missing if key.startswith(tuple(gates))]
    # Taken out of mmengine's own report, which would list them all as missing.
    missing[:] = [key for key in missing if key not in set(new)]
    lost = [key for key in missing if not key.endswith('num_batches_tracked')]
    own = [key for key in network.state_dict() if not key.startswith(tuple(gates))]
    total = sum(not key.endswith('num_batches_tracked') for key in own)
    if lost and len(lost) == total:
        raise UsageError(
            f"{name}: the checkpoint has none of the network's {total} keys, such as {lost[0]!r}; "
            "does init_cfg need a prefix, such as prefix='backbone.'?"
        )
    if new:
        keys = sum(not key.endswith('num_batches_tracked') for key in new)
        count = sum(any(key.startswith(gate) for key in new) for gate in gates)
        print_log(
            f'{name}: {keys} keys of {count} gates are new, not in the checkpoint',
            logger='current',
        )
    if lost:
        print_log(
            f'{name}: {len(lost)} of {total} keys are missing in the checkpoint and keep their '
            f'initial values (gates not counted): {", ".join(lost)}',
            logger='current',
            level=logging.WARNING,
        )
