"""Why speculation was off, on the wire: as an enum, and as the string that servers of 0.2 and before sent alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from outrider.engines.sampling.base import ExactnessMode
from outrider.runtime.cli.operate.trace import print_report
from outrider.runtime.core.events import SpeculationDisabledReason
from outrider.runtime.core.stats import SpeculationStats
from outrider.runtime.serving.v1.wire import report_of
from outrider.v1 import inference_pb2 as wire
from rich.console import Console


def sent(reason: SpeculationDisabledReason | None) -> wire.SpeculationReport:
    stats = SpeculationStats(max_gamma=4)
    mode = ExactnessMode.MAX_ACCEPT
    return report_of(stats.report(drafter="model", mode=mode, lenience=1.0, off_reason=reason))


def report_of_0_2() -> type[wire.SpeculationReport]:
    """The message as clients of 0.2 know it."""
    file = descriptor_pb2.FileDescriptorProto()
    wire.DESCRIPTOR.CopyToProto(file)
    (report,) = (message for message in file.message_type if message.name == "SpeculationReport")
    (code,) = (field for field in report.field if field.name == "off_reason_code")
    report.field.remove(code)
    del file.service[:]
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindMessageTypeByName("outrider.v1.SpeculationReport")
    return message_factory.GetMessageClass(found)


@pytest.mark.parametrize("reason", [None, *SpeculationDisabledReason])
def test_a_reason_is_sent_as_a_code_and_as_its_name(
    reason: SpeculationDisabledReason | None,
) -> None:
    report = sent(reason)
    name = wire.OffReason.Name(report.off_reason_code).removeprefix("OFF_REASON_")
    assert report.off_reason == (reason or "")
    assert name == (reason or "UNSPECIFIED")
    assert report_of_0_2().FromString(report.SerializeToString()).off_reason == (reason or "")


def test_every_code_stands_for_a_reason() -> None:
    codes = {sent(reason).off_reason_code for reason in (None, *SpeculationDisabledReason)}
    assert codes == set(wire.OffReason.values())


def test_the_report_of_a_server_of_0_2_is_read_by_its_string(tmp_path: Path) -> None:
    old = report_of_0_2()(off_reason="DRAFTER_PAUSED").SerializeToString()
    report = wire.SpeculationReport.FromString(old)
    assert report.off_reason_code == wire.OFF_REASON_UNSPECIFIED
    with (tmp_path / "out").open("w+") as file:
        print_report(Console(file=file, width=80), wire.Finish(speculation=report))
        file.seek(0)
        assert "speculation off: DRAFTER_PAUSED" in file.read()
