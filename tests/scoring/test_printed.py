"""What may be read as a score in a command's output, and what is refused."""

import re

import pytest

from sewa_cli.scoring.printed import Record, mean_scores, read_printed


@pytest.mark.parametrize(
    "text",
    [
        "12.5",
        "decoding\n12.5\n",
        "12.5 %",
        "WER 12.5",
        "wer=12.5",
        "  wer: 12.5%",
        "%WER 12.5 [ 125 / 1000, 5 ins, 2 del ]",
        "cer 3.1\nepoch 7\nwer 12.5\ndone",
        "wer 12.50\nwer 12.5",
        '{"WER": 12.5, "cer": 3}',
        '{\n "wer": 12.5\n}',
        'loading\n{"wer": 1.25e1}\n',
        'loading\n{\n "wer": 12.5,\n "more": {\n  "cer": 3\n }\n}\ndone',
        "\x1b[32mWER\x1b[0m: \x1b[1;31m12.5\x1b[0m %",
        "wer4 3\nwer-7 4\ncomputing wer\n3000 utterances\nwer 12.5",
    ],
)
def test_one_number_is_the_score(text):
    [found] = read_printed(text, "wer")
    assert (found.id, found.scores["wer"], found.weight) == (None, 12.5, 1.0)


def test_a_regular_expression_finds_the_number():
    text = "test-clean: WER 12.5\ntest-other: WER 20\n"
    assert read_printed(text, "wer", re.compile(r"clean: WER (\S+)"))[0].scores == {"wer": 12.5}
    with pytest.raises(ValueError, match="several numbers"):
        read_printed(text, "wer", re.compile(r"WER (\S+)"))
    with pytest.raises(ValueError, match="nothing matches"):
        read_printed(text, "wer", re.compile(r"CER (\S+)"))


def test_lines_with_an_id_are_units_whose_weights_make_a_ratio():
    """Errors by words: 1 of 2 and 3 of 8 are 4 of 10."""
    records = read_printed(
        '{"id": "a", "wer": 50, "weight": 2}\nlog\n{"id": "b", "wer": 37.5, "weight": 8}', "wer"
    )
    assert records == [Record("a", {"wer": 50}, 2), Record("b", {"wer": 37.5}, 8)]
    assert mean_scores(records) == {"wer": 40}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it prints nothing"),
        ("decoded 12 files", "no number named wer; its last line: decoded 12 files"),
        ("wer 12.5\nwer 13", "several numbers for wer (12.5, 13)"),
        ("12.5\n13", "several numbers for wer (12.5, 13)"),
        ("wer 1,234.5", "no number named wer"),
        ("wer 123/1000", "no number named wer"),
        ("wer nan", "its wer is nan"),
        ("inf", "its wer is inf"),
        ('{"wer": NaN}', "is nan"),
        ('{"cer": 3}', "it prints cer, not wer"),
        ('{"wer": "high"}', "no number, not wer"),
        ('{"id": 1, "wer": 3}\n{"id": 1, "wer": 4}', "two records of 1 that differ"),
        ('{"id": 1, "wer": 3}\n{"id": 2, "we', "line 2 is not a JSON object"),
        ('{"wer": 3}\n{"wer": 4}', "2 objects without an id"),
        ('{"id": 1, "wer": 3} {"id": 2, "wer": 3}', "line 1 is not a JSON object"),
        ('{"a":' * 10**5, "line 1 is not a JSON object"),
        ('{"wer": 1' + 400 * "0" + "}", "it prints int too large"),
        ('{"id": 1, "wer": 3, "weight": "12"}', "weight of 1 is 3.0, nan"),
        ('{"id": 1, "wer": 3, "weight": 0}', "all weights are 0"),
        ('{"id": 1, "wer": 3, "weight": -1}', "the wer or weight of 1 is 3.0, -1"),
    ],
)
def test_what_is_no_score(text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        read_printed(text, "wer")
