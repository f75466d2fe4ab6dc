"""Names as people read them: whatever is in them, they stay on their line and in their cell."""

import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from sewa_cli.text import code, markdown, shown, shown_lines

ANY = st.text(st.characters())  # lone surrogates as well, as names that are not UTF-8 have them
PLAIN = st.text(st.characters(exclude_categories=["Cc", "Cf", "Cs", "Zl", "Zp"]))


@given(ANY)
@example("a\x1b[2Jb\x9b2J\x7f")
@example("\r\n\v\f\x1c\x85\u2028\u2029")
@example("\u202e\u2066\u200e\ufeff\u00ad\U000e0041")
def test_what_is_shown_is_one_line_that_moves_no_cursor_and_turns_no_text(text):
    line = shown(text)
    assert len(line.splitlines()) <= 1
    kinds = {unicodedata.category(c) for c in line if c not in "\u200c\u200d"}
    assert kinds.isdisjoint({"Cc", "Cf", "Cs", "Zl", "Zp"})
    line.encode()  # it can be written
    assert shown(line) == line


@given(PLAIN)
@example("C:\\runs\\1")
@example("می\u200cخواهم 👩\u200d🔬 क्\u200dष")
@example("naïve 模型　v2")
def test_a_name_that_does_no_harm_is_shown_as_it_is(text):
    assert shown(text) == text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("a\nerror: forged", r"a\nerror: forged"),
        ("a\tb\rc\0", r"a\tb\rc\x00"),
        ("\u202egpj.exe", r"\u202egpj.exe"),
        ("\udcff", r"\udcff"),
        ("\x9b\x7f", r"\x9b\x7f"),
        ("\U000e0041", r"\U000e0041"),
    ],
)
def test_what_does_harm_can_be_seen(name, expected):
    assert shown(name) == expected


@given(ANY)
def test_a_text_of_several_lines_keeps_them_and_no_more(text):
    lines = shown_lines(text).split("\n")
    assert lines == [shown(line) for line in text.split("\n")]


@given(ANY, st.integers(10, 100))
def test_what_is_too_long_keeps_both_its_ends(text, most):
    whole, cut = shown(text), shown(text, most)
    assert len(cut) <= most
    if len(whole) <= most:
        assert cut == whole
    else:
        begin, end = cut.split(" … ") if " … " not in whole else (cut[:3], cut[-3:])
        assert whole.startswith(begin)
        assert whole.endswith(end)


MARKS = st.text(st.sampled_from("|\\`<>[]()!a \n\r*_~&;:-") | st.characters())


@given(st.lists(MARKS, min_size=1, max_size=4), st.sampled_from([markdown, code]))
@example(["\\", "|", "\\|", "a\\"], markdown)
@example(["`", "`|`", "``"], code)
@example(["![x](http://a.b/c)", "<img src=x>", "[a](b)"], markdown)
def test_a_name_in_markdown_stays_in_its_cell_and_loads_nothing(names, form):
    assert callable(form)
    row = "".join(f"| {form(name)} " for name in names) + "|"
    table = "\n".join(["| x " * len(names) + "|", "|---" * len(names) + "|", row, "", "after"])
    tokens = MarkdownIt("commonmark").enable("table").parse(table)
    assert [t.type for t in tokens].count("td_open") == len(names)
    assert [t.type for t in tokens].count("tr_open") == 2
    inside = {child.type for token in tokens for child in token.children or []}
    assert inside.isdisjoint({"html_inline", "link_open", "image"})


@given(st.text("abcABC019 .:=_-/"))
def test_an_ordinary_name_looks_the_same_in_markdown(name):
    assert markdown(name) == name
    assert code(name) == f"`{name}`"
