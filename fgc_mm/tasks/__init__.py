# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What differs between detection, segmentation and classification: one adapter each.

Everything else of fgc_mm asks these. One more task is a subclass of :class:`Task`, made known by
:func:`register_task`: here, or in a module of your own that the config imports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional

from .kinds import Classification, Detection, Segmentation
from .task import Predict, Task

__all__ = [
    'TASKS',
    'Classification',
    'Detection',
    'Predict',
    'Segmentation',
    'Task',
    'annotation_fields',
    'class_fields',
    'file_format',
    'main_metrics',
    'register_task',
    'scopes',
    'task_named',
    'task_of',
    'task_of_dataset',
    'task_of_hook',
    'task_of_model',
    'task_of_sample',
]

TASKS: dict[str, Task] = {}
"""Name -> task."""


def register_task(task: Task) -> None:
    """Make a task known, in place of one of the same name."""
    TASKS[task.name] = task


for _task in (Detection(), Segmentation(), Classification()):
    register_task(_task)


def task_named(name: Optional[str]) -> Task:
    """The task of that name; if it is not known, what is true of any."""
    return TASKS.get(name or '', Task())


def task_of(cfg: Mapping) -> Task:
    """The task of a config, by its ``default_scope``."""
    return _first(lambda task: task.scope == cfg.get('default_scope'))


def task_of_hook(name: str) -> Task:
    """The task whose predictions a visualization hook draws."""
    return _first(lambda task: task.visualization_hook == name.rpartition('.')[2])


def task_of_model(model: Any) -> Task:
    """The task of a model, by the parts it has."""

    def has(names: tuple[str, ...]) -> bool:
        return all(getattr(model, name, None) is not None for name in names)

    return _first(lambda task: any(map(has, task.parts)))


def task_of_dataset(dataset: Any) -> Task:
    """The task of a dataset, by the package its class, or one that derives from, is of."""
    scopes = {task.scope: task for task in TASKS.values()}
    packages = (base.__module__.partition('.')[0] for base in type(dataset).__mro__)
    return next((scopes[package] for package in packages if package in scopes), Task())


def task_of_sample(sample: Any) -> Task:
    """The task of a data sample, by its annotation."""
    return _first(lambda task: task.annotates(sample))


def _first(fits: Callable[[Task], bool]) -> Task:
    return next(filter(fits, _latest_first()), Task())


def _latest_first() -> list[Task]:
    """A task that is added comes before the three, whose classes it may build upon."""
    return [*reversed(TASKS.values())]


def scopes() -> list[str]:
    """The scopes of all tasks."""
    return [task.scope for task in TASKS.values()]


def annotation_fields() -> list[str]:
    """Where data samples have their classes."""
    return [task.annotation_field for task in _latest_first() if task.annotation_field]


def class_fields() -> list[str]:
    """Where annotations and data samples have the class of a picture that has just one."""
    return [task.annotation_field for task in TASKS.values() if task.one_class]


def file_format(cls: type) -> Optional[str]:
    """The form of the files that a class of datasets reads, None if it is not known."""
    name = f'{cls.__module__.partition(".")[0]}.{cls.__name__}'
    return next((task.formats[name] for task in TASKS.values() if name in task.formats), None)


def main_metrics(rising: bool = False) -> list[str]:
    """The metrics of all tasks; a table is about the first that a run has."""
    return [
        metric
        for task in TASKS.values()
        for metric in task.metrics
        if not (rising and metric in task.falling)
    ]
