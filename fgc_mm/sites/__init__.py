# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .attach import Gates, attach
from .find import Found, find_sites
from .gate import gate
from .site import End, Refusal, Scale, Site

__all__ = ['End', 'Found', 'Gates', 'Refusal', 'Scale', 'Site', 'attach', 'find_sites', 'gate']
