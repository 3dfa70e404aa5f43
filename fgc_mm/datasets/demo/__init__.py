# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
from .build import DEMO_KINDS, ensure_demo_data
from .digits import DIGIT_CLASSES
from .segmentation import SEG_CLASSES, SEG_PALETTE

__all__ = ['DEMO_KINDS', 'DIGIT_CLASSES', 'SEG_CLASSES', 'SEG_PALETTE', 'ensure_demo_data']
