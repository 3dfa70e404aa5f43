# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.registry import DATASETS

from fgc_mm.datasets import check_dataset_paths
from fgc_mm.errors import DataError

CONFIGS = Path(__file__).parents[2] / 'configs' / '_base_'
LABELS = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations')]


def problem(cfg: dict, splits: tuple[str, ...] = ('train', 'val', 'test')) -> str:
    with pytest.raises(DataError) as caught:
        check_dataset_paths(Config(cfg), splits)
    return str(caught.value)


def voc_tree(root: Path, ids: tuple[str, ...] = ('000001', '000002')) -> Path:
    for folder in ('JPEGImages', 'Annotations', 'ImageSets/Main'):
        (root / 'VOC2007' / folder).mkdir(parents=True)
    for name in ids:
        (root / 'VOC2007' / 'JPEGImages' / f'{name}.jpg').touch()
        (root / 'VOC2007' / 'Annotations' / f'{name}.xml').touch()
    (root / 'VOC2007/ImageSets/Main/trainval.txt').write_text('\n'.join(ids) + '\n')
    return root


def voc(root: Path, **kwargs) -> dict:
    return dict(
        type='VOCDataset',
        data_root=str(root),
        ann_file='VOC2007/ImageSets/Main/trainval.txt',
        data_prefix=dict(sub_data_root='VOC2007/'),
        **kwargs,
    )


def cityscapes_tree(root: Path) -> Path:
    for city, frame in (('aachen', '000000'), ('ulm', '000001')):
        name = f'{city}/{city}_{frame}_000019'
        for path in (
            root / 'leftImg8bit' / 'train' / f'{name}_leftImg8bit.png',
            root / 'gtFine' / 'train' / f'{name}_gtFine_labelTrainIds.png',
        ):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    return root


def cityscapes(root: Path, **kwargs) -> dict:
    return dict(
        type='CityscapesDataset',
        data_root=str(root),
        data_prefix=dict(img_path='leftImg8bit/train', seg_map_path='gtFine/train'),
        pipeline=kwargs.pop('pipeline', LABELS),
        **kwargs,
    )


def config(scope: str, **datasets) -> dict:
    loaders = {f'{split}_dataloader': dict(dataset=each) for split, each in datasets.items()}
    return dict(default_scope=scope, **loaders)


@pytest.mark.parametrize('kind', ['classification', 'detection', 'segmentation'])
def test_demo_configs_find_the_demo_data(demo_root, monkeypatch, tmp_path, kind):
    cfg = Config.fromfile(CONFIGS / f'digits_{kind}.py')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r'tools/make_demo_data\.py --root data/demo'):
        check_dataset_paths(cfg)
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data' / 'demo').symlink_to(demo_root)
    check_dataset_paths(cfg)


def test_missing_root_names_every_key_and_the_next_step(tmp_path):
    missing = voc(tmp_path / 'VOCdevkit')
    concat = dict(type='ConcatDataset', datasets=[voc(voc_tree(tmp_path / 'here')), missing])
    train = dict(type='RepeatDataset', times=3, dataset=concat)
    message = problem(config('mmdet', train=train, val=missing, test=missing))
    key = 'train_dataloader.dataset.dataset.datasets.1.data_root'
    assert message.startswith(f'{key}={str(tmp_path / "VOCdevkit")!r}')
    assert 'does not exist' in message
    assert f'--cfg-options {key}=<folder> val_dataloader.dataset.data_root=<folder>' in message
    assert 'docs/data.md' in message
    assert '\n' not in message  # one problem, though three datasets have it
    check_dataset_paths(config('mmdet', train=concat['datasets'][0], test=missing), ['train'])


def test_keys_of_the_message_are_those_of_cfg_options(tmp_path):
    """Doing what the message says cures it."""
    concat = dict(type='ConcatDataset', datasets=[voc(tmp_path / 'nowhere')])
    cfg = Config(config('mmdet', train=concat))
    with pytest.raises(DataError, match=r'dataset\.datasets\.0\.data_root=<folder>'):
        check_dataset_paths(cfg)
    here = str(voc_tree(tmp_path / 'here'))
    cfg.merge_from_dict({'train_dataloader.dataset.datasets.0.data_root': here})
    check_dataset_paths(cfg)


@pytest.mark.parametrize(
    ('lost', 'named'),
    [
        ('VOC2007/JPEGImages/000002.jpg', "images, '000002' first, have no .jpg file"),
        ('VOC2007/Annotations/000001.xml', "images, '000001' first, have no .xml file"),
        ('VOC2007/ImageSets/Main/trainval.txt', "ann_file='VOC2007/ImageSets/Main/trainval.txt'"),
    ],
)
def test_incomplete_voc(tmp_path, lost, named):
    cfg = config('mmdet', train=voc(voc_tree(tmp_path)))
    check_dataset_paths(cfg)
    (tmp_path / lost).unlink()
    message = problem(cfg)
    assert named in message and message.startswith('train_dataloader.dataset.ann_file=')


def test_voc_without_its_folders(tmp_path):
    voc_tree(tmp_path)
    (tmp_path / 'VOC2007' / 'JPEGImages').rename(tmp_path / 'VOC2007' / 'images')
    assert str(tmp_path / 'VOC2007' / 'JPEGImages') in problem(config('mmdet', train=voc(tmp_path)))
    check_dataset_paths(config('mmdet', train=voc(tmp_path, img_subdir='images')))
    (tmp_path / 'VOC2007/ImageSets/Main/trainval.txt').write_text('')
    cfg = config('mmdet', train=voc(tmp_path, img_subdir='images'))
    assert 'lists no image' in problem(cfg)


def test_incomplete_cityscapes(tmp_path):
    cfg = config('mmseg', train=cityscapes(cityscapes_tree(tmp_path)))
    check_dataset_paths(cfg)
    label = tmp_path / 'gtFine/train/ulm/ulm_000001_000019_gtFine_labelTrainIds.png'
    label.rename(label.with_name('ulm_000001_000019_gtFine_labelIds.png'))
    message = problem(cfg)
    assert message.startswith("train_dataloader.dataset.data_prefix.seg_map_path='gtFine/train'")
    assert "1 of 2 images, 'ulm/ulm_000001_000019' first" in message
    assert f'CITYSCAPES_DATASET={tmp_path} csCreateTrainIdLabelImgs' in message
    label.with_name('ulm_000001_000019_gtFine_labelIds.png').unlink()
    assert 'unpack its archives again' in problem(cfg)


def test_cityscapes_labels_are_asked_for_only_if_read(tmp_path):
    cityscapes_tree(tmp_path)
    (tmp_path / 'gtFine').rename(tmp_path / 'elsewhere')
    load = [dict(type='LoadImageFromFile')]
    check_dataset_paths(config('mmseg', test=cityscapes(tmp_path, pipeline=load)))
    nested = [dict(type='TestTimeAug', transforms=[[dict(type='LoadAnnotations')]])]
    cfg = config('mmseg', test=cityscapes(tmp_path, pipeline=nested))
    assert "seg_map_path='gtFine/train': the folder" in problem(cfg)


def test_segmentation_without_pictures(tmp_path):
    cfg = config('mmseg', train=cityscapes(cityscapes_tree(tmp_path), img_suffix='.jpg'))
    assert 'has no file that ends in .jpg' in problem(cfg)


def test_segmentation_by_list(tmp_path):
    cityscapes_tree(tmp_path)
    listed = tmp_path / 'train.txt'
    listed.write_text('aachen/aachen_000000_000019\n')
    (tmp_path / 'gtFine/train/ulm/ulm_000001_000019_gtFine_labelTrainIds.png').unlink()
    cfg = config('mmseg', train=cityscapes(tmp_path, ann_file='train.txt'))
    check_dataset_paths(cfg)
    listed.write_text('aachen/aachen_000000_000019\nbonn/bonn_000000_000019\n')
    assert "'bonn/bonn_000000_000019' first, have no _leftImg8bit.png" in problem(cfg)


@pytest.mark.parametrize('where', [dict(split='val'), dict(data_prefix='val')])
def test_imagenet(tmp_path, where):
    (tmp_path / 'train' / 'n01440764').mkdir(parents=True)
    check_dataset_paths(
        config('mmpretrain', train=dict(type='ImageNet', data_root=str(tmp_path), split='train'))
    )
    message = problem(
        config('mmpretrain', val=dict(type='ImageNet', data_root=str(tmp_path), **where))
    )
    assert message.startswith(f"val_dataloader.dataset.{next(iter(where))}='val'")
    assert str(tmp_path / 'val') in message


def test_coco(tmp_path):
    (tmp_path / 'train2017').mkdir()
    dataset = dict(
        type='CocoDataset',
        data_root=str(tmp_path),
        ann_file='annotations/instances_train2017.json',
        data_prefix=dict(img='train2017/'),
    )
    assert "ann_file='annotations/instances_train2017.json'" in problem(
        config('mmdet', train=dataset)
    )


def test_cifar_binary(tmp_path):
    dataset = dict(type='CIFARBinary', data_root=str(tmp_path / 'cifar10'))
    message = problem(config('mmpretrain', train=dataset))
    assert message.startswith('train_dataloader.dataset.data_root=')
    assert 'has no data_batch_*.bin' in message
    (tmp_path / 'cifar10' / 'cifar-10-batches-bin').mkdir(parents=True)
    (tmp_path / 'cifar10' / 'cifar-10-batches-bin' / 'data_batch_1.bin').touch()
    check_dataset_paths(config('mmpretrain', train=dataset))
    assert 'has no test_batch.bin' in problem(
        config('mmpretrain', test=dict(dataset, split='test'))
    )


@pytest.mark.parametrize(
    'dataset',
    [
        dict(type='CIFAR10', data_root='nowhere'),  # downloads by default
        dict(type='CIFAR100', data_root='nowhere', download=True),
        dict(type='VOCDataset', data_root='s3://bucket/VOCdevkit', ann_file='trainval.txt'),
        dict(type='CustomDataset', data_root='nowhere', backend_args=dict(backend='petrel')),
        dict(type='NobodyKnows'),
        dict(type='NobodyKnows', data_root=str(Path(__file__).parent), ann_file='nowhere.json'),
        dict(type='NobodyKnows', data_root=__file__),
    ],
)
def test_what_cannot_be_known_is_not_complained_about(dataset):
    check_dataset_paths(config('mmpretrain', train=dataset))


def test_no_dataloader_at_all():
    check_dataset_paths(Config(dict(model=dict())))
    check_dataset_paths(Config(dict(train_dataloader=None, val_dataloader=dict(batch_size=2))))


def test_unknown_dataset_with_missing_root():
    message = problem(config('mmdet', train=dict(type='NobodyKnows', data_root='nowhere/at/all')))
    assert "data_root='nowhere/at/all'" in message


def test_download_switched_off():
    dataset = dict(type='CIFAR10', data_root='nowhere', download=False)
    assert "data_root='nowhere'" in problem(config('mmpretrain', train=dataset))


def test_home_folder_is_not_expanded():
    message = problem(config('mmdet', train=dict(type='VOCDataset', data_root='~/nowhere/VOC')))
    assert 'does not expand "~"' in message


def test_subclass_with_a_reader_of_its_own_is_left_alone(tmp_path):
    from mmdet.datasets import VOCDataset

    class OwnReader(VOCDataset):
        def load_data_list(self) -> list[dict]:
            return []

    class OwnFolder(VOCDataset):
        def __init__(self, **kwargs) -> None:
            super().__init__(img_subdir='pictures', **kwargs)

    voc_tree(tmp_path)
    (tmp_path / 'VOC2007/JPEGImages').rename(tmp_path / 'VOC2007/pictures')
    assert 'JPEGImages' in problem(config('mmdet', train=voc(tmp_path)))
    for cls in (OwnReader, OwnFolder):
        DATASETS.register_module(name=cls.__name__, module=cls, force=True)
        try:
            check_dataset_paths(config('mmdet', train=dict(voc(tmp_path), type=cls.__name__)))
        finally:
            DATASETS.module_dict.pop(cls.__name__)


def test_subset_may_be_incomplete(tmp_path):
    voc_tree(tmp_path)
    (tmp_path / 'VOC2007/JPEGImages/000002.jpg').unlink()
    check_dataset_paths(config('mmdet', train=voc(tmp_path, indices=1)))


def test_class_instead_of_name(tmp_path):
    class Plain(BaseDataset):
        pass

    dataset = dict(type=Plain, data_root=str(tmp_path / 'nowhere'))
    with pytest.raises(DataError, match='nowhere'):
        check_dataset_paths(dict(train_dataloader=dict(dataset=dataset)))
