# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Gates on a network that knows nothing of them: modes, copies, checkpoints, precision, ranks."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from backbones import build
from irrelevant import gate_all
from mmengine.model import ExponentialMovingAverage, revert_sync_batchnorm
from mmengine.registry import MODELS
from mmengine.utils import digit_version
from torch.utils.checkpoint import checkpoint
from two_processes import results_of_ranks, run_in_two_processes

import fgc_mm
from fgc_mm.gates import find_gates
from fgc_mm.sites import find_sites

RESNET = dict(base_channels=8, stem_channels=8)
LN = dict(type='BinConcreteGate', norm_cfg=dict(type='LN'), bias_init=0.5)


def gated(backbone, **options):
    import mmseg.models  # noqa: F401

    torch.manual_seed(0)
    return MODELS.build(dict(type='Gated', backbone=backbone, gate=LN, **options))


def resnet(**options):
    return gated(dict(type='mmdet.ResNet', depth=18, norm_eval=False, **RESNET, **options))


def fixed_norms():
    """A network in training whose pictures have nothing to do with each other."""
    net = gated(dict(type='mmdet.ResNet', depth=18, norm_eval=True, **RESNET))
    net.train()
    return net


def pictures(batch=2, size=64):
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


def loss_of(outs):
    return sum(out.square().mean() for out in (outs if isinstance(outs, (tuple, list)) else [outs]))


def gradients(net, x, seed=5):
    torch.manual_seed(seed)
    net.zero_grad()
    loss_of(net(x)).backward()
    return {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}


def assert_same(ours, theirs, **tolerance):
    assert ours.keys() == theirs.keys() and ours
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], msg=name, **tolerance)


def test_checkpointed_blocks_have_the_gradients_of_unchecked_ones():
    plain, checked = resnet(), resnet(with_cp=True)
    checked.load_state_dict(plain.state_dict())
    for net in (plain, checked):
        net.train()
    x = pictures().requires_grad_()
    ours, theirs = gradients(checked, x), gradients(plain, x)
    assert_same(ours, theirs, rtol=0, atol=0)
    assert any(n.startswith('gates.') and g.abs().sum() > 0 for n, g in ours.items())


class Imported(nn.Module):
    """Checkpoints by a function it imported by name, as timm does."""

    grad_checkpointing = True

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        y = self.a(x).relu()
        if self.grad_checkpointing and x.requires_grad:
            y = checkpoint(lambda y: self.b(y).relu(), y, use_reentrant=True)
        else:
            y = self.b(y).relu()
        return self.c(y)


def test_a_checkpoint_that_was_imported_by_name():
    net = Imported().train()
    gate_all(net, torch.rand(1, 3, 6, 6))
    x = torch.rand(2, 3, 6, 6, requires_grad=True)
    ours = gradients(net, x)
    net.grad_checkpointing = False
    assert_same(ours, gradients(net, x))


def test_an_error_in_the_pass_leaves_checkpointing_as_it_was():
    before = torch.utils.checkpoint.CheckpointFunction
    net = resnet(with_cp=True)
    with pytest.raises(RuntimeError):
        net(torch.rand(1, 4, 32, 32))
    assert torch.utils.checkpoint.CheckpointFunction is before


def test_half_precision():
    net = resnet()
    net.train()
    with torch.autocast('cpu', torch.bfloat16):
        found = gradients(net, pictures())
    for name, gate in find_gates(net).items():
        assert gate.record.logits.dtype == torch.float32
        assert found[f'{name}.fc1.weight'].isfinite().all()
        assert found[f'{name}.fc1.weight'].abs().sum() > 0, name


def test_accumulated_gradients_are_the_sum_of_both():
    net = resnet()
    net.train()
    one, two = (gradients(net, pictures()[i : i + 1].repeat(2, 1, 1, 1), 5 + i) for i in (0, 1))
    net.zero_grad()
    for i in (0, 1):
        torch.manual_seed(5 + i)
        loss_of(net(pictures()[i : i + 1].repeat(2, 1, 1, 1))).backward()
    both = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    assert_same(both, {name: one[name] + two[name] for name in one}, rtol=1e-4, atol=1e-5)


def test_averaged_weights():
    """What EMAHook keeps is a network with gates of its own."""
    net = resnet()
    average = ExponentialMovingAverage(net, momentum=0.25, update_buffers=True)
    start = {name: value.clone() for name, value in net.state_dict().items()}
    net.train()
    gradients(net, pictures())
    with torch.no_grad():
        for p in net.parameters():
            p.sub_(0.1 * p.grad if p.grad is not None else 0)
    average.update_parameters(net)  # the first time it copies
    with torch.no_grad():
        net.gates.of('layer1.0.conv1').fc2.bias.add_(4)
    average.update_parameters(net)
    ours = average.module.gates.of('layer1.0.conv1').fc2.bias
    theirs = net.gates.of('layer1.0.conv1').fc2.bias
    assert torch.allclose(theirs - ours, torch.full_like(ours, 3.0), atol=1e-5)
    assert start.keys() == average.module.state_dict().keys()
    net.gates.of('layer1.0.conv1').record = None
    average.module.eval()
    average.module(pictures())
    assert net.gates.of('layer1.0.conv1').record is None
    assert average.module.gates.of('layer1.0.conv1').record is not None


@pytest.mark.parametrize('way', ['deepcopy', 'pickle', 'file'])
def test_copies_after_a_training_pass_have_gates_of_their_own(way, tmp_path):
    net = resnet()
    net.train()
    loss_of(net(pictures()))  # a graph hangs on the records
    if way == 'deepcopy':
        other = copy.deepcopy(net)
    elif way == 'pickle':
        other = pickle.loads(pickle.dumps(net))
    else:
        torch.save(net, tmp_path / 'net.pth')
        other = torch.load(tmp_path / 'net.pth', weights_only=False)
    assert all(gate.record is None for gate in find_gates(other).values())
    records = {name: gate.record for name, gate in find_gates(net).items()}
    with torch.no_grad():
        for gate in find_gates(other).values():
            gate.fc2.bias.fill_(-9.0)
    other.eval()
    closed = other(pictures())
    assert all(gate.record is records[name] for name, gate in find_gates(net).items())
    assert all(gate.record.mask.sum() == 0 for gate in find_gates(other).values())
    net.eval()
    assert not torch.equal(closed[-1], net(pictures())[-1])
    other.init_weights()
    assert all((gate.fc2.bias == 0.5).all() for gate in find_gates(other).values())
    assert all((gate.fc2.bias == 0.5).all() for gate in find_gates(net).values())


SMALL = {
    'swin': dict(type='mmdet.SwinTransformer', embed_dims=8, depths=(1, 1), num_heads=(1, 2),
                 strides=(4, 2), out_indices=(0, 1)),
    'mit': dict(type='mmseg.MixVisionTransformer', embed_dims=8, num_stages=2, num_layers=[1, 1],
                num_heads=[1, 2], patch_sizes=[7, 3], strides=[4, 2], sr_ratios=[2, 1],
                out_indices=(0, 1)),
    'pvt-v2': dict(type='mmdet.PyramidVisionTransformerV2', embed_dims=8,
                   num_layers=[1, 1, 1, 1]),
    'convnext': dict(type='mmpretrain.ConvNeXt',
                     arch=dict(depths=[1, 1, 1, 1], channels=[8, 8, 8, 8])),
}  # fmt: skip


@pytest.mark.parametrize('name', SMALL)
def test_the_networks_own_initialization_does_not_wipe_that_of_the_gates(name):
    net = gated(SMALL[name])
    gates = find_gates(net)
    assert gates
    for gate in gates.values():
        nn.init.zeros_(gate.fc2.bias)
        nn.init.zeros_(gate.fc2.weight)
    net.init_weights()
    for gate in gates.values():
        assert (gate.fc2.bias == 0.5).all() and gate.fc2.weight.abs().sum() > 0


@pytest.mark.parametrize('follow', [False, True])
def test_norms_of_gates_learn_while_those_of_the_network_do_not(follow):
    backbone = dict(type='mmdet.ResNet', depth=18, **RESNET)  # norm_eval is its default
    net = gated(backbone, gates_follow_freeze=follow)
    gate = dict(type='BinConcreteGate')
    net = MODELS.build(dict(type='Gated', backbone=backbone, gate=gate, gates_follow_freeze=follow))
    net.train()
    net(pictures())
    assert not net.layer1[0].bn1.training
    for part in find_gates(net).values():
        assert part.norm.training is not follow
        assert (part.norm.num_batches_tracked.item() > 0) is not follow


def test_a_row_of_layers_is_still_one():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    x = torch.rand(1, 3, 4, 4)
    plain = net(x)
    fgc_mm.gate(net, x, sites=['0'], gate=dict(LN, bias_init=9.0)).eval()
    assert torch.equal(net(x), plain)


@pytest.mark.parametrize('mode', [False, True])
def test_compiles_into_one_graph(mode):
    """With gradients that reach the gates. The compiler of torch 2.1 needs several graphs."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 2, 1),
    )  # fmt: skip
    gate_all(net, torch.rand(1, 3, 6, 6), gate=LN)
    net.train(mode)
    x = torch.rand(2, 3, 6, 6)
    eager = gradients(net, x)
    one = digit_version(torch.__version__) >= digit_version('2.4')
    compiled = torch.compile(net, fullgraph=one, backend='eager')
    torch.manual_seed(5)
    net.zero_grad()
    loss_of(compiled(x)).backward()
    ours = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    assert_same(ours, eager)
    assert all(gate.record is not None for gate in find_gates(net).values())


@pytest.fixture
def alone():
    """A group of one process, as a launcher makes before the model is built."""
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_synchronized_norms_are_no_hindrance_on_the_cpu_where_models_are_built(alone):
    net = gated(
        dict(type='mmdet.ResNet', depth=18, norm_cfg=dict(type='SyncBN'), norm_eval=False, **RESNET)
    )
    net.train()
    assert all(m.training for m in net.modules() if isinstance(m, nn.SyncBatchNorm))
    assert len(find_gates(net)) == 8
    net = revert_sync_batchnorm(net)  # what a runner does without a launcher
    assert gradients(net, pictures())


RANKS = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import test_forward_hooks as case

dist.init_process_group('gloo')
rank = dist.get_rank()
net = case.fixed_norms()
parallel = DistributedDataParallel(net)
torch.manual_seed(5)
case.loss_of(parallel(case.pictures()[rank : rank + 1])).backward()
torch.save({n: p.grad for n, p in net.named_parameters() if p.grad is not None},
           sys.argv[1].format(rank))
"""


def test_two_ranks_have_the_mean_of_their_gradients(tmp_path):
    script = tmp_path / 'ranks.py'
    script.write_text(
        f'import sys\nsys.path.insert(0, {str(__file__.rpartition("/")[0])!r})\n{RANKS}'
    )
    pattern = tmp_path / 'grads-{}.pth'
    one, two = results_of_ranks(run_in_two_processes(script, pattern), pattern)
    assert_same(one, two, rtol=0, atol=0)
    net = fixed_norms()
    alone = [gradients(net, pictures()[i : i + 1]) for i in (0, 1)]
    assert any(name.startswith('gates.') for name in one)
    assert_same({n: (alone[0][n] + alone[1][n]) / 2 for n in one}, one, rtol=1e-3, atol=1e-5)


def test_what_looking_for_sites_changes_is_put_back():
    net = build('mobilenet-v3')
    net.eval()
    next(net.parameters()).requires_grad_(False)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    modes = [m.training for m in net.modules()]
    learns = [p.requires_grad for p in net.parameters()]
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    find_sites(net, pictures(1))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert [m.training for m in net.modules()] == modes
    assert [p.requires_grad for p in net.parameters()] == learns
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in net.modules())
