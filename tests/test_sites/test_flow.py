# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""How channels spread: places that are sites, and places that only look like one."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from irrelevant import assert_closed_is_irrelevant, gate_all, run

from fgc_mm.sites import find_sites


class Net(nn.Module):
    """Layers by name, and a forward pass that is written down where it is tested."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.way = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x):
        return self.way(self, x)


def conv(ins, outs, kernel=1, **options):
    return nn.Conv2d(ins, outs, kernel, padding=kernel // 2, **options)


def found(net, shape=(1, 3, 6, 6)):
    torch.manual_seed(0)
    return find_sites(net, torch.rand(shape))


def reason(net, name='a', shape=(1, 3, 6, 6)):
    """Why a layer is no site."""
    result = found(net, shape)
    assert name not in [site.name for site in result.sites]
    return {refusal.name: refusal.reason for refusal in result.refused}[name]


def checked(net, shape=(2, 3, 6, 6)):
    """The sites of a network, none of which is a wrong one."""
    example = torch.rand(shape)
    gates = gate_all(net, example)
    assert_closed_is_irrelevant(net, example, gates)
    return gates.sites


def test_several_consumers_and_all_that_lies_between():
    net = Net(
        lambda m, x: (lambda y: m.c(y) + m.d(F.avg_pool2d(y, 3, 1, 1)))(m.bn(m.b(x)).relu()),
        b=conv(3, 4, 3), bn=nn.BatchNorm2d(4), c=conv(4, 2), d=conv(4, 2, 3),
    )  # fmt: skip
    (site,) = checked(net).values()
    assert site.name == 'b' and [end.module for end in site.consumers] == ['c', 'd']


def test_depthwise_and_grouped_convolutions_are_switched_by_groups():
    net = nn.Sequential(
        conv(3, 8), conv(8, 8, 3, groups=8), nn.ReLU(), conv(8, 12, 3, groups=4), conv(12, 2)
    )
    (site,) = checked(net).values()
    assert site.channels == 4
    assert site.producers[0].index == (0, 0, 1, 1, 2, 2, 3, 3)
    assert [end.module for end in site.through] == ['1', '3']
    assert site.through[1].index == site.consumers[0].index == tuple(i // 3 for i in range(12))


def test_a_grouped_convolution_whose_output_is_not_private_is_the_consumer():
    net = Net(lambda m, x: x + m.g(m.a(x)), a=conv(4, 6), g=conv(6, 4, groups=2))
    (site,) = checked(net, (2, 4, 6, 6)).values()
    assert site.consumers[0].module == 'g' and not site.through
    assert site.channels == 2


@pytest.mark.parametrize('linear', [False, True])
def test_squeeze_and_excitation(linear):
    kind = nn.Linear if linear else nn.Conv2d
    layers = [kind(*pair, *(() if linear else (1,))) for pair in ((6, 3), (3, 6))]

    def forward(m, x):
        y = m.a(x).relu()
        pooled = y.mean((2, 3), keepdim=not linear)
        factor = m.fc2(m.fc1(pooled).relu()).sigmoid()
        return m.b(y * (factor[..., None, None] if linear else factor))

    net = Net(forward, a=conv(3, 6), fc1=layers[0], fc2=layers[1], b=conv(6, 2))
    sites = checked(net)
    assert [end.module for end in sites['a'].producers] == ['a', 'fc2']
    assert [end.module for end in sites['a'].consumers] == ['fc1', 'b']
    assert set(sites) == {'a', 'fc1'}


def test_a_concatenation_in_front_of_a_consumer():
    net = Net(
        lambda m, x: m.c(torch.cat([m.a(x), x, m.b(x).relu()], 1)),
        a=conv(3, 2), b=conv(3, 4), c=conv(9, 2),
    )  # fmt: skip
    sites = checked(net)
    assert sites['a'].consumers[0].index == (0, 1, *[-1] * 7)
    assert sites['b'].consumers[0].offset == 5


def test_dense_blocks():
    net = Net(
        lambda m, x: (lambda y: m.d(torch.cat([x, y, m.c(torch.cat([x, y], 1))], 1)))(m.a(x)),
        a=conv(3, 4), c=conv(7, 4), d=conv(11, 2),
    )  # fmt: skip
    sites = checked(net)
    assert [end.module for end in sites['a'].consumers] == ['c', 'd']
    assert sites['c'].consumers[0].offset == 7


@pytest.mark.parametrize('first', [True, False])
def test_the_hidden_layer_of_a_transformer_has_the_pictures_in_front(first):
    def forward(m, x):
        tokens = x.flatten(2).permute(*((0, 2, 1) if first else (2, 0, 1)))
        return m.b(F.gelu(m.a(tokens)))

    net = Net(forward, a=nn.Linear(3, 8), b=nn.Linear(8, 3))
    if first:
        (site,) = checked(net).values()
        assert site.axis == -1
    else:
        assert 'the pictures are not in the first dimension' in reason(net)


def test_channels_that_are_shuffled_are_followed():
    net = Net(
        lambda m, x: m.b(m.a(x).view(len(x), 2, 3, 6, 6).transpose(1, 2).reshape(len(x), 6, 6, 6)),
        a=conv(3, 6), b=conv(6, 2),
    )  # fmt: skip
    (site,) = checked(net).values()
    assert site.consumers[0].index == (0, 3, 1, 4, 2, 5)


def test_padded_channels_follow_no_decision():
    net = Net(lambda m, x: m.b(F.pad(m.a(x), (0, 0, 0, 0, 1, 2))), a=conv(3, 4), b=conv(7, 2))
    (site,) = checked(net).values()
    assert site.consumers[0].index == (-1, 0, 1, 2, 3, -1, -1)


def test_a_map_as_a_factor_reads_and_multiplies():
    net = Net(
        lambda m, x: (lambda y: m.b(y * m.map(y).sigmoid()))(m.a(x)),
        a=conv(3, 4), map=conv(4, 1), b=conv(4, 2),
    )  # fmt: skip
    sites = checked(net)
    assert list(sites) == ['a']
    assert [end.module for end in sites['a'].consumers] == ['map', 'b']


def test_a_layer_that_is_called_several_times():
    net = Net(
        lambda m, x: [m.b(m.a(level).relu()) for level in (x, x[..., ::2, ::2])],
        a=conv(3, 4), b=conv(4, 2),
    )  # fmt: skip
    (site,) = checked(net).values()
    assert site.calls == 2


def test_a_module_under_two_names_is_one():
    shared = conv(3, 4)
    net = Net(
        lambda m, x: [m.b(m.one(x).relu()), m.b(m.two(x[..., ::2]).relu())],
        one=shared, two=shared, b=conv(4, 2),
    )  # fmt: skip
    (site,) = checked(net).values()
    assert site.name == 'one' and site.calls == 2


@pytest.mark.parametrize('style', ['pointwise', 'inplace', 'cropped'])
def test_harmless_steps(style):
    steps = dict(
        pointwise=lambda y: torch.where(y > 0, F.hardswish(y), 0.1 * y) / 2,
        inplace=lambda y: F.relu_(y).mul_(2).add_(1),
        cropped=lambda y: F.interpolate(y, scale_factor=2)[..., 1:-1],
    )
    net = Net(lambda m, x: m.b(steps[style](m.a(x))), a=conv(3, 4), b=conv(4, 2))
    assert list(checked(net)) == ['a']


# Name -> (what happens between the layers, what the refusal says).
WRONG = {
    'mean over channels': (lambda m, y, x: m.b(y - y.mean(1, keepdim=True)), 'mean runs over'),
    'maximum over channels': (lambda m, y, x: m.b(y * y.amax(1, keepdim=True)), 'amax runs over'),
    'softmax over channels': (lambda m, y, x: m.b(y.softmax(1)), 'softmax over the channels'),
    'layer norm over channels': (
        lambda m, y, x: m.b(F.layer_norm(y.permute(0, 2, 3, 1), (4,)).permute(0, 3, 1, 2)),
        'layer norm',
    ),
    'group norm': (lambda m, y, x: m.b(F.group_norm(y, 2)), 'group norm'),
    'sum': (lambda m, y, x: m.b(y + torch.cat([x, x[:, :1]], 1)), 'added to another tensor'),
    'minimum': (lambda m, y, x: m.b(y.clamp(max=torch.cat([x, x[:, :1]], 1))), 'another tensor'),
    'power of another shape': (
        lambda m, y, x: m.b(y.abs().mean((2, 3), keepdim=True) ** x[:, :1].abs()), 'another tensor',
    ),
    'matrix product': (
        lambda m, y, x: m.b((y.flatten(2).softmax(-1) @ y.flatten(2).mT @ y.flatten(2)).view_as(y)),
        'a matrix product',
    ),
    'output': (lambda m, y, x: (m.b(y), y * 2), 'an output of the network'),
    'output in a dict in an object': (
        lambda m, y, x: type('Out', (), {})().__dict__.setdefault('parts', [m.b(y), {'y': y}]),
        'an output of the network',
    ),
    'kept for later': (lambda m, y, x: (setattr(m, 'kept', [y]), m.b(y))[1], 'an output'),
    'a decision by values': (lambda m, y, x: m.b(y) if y.mean() > 9 else m.b(2 * y), 'mean runs'),
    'a decision by other values': (
        lambda m, y, x: m.b(y) if x.sum() < 1e9 else y, 'depends on the values of its input',
    ),
    'a look by NumPy': (
        lambda m, y, x: m.b(y) if x.detach().numpy().max() < 9 else y, 'depends on the values',
    ),
    'data': (lambda m, y, x: m.b(y) + y.data.mean(), 'mean runs over its channels'),
    'change of a part in place': (
        lambda m, y, x: m.b((y[:, 1:].mul_(y.mean((2, 3), keepdim=True)[:, :3]), y)[1]), 'in place',
    ),
    'weights read elsewhere': (
        lambda m, y, x: m.b(y) + F.conv2d(x, m.a.weight)[:, :2], 'its weights are used by',
    ),
    'pictures in another order': (lambda m, y, x: m.b(y.roll(1, 0)), 'roll lets pictures meet'),
    'pictures swapped by parts': (lambda m, y, x: m.b(torch.cat([y[1:], y[:1]])), 'another order'),
    'pictures that meet': (lambda m, y, x: m.b(y - y.mean(0, keepdim=True)), 'pictures meet'),
    'only half of the calls': (lambda m, y, x: m.b(y) + m.b(torch.cat([x, x[:, :1]], 1)), 'calls'),
    'two of its channels meet': (
        lambda m, y, x: m.b(y * torch.cat([y[:, 2:], y[:, :2]], 1)), 'two of its channels meet',
    ),
    'indices of a maximum': (
        lambda m, y, x: (lambda p, i: m.b(p) + i.float().mean((2, 3), keepdim=True)[:, :2])(
            *F.max_pool2d(y, 2, return_indices=True)
        ),
        'added to another tensor',
    ),
}  # fmt: skip


@pytest.mark.parametrize('name', WRONG)
def test_wrong_sites_that_look_harmless(name):
    between, said = WRONG[name]
    net = Net(lambda m, x: between(m, m.a(x), x), a=conv(3, 4), b=conv(4, 2))
    assert said in reason(net, shape=(2, 3, 6, 6))


def test_a_linear_layer_and_then_a_mean_over_its_outputs():
    net = Net(lambda m, x: m.b(m.a(x.flatten(2)).mean(-1)), a=nn.Linear(36, 8), b=nn.Linear(3, 2))
    assert 'mean runs over its channels' in reason(net)


def test_a_branch_of_training_only():
    net = Net(
        lambda m, x: (m.b(m.a(x)), m.a(x)) if m.training else m.b(m.a(x)),
        a=conv(3, 4), b=conv(4, 2),
    )  # fmt: skip
    assert reason(net).startswith('in training')


def test_shared_weights_of_two_layers():
    net = Net(lambda m, x: m.c(torch.cat([m.a(x), m.b(x)], 1)), a=conv(3, 4), b=conv(3, 4),
              c=conv(8, 2))  # fmt: skip
    assert {site.name for site in found(net).sites} == {'a', 'b'}
    net.b.weight = net.a.weight
    assert 'used by b as well' in reason(net)
    assert 'used by a as well' in reason(net, 'b')


def test_a_layer_without_a_batch():
    net = Net(lambda m, x: m.b(m.a(x[0])), a=conv(3, 4), b=conv(4, 2))
    assert 'without a batch' in reason(net)


def test_closed_channels_are_closed_for_the_gates_behind_them():
    """A decision depends on open channels alone."""
    torch.manual_seed(0)
    net = nn.Sequential(conv(3, 6), nn.ReLU(), conv(6, 8), nn.ReLU(), conv(8, 2)).eval()
    example = torch.rand(2, 3, 6, 6)
    gates = gate_all(net, example)
    gates.of('0').forced = torch.tensor([1.0, 0, 1, 0, 1, 1])
    before = run(net, example), gates.of('2').record.logits
    with torch.no_grad():
        net[0].bias[[1, 3]] = 5.0
    after = run(net, example), gates.of('2').record.logits
    assert torch.equal(before[0][0], after[0][0]) and torch.equal(before[1], after[1])
