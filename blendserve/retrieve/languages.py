"""Detects texts in other languages than English, by letters and frequent words.

A text is in the script of most of its letters. One in Latin letters is in the language whose frequent words it has most,
if these are many and different, as they are in sentences. Code, tables and names have few: they are in no language.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

MULTILINGUAL = "sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2"
SHOWN = 3  # languages that a warning names
PIECE = 2000  # characters of a text that are in one language
NOTED = 0.05  # share of a corpus in other languages
LEAST_SHARE = 0.12  # of a text's words that are frequent ones; in sentences it is a quarter or more
LEAST_WORDS = 3  # different ones
WORD = re.compile(r"[^\W\d_]+")

SCRIPTS = {
    "Russian or another in Cyrillic": "\u0400-\u052f",
    "Greek": "\u0370-\u03ff\u1f00-\u1fff",
    "Arabic or Persian": "\u0600-\u06ff\u0750-\u077f\ufb50-\ufdff\ufe70-\ufeff",
    "Hebrew": "\u0590-\u05ff",
    "Hindi or another of India": "\u0900-\u0dff",
    "Thai": "\u0e00-\u0e7f",
    "Korean": "\u1100-\u11ff\uac00-\ud7af",
    "Japanese": "\u3040-\u30ff",
    "Chinese": "\u3400-\u9fff\U00020000-\U0003ffff",
}
LETTERS = {name: re.compile(f"[{letters}]") for name, letters in SCRIPTS.items()}
KANA_SHARE = 0.1  # of the letters of Japanese, among those of Chinese
# Frequent words. Those of names (de, la, van, von), of code and of English are left out.
FREQUENT = {
    "English": "the of and that was with are this from which his her have were their been has its they when you can",
    "German": "der das und ist nicht ein eine einen mit auf für dem des sich im zu wird werden sind auch oder bei wie",
    "French": "les des et est une dans pour que qui sur avec pas ce par au aux sont cette nous vous mais plus être il",
    "Spanish": "y es una un en por que con para se su como más pero este esta son lo sus hay muy cuando también",
    "Italian": "è che un una per con non della dei delle nel alla sono anche questo questa come più si gli ed ha viene",
    "Portuguese": "e é um uma que não por com para do da dos das na no mais como ao são foi pelo pela também ou",
    "Dutch": "het een en is dat niet op te zijn met voor aan er om ook als bij door naar deze wordt worden uit",
    "Polish": "i w na z się nie jest że jak przez od są oraz po ale który która dla lub być",
    "Swedish": "och att det som en på är av för ett med inte om den har till kan från eller",
    "Danish or Norwegian": "og det er til af av på som ikke med en et den har kan fra eller også blir bliver",
    "Czech or Slovak": "se je že jako pro který která nebo jsou není byl ale při také sa nie ktorý alebo sú",
    "Hungarian": "az és hogy nem egy van meg is ez csak vagy mint volt kell",
    "Romanian": "și în este cu care pe nu din mai sau pentru sunt fi ca ale prin",
    "Finnish": "ja on ei että se ovat oli mutta kun myös tai joka ole voi",
    "Turkish": "ve bir bu için ile olarak olan çok gibi daha değil veya ancak sonra kadar her",
    "Vietnamese": "và của là có trong được cho không một các với những này người khi đã",
    "Indonesian or Malay": "yang dan dengan untuk dari ini dalam pada adalah tidak itu akan oleh dapat atau",
}
LANGUAGES = {name: frozenset(words.split()) for name, words in FREQUENT.items()}


def other_languages(texts: Iterable[str]) -> dict[str, float]:
    """Return each other language's share of all characters, the largest first."""
    counts = Counter[str]()
    for text in texts:
        for at in range(0, len(text), PIECE):
            piece = text[at : at + PIECE]
            counts[language_of(piece)] += len(piece)
    total = max(1, counts.total())
    return {name: n / total for name, n in counts.most_common() if name not in ("", "English")}


def warning(texts: Iterable[str], embedder: str) -> str:
    """Return a warning about texts that an English embedder cannot read; "" if nearly none are in other languages."""
    found = other_languages(texts)
    if sum(found.values()) < NOTED:
        return ""
    shares = ", ".join(f"{share:.0%} {name}" for name, share in [*found.items()][:SHOWN])
    return (
        f"the text is {shares}: the embedder {embedder} reads English, so search finds other languages by words "
        f"alone; build with `--embedder {MULTILINGUAL}`"
    )


def language_of(text: str) -> str:
    """Return the language of some sentences; "" for code, tables and names."""
    words = [word.casefold() for word in WORD.findall(text)]
    script = "" if text.isascii() else _script("".join(words))
    if script:
        return script
    counts = {name: [word for word in words if word in frequent] for name, frequent in LANGUAGES.items()}
    first, second = sorted(counts, key=lambda name: -len(counts[name]))[:2]
    most = counts[first]
    is_clear = len(most) > len(counts[second]) and len({*most}) >= LEAST_WORDS
    return first if is_clear and len(most) >= LEAST_SHARE * len(words) else ""


def _script(letters: str) -> str:
    """Return the language whose script has more than half of the letters; "" for Latin letters."""
    counts = {name: len(pattern.findall(letters)) for name, pattern in LETTERS.items()}
    if counts["Japanese"] >= KANA_SHARE * (counts["Japanese"] + counts["Chinese"]):
        counts["Japanese"] += counts["Chinese"]
    first = max(counts, key=lambda name: counts[name])
    return first if 2 * counts[first] > len(letters) else ""
