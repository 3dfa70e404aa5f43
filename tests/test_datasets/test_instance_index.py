# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Every picture one index: unique, stable, whatever stands around the dataset."""

import pickle
from functools import partial

import numpy as np
import pytest
import torch
from mmengine.dataset import (
    BaseDataset,
    Compose,
    DefaultSampler,
    InfiniteSampler,
    RepeatDataset,
    pseudo_collate,
)
from mmengine.registry import DATASETS, TRANSFORMS, init_default_scope
from mmengine.runner import IterBasedTrainLoop, Runner
from mmengine.structures import BaseDataElement
from torch.utils.data import DataLoader

from fgc_mm.datasets import (
    INSTANCE_KEY,
    count_instances,
    find_mixing,
    install_instance_index,
    mixes,
    refuse_mixing,
)


def pack(results):
    """Packs what mmdet and mmseg would drop unless it is in their meta_keys."""
    if results['name'] == 'broken':
        return None
    sample = BaseDataElement(metainfo=dict(name=results['name']))
    return dict(inputs=torch.zeros(1), data_samples=sample)


class Names(BaseDataset):
    """One item per name; the name is its picture."""

    def __init__(self, names, with_path=True, pipeline=(pack,), **kwargs):
        self.names = names
        self.with_path = with_path
        super().__init__(pipeline=list(pipeline), **kwargs)

    def load_data_list(self):
        items = [dict(name=name, gt_label=ord(name[0]) % 3) for name in self.names]
        if self.with_path:
            items = [dict(img_path=f'/pictures/{item["name"]}.png', **item) for item in items]
        return items

    def get_cat_ids(self, idx):
        return [self.get_data_info(idx)['gt_label']]


@pytest.fixture(autouse=True, scope='module')
def registered():
    DATASETS.register_module(name='Names', module=Names, force=True)


def loader_of(dataset, batch_size=4, shuffle=True, num_workers=0, sampler=None, **kwargs):
    sampler = sampler or DefaultSampler(dataset, shuffle=shuffle, seed=0)
    return DataLoader(
        dataset, batch_size, sampler=sampler, num_workers=num_workers,
        collate_fn=pseudo_collate, **kwargs,
    )  # fmt: skip


def seen(loader):
    """(name, index) of everything one pass over the loader brings."""
    return [
        (sample.name, getattr(sample, INSTANCE_KEY))
        for batch in loader
        for sample in batch['data_samples']
    ]


def test_plain_dataset_in_every_epoch_and_worker():
    names = [f'p{i}' for i in range(11)]
    expected = {name: i for i, name in enumerate(names)}
    for workers in (0, 2):
        loader = loader_of(Names(names), num_workers=workers)
        index = install_instance_index(loader)
        assert (index.num_instances, index.num_items) == (11, 11)
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)
            pairs = seen(loader)
            assert len(pairs) == 11 and dict(pairs) == expected
            assert all(isinstance(i, int) for _, i in pairs)


@pytest.mark.parametrize('with_path', [True, False])
@pytest.mark.parametrize('options', [{}, dict(serialize_data=False), dict(lazy_init=True)])
def test_nested_wrappers(options, with_path):
    """Concat(Repeat(a), ClassBalanced(b), Concat(c, a again)), indices known by hand."""
    options = dict(options, with_path=with_path)
    a = dict(type='Names', names=['a', 'b', 'c'], **options)
    b = dict(type='Names', names=['d', 'd2', 'g', 'e'], **options)
    c = dict(type='Names', names=['f', 'b'], **options)
    dataset = DATASETS.build(
        dict(
            type='ConcatDataset',
            datasets=[
                dict(type='RepeatDataset', dataset=a, times=3),
                dict(type='ClassBalancedDataset', dataset=b, oversample_thr=0.9),
                dict(type='ConcatDataset', datasets=[c, a]),
            ],
        )
    )
    assert count_instances(dataset) == 8
    loader = loader_of(dataset)
    index = install_instance_index(loader)
    pairs = seen(loader)
    # The class of e (2) is rare in b: oversampled. b of c is the same picture as b of a.
    assert len(pairs) > 3 * 3 + 4 + 2 + 3
    assert dict(pairs) == dict(a=0, b=1, c=2, d=3, d2=4, g=5, e=6, f=7)
    assert len(set(pairs)) == 8 == index.num_instances
    assert index.num_items == 3 + 4 + 2 + 3
    expected = [ord(name) % 3 for name in 'abcddgef']
    assert index.labels.tolist() == expected


@pytest.mark.parametrize('scope', ['mmengine', 'mmdet', 'mmseg', 'mmpretrain'])
def test_wrappers_of_every_package(scope):
    if scope != 'mmengine':
        pytest.importorskip(f'{scope}.datasets')
        init_default_scope(scope)
    a = dict(type='mmengine.Names', names=['a', 'b'])
    b = dict(type='mmengine.Names', names=['c', 'd', 'd'])
    registry = DATASETS if scope == 'mmengine' else DATASETS.children[scope]
    dataset = registry.build(
        dict(
            type='RepeatDataset',
            times=2,
            dataset=dict(
                type='ConcatDataset',
                datasets=[a, dict(type='ClassBalancedDataset', dataset=b, oversample_thr=1e-3)],
            ),
        )
    )
    loader = loader_of(dataset)
    assert install_instance_index(loader).num_instances == 4
    pairs = seen(loader)
    assert len(pairs) == 10 and dict(pairs) == dict(a=0, b=1, c=2, d=3)
    init_default_scope('mmengine')


def test_k_fold_and_sliced_datasets():
    pytest.importorskip('mmpretrain.datasets')
    from mmpretrain.datasets import KFoldDataset

    names = list('abcdefgh')
    folded = KFoldDataset(dict(type='mmengine.Names', names=names), fold=0, num_splits=4)
    loader = loader_of(folded)
    assert install_instance_index(loader).num_instances == 6
    assert dict(seen(loader)) == {name: i for i, name in enumerate('cdefgh')}

    cfg = dict(
        dataset=dict(type='Names', names=names),
        sampler=dict(type='DefaultSampler', shuffle=False),
        batch_size=2,
        num_batch_per_epoch=2,
    )
    loader = Runner.build_dataloader(cfg)
    assert install_instance_index(loader).num_instances == 8
    assert seen(loader) == [('a', 0), ('b', 1), ('c', 2), ('d', 3)]


def test_subset_of_a_dataset():
    loader = loader_of(Names(list('abcdef'), indices=[4, 1, 1, 5]))
    assert install_instance_index(loader).num_instances == 3
    assert dict(seen(loader)) == dict(e=0, b=1, f=2)
    assert loader.dataset[-1]['data_samples'].instance_idx == 2


def test_an_item_that_replaces_a_broken_one_brings_its_own_index():
    np.random.seed(0)
    names = ['a', 'broken', 'b', 'c']
    loader = loader_of(Names(names), shuffle=False)
    install_instance_index(loader)
    pairs = [pair for _ in range(8) for pair in seen(loader)]
    assert len(pairs) == 32
    assert set(pairs) <= {('a', 0), ('b', 2), ('c', 3)}
    replaced = [pair for i, pair in enumerate(pairs) if i % 4 == 1]
    assert len(set(replaced)) > 1  # drawn anew each time


@pytest.mark.parametrize(
    ('scope', 'transform', 'module'),
    [
        ('mmdet', 'PackDetInputs', 'mmdet.datasets'),
        ('mmseg', 'PackSegInputs', 'mmseg.datasets'),
        ('mmpretrain', 'PackInputs', 'mmpretrain.datasets'),
    ],
)
def test_pack_transforms_need_no_meta_keys(scope, transform, module):
    pytest.importorskip(module)
    packer = TRANSFORMS.build(dict(type=f'{scope}.{transform}', meta_keys=('img_path',)))
    add_picture = partial(add_image, shape=(4, 4, 3))
    loader = loader_of(Names(list('abc'), pipeline=[add_picture, packer]), shuffle=False)
    install_instance_index(loader)
    samples = next(iter(loader))['data_samples']
    assert [s.metainfo[INSTANCE_KEY] for s in samples] == [0, 1, 2]
    assert samples[0].metainfo['img_path'] == '/pictures/a.png'


def add_image(results, shape):
    return {**results, 'img': np.zeros(shape, np.uint8)}


def test_survives_another_pipeline_a_second_call_and_pickling():
    dataset = RepeatDataset(Names(list('abc')), times=2)
    loader = loader_of(dataset)
    install_instance_index(loader)
    install_instance_index(loader)
    dataset.dataset.pipeline = Compose([pack])  # what a PipelineSwitchHook does
    expected = dict(a=0, b=1, c=2)
    assert dict(seen(loader)) == expected
    sent = pickle.loads(pickle.dumps(dataset))  # what a spawned worker gets
    assert dict(seen(loader_of(sent))) == expected


def test_workers_that_run_already_are_started_anew():
    # Persistent ones, after a first pass.
    loader = loader_of(Names(list('abcd')), num_workers=1, persistent_workers=True)
    assert not hasattr(next(iter(loader))['data_samples'][0], INSTANCE_KEY)
    install_instance_index(loader)
    assert dict(seen(loader)) == dict(a=0, b=1, c=2, d=3)

    # Those some mmengine starts when an iteration-based loop is built.
    class Loop:
        def __init__(self, loader):
            self.dataloader_iterator = IterBasedTrainLoop.__init__.__globals__[
                '_InfiniteDataloaderIterator'
            ](loader)
            self.dataloader_iterator._iterator = iter(loader)

    dataset = Names(list('abcdefgh'))
    loader = loader_of(dataset, 2, num_workers=1, sampler=InfiniteSampler(dataset, shuffle=False))
    loop = Loop(loader)
    install_instance_index(loader, loop)
    names = []
    for _ in range(4):
        for sample in next(loop.dataloader_iterator)['data_samples']:
            names.append(sample.name)
            assert getattr(sample, INSTANCE_KEY) == 'abcdefgh'.index(sample.name)
    assert names == list('abcdefgh')
    del loop


def test_a_set_without_single_labels_has_none():
    class Several(Names):
        def load_data_list(self):
            return [{**info, 'gt_label': [0, 1]} for info in super().load_data_list()]

    assert install_instance_index(loader_of(Several(list('ab')))).labels is None


class Plain(torch.utils.data.Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return i


def test_other_datasets_are_refused():
    with pytest.raises(ValueError, match=r'Plain has no `prepare_data`.*num_instances'):
        install_instance_index(loader_of(Plain()))


# Mixing augmentations

MOSAIC = [dict(type='Mosaic', img_scale=(8, 8))]
CACHED = [dict(type='RandomApply', transforms=[dict(type='CachedMixUp', img_scale=(8, 8))])]


def mixed(scope, kind, pipeline=None):
    registry = DATASETS.children[scope]
    names = dict(type='mmengine.Names', names=list('abc'))
    if kind == 'wrapper':
        if scope == 'mmseg':
            names = dict(type='ConcatDataset', datasets=[names])
        return registry.build(dict(type='MultiImageMixDataset', dataset=names, pipeline=pipeline))
    return registry.build({**names, 'pipeline': pipeline})


@pytest.mark.parametrize(
    ('scope', 'kind', 'pipeline', 'name'),
    [
        ('mmdet', 'wrapper', MOSAIC, 'Mosaic'),
        ('mmdet', 'pipeline', [dict(type='CachedMosaic', img_scale=(8, 8))], 'CachedMosaic'),
        ('mmdet', 'pipeline', CACHED, 'CachedMixUp'),
        ('mmseg', 'wrapper', [dict(type='RandomMosaic', prob=1.0)], 'RandomMosaic'),
    ],
)
def test_mixing_is_refused(scope, kind, pipeline, name):
    pytest.importorskip(f'{scope}.datasets')
    init_default_scope(scope)
    try:
        dataset = RepeatDataset.__new__(RepeatDataset)
        dataset.dataset, dataset.times = mixed(scope, kind, pipeline), 2
        with pytest.raises(ValueError, match=f'{name}.*one picture of several'):
            refuse_mixing(dataset)
    finally:
        init_default_scope('mmengine')


def test_mixing_in_the_data_preprocessor_is_refused():
    pytest.importorskip('mmpretrain.models')
    from mmpretrain.models import ClsDataPreprocessor

    dataset = Names(list('abc'))
    for augment in ('Mixup', 'CutMix'):
        preprocessor = ClsDataPreprocessor(
            num_classes=4, batch_augments=dict(augments=dict(type=augment, alpha=0.2))
        )
        with pytest.raises(ValueError, match=f'batch_augments has {augment}'):
            refuse_mixing(dataset, preprocessor)
    refuse_mixing(dataset, ClsDataPreprocessor(num_classes=4))


def test_what_does_not_mix_is_let_through():
    pytest.importorskip('mmdet.datasets')
    from mmdet.models import DetDataPreprocessor

    init_default_scope('mmdet')
    pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='RandomChoice', transforms=[
            [dict(type='Resize', scale=(8, 8))],
            [dict(type='RandomChoiceResize', scales=[(8, 8)]), dict(type='RandomErasing',
                                                                   n_patches=1, ratio=0.2)],
        ]),
        dict(type='PackDetInputs'),
    ]  # fmt: skip
    size = dict(type='BatchSyncRandomResize', random_size_range=(32, 64))
    try:
        refuse_mixing(
            mixed('mmdet', 'pipeline', pipeline), DetDataPreprocessor(batch_augments=[size])
        )
    finally:
        init_default_scope('mmengine')


@pytest.mark.parametrize(
    ('scope', 'mosaic'),
    [('mmdet', MOSAIC[0]), ('mmseg', dict(type='RandomMosaic', prob=1.0, img_scale=(8, 8)))],
)
def test_a_wrapper_packs_what_has_an_index(scope, mosaic):
    """Once the mixing steps are left out."""
    pytest.importorskip(f'{scope}.datasets')
    init_default_scope(scope)
    TRANSFORMS.register_module('PackName', module=lambda: pack, force=True)
    names = dict(type='mmengine.Names', names=list('abc'), pipeline=[])
    wrapped = dict(type='ConcatDataset', datasets=[names]) if scope == 'mmseg' else names
    pipeline = [mosaic, dict(type='mmengine.PackName')]
    try:
        dataset = DATASETS.children[scope].build(
            dict(type='MultiImageMixDataset', dataset=wrapped, pipeline=pipeline)
        )
        with pytest.raises(ValueError, match='Mosaic'):
            install_instance_index(loader_of(dataset))
        assert find_mixing(dataset, skipped=['RandomFlip']).endswith(mosaic['type'])
        assert find_mixing(dataset, skipped=[mosaic['type']]) is None
        assert install_instance_index(loader_of(dataset), mixes=True).num_instances == 3
        dataset._skip_type_keys = [mosaic['type']]
        install_instance_index(loader_of(dataset))
        samples = [dataset[i]['data_samples'] for i in (2, 0, 1)]
        assert [(s.name, s.instance_idx) for s in samples] == [('c', 2), ('a', 0), ('b', 1)]
    finally:
        init_default_scope('mmengine')


@pytest.mark.parametrize(
    ('augments', 'found'),
    [
        ([dict(type='LoadImage'), dict(type='RandomApply', transforms=CACHED)], True),
        (MOSAIC, True),
        ([dict(type='Resize', scale=(8, 8)), dict(type='RandomFlip', prob=0.5)], False),
        (None, False),
    ],
)
def test_configs_that_mix(augments, found):
    assert mixes(augments) == found
