"""Measure what chats over an index search for: at small talk, and at questions that refer to the ones before.

    python -m scripts.compare_chats ARTICLES [--rewrite]

ARTICLES: JSON of SQuAD's articles Normans, Computational_complexity_theory, Southern_California, Sky_(United_Kingdom) and
Victoria_(Australia): [{"title", "paragraphs": [{"context", "qas": [{"question", "answers"}]}]}]. Prints how many
questions, how many of those whose paragraph is found, and how many lines of SMALL_TALK are below a score; then how often
the paragraph of a FOLLOW_UP, and of a NEW_TOPIC, is among six passages by each query. --rewrite: also by a query that
SmolLM2 writes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from blendserve.config import Config
from blendserve.core import Document, Passage
from blendserve.engine.chat import Chat
from blendserve.engine.engine import Engine
from blendserve.engine.request import Request, follow_up, in_turns
from blendserve.retrieve import Embedder, VectorIndex
from scripts.compare_retrieval import CHUNK_TOKENS, TOKENS, K

SCORES = (0.1, 0.2, 0.3, 0.4)
ASKED = 300  # questions
SMALL_TALK = """
Thanks, bye!
Hello
Hi, how are you?
Good morning
Thank you very much, that was helpful.
OK, great
What can you do?
Who are you?
Tell me a joke
Write a poem about spring
What is 2 + 2?
Translate "good evening" into French
Write a Python function that reverses a string
No, that is wrong
Can you say that again in simpler words?
Please shorten your last answer.
Why?
Go on
Sorry, I meant the other one
Yes please
That's all for today
lol
How is the weather today?
I am tired
What should I cook tonight?
Give me three names for a cat
Convert 10 miles to kilometres
Fix the grammar: he go to school
See you tomorrow
Nice to meet you
""".strip().splitlines()
# the question before, the follow-up, the question of the articles that it means
FOLLOW_UPS = [
    (
        "In what country is Normandy located?",
        "And when were the Normans there?",
        "When were the Normans in Normandy?",
    ),
    (
        "When did Herve serve as a Byzantine general?",
        "Who was fighting the Turks after him?",
        "When did Robert Crispin go up against the Turks?",
    ),
    (
        "Who was Robert's son?",
        "By what river did they fight?",
        "What river was Petrela located by?",
    ),
    (
        "When was the Battle of Hastings?",
        "Who died there?",
        "Where did Harold II die?",
    ),
    (
        "When did the Siege of Antioch take place?",
        "What was his nephew called who took part?",
        "What was the name of Bohemond's nephew?",
    ),
    (
        "What architecture type came after Norman in England?",
        "And what came before it?",
        "What architecture type came before Norman in England?",
    ),
    (
        "What is the most commonplace model utilized in complexity theory?",
        "What other kind of it checks several possibilities at once?",
        "What type of Turing machine can be characterized by checking multiple possibilities at the same time?",
    ),
    (
        "By how many kilometers does the traveling salesman problem seek to classify a route "
        "between the 15 largest cities in Germany?",
        "What type of problem is it an example of?",
        "The traveling salesman problem is an example of what type of problem?",
    ),
    (
        "What paper is commonly considered the bellwether ushering in systematic studies computational complexity?",
        "Who wrote it?",
        'What individuals were responsible for authoring "On the Computational Complexity of Algorithms"?',
    ),
    (
        "What is the problem attributed to defining if two finite graphs are isomorphic?",
        "Which class does it probably not belong to?",
        "What class is most commonly not ascribed to the graph isomorphism problem in spite of definitive determination?",
    ),
    (
        "What is Southern California often abbreviated as?",
        "How many counties does it have?",
        'Despite being traditionall described as "eight counties", how many counties does this region actually have?',
    ),
    (
        "What is the population of Los Angeles?",
        "Is it the largest in the state?",
        "Which city is the most populous in California?",
    ),
    (
        "What is the name of the desert city?",
        "In which region of the state is it?",
        "Which region of California is Palm Springs located in?",
    ),
    (
        "Which newspaper defined southern California?",
        "When did it do that?",
        "In which year did the newspaper define southern California?",
    ),
    (
        "What kind of climate does southern California maintain?",
        "How cold does it get in summer there?",
        "What is the low end of the temperature range in summer?",
    ),
    (
        "What is the name of the commuter rail system?",
        "How many lines does it have?",
        "How many lines does the commuter rail system have?",
    ),
    (
        "Which team was suspended from the MLS?",
        "In what year was that?",
        "Which year resulted in the suspension of one of the two soccer teams?",
    ),
    (
        "What year did BSkyB acquire Sky Italia?",
        "Who formed the company itself, by which merger?",
        "What company was formed by the merger of Sky Television and British Satellite Broadcasting?",
    ),
    (
        "What is the name of the TV scrambling system BSkyB uses?",
        "Who owns it?",
        "Who is VideoGuard owned by?",
    ),
    (
        "When did BSkyB launch it's HDTV service?",
        "How many people had signed up for it before?",
        "How many people were registered to receive the HD service prior to launch?",
    ),
    (
        "Who does BSkyB have an operating license from?",
        "What fees does it take for its programme guide?",
        "what is the fee range for accessing BSkyB's EPG?",
    ),
    (
        "What did Alec Shelbrooke propose payments of benefits to be made on?",
        "What can be bought with the American one?",
        "What could the Supplemental Nutrition Assistance Program purchase?",
    ),
    (
        "What percentage of Victorians are Christian?",
        "How many of them are Catholic?",
        "How many Victorians are Catholic?",
    ),
    (
        "When did Victoria enact its constitution?",
        "Who can amend it?",
        "What group can amend the Victorian constitution?",
    ),
    (
        "How high are Victoria's alpine regions?",
        "And what is the highest peak?",
        "What is the highest peak in Victoria?",
    ),
    (
        "On what date was Victoria declared independent from New South Wales?",
        "When was gold found there?",
        "When was gold found near Ballarat?",
    ),
    (
        "When was the colony of New South Wales founded?",
        "What was its eastern half called?",
        "What was the name of the eastern half of the colony of 1788?",
    ),
    (
        "What part do events in Victoria's economy  play?",
        "What else attracts tourists there?",
        "Besides cultural events, what other tourist attraction does Victoria have?",
    ),
]
# the question before, the next one
NEW_TOPICS = [
    (
        "In what country is Normandy located?",
        "What is the name of the TV scrambling system BSkyB uses?",
    ),
    (
        "When was the Battle of Hastings?",
        "How many Victorians are Catholic?",
    ),
    (
        "What is the population of Los Angeles?",
        'What culture\'s arrival in Scotland is know as the "Davidian Revolution"?',
    ),
    (
        "When was gold found near Ballarat?",
        "When did BSkyB launch it's HDTV service?",
    ),
    (
        "Who is VideoGuard owned by?",
        "Where did Harold II die?",
    ),
    (
        "How high is Victoria's Mount Bogong?",
        "What lies between L and P that prevents a definitive determination of the relationship between L and P?",
    ),
    (
        "What is the most commonplace model utilized in complexity theory?",
        "Who did Alexander I marry?",
    ),
    (
        "What is the name of the commuter rail system?",
        "What kind of economy does Victoria have?",
    ),
    (
        "What paper is commonly considered the bellwether ushering in systematic studies computational complexity?",
        "What is the highest peak in Victoria?",
    ),
    (
        "What company was formed by the merger of Sky Television and British Satellite Broadcasting?",
        "What is the population of Los Angeles?",
    ),
    (
        "What type of Turing machine can be characterized by checking multiple possibilities at the same time?",
        "What architecture type came before Norman in England?",
    ),
    (
        "What major conquest did Tancred play a roll in?",
        "What variable is associated with all problems solved within logarithmic space?",
    ),
]
EXAMPLES = (
    ("Who founded Rome?\nRomulus.\nWhen did he die?", "When did Romulus die?"),
    ("What is the capital of France?\nParis.\nHow tall is Mont Blanc?", "How tall is Mont Blanc?"),
)
TASK = (
    "Rewrite the last question so that it can be understood alone. Put the names that it refers to in place of words "
    "like it, he, there. Answer with the question only."
)
Find = Callable[[str, str], Sequence[Passage]]
"""(question before, question) -> passages"""


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("articles", type=Path)
    parser.add_argument("--rewrite", action="store_true")
    options = parser.parse_args()
    paragraphs = [
        (Document(each["context"], article["title"]), each["qas"])
        for article in json.loads(options.articles.read_text())
        for each in article["paragraphs"]
    ]
    answers = {ask["question"].strip(): ask["answers"] for _, asks in paragraphs for ask in asks}
    texts = {ask["question"].strip(): text.text for text, asks in paragraphs for ask in asks}
    with tempfile.TemporaryDirectory() as folder:
        documents = [document for document, _ in paragraphs]
        index = VectorIndex.build(folder, Embedder.load(), TOKENS, documents, chunk_tokens=CHUNK_TOKENS)
        questions = [*texts][:: max(1, len(texts) // ASKED)]
        for line in below(index, questions, texts):
            print(line)
        ways: dict[str, Find] = {
            "the message alone": lambda before, question: index.search(question, K),
            "both in one": lambda before, question: index.search(f"{before} {question}", K),
            "in turns (served)": lambda before, question: in_turns(
                [index.search(query, K) for query in follow_up([before, question])], K
            ),
        }
        if options.rewrite:
            engine = Engine.open(Config())
            ways["written by SmolLM2"] = lambda before, question: index.search(
                rewritten(engine, before, next(iter(answers[before.strip()]), ""), question) or question, K
            )
        changes = [(before, question, question) for before, question in NEW_TOPICS]
        for name, find in ways.items():
            found = [hits(find, cases, texts) for cases in (FOLLOW_UPS, changes)]
            print(
                f"{name:<20} follow-ups {found[0]} of {len(FOLLOW_UPS)}, new topics {found[1]} of {len(changes)}"
            )


def below(index: VectorIndex, questions: Sequence[str], texts: dict[str, str]) -> Iterator[str]:
    """A line for each score: how much has no passage of that similarity."""
    asked = [(index.search(question, K), texts[question]) for question in questions]
    best = [(max(p.score or 0 for p in found), any(same(p, text) for p in found)) for found, text in asked]
    talk = [max(p.score or 0 for p in index.search(text, K)) for text in SMALL_TALK]
    for score in SCORES:
        lost = sum(is_hit and value < score for value, is_hit in best)
        n_below, n_talk = sum(value < score for value, _ in best), sum(value < score for value in talk)
        yield (
            f"below {score}: {n_below} of {len(best)} questions, {lost} of their {sum(h for _, h in best)} hits, "
            f"{n_talk} of {len(talk)} lines of small talk"
        )


def hits(find: Find, cases: Sequence[tuple[str, str, str]], texts: dict[str, str]) -> int:
    """How many cases find the paragraph that they ask for."""
    return sum(
        any(same(passage, texts[meant.strip()]) for passage in find(before, question))
        for before, question, meant in cases
    )


def same(passage: Passage, text: str) -> bool:
    """Whether a passage is of this paragraph."""
    return passage.text.strip() in text


def rewritten(engine: Engine, before: str, answer: str, question: str) -> str:
    """The question as the model writes it, so that it can be understood alone."""
    messages = [{"role": "system", "content": TASK}]
    for asked, written in EXAMPLES:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": written}]
    messages.append({"role": "user", "content": f"{before}\n{answer}\n{question}"})
    request = Request(question, plain=Chat(tuple(messages)), decode={"max_new_tokens": 40})
    return engine.run(engine.prepare(request)).answer().text.strip().partition("\n")[0]


if __name__ == "__main__":
    main()
