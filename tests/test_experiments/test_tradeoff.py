# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""experiments/tradeoff.py: what it collects, would do, and two real networks of two steps."""

import csv
import json
import os
import re
from pathlib import Path

import pytest
from mmengine.config import Config

PROJECT = Path(__file__).parents[2]
CONFIG = 'configs/demo/resnet18_digits_gated.py'


def test_the_curves_of_finished_tests(run_tool, tmp_path):
    def point(ratio, **setting):
        return dict(setting, metrics={'accuracy/top1': 90.0, 'macs/pruning_ratio': ratio})

    figures = tmp_path / 'one.json'
    figures.write_text(json.dumps(point(40.0)))
    points = [point(100 * threshold, threshold=threshold) for threshold in (0.5, 0.88, 0.95)]
    (tmp_path / 'dial.json').write_text(json.dumps(dict(points=points)))
    collect = [f'one={figures}', f'dial={tmp_path / "dial.json"}']
    folder = tmp_path / 'curve'
    code, out, err = run_tool('tradeoff', '--collect', *collect, '--work-dir', folder)
    assert code == 0, err
    assert f'| one, {figures} |' in out
    dial = f'| dial, {tmp_path / "dial.json"}'
    for threshold in (0.5, 0.88, 0.95):  # each is told apart
        assert out.count(f'{dial}, threshold={threshold} |') == 1
    assert (folder / 'tradeoff.png').is_file() and (folder / 'tradeoff.svg').is_file()


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        (['--targets', 0.5], 'need a config'),
        ([CONFIG, '--targets', 1.5], '--targets 1.5 must be within (0, 1]'),
        ([CONFIG, '--targets', 0.5, '--coupling', 'with'], 'the config has no FGCHook'),
        (['--collect', 'nowhere.json'], '--collect nowhere.json: write CURVE=FILE'),
    ],
)
def test_mistakes_of_the_curve_are_one_message(args, message, run_tool, tmp_path):
    code, _, err = run_tool('tradeoff', *args, '--work-dir', tmp_path)
    assert code == 2
    assert message in err


def test_the_curve_of_a_config(run_tool, tmp_path):
    args = [CONFIG, '--targets', 0.9, '--seeds', 0, 1, '--work-dir', tmp_path, '--dry-run']
    code, out, err = run_tool('tradeoff', *args)
    assert code == 0, err
    assert out.count('train.py') == out.count('test.py') == 2
    assert '# target=0.9, seed 1' in out
    # What is there is not trained again.
    for run in ('target=0.3/seed0', 'target=0.9/seed0'):
        (tmp_path / run).mkdir(parents=True)
        metrics = {'accuracy/top1': 97.0, 'macs/pruning_ratio': 70.0}
        (tmp_path / run / 'figures.json').write_text(json.dumps(dict(metrics=metrics)))
    args = [CONFIG, '--targets', 0.3, 0.9, '--work-dir', tmp_path]
    code, out, err = run_tool('tradeoff', *args)
    assert code == 0, err
    assert '| target=0.9 | 1 | 97 | 70 |' in out
    assert (tmp_path / 'tradeoff.png').is_file()
    cfg = Config.fromfile(tmp_path / 'target=0.3/config.py')
    assert cfg.custom_hooks[0] == dict(type='BudgetHook', target=0.3)


def test_a_curve_for_real(run_tool, short_options, tmp_path, monkeypatch):
    """Two networks of two steps, with coupling and without, trained and tested."""
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join([str(PROJECT), os.getenv('PYTHONPATH', '')]))
    config = tmp_path / 'resnet18_digits_coupled.py'
    hooks = [dict(type='FGCHook', layers=-1, k=2), dict(type='GatedMACsHook')]
    hooks = [dict(type='L0Hook', rho=0.4), *hooks]
    config.write_text(f"_base_ = '{PROJECT / CONFIG}'\ncustom_hooks = {hooks!r}\n")
    work = tmp_path / 'work'
    code, out, err = run_tool(
        'tradeoff', config, '--targets', 0.8, '--work-dir', work, *short_options(config)
    )
    assert code == 0, out + err
    with open(work / 'table.csv') as file:
        rows = list(csv.DictReader(file))
    assert [row['setting'] for row in rows] == ['target=0.8', 'target=0.8, without FGC']
    for row in rows:
        assert row['runs'] == '1' and 0 <= float(row['accuracy/top1_mean']) <= 100
        assert -1 < float(row['macs/pruning_ratio_mean']) < 100
        (folder,) = work.glob(f'{row["setting"].replace(", ", "_").replace(" ", "*")}/seed0')
        log = (folder / 'train.log').read_text()
        assert 'loss_budget' in log and 'loss_l0' not in log
        coupled = 'without' not in row['setting']
        assert bool(re.search(r'loss_fgc: (?!0\.0000)', log)) == coupled
    assert (work / 'tradeoff.png').is_file() and (work / 'tradeoff.svg').is_file()
