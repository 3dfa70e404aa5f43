# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A toy task for testing with a real Runner."""

import logging
import uuid

import pytest
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.logging import MessageHub, MMLogger
from mmengine.model import BaseModel, BaseTTAModel
from mmengine.registry import MODELS, DefaultScope
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from mmengine.visualization import Visualizer
from torch.utils.data import Dataset

import fgc_mm  # noqa: F401
from fgc_mm.gates import find_gates

BACKBONE = dict(type='GatedResNet', depth=18, base_channels=8, stem_channels=8)


class ToyTask(BaseModel):
    """Predicts, with gates that depend on the image."""

    def __init__(self, backbone=BACKBONE, dynamic=True):
        super().__init__()
        self.backbone = MODELS.build(backbone)
        self.head = nn.Conv2d(64, 2, 1)
        if dynamic:
            for gate in find_gates(self).values():
                nn.init.normal_(gate.fc2.weight, std=3)
                nn.init.zeros_(gate.fc2.bias)

    def forward(self, inputs, data_samples=None, mode='tensor'):
        images = inputs if isinstance(inputs, torch.Tensor) else torch.stack(list(inputs))
        scores = self.head(self.backbone(images)[-1]).mean(dim=(2, 3))
        if mode == 'loss':
            return dict(loss=scores.sum())
        return [BaseDataElement(score=score) for score in scores]


class ToyTTA(BaseTTAModel):
    def merge_preds(self, data_samples_list):
        return [
            BaseDataElement(score=sum(view.score for view in views)) for views in data_samples_list
        ]


class ToyImages(Dataset):
    """Images of several sizes: equal within a batch of two."""

    metainfo = dict()
    sizes = [(32, 32), (32, 32), (64, 32), (64, 32), (48, 48)]

    def __init__(self, views=None):
        generator = torch.Generator().manual_seed(0)
        strength = [0.3, 1, 2, 4, 8]
        self.images = [
            s * torch.randn(3, *size, generator=generator)
            for s, size in zip(strength, self.sizes, strict=True)
        ]
        self.views = views

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index]
        if self.views is None:
            return dict(inputs=image)
        return dict(inputs=[image, image.flip(-1)][: self.views])


@pytest.fixture(autouse=True)
def clean_up():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    logging.shutdown()
    for kept in (MMLogger, Visualizer, DefaultScope, MessageHub):
        kept._instance_dict.clear()


@pytest.fixture
def make_runner(tmp_path):
    """``make_runner(model, custom_hooks, evaluator, **runner arguments)``."""

    def make(
        model=None,
        custom_hooks=(dict(type='GatedMACsHook'),),
        evaluator=(),
        dataset=None,
        batch_size=2,
        **kwargs,
    ):
        loader = dict(
            dataset=dataset if dataset is not None else ToyImages(),
            sampler=dict(type='DefaultSampler', shuffle=False),
            batch_size=batch_size,
            num_workers=0,
        )
        arguments = dict(
            model=model if model is not None else ToyTask(),
            work_dir=str(tmp_path),
            test_dataloader=loader,
            test_cfg=dict(),
            test_evaluator=list(evaluator),
            default_hooks=dict(checkpoint=None),
            custom_hooks=list(custom_hooks),
            experiment_name=f'test-{uuid.uuid4()}',
            cfg=Config(),
        )
        return Runner(**{**arguments, **kwargs})

    return make


@pytest.fixture
def toy():
    """The classes above, for tests that build their own."""

    class Toys:
        task, images, tta, backbone = ToyTask, ToyImages, ToyTTA, BACKBONE

    return Toys
