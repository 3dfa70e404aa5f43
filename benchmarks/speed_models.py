# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""The networks benchmarks/speed.py compares."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Optional

import torch
import torch.nn as nn
from mmcv.cnn import fuse_conv_bn
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.utils import import_modules_from_strings

from fgc_mm.gates import find_gates
from fgc_mm.inference import GateUsage, freeze, slim
from fgc_mm.inference.freeze import LayoutForward
from fgc_mm.inference.slim_files import load_fitting
from fgc_mm.runtime import launch
from fgc_mm.sites import Gates

MODELS_WITH_HEADS = {
    'faster_rcnn': 'mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py',
    'pspnet': 'mmseg::pspnet/pspnet_r50-d8_4xb2-40k_cityscapes-512x1024.py',
}
PASSES = 20
"""After so many a frozen network has tried its ways and kept the fastest."""
PLAIN_TO_GATED = {'ResNet': 'GatedResNet', 'ResNetV1c': 'GatedResNetV1c'}


@dataclass
class Networks:
    """The networks of one setting, and how to run them.

    Attributes:
        name (str): Name of the network.
        size (str): Height x width of the pictures.
        batch (int): Pictures in a batch.
        open_share (float): Share of gated channels that is open.
        models (dict): Kind -> network.
        inputs (list): What each repetition runs on, in turn: (positional, named
            arguments).
        generator (torch.Generator, optional): Source of the channels to open; None
            leaves them to the gates.
    """

    name: str
    size: str
    batch: int
    open_share: float
    models: dict[str, nn.Module]
    inputs: list[tuple[tuple, dict]]
    generator: torch.Generator | None = None
    turn: int = field(default=-1)

    @property
    def calls(self) -> dict[str, Callable]:
        """Kind -> one forward on the inputs of this repetition."""
        args, kwargs = self.inputs[self.turn % len(self.inputs)]
        return {
            kind: lambda model=model: model(*args, **kwargs) for kind, model in self.models.items()
        }

    @torch.no_grad()
    def next_repetition(self) -> None:
        """Go to the next pictures and draw other channels: gates are evaluated, then overruled."""
        self.turn += 1
        if self.generator is None:
            return
        for gate in find_gates(self.models['sparse']).values():
            mask = torch.zeros(self.batch, gate.channels, dtype=torch.bool)
            for row in mask:
                order = torch.randperm(gate.channels, generator=self.generator)
                row[order[: width(gate.channels, self.open_share)]] = True
            gate.forced = mask

    def settle(self) -> None:
        """Let frozen networks find their fastest ways."""
        for kind in ('sparse', 'slim'):
            for _ in range(PASSES if kind in self.models else 0):
                self.next_repetition()
                self.calls[kind]()

    def macs(self, count: Callable) -> dict[str, float]:
        """Executed MACs of each kind over all inputs."""
        totals = dict.fromkeys(self.models, 0.0)
        for _ in self.inputs:
            self.next_repetition()
            args, kwargs = self.inputs[self.turn % len(self.inputs)]
            for kind, model in self.models.items():
                totals[kind] += count(model, *args, **kwargs)
        return totals


def width(channels: int, share: float) -> int:
    """Open channels at a share."""
    return max(round(channels * share), 1)


def backbone_of(model: nn.Module) -> nn.Module:
    """The backbone of a task model, or the model itself."""
    return getattr(model, 'backbone', model)


def kinds(
    gated: nn.Module,
    build: Callable[[dict], nn.Module],
    widths: dict,
    args: argparse.Namespace,
    slimmed: Optional[nn.Module] = None,
) -> dict[str, nn.Module]:
    """The kinds, from the gated network.

    Args:
        gated (nn.Module): The network with gates.
        build (Callable): Builds the same with other options of the backbone.
        widths (dict): Channels of the static network.
        args (argparse.Namespace): Arguments of the benchmark.
        slimmed (nn.Module, optional): The network without what no picture opens.
            Defaults to None.
    """
    kind_of = {
        'dense': build(dict(gate=None)),
        'static': build(dict(gate=None, widths=widths)),
        'sparse': gated,
    }
    if slimmed is not None:
        kind_of['slim'] = slimmed
    kind_of['dense'].load_state_dict(gated.state_dict(), strict=False)
    last = args.layout == 'channels_last'
    for kind, model in kind_of.items():
        model.eval()
        model.to(args.device, torch.float16 if args.half else torch.float32)
        if kind not in ('dense', 'static'):
            kind_of[kind] = freeze(model, channels_last=last)
            continue
        backbone = backbone_of(model)
        fuse_conv_bn(backbone)
        if last:
            backbone.to(memory_format=torch.channels_last)
            # Takes and gives the usual layout.
            backbone.forward = LayoutForward(backbone.forward)
    return kind_of


def static_widths(backbone: nn.Module, shares: Callable[[str], float]) -> dict[str, int]:
    """Widths of sites that leave the given share of each gate's channels."""
    widths = {}
    for name, module in backbone.named_modules():
        for site in module.sites.values() if isinstance(module, Gates) else ():
            gate = f'{name}.{module.name_of(site.name)}'
            widths[site.name] = width(site.channels, shares(gate))
    return widths


def pictures(size: tuple[int, int], batch: int, args: argparse.Namespace) -> torch.Tensor:
    """Random pictures."""
    x = torch.randn(batch, 3, *size, device=args.device)
    return x.half() if args.half else x


def backbone_networks(
    name: str, size: tuple[int, int], batch: int, share: float, args: argparse.Namespace
) -> Networks:
    """A ResNet alone."""
    cfg = dict(
        type='mmdet.GatedResNet', depth=int(name.rpartition('-')[2]), zero_init_residual=False
    )

    def build(options: dict) -> nn.Module:
        model = MODELS.build({**cfg, **options})
        model.init_weights()
        return model

    gated = build({})
    models = kinds(gated, build, static_widths(gated, lambda _: share), args)
    inputs: list[tuple[tuple, dict]] = [((pictures(size, batch, args),), {})]
    shown = f'{size[0]}x{size[1]}'
    return Networks(name, shown, batch, share, models, inputs, torch.Generator().manual_seed(0))


def task_networks(
    name: str, size: tuple[int, int], batch: int, share: float, args: argparse.Namespace
) -> Networks:
    """A whole detector or segmentor with random weights, from pictures to predictions."""
    cfg = Config.fromstring(f"_base_ = '{MODELS_WITH_HEADS[name]}'", '.py')
    init_default_scope(cfg.default_scope)
    import_modules_from_strings(f'{cfg.default_scope}.models')
    model_cfg = copy.deepcopy(cfg.model)
    model_cfg.pop('pretrained', None)
    model_cfg.backbone.update(
        type=PLAIN_TO_GATED[model_cfg.backbone.type],
        init_cfg=None,
        norm_cfg=dict(type='BN'),
        zero_init_residual=False,
    )
    if name == 'faster_rcnn':
        # 1000 proposals, and no object found in them.
        model_cfg.test_cfg.rpn.nms.iou_threshold = 1.0
        model_cfg.test_cfg.rcnn.score_thr = 1.0
    for head in ('decode_head', 'auxiliary_head'):
        if head in model_cfg:
            model_cfg[head].norm_cfg = dict(type='BN')

    def build(options: dict) -> nn.Module:
        own = copy.deepcopy(model_cfg)
        own.backbone.update(options)
        model = MODELS.build(own)
        model.init_weights()
        if name == 'faster_rcnn':
            # Random weights would give each network other proposals, and with them other
            # work: without any, all have the anchors.
            for conv in (model.rpn_head.rpn_cls, model.rpn_head.rpn_reg):
                nn.init.zeros_(conv.weight)
        return model

    gated = build({})
    models = kinds(gated, build, static_widths(gated.backbone, lambda _: share), args)
    x = pictures(size, batch, args)
    inputs: list[tuple[tuple, dict]] = [
        ((x,), dict(data_samples=_samples(name, size, batch), mode='predict'))
    ]
    shown = f'{size[0]}x{size[1]}'
    return Networks(name, shown, batch, share, models, inputs, torch.Generator().manual_seed(0))


def trained_networks(config: str, checkpoint: str, args: argparse.Namespace) -> Iterator[Networks]:
    """The backbone of a trained model on its own test pictures, one by one.

    Not what comes after it: the static network is not trained, so its heads would
    have other things to do.
    """
    cfg = Config.fromfile(config)
    cfg.work_dir, cfg.launcher = cfg.get('work_dir') or 'work_dirs/speed', 'none'
    cfg.log_level = 'ERROR'
    cfg.test_dataloader.update(batch_size=1, num_workers=0, persistent_workers=False)
    launch.prepare(cfg, splits=('test',))
    runner = launch.build_runner(cfg)
    gated = runner.model.eval()
    load_fitting(gated, checkpoint)
    loader = runner.build_dataloader(cfg.test_dataloader)
    inputs: list[tuple[tuple, dict]] = []
    usage = GateUsage(gated)
    usage.attach()
    some: dict[str, Any] = {}
    with torch.no_grad():
        for number, batch in enumerate(loader):
            data = gated.data_preprocessor(batch, False)
            if number < args.pictures:
                inputs.append(((data['inputs'],), {}))
            gated.backbone(data['inputs'])
            if number == args.pictures - 1:
                some = usage.shares()
                if 'slim' not in args.kinds:
                    break
    usage.detach()
    shares = {name: float(share.mean()) for name, share in (some or usage.shares()).items()}
    gates = find_gates(gated)
    total = sum(gate.channels for gate in gates.values())
    mean = sum(shares[name] * gate.channels for name, gate in gates.items()) / total

    def build(options: dict) -> nn.Module:
        own = copy.deepcopy(cfg.model)
        own.backbone.update(options)
        return runner.build_model(own)

    widths = static_widths(gated.backbone, lambda name: shares[f'backbone.{name}'])
    slimmed = _slimmed(gated, usage) if 'slim' in args.kinds else None
    every = kinds(gated, build, widths, args, slimmed)
    models = {kind: backbone_of(model) for kind, model in every.items()}
    height, breadth = inputs[0][0][0].shape[-2:]
    yield Networks(_short(config), f'{height}x{breadth}', 1, mean, models, inputs)


def _slimmed(gated: nn.Module, usage: GateUsage) -> Optional[nn.Module]:
    """The network without what no picture opens; None for gates that cannot be slimmed."""
    try:
        return slim(gated, usage.shares()).model
    except ValueError as error:
        print(f'# not slimmed: {error}')
        return None


def _short(config: str) -> str:
    return config.rpartition('/')[2].removesuffix('.py')[:15]


def _samples(name: str, size: tuple[int, int], batch: int) -> list[Any]:
    meta = dict(
        img_shape=size,
        ori_shape=size,
        pad_shape=size,
        scale_factor=(1.0, 1.0),
        batch_input_shape=size,
    )
    if name == 'pspnet':
        from mmseg.structures import SegDataSample as Sample
    else:
        from mmdet.structures import DetDataSample as Sample
    return [Sample(metainfo=meta) for _ in range(batch)]
