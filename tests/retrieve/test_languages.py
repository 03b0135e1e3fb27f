"""Sentences are told from each other and from code, tables and names; by texts that are none of the lists'."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path

import pytest

from blendserve.core import Document
from blendserve.retrieve import Embedder, TokenCounter, VectorIndex, languages
from blendserve.retrieve.demo_corpus import language_reference
from blendserve.retrieve.languages import language_of, other_languages
from tests.retrieve.conftest import words
from tests.support import corpus_files

SENTENCES = {
    "German": "Die Pumpe muss einmal im Monat geölt werden, und der Behälter ist vor dem Öffnen zu leeren.",
    "French": "Les mesures sont prises chaque matin par une équipe qui note aussi la température dans le cahier.",
    "Spanish": "El depósito se llena por la noche y hay que cerrar la válvula para que no se pierda agua.",
    "Italian": "La porta del magazzino non si apre con la chiave che è stata consegnata alla portineria.",
    "Portuguese": "A bomba não funciona quando a água do poço está baixa, como foi dito na reunião.",
    "Dutch": "De pomp moet elke maand met olie worden gesmeerd en het vat is voor het openen te legen.",
    "Polish": "Zbiornik jest napełniany w nocy i trzeba zamknąć zawór, żeby nie tracić wody przez szczeliny.",
    "Swedish": "Pumpen måste smörjas varje månad och det är viktigt att tanken töms för att inte ta skada.",
    "Turkish": "Depo her gece doldurulur ve su kaybı olmaması için vana çok dikkatli bir şekilde kapatılır.",
    "Vietnamese": "Máy bơm phải được tra dầu mỗi tháng và bể chứa không được mở trong những ngày mưa.",
    "Russian or another in Cyrillic": "Насос нужно смазывать каждый месяц, а перед открытием бак следует опорожнить.",
    "Greek": "Η αντλία πρέπει να λιπαίνεται κάθε μήνα.",
    "Arabic or Persian": "يجب تشحيم المضخة كل شهر.",
    "Hindi or another of India": "पंप में हर महीने तेल डालना चाहिए।",
    "Korean": "펌프에는 매달 기름을 쳐야 합니다.",
    "Japanese": "ポンプには毎月油を差す必要があります。",
    "Chinese": corpus_files.CHINESE,
    "English": "The pump has to be oiled once a month, and the tank is emptied before it is opened.",
}
NAMES = [
    "María de la Cruz, Juan de los Santos, Carmen del Río, San José, Los Angeles, Las Palmas",
    "Ludwig van Beethoven; Johann Wolfgang von Goethe; Rembrandt van Rijn; Otto von der Heide",
    "id,city,price\n1,Le Mans,12\n2,La Paz,7\n3,El Paso,9\n4,Den Haag,30\n5,Das Kapital,8",
    "Müller GmbH | Straße 5 | 80331 München\nGarçon SA | Rue Élysée 3 | 75008 Paris",
    "E = m c², α + β ≤ γ; µ = 3 µm",
]


@pytest.mark.parametrize("name", SENTENCES)
def test_a_sentence_is_in_its_language(name: str) -> None:
    assert language_of(SENTENCES[name]) == name


def test_code_tables_and_names_are_in_no_other_language() -> None:
    code = [inspect.getsource(module) for module in (corpus_files, languages, inspect, logging)]
    pieces = [text[at : at + 1500] for text in code for at in range(0, len(text), 1500)]
    lists = "FREQUENT = {"
    found = [(language_of(text), text) for text in [*NAMES, *pieces] if lists not in text]
    assert not [each for each in found if each[0] not in ("", "English")]
    assert not other_languages(document.text for document in language_reference())
    assert not other_languages(corpus_files.texts())


def test_shares_are_of_all_characters() -> None:
    german, french, table = SENTENCES["German"], SENTENCES["French"], "1,2,3\n" * 50
    found = other_languages([german, french, french, table, SENTENCES["English"]])
    total = len(german) + 2 * len(french) + len(table) + len(SENTENCES["English"])
    assert list(found) == ["French", "German"]
    assert found == pytest.approx({"French": 2 * len(french) / total, "German": len(german) / total})
    assert other_languages([]) == {}


def test_who_adds_other_languages_to_an_index_of_the_bundled_embedder_is_warned(
    embedder: Embedder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    index = VectorIndex.create(tmp_path, embedder, TokenCounter("tiny", "abcdefghij", words), chunk_tokens=99)
    index.add([SENTENCES["English"], Document("x = [i for i in range(9)]", id="code.py")])
    assert not caplog.records
    index.add([SENTENCES["English"], SENTENCES["German"]])
    (record,) = caplog.records
    assert "100% German" in record.getMessage()  # allow: of what is new, this language's share
    index.add([SENTENCES["German"]])
    assert len(caplog.records) == 1, "it is no new document"
