# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Gates in the heads of detectors, segmentors and classifiers."""

import copy

import pytest
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import MODELS
from small_tasks import (
    boxes_sample,
    class_sample,
    classifier,
    faster_rcnn,
    map_sample,
    register,
    retinanet,
    segmentor,
)

from fgc_mm.gates import find_gates, force_gates
from fgc_mm.macs import count_macs
from fgc_mm.sites import Gates

SIZE = (64, 64)
MODELS_OF = {
    'retinanet': ('mmdet', retinanet, boxes_sample, ('backbone', 'bbox_head')),
    'faster-rcnn': ('mmdet', faster_rcnn, boxes_sample, ('backbone', 'rpn_head', 'roi_head')),
    'segmentor': ('mmseg', segmentor, map_sample, ('backbone', 'decode_head')),
    'classifier': ('mmpretrain', classifier, class_sample, 'backbone'),
}
IN_HEADS = {
    'retinanet': {
        f'bbox_head.gates.{kind}_convs-{i}-conv' for kind in ('cls', 'reg') for i in (0, 1)
    },
    'faster-rcnn': {
        'rpn_head.gates.rpn_conv',
        'roi_head.gates.bbox_head-shared_fcs-0',
        'roi_head.gates.bbox_head-shared_fcs-1',
    },
    'segmentor': {f'decode_head.gates.psp_modules-{i}-1-conv' for i in (0, 1)}
    | {'decode_head.gates.bottleneck-conv'},
    'classifier': set(),
}


def plain(name):
    """The config of a model whose backbone has no gates, and the parts to gate."""
    scope, model, _, part = MODELS_OF[name]
    register(scope)
    cfg = Config(dict(model=model())).model
    cfg['backbone'].pop('gate')
    cfg['backbone']['type'] = 'ResNet'
    if name == 'retinanet':
        cfg['bbox_head']['stacked_convs'] = 2
    return cfg, part


def build(name, **kwargs):
    torch.manual_seed(0)
    cfg, part = plain(name)
    gated = MODELS.build(dict(type='Gated', model=cfg, part=part, **kwargs)).eval()
    for gate in find_gates(gated).values():  # open some, close some
        nn.init.normal_(gate.fc2.weight, std=3)
        nn.init.zeros_(gate.fc2.bias)
    return gated


def samples(name, count=2):
    return [MODELS_OF[name][2](*SIZE) for _ in range(count)]


def outputs(name, model, pictures):
    """All figures a model predicts."""
    with torch.no_grad():
        found = model(pictures, samples(name, len(pictures)), mode='predict')
    fields = dict(mmdet='pred_instances', mmseg='seg_logits', mmpretrain='pred_score')
    found = [getattr(sample, fields[MODELS_OF[name][0]]) for sample in found]
    tensor = torch.Tensor
    return [x for one in found for x in ([one] if isinstance(one, tensor) else one.values())]


@pytest.mark.parametrize('name', MODELS_OF)
def test_all_open_it_is_the_model_itself(name):
    gated = build(name)
    cfg, part = plain(name)
    model = MODELS.build(cfg).eval()
    assert type(gated) is type(model)
    assert type(gated.data_preprocessor) is type(model.data_preprocessor)
    kept = {key: value for key, value in gated.state_dict().items() if '.gates.' not in key}
    model.load_state_dict(kept)  # strictly: the names are upstream's
    pictures = torch.rand(2, 3, *SIZE)
    with force_gates(gated, 1.0):
        for mine, theirs in zip(
            outputs(name, gated, pictures), outputs(name, model, pictures), strict=True
        ):
            assert torch.equal(mine, theirs)
    found = set(find_gates(gated))
    assert {gate for gate in found if not gate.startswith('backbone.')} == IN_HEADS[name]
    assert len(found - IN_HEADS[name]) == 8
    holders = {n for n, module in gated.named_modules() if isinstance(module, Gates)}
    assert holders == {f'{p}.gates' for p in ([part] if isinstance(part, str) else part)}


@pytest.mark.parametrize('name', ['retinanet', 'faster-rcnn', 'segmentor'])
def test_closed_channels_are_irrelevant(name):
    """New weights for them change nothing. Not even in heads that several levels share: there
    a channel is closed for all of them."""
    gated = build(name)
    gates = find_gates(gated)
    masks = {n: (torch.rand(gate.channels) > 0.5).float() for n, gate in gates.items()}
    other = copy.deepcopy(gated)
    modules = dict(other.named_modules())
    for holder, module in other.named_modules():
        for site in module.sites.values() if isinstance(module, Gates) else ():
            network = holder.rpartition('.')[0]
            mask = masks[f'{holder}.{Gates.name_of(site.name)}']
            for end in site.producers:
                closed = end.spread(1 - mask[None])[0].bool()
                layer = modules[f'{network}.{end.module}']
                layer.weight.data[closed] = torch.rand_like(layer.weight.data[closed])
    pictures = torch.rand(2, 3, *SIZE)
    with force_gates(gated, masks), force_gates(other, masks):
        before, after = outputs(name, gated, pictures), outputs(name, other, pictures)
    assert all(map(torch.equal, before, after))
    assert not all(map(torch.equal, before, outputs(name, gated, pictures)))


def ends_of(gated):
    """Layer -> for its outputs, and its inputs: the gates, and the channels that follow them."""
    found = {}
    for holder, module in gated.named_modules():
        for site in module.sites.values() if isinstance(module, Gates) else ():
            network = holder.rpartition('.')[0]
            for side, ends in enumerate((site.producers, site.consumers)):
                for end in ends:
                    sides = found.setdefault(f'{network}.{end.module}', ([], []))
                    sides[side].append((module.of(site.name), end))
    return found


@pytest.mark.parametrize('name', ['retinanet', 'faster-rcnn', 'segmentor'])
def test_counted_by_hand(name):
    """Every call of every layer, every row of it, times what is open there."""
    gated, count = build(name), 3
    pictures = torch.rand(count, 3, *SIZE) * torch.tensor([0.2, 1, 4])[:, None, None, None]
    executed, dense = torch.zeros(count).double(), torch.zeros(count).double()
    owner = [torch.arange(count)]
    ends = ends_of(gated)

    def on_layer(layer, args, out, name):
        rows = len(out)
        weights = layer.weight.numel() * (out[0, 0].numel() if out.dim() == 4 else 1)
        mine = torch.arange(count) if rows == count else owner[0]
        assert len(mine) == rows
        share = torch.ones(rows).double()
        for side in filter(None, ends.get(name, ())):  # a channel that follows two needs both
            masks = [end.spread(gate.record.mask).double() for gate, end in side]
            share = share * torch.stack(masks).prod(dim=0).mean(dim=1)
        executed.index_add_(0, mine, weights * share)
        if '.gates.' not in name:
            dense.index_add_(0, mine, torch.full((rows,), weights).double())

    def on_regions(module, args):
        owner[0] = args[1][:, 0].long()

    for layer_name, layer in gated.named_modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            hook = lambda m, a, o, n=layer_name: on_layer(m, a, o, n)  # noqa: E731
            layer.register_forward_hook(hook)
        if hasattr(layer, 'roi_layers'):
            layer.register_forward_pre_hook(on_regions)
    found = count_macs(gated, pictures, samples(name, count), mode='predict')
    assert [image.model_dense for image in found] == pytest.approx(dense.tolist(), rel=1e-12)
    assert [image.model_executed for image in found] == pytest.approx(executed.tolist(), rel=1e-12)
    assert len({round(image.model_executed) for image in found}) == count
    assert 0.1 < sum(executed) / sum(dense) < 0.9
    for gate in IN_HEADS[name]:
        record, image = find_gates(gated)[gate].pass_record, found[-1]
        if gate in image.regions:
            mine = record.mask[owner[0] == count - 1]
            assert image.regions[gate][0] == len(mine) > 0
            assert image.regions[gate][1].tolist() == mine.sum(dim=0).tolist()
        else:
            calls = record.mask.view(-1, count, record.mask.size(1))
            assert image.masks()[gate].tolist() == calls[:, -1].tolist()


def test_the_gates_of_a_backbone_are_those_it_has_alone():
    cfg, _ = plain('retinanet')
    whole = MODELS.build(dict(type='Gated', model=cfg, part=('backbone', 'bbox_head'))).backbone
    alone = MODELS.build(dict(type='Gated', backbone=cfg['backbone']))
    assert whole.gates.sites == alone.gates.sites
    assert MODELS.build(dict(type='Gated', model=cfg)).backbone.gates.sites == alone.gates.sites


def test_sites_are_chosen_by_their_names_in_the_model():
    chosen = ['layer4.1', 'rpn_conv', 'roi_head.bbox_head.shared_fcs.1']
    gated = build('faster-rcnn', sites=['backbone.layer4.1', 'rpn_head.rpn_conv', *chosen[2:]])
    assert list(find_gates(gated)) == [
        'backbone.gates.layer4-1-conv1',
        'rpn_head.gates.rpn_conv',
        'roi_head.gates.bbox_head-shared_fcs-1',
    ]
    assert find_gates(build('retinanet', gate=None)) == {}
    (levels,) = {gate.calls for n, gate in find_gates(build('retinanet')).items() if 'head' in n}
    assert levels == 5


def test_what_the_packages_hand_to_the_model_reaches_it():
    cfg, part = plain('segmentor')
    gated = MODELS.build(dict(type='Gated', model=cfg, part=part, train_cfg=None, pretrained=None))
    assert gated.train_cfg is None
    given = dict(type='SegDataPreProcessor', mean=[0.0] * 3, std=[1.0] * 3)
    gated = MODELS.build(dict(type='Gated', model=cfg, part=part, data_preprocessor=given))
    assert gated.data_preprocessor.mean.flatten().tolist() == [127.5] * 3
    del cfg['data_preprocessor']
    gated = MODELS.build(dict(type='Gated', model=cfg, part=part, data_preprocessor=given))
    assert gated.data_preprocessor.mean.flatten().tolist() == [0.0] * 3


class Idle(nn.Module):
    """A model with a part that nobody calls."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))
        self.spare = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))
        self.teacher = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def forward(self, inputs, data_samples=None, mode='tensor'):
        out = self.backbone(inputs)
        return dict(loss=(out - self.teacher(inputs)).square().mean()) if mode == 'loss' else out


@pytest.mark.parametrize(
    'given, words',
    [
        (dict(part='neck'), r"part='neck' is no part of Idle; name some of 'backbone', 'spare'"),
        (dict(part='spare'), r"never runs part='spare' of Idle, neither in testing nor in"),
        (dict(part='teacher'), r"part='teacher' of Idle has no site .*0: only training runs it"),
        (dict(part=()), r'part=\(\) must name one part or more'),
        (dict(part=('backbone', 'backbone.0')), r"part='backbone.0' lies in 'backbone'"),
        (dict(example=(5, 8, 8)), r'Idle cannot be run.*\(1, 5, 8, 8\).*Gated\(example=\(channels'),
        (dict(sites='layer1'), r"sites='layer1' chooses no site; there are 0"),
    ],
)
def test_bad_input_is_answered(given, words):
    MODELS.register_module(name='Idle', module=Idle, force=True)
    given = {'part': ('backbone', 'teacher') if 'example' in given else 'backbone', **given}
    try:
        with pytest.raises(ValueError, match=words):
            MODELS.build(dict(type='Gated', model=dict(type='Idle'), **given))
    finally:
        MODELS._module_dict.pop('Idle')


def test_a_part_needs_a_model():
    with pytest.raises(ValueError, match=r"part='rpn_head' needs the config of a whole model"):
        MODELS.build(dict(type='Gated', backbone=dict(type='mmdet.ResNet'), part='rpn_head'))
    with pytest.raises(ValueError, match=r"Gated: model='FCN' must be the config of a model"):
        MODELS.build(dict(type='Gated', model='FCN'))
