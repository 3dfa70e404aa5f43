# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A fourth task as another package would bring it: how many dots are on a picture."""

from pathlib import Path

import cv2
import numpy as np
import torch
import torch.nn as nn
from mmcv.transforms import LoadImageFromFile
from mmengine.dataset import BaseDataset, Compose
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS, TRANSFORMS
from mmengine.structures import BaseDataElement

from fgc_mm.tasks import Task
from fgc_mm.tasks.exported import Part

MOST = 3


def write_pictures(root, n=8):
    """Gray pictures with 0 to 3 dots, and a list of how many."""
    (root / 'pictures').mkdir(parents=True)
    for i in range(n):
        picture = np.full((32, 32, 3), 100, np.uint8)
        for dot in range(i % (MOST + 1)):
            cv2.circle(picture, (6 + 9 * dot, 16), 3, (250, 250, 250), -1)
        cv2.imwrite(str(root / f'pictures/{i}.png'), picture)
    (root / 'counts.txt').write_text(''.join(f'{i}.png {i % (MOST + 1)}\n' for i in range(n)))


@DATASETS.register_module()
class Dots(BaseDataset):
    METAINFO = dict(classes=[f'{i} dots' for i in range(MOST + 1)])

    def load_data_list(self):
        lines = [line.split() for line in Path(self.ann_file).read_text().splitlines()]
        folder = Path(self.data_prefix['img_path'])
        return [dict(img_path=str(folder / name), dots=int(n)) for name, n in lines]


@TRANSFORMS.register_module()
class PackDots:
    def __call__(self, results):
        sample = BaseDataElement(metainfo=dict(img_path=results['img_path']))
        if 'dots' in results:
            sample.dots = torch.tensor([results['dots']])
        inputs = torch.from_numpy(results['img'].transpose(2, 0, 1).copy()).float() / 255
        return dict(inputs=inputs, data_samples=sample)


class DotHead(nn.Linear):
    def __init__(self, num_classes):
        super().__init__(64, num_classes)
        self.num_classes = num_classes


@MODELS.register_module()
class Counter(BaseModel):
    def __init__(self, backbone, num_classes):
        super().__init__()
        self.backbone = MODELS.build(backbone)
        self.dot_head = DotHead(num_classes)

    def forward(self, inputs, data_samples=None, mode='tensor'):
        inputs = torch.stack(inputs) if isinstance(inputs, list) else inputs
        scores = self.dot_head(self.backbone(inputs)[-1].mean(dim=(2, 3)))
        if mode == 'tensor':
            return scores
        if mode == 'loss':
            return dict(
                loss=nn.functional.cross_entropy(scores, torch.cat([s.dots for s in data_samples]))
            )
        for sample, row in zip(data_samples, scores, strict=True):
            sample.found = row.argmax()
        return data_samples


@METRICS.register_module()
class CountError(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results += [abs(int(s['found']) - int(s['dots'])) for s in data_samples]

    def compute_metrics(self, results):
        return {
            'dots/MAE': float(np.mean(results)),
            'dots/hits': float(np.mean(np.equal(results, 0))),
        }


def draw(sample, path):
    picture = cv2.imread(sample.img_path)
    cv2.putText(picture, str(int(sample.found)), (2, 30), cv2.FONT_HERSHEY_PLAIN, 1, (0, 0, 255))
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), picture)


@HOOKS.register_module()
class DotPainter(Hook):
    def __init__(self, folder=None, show=False, wait_time=0):
        self.folder = folder

    def after_test_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        for sample in outputs if self.folder else ():
            draw(sample, Path(self.folder, Path(sample.img_path).name))


class Counting(Task):
    """All that fgc_mm has to be told."""

    name = 'counting'
    scope = 'counting'
    visualization_hook = 'DotPainter'
    parts = (('dot_head',),)
    heads = ('dot_head',)
    annotation_field = 'dots'
    one_class = True
    formats = {'counting.Dots': 'coco'}
    metrics = ('dots/MAE', 'dots/exact')
    falling = ('dots/MAE',)
    index_names = {'dots/exact': ('Exact', 100.0)}

    def exported(self, model):
        return Part('counter', lambda model, x: dict(counts=model(x)))

    def fill_loader(self, loader):
        loader.setdefault('sampler', dict(type='DefaultSampler', shuffle=False))

    def draw(self, cfg, hook, show_dir):
        hook.update(folder=show_dir)

    def inferencer(self, cfg, checkpoint, out_dir, device):
        model = MODELS.build(cfg.model).to(device).eval()
        model.load_state_dict(torch.load(checkpoint, weights_only=False)['state_dict'])
        pipeline = Compose([LoadImageFromFile(), PackDots()])

        @torch.no_grad()
        def predict(picture):
            data = pipeline(dict(img_path=picture))
            data = {key: [value] for key, value in data.items()}
            (sample,) = model.test_step(data)
            draw(sample, Path(out_dir, 'vis', Path(picture).name))
            return sample

        return model, predict

    def annotation(self, sample):
        return np.bincount(sample.dots.numpy()), 1

    def derived(self, metric, value):
        return {'dots/exact': 100 * value} if metric == 'dots/hits' else {}

    def unit(self, metric):
        return {'dots/exact': '%'}.get(metric, '')
