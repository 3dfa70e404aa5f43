# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The metric and its hook, by testing models with a real Runner."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from left_hooks import hooks_on
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.registry import HOOKS, METRICS

from fgc_mm.errors import UsageError
from fgc_mm.evaluation import GatedMACs, GatedMACsHook, PredictionCounter, layer_rows
from fgc_mm.evaluation import summary as report
from fgc_mm.gates import find_gates, force_gates
from fgc_mm.macs import ImageMACs, count_macs

KEYS = {
    'macs/pruning_ratio',
    'macs/backbone_executed_G',
    'macs/backbone_dense_G',
    'macs/model_executed_G',
    'macs/model_dense_G',
    'gates/openness',
    'gates/closed',
    'gates/dynamic',
}


class Count(BaseMetric):
    """Another metric in the list, which keeps what it was shown."""

    def __init__(self):
        super().__init__(prefix='count')
        self.seen = []

    def process(self, data_batch, data_samples):
        self.seen += data_samples
        self.results += [1] * len(data_samples)

    def compute_metrics(self, results):
        return dict(images=len(results))


def one_by_one(model, images):
    """Every image alone, without Runner, hook or metric."""
    model.eval()
    return [count_macs(model, image[None], backbone='backbone')[0] for image in images]


def test_one_line_is_enough_and_the_figures_are_right(make_runner, toy, tmp_path):
    other = Count()
    model = toy.task()
    runner = make_runner(model, evaluator=[other])
    figures = runner.test()
    assert set(figures) == KEYS | {'count/images'} and figures['count/images'] == 5

    alone = one_by_one(model, toy.images().images)
    executed = sum(image.backbone_executed for image in alone)
    dense = sum(image.backbone_dense for image in alone)
    assert figures['macs/pruning_ratio'] == pytest.approx(100 * (1 - executed / dense))
    # A ratio of sums, not a mean of ratios; the sizes make the difference.
    mean = 100 * np.mean([image.pruning_ratio for image in alone])
    assert abs(figures['macs/pruning_ratio'] - mean) > 0.01
    assert figures['macs/backbone_executed_G'] == pytest.approx(executed / 5e9)
    assert figures['macs/backbone_dense_G'] == pytest.approx(dense / 5e9)
    head = np.mean([image.model_dense - image.backbone_dense for image in alone]) / 1e9
    assert head > 0
    for kind in ('executed', 'dense'):
        assert figures[f'macs/model_{kind}_G'] == pytest.approx(
            figures[f'macs/backbone_{kind}_G'] + head
        )

    masks = {name: np.concatenate([i.masks()[name] for i in alone]) for name in find_gates(model)}
    every = np.concatenate([mask.ravel() for mask in masks.values()])
    assert figures['gates/openness'] == pytest.approx(every.mean())
    assert figures['gates/closed'] == pytest.approx(1 - every.mean())
    dynamic = np.concatenate([(m.min(0) == 0) & (m.max(0) == 1) for m in masks.values()])
    assert figures['gates/dynamic'] == pytest.approx(dynamic.mean())
    assert 0.1 < dynamic.mean() < 1

    (metric,) = [m for m in runner.test_evaluator.metrics if isinstance(m, GatedMACs)]
    table = json.loads(json.dumps(metric.layer_table))
    assert [row['gate'] for row in table] == list(masks)
    for row in table:
        mask = masks[row['gate']]
        share = mask.mean(axis=1)
        assert row['channels'] == mask.shape[1]
        assert row['openness_mean'] == pytest.approx(share.mean())
        assert (row['openness_min'], row['openness_max']) == pytest.approx(
            (share.min(), share.max())
        )
        assert row['always_on'] == mask.all(axis=0).sum()
        assert row['never_on'] == (1 - mask).all(axis=0).sum()

    (log,) = Path(tmp_path).rglob('*.log')
    text = log.read_text()
    assert 'always on' in text and 'backbone.gates.layer4-1-conv1' in text
    assert 'macs/pruning_ratio: ' in text
    # The other metrics see the figure of each image as well.
    assert all(isinstance(sample['gated_macs'], ImageMACs) for sample in other.seen)
    assert [sample['gated_macs'].backbone_executed for sample in other.seen] == pytest.approx(
        [image.backbone_executed for image in alone]
    )


def test_nothing_stays_on_the_model_and_a_second_test_is_the_same(make_runner, toy):
    model = toy.task()
    runner = make_runner(model)
    first = runner.test()
    assert not hooks_on(model)
    second = runner.test()
    assert first == second
    assert len(runner.test_evaluator.metrics) == 1


def test_the_metric_may_be_listed(make_runner):
    runner = make_runner(evaluator=[dict(type='GatedMACs', prefix='mine')])
    assert set(runner.test()) == {f'mine/{key}' for key in KEYS}


def test_validation_within_training(make_runner, toy):
    loader = dict(
        dataset=toy.images(),
        sampler=dict(type='DefaultSampler', shuffle=False),
        batch_size=1,
        num_workers=0,
    )
    model = toy.task(dict(toy.backbone, norm_eval=True))
    runner = make_runner(
        model,
        custom_hooks=[
            dict(type='GatedMACsHook'),
            dict(type='L0Hook'),
            dict(type='EMAHook'),
        ],
        train_dataloader=loader,
        train_cfg=dict(by_epoch=True, max_epochs=2),
        val_dataloader=loader,
        val_cfg=dict(),
        val_evaluator=[],
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.0)),
    )
    runner.train()
    ratios = runner.message_hub.get_scalar('val/macs/pruning_ratio').data[0]
    assert len(ratios) == 2
    # Nothing has moved at learning rate 0, so the test must agree.
    assert runner.test()['macs/pruning_ratio'] == pytest.approx(ratios[0])
    assert not hooks_on(model)


def test_a_dense_baseline_saves_nothing(make_runner, toy, tmp_path):
    figures = make_runner(toy.task(dict(toy.backbone, gate=None), dynamic=False)).test()
    assert set(figures) == KEYS
    assert figures['macs/pruning_ratio'] == 0.0
    assert figures['macs/backbone_executed_G'] == figures['macs/backbone_dense_G'] > 0
    assert figures['gates/openness'] == 1.0 and figures['gates/dynamic'] == 0.0
    (log,) = Path(tmp_path).rglob('*.log')
    assert 'has no gates' in log.read_text()


def test_all_open_costs_the_gates_own_and_all_closed_saves_most(make_runner, toy):
    model = toy.task()
    with force_gates(model, 1.0):
        opened = make_runner(model).test()
    assert opened['macs/pruning_ratio'] < 0 and opened['gates/openness'] == 1.0
    with force_gates(model, 0.0):
        closed = make_runner(model).test()
    assert closed['macs/pruning_ratio'] > 60 and closed['gates/openness'] == 0.0
    assert opened['gates/dynamic'] == closed['gates/dynamic'] == 0.0


def test_test_time_augmentation_counts_every_view(make_runner, toy):
    model = toy.task()
    images = toy.images().images
    runner = make_runner(toy.tta(model), dataset=toy.images(views=2), batch_size=1)
    figures = runner.test()
    plain, flipped = one_by_one(model, images), one_by_one(model, [i.flip(-1) for i in images])
    executed = sum(image.backbone_executed for image in plain + flipped)
    dense = sum(image.backbone_dense for image in plain + flipped)
    assert figures['macs/pruning_ratio'] == pytest.approx(100 * (1 - executed / dense))
    # The cost of an image is that of all its views.
    assert figures['macs/backbone_dense_G'] == pytest.approx(dense / 5e9)
    (metric,) = runner.test_evaluator.metrics
    rows = layer_rows(plain + flipped)
    assert metric.layer_table == rows
    assert 'merge_preds' not in runner.model.__dict__


def test_windows_of_one_image_are_counted(make_runner, toy):
    class Windows(toy.task):
        def forward(self, inputs, data_samples=None, mode='tensor'):
            images = torch.stack(inputs)
            super().forward(images[..., :32, :32])
            return super().forward(images[..., -32:, -32:], data_samples, mode)

    model = Windows()
    figures = make_runner(model).test()
    windows = [w for i in toy.images().images for w in (i[:, :32, :32], i[:, -32:, -32:])]
    plain = toy.task()
    plain.load_state_dict(model.state_dict())
    alone = one_by_one(plain, windows)
    executed = sum(image.backbone_executed for image in alone)
    dense = sum(image.backbone_dense for image in alone)
    assert figures['macs/pruning_ratio'] == pytest.approx(100 * (1 - executed / dense))
    assert figures['macs/backbone_dense_G'] == pytest.approx(dense / 5e9)


def test_losses_of_a_validation_are_left_alone(toy):
    from mmengine.structures import BaseDataElement

    class WithLoss(toy.task):
        def forward(self, inputs, data_samples=None, mode='tensor'):
            samples = super().forward(inputs, data_samples, 'predict')
            return [*samples, BaseDataElement(loss=dict(loss=torch.ones(())))]

    model = WithLoss().eval()
    counter = PredictionCounter(model)
    counter.attach()
    *samples, losses = model(torch.rand(2, 3, 32, 32), mode='predict')
    assert all('gated_macs' in sample for sample in samples) and losses.keys() == ['loss']
    # Other modes are none of its business.
    assert 'gated_macs' not in model(torch.rand(1, 3, 32, 32), mode='tensor')[0]
    counter.detach()


def test_dumped_results_evaluate_offline(make_runner, tmp_path):
    from mmengine.fileio import load

    out = str(tmp_path / 'out.pkl')
    figures = make_runner(evaluator=[dict(type='DumpResults', out_file_path=out)]).test()
    offline = Evaluator([GatedMACs()]).offline_evaluate(load(out))
    assert offline == figures


def test_nobody_counted(make_runner):
    runner = make_runner(custom_hooks=[], evaluator=[dict(type='GatedMACs')])
    with pytest.raises(ValueError, match=r"custom_hooks=\[dict\(type='GatedMACsHook'\)\]"):
        runner.test()


def test_wrong_backbone_and_wrong_predictions_are_named(make_runner, toy):
    hook = dict(type='GatedMACsHook', backbone='encoder')
    with pytest.raises(ValueError, match=r"backbone='encoder' is no part of ToyTask.*'backbone'"):
        make_runner(custom_hooks=[hook]).test()

    class Tensors(toy.task):
        def forward(self, *args, **kwargs):
            return [sample.score for sample in super().forward(*args, **kwargs)]

    with pytest.raises(UsageError, match='predicted a Tensor; predict BaseDataElement or dict'):
        make_runner(Tensors()).test()


def test_registered_for_every_scope():
    assert METRICS.get('GatedMACs') is GatedMACs
    assert HOOKS.get('GatedMACsHook') is GatedMACsHook


def test_derived_figures():
    metrics = {'accuracy/top1': 92.0, 'a/accuracy/top5': 99.5, 'aAcc': 96.1, 'mIoU': 72.0}
    derived = report.add_derived(metrics)
    assert derived == {
        **metrics,
        'error/top1': 8.0,
        'a/error/top5': 0.5,
        'pixel_accuracy': 96.1,
    }
    assert 'error/top1' not in metrics
