# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The formats of export: how each is recorded, written and run."""

from __future__ import annotations

import importlib
import inspect
import io
import json
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import MissingPackageError, UsageError
from .export_parts import Recorded

INPUT = 'image'
METADATA = 'metadata.json'
OPSETS = (7, 20)
"""First and last version of ONNX's operators that a tracing exporter of PyTorch knows."""
AXES = {0: 'batch', 2: 'height', 3: 'width'}
Run = Callable[[Tensor], Sequence[Tensor]]


class Format:
    """A file format.

    Args:
        opset (int): Version of ONNX's operators.
    """

    def __init__(self, opset: int) -> None:
        self.opset = opset

    @abstractmethod
    def record(self, network: Recorded, example: Tensor, dynamic: Sequence[int]) -> Any:
        """A network that has run, recorded with an example; the dimensions in ``dynamic`` of its
        input may change."""

    @abstractmethod
    def write(self, recorded: Any, metadata: Mapping[str, str]) -> bytes:
        """The file of a recorded network."""

    @abstractmethod
    def load(self, content: bytes) -> Run:
        """What runs the network of a file."""


class Onnx(Format):
    """ONNX, by the exporter that traces: the one by torch.export needs onnxscript, and takes
    far longer."""

    def __init__(self, opset: int) -> None:
        super().__init__(opset)
        for package in ('onnx', 'onnxruntime'):
            try:
                importlib.import_module(package)
            except ImportError as error:
                raise MissingPackageError(
                    f'export to ONNX needs the package {package}, which does not import ({error}): '
                    "pip install '.[export]' in a clone of fgc_mm, or pip install onnx onnxruntime"
                ) from error
        if not OPSETS[0] <= opset <= OPSETS[1]:
            raise UsageError(f'--opset {opset} must be within {OPSETS[0]} and {OPSETS[1]}')

    def record(self, network: Recorded, example: Tensor, dynamic: Sequence[int]) -> Any:
        import onnx

        axes = {dim: AXES[dim] for dim in dynamic}
        changing = {INPUT: axes}
        for name, out in zip(network.names, network(example), strict=True):
            # The size of maps follows from that of the picture.
            own = {0: axes[0]} if 0 in axes else {}
            if out.dim() == 4 and 2 in axes:
                own.update({2: f'{name}_height', 3: f'{name}_width'})
            changing[name] = own
        options: dict[str, Any] = {}
        if 'dynamo' in inspect.signature(torch.onnx.export).parameters:
            options['dynamo'] = False
        buffer = io.BytesIO()
        torch.onnx.export(
            network,
            (example,),
            buffer,  # type: ignore[arg-type]
            opset_version=self.opset,
            input_names=[INPUT],
            output_names=list(network.names),
            dynamic_axes={name: own for name, own in changing.items() if own},
            **options,
        )
        model = onnx.load_from_string(buffer.getvalue())
        onnx.checker.check_model(model)
        return model

    def write(self, recorded: Any, metadata: Mapping[str, str]) -> bytes:
        import onnx

        onnx.helper.set_model_props(recorded, dict(metadata))
        return recorded.SerializeToString()

    def load(self, content: bytes) -> Run:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        # Threads that wait for work would slow others down, in checks and benchmarks.
        options.add_session_config_entry('session.intra_op.allow_spinning', '0')
        session = onnxruntime.InferenceSession(content, options, ['CPUExecutionProvider'])
        return lambda x: [torch.from_numpy(out) for out in session.run(None, {INPUT: x.numpy()})]


class TorchScript(Format):
    """A trace of ``torch.jit``. Every size may change; whether it does is seen by running it."""

    def record(self, network: Recorded, example: Tensor, dynamic: Sequence[int]) -> Any:
        return torch.jit.freeze(torch.jit.trace(network, (example,), check_trace=False).eval())

    def write(self, recorded: Any, metadata: Mapping[str, str]) -> bytes:
        buffer = io.BytesIO()
        torch.jit.save(recorded, buffer, _extra_files={METADATA: json.dumps(dict(metadata))})
        return buffer.getvalue()

    def load(self, content: bytes) -> Run:
        return torch.jit.load(io.BytesIO(content))


class TorchExport(Format):
    """A program of ``torch.export``."""

    def __init__(self, opset: int) -> None:
        super().__init__(opset)
        if not can_torch_export():
            raise UsageError(
                f"file_format='torch_export' needs torch >= 2.6, and this is {torch.__version__}: "
                "use 'onnx' or 'torchscript'"
            )

    def record(self, network: Recorded, example: Tensor, dynamic: Sequence[int]) -> Any:
        shape = dict.fromkeys(dynamic, torch.export.Dim.AUTO)
        return torch.export.export(network, (example,), dynamic_shapes=(shape,), strict=False)

    def write(self, recorded: Any, metadata: Mapping[str, str]) -> bytes:
        buffer = io.BytesIO()
        extra = {METADATA: json.dumps(dict(metadata))}
        torch.export.save(recorded, buffer, extra_files=extra)
        return buffer.getvalue()

    def load(self, content: bytes) -> Run:
        return torch.export.load(io.BytesIO(content)).module()


def can_torch_export() -> bool:
    """Whether this torch.export records networks whose image size may change."""
    return hasattr(getattr(torch.export, 'Dim', None), 'AUTO')


FORMATS: dict[str, type[Format]] = dict(
    onnx=Onnx, torchscript=TorchScript, torch_export=TorchExport
)


def record(form: Format, network: Recorded, example: Tensor, dynamic: Sequence[int]) -> Any:
    """Record a network, without what tracers say about sizes that are fixed.

    Raises:
        UsageError: If the network has something the format cannot hold.
    """
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter('ignore')
            return form.record(network, example, dynamic)
    except Exception as error:  # every recorder has its own, without a common base
        hint = '; a fixed image size (--fixed-size) may help' if 2 in dynamic else ''
        reason = str(error).strip().splitlines() or ['']
        raise UsageError(
            f'{type(network.model).__name__} cannot be exported as {type(form).__name__}: '
            f'{type(error).__name__}: {reason[0]}{hint}'
        ) from error
