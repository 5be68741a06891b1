"""Tensors of the Open Inference Protocol: inputs of one element each, outputs of a few.

An input is a stranger's: its name, type, shape and every length in it are checked before it is believed.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from outrider.oip import inference_pb2 as oip
from outrider.runtime.core.checks.rules import check_count
from outrider.runtime.core.errors import RequestError, UnsupportedOption

BYTES, BOOL, UINT32 = "BYTES", "BOOL", "UINT32"
_LENGTH = struct.Struct("<I")
# Triton writes [1], and [1, 1] where a model takes batches.
_MOST_DIMENSIONS = 2


def read_inputs(
    request: oip.ModelInferRequest, datatypes: Mapping[str, str]
) -> dict[str, str | bool]:
    """Return the values of a request's inputs by name: texts and truths.

    Args:
        request: as it came.
        datatypes: of the inputs that there are, by name: BYTES or BOOL.

    Raises:
        RequestError: an input is not one of these, or not a tensor of one element.
    """
    check_count("inputs", request.inputs, len(datatypes))
    raw, values = request.raw_input_contents, dict[str, str | bool]()
    if raw and len(raw) != len(request.inputs):
        raise RequestError("raw_input_contents", "must have one entry per input, or none at all")
    for number, tensor in enumerate(request.inputs):
        if tensor.name not in datatypes:
            raise RequestError("inputs", f"each must be one of {', '.join(datatypes)}")
        if tensor.name in values:
            raise RequestError(tensor.name, "must be given once")
        _check_form(tensor, datatypes[tensor.name])
        if raw and tensor.HasField("contents"):
            raise RequestError(tensor.name, "must leave out contents with raw_input_contents")
        element = _raw_element(tensor, raw[number]) if raw else _element(tensor)
        values[tensor.name] = _text(tensor.name, element)
    return values


def _check_form(tensor: oip.ModelInferRequest.InferInputTensor, datatype: str) -> None:
    if tensor.parameters:
        rule = "must have no parameters: shared memory is not served"
        raise UnsupportedOption(tensor.name, rule)
    if tensor.datatype != datatype:
        raise RequestError(tensor.name, f"must have datatype {datatype}")
    if not 1 <= len(tensor.shape) <= _MOST_DIMENSIONS or any(size != 1 for size in tensor.shape):
        raise RequestError(tensor.name, "must have shape [1]")


def _raw_element(tensor: oip.ModelInferRequest.InferInputTensor, raw: bytes) -> bytes | bool:
    if tensor.datatype == BOOL:
        if len(raw) != 1:
            raise RequestError(tensor.name, "must be one byte")
        return raw != b"\0"
    if len(raw) < _LENGTH.size or _LENGTH.unpack_from(raw)[0] != len(raw) - _LENGTH.size:
        raise RequestError(tensor.name, "must be one element: four bytes of length, and its bytes")
    return raw[_LENGTH.size :]


def _element(tensor: oip.ModelInferRequest.InferInputTensor) -> bytes | bool:
    contents = tensor.contents
    given = contents.bool_contents if tensor.datatype == BOOL else contents.bytes_contents
    if len(given) != 1:
        raise RequestError(tensor.name, "must have one element")
    element: bytes | bool = given[0]
    return element


def _text(name: str, element: bytes | bool) -> str | bool:
    if isinstance(element, bool):
        return element
    try:
        return element.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(name, "must be UTF-8") from error


def add_texts(response: oip.ModelInferResponse, name: str, texts: Sequence[str]) -> None:
    """Add an output of texts."""
    elements = [text.encode("utf-8") for text in texts]
    framed = b"".join(_LENGTH.pack(len(element)) + element for element in elements)
    _add(response, name, BYTES, len(texts), framed)


def add_counts(response: oip.ModelInferResponse, name: str, counts: Sequence[int]) -> None:
    """Add an output of whole numbers of 32 bits."""
    _add(response, name, UINT32, len(counts), struct.pack(f"<{len(counts)}I", *counts))


def _add(response: oip.ModelInferResponse, name: str, datatype: str, size: int, raw: bytes) -> None:
    response.outputs.add(name=name, datatype=datatype, shape=[size])
    response.raw_output_contents.append(raw)
