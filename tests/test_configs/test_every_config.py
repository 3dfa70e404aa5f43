# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Every config in configs/ builds, trains and tests on its dataset's own files."""

import math
import re
from pathlib import Path

import pytest

from fgc_mm.training import FGCHook

FOLDER = Path(__file__).parents[2] / 'configs'
CONFIGS = sorted(path.stem for path in FOLDER.glob('*.py'))
PAPER = sorted(f'paper/{path.stem}' for path in (FOLDER / 'paper').glob('*.py'))
SHORT = sorted(f'short/{path.stem}' for path in (FOLDER / 'short').glob('*.py'))
METRICS = {'mmdet': 'pascal_voc/mAP', 'mmseg': 'mIoU', 'mmpretrain': 'accuracy/top1'}
# Of the paper's own chain.
PAPER_LOSSES = {
    'baseline': set(),
    'bas': {'loss_batch_shaping'},
    'gated': {'loss_l0'},
    'fgc': {'loss_l0', 'loss_fgc'},
}
# Fine-tuned at a given cost, in one stage.
BUDGET_LOSSES = {
    'baseline': set(),
    'fbs': set(),
    'static': set(),
    'bas': {'loss_batch_shaping', 'loss_budget'},
    'gated': {'loss_budget'},
    'fgc': {'loss_budget', 'loss_fgc'},
    'bas_fgc': {'loss_batch_shaping', 'loss_budget', 'loss_fgc'},
}


def stage(name):
    return re.search('_(baseline|bas_fgc|bas|fbs|static|gated|fgc)_', name)[1]


@pytest.mark.parametrize('name', CONFIGS + PAPER + SHORT)
def test_trains_and_tests(name, train_and_test, project):
    done = train_and_test(project / f'configs/{name}.py')
    assert done.iters == 2
    expected = set((PAPER_LOSSES if name.startswith('paper/') else BUDGET_LOSSES)[stage(name)])
    if name == 'paper/pspnet_r50_bas_cityscapes':  # one training in place of two stages
        expected.add('loss_l0')
    if re.fullmatch('short/resnet20_(gated|fgc)_cifar10', name):  # both stages in one
        expected = set(PAPER_LOSSES[stage(name)]) | {'loss_batch_shaping'}
    ours = {'loss_l0', 'loss_batch_shaping', 'loss_fgc', 'loss_budget'}
    assert ours & set(done.losses) == expected
    assert all(math.isfinite(value) for value in done.losses.values()), done.losses
    assert METRICS[done.cfg.default_scope] in done.metrics
    # A gate's own computation counts, so with gates the ratio is not exactly 0.
    assert (done.metrics['macs/pruning_ratio'] == 0) == (stage(name) == 'baseline')
    coupled = [hook.coupling.seen for hook in done.runner.hooks if isinstance(hook, FGCHook)]
    assert coupled == ([4] if stage(name).endswith('fgc') else [])


@pytest.mark.parametrize('names', [CONFIGS, PAPER])
def test_families_are_complete(names):
    """The same stages for every network, so that no row of a table lacks its config."""
    families = {}
    for name in names:
        families.setdefault(re.sub('_(baseline|bas|gated|fgc)_', '_*_', name), set()).add(
            stage(name)
        )
    assert len(families) == (6 if names is CONFIGS else 14)
    for family, stages in families.items():
        expected = {'baseline', 'bas', 'gated', 'fgc'}
        if 'faster_rcnn' in family:
            expected.discard('bas')
        if family.startswith(('paper/faster_rcnn', 'paper/pspnet')):  # dense ones are the users'
            expected.discard('baseline')
        assert stages == expected, family
