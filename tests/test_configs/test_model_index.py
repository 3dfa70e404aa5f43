# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""model-index.yml lists the configs, and calls the paper's figures the paper's."""

import pytest
import yaml
from mmengine.config import Config

MEASURED = ('configs/demo/', 'configs/short/')


@pytest.fixture(scope='module')
def models(project):
    files = yaml.safe_load((project / 'model-index.yml').read_text())['Import']
    return [m for file in files for m in yaml.safe_load((project / file).read_text())['Models']]


def test_every_config_is_listed_once(models, project):
    listed = [model['Config'] for model in models]
    there = [
        str(path.relative_to(project))
        for folder in ('configs', 'configs/paper')
        for path in (project / folder).glob('*.py')
    ]
    assert sorted(p for p in listed if not p.startswith(MEASURED)) == sorted(there)
    assert len(set(listed)) == len(listed)
    assert [model['Name'] for model in models] == [path[8:-3] for path in listed]


def test_metadata_is_that_of_the_config(models, project):
    for model in models:
        cfg = Config.fromfile(project / model['Config'])
        meta, name = model['Metadata'], model['Name']
        processes = 8 if name.endswith('imagenet') else 1
        assert meta['Batch Size'] == cfg.train_dataloader.batch_size * processes, name
        batches = -(-2975 // 6)
        epochs = cfg.train_cfg.get('max_epochs') or cfg.train_cfg.max_iters / batches
        assert meta['Epochs'] == epochs, name


def test_figures_are_marked_as_the_papers(models):
    with_figures = [m for m in models if 'Results' in m and not m['Config'].startswith(MEASURED)]
    assert len(with_figures) == 3 * (3 + 3 + 2 + 1 + 2) + 4
    for model in with_figures:
        for result in model['Results']:
            assert result['Reported By'].startswith('the paper ('), model['Name']
            assert 'Pruning Ratio' in result['Metrics'] and len(result['Metrics']) > 1
        assert 'Weights' not in model


def test_measured_figures_name_their_command(models, project):
    measured = [m for m in models if m['Config'].startswith(MEASURED)]
    assert measured
    for model in measured:
        for result in model['Results']:
            assert result['Measured By'] == 'this project' and 'Reported By' not in result
            assert f'tools/train.py {model["Config"]}' in result['Command'], model['Name']
            assert f'tools/test.py {model["Config"]} work_dirs/' in result['Command'], model['Name']
            start = Config.fromfile(project / model['Config']).get('load_from')
            if start is not None:  # what it starts from has to be trained first
                path = start.removeprefix('work_dirs/').rpartition('/')[0]
                before = path if '/' in path else f'demo/{path}'
                assert f'tools/train.py configs/{before}.py;' in result['Command'], model['Name']
