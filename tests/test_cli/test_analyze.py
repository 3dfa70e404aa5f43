# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Gates of real networks over the demo data, gathered once and drawn many times."""

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gate_tables import read_csv
from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope

from fgc_mm.analysis import gather as gather_module
from fgc_mm.analysis.gate_table import GateTable
from fgc_mm.analysis.gather import build_dataset
from fgc_mm.gates import find_gates

CONFIGS = {
    'classification': 'resnet18_digits_fgc',
    'detection': 'faster_rcnn_r18_digits_gated',
    'segmentation': 'pspnet_r18_digits_gated',
}


@pytest.fixture
def analyze(run_tool, demo_checkpoint, demo_root, tmp_path):
    """``analyze(task, command, *options)`` on a small network and six pictures."""

    def call(task, command, *options, config=None, checkpoint=None):
        name = CONFIGS[task]
        checkpoint = tmp_path / (checkpoint or f'{task}.pth')
        if not checkpoint.is_file():
            demo_checkpoint(name, checkpoint)
        root = f'{demo_root}/{task}/' + ('VOCdevkit/' if task == 'detection' else '')
        small = [f'test_dataloader.dataset.data_root={root}', f'demo_data.root={demo_root}']
        arguments = [config or f'configs/demo/{name}.py', checkpoint, '--max-images', 6, *options]
        return run_tool('analyze', command, *arguments, '--cfg-options', *small)

    return call


def cached(folder):
    (path,) = (folder / 'analysis' / 'cache').iterdir()
    return GateTable.load(path)


@pytest.mark.parametrize('task', CONFIGS)
def test_what_the_gates_do_over_pictures(task, analyze, tmp_path, monkeypatch, demo_root):
    code, _, err = analyze(task, 'cost')
    assert code == 0, err
    written = {path.name for path in (tmp_path / 'analysis').iterdir()}
    assert written == {'cache', 'cost.csv', 'cost_layers.csv', 'cost.png', 'cost.svg'}
    table = cached(tmp_path)
    assert len(table) == 6 and table.info['task'] == task
    cfg = Config.fromfile(f'configs/demo/{CONFIGS[task]}.py')
    root = f'{demo_root}/{task}/' + ('VOCdevkit/' if task == 'detection' else '')
    cfg.test_dataloader.dataset.data_root = root
    dataset = build_dataset(cfg, 'test')
    # First and last of the split and some between, not the first six of one class.
    assert table.positions[0] == 0 and table.positions[-1] == len(dataset) - 1
    assert len(set(np.diff(table.positions).tolist())) <= 2
    model = built(cfg, tmp_path / f'{task}.pth')
    for row, position in enumerate(table.positions):
        item = dataset[int(position)]
        assert_same_picture(model, table, row, item)
        assert set(np.flatnonzero(table.present[row])) == classes_of(item['data_samples'])
    executed = {
        kind: sum(r['executed'] for r in table.costs if r['kind'] in kinds)
        for kind, kinds in (
            ('backbone', ('gated', 'plain', 'gate')),
            ('all', ('gated', 'plain', 'gate', 'outside')),
        )
    }
    assert executed['backbone'] == pytest.approx(table.macs[:, 0].mean(), rel=1e-6)
    assert executed['all'] == pytest.approx(table.macs[:, 2].mean(), rel=1e-6)
    dense = sum(r['dense'] for r in table.costs if r['kind'] in ('gated', 'plain'))
    assert dense == pytest.approx(table.macs[:, 1].mean(), rel=1e-6)
    assert table.macs[:, 0].max() < dense
    # The second figure does not run the network.
    with monkeypatch.context() as patch:
        patch.setattr(gather_module, '_run', None)
        for command in ('frequency', 'neighbors'):
            code, _, err = analyze(task, command, '--layers', 'last_stage')
            assert code == 0, err
            assert (tmp_path / 'analysis' / f'{command}.csv').is_file()
            for block, ending in itertools.product(('layer4.0', 'layer4.1'), ('png', 'svg')):
                assert (tmp_path / 'analysis' / f'{command}_{block}.{ending}').is_file()
    if task == 'classification':
        assert table.info['coupled'] == [n for n in table.layers if '.layer4-' in n]
        # Other weights are gathered anew.
        torch.save(dict(state_dict=model.state_dict()), tmp_path / f'{task}.pth')
        assert analyze(task, 'cost')[0] == 0
        assert len(list((tmp_path / 'analysis' / 'cache').iterdir())) == 2
        assert_no_cache_runs_again(analyze, tmp_path, monkeypatch)


def assert_no_cache_runs_again(analyze, tmp_path, monkeypatch):
    """``--no-cache`` runs the network, and what it finds takes the place of the cache."""
    passes, run = [], gather_module._run
    monkeypatch.setattr(gather_module, '_run', lambda *args: passes.append(args) or run(*args))
    paths = list((tmp_path / 'analysis' / 'cache').iterdir())
    before = {path: path.stat().st_mtime_ns for path in paths}
    assert analyze('classification', 'cost')[0] == 0
    assert not passes
    assert analyze('classification', 'cost', '--no-cache')[0] == 0
    assert len(passes) == 1
    assert sum(path.stat().st_mtime_ns != before[path] for path in paths) == 1


def built(cfg, checkpoint):
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        shared = {key: cfg[key] for key in ('data_preprocessor',) if key in cfg}  # as a Runner does
        model = MODELS.build({**shared, **cfg.model})
    model.load_state_dict(torch.load(checkpoint, weights_only=True)['state_dict'])
    return model.eval()


@torch.no_grad()
def assert_same_picture(model, table, row, item):
    # One by one: batches of the demo have pictures of one size.
    batch = model.data_preprocessor(
        dict(inputs=[item['inputs']], data_samples=[item['data_samples']]), False
    )
    gates = find_gates(model)
    for gate in gates.values():
        gate.wants_feature = True
    model.backbone(batch['inputs'])
    for name, gate in gates.items():
        for kind in ('logits', 'feature'):
            expected = getattr(gate.record, kind)[0].numpy()
            found = getattr(table, kind)[name][row]
            np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-3)
        sure = gate.record.logits[0].abs().numpy() > 1e-2
        expected = gate.record.mask[0].numpy()
        assert (table.mask[name][row] == expected)[sure].all()


def classes_of(sample):
    if 'gt_label' in sample:
        return set(sample.gt_label.tolist())
    if 'gt_sem_seg' in sample:
        return set(sample.gt_sem_seg.data.unique().tolist()) - {255}
    return set(sample.gt_instances.labels.tolist())


def test_networks_beside_each_other(analyze, tmp_path):
    other = ['--versus', 'configs/demo/resnet18_digits_gated.py', tmp_path / 'classification.pth']
    code, _, err = analyze('classification', 'alignment', *other, '--names', 'FGC', 'gated')
    assert code == 0, err
    rows = read_csv(tmp_path / 'analysis' / 'alignment.csv')
    assert [row['run'] for row in rows] == ['FGC'] * 8 + ['gated'] * 8
    # The same weights under two names; coupled are the layers of the config that says so.
    assert [row['overlap'] for row in rows[:8]] == [row['overlap'] for row in rows[8:]]
    assert [row['coupled'] for row in rows] == ['False'] * 6 + ['True'] * 2 + ['False'] * 8


def test_segmentors_beside_each_other(analyze, tmp_path, demo_checkpoint):
    """Their configs name the visualizer, which must not be shared between two networks."""
    name = CONFIGS['segmentation']
    demo_checkpoint(name, tmp_path / 'other.pth')
    config = tmp_path / 'named.py'
    text = f"_base_ = '{Path(f'configs/demo/{name}.py').resolve()}'\n"
    config.write_text(text + "visualizer = dict(name='visualizer')\n")
    other = ['--versus', config, tmp_path / 'other.pth', '--names', 'a', 'b', '--no-cache']
    code, _, err = analyze('segmentation', 'alignment', *other, config=config)
    assert code == 0, err
    assert {row['run'] for row in read_csv(tmp_path / 'analysis' / 'alignment.csv')} == {'a', 'b'}


def test_frames_of_saved_epochs(analyze, tmp_path, demo_checkpoint):
    for epoch in (2, 10):
        demo_checkpoint(CONFIGS['classification'], tmp_path / f'epoch_{epoch}.pth')
    (tmp_path / 'epoch_11.pth').touch()  # later than the one that is looked at
    (tmp_path / 'epoch_2.banks.pth').touch()
    code, _, err = analyze('classification', 'embedding', '--frames', checkpoint='epoch_10.pth')
    assert code == 0, err
    rows = read_csv(tmp_path / 'analysis' / 'embedding.csv')
    assert list(dict.fromkeys(row['frame'] for row in rows)) == ['epoch 2', 'epoch 10']
    assert {row['layer'] for row in rows} == {'backbone.gates.layer4-1-conv1'}
    assert len(rows) == 2 * 2 * 6 and (tmp_path / 'analysis' / 'embedding_layer4.1.png').is_file()


@pytest.mark.parametrize(
    ('command', 'message'),
    [
        ('embedding', 'an embedding needs the package umap, which cannot be imported'),
        ('alignment', 'alignment needs the package sklearn, which cannot be imported'),
    ],
)
def test_without_the_extra(command, message, analyze, monkeypatch):
    for module in ('umap', 'sklearn.cluster', 'sklearn.metrics'):
        monkeypatch.setitem(sys.modules, module, None)
    code, _, err = analyze('classification', command)
    assert code == 2 and message in err and "pip install 'fgc-mm[analysis]'" in err


def test_what_the_cache_depends_on(tmp_path):
    (tmp_path / 'model.pth').write_bytes(b'weights')
    cfg = Config.fromfile(f'configs/demo/{CONFIGS["classification"]}.py')
    first = gather_module._key(cfg, str(tmp_path / 'model.pth'), 'test', None)
    assert first == gather_module._key(cfg, str(tmp_path / 'model.pth'), 'test', None)
    cfg.data_preprocessor.mean = [0.0, 0.0, 0.0]
    assert first != gather_module._key(cfg, str(tmp_path / 'model.pth'), 'test', None)
