# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Small random networks for hypothesis: everything that makes and breaks a site."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import strategies as st

SIZE = 6


class Row(nn.Module):
    """A program: each step reads tensors made before it and makes one more.

    Args:
        steps (list): (what, numbers of the tensors read, name of its layers or options).
        layers (dict): Its modules.
        outs (list): Numbers of the tensors it returns.
    """

    def __init__(self, steps, layers, outs):
        super().__init__()
        self.steps, self.outs = steps, outs
        for name, layer in layers.items():
            self.add_module(name, layer)

    def __repr__(self):
        lines = [f'  {number}: {step}' for number, step in enumerate(self.steps, 1)]
        return '\n'.join([super().__repr__(), *lines, f'  returns {self.outs}'])

    def forward(self, x):
        made, extra = [x], []
        for what, reads, option in self.steps:
            x = made[reads[0]]
            if what == 'training':
                if self.training:
                    extra.append(getattr(self, option)(x).mean())
                made.append(x)
                continue
            y = made[reads[-1]]
            layer = getattr(self, option) if isinstance(option, str) else None
            made.append(STEPS[what](x, y, layer, option))
        outs = [made[number] for number in self.outs]
        return outs[0] if len(outs) == 1 and not extra else (*outs, *extra)


class Excite(nn.Module):
    def __init__(self, channels, style):
        super().__init__()
        self.style = style
        inner = max(2, channels // 2)
        kind = nn.Linear if style else nn.Conv2d
        sizes = ((channels, inner), (inner, channels))
        self.fc1, self.fc2 = (kind(*pair) if style else kind(*pair, 1) for pair in sizes)

    def forward(self, x):
        if not self.style:
            return x * self.fc2(self.fc1(F.adaptive_avg_pool2d(x, 1)).relu()).sigmoid()
        factor = self.fc2(F.silu(self.fc1(x.mean((2, 3))))).sigmoid()
        return x * factor[..., None, None]


class Tokens(nn.Module):
    """An MLP over tokens: batch first, or batch second."""

    def __init__(self, channels, first):
        super().__init__()
        self.first = first
        self.norm = nn.LayerNorm(channels)
        self.fc1, self.fc2 = nn.Linear(channels, 5), nn.Linear(5, channels)

    def forward(self, x):
        order = (0, 2, 1) if self.first else (2, 0, 1)
        t = x.flatten(2).permute(order)
        t = t + self.fc2(F.gelu(self.fc1(self.norm(t))))
        back = t.permute(0, 2, 1) if self.first else t.permute(1, 2, 0)
        return back.reshape(x.shape)


def shuffle(x):
    b, c, h, w = x.shape
    return x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(x.shape)


def by_value(x, y):
    return x * 2 if float(y.mean()) > 0 else x + 1


def in_place_part(x):
    x = x.clone()
    x[:, 1:].mul_(2)
    return x


STEPS = {
    'layer': lambda x, y, layer, o: layer(x),
    'relu': lambda x, y, layer, o: x.relu(),
    'relu_': lambda x, y, layer, o: F.relu(x * 1, inplace=True),
    'silu': lambda x, y, layer, o: F.silu(x),
    'add': lambda x, y, layer, o: x + y,
    'mul': lambda x, y, layer, o: x * y.sigmoid(),
    'cat': lambda x, y, layer, o: torch.cat([x, y], 1),
    'first': lambda x, y, layer, o: x.chunk(2, 1)[0],
    'second': lambda x, y, layer, o: x.chunk(2, 1)[1],
    'glu': lambda x, y, layer, o: F.glu(x, 1),
    'channel_mean': lambda x, y, layer, o: x - x.mean(1, keepdim=True),
    'map': lambda x, y, layer, o: x * y.mean(1, keepdim=True).sigmoid(),
    'max_map': lambda x, y, layer, o: x * y.amax(1, keepdim=True).sigmoid(),
    'squeeze': lambda x, y, layer, o: x * x.mean((2, 3), keepdim=True),
    'conv_map': lambda x, y, layer, o: x * layer(y).sigmoid(),
    'two_maps': lambda x, y, layer, o: (
        x * layer(y)[:, :1].sigmoid() + x.relu() * layer(y)[:, 1:].sigmoid()
    ),
    'pad': lambda x, y, layer, o: F.pad(x, (0, 0, 0, 0, 1, 1)),
    'pad_space': lambda x, y, layer, o: F.pad(x, (1, 1, 1, 1))[..., 1:-1, 1:-1],
    'crop': lambda x, y, layer, o: F.pad(x, (0, 0, 0, 0, -1, 1)),
    'roll': lambda x, y, layer, o: x.roll(1, 1),
    'roll_images': lambda x, y, layer, o: x.roll(1, 0),
    'swap_images': lambda x, y, layer, o: torch.cat([x[1:], x[:1]]),
    'flip': lambda x, y, layer, o: x.flip(1),
    'shuffle': lambda x, y, layer, o: shuffle(x),
    'resize': lambda x, y, layer, o: F.interpolate(F.max_pool2d(x, 2), (SIZE, SIZE)),
    'batch_mean': lambda x, y, layer, o: x - x.mean(0, keepdim=True),
    'value': lambda x, y, layer, o: by_value(x, y),
    'part': lambda x, y, layer, o: in_place_part(x),
    'data': lambda x, y, layer, o: x.data * 1,
    'softmax': lambda x, y, layer, o: x.softmax(1),
    'space_softmax': lambda x, y, layer, o: x.flatten(2).softmax(2).view(x.shape),
    'min_with': lambda x, y, layer, o: torch.minimum(x, y),
    'weight': lambda x, y, layer, o: x + F.conv2d(y, layer.weight).mean(1, keepdim=True),
    'where': lambda x, y, layer, o: torch.where(x > 0, x, x * 0.1),
    'matmul': lambda x, y, layer, o: (
        (x.flatten(2) @ y.flatten(2).transpose(1, 2)).softmax(-1) @ y.flatten(2)
    ).view(x.shape),
}
ONE = ('relu', 'relu_', 'silu', 'channel_mean', 'squeeze', 'roll', 'roll_images', 'swap_images',
       'flip', 'resize', 'batch_mean', 'part', 'data', 'softmax', 'space_softmax', 'where',
       'pad_space', 'crop')  # fmt: skip
SAME = ('add', 'mul', 'min_with', 'matmul')
OTHER = ('map', 'max_map', 'value')
# What networks are made of is drawn more often than what breaks sites.
KINDS = (
    ['conv'] * 8 + ['norm'] * 4 + ['one'] * 6 + ['usual'] * 6
    + ['same', 'same', 'other', 'cat', 'cat', 'excite', 'excite', 'block', 'block']
    + ['half', 'pad', 'shuffle', 'tokens', 'shared', 'alias', 'depthwise', 'grouped']
    + ['training', 'conv_map', 'two_maps', 'weight', 'norm_over_channels']
)  # fmt: skip


@st.composite
def networks(draw, depth=0, channels=3):
    """A network for pictures of three channels, or a part of one."""
    steps, layers = [], {}
    widths = [channels]

    def add(what, reads, option, width):
        steps.append((what, reads, option))
        widths.append(width)

    def new(layer):
        name = f'part{len(layers)}'
        layers[name] = layer
        return name

    for _ in range(draw(st.integers(3, 14 if depth == 0 else 6))):
        kind = draw(st.sampled_from(KINDS))
        last = len(widths) - 1
        x = draw(st.one_of(st.just(last), st.integers(0, last)))
        width = widths[x]
        alike = [n for n, w in enumerate(widths) if w == width]
        if kind == 'conv':
            out = draw(st.sampled_from([2, 4, 6]))
            k = draw(st.sampled_from([1, 3]))
            add('layer', [x], new(nn.Conv2d(width, out, k, padding=k // 2)), out)
        elif kind == 'norm':
            add('layer', [x], new(nn.BatchNorm2d(width)), width)
        elif kind == 'usual':
            add(draw(st.sampled_from(['relu', 'relu_', 'silu'])), [x], None, width)
        elif kind == 'one':
            add(draw(st.sampled_from(ONE)), [x], None, width)
        elif kind == 'same':
            add(draw(st.sampled_from(SAME)), [x, draw(st.sampled_from(alike))], None, width)
        elif kind == 'other':
            y = draw(st.integers(0, last))
            add(draw(st.sampled_from(OTHER)), [x, y], None, width)
        elif kind == 'cat':
            y = draw(st.integers(0, last))
            if width + widths[y] <= 12:
                add('cat', [x, y], None, width + widths[y])
        elif kind == 'half' and width % 2 == 0:
            add(draw(st.sampled_from(['first', 'second', 'glu'])), [x], None, width // 2)
        elif kind == 'pad' and width <= 8:
            add('pad', [x], None, width + 2)
        elif kind == 'shuffle' and width % 2 == 0:
            add('shuffle', [x], None, width)
        elif kind == 'excite':
            add('layer', [x], new(Excite(width, draw(st.booleans()))), width)
        elif kind == 'tokens':
            add('layer', [x], new(Tokens(width, draw(st.booleans()))), width)
        elif kind == 'depthwise':
            out = width * draw(st.sampled_from([1, 2]))
            add('layer', [x], new(nn.Conv2d(width, out, 3, padding=1, groups=width)), out)
        elif kind == 'grouped' and width % 2 == 0:
            add('layer', [x], new(nn.Conv2d(width, 4, 1, groups=2)), 4)
        elif kind == 'norm_over_channels':
            groups = draw(st.sampled_from([1, width]))
            add('layer', [x], new(nn.GroupNorm(groups, width)), width)
        elif kind in ('shared', 'alias'):
            fit = [n for n, layer in layers.items() if getattr(layer, 'in_channels', 0) == width]
            if fit:
                layer = layers[draw(st.sampled_from(fit))]
                name = new(layer) if kind == 'alias' else next(
                    n for n, other in layers.items() if other is layer
                )  # fmt: skip
                add('layer', [x], name, layer.out_channels)
        elif kind == 'training':
            add('training', [x], new(nn.Conv2d(width, 2, 1)), width)
        elif kind in ('conv_map', 'two_maps'):
            y = draw(st.integers(0, last))
            layer = nn.Conv2d(widths[y], 1 if kind == 'conv_map' else 2, 1)
            add(kind, [x, y], new(layer), width)
        elif kind == 'weight':
            fit = [
                (y, n)
                for n, layer in layers.items()
                for y, w in enumerate(widths)
                if isinstance(layer, nn.Conv2d) and layer.weight.shape[1:] == (w, 1, 1)
            ]
            if fit:
                y, name = draw(st.sampled_from(fit))
                add('weight', [x, y], name, width)
        elif kind == 'block' and depth == 0:
            part = draw(networks(depth=1, channels=width))
            if len(part.outs) == 1 and not any(step[0] == 'training' for step in part.steps):
                add('layer', [x], new(part), part.width)
    outs = [len(widths) - 1]
    if depth == 0:
        # A head behind the last tensor, so that what stands in front of it has a reader.
        add('layer', [outs[0]], new(nn.Conv2d(widths[-1], 3, 1)), 3)
        outs = sorted(
            {len(widths) - 1, *draw(st.sets(st.integers(0, len(widths) - 1), max_size=1))}
        )
    net = Row(steps, layers, outs)
    net.width = widths[-1]
    return net
