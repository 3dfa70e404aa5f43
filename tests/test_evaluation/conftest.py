# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The toy task, tested: its gates depend on the image, and its images have several sizes."""

import uuid

import pytest
import torch
import toy_task
from mmengine.config import Config
from mmengine.model import BaseTTAModel
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from toy_task import BACKBONE, clean_up  # noqa: F401


class ToyTask(toy_task.ToyTask):
    def __init__(self, backbone=BACKBONE, dynamic=True):
        super().__init__(backbone, dynamic=dynamic)


class ToyTTA(BaseTTAModel):
    def merge_preds(self, data_samples_list):
        return [
            BaseDataElement(score=sum(view.score for view in views)) for views in data_samples_list
        ]


class ToyImages(toy_task.ToyImages):
    """Images of several sizes: equal within a batch of two."""

    sizes = [(32, 32), (32, 32), (64, 32), (64, 32), (48, 48)]

    def __init__(self, views=None):
        generator = torch.Generator().manual_seed(0)
        strength = [0.3, 1, 2, 4, 8]
        self.images = [
            s * torch.randn(3, *size, generator=generator)
            for s, size in zip(strength, self.sizes, strict=True)
        ]
        self.views = views

    def __getitem__(self, index):
        item = super().__getitem__(index)
        if self.views is None:
            return item
        views = [item, dict(item, inputs=item['inputs'].flip(-1))][: self.views]
        return {key: [view[key] for view in views] for key in item}


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
