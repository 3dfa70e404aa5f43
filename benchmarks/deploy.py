# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What people deploy on a CPU, side by side with networks that decide for each picture.

Backbones with random weights, batch 1. All variants of a network and size are built, compared with
PyTorch in float32, and timed in turn in one process, in another random order each time:

- all: the dense network, norms folded, in PyTorch, torch.compile (inductor, with freezing), ONNX
  Runtime and OpenVINO; int8 by ONNX Runtime's static quantization, as `fgc export --int8` does it,
  and by NNCF;
- open: the network with gates of which a random choice of channels is open, another one for each
  repetition, as fgc_mm.freeze runs it;
- static: a network without gates that has so many channels, as slimming or static gates leave it,
  in the same engines and through torch.export and AOTInductor.

    python benchmarks/deploy.py --out deploy.json
    python benchmarks/deploy.py --networks resnet18 --sizes 224 --engines pytorch onnxruntime ours
    python benchmarks/deploy.py --out deploy.json --report       # the table of what is there

What is in the .json file is not measured again. Engines that are not installed are left out, with a
line that says so (pip install '.[export,deploy]').
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from mmcv.cnn import fuse_conv_bn
from mmengine.logging import MMLogger
from mmengine.registry import MODELS

from fgc_mm.files import write_files
from fgc_mm.gates import find_gates
from fgc_mm.inference import Picture, export, freeze, keep_memory

CSPNEXT = dict(type='mmdet.CSPNeXt', deepen_factor=0.167, widen_factor=0.375)
NETWORKS = {
    'resnet18': dict(type='mmdet.ResNet', depth=18),
    'resnet50': dict(type='mmdet.ResNet', depth=50),
    'rtmdet_tiny': dict(CSPNEXT, norm_cfg=dict(type='BN'), act_cfg=dict(type='SiLU')),
}
ENGINES = ('pytorch', 'compile', 'aoti', 'onnxruntime', 'openvino', 'nncf', 'ours')
SETTLE = 20
"""Passes after which a frozen network has kept its fastest ways."""
Run = Callable[[torch.Tensor], Any]


class Setting:
    """One network at one size, and what is built from it once.

    Args:
        name (str): One of ``NETWORKS``.
        size (int): Height and width of the pictures.
    """

    def __init__(self, name: str, size: int) -> None:
        self.config = NETWORKS[name]
        torch.manual_seed(0)
        self.gated = MODELS.build(dict(type='Gated', backbone=self.config))
        self.gated.init_weights()
        for module in self.gated.modules():  # norms that do something, and are not folded to zero
            if isinstance(module, nn.BatchNorm2d):
                nn.init.constant_(module.weight, 0.7)
        self.gated.eval()
        self.x = torch.randn(1, 3, size, size)
        self.others = [torch.randn(1, 3, size, size) for _ in range(8)]
        self.networks: dict[float, nn.Module] = {}
        self.files: dict[tuple[float, bool], bytes] = {}

    def network(self, share: float) -> nn.Module:
        """The network without gates that has this share of the gated channels, norms folded."""
        if share not in self.networks:
            sites = self.gated.gates.sites.values()
            widths = {site.name: max(round(share * site.channels), 1) for site in sites}
            options = dict(gate=None, widths={} if share == 1 else widths)
            network = MODELS.build(dict(type='Gated', backbone=self.config, **options))
            if share == 1:
                network.load_state_dict(self.gated.state_dict(), strict=False)
            else:
                network.init_weights()
            network.eval()
            self.networks[share] = fuse_conv_bn(network)
        return self.networks[share]

    def onnx(self, share: float, int8: bool = False) -> bytes:
        """The same as a file."""
        if (share, int8) not in self.files:
            calibration = [Picture(x, x) for x in self.others] if int8 else None
            picture = [Picture(self.x, self.x)]
            found = export(self.network(share), picture, fixed_size=True, calibration=calibration)
            self.files[share, int8] = found.content
        return self.files[share, int8]

    def draw(self, share: float, generator: torch.Generator) -> None:
        """Open a random choice of channels: gates are evaluated, then overruled."""
        for gate in find_gates(self.gated).values():
            order = torch.randperm(gate.channels, generator=generator)
            gate.forced = torch.zeros(1, gate.channels, dtype=torch.bool)
            gate.forced[0, order[: max(round(share * gate.channels), 1)]] = True


def pytorch(setting: Setting, share: float, precision: str) -> Run:
    network = copy.deepcopy(setting.network(share)).to(memory_format=torch.channels_last)
    kind = torch.bfloat16 if precision == 'bf16' else torch.float32
    network.to(kind)
    return lambda x: network(x.to(kind, memory_format=torch.channels_last))


def compiled(setting: Setting, share: float, precision: str) -> Run:
    import torch._inductor.config as inductor

    inductor.freezing = True
    run = torch.compile(pytorch(setting, share, precision))
    run(setting.x)
    return run


def aoti(setting: Setting, share: float, precision: str) -> Run:
    if not hasattr(torch._inductor, 'aoti_compile_and_package'):
        raise ImportError('AOTInductor needs torch >= 2.6')
    program = torch.export.export(setting.network(share), (setting.x,), strict=False)
    path = tempfile.mkdtemp() + '/network.pt2'
    torch._inductor.aoti_compile_and_package(
        program, package_path=path, inductor_configs={'freezing': True}
    )
    return torch._inductor.aoti_load_package(path)


def onnxruntime(setting: Setting, share: float, precision: str) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    # Threads that wait for work would slow the others down.
    options.add_session_config_entry('session.intra_op.allow_spinning', '0')
    content = setting.onnx(share, precision == 'int8')
    session = onnxruntime.InferenceSession(content, options, ['CPUExecutionProvider'])
    return lambda x: session.run(None, {'image': x.numpy()})


def openvino(setting: Setting, share: float, precision: str) -> Run:
    return _openvino(setting, setting.onnx(share, precision == 'int8'), precision)


def nncf(setting: Setting, share: float, precision: str) -> Run:
    import nncf
    import openvino

    model = openvino.Core().read_model(setting.onnx(share))
    data = nncf.Dataset(setting.others, lambda x: x.numpy())
    return _openvino(setting, nncf.quantize(model, data, subset_size=len(setting.others)), 'int8')


def _openvino(setting: Setting, model: Any, precision: str) -> Run:
    import openvino

    core = openvino.Core()
    if isinstance(model, bytes):
        model = core.read_model(model)
    model.reshape(list(setting.x.shape))
    options: dict[str, Any] = dict(PERFORMANCE_HINT='LATENCY')
    options['INFERENCE_NUM_THREADS'] = torch.get_num_threads()
    options['INFERENCE_PRECISION_HINT'] = 'bf16' if precision == 'bf16' else 'f32'
    network = core.compile_model(model, 'CPU', options)
    return lambda x: list(network(x.numpy()).values())


def ours(setting: Setting, share: float, precision: str) -> Run:
    gated = setting.gated
    kind = torch.bfloat16 if precision == 'bf16' else torch.float32
    frozen = freeze(gated if precision == 'f32' else copy.deepcopy(gated).to(kind))
    gates = find_gates(frozen)

    def run(x: torch.Tensor) -> Any:
        for name, gate in find_gates(gated).items():
            gates[name].forced = gate.forced
        return frozen(x.to(kind))

    return run


BUILDERS: dict[str, Callable[[Setting, float, str], Run]] = dict(
    pytorch=pytorch,
    compile=compiled,
    aoti=aoti,
    onnxruntime=onnxruntime,
    openvino=openvino,
    nncf=nncf,
    ours=ours,
)
PRECISIONS = dict(
    pytorch=('f32', 'bf16'),
    compile=('f32', 'bf16'),
    aoti=('f32',),
    onnxruntime=('f32', 'int8'),
    openvino=('f32', 'bf16', 'int8'),
    nncf=('int8',),
    ours=('f32', 'bf16'),
)


def variants(args: argparse.Namespace) -> Iterator[tuple[str, str, float, str]]:
    """Engine, channels, their share, and precision of each."""
    for engine in args.engines:
        for precision in PRECISIONS[engine]:
            if engine not in ('ours', 'aoti'):
                yield engine, 'all', 1.0, precision
            for share in args.open if engine != 'compile' else ():
                kind = 'open' if engine == 'ours' else 'static'
                yield engine, f'{100 * share:.0f} % {kind}', share, precision


def difference(outs: Any, wanted: Any) -> float:
    """Relative difference of the last map."""
    own, other = (torch.as_tensor(list(maps)[-1]).double() for maps in (outs, wanted))
    return float((own - other).norm() / other.norm())


@torch.no_grad()
def build(setting: Setting, args: argparse.Namespace) -> tuple[list[dict], list[Run], list[str]]:
    """All variants that can be built: their rows, what runs them, and why others are left out."""
    rows, runs, left = [], [], dict[str, str]()
    generator = torch.Generator().manual_seed(1)
    for engine, channels, share, precision in variants(args):
        try:
            setting.draw(share, generator)
            run = BUILDERS[engine](setting, share, precision)
            reference = setting.gated if engine == 'ours' else setting.network(share)
            wrong = difference(run(setting.x), reference(setting.x))
        except Exception as error:  # each engine has its own; the others go on
            reason = (str(error).strip().splitlines() or [''])[0]
            left[engine] = f'{engine}: {type(error).__name__}: {reason}'
            continue
        keys = dict(engine=engine, channels=channels, share=share, precision=precision)
        rows.append(dict(keys, difference=wrong))
        runs.append(run)
    return rows, runs, list(left.values())


@torch.no_grad()
def measure(setting: Setting, rows: list[dict], runs: list[Run], args: argparse.Namespace) -> None:
    """Time all of them in turn."""
    generator = torch.Generator().manual_seed(2)
    times: list[list[float]] = [[] for _ in runs]
    for row, run in zip(rows, runs, strict=True):
        for _ in range(SETTLE if row['engine'] == 'ours' else 2):
            setting.draw(row['share'], generator)
            run(setting.x)
    for _ in range(args.repeats):
        for number in random.sample(range(len(runs)), len(runs)):
            setting.draw(rows[number]['share'], generator)
            start = time.perf_counter()
            runs[number](setting.x)
            times[number].append(time.perf_counter() - start)
    for row, found in zip(rows, times, strict=True):
        row.update(ms=1000 * statistics.median(found), fastest_ms=1000 * min(found))


def table(known: dict[str, list[dict]]) -> str:
    """Median milliseconds: a line for each variant, a column for each network and size."""
    keys = ('engine', 'channels', 'precision')
    lines: dict[tuple, dict[str, dict]] = {}
    for setting, rows in known.items():
        for row in rows:
            lines.setdefault(tuple(row[key] for key in keys), {})[setting] = row
    text = ['| engine | channels | precision | ' + ' | '.join(known) + ' |']
    text.append('| --- | --- | --- |' + ' ---: |' * len(known))
    for key, found in lines.items():
        cells = [f'{found[s]["ms"]:.1f}' if s in found else '' for s in known]
        text.append('| ' + ' | '.join((*key, *cells)) + ' |')
    return '\n'.join(text)


def parse_args(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument('--networks', nargs='+', choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument('--sizes', nargs='+', type=int, default=[224, 512], help='pixels')
    parser.add_argument('--engines', nargs='+', choices=ENGINES, default=list(ENGINES))
    parser.add_argument('--open', nargs='*', type=float, default=[0.5, 0.3], help='shares')
    parser.add_argument('--repeats', type=int, default=11, help='timed repetitions')
    parser.add_argument('--threads', type=int, default=2)
    parser.add_argument('--out', type=Path, help='the .json file to read and to go on with')
    parser.add_argument('--report', action='store_true', help='measure nothing')
    args = parser.parse_args(given)
    if any(not 0 < share < 1 for share in args.open):
        parser.error(f'--open {args.open}: shares must be within (0, 1)')
    if args.repeats < 1:
        parser.error(f'--repeats {args.repeats} must be at least 1')
    if args.report and not (args.out and args.out.is_file()):
        parser.error('--report: name a file that is there by --out')
    return args


def main(given: list[str] | None = None) -> None:
    args = parse_args(given)
    content = dict(processor=platform.processor(), torch=torch.__version__, settings={}, left={})
    if args.out and args.out.is_file():
        content = json.loads(args.out.read_text())
    known: dict[str, list[dict]] = content['settings']
    keep_memory()
    torch.set_num_threads(args.threads)
    MMLogger.get_instance('mmengine', log_level='ERROR')  # or it lists every initialized weight
    for name in () if args.report else args.networks:
        for size in args.sizes:
            key = f'{name} {size}'
            if key in known:
                continue
            setting = Setting(name, size)
            rows, runs, left = build(setting, args)
            for line in left:
                print(f'# {key}: left out: {line}', flush=True)
            measure(setting, rows, runs, args)
            known[key], content['left'][key] = rows, left
            if args.out:
                write_files({args.out: json.dumps(content, indent=1) + '\n'})
            print(f'# {key}: {len(rows)} variants measured', flush=True)
    print(table(known))
    worst = [
        f'# {setting}, {row["engine"]}, {row["channels"]}, {row["precision"]}: off by '
        f'{100 * row["difference"]:.0f} % from float32'
        for setting, rows in known.items()
        for row in rows
        if not row['difference'] < 0.1
    ]
    print('\n'.join(worst))


if __name__ == '__main__':
    main()
