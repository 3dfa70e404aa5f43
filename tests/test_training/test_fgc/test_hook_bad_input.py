# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What FGCHook refuses, and when."""

import numpy as np
import pytest
import torch
from fgc_watch import FGC
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, TRANSFORMS

from fgc_mm.training import FGCHook


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
        (dict(taus=0.1), "FGCHook has no argument 'taus'; did you mean 'tau'"),
        (
            dict(approximate=dict(dim=3)),
            "approximate.dim=3: .* 'dim'; did you mean 'dims'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            FGCHook(**wrong)


@pytest.mark.parametrize(
    ('hook', 'changes', 'message'),
    [
        (dict(k=40), {}, 'k=40 neighbors: among N=40 .* choose k from 1 to 39'),
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
    with pytest.raises(ValueError, match='FGCHook: ToyImages has no `prepare_data`'):
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
                for c in hook.coupling.layers.values()
                for bank in (c.feature_bank, c.gate_bank)
            ]

    runner.register_hook(Keep())
    message = (
        'features of backbone.gates.layer3-1-conv1 contain NaN or Inf for .* iteration 2, .*27'
    )
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
