# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Converted weights give the outputs of the network they come from."""

import functools
import os
import pickle
from collections import OrderedDict

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from mmengine.runner import load_checkpoint
from mmpretrain.registry import MODELS

from fgc_mm.gates import find_gates, force_gates
from fgc_mm.nets.convert import convert_file, convert_state_dict


class ForeignBlock(nn.Module):
    """A block with the names the published CIFAR checkpoints have."""

    def __init__(self, width_in, width, hidden):
        super().__init__()
        self.downsampling = width != width_in
        stride = 2 if self.downsampling else 1
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        if hidden:
            self.gate = nn.Module()
            self.gate.mlp = nn.Module()
            self.gate.mlp.fc1 = nn.Conv2d(width_in, hidden, 1, bias=False)
            self.gate.mlp.bn = nn.BatchNorm2d(hidden)
            self.gate.mlp.fc2 = nn.Conv2d(hidden, width, 1)

    def forward(self, x):
        feature = F.relu(self.bn1(self.conv1(x)))
        if hasattr(self, 'gate'):
            mlp = self.gate.mlp
            logits = mlp.fc2(F.relu(mlp.bn(mlp.fc1(x.mean((2, 3), keepdim=True)))))
            feature = feature * (logits > 0).float()
        out = self.bn2(self.conv2(feature))
        if self.downsampling:
            x = x[:, :, ::2, ::2]
            zeros = torch.zeros_like(x)[:, : x.size(1) // 2]
            x = torch.cat([zeros, x, zeros], 1)
        return F.relu(out + x)


class ForeignNet(nn.Module):
    """A CIFAR ResNet in evaluation, gated where ``hidden`` is not 0."""

    def __init__(self, blocks=3, hidden=0, num_classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        widths = [16] + [16] * blocks + [32] * blocks + [64] * blocks
        made = [ForeignBlock(*widths[i : i + 2], hidden) for i in range(3 * blocks)]
        self.layer1 = nn.Sequential(*made[:blocks])
        self.layer2 = nn.Sequential(*made[blocks : 2 * blocks])
        self.layer3 = nn.Sequential(*made[2 * blocks :])
        self.linear = nn.Linear(64, num_classes)
        for name, value in self.state_dict().items():
            if name.endswith('running_var'):
                value.uniform_(0.5, 1.5)
            elif name.endswith(('running_mean', 'bias')):
                value.uniform_(-0.3, 0.3)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))


def classifier(conversion, in_channels=64):
    head = dict(type='LinearClsHead', num_classes=conversion.num_classes, in_channels=in_channels)
    cfg = dict(
        type='ImageClassifier',
        backbone=dict(conversion.backbone, gate=dict(type='BinConcreteGate')),
        neck=dict(type='GlobalAveragePooling'),
        head=head,
    )
    if conversion.backbone['gate'] is not None:
        cfg['backbone']['gate'] = conversion.backbone['gate']
    return MODELS.build(cfg).eval()


def logits(model, x):
    with torch.no_grad():
        return model(x, mode='tensor')


@pytest.mark.parametrize(('blocks', 'depth'), [(3, 20), (5, 32)])
@pytest.mark.parametrize('form', ['published', 'bare', 'model'])
def test_dense_cifar(blocks, depth, form, tmp_path):
    torch.manual_seed(0)
    net = ForeignNet(blocks).eval()
    weights = net.state_dict()
    if form == 'published':
        # As the public files: DataParallel names, from before the counters.
        kept = {k: v for k, v in weights.items() if 'num_batches' not in k}
        file = dict(
            state_dict=OrderedDict((f'module.{k}', v) for k, v in kept.items()), best_prec1=91.78
        )
    else:
        file = weights if form == 'bare' else dict(model=weights, epoch=3)
    torch.save(file, tmp_path / 'dense.th')
    conversion = convert_file(tmp_path / 'dense.th', tmp_path / 'out' / 'dense.pth')
    assert conversion.source == 'dense_cifar'
    assert conversion.backbone == dict(type='GatedResNetCifar', depth=depth, gate=None)
    assert (conversion.num_classes, conversion.dropped) == (10, [])

    model = classifier(conversion)
    saved = torch.load(tmp_path / 'out' / 'dense.pth', weights_only=True)
    assert saved['meta']['backbone'] == conversion.backbone
    result = model.load_state_dict(saved['state_dict'], strict=False)
    gates = tuple(f'{name}.' for name in find_gates(model))
    assert not result.unexpected_keys
    assert result.missing_keys and all(key.startswith(gates) for key in result.missing_keys)
    x = torch.randn(2, 3, 32, 32)
    with force_gates(model, 1.0):
        torch.testing.assert_close(logits(model, x), net(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('hidden', [16, 8])
@pytest.mark.parametrize('prefix', ['', 'module.'])
def test_gated_cifar_of_the_authors(hidden, prefix, tmp_path):
    """All keys arrive, the gates decide the same, the banks are left out."""
    torch.manual_seed(0)
    net = ForeignNet(3, hidden, num_classes=100).eval()
    weights = OrderedDict((f'{prefix}{key}', value) for key, value in net.state_dict().items())
    banks = ['gate_mb.memory', 'gate_mb.params', 'feat_mb.memory']
    for bank in banks:
        weights[f'{prefix}layer3.2.gate.{bank}'] = torch.zeros(20, 64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1).state_dict()
    torch.save(
        dict(epoch=500, arch='resnet20', state_dict=weights, optimizer=optimizer),
        tmp_path / 'resnet20.pth',
    )
    conversion = convert_file(tmp_path / 'resnet20.pth', tmp_path / 'converted.pth')
    assert conversion.source == 'fgc_cifar'
    assert conversion.dropped == [f'layer3.2.gate.{bank}' for bank in banks]
    assert 'left out 3: layer3.2.gate.gate_mb.memory' in str(conversion)

    model = classifier(conversion)
    saved = torch.load(tmp_path / 'converted.pth', weights_only=True)
    model.load_state_dict(saved['state_dict'], strict=True)
    x = torch.randn(4, 3, 32, 32)
    torch.testing.assert_close(logits(model, x), net(x), atol=1e-5, rtol=1e-5)
    masks = torch.cat([gate.record.mask.flatten() for gate in find_gates(model).values()])
    assert 0.1 < masks.mean() < 0.9


@pytest.mark.parametrize('name', ['resnet18', 'resnet50'])
def test_torchvision(name, tmp_path):
    torch.manual_seed(0)
    net = getattr(torchvision.models, name)(num_classes=7).eval()
    torch.save(net.state_dict(), tmp_path / 'tv.pth')
    conversion = convert_file(tmp_path / 'tv.pth', tmp_path / 'converted.pth')
    assert conversion.backbone == dict(type='GatedResNet', depth=int(name[6:]), gate=None)
    model = classifier(conversion, in_channels=512 if name == 'resnet18' else 2048)
    result = load_checkpoint(model, str(tmp_path / 'converted.pth'))
    assert set(result) == {'meta', 'state_dict'}
    kept = {key: value for key, value in model.state_dict().items() if 'gate' not in key}
    assert set(kept) == set(conversion.state_dict)
    x = torch.randn(2, 3, 64, 64)
    with force_gates(model, 1.0):
        torch.testing.assert_close(logits(model, x), net(x), atol=1e-4, rtol=1e-4)


def test_torchvision_without_classifier():
    weights = torchvision.models.resnet34().state_dict()
    weights = {key: value for key, value in weights.items() if not key.startswith('fc.')}
    conversion = convert_state_dict(weights)
    assert conversion.backbone['depth'] == 34
    assert conversion.num_classes is None and 'no classifier' in str(conversion)


def test_converted_gates_load_by_prefix(tmp_path):
    torch.manual_seed(0)
    torch.save(ForeignNet(3, 16).state_dict(), tmp_path / 'gated.pth')
    conversion = convert_file(tmp_path / 'gated.pth', tmp_path / 'converted.pth')
    init_cfg = dict(
        type='Pretrained', checkpoint=str(tmp_path / 'converted.pth'), prefix='backbone.'
    )
    backbone = MODELS.build(dict(type='GatedResNetCifar', depth=20, init_cfg=init_cfg))
    backbone.init_weights()
    for name, value in backbone.state_dict().items():
        assert torch.equal(value, conversion.state_dict[f'backbone.{name}']), name


def changed(weights, drop=(), **new):
    weights = {key: value for key, value in weights.items() if key not in drop}
    return {**weights, **{key.replace('__', '.'): value for key, value in new.items()}}


def bad_files():
    dense, gated = ForeignNet(3).state_dict(), ForeignNet(3, 16).state_dict()
    zero = torch.zeros(1)
    yield dict(stem=zero), 'None of the known formats.*recognized 0 keys.*Its keys: stem'
    yield (
        {key: value for key, value in dense.items() if 'linear' not in key},
        r'dense CIFAR.*recognized 114 keys, no key like linear',
    )
    yield changed({f'backbone.{k}': v for k, v in dense.items()}), 'may need no conversion'
    yield (
        changed(dense, layer2__0__shortcut__0__weight=zero),
        'dense CIFAR.*1 of its 117 keys are not of that format: layer2.0.shortcut.0.weight',
    )
    yield changed(gated, layer1__0__gate__mlp__extra=zero), r'layer1\.0\.gate\.mlp\.extra'
    yield (
        changed(dense, ['layer2.1.conv2.weight']),
        r"1 keys of .*'depth': 20.* are missing: backbone\.layer2\.1\.conv2\.weight",
    )
    yield (
        changed(gated, ['layer1.0.gate.mlp.fc2.bias']),
        r'missing: backbone\.gates\.layer1-0-conv1\.fc2\.bias',
    )
    yield changed(dense, linear__bias=zero, drop=['linear.weight']), 'None of the known formats'
    yield changed(dense, ['linear.bias']), 'only head.fc.weight, but needs weight and bias'
    yield changed(dense, conv1__weight=torch.zeros(16, 3, 7, 7)), r'1 shapes do not fit.*7, 7'
    yield ForeignNet(4).state_dict(), r'stages have \(4, 4, 4\) blocks, but should have \(n, n, n\)'
    yield (
        torchvision.models.wide_resnet50_2().state_dict(),
        r"shapes do not fit .*'GatedResNet', 'depth': 50",
    )
    yield [zero], 'expected a state dict but found a list'
    yield dict(conv1=zero, epoch=3), 'these are none: epoch'
    yield {}, 'fits the 0 keys'


@functools.cache
def all_bad_files():
    return list(bad_files())


@pytest.mark.parametrize('index', range(15))
def test_what_is_not_understood_is_refused(index):
    assert len(all_bad_files()) == 15
    file, message = all_bad_files()[index]
    with pytest.raises(ValueError, match=f'(?s){message}'):
        convert_state_dict(file)


class Trap:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_no_code_of_a_file_is_run(tmp_path):
    trap = str(tmp_path / 'sprung')
    torch.save(dict(state_dict=ForeignNet(3).state_dict(), extra=Trap(trap)), tmp_path / 'bad.pth')
    (tmp_path / 'raw.pth').write_bytes(pickle.dumps(Trap(trap)))
    (tmp_path / 'text.pth').write_text('hello')
    (tmp_path / 'empty.pth').write_bytes(b'')
    for name in ('bad.pth', 'raw.pth', 'text.pth', 'empty.pth'):
        with pytest.raises(ValueError, match=f'{name} is not a file of plain tensors'):
            convert_file(tmp_path / name, tmp_path / 'out.pth')
    assert not os.path.exists(trap)
    assert not (tmp_path / 'out.pth').exists()


def test_the_target_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    src, dst = tmp_path / 'dense.pth', tmp_path / 'out.pth'
    torch.save(ForeignNet(3).state_dict(), src)
    dst.write_text('the file before')
    with pytest.raises(FileNotFoundError):
        convert_file(tmp_path / 'missing.pth', dst)
    with pytest.raises(ValueError, match='is the source itself'):
        convert_file(src, src)

    def full_disk(checkpoint, file):
        file.write(b'half')
        raise OSError('No space left on device')

    with monkeypatch.context() as patch:
        patch.setattr(torch, 'save', full_disk)
        with pytest.raises(OSError, match='No space left'):
            convert_file(src, dst)
    assert dst.read_text() == 'the file before'
    assert sorted(path.name for path in tmp_path.iterdir()) == ['dense.pth', 'out.pth']
    convert_file(src, dst)
    assert set(torch.load(dst, weights_only=True)) == {'meta', 'state_dict'}


def test_conversion_leaves_the_random_numbers_alone():
    weights = ForeignNet(3).state_dict()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    convert_state_dict(weights)
    assert torch.equal(torch.rand(2), expected)
