# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Two processes under DistributedDataParallel (gloo), against one: the metric, and the losses on
gates that are computed over both."""

import sys
import uuid

import pytest
import torch
from mmengine.config import Config
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.runner import Runner
from toy_task import BACKBONE, ToyImages, ToyTask
from two_processes import results_of_ranks, run_in_two_processes

from fgc_mm.gates import find_gates
from fgc_mm.runtime import unwrap
from fgc_mm.training import batch_shaping

GATE = dict(type='BinConcreteGate', norm_cfg=None, bias_init=0.0)


class TwoSizes(ToyImages):
    """Images weigh differently."""

    def __init__(self, n):
        super().__init__(n, (64, 64))
        self.images *= torch.linspace(0.3, 4, n)[:, None, None, None]

    def __getitem__(self, index):
        item = super().__getitem__(index)
        return dict(item, inputs=item['inputs'][:, :, : 64 if index % 2 else 32])


class Keep(Hook):
    def __init__(self):
        self.kept = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        gates = find_gates(unwrap(runner.model))
        probs = torch.cat([gate.record.probs for gate in gates.values()], dim=1)
        losses = {name: float(value.detach()) for name, value in outputs.items()}
        self.kept.append((probs, losses))


def main(work_dir, distributed):
    torch.set_num_threads(1)
    if distributed:
        torch.distributed.init_process_group('gloo')
    keep = Keep()
    torch.manual_seed(0)  # the same weights on the ranks and in the single process

    def loader(n, sampler):
        return dict(dataset=TwoSizes(n), sampler=sampler, batch_size=1, num_workers=0)

    runner = Runner(
        model=ToyTask(dict(BACKBONE, gate=GATE), dynamic=True),
        work_dir=work_dir,
        train_dataloader=loader(8, dict(type='InfiniteSampler', shuffle=False)),
        train_cfg=dict(by_epoch=False, max_iters=3),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)),
        test_dataloader=loader(5, dict(type='DefaultSampler', shuffle=False)),
        test_cfg=dict(),
        test_evaluator=[],
        custom_hooks=[
            dict(type='L0Hook', rho=dict(start=0, end=1, value=1.0)),
            dict(type='BatchShapingHook', zeta=1.0, gather='ranks', history=1),
            dict(type='GatedMACsHook'),
            keep,
        ],
        default_hooks=dict(checkpoint=None),
        launcher='pytorch' if distributed else 'none',
        experiment_name=f'test-{uuid.uuid4()}',
        cfg=Config(
            dict(model_wrapper_cfg=dict(type='MMDistributedDataParallel', device_ids=None))
            if distributed
            else {}
        ),
    )
    figures = runner.test()
    (metric,) = runner.test_evaluator.metrics
    table = metric.layer_table
    if distributed:
        runner.train()
    bias = torch.cat([g.fc2.bias.detach() for g in find_gates(unwrap(runner.model)).values()])
    torch.save(
        dict(figures=figures, table=table, kept=keep.kept, bias=bias),
        f'{work_dir}/{get_rank() if distributed else "single"}.pth',
    )


@pytest.fixture(scope='module')
def results(tmp_path_factory):
    work_dir = tmp_path_factory.mktemp('two_processes')
    done = run_in_two_processes(__file__, work_dir)
    ranks = results_of_ranks(done, work_dir / '{}.pth', weights_only=False)
    main(str(work_dir), distributed=False)
    single = torch.load(work_dir / 'single.pth', weights_only=False)
    return dict(ddp_0=ranks[0], ddp_1=ranks[1], single_0=single)


def test_five_images_on_two_ranks_count_as_five(results):
    # The sampler pads them to six; the repeated one must not count.
    single, first, second = (results[name] for name in ('single_0', 'ddp_0', 'ddp_1'))
    assert first['figures'] == pytest.approx(single['figures'])
    assert second['figures'] == first['figures']
    assert first['table'] == single['table'] and len(first['table']) == 8
    assert 0 < single['figures']['gates/dynamic'] < 1


def test_batch_shaping_sorts_over_the_ranks(results):
    ranks = [results[name]['kept'] for name in ('ddp_0', 'ddp_1')]
    assert len(ranks[0]) == len(ranks[1]) == 3
    earlier = torch.zeros(0, ranks[0][0][0].size(1))
    for (probs_0, losses_0), (probs_1, losses_1) in zip(*ranks, strict=True):
        assert not torch.equal(probs_0, probs_1)
        both = torch.cat([probs_0, probs_1])
        expected = batch_shaping(both, joint=torch.cat([earlier, both]), start=len(earlier))
        mean = (losses_0['loss_batch_shaping'] + losses_1['loss_batch_shaping']) / 2
        assert mean == pytest.approx(float(expected), rel=1e-5)
        earlier = both  # history=1


def test_epochs_count_the_images_of_all_ranks(results):
    for name in ('ddp_0', 'ddp_1'):
        rho = [losses['loss_l0'] / float(probs.mean()) for probs, losses in results[name]['kept']]
        # Each iteration sees 2 of 8 images.
        assert rho == pytest.approx([0, 0.25, 0.5], abs=1e-5)


def test_the_gradient_of_the_gate_losses_is_synchronized(results):
    first, second = results['ddp_0']['bias'], results['ddp_1']['bias']
    assert torch.equal(first, second) and (first != 0).float().mean() > 0.5


if __name__ == '__main__':
    main(sys.argv[1], distributed=True)
