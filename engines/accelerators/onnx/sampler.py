"""The sampler's graphs on ONNX Runtime, over the memory and the stream of a device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from outrider.engines.accelerators.device.base import Call, DeviceTensor, HostDevice, PlanDevice
from outrider.engines.accelerators.device.sampling.sampler import GraphSampler, GraphSet
from outrider.engines.accelerators.onnx.bound_session import BoundSession
from outrider.engines.base import EngineError
from outrider.engines.bundle.names import SAMPLER_FOLDER
from outrider.engines.devices import CPU
from outrider.engines.onnx.session import open_session, records_graphs
from outrider.engines.sampling.noise import NoiseSource


class OnnxGraph:
    """One graph in a session; see ``engines.accelerators.device.sampling.runner.SamplerGraph``."""

    def __init__(self, file: str, session: BoundSession) -> None:
        self._file = file
        self._session = session
        self.inputs = session.inputs
        self.outputs = session.outputs

    def run(self, tensors: Mapping[str, DeviceTensor]) -> None:
        """Enqueue it; see ``SamplerGraph.run``."""
        try:
            self._session.run(Call(tuple(tensors.items()), lambda: tensors))
        except EngineError as error:
            raise EngineError(f"{self._file}: {error}") from error

    def close(self) -> None:
        """Drop what is bound."""
        self._session.close()


def open_onnx_sampler(
    graphs: Path | Mapping[str, bytes],
    *,
    max_batch: int,
    max_gamma: int,
    vocab_size: int,
    device: PlanDevice | None = None,
    num_threads: int = 2,
    noise: NoiseSource | None = None,
    draws_races: bool | None = None,
    provider_options: Mapping[str, str] | None = None,
) -> GraphSampler:
    """Return the sampler over graphs, each loaded when it is first used.

    ``graphs`` are the files of a folder, or bytes by file name. Without a device they run on the host. Without
    ``draws_races`` a graph draws them but on the host. All else is as ``GraphSampler`` and ``open_session`` take it.
    """
    memory = HostDevice() if device is None else device

    def open_graph(file: str) -> OnnxGraph:
        session = open_session(
            _graph(graphs, file),
            device=memory.kind,
            device_index=memory.index,
            num_threads=num_threads,
            stream=memory.stream,
            provider_options=provider_options,
        )
        records = memory.kind != CPU and records_graphs(provider_options or {})
        return OnnxGraph(file, BoundSession(session, memory, name=file, records=records))

    # On the host the graph of noise takes 385 ms at V = 151,936, and numpy 0.4.
    draws_races = memory.kind != CPU if draws_races is None else draws_races
    return GraphSampler(
        GraphSet(open_graph=open_graph, draws_races=draws_races),
        max_batch=max_batch,
        max_gamma=max_gamma,
        vocab_size=vocab_size,
        device=memory,
        noise=noise,
    )


def _graph(graphs: Path | Mapping[str, bytes], file: str) -> Path | bytes:
    """Return a graph's file, or its bytes.

    Raises:
        EngineError: there is none of this name.
    """
    if isinstance(graphs, Path):
        folder, is_known = graphs.name, (graphs / file).is_file()
    else:
        folder, is_known = SAMPLER_FOLDER, file in graphs
    if not is_known:
        raise EngineError(f"{folder}/{file}: no such sampler graph")
    return graphs / file if isinstance(graphs, Path) else graphs[file]
