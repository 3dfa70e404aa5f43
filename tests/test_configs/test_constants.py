# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The configs say what the paper says."""

import re
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

import fgc_mm  # noqa: F401
from fgc_mm.gates import find_gates

CONFIGS = Path(__file__).parents[2] / 'configs'
USERS = sorted(path.stem for path in CONFIGS.glob('*.py'))
FGC = sorted(f'paper/{path.stem}' for path in CONFIGS.glob('paper/*_fgc_*.py'))
# Share of the backbone's MACs that the paper saves.
COSTS = {
    'faster_rcnn_r34': 0.52,
    'faster_rcnn_r50': 0.343,
    'pspnet_r50': 0.346,
    **{f'resnet{depth}': 0.422 for depth in (18, 34, 50)},
}


def load(name):
    return Config.fromfile(CONFIGS / f'{name}.py')


# eta, k, lr, weight decay, epochs, batch (on all processes), steps of the learning rate
CIFAR10 = (0.003, 200, 0.1, 5e-4, 400, 256, [200, 275, 350], 0.1)
SHORT = (0.003, 200, 0.1, 5e-4, 200, 256, [60, 120, 160], 0.2)
CIFAR100 = (0.003, 200, 0.1, 5e-4, 200, 128, [60, 120, 160], 0.2)
IMAGENET = (0.003, 200, 0.1, 1e-4, 130, 8 * 32, [40, 70, 100], 0.1)
VOC = (1e-4, 1, 0.001, 1e-4, 12, 2, [8, 11], 0.1)
CITYSCAPES = (1e-4, 4, 0.02, 5e-4, 300, 6, None, None)


def expected(name):
    name = name.removeprefix('paper/')
    if name.startswith(('wrn', 'mobilenet')):
        return SHORT
    by_dataset = dict(
        cifar10=CIFAR10, cifar100=CIFAR100, imagenet=IMAGENET, voc=VOC, cityscapes=CITYSCAPES
    )
    return by_dataset[name.rpartition('_')[2]]


@pytest.mark.parametrize('name', FGC)
def test_schedule_and_losses(name):
    cfg = load(name)
    hooks = {hook.type: hook for hook in cfg.custom_hooks}
    eta, k, lr, decay, epochs, batch, milestones, gamma = expected(name)
    fgc, optimizer = hooks['FGCHook'], cfg.optim_wrapper.optimizer
    assert (fgc.eta, fgc.k, fgc.form) == (eta, k, 'log_sum')
    assert (optimizer.lr, optimizer.momentum, optimizer.weight_decay) == (lr, 0.9, decay)
    assert optimizer.get('nesterov', False) == (cfg.default_scope == 'mmpretrain')
    processes = 8 if name.endswith('imagenet') else 1
    assert cfg.train_dataloader.batch_size * processes == batch
    assert cfg.auto_scale_lr.base_batch_size == batch
    if name.endswith('cityscapes'):
        assert cfg.train_cfg.max_iters == epochs * -(-2975 // batch)
        assert [(s.type, s.power, s.end) for s in cfg.param_scheduler] == [
            ('PolyLR', 0.9, cfg.train_cfg.max_iters)
        ]
    else:
        assert cfg.train_cfg.max_epochs == epochs
        steps = cfg.param_scheduler
        steps = steps[-1] if isinstance(steps, list) else steps
        assert (steps.milestones, steps.gamma) == (milestones, gamma)
    gate_decay = 2e-6 if name.endswith('cityscapes') else 0
    mult = cfg.optim_wrapper.paramwise_cfg.custom_keys.gate.decay_mult
    assert mult * decay == pytest.approx(gate_decay)
    rho = hooks['L0Hook'].rho
    assert (rho if isinstance(rho, float) else rho.value) == 0.4


@pytest.mark.parametrize(
    ('pattern', 'layers'),
    [
        ('resnet(20|32)_', [-2, -1]),
        ('resnet56_', [-4, -3, -2, -1]),
        ('resnet.*imagenet', [-1]),
        ('wrn|mobilenet|faster_rcnn|pspnet', 'last_stage'),
    ],
)
def test_coupled_layers(pattern, layers):
    names = [name for name in FGC if re.match(f'paper/({pattern})', name)]
    assert names
    for name in names:
        assert load(name).custom_hooks[-1].layers == layers, name


def without_work_dir(name):
    cfg = load(name).to_dict()
    cfg.pop('work_dir', None)
    return cfg


@pytest.mark.parametrize('name', FGC)
def test_without_coupling_nothing_else_differs(name):
    """The paper's "w/o FGC" is the same second stage."""
    fgc, gated = (without_work_dir(n) for n in (name, name.replace('_fgc_', '_gated_')))
    assert fgc.pop('custom_hooks')[:-1] == gated.pop('custom_hooks')
    if 'init_cfg' in fgc['model']['backbone']:  # each goes on from its own ImageNet training
        ours, theirs = (c['model']['backbone']['init_cfg'].pop('checkpoint') for c in (fgc, gated))
        assert ours.replace('_fgc_', '_gated_') == theirs
    assert fgc == gated


@pytest.mark.parametrize(
    'path', sorted(CONFIGS.glob('paper/*.py')), ids=lambda path: f'paper/{path.stem}'
)
def test_weights_come_from_a_config_that_makes_them(path):
    cfg = Config.fromfile(path)
    assert cfg.work_dir == f'work_dirs/paper/{path.stem}'
    starts = [cfg.load_from, (cfg.model.backbone.get('init_cfg') or {}).get('checkpoint')]
    starts = [start for start in starts if start and '://' not in start]
    assert bool(starts) == bool(re.search('_(gated|fgc)_|pspnet_r50_bas_', path.stem))
    for start in starts:
        folder, _, file = start.rpartition('/')
        made = load(folder.removeprefix('work_dirs/'))
        epochs = made.train_cfg.max_epochs
        assert (folder, file) == (made.work_dir, f'epoch_{epochs}.pth')
        assert epochs % made.default_hooks.checkpoint.interval == 0


@pytest.mark.parametrize('name', USERS)
def test_users_start_from_public_weights(name):
    cfg = load(name)
    place = cfg.load_from or cfg.model.backbone.init_cfg.checkpoint
    assert place.startswith(('torchvision://', 'https://download.openmmlab.com/'))
    assert cfg.model.get('pretrained') is None
    assert str(re.search('(?:r|resnet)([0-9]+)_', name)[1]) in place


@pytest.mark.parametrize('name', [n for n in USERS if '_baseline_' not in n])
def test_users_end_at_the_cost_of_the_paper(name):
    cfg, dense = load(name), load(re.sub('_(bas|gated|fgc)_', '_baseline_', name))
    hooks = {hook.type: hook for hook in cfg.custom_hooks}
    assert hooks['BudgetHook'].save == COSTS[re.match('(.*)_(bas|gated|fgc)_', name)[1]]
    assert 'L0Hook' not in hooks and 'GatedMACsHook' in hooks
    if '_bas_' in name:
        assert hooks['BatchShapingHook'].zeta.end == 'budget'
    # Epochs, pictures and optimizer are those of the dense one, and so the paper's.
    for key in ('train_cfg', 'param_scheduler', 'train_dataloader', 'test_dataloader', 'load_from'):
        assert cfg.get(key) == dense.get(key), key
    assert cfg.optim_wrapper.optimizer == dense.optim_wrapper.optimizer


@pytest.mark.parametrize('name', [n for n in USERS if '_fgc_' in n])
def test_users_couple_as_the_paper_does(name):
    """Layers and k; the rest is that of the gated config."""
    ours, papers, gated = load(name), load(f'paper/{name}'), load(name.replace('_fgc_', '_gated_'))
    fgc, theirs = ours.custom_hooks[-1], papers.custom_hooks[-1]
    assert (fgc.layers, fgc.k) == (theirs.layers, theirs.k)
    assert fgc.eta.start == 'budget'
    for key in ('train_cfg', 'param_scheduler'):
        assert ours.get(key) == papers.get(key), key
    assert ours.optim_wrapper.optimizer == papers.optim_wrapper.optimizer
    mine, other = ours.to_dict(), gated.to_dict()
    assert mine.pop('custom_hooks')[:-1] == other.pop('custom_hooks')
    assert mine == other


@pytest.mark.parametrize(
    ('source', 'target'),
    [
        ('paper/resnet34_fgc_imagenet', 'paper/faster_rcnn_r34_fgc_voc'),
        ('paper/resnet50_fgc_imagenet', 'paper/faster_rcnn_r50_fgc_voc'),
        ('paper/resnet50_fgc_imagenet', 'paper/pspnet_r50_fgc_cityscapes'),
    ],
)
def test_gated_classifier_goes_into_detector_and_segmentor(source, target, tmp_path):
    """Weights and the gates' batch statistics arrive, and training does not spoil the latter."""
    narrow = {'model.backbone.base_channels': 8, 'model.backbone.stem_channels': 8}
    classifier, model = load(source), load(target)
    classifier.merge_from_dict(narrow)
    init_default_scope('mmpretrain')
    trained = MODELS.build(classifier.model.backbone)
    trained.train()
    trained(torch.rand(4, 3, 64, 64))
    file = tmp_path / 'epoch_130.pth'
    torch.save({'state_dict': {f'backbone.{k}': v for k, v in trained.state_dict().items()}}, file)
    model.merge_from_dict({**narrow, 'model.backbone.init_cfg.checkpoint': str(file)})
    init_default_scope(model.default_scope)
    backbone = MODELS.build(model.model.backbone)
    backbone.init_weights()
    backbone.train()
    backbone(torch.rand(2, 3, 64, 64))
    gates = find_gates(backbone)
    assert len(gates) == len(find_gates(trained)) > 0
    for name, gate in find_gates(trained).items():
        assert not torch.equal(gate.norm.running_mean, torch.zeros(16))
        for key, value in gate.state_dict().items():
            assert torch.equal(gates[name].state_dict()[key], value), f'{name}.{key}'
