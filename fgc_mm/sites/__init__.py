# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .container import Gates
from .find import find_sites
from .finder import Found
from .forward_hooks import gate_sites
from .gate import gate
from .site import End, Refusal, Scale, Site

__all__ = ['End', 'Found', 'Gates', 'Refusal', 'Scale', 'Site', 'find_sites', 'gate', 'gate_sites']
