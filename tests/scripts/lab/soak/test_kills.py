"""The short form of the kills: every stream of a server whose engine is killed ends, and with the right tokens."""

from pathlib import Path

from grpc import StatusCode
from outrider import Unavailable
from outrider.client import build_request
from outrider.v1 import inference_pb2 as wire

from scripts.lab.soak.kills import broken, check_back, endless_jobs, kill_engines
from scripts.lab.soak.server import running_server
from scripts.lab.soak.traffic import Job, Outcome, Palette

PALETTE = Palette(prompts=("def", "class a", "import"), stops=("e",), max_tokens=40)
NUM_KILLS = 2


async def test_no_stream_of_a_killed_engine_ends_without_a_word(tiny_bundle: Path) -> None:
    with running_server(tiny_bundle, "--isolate-engine", "--gamma", "2") as server:
        jobs = endless_jobs(PALETTE, seed=1)
        killed = await kill_engines(server.address, server.pid, jobs, NUM_KILLS, 8)
    assert killed.problems == []
    assert len(killed.back_s) == NUM_KILLS
    assert set(killed.endings) <= {"finished", "ENGINE_RESTART"}
    assert killed.endings["finished"] > 8


def test_the_check_finds_silent_streams() -> None:
    job = Job(request=build_request("a", request_id="a", max_tokens=4))
    usage = wire.Finish(usage=wire.Usage(output_tokens=0))
    restarted = Unavailable(StatusCode.UNAVAILABLE, "gone", reason="ENGINE_RESTART")
    assert broken(Outcome(job, finishes=[usage])) is None
    assert broken(Outcome(job, error=restarted)) is None
    assert "0 finishes" in str(broken(Outcome(job)))
    assert "2 finishes" not in str(broken(Outcome(job, finishes=[usage])))
    assert broken(Outcome(job, finishes=[usage], error=restarted)) is not None


def test_a_single_late_return_of_service_is_a_problem() -> None:
    assert check_back([0.5, 1.0], start_s=1.0) == []
    assert "1 times" in check_back([0.5, 0.5, 1.1], start_s=1.0)[0]
