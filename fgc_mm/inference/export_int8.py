# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Int8 networks in ONNX, quantized after training by ONNX Runtime's static quantization."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Optional

from torch import Tensor

from ..errors import UsageError
from .export_formats import INPUT, Run

TOLERANCE = 0.3
"""Largest relative difference from float32 over the check pictures that passes."""
FIRST_OPSET = 13
"""Before it, operators of ONNX know no scale for each channel."""
SCORES = ('scores', 'logits')
"""Outputs whose largest entry along the second dimension is the class."""


def check_int8(file_format: str, opset: int) -> None:
    """See that a format can hold int8 networks.

    Raises:
        UsageError: If not.
    """
    if file_format != 'onnx':
        raise UsageError(f"--int8 needs --format onnx, and this is '{file_format}'")
    if opset < FIRST_OPSET:
        raise UsageError(f'--int8 needs --opset {FIRST_OPSET} or newer, and this is {opset}')


def quantized(model: Any, pictures: Sequence[Tensor], gates: Collection[str] = ()) -> Any:
    """A network in which convolutions, matrix products and what lies between them are int8.

    Weights have a scale for each channel, maps one each: the range they have on the pictures.
    Gates stay in float32, since a decision that is rounded is another one. OpenVINO reads the
    result, too.

    Args:
        model (onnx.ModelProto): The network in float32.
        pictures (Sequence[Tensor]): What its input may be, 1 x 3 x H x W each.
        gates (Collection[str]): Names of the gates in it. Defaults to ().
    """
    if not pictures:
        raise UsageError('an int8 network needs at least one picture to calibrate on')
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Pictures(CalibrationDataReader):
        def __init__(self) -> None:
            self.left: Iterator[Tensor] = iter(pictures)

        def get_next(self) -> Optional[dict[str, Any]]:
            picture = next(self.left, None)
            return None if picture is None else {INPUT: picture.numpy()}

    level = logging.root.level
    logging.root.setLevel(logging.ERROR)  # it advises what has been done
    try:
        with TemporaryDirectory() as folder:
            given, ready, done = (Path(folder, f'{name}.onnx') for name in ('a', 'b', 'c'))
            onnx.save(model, given)
            quant_pre_process(given, ready, skip_symbolic_shape=True)
            # Nodes are called by the modules they come from.
            parts = {node.name: node.name.split('/') for node in onnx.load(ready).graph.node}
            modules = {name.rpartition('.')[2] for name in gates}
            quantize_static(
                ready,
                done,
                Pictures(),
                per_channel=True,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                nodes_to_exclude=[name for name in parts if modules.intersection(parts[name])],
            )
            return onnx.load(done)
    finally:
        logging.root.setLevel(level)


def agreement(run: Run, pictures: Sequence[Tensor], wanted: Sequence[dict[str, Tensor]]) -> dict:
    """How far the outputs of an int8 network are from those in float32.

    Args:
        run (Callable): Runs the network.
        pictures (Sequence[Tensor]): Pictures it was not calibrated on.
        wanted (Sequence[dict]): What float32 gives for each, name -> output.

    Returns:
        dict: Name -> relative difference over all pictures; of class scores also ``same_class``,
        the share of pictures, or of pixels, whose class is the same.

    Raises:
        UsageError: If the difference is not finite, or too large to be rounding.
    """
    error = dict.fromkeys(wanted[0], 0.0)
    energy, same = dict(error), list[float]()
    for x, outs in zip(pictures, wanted, strict=True):
        for out, (name, want) in zip(run(x), outs.items(), strict=True):
            error[name] += float((out - want).double().square().sum())
            energy[name] += float(want.double().square().sum())
            if name in SCORES:
                same.append(float((out.argmax(dim=1) == want.argmax(dim=1)).float().mean()))
    found = {name: math.sqrt(value / (energy[name] or 1.0)) for name, value in error.items()}
    for name, difference in found.items():
        if not difference <= TOLERANCE and not name.startswith('gate.'):
            raise UsageError(
                f'the int8 network fails the check: on {len(pictures)} pictures that it was not '
                f'calibrated on {name!r} differs from float32 by {100 * difference:.3g} %, more '
                f'than {100 * TOLERANCE:g} %. Calibrate it on more pictures or others '
                '(--calibrate, --calibrate-count), or stay with float32'
            )
    return {**found, **(dict(same_class=sum(same) / len(same)) if same else {})}
