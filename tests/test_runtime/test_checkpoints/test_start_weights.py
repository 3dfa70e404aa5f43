# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What tools/train.py says when the weights to start from are not there."""

import urllib.error
import urllib.request

import pytest
import torch
from mmengine.config import Config

from fgc_mm.errors import UsageError
from fgc_mm.runtime.checkpoints.start_weights import check_start_weights

INIT = 'model.backbone.init_cfg.checkpoint'
MADE = {
    'paper/resnet20_fgc_cifar10': ('load_from', 'paper/resnet20_bas_cifar10'),
    'demo/pspnet_r18_digits_gated': ('load_from', 'demo/pspnet_r18_digits'),
    'paper/faster_rcnn_r34_fgc_voc': (INIT, 'paper/resnet34_fgc_imagenet'),
    'paper/pspnet_r50_gated_cityscapes': (INIT, 'paper/resnet50_gated_imagenet'),
}
PUBLIC = {
    'faster_rcnn_r50_fgc_voc': (INIT, 'resnet50-0676ba61.pth'),
    'pspnet_r50_baseline_cityscapes': (INIT, 'resnet50-0676ba61.pth'),
    'resnet34_gated_imagenet': ('load_from', 'resnet34_8xb32_in1k_20210831-f257d4e6.pth'),
}


@pytest.mark.parametrize('name', MADE)
def test_one_message_with_the_config_that_makes_them(name, run_tool, tmp_path):
    key, maker = MADE[name]
    nowhere = f'{tmp_path}/work_dirs/{maker.rpartition("/")[2]}/epoch_9.pth'
    options = ['--cfg-options', f'{key}={nowhere}']
    code, _, err = run_tool('train', f'configs/{name}.py', '--work-dir', tmp_path, *options)
    assert code == 2
    assert 'Traceback' not in err
    assert f'{key}={nowhere!r} does not exist' in err
    assert f'python tools/train.py configs/{maker}.py' in err
    stem = name.removeprefix('paper/')
    assert (f'before it:  python tools/train.py configs/{stem}.py' in err) == (
        'cifar' not in name and 'paper' in name
    )


@pytest.fixture
def offline(tmp_path, monkeypatch):
    """No server answers, and nothing is in the cache, whose folder is returned."""

    def refuse(url, timeout):
        raise urllib.error.URLError('no network here')

    monkeypatch.setattr(urllib.request, 'urlopen', refuse)
    monkeypatch.setenv('TORCH_HOME', str(tmp_path / 'torch'))
    return tmp_path / 'torch/hub/checkpoints'


@pytest.mark.parametrize('name', PUBLIC)
def test_public_weights_without_a_network(name, offline):
    """File, folder and option; nothing is asked of a server once the file is there."""
    key, file = PUBLIC[name]
    cfg = Config.fromfile(f'configs/{name}.py')
    with pytest.raises(UsageError) as caught:
        check_start_weights(cfg)
    message = str(caught.value)
    assert f'{key}=' in message and 'no network here' in message
    assert f'{offline} as {file}' in message
    assert f'--cfg-options {key}=FILE' in message
    offline.mkdir(parents=True)
    (offline / file).touch()
    check_start_weights(cfg)


def test_weights_and_data_are_told_together(run_tool, tmp_path):
    """One look at what is missing, not one after the other."""
    nowhere = [f'{split}_dataloader.dataset.data_root={tmp_path}/no' for split in ('train', 'val')]
    options = ['--cfg-options', f'{INIT}={tmp_path}/none.pth', *nowhere]
    config = 'configs/faster_rcnn_r50_fgc_voc.py'
    code, _, err = run_tool('train', config, '--work-dir', tmp_path, *options)
    assert code == 2
    assert f"{INIT}='{tmp_path}/none.pth' does not exist" in err
    assert f'the folder {tmp_path}/no does not exist' in err
    assert 'docs/data.md' in err


def test_only_the_first_process_asks_a_server(offline, monkeypatch):
    monkeypatch.setenv('RANK', '1')
    check_start_weights(Config.fromfile('configs/faster_rcnn_r50_fgc_voc.py'))


def test_a_name_that_is_in_no_list(offline):
    model = dict(backbone=dict(pretrained='torchvision://resnet51'))
    with pytest.raises(UsageError, match=r'model\.backbone\.pretrained=.*did you mean.*resnet50'):
        check_start_weights(Config(dict(model=model)))


def test_files_and_other_addresses_pass(tmp_path):
    file = tmp_path / 'weights.pth'
    torch.save({}, file)
    init_cfg = [dict(type='Kaiming'), dict(type='Pretrained', checkpoint=str(file))]
    model = dict(backbone=dict(init_cfg=init_cfg), head=dict(pretrained='s3://a/vgg16.pth'))
    check_start_weights(Config(dict(model=model, load_from='petrel://a.pth')))
    file.unlink()
    with pytest.raises(UsageError, match=r'model\.backbone\.init_cfg\.1\.checkpoint='):
        check_start_weights(Config(dict(model=model)))
