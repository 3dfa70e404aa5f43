# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A frozen network gives what the gated one gives with masks, and computes less."""

import copy
import pickle
import threading

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from frozen_networks import FAMILIES, assert_equal_outputs, build, pictures, wake
from mmengine.utils import digit_version

import fgc_mm
from fgc_mm.errors import UsageError
from fgc_mm.gates import find_gates, force_gates, set_threshold
from fgc_mm.inference import freeze, frozen_report
from fgc_mm.macs import count_macs

pytestmark = pytest.mark.usefixtures('without_gradients')
SHAPES = [(1, (64, 64)), (3, (64, 96)), (1, (65, 77)), (2, (64, 64))]
EVEN = [(1, (64, 64)), (3, (64, 96))]


def masks_of(net):
    return {name: gate.record.mask for name, gate in find_gates(net).items()}


@pytest.mark.parametrize('family', FAMILIES)
def test_outputs_and_records_are_those_of_masks(family):
    net = build(family)
    before = copy.deepcopy(net.state_dict())
    frozen = {way: freeze(net, way=way) for way in ('auto', 'gathered', 'each', 'dense')}
    for batch, size in EVEN if family == 'hrnet' else SHAPES:
        x = pictures(batch, size)
        wanted = net(x)
        masks = masks_of(net)
        together = torch.cat(list(masks.values()), dim=1)
        assert 0.2 < together.mean() < 0.8
        assert batch == 1 or len(together.unique(dim=0)) > 1
        for fast in frozen.values():
            assert_equal_outputs(fast(x), wanted)
            for name, mask in masks_of(fast).items():
                assert torch.equal(mask, masks[name]), name
    for fast in frozen.values():
        assert frozen_report(fast).masked == {}
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize('family', ['resnet50', 'mobilenet', 'vgg', 'se_resnet', 'convnext'])
def test_closed_channels_are_not_computed(family):
    net = build(family)
    frozen = freeze(net, way='gathered')
    x = pictures(1)
    frozen(x)
    widths = {}
    for name, module in frozen.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.register_forward_hook(
                lambda m, args, out, name=name: widths.update(
                    {name: (args[0].shape[-1 if isinstance(m, nn.Linear) else 1], out.size(1))}
                )
            )
    frozen(x)
    for name, site in frozen.gates.sites.items():
        kept = int(frozen.gates.of(name).record.mask.sum())
        most = kept + 15 if site.channels >= 32 else kept  # kernels like multiples of 8 or 16
        if site.producers[0].index is None and isinstance(frozen.get_submodule(name), nn.Conv2d):
            assert kept <= widths[name][1] <= most, name
        for end in site.consumers:
            if end.index is None:
                assert kept <= widths[end.module][0] <= most, end.module


@pytest.mark.parametrize('family', ['resnet18', 'mobilenet', 'densenet'])
def test_all_closed_one_open_all_open(family):
    net = build(family)
    frozen = freeze(net, pictures(1), way='gathered')
    x = pictures(2)
    one = {n: F.one_hot(torch.tensor([1, 3]), g.channels) for n, g in find_gates(net).items()}
    for forced in (0.0, 1.0, 0.5, one):
        with force_gates(net, forced), force_gates(frozen, forced):
            assert_equal_outputs(frozen(x), net(x))


@pytest.mark.parametrize(
    'gate',
    [
        dict(type='FBSGate'),
        dict(type='BinConcreteGate', norm_cfg=None),
        dict(type='BinConcreteGate', norm_cfg=dict(type='BN1d')),
    ],
)
def test_other_gates(gate):
    net = build(gate=gate)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 2)
    x = pictures(3)
    for way in ('gathered', 'each', 'dense'):
        frozen = freeze(net, way=way)
        assert_equal_outputs(frozen(x), net(x))
        masks = masks_of(net)
        for name, mask in masks_of(frozen).items():
            assert torch.equal(mask, masks[name]), name


def test_the_threshold_is_that_of_freezing():
    net = build()
    set_threshold(net, 0.9)
    x = pictures(1)
    wanted = net(x)
    high = torch.cat(list(masks_of(net).values()), dim=1).mean()
    frozen = freeze(net, x)
    set_threshold(net, 0.5)
    net(x)
    assert torch.cat(list(masks_of(net).values()), dim=1).mean() > high
    assert_equal_outputs(frozen(x), wanted)


# torch 2.1 convolves no half precision on a CPU.
HALF = [torch.float16] if digit_version(torch.__version__) >= digit_version('2.4') else []


@pytest.mark.parametrize('dtype', [*HALF, torch.bfloat16, torch.float64])
def test_precisions(dtype):
    net = build().to(dtype)
    x = pictures(2).to(dtype)
    frozen = freeze(net, way='gathered')
    forced = {name: gate.record.mask for name, gate in find_gates(freeze_once(net, x)).items()}
    with force_gates(net, forced), force_gates(frozen, forced):
        tolerance = {torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float64: 1e-4}[dtype]
        assert_equal_outputs(frozen(x), net(x), tolerance)
        assert frozen_report(frozen).masked == {}


def freeze_once(net, x):
    net(x)
    return net


def test_under_autocast():
    net = build()
    x = pictures(1)
    forced = masks_of(freeze_once(net, x))
    frozen = freeze(net, x, way='gathered')
    cast = torch.autocast('cpu', torch.bfloat16)
    with cast, force_gates(net, forced), force_gates(frozen, forced):
        assert_equal_outputs(frozen(x), net(x), 1e-1)


def test_a_layer_that_cannot_be_narrowed_stays_masked():
    """A module that looks at the number of its channels."""

    class Counts(nn.Module):
        def forward(self, x):
            return x * (1 + x.size(1) / 8)

    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), Counts(),
                          nn.Conv2d(8, 8, 3), nn.Conv2d(8, 3, 1))  # fmt: skip
    net = fgc_mm.gate(block, torch.rand(1, 3, 16, 16))
    wake(net)
    frozen = freeze(net, torch.rand(2, 3, 16, 16), way='gathered')
    assert list(frozen_report(frozen).masked) == ['2']
    assert '4' in frozen_report(frozen).gathered
    assert 'masked' in str(frozen_report(frozen))
    x = pictures(2, (20, 18))
    assert_equal_outputs(frozen(x), net(x))


class Shortcuts(nn.Module):
    """Sums with a tensor that is needed again, by itself or through a view of it, or not."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1)
        self.conv3 = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        y = self.conv1(x).relu()
        other = y.flatten(2) if self.kind == 'view' else y if self.kind != 'spent' else None
        z = self.conv3(self.conv2(y).relu()) + y
        z = z.relu()
        if self.kind == 'output':
            return z, other
        return z if other is None else z + other.view_as(z)


@pytest.mark.parametrize('kind', ['again', 'view', 'output', 'spent'])
def test_what_is_needed_later_is_not_added_to(kind):
    torch.manual_seed(0)
    net = fgc_mm.gate(Shortcuts(kind), torch.rand(1, 3, 70, 70))
    wake(net)
    frozen = freeze(net, torch.rand(1, 3, 70, 70), way='gathered')
    assert frozen.conv3.forward.adds == (kind == 'spent')
    x = torch.rand(2, 3, 70, 70)
    before = x.clone()
    first = frozen(x)
    kept = [out.clone() for out in ([first] if isinstance(first, torch.Tensor) else first)]
    assert_equal_outputs(first, net(x))
    frozen(torch.rand(2, 3, 70, 70))
    assert_equal_outputs(first, kept, 0)
    assert torch.equal(x, before)


def test_wide_sites_of_any_openness():
    """Numbers of computed channels that kernels like, and others."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 160, 3), nn.BatchNorm2d(160), nn.ReLU()
    net = fgc_mm.gate(nn.Sequential(*layers, nn.Conv2d(160, 5, 3)), torch.rand(1, 3, 20, 20))
    wake(net)
    frozen = freeze(net, way='gathered')
    x = pictures(2, (20, 18))
    for opened in (0, 1, 15, 16, 17, 144, 145, 159, 160):
        mask = (torch.randperm(160) < opened).float()
        with (
            force_gates(net, dict.fromkeys(find_gates(net), mask)),
            force_gates(frozen, dict.fromkeys(find_gates(net), mask)),
        ):
            assert_equal_outputs(frozen(x), net(x))


def test_copies_and_pickles_run_on_their_own():
    net = build()
    x = pictures(2)
    frozen = freeze(net, x, way='gathered')
    wanted = frozen(x)
    for other in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        assert_equal_outputs(other(x), wanted)
        for gate in find_gates(frozen).values():
            gate.record = None
        other(x)
        assert all(gate.record is None for gate in find_gates(frozen).values())
        assert all(gate.record is not None for gate in find_gates(other).values())


@pytest.mark.parametrize('way', ['auto', 'each'])
def test_threads_share_a_frozen_network(way):
    net = build()
    inputs = [pictures(1 + i % 3, (64 + 16 * i, 48)) * (1 + i) for i in range(4)]
    wanted = [net(x) for x in inputs]
    frozen = freeze(net, way=way)
    found, faults = {}, []

    def run(number):
        try:
            with torch.no_grad():
                for _ in range(5):
                    found[number] = frozen(inputs[number])
                    assert_equal_outputs(found[number], wanted[number])
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == [] and len(found) == 4


@pytest.mark.parametrize('batch', [1, 3])
def test_macs_are_counted_the_same(batch):
    net = build('resnet50')
    x = pictures(batch)
    wanted = count_macs(net, x)
    for way in ('gathered', 'each', 'dense'):
        found = count_macs(freeze(net, way=way), x)
        for have, want in zip(found, wanted, strict=True):
            assert have.model_executed == pytest.approx(want.model_executed)
            assert have.model_dense == pytest.approx(want.model_dense)


def test_a_network_without_gates_is_folded():
    plain = fgc_mm.nets.GatedResNetCifar(depth=20, gate=None)
    wake(plain)
    x = torch.rand(2, 3, 32, 32)
    frozen = freeze(plain, x)
    norms = sum(isinstance(module, nn.BatchNorm2d) for module in plain.modules())
    assert frozen_report(frozen).norms == norms > 0
    assert_equal_outputs(frozen(x), plain(x))


def test_mistakes_are_told():
    with pytest.raises(UsageError, match="way='sparse'"):
        freeze(build(), way='sparse')
    with pytest.raises(UsageError, match='is not frozen'):
        frozen_report(build())


@pytest.mark.skipif(not torch.cuda.is_available(), reason='requires CUDA')
@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_on_a_gpu(family, dtype):
    net = build(family).cuda().to(dtype)
    x = pictures(4).cuda().to(dtype)
    wanted = net(x)
    forced = masks_of(net)
    for way in ('auto', 'gathered', 'each', 'dense'):
        frozen = freeze(net, way=way)
        with force_gates(frozen, forced):
            outs = frozen(x)
        assert_equal_outputs(outs, wanted, 1e-4 if dtype == torch.float32 else 5e-2)
