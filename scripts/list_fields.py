"""Writes docs/api.md: every message and field of ``outrider.v1``, and the fields of OpenAI's protocol.

    python -m scripts.list_fields

Meanings are the comments of ``inference.proto``; defaults and restrictions are the rows of
``runtime.serving.requests.fields``.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)
from grpc_tools import protoc
from outrider.runtime.serving.http.openai.fields import NOT_SERVED_BY_NAME, by_name
from outrider.runtime.serving.requests.fields import FIELDS, Models, Search

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
SOURCE = "outrider/v1/inference.proto"
HEAD = """# The API, field by field

Written by `python -m scripts.list_fields` from `proto/outrider/v1/inference.proto` and the server's table of fields.
Statuses and options by subject: [serving.md](serving.md); words: [glossary](../ARCHITECTURE.md#glossary);
other protocols: [http.md](http.md), [protocols.md](protocols.md).
"""
_TYPES = {
    FieldDescriptorProto.TYPE_DOUBLE: "double",
    FieldDescriptorProto.TYPE_BOOL: "bool",
    FieldDescriptorProto.TYPE_STRING: "string",
    FieldDescriptorProto.TYPE_UINT32: "uint32",
    FieldDescriptorProto.TYPE_UINT64: "uint64",
    FieldDescriptorProto.TYPE_SINT32: "sint32",
}
_MODELS = {
    Models.ENCODER_DECODER: "encoder-decoder models only",
    Models.DECODER_ONLY: "decoder-only models only",
}
# Numbers of fields within descriptors, of which the paths of comments are made.
_SERVICE, _METHOD, _MESSAGE, _FIELD, _ENUM, _VALUE = 6, 2, 4, 2, 5, 2


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """Return the page."""
    file = described()
    comments = {
        tuple(one.path): " ".join(one.leading_comments.split())
        for one in file.source_code_info.location
    }
    lines = [HEAD, *_methods(file, comments), *_openai()]
    for number, message in enumerate(file.message_type):
        lines += _message(message, (_MESSAGE, number), comments)
    for number, enum in enumerate(file.enum_type):
        lines += _enum(enum, (_ENUM, number), comments)
    return "\n".join(lines) + "\n"


def described() -> FileDescriptorProto:
    """Return the description of the wire with its comments."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        arguments = [f"--proto_path={ROOT / 'proto'}", f"--descriptor_set_out={out}"]
        if protoc.main(["protoc", *arguments, "--include_source_info", SOURCE]) != 0:
            sys.exit("protoc failed")
        return FileDescriptorSet.FromString(out.read_bytes()).file[0]


Comments = Mapping[tuple[int, ...], str]


def _methods(file: FileDescriptorProto, comments: Comments) -> Iterator[str]:
    (service,) = file.service
    yield f"## `{file.package}.{service.name}`\n"
    for number, method in enumerate(service.method):
        about = comments[_SERVICE, 0, _METHOD, number]
        yield f"* `{method.name}({_named(method.input_type)})` returns {_answer(method)}: {about}"
    yield ""


def _answer(method: MethodDescriptorProto) -> str:
    stream = "a stream of " if method.server_streaming else ""
    return f"{stream}`{_named(method.output_type)}`"


def _openai() -> Iterator[str]:
    """Yield the fields that OpenAI's protocol takes over, and those that it refuses."""
    names = sorted(by_name())
    yield "## OpenAI's protocol\n"
    yield "Requests take these fields of `GenerateRequest` and `Sampling` at the top level, by the same name: "
    yield f"{', '.join(f'`{name}`' for name in names)}; and `speculation`, an object.\n"
    yield "They refuse these, with a replacement where there is one:\n"
    for name, rule in NOT_SERVED_BY_NAME.items():
        yield f"* `{name}`: {rule}"
    yield ""


def _message(message: DescriptorProto, path: tuple[int, ...], comments: Comments) -> Iterator[str]:
    yield f"## `{message.name}`\n"
    if about := comments.get(path):
        yield f"{about}\n"
    if not message.field:
        return
    prefix = {"GenerateRequest": "", "Sampling": "sampling.", "Speculation": "speculation."}.get(
        message.name
    )
    has_rows = prefix is not None
    yield f"| field | type |{' default | restriction |' if has_rows else ''} meaning |"
    yield f"|---|---|{'---|---|' if has_rows else ''}---|"
    for number, field in enumerate(message.field):
        about = comments.get((*path, _FIELD, number), "").replace("|", "\\|")
        row = f"| `{field.name}` | {_type(message, field)} |"
        if has_rows:
            row += _row(f"{prefix}{field.name}")
        yield f"{row} {about} |"
    yield ""


def _row(path: str) -> str:
    """Return default and restriction of a field of the table."""
    field = FIELDS.get(path)
    if field is None:
        return " | |"
    default = "" if field.default in (None, "", ()) else f"`{field.default}`"
    restrictions = []
    if field.refusal:
        restrictions.append("refused")
    if field.search is Search.ONLY:
        restrictions.append("beam search only")
    if field.search in (Search.NEVER, Search.UNREPORTED):
        restrictions.append("not with beam search")
    if field.models is not Models.ALL:
        restrictions.append(_MODELS[field.models])
    return f" {default} | {', '.join(restrictions)} |"


def _type(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    """Return a field's type in words; ``optional`` where its absence has a meaning of its own."""
    named = _TYPES.get(field.type) or f"`{_named(field.type_name)}`"
    entries = {one.name: one for one in message.nested_type if one.options.map_entry}
    if (entry := entries.get(_named(field.type_name))) is not None:
        key, value = (_TYPES[one.type] for one in entry.field)
        return f"map of {key} to {value}"
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {named}"
    if field.proto3_optional:
        return f"optional {named}"
    if field.HasField("oneof_index"):
        return f"{named}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return named


def _enum(enum: EnumDescriptorProto, path: tuple[int, ...], comments: Comments) -> Iterator[str]:
    yield f"## `{enum.name}`\n"
    if about := comments.get(path):
        yield f"{about}\n"
    for number, value in enumerate(enum.value):
        about = comments.get((*path, _VALUE, number), "")
        yield f"* `{value.name}` ({value.number}){f': {about}' if about else ''}"
    yield ""


def _named(name: str) -> str:
    return name.rpartition(".")[2]


if __name__ == "__main__":
    main()
