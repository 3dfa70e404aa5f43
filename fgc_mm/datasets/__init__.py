# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .broken import BrokenPictureError, name_broken_pictures, picture_fault
from .check import check_dataset_paths
from .cifar_binary import CIFARBinary
from .demo import DEMO_KINDS, DIGIT_CLASSES, SEG_CLASSES, SEG_PALETTE, ensure_demo_data
from .instance_index import (
    INSTANCE_KEY,
    InstanceIndex,
    count_instances,
    install_instance_index,
    refuse_mixing,
)

__all__ = [
    'DEMO_KINDS',
    'DIGIT_CLASSES',
    'INSTANCE_KEY',
    'SEG_CLASSES',
    'SEG_PALETTE',
    'BrokenPictureError',
    'CIFARBinary',
    'InstanceIndex',
    'check_dataset_paths',
    'count_instances',
    'ensure_demo_data',
    'install_instance_index',
    'name_broken_pictures',
    'picture_fault',
    'refuse_mixing',
]
