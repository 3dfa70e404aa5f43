# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Licenses and known vulnerabilities of the packages of a development environment.

`python3 tools/dev.py audit` runs it inside the environment. The licenses are what
the installed packages state; the vulnerabilities are pip-audit's, which asks a
service on the network about every pinned version.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from importlib import metadata

PIP_AUDIT = 'pip-audit==2.10.1'
# Allow use and change under their own terms, also beside Apache-2.0.
ACCEPTED = re.compile(
    r'\b(MIT|BSD|FreeBSD|Apache|PSF|Python Software Foundation|CNRI|MPL|Mozilla|HPND|ISC|Zlib)\b'
)
REFUSED = re.compile(r'GPL|Affero|Proprietary|Non-?Commercial|CC-BY-NC|SSPL|BUSL', re.IGNORECASE)
# Judged by hand. torch asks for NVIDIA's libraries; fgc_mm neither links nor ships them.
JUDGED = re.compile(r'nvidia-')
FOUND, NOT_AUDITED = 1, 2


def stated_license(package: metadata.Distribution) -> str:
    """What a package says of its license, in a few words, or 'unknown'."""
    fields = package.metadata
    expression = fields.get('License-Expression')
    if expression:
        return expression
    named = [c.split(' :: ')[2:] for c in fields.get_all('Classifier') or [] if 'License' in c[:7]]
    if any(named):
        return ' AND '.join(name[0] for name in named if name)
    text = (fields.get('License') or '').strip()
    if text and len(text) < 80 and '\n' not in text:
        return text
    known = ACCEPTED.search(text)
    return f'{known[0]} (text)' if known and not REFUSED.search(text) else 'unknown'


def is_accepted(license: str) -> bool:
    """Whether all parts of one of a license's alternatives are accepted."""
    return any(
        all(ACCEPTED.search(part) and not REFUSED.search(part) for part in choice.split(' AND '))
        for choice in license.split(' OR ')
    )


def check_licenses(packages: Iterable[metadata.Distribution]) -> int:
    """Print the licenses and who has them; complain about those not accepted."""
    having = defaultdict(list)
    refused = []
    for package in packages:
        name, license = package.metadata['Name'], stated_license(package)
        having[license].append(name)
        if not is_accepted(license) and not JUDGED.match(name):
            refused.append(f'{name} {package.version}: {license}')
    print(f'Licenses of {sum(map(len, having.values()))} packages:')
    for license, names in sorted(having.items()):
        print(f'  {license}: {", ".join(sorted(names, key=str.lower))}')
    for line in refused:
        print(f'  NOT ACCEPTED {line} (tools/dev_audit.py has the list of those that are)')
    return FOUND if refused else 0


def check_vulnerabilities(uv: str, pins: list[str]) -> int:
    """Ask pip-audit about the pinned versions.

    Behind some proxies every answer of the service is "not found", and pip-audit
    reports no known vulnerabilities: that is not taken for an audit here.
    """
    cmd = [uv, 'tool', 'run', '--python', sys.executable, PIP_AUDIT, '--disable-pip', '--no-deps']
    cmd += ['--format', 'json', '--progress-spinner', 'off']
    cmd += [part for file in pins for part in ('--requirement', file)]
    out = subprocess.run(cmd, capture_output=True, text=True)
    try:
        packages = json.loads(out.stdout)['dependencies']
    except (ValueError, KeyError):
        cause = (out.stderr.strip().splitlines() or ['no output'])[-1]
        return not_audited(f'{PIP_AUDIT} or the service it asks could not be reached: {cause}')
    vulnerable = [package for package in packages if package.get('vulns')]
    skipped = sorted(package['name'] for package in packages if 'skip_reason' in package)
    if len(skipped) == len(packages):
        return not_audited(
            f'the service knows none of the {len(packages)} packages: is it a proxy?'
        )
    for package in vulnerable:
        for fault in package['vulns']:
            fixed = ', '.join(fault.get('fix_versions') or []) or 'no version yet'
            names = ', '.join([fault['id'], *fault.get('aliases', [])])
            print(f'  {package["name"]} {package["version"]}: {names} (fixed in {fixed})')
    audited = len(packages) - len(skipped)
    print(f'Vulnerabilities: {audited} packages audited, {len(vulnerable)} with known ones')
    if skipped:
        print(f'  not known to the service, so not audited: {", ".join(skipped)}')
    return FOUND if vulnerable else 0


def not_audited(cause: str) -> int:
    print(f'Vulnerabilities: NOT AUDITED, {cause}')
    print('  Check the network and the proxy settings, and run the same command again.')
    return NOT_AUDITED


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('uv', help='the uv that runs pip-audit')
    parser.add_argument('pins', help='file of the pinned versions')
    parser.add_argument('more', nargs='*', help='further requirements, name==version')
    args = parser.parse_args()
    packages = metadata.distributions(path=[sysconfig.get_path('purelib')])
    licenses = check_licenses(p for p in packages if p.metadata['Name'] != 'fgc-mm')
    with tempfile.TemporaryDirectory() as folder:
        more = os.path.join(folder, 'more.txt')
        with open(more, 'w') as file:
            file.write('\n'.join(args.more) + '\n')
        return max(licenses, check_vulnerabilities(args.uv, [args.pins, more]))


if __name__ == '__main__':
    sys.exit(main())
