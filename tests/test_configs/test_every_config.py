# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Every config in configs/ builds, trains and tests on its dataset's own files."""

import math
import re
from pathlib import Path

import pytest

from fgc_mm.engine import FGCHook

FOLDER = Path(__file__).parents[2] / 'configs'
CONFIGS = sorted(path.stem for path in FOLDER.glob('*.py'))
SHORT = sorted(f'short/{path.stem}' for path in (FOLDER / 'short').glob('*.py'))
METRICS = {'mmdet': 'pascal_voc/mAP', 'mmseg': 'mIoU', 'mmpretrain': 'accuracy/top1'}
GATE_LOSSES = {
    'baseline': set(),
    'bas': {'loss_batch_shaping'},
    'gated': {'loss_l0'},
    'fgc': {'loss_l0', 'loss_fgc'},
}
# Fine-tuned at a given cost, in one stage.
TUNED_LOSSES = {
    'baseline': set(),
    'fbs': set(),
    'bas': {'loss_batch_shaping', 'loss_budget'},
    'gated': {'loss_budget'},
    'fgc': {'loss_budget', 'loss_fgc'},
    'bas_fgc': {'loss_batch_shaping', 'loss_budget', 'loss_fgc'},
}


def stage(name):
    return re.search('_(baseline|bas_fgc|bas|fbs|gated|fgc)_', name)[1]


@pytest.mark.parametrize('name', CONFIGS + SHORT)
def test_trains_and_tests(name, train_and_test, project):
    done = train_and_test(project / f'configs/{name}.py')
    assert done.iters == 2
    expected = set((TUNED_LOSSES if '_tuned_' in name else GATE_LOSSES)[stage(name)])
    if name == 'pspnet_r50_bas_cityscapes':  # one training in place of two stages
        expected.add('loss_l0')
    if re.fullmatch('short/resnet20_(gated|fgc)_cifar10', name):  # both stages in one
        expected.add('loss_batch_shaping')
    if '_budget_' in name:
        expected = expected - {'loss_l0'} | {'loss_budget'}
    ours = {'loss_l0', 'loss_batch_shaping', 'loss_fgc', 'loss_budget'}
    assert ours & set(done.losses) == expected
    assert all(math.isfinite(value) for value in done.losses.values()), done.losses
    assert METRICS[done.cfg.default_scope] in done.metrics
    # A gate's own computation counts, so with gates the ratio is not exactly 0.
    assert (done.metrics['macs/pruning_ratio'] == 0) == (stage(name) == 'baseline')
    coupled = [hook.seen for hook in done.runner.hooks if isinstance(hook, FGCHook)]
    assert coupled == ([4] if stage(name).endswith('fgc') else [])


def test_families_are_complete():
    """The same stages for every network, so that no row of a table lacks its config."""
    families = {}
    for name in CONFIGS:
        families.setdefault(re.sub('_(baseline|bas|gated|fgc)_', '_*_', name), set()).add(
            stage(name)
        )
    assert len(families) == 14
    for family, stages in families.items():
        two_stages = not family.startswith('faster_rcnn')
        assert stages == {'baseline', 'gated', 'fgc'} | ({'bas'} if two_stages else set()), family
