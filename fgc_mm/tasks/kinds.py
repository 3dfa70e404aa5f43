# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The three tasks of OpenMMLab that are known here."""

from __future__ import annotations

import importlib
import os
from collections.abc import MutableMapping
from typing import Any, Optional

import numpy as np
import torch
from torchvision.ops import box_iou

from .exported import Part, classifier, detector, segmentor
from .task import Predict, Task


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
    agreement_of = 'boxes that both find, of all with a score of 0.3 or more'

    shown = 0.3
    """Least score of a box that counts."""

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

    def made_up(self, model: Any, count: int, height: int, width: int) -> Optional[list]:
        from mmdet.structures import DetDataSample
        from mmdet.structures.mask import BitmapMasks
        from mmengine.structures import InstanceData, PixelData

        share = torch.tensor([[0.1, 0.1, 0.6, 0.7], [0.3, 0.2, 0.9, 0.5]])
        boxes = share * torch.tensor([width, height, width, height])
        # Where there are masks, RTMDet's assigner wants them in a form of its own.
        masked = any('mask' in name for name, _ in model.named_modules())
        samples = []
        for number in range(count):
            labels = torch.zeros(2, dtype=torch.long)
            sample = DetDataSample(metainfo=_shapes(height, width, img_id=number))
            sample.gt_instances = InstanceData(bboxes=boxes.clone(), labels=labels)
            if masked:
                ones = np.ones((2, height, width), np.uint8)
                sample.gt_instances.masks = BitmapMasks(ones, height, width)
            sample.ignored_instances = InstanceData(bboxes=boxes[:0], labels=labels[:0])
            sample.gt_sem_seg = PixelData(sem_seg=torch.zeros(1, height, width, dtype=torch.long))
            samples.append(sample)
        return samples

    def undemanding(self, model: Any) -> None:
        def few(cfg: Any) -> None:
            for key, value in cfg.items():
                if key == 'max_per_img':
                    cfg[key] = min(value, 20)
                elif key == 'score_thr':
                    cfg[key] = 0.0  # untrained, nothing reaches any other
                elif isinstance(value, dict):
                    few(value)

        for module in model.modules():
            for cfg in (getattr(module, key, None) for key in ('train_cfg', 'test_cfg')):
                for one in cfg if isinstance(cfg, (list, tuple)) else [cfg]:
                    if isinstance(one, dict):
                        few(one)

    def exported(self, model: Any) -> Optional[Part]:
        return detector(model)

    def agreement(self, ours: Any, theirs: Any) -> tuple[float, float]:
        one, other = (
            found[found.scores >= self.shown]
            for found in (ours.pred_instances, theirs.pred_instances)
        )
        overlap = box_iou(one.bboxes, other.bboxes)
        overlap *= one.labels[:, None] == other.labels[None]
        matched = 0
        while overlap.numel() and float(overlap.max()) >= 0.5:
            row, column = divmod(int(overlap.argmax()), overlap.size(1))
            overlap[row], overlap[:, column] = 0, 0
            matched += 1
        return 2.0 * matched, float(len(one) + len(other))

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
    agreement_of = 'pixels of the same class'

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

    def made_up(self, model: Any, count: int, height: int, width: int) -> Optional[list]:
        from mmengine.structures import PixelData
        from mmseg.structures import SegDataSample

        samples = []
        for _ in range(count):
            sample = SegDataSample(metainfo=_shapes(height, width))
            for field in ('gt_sem_seg', 'gt_edge_map'):
                labels = torch.zeros(1, height, width, dtype=torch.long)
                sample.set_field(PixelData(data=labels), field)
            samples.append(sample)
        return samples

    def exported(self, model: Any) -> Part:
        return segmentor(model)

    def agreement(self, ours: Any, theirs: Any) -> tuple[float, float]:
        one, other = (sample.pred_sem_seg.data for sample in (ours, theirs))
        return float((one == other).sum()), float(one.numel())

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
    agreement_of = 'pictures of the same class'

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

    def made_up(self, model: Any, count: int, height: int, width: int) -> Optional[list]:
        from mmpretrain.structures import DataSample

        shapes = _shapes(height, width)
        return [DataSample(metainfo=shapes).set_gt_label(0) for _ in range(count)]

    def exported(self, model: Any) -> Part:
        return classifier(model)

    def agreement(self, ours: Any, theirs: Any) -> tuple[float, float]:
        return float(ours.pred_label.equal(theirs.pred_label)), 1.0

    def derived(self, metric: str, value: Any) -> dict[str, float]:
        prefix, _, last = metric.rpartition('accuracy/')
        if not last.startswith('top') or not metric.endswith(f'accuracy/{last}'):
            return {}
        return {f'{prefix}error/{last}': max(100 - float(value), 0.0)}  # of rounding

    def unit(self, metric: str) -> str:
        return '%' if 'accuracy/top' in metric or 'error/top' in metric else ''


def _shapes(height: int, width: int, **more: Any) -> dict[str, Any]:
    """What the pipeline of a picture that was not resized leaves."""
    names = ('img_shape', 'ori_shape', 'pad_shape', 'batch_input_shape')
    return {**dict.fromkeys(names, (height, width)), 'scale_factor': (1.0, 1.0), **more}
