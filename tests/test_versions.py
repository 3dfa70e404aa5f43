# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import subprocess
import sys

import pytest

from fgc_mm.versions import STACK, Requirement, check_versions, installed


def test_the_installed_stack_fits():
    check_versions()
    assert installed(STACK[0])[0] == 'torch'


def test_a_version_that_does_not_fit_is_named_with_what_would():
    too_old = Requirement('torch', ('torch',), '99.0', '100.0', True)
    with pytest.raises(
        ImportError, match=r'torch \d.* is installed, but .* 99.0 <= version < 100.0'
    ):
        check_versions((too_old,))


def test_an_absent_optional_package_is_not_missed():
    check_versions((Requirement('nothere', ('no-such-distribution',), '1.0', '2.0', False),))


def test_an_absent_required_package_is_named():
    absent = Requirement('nothere', ('no-such-distribution', 'nor-this'), '1.0', '2.0', True)
    with pytest.raises(ImportError, match='nothere is not installed: install no-such-distribution'):
        check_versions((absent,))


def test_fgc_mm_needs_none_of_the_task_packages():
    # None in sys.modules makes an import fail as if the package were absent.
    code = (
        'import sys; sys.modules.update(mmdet=None, mmseg=None, mmpretrain=None); '
        'import fgc_mm; print(fgc_mm.__version__)'
    )
    subprocess.run([sys.executable, '-c', code], check=True, capture_output=True)
