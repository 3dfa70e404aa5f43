# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .find import Found, find_sites
from .site import End, Refusal, Site

__all__ = ['End', 'Found', 'Refusal', 'Site', 'find_sites']
