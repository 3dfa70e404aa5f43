# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Gate losses and counting on the models of mmpretrain, mmdet and mmseg."""

import pytest
import torch
from mmengine.registry import HOOKS
from small_tasks import (
    Images,
    boxes_sample,
    class_sample,
    classifier,
    faster_rcnn,
    make_runner,
    map_sample,
    register,
    retinanet,
    segmentor,
)

from fgc_mm.gates import find_gates
from fgc_mm.macs import count_macs

TASKS = {
    'classifier': ('mmpretrain', classifier, class_sample, [(32, 32)] * 4),
    'retinanet': ('mmdet', retinanet, boxes_sample, [(50, 64), (64, 40), (32, 90), (64, 64)]),
    'faster-rcnn': ('mmdet', faster_rcnn, boxes_sample, [(50, 64), (64, 40), (32, 90), (64, 64)]),
    'segmentor': ('mmseg', segmentor, map_sample, [(64, 64), (64, 64), (40, 64), (40, 64)]),
}


@pytest.mark.parametrize('task', TASKS)
def test_two_iterations_and_a_test(task, tmp_path):
    scope, model, make_sample, sizes = TASKS[task]
    register(scope)
    runner = make_runner(scope, model(), make_sample, sizes, tmp_path)
    runner.train()
    hub = runner.message_hub
    for name in ('loss_l0', 'loss_batch_shaping', 'gate/openness'):
        assert len(hub.get_scalar(f'train/{name}').data[0]) == 2, name
    losses = [
        hub.get_scalar(f'train/{name}').current() for name in ('loss_l0', 'loss_batch_shaping')
    ]
    assert all(loss > 0 for loss in losses)
    parts = [
        buffer.current()
        for name, buffer in hub.log_scalars.items()
        if name.startswith('train/') and 'loss' in name.split('/')[-1] and name != 'train/loss'
    ]
    # The sum in every task: a classifier's own 'loss' goes by another name.
    assert hub.get_scalar('train/loss').current() == pytest.approx(sum(parts), rel=1e-4)
    assert ('train/loss_task' in hub.log_scalars) == (task == 'classifier')
    assert hub.get_scalar('val/macs/backbone_dense_G').current() > 0
    for gate in find_gates(runner.model).values():  # open some, close some
        torch.nn.init.normal_(gate.fc2.weight, std=3)
        torch.nn.init.zeros_(gate.fc2.bias)
    figures = runner.test()

    # The same, batch by batch with the backbone alone.
    model = runner.model.eval()
    executed = dense = 0.0
    with torch.no_grad():
        for batch in runner.test_dataloader:
            images = model.data_preprocessor(batch, False)['inputs']
            for image in count_macs(model.backbone, images):
                executed += image.backbone_executed
                dense += image.backbone_dense
    assert figures['macs/pruning_ratio'] == pytest.approx(100 * (1 - executed / dense))
    assert 10 < figures['macs/pruning_ratio'] < 90
    assert figures['macs/backbone_dense_G'] == pytest.approx(dense / 4e9)
    assert figures['macs/model_dense_G'] > figures['macs/backbone_dense_G']


def test_padded_batches_count_at_their_padded_size(tmp_path):
    register('mmdet')
    sizes = [(32, 64), (64, 32)]
    single = make_runner('mmdet', retinanet(), boxes_sample, sizes, tmp_path, 1).test()
    padded = make_runner('mmdet', retinanet(), boxes_sample, sizes, tmp_path, 2).test()
    # Together they are padded to 64 x 64, twice the area.
    assert padded['macs/backbone_dense_G'] == pytest.approx(2 * single['macs/backbone_dense_G'])


def test_sliding_windows_count_every_window(tmp_path):
    register('mmseg')
    sizes = [(64, 64), (64, 64)]
    whole = make_runner('mmseg', segmentor(), map_sample, sizes, tmp_path).test()
    slide = segmentor(mode='slide', crop_size=(32, 32), stride=(32, 32))
    windows = make_runner('mmseg', slide, map_sample, sizes, tmp_path).test()
    assert windows['macs/backbone_dense_G'] == pytest.approx(whole['macs/backbone_dense_G'])
    slide = segmentor(mode='slide', crop_size=(64, 48), stride=(64, 16))
    windows = make_runner('mmseg', slide, map_sample, sizes, tmp_path).test()
    assert windows['macs/backbone_dense_G'] == pytest.approx(1.5 * whole['macs/backbone_dense_G'])


@pytest.mark.parametrize(
    'scope, model, make_sample, tta',
    [
        ('mmpretrain', classifier, class_sample, dict(type='AverageClsScoreTTA')),
        (
            'mmdet',
            retinanet,
            boxes_sample,
            dict(
                type='DetTTAModel',
                tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=5),
            ),
        ),
        ('mmseg', segmentor, map_sample, dict(type='SegTTAModel')),
    ],
)
def test_test_time_augmentation_of_the_packages(scope, model, make_sample, tta, tmp_path):
    register(scope)
    sizes = [(64, 64), (64, 96)]

    class Views(Images):
        def __getitem__(self, index):
            views = [super(Views, self).__getitem__(index) for _ in range(2)]
            for view, flip in zip(views, (False, True), strict=True):
                view['data_samples'].set_metainfo(
                    dict(flip=flip, flip_direction='horizontal' if flip else None)
                )
            views[1]['inputs'] = views[1]['inputs'].flip(-1)
            return {key: [view[key] for view in views] for key in ('inputs', 'data_samples')}

    plain = make_runner(scope, model(), make_sample, sizes, tmp_path, 1)
    once = plain.test()
    model = {**tta, 'module': model()}
    runner = make_runner(scope, model, make_sample, sizes, tmp_path, 1, Views)
    twice = runner.test()
    for part in ('backbone', 'model'):
        assert twice[f'macs/{part}_dense_G'] == pytest.approx(2 * once[f'macs/{part}_dense_G'])
    assert runner.test_evaluator.metrics[0].layer_table[0]['channels'] == 8


def test_hooks_are_found_from_any_scope():
    for scope in ('mmpretrain', 'mmdet', 'mmseg'):
        register(scope)
        with HOOKS.switch_scope_and_registry(scope) as registry:
            assert type(registry.build(dict(type='L0Hook'))).__name__ == 'L0Hook'
