# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .collect import GateCollectorHook, concatenate, openness

__all__ = ['GateCollectorHook', 'concatenate', 'openness']
