"""Graphs of encoder-decoder models: packed rows and single tokens keep the bits, certificates see mistakes."""

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from outrider.engines.base import BundleError, FloatArray, IntArray
from outrider.engines.bundle.encoder_decoder import ENCODE_FILE, SOURCE_LENGTH
from outrider.engines.bundle.names import GROUPED_FILE, MODEL_FILE, TREE_FILE
from outrider.export.certificate.certify import certify
from outrider.export.certificate.feeds import Sources
from outrider.export.certificate.graph_runner import GraphRunner
from outrider.export.certificate.parity_cases import draw_sources
from outrider.export.certificate.reference import Reference
from outrider.export.certificate.tree_parity import check_tree_parity
from outrider.export.graph import trees
from outrider.export.graph.attention_kinds import KEYS, AttentionKind, attention_nodes, count_kinds
from outrider.export.graph.grouped_heads import derive_grouped_graph

from tests.export.certificate.bounds import within
from tests.export.conftest import Exported
from tests.mutants import assert_caught

V = 96
LIMITS = {"max_gamma": 3, "max_tree_nodes": 8, "bound": within(1e-4)}


def sources_of(exported: Exported, batch: int, longest: int) -> Sources:
    """Ragged sources, the last the longest."""
    lengths = np.linspace(1 if batch > 1 else longest, longest, batch).astype(int).tolist()
    sources = draw_sources(exported.model_config, lengths, seed=batch)
    assert sources is not None
    return sources


def runner(
    exported: Exported,
    sources: Sources,
    *,
    file: str = MODEL_FILE,
    sizes: tuple[int, int] = (80, 48),
) -> GraphRunner:
    """A graph that has read sources, over caches of ``sizes`` full of another request's leftovers."""
    made = GraphRunner(
        exported.path.with_name(file),
        exported.model_config,
        batch=len(sources.lengths),
        capacity=sizes[0],
        source_capacity=sizes[1],
    )
    made.read(sources)
    return made


@pytest.mark.parametrize("sizes", [(32, 17), (130, 48)])
def test_packed_rows_give_the_same_bits(text2text: Exported, sizes: tuple[int, int]) -> None:
    generator = np.random.default_rng(0)
    for batch in (1, 2, 5):
        sources = sources_of(text2text, batch, longest=17)
        plain, packed = (
            runner(text2text, sources, file=file, sizes=sizes)
            for file in (MODEL_FILE, GROUPED_FILE)
        )
        for width in (2, 5, 9, 1):
            if batch == width == 1:  # which engines never run
                continue
            start = np.linspace(0, sizes[0] - max(width, 2), batch).astype(np.int64)
            tokens = generator.integers(1, V, (batch, width))
            expected = plain.extend(tokens, start)
            packed.caches = {name: held.copy() for name, held in plain.caches.items()}
            assert np.isfinite(expected).all()
            np.testing.assert_array_equal(packed.extend(tokens, start), expected)


def test_heads_that_share_those_of_a_source_are_not_grouped(own_text2text: Exported) -> None:
    """A single query of a source's head would run, by another kernel."""
    model = ir.load(own_text2text.path)
    for node in attention_nodes(model.graph):
        keys = node.inputs[KEYS]
        assert keys is not None
        assert keys.shape is not None
        keys.shape = ir.Shape([keys.shape[0], 2, *keys.shape[2:]])
    ir.save(model, own_text2text.path)
    assert not derive_grouped_graph(own_text2text.path)


def test_spans_and_reads_of_one_token_have_the_bits_of_wider_ones(text2text: Exported) -> None:
    tokens = np.random.default_rng(1).integers(1, V, (3, 12))
    one = draw_sources(text2text.model_config, [1, 1, 1], seed=0)
    assert one is not None
    assert one.tokens.shape == (3, 2)  # as engines read them
    wider = Sources(tokens=np.pad(one.tokens, ((0, 0), (0, 4)), "edge"), lengths=one.lengths)

    def answers(sources: Sources, width: int) -> FloatArray:
        made = runner(text2text, sources)
        parts: list[FloatArray] = []
        for at in range(0, 12, width):
            start: IntArray = np.full(3, at)
            parts.append(made.extend(tokens[:, at : at + width], start))
        return np.concatenate(parts, axis=1)

    expected = answers(wider, 4)
    for width in (1, 2, 12):
        np.testing.assert_array_equal(answers(wider, width), expected)
    np.testing.assert_array_equal(answers(one, 1), expected)


def test_graphs_share_one_data_file_and_attend_by_kind(text2text: Exported) -> None:
    layers = text2text.model_config.num_layers
    plain = {AttentionKind.SELF: layers, AttentionKind.SOURCE: layers}
    assert count_kinds(ir.load(text2text.path).graph) == plain
    encode = text2text.path.with_name(ENCODE_FILE)
    assert count_kinds(ir.load(encode).graph) == {AttentionKind.ENCODER: 2}
    for file in (GROUPED_FILE, TREE_FILE):
        graph = ir.load(text2text.path.with_name(file)).graph
        assert count_kinds(graph) == {None: layers, AttentionKind.SOURCE: layers}
        places = {
            value.const_value.location
            for value in graph.initializers.values()
            if isinstance(value.const_value, ir.ExternalTensor)
        }
        assert places == {f"{MODEL_FILE}.data"}


def test_certificate_has_cases_about_sources_and_trees(text2text: Exported) -> None:
    found = certify(text2text.model, text2text.path, text2text.model_config, **LIMITS)
    for cases in (found, found["grouped"]):
        names = {"read_1", "read_2", "read_17", "read_longest", "source_reused", "source_widened"}
        assert names | {"verify", "ragged", "rollback", "long_text"} <= set(cases)
    for name in ("tree_masks", "tree_paths", "long_text"):
        assert found[name]["num_greedy_equal"] == found[name]["num_compared"] > 0


def see_one_more(graph: onnx.GraphProto) -> None:
    """Attention to a source one column beyond its end."""
    one = onnx.numpy_helper.from_array(np.array(1), "one_more")
    graph.initializer.append(one)
    node = onnx.helper.make_node("Add", [SOURCE_LENGTH, "one_more"], ["seen"])
    rename(graph, SOURCE_LENGTH, "seen", [node])


def see_all(graph: onnx.GraphProto) -> None:
    """Attention to all columns of the cache of sources, also to those of who had the row before."""
    shape = onnx.helper.make_node("Shape", ["cross_key.0"], ["all"], start=2, end=3)
    rows = onnx.helper.make_node("Shape", [SOURCE_LENGTH], ["rows"])
    node = onnx.helper.make_node("Expand", ["all", "rows"], ["seen"])
    rename(graph, SOURCE_LENGTH, "seen", [shape, rows, node])


def mix_rows(graph: onnx.GraphProto) -> None:
    """Every row's source ends where that of the row before does."""
    index = onnx.numpy_helper.from_array(np.array([2, 0, 1]), "before")
    graph.initializer.append(index)
    node = onnx.helper.make_node("Gather", [SOURCE_LENGTH, "before"], ["seen"])
    rename(graph, SOURCE_LENGTH, "seen", [node])


def end_distances_early(graph: onnx.GraphProto) -> None:
    """Biases of attention tell no distances beyond 64 apart."""
    least = onnx.numpy_helper.from_array(np.array(-64), "least")
    graph.initializer.append(least)
    node = next(node for node in graph.node if node.op_type == "Clip")
    node.input[1] = "least"


def rename(graph: onnx.GraphProto, old: str, new: str, made: list[onnx.NodeProto]) -> None:
    for node in graph.node:
        node.input[:] = [new if name == old else name for name in node.input]
    nodes = [*made, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)


@pytest.mark.parametrize(
    ("file", "break_graph", "case"),
    [
        (MODEL_FILE, see_one_more, "prefill"),
        (MODEL_FILE, mix_rows, "prefill"),
        (GROUPED_FILE, see_one_more, "prefill"),
        (ENCODE_FILE, mix_rows, "prefill"),
        (ENCODE_FILE, end_distances_early, "read_longest"),
        (MODEL_FILE, end_distances_early, "long_text"),
        (TREE_FILE, see_one_more, "tree_masks"),
        (MODEL_FILE, see_all, "prefill"),
    ],
)
@pytest.mark.parametrize("text2text", ["t5"], indirect=True)
def test_certificate_fails_where_a_row_sees_what_it_should_not(
    own_text2text: Exported,
    file: str,
    break_graph: Callable[[onnx.GraphProto], None],
    case: str,
) -> None:
    path = own_text2text.path.with_name(file)
    broken = onnx.load(path, load_external_data=False)
    break_graph(broken.graph)
    path.write_bytes(broken.SerializeToString())
    with pytest.raises(BundleError, match=f"parity case {case}"):
        certify(own_text2text.model, own_text2text.path, own_text2text.model_config, **LIMITS)


@pytest.mark.parametrize("text2text", ["t5"], indirect=True)
def test_a_tree_places_keys_by_position_and_not_by_column(
    own_text2text: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = Reference(own_text2text.model)

    def check() -> None:
        trees.derive_tree_graphs(own_text2text.path)
        check_tree_parity(
            reference,
            own_text2text.path,
            own_text2text.model_config,
            max_tree_nodes=8,
            bound=within(1e-4),
        )

    right, wrong = "[is_cached, columns, placed]", "[is_cached, columns, columns]"
    assert_caught(monkeypatch, trees, right, wrong, check, (BundleError,))
