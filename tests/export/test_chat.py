"""Chat templates and generation defaults of a checkpoint's folder, as files of a bundle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from outrider.engines.base import BundleError
from outrider.engines.bundle.bundle import Bundle
from outrider.engines.bundle.files import hash_files
from outrider.engines.bundle.manifest import Manifest, ModelEntry
from outrider.export.chat import write_chat, write_generation_defaults
from outrider.export.checkpoint import open_checkpoint
from outrider.export.vocabulary import write_texts
from outrider.runtime.core.params import ChatMessage, ChatParams
from outrider.runtime.serving.chat.encoder import ChatEncoder
from outrider.runtime.serving.chat.files import read_chat, read_generation_defaults
from outrider.runtime.serving.tokenizer import TokenizersCodec
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.runtime.serving.chat.shapes import SHAPES, template_of

ENTRY = ModelEntry(
    path="target", num_layers=1, num_kv_heads=1, head_size=1, vocab_size=9, weights="float32"
)
SHAPE = SHAPES["qwen3"]
CHAT = ChatParams(messages=(ChatMessage(role="user", content="Hello"),))
WORDS = {"default": "a {{ eos_token }}", "tool_use": "b\n", "rag": "c\r\n{{ pad_token }}"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoint"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=SHAPE.tokenizer(), **SHAPE.special_tokens)
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text('{"model_type": "qwen3"}')
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    path = tmp_path / "bundle"
    path.mkdir()
    return path


def give_template(checkpoint: Path, template: object) -> None:
    file = checkpoint / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))


def bundle_of(out: Path) -> Bundle:
    """As it is loaded, without models."""
    manifest = Manifest(
        target=ENTRY, draft=None, max_context=8, max_batch=1, max_gamma=0, max_extend=8,
        eos_token_ids=(), bos_token_id=None, files=hash_files(out),
    )  # fmt: skip
    return Bundle(root=out, manifest=manifest)


def names(out: Path) -> list[str]:
    return sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())


def test_a_checkpoint_that_says_nothing_adds_nothing(checkpoint: Path, out: Path) -> None:
    (checkpoint / "generation_config.json").write_text(
        '{"eos_token_id": 1, "_from_model_config": true}'
    )
    write_chat(checkpoint, out)
    write_generation_defaults(checkpoint, out)
    assert names(out) == []
    assert read_chat(bundle_of(out)) is None
    assert read_generation_defaults(bundle_of(out)) == {}


def test_nothing_is_opened_for_a_checkpoint_without_a_template(out: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("no tokenizer")
    write_chat(tmp_path, out)
    assert names(out) == []


@pytest.mark.parametrize("place", ["file", "config", "list"])
def test_a_template_is_exported_from_where_transformers_finds_it(
    place: str, checkpoint: Path, out: Path
) -> None:
    source = template_of("qwen3")
    if place == "file":
        give_template(checkpoint, "another one, which the file wins over")
        (checkpoint / "chat_template.jinja").write_text(source, encoding="utf-8")
    else:
        whole = [{"name": "default", "template": source}]
        give_template(checkpoint, source if place == "config" else whole)
    write_chat(checkpoint, out)
    assert names(out) == ["chat/default.jinja", "chat/special_tokens.json"]
    files = read_chat(bundle_of(out))
    assert files is not None
    assert files.templates == {"default": source}
    assert files.special_tokens == SHAPE.special_tokens
    assert set(files.control_tokens) == set(SHAPE.control)
    own = AutoTokenizer.from_pretrained(checkpoint)
    encoder = ChatEncoder(files, TokenizersCodec(checkpoint / "tokenizer.json"))
    messages = [{"role": "user", "content": "Hello"}]
    wanted = own.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(encoder.encode(CHAT, 999)) == wanted


@pytest.mark.parametrize("is_folder", [True, False])
def test_named_templates_keep_their_names(is_folder: bool, checkpoint: Path, out: Path) -> None:
    if is_folder:
        (checkpoint / "chat_template.jinja").write_bytes(WORDS["default"].encode())
        (checkpoint / "additional_chat_templates").mkdir()
        for name in ("tool_use", "rag"):
            file = checkpoint / "additional_chat_templates" / f"{name}.jinja"
            file.write_bytes(WORDS[name].encode())
    else:
        give_template(checkpoint, [{"name": k, "template": v} for k, v in WORDS.items()])
    write_chat(checkpoint, out)
    files = read_chat(bundle_of(out))
    assert files is not None
    # Transformers reads files as text.
    ends = "\n" if is_folder else "\r\n"
    assert files.templates == {k: v.replace("\r\n", ends) for k, v in WORDS.items()}
    own = AutoTokenizer.from_pretrained(checkpoint)
    encoder = ChatEncoder(files, TokenizersCodec(checkpoint / "tokenizer.json"))
    for name in WORDS:
        chat = ChatParams(messages=CHAT.messages, template=name)
        wanted = own.apply_chat_template([{"role": "x"}], chat_template=name, tokenize=False)
        assert encoder.render(chat, 999) == wanted


# Of Llava's: a content that is a text would vanish.
PARTS_ONLY = (
    "\n{% for message in messages %}{{ message.role | upper }}:"
    "{% for one in message['content'] | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for one in message['content'] | selectattr('type', 'equalto', 'text') %} {{ one['text'] }}{% endfor %}"
    "{{ message.name }}{% endfor %}"
)


@pytest.mark.parametrize("place", ["chat_template.jinja", "chat_template.json"])
def test_a_template_that_knows_parts_only_gets_texts_as_parts(
    place: str, checkpoint: Path, out: Path
) -> None:
    is_json = place.endswith("json")
    text = json.dumps({"chat_template": PARTS_ONLY}) if is_json else PARTS_ONLY
    (checkpoint / place).write_text(text)
    give_template(checkpoint, "the language model's own, which the processor's wins over")
    write_chat(checkpoint, out)
    files = read_chat(bundle_of(out))
    assert files is not None and files.templates["default"].endswith(PARTS_ONLY)
    messages = [{"role": "user", "content": "Hello", "name": "!"}, {"role": "a", "content": []}]
    parts = [{"type": "text", "text": "Hello"}]
    own = AutoTokenizer.from_pretrained(checkpoint)
    wanted = own.apply_chat_template(
        [messages[0] | {"content": parts}, messages[1]], chat_template=PARTS_ONLY, tokenize=False
    )
    assert wanted == "\nUSER: Hello!A:"
    encoder = ChatEncoder(files, TokenizersCodec(checkpoint / "tokenizer.json"))
    for first in (
        ChatMessage(role="user", content="Hello", fields='{"name": "!"}'),
        ChatMessage(role="user", fields=json.dumps({"content": parts, "name": "!"})),
    ):
        others = (ChatMessage(role="a", fields='{"content": []}'),)
        assert encoder.render(ChatParams(messages=(first, *others)), 999) == wanted
    going_on = ChatParams(messages=CHAT.messages, continues_final=True)
    assert encoder.render(going_on, 999) == "\nUSER: Hello"
    many = ChatParams(messages=CHAT.messages * 1024)
    assert encoder.render(many, 99_999).count("USER: Hello") == 1024


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% if %}", "chat template default: "),
        ([{"name": "../x", "template": "a"}], "its name must be"),
        ([{"name": ".x", "template": "a"}], "its name must be"),
    ],
)
def test_a_template_that_cannot_be_served_is_refused(
    template: Any, message: str, checkpoint: Path, out: Path
) -> None:
    give_template(checkpoint, template)
    with pytest.raises(BundleError, match=f"checkpoint: .*{message}"):
        write_chat(checkpoint, out)


def test_a_template_without_its_tokenizer_is_refused(tmp_path: Path, out: Path) -> None:
    SHAPE.tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("a")
    with pytest.raises(BundleError, match="Transformers does not find its chat template"):
        write_chat(tmp_path, out)


def test_generation_defaults_are_what_the_checkpoint_asks_for(checkpoint: Path, out: Path) -> None:
    asked = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "eos_token_id": [1, 2]}
    (checkpoint / "generation_config.json").write_text(json.dumps(asked))
    write_generation_defaults(checkpoint, out)
    assert names(out) == ["generation_defaults.json"]
    wanted = {"do_sample": True, "temperature": 0.6, "top_p": 0.95}
    assert read_generation_defaults(bundle_of(out)) == wanted


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chat/special_tokens.json", "[]"),
        ("chat/special_tokens.json", '{"special_tokens": {"a": 1}, "control_tokens": []}'),
        ("chat/special_tokens.json", '{"special_tokens": {}, "control_tokens": [""]}'),
        ("chat/special_tokens.json", "{"),
        ("chat/default.jinja", "\x80"),
    ],
)
def test_wrong_files_of_a_bundle_are_refused_by_name(name: str, text: str, out: Path) -> None:
    (out / "chat").mkdir()
    (out / "chat/default.jinja").write_text("a")
    (out / "chat/special_tokens.json").write_text('{"special_tokens": {}, "control_tokens": []}')
    (out / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(BundleError, match=name):
        read_chat(bundle_of(out))


@pytest.mark.parametrize("text", ["[]", "{", '{"a": NaN}'])
def test_wrong_generation_defaults_are_refused_by_name(text: str, out: Path) -> None:
    (out / "generation_defaults.json").write_text(text)
    with pytest.raises(BundleError, match=r"generation_defaults\.json"):
        read_generation_defaults(bundle_of(out))


def test_an_export_writes_them_beside_the_tokenizer(
    tiny_checkpoints: tuple[Path, Path], out: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    shutil.copytree(tiny_checkpoints[0], target)
    write_texts(open_checkpoint(target, max_context=64), out)
    assert names(out) == ["tokenizer.json"]
    PreTrainedTokenizerFast(
        tokenizer_file=str(target / "tokenizer.json"), chat_template="a", eos_token="</s>"
    ).save_pretrained(target)
    write_texts(open_checkpoint(target, max_context=64), out)
    assert names(out) == ["chat/default.jinja", "chat/special_tokens.json", "tokenizer.json"]
