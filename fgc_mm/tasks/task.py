# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What is true of networks and data of any task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Optional

import numpy as np

from ..errors import UsageError
from .exported import Part

Predict = Callable[[str], Any]
"""From the file of a picture to its data sample."""


class Task:
    """What is true of networks and data that belong to no task known here.

    Attributes:
        name (str): What it is called in files.
        scope (str): The package its classes come from, ``default_scope`` of its configs.
        visualization_hook (str): Name of the hook that draws its predictions.
        parts (tuple): What its models have: names of attributes, in several alternatives.
        heads (tuple[str, ...]): Parts of a model whose ``num_classes`` is that of the data.
        annotation_field (str): Where a data sample has its classes.
        one_class (bool): Whether a picture has just one, and ``annotation_field`` is its number.
        objects_name (str): What is counted in a picture that has several.
        label_maps (bool): Whether annotations are pictures of class numbers.
        formats (dict[str, str]): ``package.Class`` of a dataset -> form of its files, as
            :mod:`fgc_mm.datasets` can check it: 'coco', 'voc', 'folders', 'label_maps' or 'cifar'.
        metrics (tuple[str, ...]): Names of metrics; a table is about the first there is.
        falling (tuple[str, ...]): Those of them where less is better.
        index_names (dict): Metric -> its name in the model index, and what to multiply the
            figure there with.
        agreement_of (str): What :meth:`agreement` counts, in words.
    """

    name: str = ''
    scope: str = ''
    visualization_hook: str = ''
    parts: tuple[tuple[str, ...], ...] = ()
    heads: tuple[str, ...] = ()
    annotation_field: str = ''
    one_class: bool = False
    objects_name: str = 'objects'
    label_maps: bool = False
    formats: Mapping[str, str] = {}
    metrics: tuple[str, ...] = ()
    falling: tuple[str, ...] = ()
    index_names: Mapping[str, tuple[str, float]] = {}
    agreement_of: str = ''

    def fill_loader(self, loader: MutableMapping) -> None:
        """Set what the package's own tools set in the config of a dataloader."""

    def draw(self, cfg: Any, hook: MutableMapping, show_dir: Optional[str]) -> None:
        """Turn the visualization hook on.

        Args:
            cfg (Config): The config.
            hook (MutableMapping): The hook in it.
            show_dir (str, optional): Where pictures go. None: to no file.
        """
        hook.update(draw=True)
        if show_dir:
            cfg.visualizer.save_dir = show_dir
            backends = cfg.visualizer.setdefault('vis_backends', [])
            if not backends:
                backends.append(dict(type='LocalVisBackend'))

    def inferencer(
        self, cfg: Any, checkpoint: str, out_dir: str, device: str
    ) -> tuple[Any, Predict]:
        """The model, and a function that predicts a picture and draws the result.

        Args:
            cfg (Config): The config.
            checkpoint (str): The weights.
            out_dir (str): Pictures go to ``vis`` in it.
            device (str): Where to run.

        Raises:
            UsageError: If the task has none.
        """
        from . import TASKS

        able = [t.scope for t in TASKS.values() if type(t).inferencer is not Task.inferencer]
        raise UsageError(
            f'default_scope={cfg.get("default_scope")!r} has no inferencer here; it must be one of '
            f'{", ".join(map(repr, able))}'
        )

    def annotates(self, sample: Any) -> bool:
        """Whether a data sample has classes in the way of this task."""
        field, _, inner = self.annotation_field.partition('.')
        return bool(field) and field in sample and (not inner or inner in sample.get(field))

    def annotation(self, sample: Any) -> tuple[np.ndarray, int]:
        """How much of each class a picture has, and how many objects."""
        raise NotImplementedError

    def made_up(self, model: Any, count: int, height: int, width: int) -> Optional[list]:
        """Data samples with annotations that nobody made, for a pass that shows which layers run.

        Returns:
            list, optional: None if models of the task run on pictures alone.
        """
        return None

    def undemanding(self, model: Any) -> None:
        """Have a model predict a few things whatever it sees, so that all of its layers run."""

    def exported(self, model: Any) -> Optional[Part]:
        """What a model of the task is exported as.

        Returns:
            Part, optional: None if it has no outputs that a graph can hold.
        """
        return None

    def agreement(self, ours: Any, theirs: Any) -> tuple[float, float]:
        """How far two predictions for a picture are the same: how many parts agree, of how many."""
        return 0.0, 0.0

    def derived(self, metric: str, value: Any) -> dict[str, float]:
        """Figures as papers give them, from one of the package."""
        return {}

    def unit(self, metric: str) -> str:
        """What a metric is counted in: '%', '0 to 1', or '' if it is none of this task's."""
        return ''
