# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The configs on the pages of docs/ work as they stand there."""

import math
import re
from pathlib import Path

import pytest
from mmengine.config import Config

import fgc_mm  # noqa: F401
from fgc_mm.training import FGCHook

PROJECT = Path(__file__).parents[2]


def configs_in(page):
    """The Python blocks of a page that begin with the name of a file."""
    blocks = re.findall(r'```python\n(# \S+\.py\n.*?)```', (PROJECT / page).read_text(), re.DOTALL)
    return {block.split()[1]: block for block in blocks}


TUTORIAL = configs_in('docs/tutorial.md')
METRICS = {
    'my_retinanet.py': 'coco/bbox_mAP',
    'my_fcos.py': 'coco/bbox_mAP',
    'my_deeplab.py': 'mIoU',
    'my_upernet.py': 'mIoU',
    'my_resnet101.py': 'accuracy/top1',
}


def test_tutorial_has_these_models():
    assert set(TUTORIAL) == set(METRICS)


@pytest.mark.parametrize('name', METRICS)
def test_stock_config_gated_and_coupled(name, train_and_test, tmp_path):
    config = tmp_path / name
    config.write_text(TUTORIAL[name])
    lines = [line for line in TUTORIAL[name].splitlines() if line and not line.startswith('#')]
    assert len(lines) <= 10
    done = train_and_test(config)
    assert done.iters == 2
    cost = 'loss_budget' if 'BudgetHook' in TUTORIAL[name] else 'loss_l0'
    assert {cost, 'loss_fgc'} <= set(done.losses)
    assert all(math.isfinite(value) for value in done.losses.values()), done.losses
    assert {METRICS[name], 'macs/pruning_ratio', 'gates/openness'} <= set(done.metrics)
    (hook,) = [hook for hook in done.runner.hooks if isinstance(hook, FGCHook)]
    assert hook.coupling.seen == 4


@pytest.fixture
def beside_configs(tmp_path):
    """A file of a page, as if it were saved in configs/."""

    def save(text):
        path = tmp_path / 'mine.py'
        path.write_text(re.sub(r"_base_ = '(.*)'", rf"_base_ = '{PROJECT}/configs/\1'", text))
        return Config.fromfile(path)

    return save


def test_pickled_cifar100(beside_configs):
    cfg = beside_configs(configs_in('docs/data.md')['configs/my_resnet20_cifar100.py'])
    base = Config.fromfile(PROJECT / 'configs/paper/resnet20_fgc_cifar100.py')
    for split in ('train', 'val', 'test'):
        dataset, before = (c[f'{split}_dataloader'].dataset.to_dict() for c in (cfg, base))
        assert dataset['type'] == 'CIFAR100'
        assert set(dataset) == {'type', 'data_root', 'split', 'pipeline'}
        assert (dataset['split'], dataset['pipeline']) == (before['split'], before['pipeline'])
