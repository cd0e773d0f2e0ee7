"""Translates between the tokens of two tokenizers, by way of text.

Two models with different tokenizers have text in common. Timor et al. 2025 (arXiv 2502.05202) describe what
to do with it: string-level exact match, and token-level intersection.
"""

from collections.abc import Sequence
from itertools import takewhile

from soothsay.errors import DrafterError
from soothsay.tokenizer import Tokenizer
from soothsay.vocabulary.byte_level import BYTE_LETTERS

_SPACE = "\u2581"  # how SentencePiece writes a space

_THREE_BYTES = "\u6771"
"""A character that byte-level vocabularies write as three, one for each of its bytes."""


class TokenBytes:
    """A tokenizer's tokens as bytes.

    The tokenizer must be byte-level, as GPT-2's is, or SentencePiece's with tokens for single bytes. Then any
    text can be written in its tokens. Some vocabularies lack tokens for bytes that they were hardly trained
    on, such as 0x04 or 0xFF. These bytes are left out: a text is drafted for as if it did not have them.

    Raises:
        DrafterError: the tokenizer is of another kind.
    """

    def __init__(self, tokenizer: Tokenizer):
        vocabulary = tokenizer.vocabulary()
        added = tokenizer.backend.get_added_tokens_decoder()
        alphabet = {letter: bytes([byte]) for letter, byte in BYTE_LETTERS.items()}
        single = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}
        names = {number: token for token, number in vocabulary.items()}
        spelled = "".join(names.get(number, "") for number in tokenizer.encode(_THREE_BYTES, special=False))
        byte_level = b"".join([alphabet.get(c, b"") for c in spelled]).endswith(_THREE_BYTES.encode())
        if not byte_level and single.keys().isdisjoint(vocabulary):
            raise DrafterError("it has no tokens for single bytes, so there are texts that it cannot write")
        self.tokenizer = tokenizer
        self.bytes = [b""] * (1 + max(vocabulary.values()))
        """For each token, its text."""
        for token, number in vocabulary.items():
            if number in added:
                self.bytes[number] = added[number].content.encode()
            elif byte_level:
                self.bytes[number] = b"".join([alphabet.get(c, c.encode()) for c in token])
            else:
                self.bytes[number] = single.get(token, token.replace(_SPACE, " ").encode())
        self.special = {self.bytes[number]: number for number, token in added.items() if token.special}
        """Control tokens, by the text that is written for them."""
        special, spelt = set(self.special.values()), set(map(vocabulary.get, single))
        plain = sorted(set(vocabulary.values()) - special, key=lambda number: (number not in spelt, number))
        self.ids = {self.bytes[number]: number for number in plain if self.bytes[number]}
        """All other tokens, by text. If two have the same text, the one that is not written as a byte."""
        self._longest = max(map(len, self.ids))
        self._unwritten = bytes(set(range(256)).difference(b"".join(self.ids)))
        text = tokenizer.encode("a", special=False)
        self.first = [*takewhile(lambda number: number not in text, tokenizer.encode("a"))]
        """Control tokens that the tokenizer puts before a text."""

    def join(self, ids: Sequence[int]) -> bytes:
        """Return the text of tokens. A token that the tokenizer does not have adds nothing."""
        return b"".join([self.bytes[number] for number in ids if number < len(self.bytes)])

    def encode(self, text: bytes) -> list[int]:
        """Return tokens with exactly this text, cut as the tokenizer cuts it.

        Bytes that are not UTF-8 are written with the longest tokens that fit. So is text that the tokenizer
        would change. Bytes that no token has are left out.
        """
        ids: list[int] = []
        text = text.translate(None, self._unwritten)
        while text:
            try:
                valid, broken, left = text.decode(), b"", b""
            except UnicodeDecodeError as error:
                valid, broken = text[: error.start].decode(), text[error.start : error.end]
                left = text[error.end :]
            ids += self._encode(valid) + self.spell(broken)
            text = left
        return ids

    def is_usual(self, ids: Sequence[int]) -> bool:
        """Return whether the tokenizer itself cuts the text of `ids` into `ids`. Sampled ones may not be."""
        inside = sum(1 for _ in takewhile(lambda number: continues_character(self.join([number])), ids))
        return self.encode(self.join(ids[inside:])) == ids[inside:]

    def token(self, text: bytes, special: bool) -> int | None:
        """Return the token with exactly this text, among control tokens or among the others."""
        return (self.special if special else self.ids).get(text)

    def _encode(self, text: str) -> list[int]:
        """Return tokens with exactly this text, as the tokenizer cuts it if it does not change the text."""
        ids, wanted = self.tokenizer.encode(text, special=False), text.encode()
        written = self.join(ids)
        if written == wanted:
            return ids
        if written == b" " + wanted:  # some tokenizers put a space before any text
            return self.spell(self.bytes[ids[0]][1:]) + ids[1:]
        return self.spell(wanted)

    def spell(self, text: bytes) -> list[int]:
        """Write any bytes: take the longest token that fits, again and again; skip a byte where none does."""
        ids: list[int] = []
        at = 0
        while at < len(text):
            ends = range(min(at + self._longest, len(text)), at, -1)
            end = next((end for end in ends if text[at:end] in self.ids), None)
            ids += [] if end is None else [self.ids[text[at:end]]]
            at = end or at + 1
        return ids


class Translation:
    """Translates a draft model's tokens into the target's, and back.

    Raises:
        DrafterError: one of the tokenizers cannot write every text, see `TokenBytes`.
    """

    def __init__(self, draft: Tokenizer, target: Tokenizer):
        self.draft, self.target = TokenBytes(draft), TokenBytes(target)
        self.stands_for = [self._stands_for(number) for number in range(len(self.draft.bytes))]
        """For each of the draft model's tokens, the first of the target's tokens that write it; -1: there is
        none."""

    def write(self, guesses: Sequence[int]) -> list[int]:
        """Return the draft model's tokens `guesses` in the target's tokens.

        Example:
            The draft model's "fox", "es" is written as the target cuts "foxes", for instance "foxes".
        """
        if self.draft.is_usual(guesses):
            return self.target.encode(self.draft.join(guesses))
        return _each(guesses, self.draft, self.target)

    def read(self, own: Sequence[int], before: Sequence[int], new: Sequence[int]) -> list[int]:
        """Return the target's tokens in the draft model's tokens.

        Args:
            own: the last of the draft model's tokens for the text so far.
            before: the last of the target's tokens for the text so far.
            new: the target's tokens after them.

        Returns:
            The tokens that replace `own`. Usually the text of `own` and `new` together, as the draft model's
            tokenizer cuts it. But if the target's cut is unusual, `own`, then each of `new` by itself: an
            unusual cut tells what may come next.
        """
        if self.target.is_usual([*before, *new]):
            return self.draft.encode(self.draft.join(own) + self.target.join(new))
        return [*own, *_each(new, self.target, self.draft)]

    def _stands_for(self, number: int) -> int:
        """Return an entry of `stands_for`. A control token stands for the same control token, or for none."""
        text = self.draft.bytes[number]
        special = number == self.draft.special.get(text)
        same = self.target.token(text, special)
        if same is not None or special:
            return -1 if same is None else same
        first = next(iter(self.target.encode(text)), -1)
        return first if first >= 0 and text.startswith(self.target.bytes[first]) else -1


def _each(ids: Sequence[int], source: TokenBytes, into: TokenBytes) -> list[int]:
    """Translate tokens one by one."""
    written: list[int] = []
    for number in ids:
        text = source.join([number])
        same = into.token(text, number == source.special.get(text))
        written += into.encode(text) if same is None else [same]
    return written


def continues_character(text: bytes) -> bool:
    """Return whether a token's text begins inside of a UTF-8 character."""
    return text[:1] != b"" and text[0] & 0xC0 == 0x80
