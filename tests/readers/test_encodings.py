"""Text of any encoding is read right, or refused by name: never with wrong letters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendserve.readers.base import Unreadable
from blendserve.readers.encodings import decode
from tests.support.corpus_files import CHINESE, FRENCH, GERMAN

TEXTS = {  # encodings -> text in a language that is written in them
    "cp1252 latin-1": FRENCH,
    "cp1252": GERMAN,
    "cp1250 iso8859-2": "Pompa tłoczy wodę ze studni. Należy sprawdzać uszczelkę co miesiąc i smarować łożysko.\n",
    "cp1250": "A szivattyú minden nap vizet szállít a kútból. Őrizze meg a működési útmutatót, gyűrűt is.\n",
    "cp1254": "Pompa her gün kuyudan depoya su taşır. Contayı her ay kontrol edin ve yatağı yağlayın.\n",
    "koi8-r cp1251 cp866": "Насос перекачивает воду из колодца в бак. Проверяйте прокладку каждый месяц.\n",
    "koi8-u": "Насос перекачує воду з криниці в бак щодня. Перевіряйте прокладку щомісяця.\n",
    "cp1253 iso8859-7": "Η αντλία μεταφέρει νερό από το πηγάδι στη δεξαμενή κάθε μέρα.\n",
    "cp1255": "המשאבה מעבירה מים מהבאר למיכל כל יום. בדקו את האטם בכל חודש.\n",
    "cp1256 iso8859-6": "تنقل المضخة الماء من البئر إلى الخزان كل يوم. افحص الحشية كل شهر.\n",
    "gb18030 utf-16 utf-32": CHINESE,
    "big5": "水泵把水從井裡抽到水箱裡。每個月都需要給水泵加油。請注意安全，不要在雨天打開電箱。\n",
    "euc-jp cp932 iso2022-jp": "ポンプは井戸から水をくみ上げてタンクに送ります。毎月油をさしてください。\n",
    "cp949 euc-kr": "펌프는 우물에서 물을 끌어올려 탱크로 보냅니다. 매달 기름을 넣어 주십시오.\n",
}
ENCODED = [(text, encoding) for names, text in TEXTS.items() for encoding in names.split()]
UNKNOWN = [(FRENCH, "cp850"), (FRENCH, "mac-roman"), ("ปั๊มสูบน้ำจากบ่อน้ำไปยังถังทุกวัน ตรวจสอบทุกเดือน", "cp874")]


@pytest.mark.parametrize(("text", "encoding"), [*ENCODED, ("café", "latin-1")])
@pytest.mark.parametrize("frame", ["{}", "{}" * 40, "# English comment\n" * 40_000 + "x = 1  # {}"])
def test_text_in_other_encodings_is_read_and_its_encoding_is_named(
    text: str, encoding: str, frame: str
) -> None:
    whole = frame.replace("{}", text)
    found, named = decode(whole.encode(encoding))
    assert found == whole
    assert named


@pytest.mark.parametrize(("text", "encoding"), UNKNOWN)
def test_text_in_unknown_encodings_is_refused(text: str, encoding: str) -> None:
    with pytest.raises(Unreadable):
        decode(text.encode(encoding))


@given(st.sampled_from(ENCODED), st.data())
def test_a_part_of_a_text_is_read_right_or_refused(case: tuple[str, str], data: st.DataObject) -> None:
    text, encoding = case
    start = data.draw(st.integers(0, len(text) - 4))
    part = text[start : data.draw(st.integers(start + 4, len(text)))]
    try:
        assert decode(part.encode(encoding))[0] == part
    except Unreadable:
        assert part != text  # which is long enough


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\x1b"), min_size=1), st.data())
def test_utf8_text_is_never_taken_for_another_encoding(text: str, data: st.DataObject) -> None:
    """Also where it was cut, or a byte is wrong: then it is refused."""
    assert decode(b"\xef\xbb\xbf" + text.encode())[0] == text
    letters = CHINESE.encode() + text.encode()
    at = data.draw(st.integers(7, len(letters)))  # after two whole characters
    for damaged in (letters[:at], letters[:at] + b"\xff" + letters[at:]):
        try:
            found = decode(damaged)
        except Unreadable:
            continue
        assert found == (damaged.decode(), "")
