"""Runs as JUnit XML, which CI servers read."""

from collections.abc import Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from mezzo.files import plain
from mezzo.tipc._logs import read_log, tail
from mezzo.tipc._record import Record
from mezzo.tipc._run_folder import RecordedRun

_VERDICTS = {"failed": "failure", "timeout": "error", "interrupted": "error", "skipped": "skipped"}
_COUNTS = {"failures": "failure", "errors": "error", "skipped": "skipped"}


def junit_xml(runs: Sequence[RecordedRun]) -> str:
    """Return JUnit XML: a suite per run and a case per step, with reason, command and the end of the log.

    A failed step is a failure; a step that timed out or was interrupted is an error.
    """
    suites = Element("testsuites", name="mezzo tipc")
    for run in runs:
        suites.append(_suite(run))
    _count(suites, [record for run in runs for record in run.records])
    ElementTree.indent(suites)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ElementTree.tostring(suites, encoding="unicode")}\n'


def _suite(run: RecordedRun) -> Element:
    info = run.info
    suite = Element("testsuite", name=plain(f"{info.model} {info.mode}"))
    if info.start:
        suite.set("timestamp", plain(info.start))
    _count(suite, run.records)
    properties = SubElement(suite, "properties")
    facts = {"config": info.config, "profile": info.profile, **info.versions}
    for name, value in facts.items():
        SubElement(properties, "property", name=plain(name), value=plain(value))
    for record in run.records:
        suite.append(_case(run, record))
    if run.notes or info.notices:
        SubElement(suite, "system-out").text = plain("\n".join([*run.notes, *info.notices]))
    return suite


def _case(run: RecordedRun, record: Record) -> Element:
    labels = " ".join(f"{name}={value}" for name, value in record.labels.items())
    case = Element(
        "testcase",
        classname=plain(f"{record.model}.{record.mode}"),
        name=plain(f"{record.step} {labels}".strip()),
        time=f"{record.seconds:.3f}",
    )
    verdict = _VERDICTS.get(record.status)
    if verdict:
        element = SubElement(case, verdict, message=plain(record.reason or record.status))
        if verdict != "skipped":
            element.set("type", record.status)
            element.text = plain(f"{record.reason}\n{record.command}")
    SubElement(case, "system-out").text = _output(run, record)
    return case


def _output(run: RecordedRun, record: Record) -> str:
    path = run.log_of(record)
    log = read_log(path) if path else None
    lines = [f"$ {record.command}", *(f"note: {notice}" for notice in record.notices)]
    if record.log and path is None:
        lines.append(f"log: {record.log} is not in the folder of the run")
    return f"{plain(chr(10).join(lines))}\n{tail(log or '')}".rstrip()


def _count(suite: Element, records: Sequence[Record]) -> None:
    suite.set("tests", str(len(records)))
    for name, verdict in _COUNTS.items():
        suite.set(name, str(sum(_VERDICTS.get(record.status) == verdict for record in records)))
    suite.set("time", f"{sum(record.seconds for record in records):.3f}")
