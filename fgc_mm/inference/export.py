# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Export of networks with their gates, checked against PyTorch before anything is written."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Optional

import torch
import torch.nn as nn
from torch import Tensor

from ..errors import UsageError
from ..gates import find_gates
from ..macs import ImageMACs, MACsTracer
from .export_formats import AXES, FORMATS, Format, Run, record
from .export_int8 import agreement, check_int8, quantized
from .export_parts import Preprocessing, Recorded, backbone_name, find_part, recordable

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
        int8 (dict[str, float]): Of an int8 network how far it is from float32, see
            :func:`~fgc_mm.inference.export_int8.agreement`; else empty.
    """

    content: bytes
    metadata: dict[str, str]
    outputs: dict[str, tuple[int, ...]]
    dynamic: list[str]
    checks: dict[str, float]
    notices: list[str]
    int8: dict[str, float]

    @property
    def max_difference(self) -> float:
        """The largest difference from PyTorch."""
        return max(self.checks.values())


@torch.no_grad()
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
    calibration: Optional[Sequence[Picture]] = None,
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
        calibration (Sequence[Picture], optional): Quantize to int8 with the ranges on these
            pictures, others than ``pictures``. Defaults to None, float32.

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
    form, found = FORMATS[file_format](opset), find_part(model, part)
    if calibration is not None:
        check_int8(file_format, opset)
    notices = [f'not exported: {what}' for what in found.not_exported]
    before = _preprocessing(model, pictures, with_preprocess, notices)
    if fixed_size:
        pictures = [p for p in pictures if p.raw.shape == pictures[0].raw.shape]
        notices.append(f'images of {_size(pictures[0].raw)} only')
    dynamic = [0] if fixed_size else [0, 2, 3]
    inputs = [p.raw.float() if with_preprocess else p.ready for p in pictures]
    network = Recorded(model, found, before if with_preprocess else None, with_gates)
    was_training = model.training
    network.eval()
    try:
        with recordable(model):
            outputs = _shapes(network, inputs[0])
            recorded = record(form, network, torch.cat([inputs[0]] * 2), dynamic)
        run = _load(form, form.write(recorded, {}))
        checks, macs = _check(network, run, inputs, not fixed_size)
        int8: dict[str, float] = {}
        if calibration is not None:
            ranges = [p.raw.float() if with_preprocess else p.ready for p in calibration]
            if fixed_size:
                ranges = [x for x in ranges if x.shape == inputs[0].shape]
            recorded = quantized(recorded, ranges, find_gates(model))
            run = _load(form, form.write(recorded, {}))
            int8 = agreement(run, inputs, [network.reference(x) for x in inputs])
    finally:
        model.train(was_training)
    info = dict(
        part=found.name,
        format=file_format,
        gates=len(find_gates(model)),
        not_exported=list(found.not_exported),
        preprocess_included=with_preprocess,
        **({} if before is None else asdict(before)),
        **macs,
        **(metadata or {}),
        max_difference=max(checks.values()),
        precision='float32' if calibration is None else 'int8',
        **({} if calibration is None else dict(int8=int8)),
    )
    text = {key: v if isinstance(v, str) else json.dumps(v) for key, v in info.items()}
    free = [AXES[dim] for dim in dynamic]
    return Exported(form.write(recorded, text), text, outputs, free, checks, notices, int8)


def _size(x: Tensor) -> str:
    return f'{x.shape[2]}x{x.shape[3]}'


def _preprocessing(
    model: nn.Module, pictures: Sequence[Picture], needed: bool, notices: list[str]
) -> Optional[Preprocessing]:
    """The preprocessing in words, if it is what the model's own does."""
    preprocessor = getattr(model, 'data_preprocessor', None)
    result = Preprocessing.of(preprocessor)
    if all(
        result(p.raw).shape == p.ready.shape and torch.allclose(result(p.raw), p.ready, atol=1e-5)
        for p in pictures
    ):
        return result
    problem = (
        f'{type(preprocessor).__name__} does more than reversing channels, mean, std and padding '
        'to a multiple'
    )
    if needed:
        raise UsageError(f'--with-preprocess: {problem}')
    notices.append(f'{problem}: the metadata says nothing about preprocessing')
    return None


def _shapes(network: Recorded, x: Tensor) -> dict[str, tuple[int, ...]]:
    """Shapes of the outputs for one picture.

    Raises:
        UsageError: If the network does not run, such as a head that takes more than
            feature maps.
    """
    try:
        outs = network(x)
    except Exception as error:  # upstream's heads have no common one
        name = network.part.name
        hint = '' if name == 'backbone' else '; try its backbone alone (--part backbone)'
        raise UsageError(
            f'{type(network.model).__name__} does not run on a picture of {_size(x)} as it '
            f'would be exported ({name}): {type(error).__name__}: {str(error).strip()}{hint}'
        ) from error
    return {name: tuple(out.shape) for name, out in zip(network.names, outs, strict=True)}


def _load(form: Format, content: bytes) -> Run:
    try:
        return form.load(content)
    except Exception as error:  # of the runtime, which has errors of its own
        why = (str(error).splitlines() or [type(error).__name__])[0]
        more = '. Try newer operators, such as --opset 17' if form.opset < 17 else ''
        raise UsageError(f'what was recorded cannot be loaded: {why}{more}') from error


def _check(
    network: Recorded, run: Run, inputs: Sequence[Tensor], any_size: bool
) -> tuple[dict[str, float], dict[str, int]]:
    """The largest difference on each picture, and on what may change; mean MACs of the pictures."""
    first = inputs[0]
    cases = {f'picture {i + 1} ({_size(x)})': x for i, x in enumerate(inputs)}
    other = next((x for x in inputs[1:] if x.shape == first.shape), first.flip(3))
    cases['a batch of 2'] = torch.cat([first, other])
    if any_size:  # 3/4 as high, 5/4 as wide
        height, more = math.ceil(0.75 * first.shape[2]), math.ceil(0.25 * first.shape[3])
        changed = torch.cat([first, first[..., :more]], dim=3)[:, :, :height].contiguous()
        cases[f'another size ({_size(changed)})'] = changed
    checks, macs = {}, list[ImageMACs]()
    for what, x in cases.items():
        tracer = MACsTracer(network.model, backbone_name(network.model))
        tracer.attach()
        try:
            wanted = network.reference(x)
        finally:
            tracer.detach()
        macs += tracer.take(len(x))
        checks[what] = _difference(run, x, wanted, what)
    mean = {
        f'macs_{key}': round(sum(getattr(m, key) for m in macs[: len(inputs)]) / len(inputs))
        for key in ('backbone_dense', 'backbone_executed', 'model_dense', 'model_executed')
    }
    return checks, mean


def _difference(run: Run, x: Tensor, wanted: dict[str, Tensor], what: str) -> float:
    """Largest absolute difference of all outputs."""
    try:
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
