# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .collect import GateCollectorHook, concatenate, openness
from .runs import FIGURES, Run, read_figures, vary
from .tradeoff import Point, average, draw, markdown_table, point_of, task_metric, write

__all__ = [
    'FIGURES',
    'GateCollectorHook',
    'Point',
    'Run',
    'average',
    'concatenate',
    'draw',
    'markdown_table',
    'openness',
    'point_of',
    'read_figures',
    'task_metric',
    'vary',
    'write',
]
