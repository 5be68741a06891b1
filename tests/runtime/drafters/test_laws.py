"""The law of served answers, by enumeration of all noise: every drafter, chains and trees, through the worker.

Nothing here knows how a drafter works or how a draft is judged: the noise of the sampler that serves is walked outcome
by outcome, and the answers' law is held against the target's own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from outrider.engines.reference.scripted import ScriptedEngine
from outrider.engines.sampling.base import ExactnessMode
from outrider.engines.sampling.cpu_sampler import CpuSampler
from outrider.export.graph.other_ids import NEVER, map_ids
from outrider.export.tokenizers.twins import TokenMaps
from outrider.runtime.core.config import ServerConfig
from outrider.runtime.core.drafting import DraftingConfig
from outrider.runtime.core.events import Progressed
from outrider.runtime.core.params import SpeculationParams
from outrider.runtime.drafters.text.suffix_array import write_datastore
from outrider.runtime.loop.step_context import ServedEngines
from outrider.runtime.loop.worker import Worker
from outrider.runtime.oracle.verification import sequence_probs

from tests.engines.sampling.chosen_noise import law_of
from tests.runtime.markov import LetterDecoder, limits, spec
from tests.runtime.oracle.laws import distance

V = 3
MAX_ERROR = 1e-6
PROMPT = (0, 1, 2, 0, 1, 2, 0, 1)
NUM_TOKENS = 2
TABLE = np.array([[0.2, 0.5, 0.3], [0.25, 0.15, 0.6], [0.55, 0.25, 0.2]])
# Chains of sampled tokens, of point masses, and trees. Point masses of whatever drafter are judged alike, by matching:
# ``test_equality`` holds that each gives the very tokens of plain decoding.
CASES = [
    ("model", 0),
    ("model/lookup", 0),
    ("lookup+model", 0),
    ("lookup", 0),
    ("unigram", 0),
    ("bigram", 0),
    ("lookup+bigram", 0),
    ("datastore", 16),
    ("suffix", 16),
    ("suffix+model:1", 0),
    ("lookahead", 16),
    ("ouroboros", 16),
]


def target_row(prefix: tuple[int, ...]) -> np.ndarray:
    return TABLE[prefix[-1] if prefix else PROMPT[-1]]


def logits_of(table: np.ndarray):
    logits = np.log(table).astype(np.float32)
    return lambda prefix: logits[prefix[-1]]


DRAFT_LOGITS = logits_of(TABLE[:, [1, 0, 2]] * 0.5 + TABLE * 0.5)


class Trailing(CpuSampler):
    """Leaves what was drawn in the trail, so that the walk of the noise tells branches apart."""

    def __init__(self, noise, vocab_size: int = V) -> None:
        super().__init__(max_batch=1, max_gamma=8, vocab_size=vocab_size, noise=noise)
        self._trail = noise.trail

    def propose(self, logits, rows, *, vocab_size):
        drawn = super().propose(logits, rows, vocab_size=vocab_size)
        self._trail += drawn
        return drawn

    def judge(self, logits, rows):
        verdicts = super().judge(logits, rows)
        self._trail += [(one.num_accepted, one.next_token) for one in verdicts]
        return verdicts


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> DraftingConfig:
    folder: Path = tmp_path_factory.mktemp("corpus") / "store"
    write_datastore([[0, 1, 2, 0, 1, 1, 2, 0, 2]], folder, vocab_size=V)
    return DraftingConfig(
        datastore=str(folder), lookup_min_ngram=1, min_prob=0.02, suffix_factor=4.0,
        min_node_prob=0.01, tree_nodes=6, window=2, draft_window=2, root_phrases=2,
    )  # fmt: skip


def answer(
    noise,
    drafting: DraftingConfig,
    params: SpeculationParams,
    max_nodes: int,
    draft_logits=DRAFT_LOGITS,
    num_tokens: int = NUM_TOKENS,
):
    bounds = replace(limits(V), max_tree_nodes=max_nodes, max_batch=1)
    worker = Worker(
        ServedEngines(
            target=ScriptedEngine(logits_of(TABLE), bounds),
            draft=ScriptedEngine(draft_logits, bounds),
            sampler=Trailing(noise),
            max_gamma=8,
        ),
        # One token is left behind the chunk, so that the first of the answer may be drafted too.
        config=ServerConfig(prefill_chunk=len(PROMPT) - 1, drafting=drafting),
        decoder=LetterDecoder(),
    )
    events: list[object] = []
    request = spec("a", PROMPT, max_tokens=num_tokens, temperature=1.0, speculation=params)
    worker.submit(
        replace(request, speculation=replace(request.speculation, reference_tokens=PROMPT)),
        events.append,
    )
    while worker.run_step():
        pass
    drafted = sum(len(e.trace.draft_tokens) for e in events if isinstance(e, Progressed))
    return drafted, tuple(t.token for e in events if isinstance(e, Progressed) for t in e.tokens)


@pytest.mark.usefixtures("corpora_opened_once")
@pytest.mark.parametrize(("name", "max_nodes"), CASES)
def test_answers_have_the_targets_law(name: str, max_nodes: int, drafting: DraftingConfig) -> None:
    params = SpeculationParams(drafter=name, gamma=1, mode=ExactnessMode.MAX_ACCEPT)
    num_drafted = 0

    def run(noise):
        nonlocal num_drafted
        drafted, tokens = answer(noise, drafting, params, max_nodes)
        num_drafted += drafted
        return tokens

    found = law_of(run)
    assert num_drafted > 0, "a drafter that never drafts proves nothing"
    assert sum(found.values()) == pytest.approx(1.0, abs=MAX_ERROR)
    assert distance(found, sequence_probs(target_row, NUM_TOKENS)) < MAX_ERROR


@pytest.fixture(scope="module")
def mapped_logits(tmp_path_factory: pytest.TempPathFactory):
    """Logits of a draft of two tokens, in three of a target: one has no twin, and two are read as one."""
    folder = tmp_path_factory.mktemp("graph")
    table = numpy_helper.from_array(np.log(np.float32([[0.3, 0.7], [0.8, 0.2]])), "table")
    nodes = [helper.make_node("Gather", ["table", "tokens"], ["logits"])]
    tokens = helper.make_tensor_value_info("tokens", TensorProto.INT64, [1, None])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, None, 2])
    graph = helper.make_graph(nodes, "draft", [tokens], [logits], [table])
    opset = [helper.make_opsetid("", 21)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=10), folder / "model.onnx")
    map_ids(folder, TokenMaps(target_ids=np.array([2, 0]), draft_ids=np.array([1, 0, 0])))
    (rows,) = ReferenceEvaluator(str(folder / "model.onnx")).run(
        None, {"tokens": np.array([[0, 1, 2]])}
    )
    assert np.array_equal(rows[0, 1], rows[0, 2]) and (rows[0, :, 1] == np.float32(NEVER)).all()
    return lambda prefix: rows[0, prefix[-1]]


@pytest.mark.usefixtures("corpora_opened_once")
@pytest.mark.parametrize("gamma", [1, 2])
def test_a_draft_of_other_tokens_leaves_the_law_alone(
    gamma: int, mapped_logits, drafting: DraftingConfig
) -> None:
    params = SpeculationParams(drafter="model", gamma=gamma, mode=ExactnessMode.MAX_ACCEPT)
    num_drafted = 0

    def run(noise):
        nonlocal num_drafted
        drafted, tokens = answer(noise, drafting, params, 0, mapped_logits, gamma + 1)
        num_drafted += drafted
        return tokens

    found = law_of(run)
    assert num_drafted > 0
    assert distance(found, sequence_probs(target_row, gamma + 1)) < MAX_ERROR
