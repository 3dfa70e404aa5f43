# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .base import Gate
from .bin_concrete import BinConcreteGate
from .build import build_gate, check_gate
from .fbs import FBSGate
from .record import GateRecord
from .static import StaticGate
from .utils import (
    find_gates,
    force_gates,
    forget_records,
    gated_blocks,
    match_blocks,
    records_of,
    select_blocks,
    set_threshold,
)

__all__ = [
    'BinConcreteGate',
    'FBSGate',
    'Gate',
    'GateRecord',
    'StaticGate',
    'build_gate',
    'check_gate',
    'find_gates',
    'force_gates',
    'forget_records',
    'gated_blocks',
    'match_blocks',
    'records_of',
    'select_blocks',
    'set_threshold',
]
