"""A round of the device sampler from the first draft to the verdict without a value on the host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from outrider.engines.accelerators.device.base import Call
from outrider.engines.accelerators.device.results import Results
from outrider.engines.accelerators.device.transfers import Uploads
from outrider.engines.accelerators.onnx.bound_session import BoundSession
from outrider.engines.base import EngineError
from outrider.engines.onnx.session import open_session
from outrider.engines.sampling.base import ExactnessMode, SamplingParams

from tests.engines.rows import row_for
from tests.engines.sampling.chosen_noise import same
from tests.engines.sampling.reference_sampler import ReferenceSampler

MAX_ERROR = 1e-6
MAX_ACCEPT, SEED_STABLE, LENIENT = ExactnessMode
GREEDY = SamplingParams(temperature=0.0)


class MarkovModel:
    """Logits that depend on the last token alone, looked up on the device."""

    def __init__(self, table, path, device):
        axes = ["batch", "positions"]
        graph = helper.make_graph(
            [helper.make_node("Gather", ["table", "tokens"], ["logits"])],
            "markov",
            [helper.make_tensor_value_info("tokens", TensorProto.INT64, axes)],
            [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [*axes, table.shape[1]])],
            [numpy_helper.from_array(table, "table")],
        )
        opset = helper.make_opsetid("", 24)
        path.write_bytes(
            helper.make_model(graph, opset_imports=[opset], ir_version=11).SerializeToString()
        )
        self.session = BoundSession(open_session(path), device)
        self.results = Results(device)
        self.size = table.shape[1]

    def logits_of(self, tokens):
        """Device tensor in, device tensor out."""
        shape = (*tokens.shape, self.size)
        made = self.results.make({"logits": (shape, np.dtype(np.float32))})
        tensors = {"tokens": tokens, **made}
        self.session.run(Call(tuple(tensors.items()), lambda: tensors))
        return made["logits"]


def values_of(tensor):
    """What lies in a tensor of the host."""
    kind = np.ctypeslib.as_ctypes_type(tensor.dtype) * np.prod(tensor.shape)
    return np.array(kind.from_address(tensor.pointer)).reshape(tensor.shape)


LAST_TOKEN = 3


@pytest.mark.parametrize(
    ("params", "mode"),
    [
        (SamplingParams(), MAX_ACCEPT),
        (SamplingParams(top_k=4, top_p=0.9, repetition_penalty=1.3), MAX_ACCEPT),
        (SamplingParams(temperature=0.7), SEED_STABLE),
        (GREEDY, MAX_ACCEPT),
    ],
)
def test_a_round_runs_on_the_device_from_the_first_draft_to_the_verdict(
    loaded, tmp_path, params, mode
):
    _, device = loaded(8)
    memory = device._runner.device
    uploads = Uploads(memory)
    generator = np.random.default_rng(8)
    draft, target = (generator.normal(scale=2, size=(8, 8)).astype(np.float32) for _ in range(2))
    model = MarkovModel(draft, tmp_path / "draft.onnx", memory)
    history = np.array([5, 1, LAST_TOKEN], dtype=np.int64)
    gamma = 3
    rows = [
        row_for(index=i, slot=i + 1, params=params, mode=mode, seed=i, history=history)
        for i in range(6)
    ]
    rows = [replace(r, is_sampled_draft=params is not GREEDY and mode is MAX_ACCEPT) for r in rows]
    gammas = np.full(len(rows), gamma)

    round_ = device.begin(rows, gamma=gamma)
    tokens = uploads.put({"tokens": np.full((len(rows), 1), LAST_TOKEN, dtype=np.int64)})["tokens"]
    fed = [tokens]
    for depth in range(gamma):
        tokens = round_.propose(model.logits_of(tokens), np.full(len(rows), depth))
        fed.append(tokens)
    # The target, too, is fed what the draft model was; what lies on this device can be looked at.
    logits = np.stack([target[values_of(tensor)[:, 0]] for tensor in fed], axis=1)
    judged = round_.judge(uploads.put({"logits": logits})["logits"], gammas)
    verdicts = [verdict for _, verdict in round_.receive(round_.send(judged), gammas)]

    reference = ReferenceSampler()
    for row, verdict in zip(rows, verdicts, strict=True):
        drafted = ()
        for _ in range(gamma):
            last = (LAST_TOKEN, *drafted)[-1]
            asked = replace(row, index=0, draft_tokens=drafted)
            drafted += tuple(reference.propose(draft[last][None, None], [asked], vocab_size=8))
        target_logits = target[[LAST_TOKEN, *drafted]][None]
        judged = replace(row, index=0, draft_tokens=drafted)
        assert same(verdict, reference.judge(target_logits, [judged])[0])


def test_a_round_on_the_device_wants_rows_that_lie_as_their_slots(loaded):
    _, device = loaded(4)
    with pytest.raises(EngineError, match="as their slots do"):
        device.begin([row_for(index=0, slot=1), row_for(index=1, slot=0)], gamma=1)
    with pytest.raises(EngineError, match="5 draft tokens: at most 4"):
        device.begin([row_for()], gamma=5)
