# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A toy task for training hooks with a real Runner."""

import copy
import logging
import uuid

import numpy as np
import pytest
import torch
import torch.nn as nn
from forget import forget_runs
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from torch.utils.data import Dataset

from fgc_mm.gates import find_gates
from fgc_mm.runtime import unwrap

BACKBONE = dict(
    type='mmdet.GatedResNet', depth=18, base_channels=8, stem_channels=8, norm_eval=False
)


class ToyTask(BaseModel):
    """A classifier; ``task_weight=0`` leaves the losses on gates alone, ``dynamic`` gates depend
    on the image."""

    def __init__(self, backbone=BACKBONE, task_weight=1.0, dynamic=False):
        super().__init__()
        self.backbone = MODELS.build(backbone)
        self.head = nn.LazyLinear(4)
        self.backbone.eval()
        self.head(self.backbone(torch.zeros(1, 3, 32, 32))[-1].mean(dim=(2, 3)))
        self.task_weight = task_weight
        for gate in find_gates(self).values() if dynamic else ():
            nn.init.normal_(gate.fc2.weight, std=3)
            nn.init.zeros_(gate.fc2.bias)

    def forward(self, inputs, data_samples=None, mode='tensor'):
        inputs = inputs if isinstance(inputs, torch.Tensor) else torch.stack(list(inputs))
        scores = self.head(self.backbone(inputs)[-1].mean(dim=(2, 3)))
        if mode == 'loss':
            labels = scores.new_tensor([s.label for s in data_samples], dtype=torch.long)
            loss = nn.functional.cross_entropy(scores, labels)
            return dict(loss_task=self.task_weight * loss)
        if mode == 'predict':
            return [BaseDataElement(score=score) for score in scores]
        return scores


class ToyImages(Dataset):
    metainfo = dict()

    def __init__(self, n=12, size=(32, 32)):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(n, 3, *size, generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        sample = BaseDataElement(metainfo=dict(sample_idx=index, label=index % 4))
        return dict(inputs=self.images[index], data_samples=sample)


class Probe(Hook):
    """Keeps what one can see from outside after each iteration."""

    priority = 'VERY_LOW'

    def __init__(self, seed=None):
        self.seed = seed
        self.outputs, self.probs, self.masks = [], [], []

    def before_train(self, runner):
        # Not before: Runner.train() initializes the weights.
        self.start = copy.deepcopy(runner.model)

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if self.seed is not None:
            torch.manual_seed(self.seed + runner.iter)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.outputs.append({name: float(value.detach()) for name, value in outputs.items()})
        gates = find_gates(unwrap(runner.model))
        self.probs.append({n: g.record.probs.clone() for n, g in gates.items()})
        self.masks.append({n: g.record.mask.clone() for n, g in gates.items()})


@pytest.fixture(autouse=True)
def clean_up():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    logging.shutdown()
    forget_runs()


@pytest.fixture
def make_runner(tmp_path):
    """``make_runner(custom_hooks, model=..., **runner arguments)``."""

    def make(custom_hooks=(), model=None, n=12, batch_size=4, max_iters=None, **kwargs):
        if max_iters is None:
            train_cfg, sampler = dict(by_epoch=True, max_epochs=1), 'DefaultSampler'
        else:
            train_cfg, sampler = dict(by_epoch=False, max_iters=max_iters), 'InfiniteSampler'
            kwargs.setdefault('log_processor', dict(by_epoch=False))
        arguments = dict(
            model=model if model is not None else ToyTask(),
            work_dir=str(tmp_path),
            train_dataloader=dict(
                dataset=ToyImages(n),
                sampler=dict(type=sampler, shuffle=False),
                batch_size=batch_size,
                num_workers=0,
            ),
            train_cfg=train_cfg,
            optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
            default_hooks=dict(logger=dict(type='LoggerHook', interval=1), checkpoint=None),
            custom_hooks=list(custom_hooks),
            experiment_name=f'test-{uuid.uuid4()}',
            cfg=Config(),
        )
        return Runner(**{**arguments, **copy.copy(kwargs)})

    return make


@pytest.fixture
def digits_cfg(tmp_path):
    """``digits_cfg(custom_hooks, **changes)``: a tiny gated classifier of PNG files."""
    cv2 = pytest.importorskip('cv2')
    pytest.importorskip('mmpretrain')
    rng = np.random.default_rng(0)
    root = tmp_path / 'pictures'
    for label in range(4):
        (root / str(label)).mkdir(parents=True)
        for i in range(10):
            picture = rng.integers(0, 256, (16, 16, 3)) // 2
            picture[4 * label : 4 * label + 4] += 127
            cv2.imwrite(str(root / str(label) / f'{i}.png'), picture.astype(np.uint8))

    def make(custom_hooks=(), work_dir='run', max_epochs=2, **changes):
        flip = dict(type='RandomFlip', prob=0.5)
        pipeline = [dict(type='LoadImageFromFile'), flip, dict(type='PackInputs')]
        loader = dict(
            batch_size=16,
            num_workers=0,
            dataset=dict(
                type='CustomDataset', data_root=str(root), pipeline=pipeline, serialize_data=False
            ),
            sampler=dict(type='DefaultSampler', shuffle=True),
            collate_fn=dict(type='default_collate'),
        )
        cfg = dict(
            default_scope='mmpretrain',
            custom_imports=dict(imports=['fgc_mm']),
            experiment_name=f'test-{uuid.uuid4()}',
            work_dir=str(tmp_path / work_dir),
            model=dict(
                type='ImageClassifier',
                data_preprocessor=dict(num_classes=4, mean=[127.5] * 3, std=[64.0] * 3),
                backbone=dict(type='GatedResNetCifar', depth=20),
                neck=dict(type='GlobalAveragePooling'),
                head=dict(type='LinearClsHead', num_classes=4, in_channels=64, topk=1),
            ),
            train_dataloader=loader,
            train_cfg=dict(by_epoch=True, max_epochs=max_epochs),
            optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.05, momentum=0.9)),
            default_hooks=dict(
                timer=dict(type='IterTimerHook'),
                logger=dict(type='LoggerHook', interval=1),
                sampler_seed=dict(type='DistSamplerSeedHook'),
                checkpoint=dict(type='CheckpointHook', interval=1),
            ),
            custom_hooks=list(custom_hooks),
            randomness=dict(seed=3),
        )
        cfg = Config(cfg)
        cfg.merge_from_dict(copy.deepcopy(changes))
        return cfg

    return make


@pytest.fixture
def build():
    """``Runner.from_cfg`` that does not format its config for each log and checkpoint."""

    def make(cfg):
        arguments = cfg.to_dict()
        arguments.pop('custom_imports', None)
        return Runner(**arguments, cfg=Config())

    return make


@pytest.fixture
def toy():
    """The classes above, for tests that build their own."""

    class Toys:
        task, images, probe, backbone = ToyTask, ToyImages, Probe, BACKBONE

    return Toys
