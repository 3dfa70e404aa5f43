# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""One rank of test_two_processes.py: trains three iterations, then tests."""

import os
import sys
import uuid

import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from torch.utils.data import Dataset

import fgc_mm  # noqa: F401
from fgc_mm.gates import find_gates
from fgc_mm.runtime import unwrap


class Task(BaseModel):
    def __init__(self):
        super().__init__()
        gate = dict(type='BinConcreteGate', norm_cfg=None, bias_init=0.0)
        self.backbone = MODELS.build(
            dict(type='GatedResNet', depth=18, base_channels=8, stem_channels=8, gate=gate)
        )
        self.head = nn.Conv2d(64, 2, 1)

        for gate in find_gates(self).values():
            nn.init.normal_(gate.fc2.weight, std=3)

    def forward(self, inputs, data_samples=None, mode='tensor'):
        scores = self.head(self.backbone(torch.stack(list(inputs)))[-1]).mean(dim=(2, 3))
        if mode == 'loss':
            return dict(loss_task=scores.square().mean())
        return [BaseDataElement(score=score) for score in scores]


class Images(Dataset):
    metainfo = dict()

    def __init__(self, n):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(n, 3, 64, 64, generator=generator)
        self.images *= torch.linspace(0.3, 4, n)[:, None, None, None]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        # Of two sizes, so that images weigh differently.
        return dict(inputs=self.images[index, :, :, : 64 if index % 2 else 32])


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
        return dict(dataset=Images(n), sampler=sampler, batch_size=1, num_workers=0)

    runner = Runner(
        model=Task(),
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
    rank = int(os.environ.get('RANK', 0))
    bias = torch.cat([g.fc2.bias.detach() for g in find_gates(unwrap(runner.model)).values()])
    torch.save(
        dict(figures=figures, table=table, kept=keep.kept, bias=bias),
        os.path.join(work_dir, f'result_{"ddp" if distributed else "single"}_{rank}.pth'),
    )


if __name__ == '__main__':
    main(sys.argv[1], distributed='RANK' in os.environ)
