# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Small pictures for galleries."""

from gate_tables import make_table
from mmengine.config import Config

from fgc_mm.analysis.thumbnails import Thumbnails


def test_pictures_that_are_gone_are_gray(tmp_path):
    table = make_table(12, 'detection')
    table.paths[:] = [str(tmp_path / 'gone.jpg')] * len(table)
    cfg = Config.fromfile('configs/demo/faster_rcnn_r18_digits_gated.py')
    cfg.demo_data = None
    cfg.test_dataloader.dataset.data_root = str(tmp_path / 'nowhere')
    assert (Thumbnails(cfg, table).read(0) == 128).all()
