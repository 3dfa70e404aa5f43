# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""From a trained network and pictures to a gated network, by one call."""

from .report import format_report
from .run import GatePlan, gate_checkpoint

__all__ = ['GatePlan', 'format_report', 'gate_checkpoint']
