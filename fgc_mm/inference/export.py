# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Export of networks with their gates, checked against PyTorch before anything is written."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

import torch
import torch.nn as nn
from torch import Tensor

from ..errors import UsageError
from ..gates import find_gates
from ..macs import ImageMACs, MACsTracer
from .export_formats import FORMATS, Run, record
from .export_graph import recordable, take_masks
from .export_parts import Part, Preprocessing, Recorded, find_part, gate_outputs, other_size

TOLERANCE = 1e-3
"""Largest difference from PyTorch, absolute, that passes the check."""


@dataclass
class Picture:
    """A picture to check with.

    Attributes:
        raw (Tensor): 1 x 3 x H x W, what the test pipeline gives.
        ready (Tensor): 1 x 3 x H x W, what the data preprocessor makes of it.
    """

    raw: Tensor
    ready: Tensor


@dataclass
class Exported:
    """An exported network.

    Attributes:
        content (bytes): The file.
        metadata (dict[str, str]): What the file says about it.
        outputs (dict[str, tuple]): Name -> shape, for the first picture.
        dynamic (list[str]): What may change: 'batch', 'height', 'width'.
        checks (dict[str, float]): What was run -> largest difference.
        notices (list[str]): What a user should know.
    """

    content: bytes
    metadata: dict[str, str]
    outputs: dict[str, tuple[int, ...]]
    dynamic: list[str]
    checks: dict[str, float]
    notices: list[str] = field(default_factory=list)

    @property
    def max_difference(self) -> float:
        """The largest difference from PyTorch."""
        return max(self.checks.values())


def export(
    model: nn.Module,
    pictures: Sequence[Picture],
    part: str = 'model',
    file_format: str = 'onnx',
    with_gates: bool = False,
    with_preprocess: bool = False,
    fixed_size: bool = False,
    opset: int = 17,
    metadata: Optional[dict[str, Any]] = None,
) -> Exported:
    """Export a network with its gates inside, and check it against PyTorch.

    It is run on every picture, on a batch of two and on a picture of another
    size, as far as these may change.

    Args:
        model (nn.Module): A task model of mmdet, mmseg or mmpretrain, or any network; with gates,
            or without, as slimming may leave it.
        pictures (Sequence[Picture]): Real pictures.
        part (str): 'model', as far as its heads can be exported, or
            'backbone'. Defaults to 'model'.
        file_format (str): 'onnx', 'torchscript' or 'torch_export'.
            Defaults to 'onnx'.
        with_gates (bool): Whether the masks of the gates are outputs too.
            Defaults to False.
        with_preprocess (bool): Whether normalization and padding are part of
            the graph. Defaults to False.
        fixed_size (bool): Whether only pictures of the size of the first one
            can be run. Defaults to False.
        opset (int): Version of ONNX's operators. Defaults to 17.
        metadata (dict, optional): More for the file. Defaults to None.

    Returns:
        Exported: The content of the file, and what was found.

    Raises:
        UsageError: If the model cannot be exported, or the check fails.
        MissingPackageError: If a package is missing.
    """
    if file_format not in FORMATS:
        raise UsageError(f'file_format={file_format!r} must be one of {", ".join(FORMATS)}')
    if not pictures:
        raise UsageError('export needs at least one picture to check with')
    chosen, found = FORMATS[file_format](opset), find_part(model, part)
    notices = [f'not exported: {what}' for what in found.not_exported]
    before = _preprocessing(model, pictures, with_preprocess, notices)
    if fixed_size:
        pictures = [p for p in pictures if p.raw.shape == pictures[0].raw.shape]
        notices.append(f'images of {_size(pictures[0].raw)} only')
    was_training = model.training
    model.eval()
    try:
        dynamic = [0] if fixed_size else [0, 2, 3]
        inputs = [p.raw.float() if with_preprocess else p.ready for p in pictures]
        with torch.no_grad(), recordable(model):
            network = Recorded(found, before if with_preprocess else None, with_gates)
            shapes = _shapes(network.eval(), inputs[0])
            content = record(chosen, network, torch.cat([inputs[0]] * 2), dynamic)
        macs: list[ImageMACs] = []
        checks = {}
        try:
            run = chosen.load(content)
        except Exception as error:  # of the runtime, which has errors of its own
            why = (str(error).splitlines() or [type(error).__name__])[0]
            more = '. Try newer operators, such as --opset 17' if opset < 17 else ''
            raise UsageError(f'what was recorded cannot be loaded: {why}{more}') from error
        for what, x in _cases(inputs, dynamic):
            ready = before(x) if with_preprocess and before is not None else x
            wanted = _reference(found, ready, with_gates, macs if len(x) == 1 else None)
            checks[what] = _difference(run, x, wanted, what)
        info = _metadata(found, file_format, before, with_preprocess, macs[: len(inputs)])
        info.update(metadata or {}, max_difference=max(checks.values()))
        text = {k: v if isinstance(v, str) else json.dumps(v) for k, v in info.items()}
        return Exported(
            chosen.annotate(content, text),
            text,
            dict(zip(network.names, shapes, strict=True)),
            [{0: 'batch', 2: 'height', 3: 'width'}[dim] for dim in dynamic],
            checks,
            notices,
        )
    finally:
        model.train(was_training)


def _shapes(network: Recorded, x: Tensor) -> list[tuple[int, ...]]:
    """Shapes of the outputs for one picture.

    Raises:
        UsageError: If the network does not run, such as a head that takes more than
            feature maps.
    """
    try:
        return [tuple(out.shape) for out in network(x)]
    except Exception as error:  # upstream's heads have no common one
        part = type(network.part).__name__.removesuffix('Part')
        hint = '' if part == 'Backbone' else '; try its backbone alone (--part backbone)'
        raise UsageError(
            f'{type(network.part.model).__name__} does not run on a picture of {_size(x)} as it '
            f'would be exported ({part}): {type(error).__name__}: {str(error).strip()}{hint}'
        ) from error


def _cases(inputs: Sequence[Tensor], dynamic: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """What the exported network is run on: pictures, then what may change."""
    for i, x in enumerate(inputs):
        yield f'picture {i + 1} ({_size(x)})', x
    first = inputs[0]
    other = next((x for x in inputs[1:] if x.shape == first.shape), first.flip(3))
    yield 'a batch of 2', torch.cat([first, other])
    if 2 in dynamic:
        yield f'another size ({_size(other_size(first))})', other_size(first)


def _size(x: Tensor) -> str:
    return f'{x.shape[2]}x{x.shape[3]}'


def _reference(
    part: Part, x: Tensor, with_gates: bool, macs: Optional[list[ImageMACs]]
) -> dict[str, Tensor]:
    """Outputs of the model itself, its computation counted."""
    tracer = MACsTracer(part.model, part.backbone)
    tracer.attach()
    try:
        with torch.no_grad():
            outs = part.reference(x)
    finally:
        tracer.detach()
    if macs is not None:
        macs += tracer.take(len(x))
    masks = take_masks(part.model)
    return {**outs, **gate_outputs(masks)} if with_gates else outs


def _difference(run: Run, x: Tensor, wanted: dict[str, Tensor], what: str) -> float:
    """Largest absolute difference of all outputs."""
    try:
        with torch.no_grad():
            outs = run(x)
    except Exception as error:  # every runtime has its own
        raise UsageError(
            f'the exported network does not run on {what}: {str(error).strip()}'
        ) from error
    largest = 0.0
    for out, (name, want) in zip(outs, wanted.items(), strict=True):
        if out.shape != want.shape:
            raise UsageError(
                f'the exported network fails the check: on {what} {name!r} has the shape '
                f'{tuple(out.shape)} instead of {tuple(want.shape)}'
            )
        difference = float((out - want).abs().max())
        if not math.isfinite(difference):
            raise UsageError(
                f'the exported network cannot be checked: on {what} {name!r} has values that are '
                'nan or infinite. Look for such values in the weights and in the pictures'
            )
        if difference > TOLERANCE:
            raise UsageError(
                f'the exported network fails the check: on {what} {name!r} differs from PyTorch by '
                f'{difference:.3g}, more than {TOLERANCE:g}. A gate that is undecided to the last '
                'digit can do that: try other pictures (--image)'
            )
        largest = max(largest, difference)
    return largest


def _preprocessing(
    model: nn.Module, pictures: Sequence[Picture], needed: bool, notices: list[str]
) -> Optional[Preprocessing]:
    """The preprocessing in words, if it is what the model's own does."""
    preprocessor: Any = getattr(model, 'data_preprocessor', None)
    result = Preprocessing.of(preprocessor)
    same = all(
        result(p.raw).shape == p.ready.shape and torch.allclose(result(p.raw), p.ready, atol=1e-5)
        for p in pictures
    )
    if same:
        return result
    problem = (
        f'{type(preprocessor).__name__} does more than reversing channels, mean, std and padding '
        'to a multiple'
    )
    if needed:
        raise UsageError(f'--with-preprocess: {problem}')
    notices.append(f'{problem}: the metadata says nothing about preprocessing')
    return None


def _metadata(
    part: Part,
    file_format: str,
    preprocessing: Optional[Preprocessing],
    included: bool,
    macs: Sequence[ImageMACs],
) -> dict[str, Any]:
    info: dict[str, Any] = dict(
        part=type(part).__name__.removesuffix('Part').lower(),
        format=file_format,
        gates=len(find_gates(part.model)),
        not_exported=part.not_exported,
        preprocess_included=included,
    )
    if preprocessing is not None:
        info.update(asdict(preprocessing))
    for key in ('backbone_dense', 'backbone_executed', 'model_dense', 'model_executed'):
        info[f'macs_{key}'] = round(sum(getattr(image, key) for image in macs) / len(macs))
    return info
