"""Numbers of words."""

from collections import Counter
from collections.abc import Iterable, Sequence


class Vocab:
    """Turns lists of words into lists of numbers."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words, self.numbers = list(words), {word: number for number, word in enumerate(words)}
        self.default = 0

    def __len__(self) -> int:
        return len(self.words)

    def __call__(self, tokens: Iterable[str]) -> list[int]:
        return [self.numbers.get(token, self.default) for token in tokens]

    def __getitem__(self, token: str) -> int:
        return self.numbers.get(token, self.default)

    def set_default_index(self, index: int) -> None:
        """The number of words that are not known."""
        self.default = index

    def lookup_tokens(self, indices: Iterable[int]) -> list[str]:
        """The words of numbers."""
        return [self.words[index] for index in indices]


def build_vocab_from_iterator(
    iterator: Iterable[Iterable[str]], min_freq: int = 1, specials: Sequence[str] = (), special_first: bool = True
) -> Vocab:
    """The most frequent words first, after the special ones."""
    counts = Counter(token for tokens in iterator for token in tokens)
    found = sorted((word for word, count in counts.items() if count >= min_freq), key=lambda word: (-counts[word], word))
    return Vocab([*specials, *found] if special_first else [*found, *specials])
