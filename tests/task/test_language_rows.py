"""Rows of language models: every token is predicted once, chats by their answers, packed or not."""

import copy

import pytest
import torch
from helpers.hf_runs import config_of, tokenizer, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from sewa_cli.errors import ConfigError, TaskError
from sewa_cli.task import load_task
from sewa_cli.task.ready.batches import Rows, _whole_texts
from sewa_cli.task.ready.language import Language, label_of
from sewa_cli.task.ready.tables import Row

WORDS = tokenizer(brackets=False)
BRACKETS = tokenizer(brackets=True)
START, END = 2, 3  # [CLS] and [SEP]
for one in (WORDS, BRACKETS):
    one.bos_token, one.eos_token = "[CLS]", "[SEP]"

CHAT = (
    "{% for m in messages %}[CLS] {{ m.role }} : {{ m.content }} [SEP]\n{% endfor %}"
    "{% if add_generation_prompt %}[CLS] assistant : {% endif %}"
)
MARKED = (
    "{% for m in messages %}[CLS] {{ m.role }} : {% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }} [SEP]{% endgeneration %}"
    "{% else %}{{ m.content }} [SEP]{% endif %}{% endfor %}"
)
texts = st.lists(st.sampled_from(["return", "the", "object", "with", "a", "None"]))


def rows(*values):
    return [Row(f"rows: row {i}", value) for i, value in enumerate(values, 1)]


def with_template(template):
    words = copy.deepcopy(WORDS)
    words.chat_template = template
    return words


def predicted(examples):
    """The targets, in order."""
    found = [x.targets for x in examples]
    return [target for targets in found for target in targets if target != -100]


def inputs(examples):
    return [token for example in examples for token in example.inputs["input_ids"]]


@settings(max_examples=60)
@given(texts, st.integers(1, 9))
def test_every_token_but_the_first_is_predicted_once_from_the_one_before_it(text, length):
    whole = WORDS(" ".join(text))["input_ids"]
    language = Language(WORDS, length, pack=False)
    examples = language.causal(language.texts(rows({"text": " ".join(text)}), "text"))
    assert predicted(examples) == whole[1:]
    for example in examples:
        ids, targets = example.inputs["input_ids"], example.targets
        assert isinstance(targets, list)
        assert len(ids) <= length
        assert ids[1:] == targets[: len(ids) - 1] or len(whole) < 2
    if len(whole) > 1:
        assert inputs(examples) == whole[:-1]  # none is read twice
        assert len(examples) == -(-(len(whole) - 1) // length)


@settings(max_examples=60)
@given(st.lists(texts, min_size=1, max_size=5), st.integers(1, 9))
def test_packed_rows_hold_all_tokens_with_an_end_after_each_text(several, length):
    joined = [" ".join(text) for text in several]
    stream = [token for text in joined for token in [*WORDS(text)["input_ids"], END]]
    language = Language(WORDS, length, pack=True)
    examples = language.causal(language.texts(rows(*({"text": t} for t in joined)), "text"))
    if len(stream) > 1:
        assert predicted(examples) == stream[1:]
        assert inputs(examples) == stream[:-1]
        assert all(len(x.inputs["input_ids"]) == length for x in examples[:-1])


@settings(max_examples=60)
@given(st.lists(texts, min_size=1, max_size=4), st.integers(3, 9), st.booleans())
def test_masked_rows_have_every_token_once_between_special_ones(several, length, pack):
    joined = [" ".join(text) for text in several]
    bare = [BRACKETS(text, add_special_tokens=False)["input_ids"] for text in joined]
    language = Language(BRACKETS, length, pack)
    examples = language.masked(rows(*({"text": t} for t in joined)), "text", 0.999999, 0)
    for example in examples:
        ids = example.inputs["input_ids"]
        assert (ids[0], ids[-1]) == (START, END)
        assert len(ids) <= length
        assert example.inputs["token_type_ids"] == [0] * len(ids)
    assert predicted(examples) == [token for ids in bare for token in ids]


def test_a_text_that_begins_with_the_tokenizers_own_start_has_one_start():
    language = Language(BRACKETS, 30, pack=False)
    [one, two] = language.texts(rows({"text": "[CLS] return"}, {"text": "return"}), "text")
    assert one == two
    assert one.ids[:2] != [START, START]


messages = st.lists(
    st.tuples(st.sampled_from(["user", "assistant", "system"]), texts), min_size=1, max_size=6
)


@settings(max_examples=60)
@given(messages, st.sampled_from([CHAT, MARKED]))
def test_answers_of_a_chat_are_those_of_a_naive_rendering(chat, template):
    ids = []
    wanted = []
    for role, text in chat:
        head = WORDS(f"[CLS] {role} :", add_special_tokens=False)["input_ids"]
        content = WORDS(f"{' '.join(text)} [SEP]", add_special_tokens=False)["input_ids"]
        ids += head + content
        wanted += [False] * len(head) + [role == "assistant"] * len(content)
    given = [{"role": role, "content": " ".join(text)} for role, text in chat]
    [found] = Language(with_template(template), 99, pack=False).chats(
        rows({"messages": given}), "messages"
    )
    assert found.ids == ids
    if not (chat[0] == ("assistant", []) and template == CHAT):  # where is nothing?
        assert found.wanted == wanted


def test_long_chats_are_cut_and_rows_without_an_answer_are_no_loss():
    chat = [
        {"role": "user", "content": "return the object " * 9},
        {"role": "assistant", "content": "None"},
    ]
    language = Language(with_template(CHAT), 4, pack=False)
    [tokens] = language.chats(rows({"messages": chat}), "messages")
    examples = language.causal([tokens])
    answer = [i for i, w in zip(tokens.ids, tokens.wanted, strict=True) if w]
    assert predicted(examples) == answer
    assert len(examples) <= 2
    assert all(x.number_of_targets for x in examples)


def test_a_prompt_and_its_completion():
    words = with_template(CHAT)
    language = Language(words, 99, pack=False)
    [found] = language.completions(
        rows({"prompt": "return the", "completion": " object"}), "prompt", "completion"
    )
    assert found.ids == [*WORDS("return the object")["input_ids"], END]
    prompt = len(WORDS("return the")["input_ids"])
    assert found.wanted == [i >= prompt for i in range(len(found.ids))]
    # the tokenizer may end texts itself
    [ended] = Language(BRACKETS, 99, pack=False).completions(
        rows({"prompt": "return the", "completion": " object"}), "prompt", "completion"
    )
    assert ended.ids == BRACKETS("return the object")["input_ids"]
    assert ended.wanted[-1]
    assert not ended.wanted[0]


def test_a_prompt_may_be_a_chat_whose_answers_do_not_count():
    before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the"}]
    before += [{"role": "user", "content": "b"}]
    after = [{"role": "assistant", "content": "list"}]
    for template in (CHAT, MARKED):
        language = Language(with_template(template), 99, pack=False)
        row = rows({"prompt": before, "completion": after})
        [found] = language.completions(row, "prompt", "completion")
        answer = [i for i, w in zip(found.ids, found.wanted, strict=True) if w]
        assert answer == WORDS("list [SEP]", add_special_tokens=False)["input_ids"], template


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": "hello"}, "rows: row 1: messages: must be a list of messages, found str"),
        (
            {"messages": [{"role": "user", "content": "a\ud800b"}]},
            "rows: row 1: messages: message 1: is not valid Unicode",
        ),
        ({"messages": [{"role": "user"}]}, "message 1: content: must be text, found nothing"),
        ({"messages": [{"role": 1, "content": "a"}]}, "message 1: role: must be text, found int"),
        ({"text": "a"}, "rows: row 1: no column 'messages'; there are text"),
    ],
)
def test_a_malformed_chat_is_named(row, message):
    with pytest.raises(TaskError) as caught:
        Language(with_template(CHAT), 99, pack=False).chats(rows(row), "messages")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_templates_that_cannot_be_used_are_reported():
    chat = rows(
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "the"},
                {"role": "user", "content": "b"},
            ]
        }
    )
    forgetful = "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }} "
    forgetful += "{% endif %}{% endfor %}"
    for template, message in (
        (
            "{{ raise_exception('no chats') }}",
            "rows: row 1: the chat template refuses it: no chats",
        ),
        ("{{ messages[7].content.no }}", "rows: row 1: the chat template refuses it: "),
        (forgetful, "rows: row 1: the chat template renders message 2 in another way when others"),
    ):
        with pytest.raises(TaskError) as caught:
            Language(with_template(template), 99, pack=False).chats(chat, "messages")
        assert str(caught.value).startswith(message)
    with pytest.raises(TaskError, match="the tokenizer has no chat template"):
        Language(WORDS, 99, pack=False).chats(chat, "messages")


def task_args(folder, **others):
    config_of("causal-lm").save_pretrained(folder)
    with_template(CHAT).save_pretrained(folder)
    return {"kind": "causal-lm", "model": folder, "batch_size": 100, **others}


def test_the_form_of_the_data_is_found_or_named(tmp_path):
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the"}]
    forms = {
        "text": {"text": "return the object", "prompt": "x"},
        "chat": {"messages": chat, "id": 5},
        "pair": {"prompt": "return", "completion": " the object"},
    }
    targets = {}
    for name, row in forms.items():
        write_rows(tmp_path / f"{name}.jsonl", [row] * 2)
        args = task_args(tmp_path / "model", selection=tmp_path / f"{name}.jsonl")
        [batch] = load_task("huggingface", args).selection_data
        targets[name] = int((batch["targets"][0] != -100).sum())
    text = len(WORDS("return the object")["input_ids"])
    answer = len(WORDS("the [SEP]", add_special_tokens=False)["input_ids"])
    assert targets["text"] == text - 1
    assert targets["chat"] == answer
    assert targets["pair"] == text - len(WORDS("return")["input_ids"]) + 1
    write_rows(tmp_path / "talk.jsonl", [{"talk": chat, "text": "no"}])
    args = task_args(tmp_path / "model", selection=tmp_path / "talk.jsonl", messages="talk")
    [batch] = load_task("huggingface", args).selection_data
    assert int((batch["targets"] != -100).sum()) == answer
    with pytest.raises(ConfigError, match="the data are `text`, `messages`, or `prompt` and"):
        load_task("huggingface", args | {"text": "text"})


def test_rows_of_one_text_have_its_label_and_packed_ones_that_of_their_middle():
    several = ["return the object", "a list with the object", "None"]
    ids = [WORDS(text)["input_ids"] for text in several]
    language = Language(WORDS, 2, pack=False)
    examples = language.causal(language.texts(rows(*({"text": t} for t in several)), "text"))
    cut = [label_of(own) for own in ids for _ in range(max(1, -(-(len(own) - 1) // 2)))]
    assert [x.text for x in examples] == cut
    assert len(set(cut)) == 3
    packed = Language(WORDS, 4, pack=True)
    examples = packed.causal(packed.texts(rows(*({"text": t} for t in several)), "text"))
    stream = [label_of(own) for own in ids for _ in [*own, END]]
    targets = [stream[i : i + 4] for i in range(1, len(stream), 4)]
    assert [x.text for x in examples] == [some[len(some) // 2] for some in targets]
    masked = Language(BRACKETS, 5, pack=False).masked(rows({"text": several[1]}), "text", 0.5, 0)
    assert len(masked) > 1
    assert len({x.text for x in masked}) == 1


def test_a_row_has_the_loss_that_transformers_gives_for_max_length_and_one_more_tokens(tmp_path):
    import transformers

    words = [WORDS.decode([token]) for token in range(20, 29)]
    write_rows(tmp_path / "rows.jsonl", [{"text": " ".join(words)}])
    config_of("causal-lm").save_pretrained(tmp_path / "model")
    WORDS.save_pretrained(tmp_path / "model")
    ids = WORDS(" ".join(words), return_tensors="pt")["input_ids"]
    args = {"kind": "causal-lm", "model": str(tmp_path / "model")}
    args |= {"selection": str(tmp_path / "rows.jsonl"), "max_length": ids.shape[1] - 1}
    task = load_task("huggingface", args)
    [batch] = task.selection_data
    assert batch["input_ids"].shape == batch["targets"].shape == (1, ids.shape[1] - 1)
    model = transformers.GPT2LMHeadModel(config_of("causal-lm")).eval()
    with torch.no_grad():
        theirs = float(model(input_ids=ids, labels=ids).loss)
        ours = float(task.loss(task.predict(model, batch), batch))
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert task.groups
    assert task.groups(batch) == [label_of(ids[0].tolist())]


def test_a_part_to_be_scored_never_splits_a_text():
    labels = [[1, 1, 2], [2, *[3] * 40], [3, 4]]
    parts = list(_whole_texts("selection", labels))
    assert parts == [
        [Rows("selection", 0, 0, 3), Rows("selection", 1, 0, 1)],
        [Rows("selection", 1, 1, 41), Rows("selection", 2, 0, 1)],
        [Rows("selection", 2, 1, 2)],
    ]
