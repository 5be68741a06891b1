"""The stages of a round as launches of kernels; see ``sampler.cu``, which says what each does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from outrider.engines.accelerators.device.base import DeviceTensor, PlanDevice
from outrider.engines.accelerators.device.sampling import tensors as names
from outrider.engines.accelerators.device.sampling.tensors import Stage

# Bytes of what is known of a position: ``Test`` in sampler.cu.
_TEST_BYTES: Final = 48
_FLOAT_BYTES: Final = 4
_NONE: Final = 0


class Kernels(Protocol):
    """The kernels of ``sampler.cu``, loaded on a device."""

    def launch(self, name: str, width: int, height: int, arguments: Sequence[int]) -> None:
        """Enqueue a kernel over width x height blocks.

        Args:
            name: of the kernel.
            width: blocks in x.
            height: blocks in y.
            arguments: addresses on the device, and integers that are not negative.

        Raises:
            EngineError: the device refuses, in its own words.
        """
        ...

    def close(self) -> None:
        """Unload them."""
        ...


class Scratch:
    """Memory that the kernels of one stream share; it grows with what is asked for."""

    def __init__(self, device: PlanDevice) -> None:
        self._device = device
        self._pieces: dict[str, tuple[int, int]] = {}

    def take(self, name: str, num_bytes: int) -> int:
        """Address of at least so many bytes; what lay there before is lost."""
        pointer, size = self._pieces.get(name, (_NONE, 0))
        if size < num_bytes:
            if pointer:
                del self._pieces[name]
                self._device.free(pointer)
            pointer = self._device.allocate(num_bytes)
            self._pieces[name] = (pointer, num_bytes)
        return pointer

    def free(self) -> None:
        """Give it back."""
        for pointer, _ in self._pieces.values():
            self._device.free(pointer)
        self._pieces.clear()


class Launches:
    """Enqueues the stages of rounds over a vocabulary; closes the kernels."""

    def __init__(self, kernels: Kernels, device: PlanDevice, vocab_size: int) -> None:
        self._kernels, self._scratch, self._vocab_size = kernels, Scratch(device), vocab_size
        self._stages = {
            Stage.PROPOSE: self._propose,
            Stage.JUDGE: self._judge,
            Stage.TOPS: self._tops,
        }

    def run(self, stage: Stage, tensors: Mapping[str, DeviceTensor]) -> None:
        """Enqueue a stage over its inputs and outputs, by name.

        Raises:
            EngineError: the device refuses, in its own words.
        """
        self._stages[stage](tensors)

    def close(self) -> None:
        """Free what they share, and unload them."""
        self._scratch.free()
        self._kernels.close()

    def _propose(self, tensors: Mapping[str, DeviceTensor]) -> None:
        num_rows, positions = tensors[names.DRAFT_TOKENS].shape
        logits, stride, given = self._processed(tensors, width=1, is_proposal=True)
        arguments = [
            logits, stride, given, self._vocab_size, positions, _depth(tensors),
            *_pointers(tensors, names.COUNTS, names.SETTINGS, names.DRAWS, names.SEEDS, names.POSITIONS),
            *_pointers(tensors, names.KEPT_ROWS, names.DRAFT_TOKENS, names.NEXT_TOKENS, names.NEW_DRAFT_TOKENS),
        ]  # fmt: skip
        self._kernels.launch("propose", num_rows, 1, arguments)

    def _judge(self, tensors: Mapping[str, DeviceTensor]) -> None:
        num_rows, positions = tensors[names.DRAFT_TOKENS].shape
        logits, _, _ = self._processed(tensors, width=positions, is_proposal=False)
        tests = self._scratch.take("tests", num_rows * positions * _TEST_BYTES)
        sizes = [self._vocab_size, positions, _depth(tensors)]
        counts, settings, draws, coins, kept, drafts, answers = _pointers(
            tensors, names.COUNTS, names.SETTINGS, names.DRAWS, names.COINS, names.KEPT_ROWS, names.DRAFT_TOKENS,
            names.ANSWERS,
        )  # fmt: skip
        addresses = _pointers(tensors, names.SEEDS, names.POSITIONS)
        test = [logits, *sizes, counts, settings, draws, coins, *addresses, kept, drafts, tests]
        self._kernels.launch("test_drafts", positions, num_rows, test)
        answer = [logits, *sizes, counts, draws, kept, drafts, tests, answers]
        self._kernels.launch("answer", num_rows, 1, answer)

    def _tops(self, tensors: Mapping[str, DeviceTensor]) -> None:
        num_rows, positions = tensors[names.EMITTED].shape
        most = tensors[names.TOP_IDS].shape[2]
        arguments = [
            tensors[names.LOGITS].pointer, self._vocab_size, positions, most,
            *_pointers(tensors, names.EMITTED, names.LOGPROBS, names.TOP_IDS, names.TOP_LOGPROBS),
        ]  # fmt: skip
        self._kernels.launch("tops", positions, num_rows, arguments)

    def _processed(
        self, tensors: Mapping[str, DeviceTensor], *, width: int, is_proposal: bool
    ) -> tuple[int, int, int]:
        """Return address, elements between rows and vocabulary of the logits behind bias, penalties and bans."""
        logits = tensors[names.LOGITS]
        num_rows, wanted, given = logits.shape
        if names.SEEN_IDS not in tensors:
            return logits.pointer, wanted * given, given
        vocab_size = self._vocab_size
        out = self._scratch.take("processed", num_rows * width * vocab_size * _FLOAT_BYTES)
        drafts = tensors[names.DRAFT_TOKENS]

        def listed(ids: str, *values: str) -> list[int]:
            return [*_pointers(tensors, ids, *values), tensors[ids].shape[1]]

        arguments = [
            logits.pointer, wanted * given, given, given, vocab_size, drafts.shape[1], width, int(is_proposal),
            *_pointers(tensors, names.COUNTS, names.SETTINGS, names.DRAFT_TOKENS),
            *listed(names.SEEN_IDS, names.SEEN_COUNTS), *listed(names.BIAS_IDS, names.BIAS_VALUES),
            *listed(names.ALLOWED_IDS), *listed(names.END_IDS), *listed(names.BAD_PREFIXES, names.BAD_LASTS),
            *listed(names.RECENT), out,
        ]  # fmt: skip
        self._kernels.launch("process", width, num_rows, arguments)
        return out, width * vocab_size, vocab_size


def _pointers(tensors: Mapping[str, DeviceTensor], *wanted: str) -> list[int]:
    """Addresses of tensors; 0 of those that a call does without."""
    return [tensors[name].pointer if name in tensors else _NONE for name in wanted]


def _depth(tensors: Mapping[str, DeviceTensor]) -> int:
    """D of the kept rows; 0 where none are kept."""
    return tensors[names.KEPT_ROWS].shape[2] if names.KEPT_ROWS in tensors else 0
