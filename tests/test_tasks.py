# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The tasks there are, and one more: what it takes to be trained, tested, drawn and exported."""

import importlib
import json
from types import SimpleNamespace

import pytest
import torch
from command_line import run_tool  # noqa: F401
from mmengine.config import Config
from mmengine.structures import BaseDataElement, InstanceData, PixelData

from fgc_mm import tasks
from fgc_mm.analysis import tradeoff
from fgc_mm.analysis.gather import gather
from fgc_mm.analysis.report_page import result_rows
from fgc_mm.analysis.report_runs import ReportRun
from fgc_mm.datasets import check_dataset_paths
from fgc_mm.errors import DataError, UsageError
from fgc_mm.evaluation.summary import add_derived
from fgc_mm.inference import Picture, export
from fgc_mm.runtime import launch
from fgc_mm.runtime.config.check import check_run_settings
from fgc_mm.runtime.first_step import check_classes

CONFIG = """
default_scope = 'counting'
custom_imports = dict(imports=['fgc_mm', 'counting'])
model = dict(
    type='Counter',
    num_classes=4,
    backbone=dict(type='mmpretrain.GatedResNet', depth=18, base_channels=8, stem_channels=8))
train_dataloader = dict(
    batch_size=4,
    dataset=dict(
        type='Dots', data_root={root!r}, ann_file='counts.txt',
        data_prefix=dict(img_path='pictures'),
        pipeline=[dict(type='LoadImageFromFile'), dict(type='PackDots')]))
test_dataloader = train_dataloader
test_cfg = dict()
test_evaluator = dict(type='CountError')
train_cfg = dict(by_epoch=True, max_epochs=1)
optim_wrapper = dict(optimizer=dict(type='SGD', lr=0.01))
default_hooks = dict(visualization=dict(type='DotPainter'))
custom_hooks = [dict(type='FGCHook', k=1, source='label')]
"""


@pytest.fixture
def counting():
    """The package with one more task; what it registers is gone afterwards."""
    import counting

    known = dict(tasks.TASKS)
    tasks.register_task(counting.Counting())
    yield counting
    tasks.TASKS.clear()
    tasks.TASKS.update(known)


@pytest.fixture
def config(counting, tmp_path):
    counting.write_pictures(tmp_path / 'dots')
    path = tmp_path / 'dots.py'
    path.write_text(CONFIG.format(root=str(tmp_path / 'dots')))
    return path


@pytest.fixture
def untrained(config, counting, tmp_path):
    """A checkpoint of the model, and its config."""
    cfg = Config.fromfile(config)
    cfg.work_dir, cfg.launcher, cfg.log_level = str(tmp_path / 'built'), 'none', 'ERROR'
    model = counting.MODELS.build(cfg.model)
    torch.save(dict(state_dict=model.state_dict(), meta={}), tmp_path / 'start.pth')
    return cfg, model, tmp_path / 'start.pth'


def test_one_more_task_is_trained_tested_and_drawn(config, run_tool, tmp_path):  # noqa: F811
    code, _, err = run_tool('train', config, '--work-dir', tmp_path / 'work')
    assert code == 0, err[-3000:]
    assert 'loss_task' in next((tmp_path / 'work').rglob('scalars.json')).read_text()
    checkpoint = tmp_path / 'work' / 'epoch_1.pth'
    args = ['--work-dir', tmp_path / 'test', '--show-dir', tmp_path / 'drawn']
    out = tmp_path / 'figures.json'
    code, printed, err = run_tool('test', config, checkpoint, *args, '--out', out)
    assert code == 0, err[-3000:]
    metrics = json.loads(out.read_text())['metrics']
    assert metrics['dots/exact'] == pytest.approx(100 * metrics['dots/hits'])
    assert 'macs/pruning_ratio' in metrics and 'dots/exact' in printed[printed.index('Results') :]
    assert len(list((tmp_path / 'drawn').glob('*.png'))) == 8
    picture = tmp_path / 'dots' / 'pictures' / '3.png'
    code, _, err = run_tool('infer', config, checkpoint, picture, '--out-dir', tmp_path / 'one')
    assert code == 0, err[-3000:]
    assert (tmp_path / 'one' / 'vis' / '3.png').is_file()
    assert (tmp_path / 'one' / 'macs.csv').is_file()


def test_one_more_task_has_labels_for_the_figures(untrained):
    cfg, _, checkpoint = untrained
    table = gather(cfg, str(checkpoint))
    assert table.info['task'] == 'counting'
    assert table.main_class.tolist() == [0, 1, 2, 3] * 2
    assert table.class_name(2) == '2 dots'


def test_one_more_task_is_exported(untrained):
    _, model, _ = untrained
    pictures = [Picture(*[torch.rand(1, 3, 32, 32)] * 2)]
    result = export(model, pictures, file_format='torchscript')
    assert list(result.outputs) == ['counts']


def test_one_more_task_has_its_data_checked(config, untrained):
    cfg, model, _ = untrained
    cfg.train_dataloader.dataset.ann_file = 'other.txt'
    with pytest.raises(DataError, match=r"dataset\.ann_file='other\.txt': the file"):
        check_dataset_paths(cfg, ('train',))
    dataset = SimpleNamespace(metainfo=dict(classes=['a', 'b', 'c', 'd', 'e']))
    with pytest.raises(UsageError, match=r'model\.dot_head\.num_classes=4, but .* has 5 classes'):
        check_classes(model, dataset, 'train_dataloader')


def test_metrics_of_one_more_task(counting, tmp_path):
    metrics = add_derived({'macs/pruning_ratio': 40.0, 'dots/MAE': 0.5, 'dots/hits': 0.75})
    assert metrics['dots/exact'] == 75
    assert tradeoff.task_metric([metrics]) == 'dots/MAE'
    assert tradeoff.task_metric([metrics], rising=True) == 'dots/exact'
    assert tradeoff.metric_label('dots/exact') == 'dots/exact, %'
    published = [dict(source='the paper: dots', metrics={'Exact': 0.8})]
    run = ReportRun('run', tmp_path, Config(), 'dots', metrics=metrics, published=published)
    rows = {row['name']: row['values'] for row in result_rows([run])}
    assert rows['dots/exact'] == [75, 80] and rows['dots/MAE'] == [0.5, None]


def sample(**fields):
    made = BaseDataElement()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


BOXES = InstanceData(labels=torch.tensor([2, 0, 2]))
PIXELS = PixelData(data=torch.tensor([[[1, 1], [3, 255]]]))
SAMPLES = {
    'detection': (sample(gt_instances=BOXES), [1, 0, 2], 3),
    # Panoptic annotations are taken for those of segmentation.
    'segmentation': (sample(gt_sem_seg=PIXELS, gt_instances=BOXES), [0, 0.5, 0, 0.25], 2),
    'classification': (sample(gt_label=torch.tensor([2])), [0, 0, 1], 1),
}
MODELS = {
    'detection': dict(extract_feat=1, bbox_head=1),
    'segmentation': dict(extract_feat=1, encode_decode=1, decode_head=1),
    'classification': dict(extract_feat=1, head=1),
}
DATASETS = {
    'detection': 'mmdet.datasets.CocoDataset',
    'segmentation': 'mmseg.datasets.CityscapesDataset',
    'classification': 'mmpretrain.datasets.ImageNet',
}


@pytest.mark.parametrize('name', tasks.TASKS)
def test_a_task_is_known_by_what_is_of_it(name):
    task = tasks.TASKS[name]
    assert tasks.task_named(name) is task
    assert tasks.task_of(dict(default_scope=task.scope)) is task
    assert tasks.task_of_hook(f'{task.scope}.{task.visualization_hook}') is task
    assert tasks.task_of_model(SimpleNamespace(**MODELS[name])) is task
    given, amount, objects = SAMPLES[name]
    assert tasks.task_of_sample(given) is task
    found, count = task.annotation(given)
    assert (found.tolist(), count) == (amount, objects)


@pytest.mark.parametrize('name', tasks.TASKS)
def test_a_dataset_is_known_by_its_class_or_what_it_derives_from(name):
    module, _, cls = DATASETS[name].rpartition('.')
    base = getattr(importlib.import_module(module), cls)
    own = type('Own', (base,), dict(__init__=lambda self: None, __module__='mine'))
    assert tasks.task_of_dataset(own()) is tasks.TASKS[name]


def test_what_is_of_no_task():
    own = sample(something=torch.tensor([1]))
    found = [
        tasks.task_named('panoptic'),
        tasks.task_of({}),
        tasks.task_of_hook('MyHook'),
        tasks.task_of_model(SimpleNamespace(head=1)),
        tasks.task_of_dataset([]),
        tasks.task_of_sample(own),
    ]
    assert [type(task) for task in found] == [tasks.Task] * len(found)


def test_an_unknown_scope_is_told_which_there_are():
    known = "'mmdet', 'mmseg', 'mmpretrain'"
    with pytest.raises(UsageError, match=rf"default_scope='mmsag' .* 'mmseg'\? .* {known}"):
        check_run_settings(Config(dict(default_scope='mmsag')))
    with pytest.raises(UsageError, match=rf"default_scope='other' .*package\. .* {known}"):
        check_run_settings(Config(dict(default_scope='other')))
    cfg = Config(dict(default_scope='mmengine'))
    with pytest.raises(UsageError, match=f"'mmengine' has no inferencer here; .* {known}"):
        tasks.task_of(cfg).inferencer(cfg, 'x.pth', 'out', 'cpu')
    cfg = Config(dict(default_hooks={}))
    with pytest.raises(UsageError, match=r"\(dict\(type='DetVisualizationHook'\) for mmdet, "):
        launch.draw_predictions(cfg, True, None, 0)
