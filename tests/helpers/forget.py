# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Each run is a process of its own to mmengine, which keeps what it has made; a test run is not."""

from mmengine.utils import ManagerMixin


def forget_runs(kind=ManagerMixin):
    """Let loggers, message hubs, visualizers and default scopes of earlier runs go."""
    for child in kind.__subclasses__():
        child._instance_dict.clear()
        forget_runs(child)
