"""Messages of a stream as plain values."""

from dataclasses import fields

import pytest
from outrider import ServerFailed, build_request
from outrider.outputs import OutputBuilder, RequestOutput, SpeculationReport, Step, Usage
from outrider.v1 import inference_pb2 as wire


def built(request: wire.GenerateRequest, *responses: wire.GenerateResponse) -> RequestOutput:
    builder = OutputBuilder(request)
    for response in responses:
        builder.add(response)
    return builder.output()


def token(number: int, logprob: float, top: dict[int, float] | None = None) -> wire.Token:
    return wire.Token(
        id=number,
        logprob=logprob,
        provenance=wire.PROVENANCE_FORCED,
        top=[wire.TopToken(id=i, logprob=value) for i, value in (top or {}).items()],
    )


def test_pieces_are_put_together_with_what_was_asked():
    request = build_request("a", logprobs=1, return_provenance=True, return_trace=True)
    step = wire.Step(drafted=[1, 4], num_accepted=1, drafted_text=["x", "y"])
    output = built(
        request,
        wire.GenerateResponse(text="x", tokens=[token(1, -0.5, {1: -0.5})], steps=[step]),
        wire.GenerateResponse(
            text="y",
            tokens=[token(2, -1.0, {3: -0.25})],
            finish=wire.Finish(
                reason=wire.FINISH_REASON_STOP_STRING,
                stop_string="z",
                usage=wire.Usage(prompt_tokens=1, output_tokens=2, cached_tokens=1),
                speculation=wire.SpeculationReport(
                    is_on=True, drafter="model", mode=wire.EXACTNESS_MODE_SEED_STABLE, alpha_hat=0.0
                ),
                seed=7,
                request_id="one",
            ),
        ),
    )
    (only,) = output.outputs
    assert (output.text, only.token_ids, output.request_id, only.seed) == ("xy", [1, 2], "one", 7)
    assert (only.finish_reason, only.stop_reason) == ("stop", "z")
    assert only.logprobs == [{1: -0.5}, {2: -1.0, 3: -0.25}]
    assert only.cumulative_logprob == -1.5
    assert only.provenance == ["forced", "forced"]
    assert only.steps is not None and only.steps[0].drafted == [1, 4]
    assert only.steps[0].next_token is None and only.steps[0].drafted_text == ["x", "y"]
    assert output.usage == Usage(prompt_tokens=1, output_tokens=2, cached_tokens=1)
    report = only.speculation
    assert report is not None and (report.drafter, report.mode) == ("model", "seed_stable")
    assert (report.alpha_hat, report.tokens_per_step, report.is_on) == (0.0, None, True)


def test_what_was_not_asked_is_none():
    finish = wire.Finish(reason=wire.FINISH_REASON_LENGTH)
    output = built(build_request([5, 6]), wire.GenerateResponse(text="x", finish=finish))
    (only,) = output.outputs
    assert (only.logprobs, only.cumulative_logprob, only.provenance) == (None, None, None)
    assert (only.steps, only.score, only.stop_reason) == (None, None, None)
    assert (only.finish_reason, output.prompt, output.prompt_token_ids) == ("length", None, [5, 6])
    assert output.prompt_logprobs is None


def test_completions_are_told_apart_and_the_prompt_counts_once():
    def finish(num_tokens: int) -> wire.Finish:
        usage = wire.Usage(prompt_tokens=3, output_tokens=num_tokens)
        return wire.Finish(usage=usage, stop_token=9)

    output = built(
        build_request("abc", n=2),
        wire.GenerateResponse(index=1, text="x"),
        wire.GenerateResponse(index=0, text="u", finish=finish(1)),
        wire.GenerateResponse(index=1, text="y", finish=finish(2)),
    )
    assert [(one.index, one.text) for one in output.outputs] == [(0, "u"), (1, "xy")]
    assert output.usage == Usage(prompt_tokens=3, output_tokens=3, cached_tokens=0)
    assert (output.prompt, output.outputs[0].stop_reason) == ("abc", 9)


@pytest.mark.parametrize(
    "responses",
    [
        [],
        [wire.GenerateResponse(text="x")],
        [
            wire.GenerateResponse(text="x", finish=wire.Finish()),
            wire.GenerateResponse(index=1, text="y"),
        ],
    ],
)
def test_a_stream_that_ends_too_early_is_no_answer(responses: list[wire.GenerateResponse]):
    with pytest.raises(ServerFailed, match="ended before the answer did"):
        built(build_request("a", n=2), *responses)


def test_beams_are_the_outputs():
    beams = [
        wire.Beam(text=text, token_ids=[3], logprob=-1.0, score=score, stop_token=1)
        for text, score in (("u", -0.5), ("v", -0.75))
    ]
    output = built(
        build_request("a", num_beams=2, n=2),
        wire.GenerateResponse(text="u", finish=wire.Finish(beams=beams)),
    )
    assert [(one.index, one.text, one.score) for one in output.outputs] == [
        (0, "u", -0.5),
        (1, "v", -0.75),
    ]
    assert (output.outputs[1].stop_reason, output.outputs[1].cumulative_logprob) == (1, -1.0)


def test_log_probabilities_of_a_prompt_begin_with_none():
    output = built(
        build_request("ab", prompt_logprobs=1),
        wire.GenerateResponse(prompt=[wire.Token(id=4), token(5, -2.0, {6: -1.0})]),
        wire.GenerateResponse(finish=wire.Finish()),
    )
    assert output.prompt_token_ids == [4, 5]
    assert output.prompt_logprobs == [None, {5: -2.0, 6: -1.0}]


@pytest.mark.parametrize(
    ("kind", "message", "elsewhere"),
    [
        (SpeculationReport, wire.SpeculationReport, {"off_reason_code"}),
        (Step, wire.Step, set()),
        (Usage, wire.Usage, set()),
    ],
)
def test_every_figure_of_the_wire_is_told(kind, message, elsewhere):
    assert {one.name for one in fields(kind)} == {*message.DESCRIPTOR.fields_by_name} - elsewhere


def test_values_that_only_newer_servers_know_are_told_by_number():
    message = wire.Token(id=1, provenance=99)
    report = wire.SpeculationReport(mode=98)
    output = built(
        build_request("a", return_provenance=True),
        wire.GenerateResponse(tokens=[message], finish=wire.Finish(reason=97, speculation=report)),
    )
    (only,) = output.outputs
    assert (only.provenance, only.finish_reason) == (["99"], None)
    assert only.speculation is not None and only.speculation.mode == "98"
