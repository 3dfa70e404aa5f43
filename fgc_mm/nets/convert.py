# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Weights of other code bases as checkpoints of an mmpretrain classifier."""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

import torch
from mmengine.registry import MODELS
from torch import Tensor

from ..errors import CheckpointError, UsageError, in_context
from ..files import write_files

_NORM = r'(?:weight|bias|running_mean|running_var|num_batches_tracked)'
_STEM = {rf'(conv1\.weight|bn1\.{_NORM})': r'backbone.\1'}
_CIFAR = {
    **_STEM,
    rf'(layer[1-3]\.\d+\.(?:conv[12]\.weight|bn[12]\.{_NORM}))': r'backbone.\1',
    r'linear\.(weight|bias)': r'head.fc.\1',
}
_MLP = r'(layer[1-3])\.(\d+)\.gate\.mlp'
_CIFAR_GATES = {
    rf'{_MLP}\.(fc[12]\.(?:weight|bias))': r'backbone.gates.\1-\2-conv1.\3',
    rf'{_MLP}\.bn\.({_NORM})': r'backbone.gates.\1-\2-conv1.norm.\3',
    # The banks of the coupling: one row per training picture, of no use without
    # the order of those pictures.
    r'layer[1-3]\.\d+\.gate\.(?:gate_mb|feat_mb)\.(?:memory|params)': None,
}
_TORCHVISION = {
    **_STEM,
    rf'(layer[1-4]\.\d+\.(?:conv[1-3]\.weight|bn[1-3]\.{_NORM}))': r'backbone.\1',
    rf'(layer[1-4]\.\d+\.downsample\.(?:0\.weight|1\.{_NORM}))': r'backbone.\1',
    r'fc\.(weight|bias)': r'head.fc.\1',
}
_CIFAR_DEPTHS: dict[tuple[int, ...], int] = {(n, n, n): 6 * n + 2 for n in (3, 5, 7, 9, 18)}
_TORCHVISION_DEPTHS: dict[tuple[bool, tuple[int, ...]], int] = {
    (False, (2, 2, 2, 2)): 18,
    (False, (3, 4, 6, 3)): 34,
    (True, (3, 4, 6, 3)): 50,
    (True, (3, 4, 23, 3)): 101,
    (True, (3, 8, 36, 3)): 152,
}


class _Format(NamedTuple):
    """Names of one code base.

    Attributes:
        name (str): Short name, as in :attr:`Conversion.source`.
        about (str): What such a file is, for messages.
        marks (tuple[str]): Patterns that must each fit a key of the file.
        rules (Mapping): Pattern of a key -> its new name; None drops it.
    """

    name: str
    about: str
    marks: tuple[str, ...]
    rules: Mapping[str, Optional[str]]

    def lacking(self, keys: Sequence[str]) -> list[str]:
        """The marks that no key fits."""
        return [mark for mark in self.marks if not any(re.fullmatch(mark, key) for key in keys)]


# The first that fits is taken: the gated CIFAR files have all keys of the dense.
FORMATS = (
    _Format(
        'fgc_cifar',
        'gated CIFAR ResNet of the FGC authors (layerN.M.gate.mlp.fc1 and linear)',
        (r'layer[1-3]\.\d+\.gate\.mlp\.fc1\.weight', r'linear\.weight'),
        {**_CIFAR, **_CIFAR_GATES},
    ),
    _Format(
        'dense_cifar',
        'dense CIFAR ResNet with parameter-free shortcuts (layerN.M.conv1 and linear)',
        (r'layer3\.0\.conv1\.weight', r'linear\.weight'),
        _CIFAR,
    ),
    _Format(
        'torchvision',
        "torchvision's ResNet (layer1 to layer4, downsample, fc)",
        (r'layer1\.0\.conv1\.weight', r'layer4\.0\.conv1\.weight'),
        _TORCHVISION,
    ),
)


@dataclass
class Conversion:
    """A converted state dict and what is known about it.

    Attributes:
        source (str): Name of the format it came from.
        state_dict (OrderedDict): ``backbone.*`` and ``head.fc.*``.
        backbone (dict): Config of the backbone the weights fit.
        num_classes (int, optional): Width of the classifier, None without one.
        dropped (list[str]): Keys of the source that were left out on purpose.
    """

    source: str
    state_dict: OrderedDict[str, Tensor]
    backbone: dict
    num_classes: Optional[int] = None
    dropped: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = f'{self.source}: {len(self.state_dict)} tensors for {self.backbone}'
        text += ', no classifier' if self.num_classes is None else f', {self.num_classes} classes'
        if self.dropped:
            text += f'; left out {len(self.dropped)}: {_some(self.dropped)}'
        return text


def convert_state_dict(checkpoint: Mapping) -> Conversion:
    """Rename the weights of another code base.

    Understands those of :data:`FORMATS`, bare or wrapped in ``state_dict`` or ``model``, with or
    without ``module.`` before every key. Every tensor is checked by name and shape
    against the backbone it is for.

    Args:
        checkpoint (Mapping): The state dict, or a checkpoint that holds it.

    Raises:
        CheckpointError: If the format is unknown, a key is unknown or a key of the
            backbone is missing.
    """
    source = _unwrap(checkpoint)
    keys = list(source)
    found = next((fmt for fmt in FORMATS if not fmt.lacking(keys)), None)
    if found is None:
        raise CheckpointError(_unknown_format(keys))
    converted: OrderedDict[str, Tensor] = OrderedDict()
    dropped, unknown = [], []
    for key, value in source.items():
        for pattern, target in found.rules.items():
            match = re.fullmatch(pattern, key)
            if match and target is not None:
                new_key = match.expand(target)
                # The authors' gates are 1x1 convolutions over a 1x1 map.
                linear = '.gates.' in new_key and '.fc' in new_key and value.dim() == 4
                converted[new_key] = value.flatten(1) if linear else value
            if match:
                dropped += [key] if target is None else []
                break
        else:
            unknown.append(key)
    if unknown:
        raise CheckpointError(
            f'The file is a {found.about}, but {len(unknown)} of its {len(keys)} keys are not of '
            f'that format: {_some(unknown)}'
        )
    backbone = _backbone_of(found.name, converted)
    _check(backbone, converted)
    classifier = converted.get('head.fc.weight')
    num_classes = None if classifier is None else classifier.size(0)
    return Conversion(found.name, converted, backbone, num_classes, dropped)


def convert_file(src: Union[str, Path], dst: Union[str, Path], trust: bool = False) -> Conversion:
    """Convert a weight file into a checkpoint of an mmpretrain classifier.

    Only tensors are read from ``src``, no code of it is run unless it is trusted. ``dst`` appears
    whole or not at all.

    Args:
        src (str or Path): File of another code base.
        dst (str or Path): File to write; an existing one is replaced.
        trust (bool): Load what is no plain tensors as well, which may run code of the
            file. Defaults to False.

    Raises:
        CheckpointError: If ``src`` is not understood.
    """
    src, dst = Path(src), Path(dst)
    if dst.exists() and dst.samefile(src):
        raise UsageError(f'{dst} is the source itself: name another file to write')
    try:
        checkpoint = torch.load(src, map_location='cpu', weights_only=not trust)
    except Exception as error:  # a damaged file fails in any way
        if isinstance(error, OSError):
            raise
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CheckpointError(f'{src} is not a file of plain tensors: {reason[0]}') from error
    with in_context(str(src)):
        conversion = convert_state_dict(checkpoint)
    meta = {key: getattr(conversion, key) for key in ('source', 'backbone', 'num_classes')}
    checkpoint = dict(meta=meta, state_dict=conversion.state_dict)
    write_files({dst: partial(torch.save, checkpoint)})
    return conversion


def _unwrap(checkpoint: Mapping) -> dict[str, Tensor]:
    """The tensors of a checkpoint, without wrappers and ``module.``."""
    for wrapper in ('state_dict', 'model'):
        if isinstance(checkpoint, Mapping) and isinstance(checkpoint.get(wrapper), Mapping):
            checkpoint = checkpoint[wrapper]
    if not isinstance(checkpoint, Mapping):
        raise CheckpointError(f'expected a state dict but found a {type(checkpoint).__name__}')
    others = [str(key) for key, value in checkpoint.items() if not isinstance(value, Tensor)]
    if others:
        raise CheckpointError(
            f'expected a state dict of tensors but these are none: {_some(others)}'
        )
    prefix = 'module.'
    while checkpoint and all(key.startswith(prefix) for key in checkpoint):
        checkpoint = {key[len(prefix) :]: value for key, value in checkpoint.items()}
    return dict(checkpoint)


def _unknown_format(keys: list[str]) -> str:
    lines = [f'None of the known formats fits the {len(keys)} keys of the file.']
    if any(key.startswith('backbone.') for key in keys):
        lines.append("Keys with 'backbone.' are there already: it may need no conversion.")
    for fmt in FORMATS:
        count = sum(any(re.fullmatch(p, key) for p in fmt.rules) for key in keys)
        lines.append(
            f'  {fmt.about}: recognized {count} keys, no key like {" or ".join(fmt.lacking(keys))}'
        )
    return '\n'.join([*lines, f'Its keys: {_some(keys)}'])


def _some(keys: list[str], most: int = 8) -> str:
    rest = len(keys) - most
    return ', '.join(keys[:most]) + (f' and {rest} more' if rest > 0 else '')


def _backbone_of(source: str, state_dict: Mapping[str, Tensor]) -> dict:
    """Config of the backbone a converted state dict is for."""
    found = (re.match(r'backbone\.layer(\d)\.(\d+)\.', key) for key in state_dict)
    counts = Counter(stage for stage, _ in {m.groups() for m in found if m})
    blocks = tuple(counts[stage] for stage in sorted(counts))
    if source == 'torchvision':
        bottleneck = 'backbone.layer1.0.conv3.weight' in state_dict
        depth = _TORCHVISION_DEPTHS.get((bottleneck, blocks))
        choices = '(2, 2, 2, 2), (3, 4, 6, 3), (3, 4, 23, 3) or (3, 8, 36, 3)'
    else:
        depth = _CIFAR_DEPTHS.get(blocks)
        choices = '(n, n, n) with n = 3, 5, 7, 9 or 18'
    if depth is None:
        raise CheckpointError(f'The stages have {blocks} blocks, but should have {choices}')
    kind = 'GatedResNet' if source == 'torchvision' else 'GatedResNetCifar'
    backbone: dict[str, Any] = dict(type=kind, depth=depth, gate=None)
    if source == 'fgc_cifar':
        hidden = [v.size(0) for k, v in state_dict.items() if k.endswith('-conv1.fc1.weight')]
        backbone['gate'] = dict(type='BinConcreteGate', hidden=hidden[0])
    return backbone


def _check(backbone: dict, state_dict: Mapping[str, Tensor]) -> None:
    """Compare names and shapes with the backbone."""
    kind = backbone['type']
    scope = next((s for s in ('mmpretrain', 'mmdet', 'mmseg') if find_spec(s)), None)
    if scope and kind == 'GatedResNet':  # has the same names in all packages
        kind = f'{scope}.{kind}'
    with torch.random.fork_rng(devices=[]):
        model = MODELS.build({**backbone, 'type': kind})
    wanted = {f'backbone.{key}': tuple(v.shape) for key, v in model.state_dict().items()}
    given = {k: tuple(v.shape) for k, v in state_dict.items() if k.startswith('backbone.')}
    # Files older than PyTorch 0.4.1 have no such counters.
    missing = [k for k in wanted if k not in given and not k.endswith('num_batches_tracked')]
    if missing:
        raise CheckpointError(f'{len(missing)} keys of {backbone} are missing: {_some(missing)}')
    surplus = [key for key in given if key not in wanted]
    if surplus:
        raise CheckpointError(f'{len(surplus)} keys are unknown to {backbone}: {_some(surplus)}')
    wrong = [f'{k} {s} instead of {wanted[k]}' for k, s in given.items() if s != wanted[k]]
    if wrong:
        raise CheckpointError(f'{len(wrong)} shapes do not fit {backbone}: {_some(wrong, 4)}')
    head = {key for key in state_dict if key.startswith('head.fc.')}
    if len(head) == 1:
        raise CheckpointError(f'The classifier has only {head.pop()}, but needs weight and bias')
