"""Texts on which a converted tokenizer must agree with the checkpoint's own, and the comparison.

The texts are the same for the same vocabulary and Python: cases that tokenizers are known to differ in, docstrings of
the standard library, and random rows of the vocabulary's own pieces.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import textwrap
from collections.abc import Callable, Sequence

from outrider.engines.base import BundleError
from outrider.export.tokenizers.own import OwnTokenizer, Side
from outrider.export.tokenizers.pieces import META, piece_names
from tokenizers import Tokenizer

NUM_TEXTS = 1000
_MODULES = (argparse, json, random, string, textwrap)
_MOST_PIECES = 24
HARD_TEXTS = (
    "",
    " ",
    "   spaces   before,  within   and behind   ",
    "tab\tnew line\nboth\r\n ends",
    "no\u00a0break, \u3000ideographic\u2009thin\u200bzero width\ufeffmark",
    "soft\u00adhyphen, joiner a\u200db, direction \u200e\u200f",
    "e\u0301 and \u00e9, A\u030a and \u00c5 and \u212b, n\u0303",
    "\ufb01n \ufb02ow, \u00bd \u00b2 \u2460 \u2163 \u2122 \u33a1",
    "\uff21\uff22\uff43\uff11\uff12\uff01 \uff76\uff80\uff76\uff85",
    "stra\u00dfe STRASSE \u1e9e, \u0130stanbul \u0131",
    "\u201cquotes\u201d \u2018single\u2019 \u00abguillemets\u00bb \u2013 \u2014 \u2026",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0439 \u0438\u0306",
    "\u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5 \u0390 \u03ca\u0301",
    "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645 \ufefb",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f\u4e16\u754c",
    "\uc548\ub155\ud558\uc138\uc694 \uc138\uacc4",
    "\U0001f600\U0001f44b\U0001f3fd \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
    "\U0001d49c\U0001d4ea\U0001d7d9 math",
    "control \x01\x02\x1b\x7f\x85 end",
    "private \ue000 none \uffff last \U0010ffff \ufffd",
    "\u2603\u2603\u2603 unknown \u2603a\u2603 \u2603 \u2603",
    f"{META}literal {META}{META} marks{META}",
    "http://example.org/a?b=c&d=%20 user@example.org",
    'if (x[i] != 0x1F) { y->z += "str\\n"; } // done',
    "1,234.56 -7e10 3.14159265358979 00000000000000",
    "a" * 200,
    "word " * 60,
)


def texts_to_compare(pieces: Sequence[str]) -> tuple[str, ...]:
    """Return ``NUM_TEXTS`` texts.

    Args:
        pieces: of the vocabulary, not empty.
    """
    found = [*HARD_TEXTS]
    for module in _MODULES:
        for thing in (module, *vars(module).values()):
            found += [
                line for line in (getattr(thing, "__doc__", "") or "").splitlines() if line.strip()
            ]
    found = list(dict.fromkeys(found))[: NUM_TEXTS // 2]
    choose = random.Random(0)
    # Every piece in its turn, then any.
    waiting = list(pieces)
    choose.shuffle(waiting)
    while len(found) < NUM_TEXTS:
        num_pieces = choose.randint(1, _MOST_PIECES)
        taken, waiting = waiting[:num_pieces], waiting[num_pieces:]
        row = taken or choose.choices(pieces, k=num_pieces)
        found.append("".join(row).replace(META, " "))
    return tuple(found)


def check_agreement(
    own: OwnTokenizer, side: Side, converted: Tokenizer, *, of_answers: bool
) -> None:
    """Hold a converted tokenizer against the checkpoint's own.

    Raises:
        BundleError: ids or, of answers, texts differ; names the first text's number.
    """
    ids = side.vocabulary.piece_ids
    pieces = [one for one in piece_names(side.model) if ids[one] != side.vocabulary.unknown_id]
    texts = texts_to_compare(pieces)
    wanted = own.encode(texts, of_answers=of_answers)
    found = [one.ids for one in converted.encode_batch(list(texts), add_special_tokens=False)]
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        if not (_cuts_alike(converted, ours, theirs) or side.is_odd(texts[number])):
            raise BundleError(_differs(own.name, number, "has other ids"))
        if of_answers and not _reads_alike(converted.decode, own.decode, theirs):
            raise BundleError(_differs(own.name, number, "is decoded to another text"))


def _cuts_alike(converted: Tokenizer, ours: Sequence[int], theirs: Sequence[int]) -> bool:
    """Return whether a text is cut alike: into the same pieces, in any order that makes the text.

    All such orders have one score, so it hangs on the rounding of sums which of them is taken.
    """
    if ours == theirs:
        return True
    return sorted(ours) == sorted(theirs) and converted.decode(ours) == converted.decode(theirs)


def _reads_alike(
    ours: Callable[[Sequence[int]], str], theirs: Callable[[Sequence[int]], str], ids: Sequence[int]
) -> bool:
    """Return whether ids make the same text, but for spaces at its ends.

    Transformers strips texts of these tokenizers; in a stream a space may be shown before it turns out to be the last.
    """
    return ours(ids).strip() == theirs(ids).strip()


def _differs(name: str, number: int, how: str) -> str:
    return (
        f"{name}: text {number} of {NUM_TEXTS} {how} with the converted tokenizer than with the checkpoint's own "
        "(the rule: equal on all of them); convert the checkpoint's tokenizer to a tokenizer.json yourself"
    )
