# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import pytest
from mmengine.config import Config
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS

import fgc_mm  # noqa: F401
from fgc_mm.errors import UsageError
from fgc_mm.runtime.config.files import read_config
from fgc_mm.runtime.config.scopes import find_config


@pytest.mark.parametrize(
    ('base', 'model'),
    [
        ('mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py', 'FasterRCNN'),
        ('mmseg::pspnet/pspnet_r50-d8_4xb2-40k_cityscapes-512x1024.py', 'EncoderDecoder'),
        ('mmpretrain::resnet/resnet18_8xb16_cifar10.py', 'ImageClassifier'),
        ('fgc_mm::demo/pspnet_r18_digits_gated.py', 'EncoderDecoder'),
        ('fgc_mm::paper/resnet20_fgc_cifar10.py', 'ImageClassifier'),
    ],
)
def test_bases_of_every_package_resolve(base, model):
    assert Config.fromstring(f'_base_ = {base!r}', '.py').model.type == model


def test_bases_of_fgc_mm_leave_the_scope_to_the_task():
    """A dataset of mmseg is not looked for among the classes of fgc_mm."""
    cfg = Config.fromstring("_base_ = 'fgc_mm::demo/pspnet_r18_digits_gated.py'", '.py')
    assert cfg.train_dataloader.dataset.type == 'BaseSegDataset'
    assert "_scope_='fgc_mm'" not in cfg.dump()
    assert cfg.default_scope == 'mmseg'


def test_a_base_that_is_not_there_is_named():
    with pytest.raises(FileNotFoundError, match=r'_base_ fgc_mm::demo/nothere\.py does not exist'):
        Config.fromstring("_base_ = 'fgc_mm::demo/nothere.py'", '.py')


@pytest.mark.parametrize(
    ('name', 'model'),
    [
        ('fgc_mm::paper/resnet20_fgc_cifar10.py', 'ImageClassifier'),
        ('mmseg::fcn/fcn_r18-d8_4xb2-80k_cityscapes-512x1024.py', 'EncoderDecoder'),
    ],
)
def test_commands_take_the_names_of_configs_as_well(name, model):
    assert find_config(name).is_file()
    assert read_config(name).model.type == model


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('fgc_mm::demo/nothere.py', 'nothere.* does not exist'),
        ('mmnothere::a/b.py', 'mmnothere is not installed'),
    ],
)
def test_names_of_nothing(name, message):
    with pytest.raises(UsageError, match=message):
        read_config(name)


@pytest.mark.parametrize('scope', ['mmengine', 'mmdet', 'mmseg', 'mmpretrain'])
@pytest.mark.parametrize(
    ('registry', 'name'),
    [
        (MODELS, 'GatedResNet'),
        (MODELS, 'BinConcreteGate'),
        (HOOKS, 'L0Hook'),
        (METRICS, 'GatedMACs'),
        (DATASETS, 'CIFARBinary'),
    ],
)
def test_everything_is_found_by_its_plain_name_in_every_scope(scope, registry, name):
    with registry.switch_scope_and_registry(scope) as scoped:
        assert scoped.get(name) is not None
