# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Coupling that waits for the end of mosaic and mixup."""

from types import SimpleNamespace

import pytest
import torch
from fgc_watch import FGC
from mmengine.dataset import BaseDataset
from mmengine.hooks import Hook
from mmengine.registry import DATASETS, HOOKS, TRANSFORMS, init_default_scope

from fgc_mm.training import FGCHook
from fgc_mm.training.fgc.waiting import ends_mixing, mixing_now


class Look(Hook):
    """Losses and banks of every step."""

    priority = 'VERY_LOW'

    def __init__(self):
        self.losses, self.banks = [], []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.hook = next(h for h in runner.hooks if isinstance(h, FGCHook))
        self.losses.append(float(outputs['loss_fgc'].detach()))
        layer = next(iter(self.hook.coupling.layers.values()))
        self.banks.append(layer.gate_bank.data.clone())


class ToyMosaic:
    """One by its name."""

    def __call__(self, results):
        return results


def test_it_couples_when_mosaic_has_ended(digits_cfg, build):
    TRANSFORMS.register_module('ToyMosaic', module=ToyMosaic, force=True)
    hook = {**FGC, 'eta': dict(start=1.5, end=1.5, value=0.1)}
    cfg = digits_cfg([hook], max_epochs=3, **{'default_hooks.checkpoint': None})
    stage_2 = list(cfg.train_dataloader.dataset.pipeline)
    recipe = dict(action_epoch=2, train_pipeline=stage_2)
    cfg.custom_hooks.append(dict(type='SwitchRecipeHook', schedule=[recipe]))
    cfg.train_dataloader.dataset.pipeline = [
        stage_2[0],
        dict(type='mmengine.ToyMosaic'),
        *stage_2[1:],
    ]
    runner = build(cfg)
    look = Look()
    runner.register_hook(look)
    runner.train()
    # Three steps an epoch; eta counts the epochs of the training, banks those that are coupled.
    assert [loss > 0 for loss in look.losses] == [False] * 5 + [True] * 4
    changed = [not torch.equal(a, b) for a, b in zip(look.banks, look.banks[1:], strict=False)]
    assert changed == [False] * 2 + [True] * 6
    assert look.hook.coupling.epochs == 2.0 and look.hook.uncoupled == 1.0


MOSAIC = dict(type='Mosaic', img_scale=(8, 8))
FLIP = dict(type='RandomFlip', prob=0.5)


class Nothing(BaseDataset):
    def load_data_list(self):
        return [dict(img_path=f'{i}.png') for i in range(3)]


@pytest.mark.parametrize(
    ('wrapped', 'hook', 'ends'),
    [
        (False, dict(type='PipelineSwitchHook', switch_epoch=7, switch_pipeline=[FLIP]), True),
        (False, dict(type='PipelineSwitchHook', switch_epoch=10, switch_pipeline=[FLIP]), False),
        (False, dict(type='PipelineSwitchHook', switch_epoch=7, switch_pipeline=[MOSAIC]), False),
        (True, dict(type='YOLOXModeSwitchHook', num_last_epochs=2), True),
        (True, dict(type='YOLOXModeSwitchHook', skip_type_keys=('MixUp',)), False),
        (True, dict(type='IterTimerHook'), False),
    ],
)
def test_the_switches_of_rtmdet_and_yolox_are_known(wrapped, hook, ends):
    pytest.importorskip('mmdet.engine')
    pytest.importorskip('mmdet.datasets')
    init_default_scope('mmdet')
    try:
        DATASETS.register_module('WaitingNothing', module=Nothing, force=True)
        plain = dict(type='mmengine.WaitingNothing', pipeline=[] if wrapped else [
            dict(type='CachedMosaic', img_scale=(8, 8)), FLIP])  # fmt: skip
        whole = dict(type='MultiImageMixDataset', dataset=plain, pipeline=[MOSAIC, FLIP])
        runner = SimpleNamespace(
            train_dataloader=SimpleNamespace(
                dataset=DATASETS.children['mmdet'].build(whole if wrapped else plain),
                persistent_workers=False,
            ),
            hooks=[HOOKS.build(hook)],
            epoch=0,
            max_epochs=10,
            model=torch.nn.Module(),
            logger=SimpleNamespace(info=print),
        )
        assert mixing_now(runner).split(' has ')[1] in ('Mosaic', 'CachedMosaic')
        assert ends_mixing(runner, 0) == (hook['type'] if ends else None)
        if ends:  # they do what was expected of them
            runner.model.bbox_head = torch.nn.Module()
            for runner.epoch in range(10):
                runner.hooks[0].before_train_epoch(runner)
            assert mixing_now(runner) is None and ends_mixing(runner, 9) is None
    finally:
        init_default_scope('mmengine')
