# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Feature-Gate Coupling, by training with it: against a dense float64 computation."""

import copy
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.registry import DATASETS, HOOKS, OPTIM_WRAPPERS, TRANSFORMS
from mmengine.runner import Runner

from fgc_mm.engine import FGCHook, epochs_seen, unwrap
from fgc_mm.gates import find_gates

LAST_TWO = ['backbone.layer3.1.gate1', 'backbone.layer3.2.gate1']
FGC = dict(type='FGCHook', layers=[-2, -1], k=5, eta=0.1, form='log_sum', log_interval=1)


def unit(x):
    return x / x.norm(dim=-1, keepdim=True)


class Watch(Hook):
    """Follows a training with dense float64 copies of the banks."""

    priority = 'VERY_LOW'

    def __init__(self):
        self.batches, self.losses, self.neighbours = [], [], []

    def before_train(self, runner):
        self.hook = next(h for h in runner.hooks if isinstance(h, FGCHook))
        self.start = copy.deepcopy(unwrap(runner.model))
        self.banks = {
            name: [c.feature_bank.data.double().clone(), c.gate_bank.data.double().clone()]
            for name, c in self.hook.couplings.items()
        }

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        gates = find_gates(unwrap(runner.model))
        self.batches.append(
            dict(
                indices=torch.tensor([s.instance_idx for s in data_batch['data_samples']]),
                records={
                    name: (gates[name].record.feature.double(), gates[name].record.logits.double())
                    for name in self.banks
                },
                loss=float(outputs['loss_fgc'].detach()),
            )
        )

    def replay(self, k=5, eta=0.1, form='log_sum', source='feature', warmup=lambda step: False,
               space='logits', shared=False, labels=None):  # fmt: skip
        """The losses that should have come out; leaves the banks as they should be."""
        losses = []
        for step, batch in enumerate(self.batches):
            total, indices, chosen = 0.0, batch['indices'], {}
            for name in reversed(list(self.banks)):
                feature, a = batch['records'][name]
                a = torch.sigmoid(a) if space == 'probs' else a
                v_f, v_g = self.banks[name]
                query, bank = (feature, v_f) if source == 'feature' else (a, v_g)
                similarity = unit(query) @ bank.t()
                similarity[torch.arange(len(indices)), indices] = -math.inf
                near = similarity.topk(k, dim=1).indices
                if shared and chosen:
                    near = next(iter(chosen.values()))
                chosen[name] = near
                log_p = torch.log_softmax(a @ v_g.t() / 0.07, dim=1)
                if warmup(step):
                    near = indices[:, None]
                elif form == 'log_sum':
                    near = torch.cat((indices[:, None], near), dim=1)
                picked = log_p.gather(1, near)
                total += dict(
                    log_sum=-picked.logsumexp(1), sum_log=-picked.sum(1), mean_log=-picked.mean(1)
                )[form].mean()
            losses.append(float(eta * total))
            self.neighbours.append(chosen)
            for name, (v_f, v_g) in self.banks.items():
                feature, a = batch['records'][name]
                a = torch.sigmoid(a) if space == 'probs' else a
                for i, z, gate in zip(indices.tolist(), unit(feature), a, strict=True):
                    v_f[i] = unit(0.5 * v_f[i] + 0.5 * z)
                    v_g[i] = unit(0.5 * v_g[i] + 0.5 * gate)
        return losses

    def check(self, steps, **how):
        assert len(self.batches) == steps
        expected = self.replay(**how)
        assert [batch['loss'] for batch in self.batches] == pytest.approx(
            expected, rel=1e-4, abs=5e-6
        )
        assert len(set(expected)) == steps
        for name, (v_f, v_g) in self.banks.items():
            c = self.hook.couplings[name]
            torch.testing.assert_close(c.feature_bank.data.double(), v_f, rtol=0, atol=1e-5)
            torch.testing.assert_close(c.gate_bank.data.double(), v_g, rtol=0, atol=1e-5)


@pytest.fixture
def train(digits_cfg, build):
    """``train(hook, more hooks, **changes of the config)`` -> runner, watch."""

    def run(hook=FGC, more=(), **changes):
        built = [h for h in more if isinstance(h, Hook)]
        hooks = [hook, *(h for h in more if h not in built)]
        cfg = digits_cfg(hooks, **{'default_hooks.checkpoint': None, **changes})
        runner = build(cfg)
        watch = Watch()
        for extra in (*built, watch):
            runner.register_hook(extra)
        runner.train()
        return runner, watch

    return run


# What it computes


@pytest.mark.parametrize('form', ['log_sum', 'sum_log', 'mean_log'])
def test_loss_and_banks_are_those_of_the_equations(form, train):
    _, watch = train({**FGC, 'form': form})
    assert list(watch.banks) == LAST_TWO
    assert [len(batch['indices']) for batch in watch.batches] == [16, 16, 8] * 2
    for epoch in (0, 3):
        together = torch.cat([batch['indices'] for batch in watch.batches[epoch : epoch + 3]])
        assert together.sort().values.tolist() == list(range(40))
    watch.check(steps=6, form=form)
    assert watch.hook.epochs == 2.0


def test_the_gradient_comes_from_the_coupled_gates(train):
    """With the task switched off, whatever moves is moved by loss_fgc: the gate of
    the fifth block and what lies before it."""
    changes = {
        'model.head.loss': dict(type='CrossEntropyLoss', loss_weight=0.0),
        'optim_wrapper.optimizer': dict(_delete_=True, type='SGD', lr=0.1),
    }
    runner, watch = train({**FGC, 'layers': [4]}, max_epochs=1, **changes)
    watch.check(steps=3)
    before, after = find_gates(watch.start), find_gates(runner.model)
    moved = [not torch.equal(after[n].fc2.weight, before[n].fc2.weight) for n in after]
    assert moved == [True] * 5 + [False] * 4


def test_sources_and_spaces(train):
    for how in (dict(source='gate'), dict(shared=True), dict(space='probs')):
        _, watch = train({**FGC, **how}, max_epochs=1)
        watch.check(steps=3, **how)


def test_label_source(train):
    _, watch = train({**FGC, 'source': 'label', 'k': 9}, max_epochs=1)
    # Ten pictures of each class, so its nine others are the neighbours.
    labels = torch.arange(40) // 10
    for name, coupling in watch.hook.couplings.items():
        assert coupling.label_source.labels.tolist() == labels.tolist()
        batch = watch.batches[0]
        bank = watch.banks[name][1]
        log_p = torch.log_softmax(batch['records'][name][1] @ bank.t() / 0.07, dim=1)
        same = labels[batch['indices']][:, None] == labels
        batch['loss'] += 0.1 * float(log_p.masked_fill(~same, -math.inf).logsumexp(1).mean())
    assert watch.batches[0]['loss'] == pytest.approx(0, abs=1e-4)


def test_warm_up_and_schedule_count_instances_seen(train):
    """An iteration-based loop, N = 40, batches of 16: 0, 0.4, 0.8, 1.2, 1.6 epochs."""
    hook = {**FGC, 'warmup_epochs': 0.5, 'eta': dict(start=0.4, end=1.2, value=0.1, begin=0.01)}
    _, watch = train(
        hook,
        train_cfg=dict(_delete_=True, by_epoch=False, max_iters=5),
        log_processor=dict(by_epoch=False),
        **{'train_dataloader.sampler': dict(type='InfiniteSampler', shuffle=True)},
    )
    etas = [0.01, 0.01, 0.055, 0.1, 0.1]
    for batch, eta in zip(watch.batches, etas, strict=True):
        batch['loss'] *= 0.1 / eta
    watch.check(steps=5, warmup=lambda step: step < 2)
    assert watch.hook.epochs == 2.0


def test_repeated_pictures_are_one_instance(train, digits_cfg):
    inner = digits_cfg().train_dataloader.dataset
    dataset = dict(_delete_=True, type='RepeatDataset', times=2, dataset=dict(**inner))
    runner, watch = train(max_epochs=1, **{'train_dataloader.dataset': dataset})
    assert watch.hook.num_instances == 40
    assert watch.hook.epochs == 2.0
    assert epochs_seen(runner) == 2.0  # the other hooks' schedules count alike
    # 32 of 80 items in a batch: some pictures come twice, and are mixed in twice.
    indices = [batch['indices'].tolist() for batch in watch.batches]
    assert any(len(set(batch)) < len(batch) for batch in indices)
    watch.check(steps=5)


# What it composes with


class Snapshot(Hook):
    """That validation leaves the banks alone."""

    def before_val(self, runner):
        hook = next(h for h in runner.hooks if isinstance(h, FGCHook))
        self.banks = [c.gate_bank.data.clone() for c in hook.couplings.values()]
        self.seen, self.ran = hook.seen, getattr(self, 'ran', 0) + 1

    def after_val(self, runner):
        hook = next(h for h in runner.hooks if isinstance(h, FGCHook))
        assert self.seen == hook.seen
        for bank, c in zip(self.banks, hook.couplings.values(), strict=True):
            assert torch.equal(bank, c.gate_bank.data)
        # Not even if the losses are asked for.
        data = next(iter(runner.train_dataloader))
        model = unwrap(runner.model)
        data = model.data_preprocessor(data, training=True)
        assert 'loss_fgc' not in model(**data, mode='loss')
        assert self.seen == hook.seen


class AutocastCPU(OptimWrapper):
    """AmpOptimWrapper insists on a GPU."""

    def optim_context(self, model):
        return torch.autocast('cpu', torch.bfloat16)


VARIANTS = ['autocast', 'accumulation', 'ema', 'with_cp', 'val', 'workers', 'all']


@pytest.mark.parametrize('variant', VARIANTS)
def test_composes_with(variant, train, digits_cfg):
    more, changes = [], {}
    if variant == 'autocast':
        OPTIM_WRAPPERS.register_module(name='AutocastCPU', module=AutocastCPU, force=True)
        changes['optim_wrapper.type'] = 'AutocastCPU'
    if variant in ('accumulation', 'all'):
        changes['optim_wrapper.accumulative_counts'] = 2
    if variant in ('ema', 'all'):
        more.append(dict(type='EMAHook', momentum=0.1))
    if variant in ('with_cp', 'all'):
        changes['model.backbone.with_cp'] = True
    if variant == 'workers':
        changes['train_dataloader'] = dict(num_workers=1, persistent_workers=True)
    if variant in ('val', 'all'):
        loader = digits_cfg(work_dir='unused').train_dataloader
        changes.update(val_dataloader=loader, val_cfg=dict(), val_evaluator=dict(type='Accuracy'))
        more.append(Snapshot())
    if variant == 'all':
        more += [dict(type='L0Hook', rho=0.4), dict(type='BatchShapingHook', zeta=0.1)]
    runner, watch = train(more=more, **changes)
    watch.check(steps=6)
    before = find_gates(watch.start)
    for name, gate in find_gates(runner.model).items():
        assert not torch.equal(gate.fc2.weight, before[name].fc2.weight)
    if variant in ('val', 'all'):
        assert next(h for h in more if isinstance(h, Snapshot)).ran == 2


def test_bottlenecks_couple_all_their_gates(digits_cfg, build):
    backbone = dict(_delete_=True, type='GatedResNet', depth=50, base_channels=4, stem_channels=4)
    cfg = digits_cfg(
        [{**FGC, 'layers': 'last_stage'}],
        max_epochs=1,
        **{'model.backbone': backbone, 'model.head.in_channels': 128},
    )
    runner = build(cfg)
    watch = Watch()
    runner.register_hook(watch)
    runner.train()
    names = [f'backbone.layer4.{block}.gate{i}' for block in range(3) for i in (1, 2)]
    assert list(watch.banks) == names
    watch.check(steps=3)


# What it logs


def test_overlap_and_turnover_are_logged(train):
    runner, watch = train()
    watch.check(steps=6)
    hub = runner.message_hub
    overlaps = []
    for name, (v_f, v_g) in watch.banks.items():
        near = []
        for bank in (v_f, v_g):
            similarity = bank @ bank.t()
            similarity.fill_diagonal_(-math.inf)
            near.append([set(row.tolist()) for row in similarity.topk(5, dim=1).indices])
        overlap = np.mean([len(f & g) / 5 for f, g in zip(*near, strict=True)])
        overlaps.append(overlap)
        assert hub.get_scalar(f'fgc/overlap/{name}').current() == pytest.approx(overlap, abs=0.01)
    logged = hub.get_scalar('train/fgc/overlap').current()
    assert logged == pytest.approx(np.mean(overlaps), abs=0.01)

    last = {}
    for step, chosen in enumerate(watch.neighbours):
        changed = []
        for name, near in chosen.items():
            for i, row in zip(watch.batches[step]['indices'].tolist(), near.tolist(), strict=True):
                if (name, i) in last:
                    changed.append(1 - len(set(row) & last[name, i]) / 5)
                last[name, i] = set(row)
    logged = hub.get_scalar('train/fgc/turnover').current()
    assert logged == pytest.approx(np.mean(changed), abs=0.01)
    assert len(hub.get_scalar('train/fgc/turnover').data[0]) == 3  # not in the first epoch

    (log,) = Path(runner.work_dir).rglob('*.log')
    shown = [line for line in log.read_text().splitlines() if 'Epoch(train) [2]' in line]
    assert len(shown) == 3
    for key in ('loss_fgc: ', 'fgc/overlap: ', 'fgc/turnover: '):
        assert all(key in line for line in shown)
    (scalars,) = Path(runner.work_dir).rglob('scalars.json')
    lines = [json.loads(line) for line in scalars.read_text().splitlines()]
    assert any(f'fgc/turnover/{LAST_TWO[0]}' in line for line in lines)


# Other tasks


def test_detection(tmp_path):
    pytest.importorskip('mmdet.models')
    cv2 = pytest.importorskip('cv2')

    class Boxes(BaseDataset):
        METAINFO = dict(classes=('thing',))

        def load_data_list(self):
            rng, items = np.random.default_rng(0), []
            for i in range(6):
                path = str(tmp_path / f'{i}.png')
                cv2.imwrite(path, rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))
                box = dict(bbox=[8, 8, 40, 48], bbox_label=0, ignore_flag=0)
                items.append(dict(img_path=path, img_id=i, height=64, width=64, instances=[box]))
            return items

    DATASETS.register_module(name='FGCBoxes', module=Boxes, force=True)
    pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations', with_bbox=True),
        dict(type='PackDetInputs'),
    ]
    backbone = dict(type='GatedResNet', depth=18, base_channels=8, stem_channels=8,
                    gate=dict(type='BinConcreteGate', norm_cfg=dict(type='LN')))  # fmt: skip
    anchors = dict(
        type='AnchorGenerator', octave_base_scale=4, scales_per_octave=1, ratios=[1.0],
        strides=[8, 16, 32, 64, 128],
    )  # fmt: skip
    coder = dict(type='DeltaXYWHBBoxCoder')
    assigner = dict(
        type='MaxIoUAssigner', pos_iou_thr=0.5, neg_iou_thr=0.4, min_pos_iou=0, ignore_iof_thr=-1
    )
    model = dict(
        type='RetinaNet',
        data_preprocessor=dict(type='DetDataPreprocessor', pad_size_divisor=32),
        backbone=backbone,
        neck=dict(type='FPN', in_channels=[8, 16, 32, 64], out_channels=16, start_level=1,
                  add_extra_convs='on_input', num_outs=5),
        bbox_head=dict(type='RetinaHead', num_classes=1, in_channels=16, stacked_convs=1,
                       feat_channels=16, anchor_generator=anchors, bbox_coder=coder),
        train_cfg=dict(assigner=assigner, sampler=dict(type='PseudoSampler'), allowed_border=-1,
                       pos_weight=-1, debug=False),
        test_cfg=dict(),
    )  # fmt: skip
    hook = dict(type='FGCHook', k=1, eta=1e-2, form='log_sum', log_interval=1)
    watch = run_task('mmdet', model, dict(type='mmengine.FGCBoxes', pipeline=pipeline), hook,
                     tmp_path)  # fmt: skip
    assert list(watch.banks) == ['backbone.layer4.0.gate1', 'backbone.layer4.1.gate1']
    watch.check(steps=2, k=1, eta=1e-2)


def test_segmentation(tmp_path):
    pytest.importorskip('mmseg.models')
    cv2 = pytest.importorskip('cv2')
    rng = np.random.default_rng(0)
    for folder in ('images', 'maps'):
        (tmp_path / folder).mkdir()
    for i in range(6):
        picture = rng.integers(0, 256, (48, 48, 3), dtype=np.uint8)
        cv2.imwrite(str(tmp_path / 'images' / f'{i}.jpg'), picture)
        cv2.imwrite(str(tmp_path / 'maps' / f'{i}.png'), picture[:, :, 0] // 64)
    pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations'),
        dict(type='PackSegInputs'),
    ]
    dataset = dict(
        type='BaseSegDataset', data_root=str(tmp_path), pipeline=pipeline,
        data_prefix=dict(img_path='images', seg_map_path='maps'),
        metainfo=dict(classes=tuple('abcd'), palette=[[i, 0, 0] for i in range(4)]),
    )  # fmt: skip
    backbone = dict(
        type='GatedResNet', depth=18, base_channels=8, stem_channels=8, out_indices=(3,)
    )
    model = dict(
        type='EncoderDecoder',
        data_preprocessor=dict(type='SegDataPreProcessor', size=(48, 48)),
        backbone=backbone,
        decode_head=dict(type='FCNHead', in_channels=64, in_index=0, channels=8, num_convs=1,
                         num_classes=4, norm_cfg=dict(type='BN')),
        train_cfg=dict(),
        test_cfg=dict(mode='whole'),
    )  # fmt: skip
    watch = run_task('mmseg', model, dataset, {**FGC, 'layers': ['layer4.1'], 'k': 4}, tmp_path)
    assert list(watch.banks) == ['backbone.layer4.1.gate1']
    watch.check(steps=2, k=4)


def run_task(scope, model, dataset, hook, tmp_path):
    cfg = dict(
        default_scope=scope,
        work_dir=str(tmp_path / 'work'),
        experiment_name=f'{scope}-{tmp_path.name}',
        model=model,
        train_dataloader=dict(
            batch_size=3,
            num_workers=0,
            dataset=dataset,
            sampler=dict(type='DefaultSampler', shuffle=True),
        ),
        train_cfg=dict(by_epoch=True, max_epochs=1),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.01)),
        default_hooks=dict(checkpoint=None, logger=dict(type='LoggerHook', interval=1)),
        custom_hooks=[hook],
        randomness=dict(seed=0),
    )
    runner = Runner(**cfg, cfg=Config())
    watch = Watch()
    runner.register_hook(watch)
    runner.train()
    return watch


# Bad input


def test_wrong_settings_are_refused_when_the_hook_is_built():
    for wrong, message in (
        (dict(k=0), 'k=0 must be a whole number'),
        (dict(form='log'), "form='log' must be one of"),
        (dict(space='gates'), "space='gates' must be one of"),
        (dict(source='pixels'), "source='pixels' must be one of"),
        (dict(tau=0), 'tau=0 must be positive'),
        (dict(momentum=1.0), 'momentum=1.0 must be within'),
        (dict(backend='annoy'), "backend='annoy' must be one of"),
        (dict(bank_dtype='int8'), "dtype='int8' must be one of"),
        (dict(bank_storage='tape'), "storage='tape' must be one of"),
        (dict(eta='big'), "FGCHook: eta='big'"),
        (dict(warmup_epochs=-1), 'warmup_epochs=-1'),
        (dict(log_interval=0), 'log_interval=0'),
    ):
        with pytest.raises(ValueError, match=message):
            FGCHook(**wrong)


@pytest.mark.parametrize(
    ('hook', 'changes', 'message'),
    [
        (dict(k=40), {}, 'k=40 neighbours: among N=40 .* choose k from 1 to 39'),
        (dict(layers=['layer7']), {}, "layers: 'layer7' names no block; choose from .*'layer3.2'"),
        (
            dict(layers=['layer1.0']),
            {'model.backbone.gated_blocks': 'last_stage'},
            "layers: 'layer1.0' names no block",
        ),
        (dict(), {'model.backbone.gate': None}, 'has no gates'),
        (
            dict(),
            {
                'model.data_preprocessor.batch_augments': dict(
                    augments=dict(type='Mixup', alpha=0.2)
                )
            },
            'FGCHook: data_preprocessor.batch_augments has Mixup',
        ),
    ],
)
def test_refused_before_the_first_step(hook, changes, message, digits_cfg, build):
    runner = build(digits_cfg([{**FGC, **hook}], **changes))
    with pytest.raises(ValueError, match=message):
        runner.train()
    assert runner.iter == 0


def test_no_index_and_one_out_of_range(make_runner, toy):
    """A dataset that is none of mmengine's, so its samples bring their own index."""

    class Numbered(toy.images):
        key, shift = 'instance_idx', 0

        def __getitem__(self, index):
            item = super().__getitem__(index)
            item['data_samples'].set_metainfo({self.key: index + self.shift})
            return item

    fgc = dict(type='FGCHook', k=3, num_instances=12)
    loader = dict(batch_size=4, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False))
    runner = make_runner([fgc], train_dataloader=dict(dataset=Numbered(), **loader))
    runner.train()
    assert runner.iter == 3

    runner = make_runner([dict(type='FGCHook', k=3)])
    with pytest.raises(TypeError, match='FGCHook: ToyImages has no `prepare_data`'):
        runner.train()
    runner = make_runner([fgc])
    with pytest.raises(ValueError, match=r"data sample 0 .* has no 'instance_idx'"):
        runner.train()
    Numbered.shift = 5
    runner = make_runner([fgc], train_dataloader=dict(dataset=Numbered(), **loader))
    with pytest.raises(IndexError, match=r'instance index 12 is out of range .* 0 to 11'):
        runner.train()
    runner = make_runner(
        [{**fgc, 'source': 'label', 'num_instances': 17}],
        train_dataloader=dict(dataset=Numbered(), **loader),
    )
    with pytest.raises(ValueError, match=r"source='label' .* has no gt_label"):
        runner.train()


def test_a_nan_batch_never_enters_a_bank(digits_cfg, build):
    @TRANSFORMS.register_module(name='FGCNan', force=True)
    class Nan:
        def __call__(self, results):
            results['img'] = results['img'].astype(np.float32)
            if results['img_path'].endswith('2/7.png'):
                results['img'][:] = np.nan
            return results

    cfg = digits_cfg([FGC])
    cfg.train_dataloader.dataset.pipeline.insert(1, dict(type='mmengine.FGCNan'))
    cfg.train_dataloader.sampler.shuffle = False
    # BN would spread the one picture over its batch.
    cfg.model.backbone.norm_eval = True
    runner = build(cfg)
    banks = []

    class Keep(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            hook = next(h for h in runner.hooks if isinstance(h, FGCHook))
            banks[:] = [
                (bank, bank.data.clone())
                for c in hook.couplings.values()
                for bank in (c.feature_bank, c.gate_bank)
            ]

    runner.register_hook(Keep())
    message = 'features of backbone.layer3.1.gate1 contain NaN or Inf for .* iteration 2, .*27'
    with pytest.raises(ValueError, match=message):
        runner.train()
    assert len(banks) == 4
    for bank, before in banks:
        assert torch.equal(bank.data, before)


def test_a_mixing_pipeline_brought_in_later_is_refused(digits_cfg, build):
    recipe = dict(action_epoch=2, batch_augments=dict(augments=dict(type='CutMix', alpha=1.0)))
    cfg = digits_cfg([FGC, dict(type='SwitchRecipeHook', schedule=[recipe])])
    runner = build(cfg)
    with pytest.raises(ValueError, match='batch_augments has CutMix'):
        runner.train()
    assert runner.epoch == 1


def test_another_number_of_views_is_refused(digits_cfg, build):
    cfg = digits_cfg([FGC])
    runner = build(cfg)
    model = runner.model
    extract = model.extract_feat
    model.extract_feat = lambda x, **kwargs: [
        f[: len(x)] for f in extract(torch.cat((x, x)), **kwargs)
    ]
    with pytest.raises(ValueError, match='saw 32 pictures but the batch has 16 data samples'):
        runner.train()


def test_registered_for_every_scope():
    assert HOOKS.get('FGCHook') is FGCHook
