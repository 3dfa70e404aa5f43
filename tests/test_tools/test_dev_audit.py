# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Licenses as packages state them, and what pip-audit's answers are taken for."""

import importlib.util
import json
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

AUDIT = Path(__file__).parents[2] / 'tools' / 'dev_audit.py'


@pytest.fixture(scope='module')
def audit():
    spec = importlib.util.spec_from_file_location('fgc_mm_dev_audit', AUDIT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def licenses(audit, tmp_path):
    """Checks packages of which only the lines about their license are given."""

    def check(**packages):
        for name, lines in packages.items():
            info = tmp_path / f'{name}-1.0.dist-info'
            info.mkdir()
            (info / 'METADATA').write_text(f'Name: {name}\nVersion: 1.0\n{lines}\n')
        return audit.check_licenses(metadata.distributions(path=[str(tmp_path)]))

    return check


def test_the_licenses_of_this_environment_are_accepted(audit, capsys):
    packages = metadata.distributions(path=[sysconfig.get_path('purelib')])
    assert audit.check_licenses(packages) == 0
    assert 'torch' in capsys.readouterr().out


@pytest.mark.parametrize(
    'lines',
    [
        'License-Expression: MIT',
        'License-Expression: GPL-2.0-only OR BSD-3-Clause',
        'License-Expression: Apache-2.0 WITH LLVM-exception AND MIT',
        'Classifier: License :: OSI Approved :: BSD License',
        'Classifier: License :: OSI Approved\nLicense: BSD',
        'License: Copyright 2025 Somebody.\n \n         Apache License\n         Version 2.0',
    ],
)
def test_accepted(licenses, lines):
    assert licenses(some=lines) == 0


@pytest.mark.parametrize(
    'lines',
    [
        'License-Expression: GPL-3.0-or-later',
        'License-Expression: MIT AND AGPL-3.0-only',
        'Classifier: License :: OSI Approved :: GNU General Public License (GPL)\nLicense: MIT',
        'Classifier: License :: Other/Proprietary License',
        'License: All rights reserved',
        'Summary: says nothing',
    ],
)
def test_not_accepted_and_named(licenses, lines, capsys):
    assert licenses(some=lines, fine='License: MIT') == 1
    out = capsys.readouterr().out
    assert 'NOT ACCEPTED some 1.0' in out
    assert 'NOT ACCEPTED fine' not in out


@pytest.fixture
def answer(audit, tmp_path):
    """Checks vulnerabilities with a uv whose pip-audit prints this and ends with this code."""

    def check(stdout, stderr='', code=0):
        (tmp_path / 'out').write_text(stdout)
        (tmp_path / 'err').write_text(stderr)
        uv = tmp_path / 'uv'
        uv.write_text(f'#!/bin/sh\ncat {tmp_path}/out; cat {tmp_path}/err >&2; exit {code}\n')
        uv.chmod(0o755)
        return audit.check_vulnerabilities(str(uv), ['pins.txt'])

    return check


KNOWN = dict(name='safe', version='1.0', vulns=[])
UNKNOWN = dict(name='odd', skip_reason='Dependency not found on PyPI and could not be audited')
FAULT = dict(id='PYSEC-1', aliases=['CVE-1'], fix_versions=['2.1'], description='bad')


def test_nothing_known(answer, capsys):
    assert answer(json.dumps(dict(dependencies=[KNOWN, UNKNOWN]))) == 0
    out = capsys.readouterr().out
    assert '1 packages audited, 0 with known ones' in out
    assert 'not audited: odd' in out


def test_a_vulnerability_is_named_with_its_fix(answer, capsys):
    packages = [KNOWN, dict(name='hurt', version='2.0', vulns=[FAULT])]
    assert answer(json.dumps(dict(dependencies=packages)), code=1) == 1
    assert 'hurt 2.0: PYSEC-1, CVE-1 (fixed in 2.1)' in capsys.readouterr().out


def test_a_proxy_that_knows_nothing_is_no_audit(answer, capsys):
    """pip-audit itself says "No known vulnerabilities found" here."""
    assert answer(json.dumps(dict(dependencies=[UNKNOWN])), 'No known vulnerabilities found') == 2
    assert 'NOT AUDITED, the service knows none of the 1 packages' in capsys.readouterr().out


def test_no_network(answer, capsys):
    assert answer('', 'trying\nConnection refused', code=1) == 2
    out = capsys.readouterr().out
    assert 'NOT AUDITED' in out
    assert 'could not be reached: Connection refused' in out
