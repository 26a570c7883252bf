"""Scenarios, random cases, reconciliation and attacks on other major versions, on both sides.

The tests run in a process of their own for each version, with `CDC_REPLAY_PG_BIN`. What they say is printed;
a version without a server fails.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from conformance.scenario import load_scenarios
from conformance.versions import PACKAGES, ROOT, NoServer, environment, programs

TESTS = (
    "tests/conformance/test_conformance.py",
    "tests/conformance/test_random_cases.py",
    "tests/integration/compare/test_reconcile.py",
    "tests/security/test_forged_messages.py",
    "tests/security/test_held_locks.py",
    "tests/security/test_hostile_definitions.py",
    "tests/security/test_least_privilege.py",
    "tests/security/test_names_squatted_meanwhile.py",
    "tests/security/test_no_text_is_executed.py",
    "tests/security/test_owner_code.py",
    "tests/security/test_owner_of_published_tables.py",
    "tests/security/test_owner_rights.py",
    "tests/security/test_proposals.py",
    "tests/security/test_squatted_names.py",
    "tests/security/test_squatted_state.py",
    "tests/security/test_state_races.py",
    "tests/security/test_unprinted_filters.py",
)

SHARE_SKIPPED = 0.25
"""At most so many scenarios may need what a version lacks."""


@pytest.mark.slow
@pytest.mark.parametrize("major", PACKAGES)
def test_scenarios_random_cases_reconciliation_and_attacks_pass_on_version(
    major: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        folder = programs(major)
    except NoServer as missing:
        pytest.fail(str(missing))
    report = tmp_path / "report.xml"
    options = ["-m", "not slow or corpus", f"--junitxml={report}", f"--basetemp={tmp_path / 'run'}"]
    options += ["-o", "junit_family=xunit1"]  # the one in which a test can say something of itself
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *TESTS],
        env=environment(folder),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    results, skipped = outcomes(report) if report.exists() else (Counter(), Counter())
    with capsys.disabled():
        sys.stdout.write(f"\n{version(folder)}: {dict(results)}, skipped: {dict(skipped)}{said(report)}\n")
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    assert results["passed"] > (1 - SHARE_SKIPPED) * len(list(load_scenarios()))


def outcomes(report: Path) -> tuple[Counter[str], Counter[str]]:
    """How many tests have each outcome, and how many are skipped for each reason."""
    results: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for case in ET.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        if skipped is None:
            results[
                "passed" if case.find("failure") is None and case.find("error") is None else "failed"
            ] += 1
        else:
            results["skipped"] += 1
            reasons[skipped.get("message", "")] += 1
    return results, reasons


def said(report: Path) -> str:
    """What the tests recorded about themselves."""
    found = ET.parse(report).iter("property") if report.exists() else ()
    return "".join(f"\n{each.get('name')}: {each.get('value')}" for each in found)


def version(folder: Path) -> str:
    """The server's own name and version."""
    done = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_server_that_is_not_there_is_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CDC_REPLAY_PG_BIN_16", str(tmp_path))

    with pytest.raises(NoServer, match="CDC_REPLAY_PG_BIN_16"):
        programs(16)
