# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What differs between detection, segmentation and classification: one adapter each.

Everything else of fgc_mm asks these. One more task is a subclass of :class:`Task`, made known by
:func:`register_task`: here, or in a module of your own that the config imports. To export its
networks it has an entry in ``MODEL_PARTS`` of :mod:`fgc_mm.inference.export_parts`, too.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Optional

import numpy as np
import torch

from .errors import UsageError

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

    def fill_loader(self, loader: MutableMapping) -> None:
        """Set what the package's own tools set in the config of a dataloader."""

    def draw(self, cfg: Any, hook: MutableMapping, show_dir: Optional[str]) -> None:
        """Turn the visualization hook on."""
        hook.update(draw=True)
        if show_dir:
            cfg.visualizer.save_dir = show_dir
            backends = cfg.visualizer.setdefault('vis_backends', [])
            if not backends:
                backends.append(dict(type='LocalVisBackend'))

    def inferencer(
        self, cfg: Any, checkpoint: str, out_dir: str, device: str
    ) -> tuple[Any, Predict]:
        """The model, and a function that predicts a picture and draws the result."""
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

    def derived(self, metric: str, value: Any) -> dict[str, float]:
        """Figures as papers give them, from one of the package."""
        return {}

    def unit(self, metric: str) -> str:
        """What a metric is counted in: '%', '0 to 1', or '' if it is none of this task's."""
        return ''


class Detection(Task):
    """Of mmdet."""

    name = 'detection'
    scope = 'mmdet'
    visualization_hook = 'DetVisualizationHook'
    parts = (('rpn_head', 'extract_feat'), ('bbox_head', 'extract_feat'))
    heads = ('bbox_head', 'mask_head')
    annotation_field = 'gt_instances.labels'
    formats = {'mmdet.CocoDataset': 'coco', 'mmdet.XMLDataset': 'voc'}
    metrics = ('pascal_voc/mAP', 'coco/bbox_mAP')
    index_names = {'pascal_voc/mAP': ('mAP', 0.01), 'coco/bbox_mAP': ('mAP', 0.01)}

    def draw(self, cfg: Any, hook: MutableMapping, show_dir: Optional[str]) -> None:
        hook.update(draw=True)
        if show_dir:
            # mmdet puts a relative folder under <work_dir>/<timestamp>
            hook.update(test_out_dir=os.path.abspath(show_dir))

    def inferencer(
        self, cfg: Any, checkpoint: str, out_dir: str, device: str
    ) -> tuple[Any, Predict]:
        from mmdet.apis import DetInferencer

        inferencer = DetInferencer(cfg, checkpoint, device=device, show_progress=False)

        def predict(picture: str) -> Any:
            result = inferencer(picture, out_dir=out_dir, return_datasamples=True)
            return result['predictions'][0]

        return inferencer.model, predict

    def annotation(self, sample: Any) -> tuple[np.ndarray, int]:
        labels = sample.gt_instances.labels.cpu().numpy()
        return np.bincount(labels, minlength=1), len(labels)

    def unit(self, metric: str) -> str:
        last = metric.rpartition('/')[2]
        shares = last.startswith('AP') or last.endswith('mAP') or '_mAP_' in last
        return '0 to 1' if shares else ''


class Segmentation(Task):
    """Of mmseg."""

    name = 'segmentation'
    scope = 'mmseg'
    visualization_hook = 'SegVisualizationHook'
    parts = (('decode_head', 'encode_decode'),)
    heads = ('decode_head',)
    annotation_field = 'gt_sem_seg'
    objects_name = 'classes in the picture'
    label_maps = True
    formats = {'mmseg.BaseSegDataset': 'label_maps'}
    metrics = ('mIoU',)
    index_names = {'mIoU': ('mIoU', 1.0), 'pixel_accuracy': ('Pixel Accuracy', 1.0)}

    ignored = 255
    """Value of a label map that stands for no class."""

    def draw(self, cfg: Any, hook: MutableMapping, show_dir: Optional[str]) -> None:
        super().draw(cfg, hook, show_dir)
        hook.update(interval=1)  # that of mmseg 1.2 would draw every 50th batch of a test

    def inferencer(
        self, cfg: Any, checkpoint: str, out_dir: str, device: str
    ) -> tuple[Any, Predict]:
        from mmseg.apis import MMSegInferencer

        inferencer = MMSegInferencer(cfg, checkpoint, device=device)
        inferencer.show_progress = False

        def predict(picture: str) -> Any:
            return inferencer(picture, out_dir=out_dir, return_datasamples=True)

        return inferencer.model, predict

    def annotation(self, sample: Any) -> tuple[np.ndarray, int]:
        pixels = sample.gt_sem_seg.data.cpu().numpy().ravel()
        counts = np.bincount(pixels[pixels != self.ignored], minlength=1)
        return counts / max(1, pixels.size), int((counts > 0).sum())

    def derived(self, metric: str, value: Any) -> dict[str, float]:
        if metric.rpartition('/')[2] != 'aAcc':
            return {}
        return {metric[: -len('aAcc')] + 'pixel_accuracy': float(value)}

    def unit(self, metric: str) -> str:
        known = ('mIoU', 'mAcc', 'aAcc', 'mDice', 'mFscore', 'pixel_accuracy')
        return '%' if metric.rpartition('/')[2] in known else ''


class Classification(Task):
    """Of mmpretrain."""

    name = 'classification'
    scope = 'mmpretrain'
    visualization_hook = 'VisualizationHook'
    parts = (('head', 'extract_feat'),)
    heads = ('head',)
    annotation_field = 'gt_label'
    one_class = True
    formats = {'mmpretrain.CustomDataset': 'folders', 'fgc_mm.CIFARBinary': 'cifar'}
    metrics = ('error/top1', 'accuracy/top1')
    falling = ('error/top1',)
    index_names = {'error/top1': ('Top 1 Error', 1.0), 'error/top5': ('Top 5 Error', 1.0)}

    def fill_loader(self, loader: MutableMapping) -> None:
        loader.setdefault('collate_fn', dict(type='default_collate'))
        loader.setdefault('pin_memory', torch.cuda.is_available())

    def draw(self, cfg: Any, hook: MutableMapping, show_dir: Optional[str]) -> None:
        hook.update(enable=True, interval=1)
        if show_dir:
            hook.update(out_dir=show_dir)

    def inferencer(
        self, cfg: Any, checkpoint: str, out_dir: str, device: str
    ) -> tuple[Any, Predict]:
        from mmpretrain.apis import ImageClassificationInferencer

        progress: Any = importlib.import_module('mmpretrain.utils.progress')
        progress.disable_progress_bar = True
        inferencer = ImageClassificationInferencer(cfg, checkpoint, device=device)
        os.makedirs(out_dir, exist_ok=True)  # it makes only the innermost folder itself
        # Class and score have no room on a picture as small as those of CIFAR.
        options = dict(show_dir=os.path.join(out_dir, 'vis'), resize=224, return_datasamples=True)
        return inferencer.model, lambda picture: inferencer(picture, **options)[0]

    def annotation(self, sample: Any) -> tuple[np.ndarray, int]:
        labels = sample.gt_label.view(-1).cpu().numpy()
        return np.bincount(labels), len(labels)

    def derived(self, metric: str, value: Any) -> dict[str, float]:
        prefix, _, last = metric.rpartition('accuracy/')
        if not last.startswith('top') or not metric.endswith(f'accuracy/{last}'):
            return {}
        return {f'{prefix}error/{last}': max(100 - float(value), 0.0)}  # of rounding

    def unit(self, metric: str) -> str:
        return '%' if 'accuracy/top' in metric or 'error/top' in metric else ''


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
