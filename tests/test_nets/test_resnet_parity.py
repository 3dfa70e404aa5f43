# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""With all gates open, GatedResNet is upstream's ResNet."""

import pytest
import torch

from fgc_mm.gates import find_gates, force_gates
from fgc_mm.nets import GatedResNet, GatedResNetV1c, GatedResNetV1d

SMALL = dict(base_channels=16, stem_channels=16)
DILATED = dict(strides=(1, 2, 1, 1), dilations=(1, 1, 2, 4))

MMDET = {
    'r18': dict(depth=18),
    'r34': dict(depth=34, **SMALL),
    'r50': dict(depth=50, **SMALL),
    'r18-small-stem': dict(depth=18, stem_channels=24, base_channels=16, in_channels=4),
    'r50-caffe': dict(depth=50, style='caffe', **SMALL),
    'r50-deep-stem': dict(depth=50, deep_stem=True, **SMALL),
    'r50-v1d': dict(depth=50, deep_stem=True, avg_down=True, **SMALL),
    'r18-v1d': dict(depth=18, deep_stem=True, avg_down=True, **SMALL),
    'r34-dilated': dict(depth=34, **DILATED, **SMALL),
    'r50-dilated': dict(depth=50, **DILATED, **SMALL),
    'r50-c4': dict(
        depth=50,
        num_stages=3,
        strides=(1, 2, 2),
        dilations=(1, 1, 1),
        out_indices=(2,),
        style='caffe',
        **SMALL,
    ),
    'r50-norm-eval': dict(depth=50, norm_eval=True, frozen_stages=1, **SMALL),
    'r50-cp': dict(depth=50, with_cp=True, **SMALL),
    'r50-gn': dict(depth=50, norm_cfg=dict(type='GN', num_groups=4, requires_grad=True), **SMALL),
    'r50-ws': dict(depth=50, conv_cfg=dict(type='ConvWS'), **SMALL),
}
MMSEG = {
    'r18': dict(depth=18, **DILATED, contract_dilation=True, **SMALL),
    'r50': dict(depth=50, **DILATED, contract_dilation=True, **SMALL),
    'r50-multi-grid': dict(depth=50, **DILATED, multi_grid=(1, 2, 4), **SMALL),
    'r101-contract-multi-grid': dict(
        depth=101,
        **DILATED,
        contract_dilation=True,
        multi_grid=(2, 4, 8),
        out_indices=(3,),
        **SMALL,
    ),
}
MMPRETRAIN = {
    'r18': dict(depth=18, **SMALL),
    'r34': dict(depth=34, **SMALL),
    'r50': dict(depth=50, **SMALL),
    'r50-caffe-one-output': dict(depth=50, style='caffe', out_indices=(3,), **SMALL),
    'r50-expansion': dict(depth=50, expansion=2, **SMALL),
    'r50-v1c': dict(depth=50, deep_stem=True, **SMALL),
    'r50-v1d': dict(depth=50, deep_stem=True, avg_down=True, **SMALL),
}


def randomize(model):
    """Values that make every layer count: no zero scale, no identity norm."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in model.state_dict().values():
            if value.dim() == 1:
                value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
            elif value.dim() == 4:
                scale = (2 / value[0].numel()) ** 0.5
                value.copy_(torch.randn(value.shape, generator=generator) * scale)
    return model


def run(model, x):
    """Outputs and the gradient at the input of one pass and its backward."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    outs = model(x)
    sum(out.square().mean() for out in outs).backward()
    return outs, x.grad


def assert_close(actual, expected):
    """Gradients: 1e-5 of the largest."""
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max().clamp(min=1)


def assert_same(upstream, ours, rename=None, in_channels=3):
    """Same names, and after the same weights the same outputs, gradients and
    running statistics, in training and in evaluation."""
    rename = rename or (lambda name: name)
    gates = find_gates(ours)
    names = [name for name in ours.state_dict() if not name.startswith(tuple(gates))]
    assert gates and names == [rename(name) for name in upstream.state_dict()]
    ours.load_state_dict(randomize(upstream).state_dict(), strict=False)
    x = torch.randn(2, in_channels, 64, 64, generator=torch.Generator().manual_seed(0))
    with force_gates(ours, 1.0):
        for mode in (True, False):
            upstream.train(mode)
            ours.train(mode)
            expected, expected_grad = run(upstream, x)
            actual, actual_grad = run(ours, x)
            assert isinstance(actual, tuple)
            for a, b in zip(actual, expected, strict=True):
                assert b.std() > 1e-2
                assert torch.allclose(a, b, rtol=0, atol=1e-5), (a - b).abs().max()
            assert_close(actual_grad, expected_grad)
            parameters = dict(ours.named_parameters())
            for name, parameter in upstream.named_parameters():
                mine = parameters[rename(name)]
                assert mine.requires_grad == parameter.requires_grad, name
                if parameter.requires_grad:
                    assert_close(mine.grad, parameter.grad)
    state = ours.state_dict()
    for name, value in upstream.state_dict().items():
        assert torch.allclose(state[rename(name)].float(), value.float(), atol=1e-6), name


@pytest.mark.parametrize('case', MMDET)
def test_equals_mmdet(case):
    mmdet = pytest.importorskip('mmdet.models')
    kwargs = {'norm_eval': False, **MMDET[case]}
    assert_same(
        mmdet.ResNet(**kwargs), GatedResNet(**kwargs), in_channels=kwargs.get('in_channels', 3)
    )


@pytest.mark.parametrize('case', MMSEG)
def test_equals_mmseg_v1c(case):
    mmseg = pytest.importorskip('mmseg.models')
    assert_same(mmseg.ResNetV1c(**MMSEG[case]), GatedResNetV1c(**MMSEG[case]))


def mmpretrain_names(name):
    """mmpretrain's names of deep stems and unstrided shortcuts, in ours."""
    if name.startswith('stem.'):
        _, index, kind, value = name.split('.')
        return f'stem.{3 * int(index) + (kind == "bn")}.{value}'
    return name


def mmpretrain_v1d_names(name):
    _, _, rest = name.partition('layer1.0.downsample.')
    if rest:
        return f'layer1.0.downsample.{int(rest[0]) + 1}{rest[1:]}'
    return mmpretrain_names(name)


@pytest.mark.parametrize('case', MMPRETRAIN)
def test_equals_mmpretrain(case):
    mmpretrain = pytest.importorskip('mmpretrain.models')
    kwargs = {'out_indices': (0, 1, 2, 3), **MMPRETRAIN[case]}
    rename = mmpretrain_v1d_names if kwargs.get('avg_down') else mmpretrain_names
    assert_same(mmpretrain.ResNet(**kwargs), GatedResNet(**kwargs), rename)


@pytest.mark.parametrize('depth', [18, 34, 50])
def test_equals_torchvision(depth):
    torchvision = pytest.importorskip('torchvision')
    theirs = randomize(getattr(torchvision.models, f'resnet{depth}')())
    ours = GatedResNet(depth, out_indices=(3,))
    missing, unexpected = ours.load_state_dict(theirs.state_dict(), strict=False)
    assert unexpected == ['fc.weight', 'fc.bias']
    assert all(name.startswith(tuple(find_gates(ours))) for name in missing)
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    for mode in (True, False):
        with force_gates(ours.train(mode), 1.0), torch.no_grad():
            (out,) = ours(x)
        expected = theirs.train(mode)(x)
        actual = theirs.fc(out.mean((2, 3)))
        assert torch.allclose(actual, expected, rtol=0, atol=1e-5), (actual - expected).abs().max()


@pytest.mark.parametrize('depth', [18, 34, 50, 101, 152])
def test_names_of_all_depths(depth):
    """Every depth has torchvision's names and shapes, and v1c mmseg's."""
    torchvision = pytest.importorskip('torchvision')
    mmseg = pytest.importorskip('mmseg.models')
    with torch.device('meta'):
        theirs = getattr(torchvision.models, f'resnet{depth}')().state_dict()
        plain = GatedResNet(depth, gate=None).state_dict()
        deep = GatedResNetV1c(depth, gate=None).state_dict()
        seg = mmseg.ResNetV1c(depth=depth).state_dict()
    theirs = {name: value.shape for name, value in theirs.items() if not name.startswith('fc.')}
    assert {name: value.shape for name, value in plain.items()} == theirs
    assert {n: v.shape for n, v in deep.items()} == {n: v.shape for n, v in seg.items()}


def test_v1d_and_v1c_are_the_flags():
    v1d, v1c = GatedResNetV1d(18, **SMALL), GatedResNetV1c(18, **SMALL)
    assert (v1d.deep_stem, v1d.avg_down) == (True, True)
    assert (v1c.deep_stem, v1c.avg_down) == (True, False)


def test_drop_path_grows_as_in_mmpretrain():
    mmpretrain = pytest.importorskip('mmpretrain.models')
    rates = [
        [
            getattr(module, 'drop_prob', 0.0)
            for name, module in model.named_modules()
            if name.endswith('drop_path')
        ]
        for model in (
            mmpretrain.ResNet(18, drop_path_rate=0.3, **SMALL),
            GatedResNet(18, drop_path_rate=0.3, **SMALL),
        )
    ]
    assert rates[0] == pytest.approx(rates[1]) and rates[1][-1] == pytest.approx(0.3)
    # In training a dropped image keeps its shortcut; in evaluation nothing is dropped.
    ours = GatedResNet(18, gate=None, drop_path_rate=0.3, **SMALL).eval()
    plain = GatedResNet(18, gate=None, **SMALL).eval()
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(ours(x)[-1], plain(x)[-1])
